#!/usr/bin/env python3
"""Decode of a model over TLS, compared with the same server's address without TLS, and the same client (examples/generate).

Each round runs the client once at each address, in alternating order. Prints the median ratio of the rounds (TLS / plain, in
speed) with its 95 % confidence interval from order statistics. With --check, exits with status 1 if the median is below 0.97 or
the interval is entirely below 0.98. Rates of transfers, memory and handshakes: `cargo bench -p fanout --bench tls`.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from common import ROOT, Bound, Interval, finish, prompt_tokens, rotated, warn_if_busy

from clients import Model  # isort: skip
from servers import Server, ServerError  # isort: skip

SIDES = ("plain", "tls")
LEAST_MEDIAN, LEAST_REACH = 0.97, 0.98
CLIENT_S = 600.0


def keygen(server: Path, file: Path) -> str:
    """Write a new key, and return its public part."""
    out = subprocess.run([server, "keygen", file], check=True, capture_output=True, text=True).stdout
    return re.search(r"ed25519:\S+", out)[0]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--built", type=Path, default=ROOT / "target/release", help="folder of rpc-server and generate")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the server")
    p.add_argument("--size", default="1b", help="a size of make_model.py")
    p.add_argument("--type", default="q4_0", help="type of the weights")
    p.add_argument("--prompt", type=int, default=16)
    p.add_argument("--generate", type=int, default=64)
    p.add_argument("--models", type=Path, default=ROOT / "models", help="folder of the models, which are created if absent")
    p.add_argument("--check", action="store_true", help="exit with status 1 if a bound is violated")
    p.add_argument("--json", type=Path, help="write every measurement and the summary here")
    a = p.parse_args()
    model = Model(a.type, size=a.size).ensure(a.models)
    program = a.built / "rpc-server"
    warn_if_busy()
    runs: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        own, client = keygen(program, at / "own"), keygen(program, at / "client")
        (at / "clients").write_text(f"{client} client\n")
        argv = [program, "--port", "0", "--listen", "127.0.0.1:0=plain", "--device", "CPU", "--threads", a.threads]
        argv += ["--key", at / "own", "--allow-keys", at / "clients"]
        with Server([str(word) for word in argv]) as server:
            server.wait_for_log("(protocol", 60.0)  # the second address
            found = re.findall(r"listening on (\S+:\d+) \((TLS)?", server.log)
            addresses = {"tls" if is_tls else "plain": address for address, is_tls in found}
            keys = {"plain": [], "tls": ["--key", at / "client", "--server-key", own]}
            for n in range(a.rounds):
                for side in rotated(SIDES, n):
                    tokens = ",".join(map(str, prompt_tokens(a.prompt)))
                    argv = [a.built / "generate", model, "--tokens", tokens, "-n", a.generate, "--json", "--temp", "0"]
                    argv += ["--ignore-eos", "--device", addresses[side], *keys[side]]
                    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, timeout=CLIENT_S)
                    if done.returncode:
                        sys.exit(f"generate ended with status {done.returncode}:\n{done.stderr}")
                    report = json.loads(done.stdout)
                    for name in ("gen_tok_s", "load_s"):
                        runs[name][side].append(report[name])
                print(f"round {n + 1} of {a.rounds} is done", file=sys.stderr, flush=True)
    decode = runs["gen_tok_s"]
    ratio = Interval.of([tls / plain for plain, tls in zip(decode["plain"], decode["tls"], strict=True)])
    plain, tls = (statistics.median(decode[side]) for side in SIDES)
    print(f"{a.size} {a.type}, decode: plain {plain:.1f} tok/s, TLS {tls:.1f} tok/s, TLS / plain {ratio}")
    print(f"one token: plain {1e3 / plain:.3f} ms, TLS {1e3 / tls:.3f} ms")
    loads = {side: statistics.median(runs["load_s"][side]) for side in SIDES}
    print(f"load: plain {loads['plain']:.2f} s, TLS {loads['tls']:.2f} s")
    bounds = [Bound("decode: median", ratio.median, least=LEAST_MEDIAN)]
    if ratio.high is not None:
        bounds.append(Bound("decode: upper end of the interval", ratio.high, least=LEAST_REACH))
    finish(bounds, a.check, a.json, {"summary": asdict(ratio), "runs": runs})


if __name__ == "__main__":
    try:
        main()
    except (ServerError, OSError) as e:
        sys.exit(str(e))

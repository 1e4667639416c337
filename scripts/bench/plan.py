#!/usr/bin/env python3
"""The placement that `generate --auto` chooses, compared with fixed ones, on two servers of one thread each behind slow links.

Each round runs `--auto` and every fixed placement once, in alternating order: one server, layers on both, a tensor group of both, and
with several sequences also two groups of them on layers. Prints for each the median rate of decoding, and for `--auto` the ratio of
its median to the best fixed one, and of its result to its prediction. With --check, exits with status 1 if the first ratio is below 0.9
or the second is not within 25 % of 1.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from common import ROOT, Bound, finish, rotated, warn_if_busy

from clients import Model  # isort: skip
from delaying_relay import DelayingRelay  # isort: skip
from servers import Server, ServerError  # isort: skip

CLIENT_S = 600.0
LEAST_OF_BEST, LEAST_OF_PREDICTION, MOST_OF_PREDICTION = 0.9, 0.75, 1.25


def placements(endpoints: list[str], sequences: int) -> dict[str, list[str]]:
    """Options by name of the placement."""
    both = ",".join(endpoints)
    fixed = {
        "one server": ["--device", f"{endpoints[0]}/0"],
        "layers on both": ["--rpc", both],
        "tensor group": ["--rpc", both, "--split", "tensor"],
        "auto": ["--rpc", both, "--auto"],
    }
    if sequences > 1:
        for name in ("one server", "layers on both", "tensor group"):
            fixed[name] += ["--groups", "1"]
        fixed["layers, two groups"] = ["--rpc", both, "--groups", "2"]
    return fixed


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--built", type=Path, default=ROOT / "target/release", help="folder of rpc-server and generate")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--round-trip", type=float, default=1.0, help="of each link, in ms")
    p.add_argument("--rate", type=float, default=100.0, help="of each link and direction, in Mbit/s")
    p.add_argument("--size", default="100m", help="a size of make_model.py")
    p.add_argument("--type", default="q4_0", help="type of the weights")
    p.add_argument("--sequences", type=int, default=1)
    p.add_argument("--generate", type=int, default=48, help="tokens of each sequence")
    p.add_argument("--models", type=Path, default=ROOT / "models", help="folder of the models, which are created if absent")
    p.add_argument("--check", action="store_true", help="exit with status 1 if a bound is violated")
    p.add_argument("--json", type=Path, help="write every measurement here")
    a = p.parse_args()
    model = Model(a.type, size=a.size).ensure(a.models)
    warn_if_busy()
    rates: dict[str, list[float]] = defaultdict(list)
    predicted: list[float] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prompts = folder / "prompts"
        prompts.write_text("".join(f"Prompt number {n} of several.\n" for n in range(a.sequences)))
        argv = [a.built / "rpc-server", "--port", "0", "--device", "CPU", "--threads", "1", "--peer", "127.0.0.1:*"]
        argv = [str(word) for word in [*argv, "--models", a.models]]
        servers = [stack.enter_context(Server(argv)) for _ in range(2)]
        delay, rate = a.round_trip / 2e3, a.rate * 1e6 / 8
        relays = [stack.enter_context(DelayingRelay(server.endpoint, delay, rate)) for server in servers]
        options = placements([relay.endpoint for relay in relays], a.sequences)
        for n in range(a.rounds):
            for name in rotated(tuple(options), n):
                argv = [a.built / "generate", model, "-n", a.generate, "--json", "--temp", "0", "--ignore-eos", "--flash-attn"]
                if a.sequences > 1:
                    argv += ["--prompts", prompts, "--parallel", a.sequences]
                else:
                    argv += ["--prompt", prompts.read_text().strip()]
                argv = [str(word) for word in [*argv, *options[name]]]
                done = subprocess.run(argv, capture_output=True, text=True, timeout=CLIENT_S)
                if done.returncode:
                    sys.exit(f"{shlex.join(argv)} ended with status {done.returncode}:\n{done.stderr}")
                report = json.loads(done.stdout.splitlines()[-1])
                rates[name].append(report["gen_tok_s"])
                if name == "auto":
                    predicted.append(report["predicted_gen_tok_s"])
                    chosen = [d for d in report["devices"] if d["weight_bytes"]]
                    print(f"auto uses {len(chosen)} devices, predicts {predicted[-1]:.1f}", file=sys.stderr)
            print(f"round {n + 1} of {a.rounds} is done", file=sys.stderr, flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, median in medians.items():
        print(f"{name:20} {median:8.1f} tok/s  ({min(rates[name]):.1f} to {max(rates[name]):.1f})")
    best = max(median for name, median in medians.items() if name != "auto")
    of_prediction = statistics.median(rate / each for rate, each in zip(rates["auto"], predicted, strict=True))
    bounds = [
        Bound("auto / best fixed placement", medians["auto"] / best, least=LEAST_OF_BEST),
        Bound("auto / its prediction", of_prediction, least=LEAST_OF_PREDICTION),
        Bound("auto / its prediction", of_prediction, most=MOST_OF_PREDICTION),
    ]
    finish(bounds, a.check, a.json, {"rates": rates, "predicted": predicted})


if __name__ == "__main__":
    try:
        main()
    except (ServerError, OSError) as e:
        sys.exit(str(e))

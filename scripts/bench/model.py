#!/usr/bin/env python3
"""Prompt, decode and load times of 1b models on our rpc-server, llama.cpp's server, and local llama.cpp, with the same client.

Each measurement starts its server, runs one client, and stops the server, so that only one server runs at a time. The order of
the sides rotates from round to round. Prints medians (tokens per second; load in seconds) and the ratios of the medians (ours /
llama.cpp's server, and ours / local llama.cpp), with the lowest and highest ratio of a single round in brackets. Checks the
bounds: decode and prompt at least 1.2 times llama.cpp's server, decode at least 0.95 of local llama.cpp, load at most 0.9 times
llama.cpp's server. With --check, exits with status 1 if a bound is violated.

The files are read once before, so that no side loads from disk. A virtual machine may allocate never-used memory 10 times slower
than used memory, so as much memory as a model needs is also touched once before.
"""

import argparse
import os
import sys
from collections import defaultdict
from pathlib import Path

from common import ROOT, Bound, Spread, finish, ratio, rotated, warn_if_busy

from clients import Client, ClientError, Model  # isort: skip
from servers import ServerError, ours, peer  # isort: skip

TYPES = ("q4_0", "q8_0", "q4_k_m", "f16")
SIDES = ("ours", "peer", "local")
MEASURES = {"prompt": "prompt_tok_s", "decode": "gen_tok_s", "load": "load_s"}
CLIENT_S = 1800.0
PIECE = 1 << 24

Runs = dict[str, list[dict[str, float]]]


def measure(side: str, model: Path, options: list[str], a: argparse.Namespace) -> dict[str, float]:
    """Run one client, on a fresh server or locally."""
    if side == "local":
        with Client(model, options) as client:
            report = client.report(CLIENT_S)
    else:
        server = ours(a.threads, binary=a.binary) if side == "ours" else peer(a.threads)
        with server, Client(model, [*options, "--rpc", server.endpoint]) as client:
            report = client.report(CLIENT_S)
            if not client.rpc_buffers():
                raise ClientError("the model did not run on the server")
    return {measure: report[key] for measure, key in MEASURES.items()}


def settle(model: Path) -> None:
    """Load the file into the page cache, and touch as much memory as a server will use."""
    used = bytearray()
    with model.open("rb") as file:
        while piece := file.read(PIECE):
            used += piece


def summary(runs: Runs) -> dict[str, dict[str, Spread]]:
    """Table: for each measure, the values of the sides and our ratios to the others."""
    out = {}
    for measure in MEASURES:
        values = {side: [run[measure] for run in runs[side]] for side in SIDES}
        out[measure] = {side: Spread.of(values[side]) for side in SIDES}
        out[measure] |= {f"to {side}": ratio(values["ours"], values[side]) for side in SIDES[1:]}
    return out


def table(results: dict[str, dict[str, dict[str, Spread]]]) -> str:
    lines = [f"{'model':10} {'':8} {'ours':>8} {'its server':>10} {'ratio':>6} {'':11} {'alone':>8} {'ratio':>6}"]
    for model, measures in results.items():
        for measure, r in measures.items():
            line = f"{model:10} {measure:8} {r['ours'].median:8.2f}"
            for side, width in (("peer", 10), ("local", 8)):
                to = r[f"to {side}"]
                line += f" {r[side].median:{width}.2f} {to.median:6.2f} {f'[{to.low:.2f}-{to.high:.2f}]':11}"
            lines.append(line.rstrip())
    return "\n".join(lines)


def bounds(results: dict[str, dict[str, dict[str, Spread]]]) -> list[Bound]:
    out = []
    for model, r in results.items():
        out.append(Bound(f"{model} decode / its server's", r["decode"]["to peer"].median, least=1.2))
        out.append(Bound(f"{model} prompt / its server's", r["prompt"]["to peer"].median, least=1.2))
        out.append(Bound(f"{model} decode / llama.cpp alone", r["decode"]["to local"].median, least=0.95))
        out.append(Bound(f"{model} load / its server's", r["load"]["to peer"].median, most=0.9))
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--types", default=",".join(TYPES), help="comma-separated types of the weights")
    p.add_argument("--size", default="1b", help="a size of make_model.py")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the server and of the client")
    p.add_argument("--prompt", type=int, default=128)
    p.add_argument("--generate", type=int, default=32)
    p.add_argument("--flash-attn", action="store_true")
    p.add_argument("--models", type=Path, default=ROOT / "models", help="folder of the models, which are created if absent")
    p.add_argument("--binary", type=Path, help="our server (default: target/release/rpc-server)")
    p.add_argument("--check", action="store_true", help="exit with status 1 if a bound is violated")
    p.add_argument("--json", type=Path, help="write every measurement and the summary here")
    p.add_argument("--smoke", action="store_true", help="one round of a tiny model, to check that the benchmark works")
    a = p.parse_args()
    if a.smoke:
        a.size, a.types, a.rounds, a.prompt, a.generate = "tiny", "q4_0", 1, 16, 4
    options = ["--prompt", str(a.prompt), "--generate", str(a.generate), "--threads", str(a.threads)]
    options += ["--flash-attn"] if a.flash_attn else []
    warn_if_busy()
    files = {dtype: Model(dtype, size=a.size).ensure(a.models) for dtype in a.types.split(",")}
    runs: dict[str, Runs] = defaultdict(lambda: defaultdict(list))
    for n in range(a.rounds):
        for dtype, path in files.items():
            settle(path)
            for side in rotated(SIDES, n):
                measured = measure(side, path, options, a)
                runs[dtype][side].append(measured)
                shown = ", ".join(f"{name} {value:.2f}" for name, value in measured.items())
                print(f"round {n + 1} {dtype} {side}: {shown}", file=sys.stderr, flush=True)
    results = {dtype: summary(sides) for dtype, sides in runs.items()}
    print(
        f"{a.size}, {a.threads} threads, prompt {a.prompt}, decode {a.generate}, medians of {a.rounds} (tok/s, load s)"
    )
    print(table(results))
    finish(bounds(results), a.check, a.json, {"options": options, "summary": results, "runs": runs})


if __name__ == "__main__":
    try:
        main()
    except (ClientError, ServerError) as e:
        sys.exit(str(e))

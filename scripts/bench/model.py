#!/usr/bin/env python3
"""Prompt and decode speed of 1b models on our rpc-server and on llama.cpp's own, in turn, with the same client.

Each measurement starts its server, runs one client, and stops the server, so that only one of the two is there;
the order alternates from round to round. Prints medians in tokens per second and the ratio ours / llama.cpp's of
the two medians, with the lowest and highest ratio of a single round in brackets.
"""

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "interop"))

from clients import Client, ClientError, Model  # noqa: E402
from servers import ServerError, ours, peer  # noqa: E402

TYPES = ("q4_0", "q8_0", "q4_k_m", "f16")
SPEEDS = {"prompt": "prompt_tok_s", "decode": "gen_tok_s"}
CLIENT_S = 1800.0


def measure(side: str, model: Path, options: list[str], a: argparse.Namespace) -> dict[str, float]:
    """One client on a fresh server: tokens per second of prompt and decode."""
    server = ours(a.threads, binary=a.binary) if side == "ours" else peer(a.threads)
    with server, Client(model, [*options, "--rpc", server.endpoint]) as client:
        report = client.report(CLIENT_S)
        if not client.rpc_buffers():
            raise ClientError("the model did not run on the server")
    return {speed: report[key] for speed, key in SPEEDS.items()}


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """For each speed: the two medians, their ratio, and the extremes of the rounds' own ratios."""
    out = {}
    for speed in SPEEDS:
        mine, theirs = ([run[speed] for run in runs[side]] for side in ("ours", "peer"))
        each = [m / t for m, t in zip(mine, theirs, strict=True)]
        medians = statistics.median(mine), statistics.median(theirs)
        ratio = medians[0] / medians[1]
        out[speed] = {"ours": medians[0], "peer": medians[1], "ratio": ratio, "min": min(each), "max": max(each)}
    return out


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = [f"{'model':10} {'':8} {'ours':>8} {'llama.cpp':>10}  ratio"]
    for model, speeds in results.items():
        for speed, r in speeds.items():
            extremes = f"[{r['min']:.2f}-{r['max']:.2f}]"
            lines.append(f"{model:10} {speed:8} {r['ours']:8.2f} {r['peer']:10.2f}  {r['ratio']:5.2f} {extremes}")
    return "\n".join(lines)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--types", default=",".join(TYPES), help="comma-separated types of the weights")
    p.add_argument("--size", default="1b", help="a size of make_model.py")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--threads", type=int, default=os.cpu_count(), help="of the server and of the client")
    p.add_argument("--prompt", type=int, default=128)
    p.add_argument("--generate", type=int, default=32)
    p.add_argument("--flash-attn", action="store_true")
    p.add_argument("--models", type=Path, default=ROOT / "models", help="where the models are, made if absent")
    p.add_argument("--binary", type=Path, help="our server (default: target/release/rpc-server)")
    p.add_argument("--json", type=Path, help="write every measurement and the summary here")
    a = p.parse_args()
    options = ["--prompt", str(a.prompt), "--generate", str(a.generate), "--threads", str(a.threads)]
    options += ["--flash-attn"] if a.flash_attn else []
    files = {dtype: Model(dtype, size=a.size).ensure(a.models) for dtype in a.types.split(",")}
    runs: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for n in range(a.rounds):
        for dtype, path in files.items():
            for side in ("ours", "peer") if n % 2 == 0 else ("peer", "ours"):
                speeds = measure(side, path, options, a)
                runs[dtype][side].append(speeds)
                shown = ", ".join(f"{speed} {value:.2f} tok/s" for speed, value in speeds.items())
                print(f"round {n + 1} {dtype} {side}: {shown}", file=sys.stderr, flush=True)
    results = {dtype: summary(sides) for dtype, sides in runs.items()}
    print(f"{a.size}, {a.threads} threads, prompt {a.prompt}, decode {a.generate}, medians of {a.rounds} (tok/s)")
    print(table(results))
    if a.json:
        a.json.write_text(json.dumps({"options": options, "summary": results, "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    try:
        main()
    except (ClientError, ServerError) as e:
        sys.exit(str(e))

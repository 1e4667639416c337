#!/usr/bin/env python3
"""Prompt, decode and load times of 1b models beside llama.cpp, with servers and in process.

1. Servers: the same client (llama.cpp's, from Python) on our rpc-server, on llama.cpp's server, and without a server. Each
   measurement starts its server, runs one client, and stops the server, so that only one server runs at a time. The order of
   the sides rotates from round to round. Prompts compute the logits of all tokens, and a token includes the client's choice
   of it. Prints medians and the ratios of the medians, with the lowest and highest ratio of a single round in brackets.
   Bounds: decode and prompt at least 1.2 times llama.cpp's server, decode at least 0.95 of llama.cpp without a server, load at
   most 0.9 times llama.cpp's server.
2. In process, without a server: examples/generate beside llama.cpp's library, as llama-bench uses it. Each round is a pair:
   the memory's read bandwidth, measured with the same number of threads, then both sides, in alternating order. Prompts compute
   the logits of the last token; decoding includes neither the choice of tokens nor text; both run once before they are timed.
   Prints medians, and the medians of the pairs' ratios with their 95 % confidence intervals (from 6 rounds on). Bounds: decode
   at least 0.97 of the target, which is llama.cpp's rate or 0.85 of the roof, whichever is less (the roof is the bandwidth /
   the bytes of weights that a token reads); prompt at least 1.3 times llama.cpp's with quantised weights, 1.1 with f16, and
   1.3 with bf16 if the processor has AVX512-BF16. The decode bound of a model is void if the quartiles of its bandwidths are
   more than 10 % apart: the machine was not steady.

Rates are in tokens per second, loading in seconds. With --check, exits with status 1 if a bound is violated, and with status 3
if none is violated but one is void: run it again.

The files are read once before, so that no side loads from disk. A virtual machine may allocate never-used memory 10 times
slower than used memory, so as much memory as a model needs is also touched once before.
"""

import argparse
import os
import sys
from collections import defaultdict
from pathlib import Path

import in_process
from common import ROOT, Bound, Spread, finish, ratio, rotated, warn_if_busy

from clients import Client, ClientError, Model  # isort: skip
from servers import ServerError, ours, peer  # isort: skip

TYPES = ("q4_0", "q8_0", "q4_k_m", "f16")
IN_PROCESS_TYPES = (*TYPES, "bf16") if in_process.has_bf16_products() else TYPES
SIDES = ("ours", "peer", "local")
MEASURES = {"prompt": "prompt_tok_s", "decode": "gen_tok_s", "load": "load_s"}
PARTS = ("servers", "in-process")
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


def progress(what: str, measured: dict[str, float]) -> None:
    shown = ", ".join(f"{name} {value:.2f}" for name, value in measured.items())
    print(f"{what}: {shown}", file=sys.stderr, flush=True)


def with_servers(files: dict[str, Path], a: argparse.Namespace) -> tuple[list[Bound], dict]:
    """Measure part 1 and print its table; returns the bounds, and the measurements for the JSON."""
    options = ["--prompt", str(a.prompt), "--generate", str(a.generate), "--threads", str(a.threads)]
    options += ["--flash-attn"] if a.flash_attn else []
    runs: dict[str, Runs] = defaultdict(lambda: defaultdict(list))
    for n in range(a.rounds):
        for dtype, path in files.items():
            settle(path)
            for side in rotated(SIDES, n):
                measured = measure(side, path, options, a)
                runs[dtype][side].append(measured)
                progress(f"round {n + 1} {dtype} {side}", measured)
    results = {dtype: summary(sides) for dtype, sides in runs.items()}
    print("with servers")
    print(table(results))
    return bounds(results), {"options": options, "summary": results, "runs": runs}


def without_servers(files: dict[str, Path], a: argparse.Namespace) -> tuple[list[Bound], dict]:
    """Measure part 2 and print its table; returns the bounds, and the measurements for the JSON."""
    results = [in_process.Pairs.of(dtype, path) for dtype, path in files.items()]
    for n in range(a.rounds):
        for pairs in results:
            settle(files[pairs.dtype])
            pair = pairs.measure(files[pairs.dtype], rotated(in_process.SIDES, n), a)
            for side, values in pair.sides.items():
                progress(f"pair {n + 1} {pairs.dtype} {side}", values)
            progress(f"pair {n + 1} {pairs.dtype}", {"GB/s": pair.bandwidth / 1e9, "decode roof": pairs.roof(pair)})
    print("in process")
    print(in_process.table(results))
    measured = {"summary": {r.dtype: r.summary() for r in results}, "pairs": {r.dtype: r.pairs for r in results}}
    return [bound for r in results for bound in r.bounds()], measured


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", choices=PARTS, help="only this part")
    default = f"{','.join(TYPES)}; in process also bf16 if the processor has AVX512-BF16"
    p.add_argument("--types", help=f"comma-separated types of the weights (default: {default})")
    p.add_argument("--size", default="1b", help="a size of make_model.py")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the server and of the client")
    p.add_argument("--prompt", type=int, default=128)
    p.add_argument("--generate", type=int, default=32)
    p.add_argument("--flash-attn", action="store_true", help="on every side; without it, llama.cpp in process decides itself")
    p.add_argument("--models", type=Path, default=ROOT / "models", help="folder of the models, which are created if absent")
    p.add_argument("--binary", type=Path, help="our server (default: target/release/rpc-server)")
    p.add_argument("--generate-program", type=Path, help="examples/generate (scripts/bench.sh passes it)")
    p.add_argument("--ops-program", type=Path, help="the benchmark of bench/ops (scripts/bench.sh passes it)")
    p.add_argument("--check", action="store_true", help="exit with status 1 if a bound is violated, 3 if one is void")
    p.add_argument("--json", type=Path, help="write every measurement and the summary here")
    p.add_argument("--smoke", action="store_true", help="one round of a tiny model, to check that the benchmark works")
    a = p.parse_args()
    if a.smoke:
        a.size, a.types, a.rounds, a.prompt, a.generate = "tiny", "q4_0", 1, 16, 4
    parts = {"servers": (with_servers, TYPES), "in-process": (without_servers, IN_PROCESS_TYPES)}
    found, measured = [], {}
    print(f"{a.size}, {a.threads} threads, prompt {a.prompt}, decode {a.generate}, medians of {a.rounds} (tok/s, load s)")
    warn_if_busy()
    for part in [a.only] if a.only else PARTS:
        run, types = parts[part]
        types = a.types.split(",") if a.types else types
        files = {dtype: Model(dtype, size=a.size).ensure(a.models) for dtype in types}
        checks, measured[part] = run(files, a)
        found += checks
    finish(found, a.check, a.json, measured)


if __name__ == "__main__":
    try:
        main()
    except (ClientError, ServerError) as e:
        sys.exit(str(e))

#!/usr/bin/env python3
"""Compares two builds of our rpc-server, with the same client: the cost or gain of a change.

Each round runs every measurement on both builds, in alternating order: a 1b model (prompt, decode, load), a tiny model's token, bare
sockets, and four concurrent clients, as `model` and `wire` measure them. Each round gives one ratio of speeds, after / before (of
times, before / after), so that a value above 1 means that the change is faster. Prints the median ratio with its 95 % confidence
interval from order statistics: the range of seven rounds contains the true median in 98 of 100 cases. With --check, exits with
status 1 if a median is below 0.97, or an interval is entirely below 0.98.
"""

import argparse
import os
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import model as models
import wire
from common import ROOT, Bound, Interval, finish, rotated, warn_if_busy

from clients import ClientError, Model  # isort: skip
from servers import ServerError, ours  # isort: skip

SIDES = ("before", "after")
LEAST_MEDIAN, LEAST_REACH = 0.97, 0.98
LOWER_IS_BETTER = (*wire.LOWER_IS_BETTER, "load", "tiny f32", "tiny q4_0")
CLIENTS = 4


def measure(binary: Path, a: argparse.Namespace) -> dict[str, float]:
    """Run every measurement once, on fresh servers of one build."""
    a.binary = binary
    out: dict[str, float] = {}
    if "model" in a.parts:
        path = Model(a.type, size=a.size).ensure(a.models)
        models.settle(path)
        options = ["--prompt", str(a.prompt), "--generate", "32", "--threads", str(a.threads)]
        out |= models.measure("ours", path, options, a)
    if "sockets" in a.parts:
        with ours(a.threads, binary=binary) as server:
            out |= wire.sockets(server, a)
    if "tiny" in a.parts:
        for dtype in ("f32", "q4_0"):
            out[f"tiny {dtype}"] = wire.token_ms("ours", Model(dtype).ensure(a.models), a)
    if "clients" in a.parts:
        out[f"{CLIENTS} clients"] = wire.together(Model("q4_0").ensure(a.models), CLIENTS, a)
    return out


def main() -> None:
    parts = ("model", "sockets", "tiny", "clients")
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--before", type=Path, required=True, help="rpc-server before the change")
    p.add_argument("--binary", type=Path, help="rpc-server after the change (default: target/release/rpc-server, which is built)")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--only", choices=parts, help="only this part")
    p.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the servers and of the clients")
    p.add_argument("--size", default="1b", help="a size of make_model.py")
    p.add_argument("--type", default="q4_0", help="type of the weights")
    p.add_argument("--prompt", type=int, default=128)
    p.add_argument("--generate", type=int, default=300, help="tokens of a tiny model")
    p.add_argument("--transfer", type=int, default=1024, metavar="MIB", help="size of uploads and downloads")
    p.add_argument("--round-trips", type=int, default=5000)
    p.add_argument("--small", type=int, default=50_000, help="small uploads")
    p.add_argument("--models", type=Path, default=ROOT / "models", help="folder of the models, which are created if absent")
    p.add_argument("--check", action="store_true", help="exit with status 1 if a bound is violated")
    p.add_argument("--json", type=Path, help="write every measurement and the summary here")
    a = p.parse_args()
    a.parts = (a.only,) if a.only else parts
    sides = {"before": a.before, "after": a.binary}
    warn_if_busy()
    runs: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for n in range(a.rounds):
        for side in rotated(SIDES, n):
            for name, value in measure(sides[side], a).items():
                runs[name][side].append(value)
        print(f"round {n + 1} of {a.rounds} is done", file=sys.stderr, flush=True)
    summary, bounds = {}, []
    print(f"{'':28} {'before':>10} {'after':>10}  after / before, in speed")
    for name, found in runs.items():
        each = list(zip(found["before"], found["after"], strict=True))
        ratio = Interval.of([b / f if name in LOWER_IS_BETTER else f / b for b, f in each])
        before, after = (statistics.median(found[side]) for side in SIDES)
        print(f"{name:28} {before:10.4g} {after:10.4g}  {ratio}")
        summary[name] = asdict(ratio)
        bounds.append(Bound(f"{name}: median", ratio.median, least=LEAST_MEDIAN))
        if ratio.high is not None:
            bounds.append(Bound(f"{name}: upper end of the interval", ratio.high, least=LEAST_REACH))
    finish(bounds, a.check, a.json, {"summary": summary, "runs": runs})


if __name__ == "__main__":
    try:
        main()
    except (ClientError, ServerError, OSError) as e:
        sys.exit(str(e))

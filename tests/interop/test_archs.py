#!/usr/bin/env python3
"""llama.cpp's own test of all architectures (test-llama-archs.cpp) against fanout's rpc-server.

    test_archs.py [--only REGEX] [--seed N] [--devices 0 | --plugin LIBRARY]

Compiles the test of llama-cpp-python's source archive against the installed libraries (upstream.py). It builds a tiny random
model of each architecture, and compares the logits with those of the local CPU (NMSE at most 1e-4), also with attention that is
not causal and after saving and loading the model. Prints a row per model; exits 1 if one failed. --plugin tests the first device
of libggml_fanout.so instead of a server. With --devices 0, an emulated GPU runs the models, and ops that leave it are failures.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import upstream
from servers import ROOT, Server, ours

ARCH_S = 900.0  # on an emulated GPU, beside other work


def run(program: Path, device: str, server: Server | None, seed: int, arch: str) -> list[tuple[str, str]]:
    """The verdict and the row of each model of an architecture (dense, mixture of experts)."""
    env = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    argv = [str(program), device, str(seed), arch]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=ARCH_S, env=env)
    except subprocess.TimeoutExpired:
        return [("late", f"{arch}: no result after {ARCH_S:.0f} s")]
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    rows = [line for line in text.splitlines() if line.startswith("|") and "---" not in line and "Model arch" not in line]
    results = []
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        model, outcome = f"{arch} {cells[2]}", " | ".join(cells[3:])
        verdict = "failed" if "FAIL" in outcome or not outcome else "ok" if "OK" in outcome else "skipped"
        results.append((verdict, f"{model}: {outcome}"))
    if done.returncode != 0 and all(verdict != "failed" for verdict, _ in results):
        results.append(("failed", arch))
    if done.returncode not in (0, 1):  # the client has ended the process
        if server:
            server.wait_for_log("connection closed", 0.2)
        refused = server.refusals() if server else []
        reason = refused[-1] if refused else (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        results[-1] = ("refused" if refused else "failed", f"{results[-1][1]} {reason}")
    return results


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="", metavar="REGEX", help="architectures whose names contain a match")
    p.add_argument("--seed", type=int, default=1)
    group = p.add_mutually_exclusive_group()
    group.add_argument("--plugin", type=Path, metavar="LIBRARY", help="libggml_fanout.so, with the device of FANOUT_DEVICES (default: CPU)")
    group.add_argument("--devices", default="CPU", help="device of each server: CPU, or 0 for an emulated GPU")
    p.add_argument("--binary", type=Path, help="fanout's server (default: target/release/rpc-server)")
    p.add_argument("--threads", type=int, default=2, help="threads of each server")
    p.add_argument("--jobs", type=int, default=2, help="architectures at the same time, each with a server of its own")
    p.add_argument("--program", type=Path, help="the compiled test (default: compile it)")
    a = p.parse_args()
    program = a.program or upstream.build("archs", ROOT / "target" / "upstream")
    names = subprocess.run([program, "--list"], check=True, capture_output=True, text=True).stdout.split()
    names = [name for name in names if re.search(a.only, name)]
    plugin = upstream.load_plugin(a.plugin) if a.plugin else None
    start = time.monotonic()

    def one(arch: str) -> list[tuple[str, str]]:
        if plugin:
            return run(program, plugin, None, a.seed, arch)
        with ours(a.threads, a.devices, a.binary) as server:
            results = run(program, server.endpoint, server, a.seed, arch)
            # Before the end of the server, which does not free its memory.
            faults = server.faults()
        if left := server.fallbacks() + faults:
            results.append(("failed", f"{arch}: {'; '.join(left)}"))
        return results

    counts: Counter = Counter()
    with ThreadPoolExecutor(a.jobs) as pool:
        for results in pool.map(one, names):
            for verdict, row in results:
                counts[verdict] += 1
                print(f"{verdict:8} {row}", flush=True)
    summary = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
    print(f"{len(names)} architectures, {counts.total()} models: {summary}; {time.monotonic() - start:.0f} s")
    if counts.total() != counts["ok"] + counts["skipped"] or not counts["ok"]:
        sys.exit(1)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Conformance: thousands of small graphs on ggml's CPU backend and on fanout's rpc-server, by ggml's own RPC client.

    test_conformance.py [--only OP,…] [--seed N] [--cases N] [--local | --peer] [--devices 0]

The table of cases is in conformance/families. Results are compared bit by bit where ggml is exact, else by the normalised mean
squared error (NMSE). Prints a table per op; exits 1 if a case failed or was refused. --local runs ggml's optimised CPU kernels
instead of a server: a case that fails there shows an error of ggml or of the table.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path

from conformance.table import uncovered
from servers import HERE, Server, ours, peer

SHOWN = 3  # cases that are printed per op and status
STATUSES = {
    "ok": "passed",
    "wrong": "another result than ggml's",
    "refused": "the server has closed the connection",
    "timeout": "no result in time",
    "table": "ggml's CPU backend does not compute the case",
}


def collect(argv: list[str], server: Server | None, results: list[dict]) -> None:
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    seen = 0
    for line in process.stdout:
        result = json.loads(line)
        if result["status"] == "refused" and server is not None:
            # The line is written before the connection is closed, but read by another thread. Not each refusal has one.
            deadline = time.monotonic() + 0.05
            while len(server.refusals()) == seen and time.monotonic() < deadline:
                time.sleep(0.002)
            if len(refusals := server.refusals()) > seen:
                seen, result["text"] = len(refusals), refusals[-1]
        results.append(result)
    if process.wait() != 0:
        raise SystemExit(f"{' '.join(argv)} ended with {process.returncode}")


def show(results: list[dict]) -> list[dict]:
    """Prints the table, and returns the cases that did not pass."""
    table: dict[str, Counter] = defaultdict(Counter)
    worst: dict[str, float] = defaultdict(float)
    for r in results:
        table[r["op"]][r["status"]] += 1
        if r["status"] == "ok":
            worst[r["op"]] = max(worst[r["op"]], r["nmse"])
    print(f"{'op':26} {'cases':>6} {'passed':>7} {'wrong':>6} {'refused':>8} {'late':>5}  worst NMSE of those that passed")
    for op, c in sorted(table.items()):
        value = f"{worst[op]:.1e}" if worst[op] else "0"
        print(f"{op:26} {c.total():6} {c['ok']:7} {c['wrong']:6} {c['refused']:8} {c['timeout']:5}  {value}")
    for (op, reason), count in Counter((r["op"], r["oracle"]) for r in results if r.get("oracle")).items():
        print(f"{count} cases of {op} are compared with an oracle: {reason}")
    bad = [r for r in results if r["status"] != "ok"]
    shown: Counter = Counter()
    for r in bad:
        shown[r["op"], r["status"]] += 1
        if shown[r["op"], r["status"]] <= SHOWN:
            print(f"{r['status']}: {r['case']}: {r['text']}")
    return bad


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="", metavar="OP,…", help="only cases of these ops")
    p.add_argument("--seed", type=int, default=1, help="seed of shapes and parameters")
    p.add_argument("--cases", type=int, default=1 << 30, help="about this number of cases, with equal shares of each op")
    p.add_argument("--local", action="store_true", help="test ggml's optimised CPU kernels instead of a server")
    p.add_argument("--peer", action="store_true", help="test llama.cpp's own server instead")
    p.add_argument("--devices", default="CPU", help="device of each server: CPU, or 0 for an emulated GPU")
    p.add_argument("--binary", type=Path, help="fanout's server (default: target/release/rpc-server)")
    p.add_argument("--threads", type=int, default=2, help="threads of each server")
    p.add_argument("--jobs", type=int, default=2, help="processes that compute cases, each with a server")
    p.add_argument("--save", type=Path, help="write one JSON object per case to this file")
    a = p.parse_args()
    if missing := uncovered():
        sys.exit(f"ops of ggml without cases: {' '.join(missing)}")
    start = time.monotonic()
    results: list[dict] = []
    with ExitStack() as stack:
        threads = []
        for part in range(a.jobs):
            server = None
            if not a.local:
                server = stack.enter_context(peer(a.threads) if a.peer else ours(a.threads, a.devices, a.binary))
            argv = [sys.executable, str(HERE / "conformance" / "worker.py"), server.endpoint if server else "CPU"]
            argv += ["--seed", str(a.seed), "--cases", str(a.cases), "--only", a.only, "--part", f"{part}/{a.jobs}"]
            threads.append(threading.Thread(target=collect, args=(argv, server, results)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    results.sort(key=lambda r: r["index"])
    bad = show(results)
    if a.save:
        a.save.write_text("".join(json.dumps(r) + "\n" for r in results))
    counts = Counter(r["status"] for r in results)
    parts = [f"{counts[s]} {s} ({meaning})" for s, meaning in STATUSES.items() if counts[s] and s != "ok"]
    print(f"{len(results)} cases, {counts['ok']} passed, {', '.join(parts) or '0 failed'}, {time.monotonic() - start:.0f} s")
    if bad or not results:
        sys.exit(1)


if __name__ == "__main__":
    main()

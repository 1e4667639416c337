#!/usr/bin/env python3
"""ggml's own operation tests (test-backend-ops.cpp) against fanout's rpc-server.

    test_backend_ops.py [--only REGEX] [--local | --plugin LIBRARY]

Compiles the test of llama-cpp-python's source archive against the installed libraries (upstream.py), runs each of its cases on
the server and on ggml's CPU backend, and prints a table per op. Exits 1 if a case failed or was refused that ggml's CPU backend
passes, unless `KNOWN` lists it. --local tests ggml's CPU backend instead of a server: cases that fail there are ggml's own
errors. --plugin tests the first device of libggml_fanout.so instead.
"""

import argparse
import os
import queue
import re
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import upstream
from servers import ROOT, Server, ours

SHOWN = 50  # cases that are printed
CASE_S = 600.0  # the longest case, a product of 1 GiB, computes for about 10 s on two idle cores

# (regular expression of op and parameters, reason). Cases that match may fail.
KNOWN: list[tuple[str, str]] = [
    (r"^SUM\(.*permute=\[1,0", "ggml's CPU adds the floats after the first of each row, as if they were contiguous"),
    # These cases demand ggml's own codes, within an NMSE of 1e-7.
    (r"^SET_ROWS\(.*(q[2-6]_K|iq4_xs)", "the fit chooses other codes, with an error of at most 1.02 times ggml's"),
    (r"^CPY\(.*type_dst=(q[2-6]_K|iq4_xs)", "the fit chooses other codes, with an error of at most 1.02 times ggml's"),
    (r"^CPY\(type_src=bf16,type_dst=q8_0", "ggml's AVX code rounds halves to even, its reference away from zero"),
]


@dataclass
class Outcome:
    """The result of a case: OK, FAIL, UNSUPPORTED (by ggml's CPU backend), DIED (refused) or TIMEOUT."""

    index: int
    op: str
    params: str
    status: str
    detail: str


def run(binary: Path, endpoint: str, only: str, server: Server | None) -> Iterator[Outcome]:
    """Yields the outcome of each case. Starts the program again behind a case that ended it."""
    first = seen = 0
    while True:
        argv = [str(binary), endpoint, str(first), *([only] if only else [])]
        env = {**os.environ, "GGML_NO_BACKTRACE": "1"}
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=env)
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=read, args=(process, lines), daemon=True).start()
        index, params, text = first - 1, "", []
        while True:
            try:
                line = lines.get(timeout=CASE_S)
            except queue.Empty:
                process.kill()
                process.wait()
                yield Outcome(index, "?", params, "TIMEOUT", f"no result after {CASE_S:.0f} s")
                break
            if line is None:
                break
            if line == "END":
                process.wait()
                return
            if found := re.match(r"case (\d+) ?(.*)", line):
                index, params, text = int(found[1]), found[2], []
            elif found := re.match(r"(OK|FAIL|UNSUPPORTED|DIED) (\d+) (\S+)$", line):
                detail = " ".join(text)
                if found[1] == "DIED" and server and len(refusals := server.refusals()) > seen:
                    seen, detail = len(refusals), refusals[-1]
                yield Outcome(int(found[2]), found[3], params, found[1], detail)
                if found[1] == "DIED":
                    break
            elif line:
                text.append(re.sub(r"\x1b\[[0-9;]*m", "", line).strip())
        if process.wait() == 2 or index < first:
            raise SystemExit(f"test_backend_ops: the program does not start: {' '.join(text)}")
        first = index + 1


def read(process: subprocess.Popen, lines: queue.Queue) -> None:
    assert process.stdout
    for line in process.stdout:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="", metavar="REGEX", help="cases with a match in OP(PARAMETERS), e.g. ^ADD\\(")
    p.add_argument("--local", action="store_true", help="test ggml's CPU backend instead of a server")
    p.add_argument("--plugin", type=Path, metavar="LIBRARY", help="libggml_fanout.so, with the device of FANOUT_DEVICES (default: CPU)")
    p.add_argument("--binary", type=Path, help="fanout's server (default: target/release/rpc-server)")
    p.add_argument("--threads", type=int, default=2, help="threads of the server")
    p.add_argument("--program", type=Path, help="the compiled test (default: compile it)")
    p.add_argument("--save", type=Path, help="append each case that did not pass to this file, as it ends")
    a = p.parse_args()
    program = a.program or upstream.build("backend_ops", ROOT / "target" / "upstream")
    table: dict[str, Counter] = defaultdict(Counter)
    bad: list[str] = []
    with ExitStack() as stack:
        server = None if a.local or a.plugin else stack.enter_context(ours(a.threads, binary=a.binary))
        tested = server.endpoint if server else upstream.load_plugin(a.plugin) if a.plugin else "CPU"
        for o in run(program, tested, a.only, server):
            name = f"{o.op}({o.params})"
            known = o.status != "OK" and any(re.search(pattern, name) for pattern, _ in KNOWN)
            status = "known" if known else o.status
            table[o.op][status] += 1
            if status in ("FAIL", "DIED", "TIMEOUT"):
                bad.append(f"{status} {o.index} {name}: {o.detail}")
                if a.save:
                    with a.save.open("a") as f:
                        print(bad[-1], file=f)
    print(f"{'op':28} {'cases':>6} {'passed':>7} {'failed':>7} {'refused':>8} {'not by ggml':>12} {'known':>6}")
    for op, c in sorted(table.items()):
        failed = c["FAIL"] + c["TIMEOUT"]
        print(f"{op:28} {c.total():6} {c['OK']:7} {failed:7} {c['DIED']:8} {c['UNSUPPORTED']:12} {c['known']:6}")
    for line in bad[:SHOWN]:
        print(line)
    cases = sum(c.total() for c in table.values())
    print(f"{cases} cases, {len(bad)} did not pass")
    if bad or not cases:
        sys.exit(1)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Computes cases on ggml's CPU backend and on a server, and prints one JSON object per case. Used by test_conformance.py.

    worker.py ENDPOINT --seed S --cases N --only OP --part I/N

Cases run in a forked child: ggml's RPC client aborts the process if the server refuses a graph, and ggml itself if a kernel does
not accept a node. The parent has no threads and no connection, so a new child takes a few milliseconds; it goes on behind the
case that ended the last one.
"""

import argparse
import json
import os
import select
import sys
import tempfile
import time
from pathlib import Path

# BLAS threads would not survive a fork.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("GGML_NO_BACKTRACE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conformance.compare import compare  # noqa: E402
from conformance.ggml import load  # noqa: E402
from conformance.graph import ComputeError, run, unsupported  # noqa: E402
from conformance.table import Case, share, table  # noqa: E402

CASE_S = 20.0


def compute(case: Case, cpu: int, server: int, tell) -> dict:
    tell("ggml")
    if op := unsupported(case.build, case.data_seed, cpu):
        return {"status": "table", "text": f"ggml's CPU backend does not support {op}"}
    want = run(case.build, case.data_seed, cpu, case.allocator)
    tell("server")
    try:
        got = run(case.build, case.data_seed, server, case.allocator)
    except ComputeError as e:
        return {"status": "refused", "text": str(e)}
    worst, text = compare(case.rule, got, want)
    return {"status": "wrong" if text else "ok", "nmse": worst, "text": text, "oracle": case.rule.reason}


def child(cases: list[tuple[int, Case]], endpoint: str, out: int) -> None:
    """Writes a line `INDEX STAGE` before each stage, and `INDEX {…}` behind each case."""
    lib = load()
    cpu = lib.ggml_backend_cpu_init()
    lib.ggml_backend_cpu_set_n_threads(cpu, 1)
    lib.ggml_backend_cpu_set_use_ref(cpu, True)
    if endpoint == "CPU":
        server = lib.ggml_backend_cpu_init()
        lib.ggml_backend_cpu_set_n_threads(server, 2)
    else:
        server = lib.ggml_backend_rpc_init(endpoint.encode(), 0)
    for index, case in cases:
        try:
            result = compute(case, cpu, server, lambda stage: os.write(out, f"{index} {stage}\n".encode()))
        except Exception as e:  # noqa: BLE001  # a case that the table builds wrongly must not end the run
            result = {"status": "table", "text": f"{type(e).__name__}: {e}"}
        os.write(out, f"{index} {json.dumps(result)}\n".encode())


def abort_message(log) -> str:
    """The assertion on which ggml has ended the child."""
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    found = [line for line in lines if "ASSERT" in line or "ABORT" in line or "fatal" in line or ".cpp:" in line or ".c:" in line]
    return found[-1].rsplit("/", 1)[-1] if found else (lines[-1] if lines else "")


def report(index: int, case: Case, result: dict) -> None:
    print(json.dumps({"index": index, "op": case.op, "case": str(case), **result}), flush=True)


def run_all(cases: list[tuple[int, Case]], endpoint: str) -> None:
    by_index = dict(cases)
    while cases:
        with tempfile.TemporaryFile() as log:
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                os.dup2(log.fileno(), 2)
                os.dup2(log.fileno(), 1)
                child(cases, endpoint, writer)
                os._exit(0)
            os.close(writer)
            index, stage, late = cases[0][0], "start", False
            buffer, last = b"", time.monotonic()
            while True:
                if not select.select([reader], [], [], max(0.0, last + CASE_S - time.monotonic()))[0]:
                    late = True
                    break
                chunk = os.read(reader, 65536)
                if not chunk:
                    break
                last = time.monotonic()
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    number, rest = line.decode().split(" ", 1)
                    index, stage = int(number), rest
                    if rest.startswith("{"):
                        report(index, by_index[index], json.loads(rest))
                        stage = "done"
            os.close(reader)
            if late:
                os.kill(pid, 9)
            os.waitpid(pid, 0)
            if stage == "start":
                sys.exit(f"the child did not start: {abort_message(log)}")
            if stage != "done":
                status = "timeout" if late else "refused" if stage == "server" else "table"
                report(index, by_index[index], {"status": status, "text": abort_message(log)})
        cases = [c for c in cases if c[0] > index]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("endpoint", help="HOST:PORT, or CPU: ggml's optimised kernels instead of a server")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--cases", type=int, default=1 << 30)
    p.add_argument("--only", default="")
    p.add_argument("--part", default="0/1", help="I/N: the I-th of N shares of the cases")
    a = p.parse_args()
    cases = list(enumerate(share(table(a.seed, a.only), a.cases)))
    part, parts = map(int, a.part.split("/"))
    load().types()
    run_all(cases[part::parts], a.endpoint)


if __name__ == "__main__":
    main()

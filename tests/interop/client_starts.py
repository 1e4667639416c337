"""Starts of real clients on servers with default options: which may abort, and whether the others compute what llama.cpp does.

Clients of 7.0 and of 8.0 send the same HELLO, so a server with default options first replies 8.0, and learns from the commands
and the closed connections of an address which version works there. Real clients also open connections that they close without a
command: llama.cpp frees the events of its pipeline over new connections, after it has freed the context that measures the memory
of a model (`-fit`, on by default). The rows start such clients one after the other. A client of 8.0 must never abort. A client
of 7.0 may abort once per server that is new to its address, and not after one has worked.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from clients import ClientError, tail
from servers import ROOT, Server, ServerError

STARTS = 5
NMSE = 1e-3
CLIENT_S = 120.0


@dataclass(frozen=True)
class Row:
    """Servers on which clients start one after the other."""

    name: str
    servers: int = 1
    devices: tuple[str, ...] = ()  # options of each server
    fresh: bool = False  # new servers for each client, or for as many clients as it takes until one must work


def rows() -> list[Row]:
    placements = [
        Row("one server"),
        Row("two servers", 2),
        Row("three servers", 3),
        Row("two devices of one server", devices=("-d", "CPU,CPU")),
    ]
    fresh = [Row(f"{row.name}, new for each", row.servers, row.devices, True) for row in placements]
    return placements + fresh


@dataclass(frozen=True)
class Computed:
    """Logits of a client that worked, f64 [tokens, vocab], and the tokens that it chose."""

    logits: np.ndarray
    tokens: list[int]


class Aborted(Exception):
    """A client has aborted because of the version that a server replied. The argument is the server's address."""


@dataclass(frozen=True)
class Clients:
    """Clients of one version. `start` runs a client on these addresses to its end, or on the local CPU if there are none."""

    version: str
    start: Callable[[list[str]], Computed]  # raises Aborted
    aborts: bool  # each may abort once on a new server


def run_client(argv: list[str]) -> str:
    """Run a client to its end. Returns its output."""
    # ggml would otherwise start a debugger to print where the process has aborted.
    env = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=CLIENT_S, env=env)
    except subprocess.TimeoutExpired:
        raise ClientError(f"the client is still running after {CLIENT_S:.0f} s") from None
    refused = re.search(r"RPC handshake failed for (\S+)", done.stderr)
    if done.returncode == -signal.SIGABRT and refused:
        raise Aborted(refused[1])
    if done.returncode != 0:
        raise ClientError(f"the client ended with {done.returncode}:\n{tail(done.stderr)}")
    return done.stdout


@dataclass
class Count:
    """The clients of a row so far."""

    starts: int = 0
    aborts: int = 0
    wrong: int = 0  # of these aborts
    worst: float = 0.0  # NMSE


def server_of(binary: Path, row: Row) -> Server:
    """A server with default options, but on a free port of the loopback interface."""
    return Server([str(binary), "-H", "127.0.0.1", "-p", "0", *row.devices])


def run_on(clients: Clients, servers: list[Server], starts: int, want: Computed, count: Count) -> str:
    """Start clients on new servers one after the other. Returns what is wrong, or nothing."""
    refused: set[str] = set()
    worked = False
    for _ in range(starts):
        count.starts += 1
        try:
            got = clients.start([server.endpoint for server in servers])
        except Aborted as e:
            (endpoint,) = e.args
            count.aborts += 1
            count.wrong += not clients.aborts or worked or endpoint in refused
            refused.add(endpoint)
            continue
        worked = True
        if got.tokens != want.tokens:
            return "the tokens differ from those of llama.cpp alone"
        error = float(((got.logits - want.logits) ** 2).sum() / (want.logits**2).sum())
        count.worst = max(count.worst, error)
        if not error <= NMSE:
            return f"NMSE above {NMSE:.0e}"
    if count.wrong:
        return f"{count.wrong} clients must not abort"
    return "" if worked else "no client has worked"


def run_row(clients: Clients, binary: Path, row: Row, starts: int, want: Computed) -> bool:
    """Run a row and print it."""
    begin = time.monotonic()
    count = Count()
    servers: list[Server] = []
    wrong = ""
    rounds, in_round = (starts, row.servers + 1 if clients.aborts else 1) if row.fresh else (1, starts)
    try:
        for _ in range(rounds):
            with contextlib.ExitStack() as stack:
                servers = [stack.enter_context(server_of(binary, row)) for _ in range(row.servers)]
                wrong = run_on(clients, servers, in_round, want, count) or wrong
    except (ClientError, ServerError, OSError) as e:
        wrong = str(e)
    verdict = "FAIL" if wrong else "ok"
    seconds = time.monotonic() - begin
    print(
        f"{verdict:4}  {clients.version:5}  {row.name:40} {count.starts:6} {count.aborts:6} {count.worst:8.1e} {seconds:6.1f} s"
        f"  {wrong.partition(chr(10))[0]}",
        flush=True,
    )
    if wrong:
        print(wrong, *(f"  server {server.endpoint}:\n{tail(server.log)}" for server in servers), sep="\n", flush=True)
    return not wrong


def parser(description: str | None) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--binary", "--server", type=Path, default=ROOT / "target" / "release" / "rpc-server", help="fanout's server")
    p.add_argument("--only", default="", metavar="TEXT", help="only rows whose name contains TEXT")
    p.add_argument("--starts", type=int, default=STARTS, help=f"clients in each row (default {STARTS})")
    return p


def run_rows(clients: Clients, args: argparse.Namespace) -> None:
    """Run the rows that the command line selects. Ends the process with status 1 if one fails, or if there is none."""
    want = clients.start([])
    chosen = [row for row in rows() if args.only in row.name]
    print(f"{'':4}  {'':5}  {'row':40} {'starts':>6} {'aborts':>6} {'NMSE':>8}", flush=True)
    failed = sum(not run_row(clients, args.binary, row, args.starts, want) for row in chosen)
    print(f"{len(chosen)} rows, {failed} failed")
    if failed or not chosen:
        sys.exit(1)

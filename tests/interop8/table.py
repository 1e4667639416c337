#!/usr/bin/env python3
"""Real llama.cpp clients of protocol 8.0.1 against fanout's rpc-server: their logits must equal those of llama.cpp alone.

scripts/interop8.sh builds the programs and runs this file. Each row starts its own servers. The reference is a run of the same
client without servers; the run on the servers evaluates the reference's tokens, so that all its logits can be compared.
"""

import argparse
import contextlib
import importlib.util
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from cases import KV_ON_HOST, NO_COLLECTIVES, TENSOR, Case, cases
from programs import ROOT, Client8, Programs, Server, ServerError, endpoints, listed, prompt, tail
from clients import Client, ClientError, References, Model  # of tests/interop: `programs` adds the folder to the path

NMSE = 1e-3  # of all logits of a run
WORST_NMSE = 5e-3  # of the logits of a single token: one that is wrong has about 1, and would be lost among 400
CLIENT_S = 120.0
TOGETHER = "two clients at once, of 7.0 and of 8.0"
TOGETHER_TOKENS = 200
OLDER_TOKENS = 600  # the client of 7.0 must still be decoding when the other begins


@dataclass(frozen=True)
class Reference:
    """What llama.cpp computes alone: the tokens that it chose, and the logits of the prompt and of these tokens."""

    tokens: list[int]
    logits: np.ndarray


@dataclass
class Result:
    """A row of the output."""

    name: str
    ok: bool
    note: str = ""
    nmse: float | None = None
    worst: float | None = None
    same: str = ""
    detail: str = ""
    seconds: float = 0.0
    skipped: bool = False

    def __str__(self) -> str:
        verdict = "skip" if self.skipped else "ok" if self.ok else "FAIL"
        numbers = [("" if value is None else f"{value:.1e}") for value in (self.nmse, self.worst)]
        return f"{verdict:4}  {self.name:40} {numbers[0]:>8} {numbers[1]:>8}  {self.same:8} {self.seconds:5.1f} s  {self.note}"


@dataclass
class Table:
    """The programs, the references so far, and the results so far."""

    programs: Programs
    is_peer: bool
    references: dict[tuple, Reference] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def reference(self, case: Case) -> Reference:
        key = (case.arch, case.dtype, case.options, case.generate)
        if key not in self.references:
            report, logits = self.run_client(case, [], ())
            self.references[key] = Reference(report["tokens"], logits)
        return self.references[key]

    def run_client(self, case: Case, arguments: list[str], env: tuple, log: list[str] | None = None) -> tuple[dict, np.ndarray]:
        """Run a client to its end. Returns its report and its logits, f64 [tokens, vocab]; `log` gets its stderr."""
        out = self.programs.scratch / "logits.f32"
        model = self.programs.model(case.dtype, case.arch)
        common = ["--model", str(model), "--tokens", listed(prompt()), "--generate", str(case.generate)]
        with self.programs.client([*common, *case.options, "--logits-out", str(out), *arguments], env) as client:
            try:
                report = client.report(CLIENT_S)
            finally:
                if log is not None:
                    log.append(client.stderr)
        return report, np.fromfile(out, np.float32).astype(np.float64).reshape(-1, report["vocab"])

    def start(self, case: Case, stack: contextlib.ExitStack) -> list[Server]:
        peers = case.servers if self.is_peer else 1 if case.mixed else 0
        options = ("--peer", "127.0.0.1:*") if case.collectives else ()
        ours = [lambda: self.programs.server(case.devices, options=options)] * (case.servers - peers)
        theirs = [self.programs.peer] * peers
        starts = ours + theirs if case.ours_first else theirs + ours
        return [stack.enter_context(start()) for start in starts]

    def run(self, name: str, test) -> None:
        """Run a row: `test` gets the stack that ends its servers, and the list to which it adds them."""
        servers: list[Server] = []
        begin = time.monotonic()
        try:
            with contextlib.ExitStack() as stack:
                result = test(stack, servers)
                if dead := [server.endpoint for server in servers if not server.alive()]:
                    result.ok, result.note = False, f"the server on {dead[0]} died"
        except (ClientError, ServerError, OSError) as e:
            result = Result(name, False, str(e).partition("\n")[0], detail=str(e))
        result.seconds = time.monotonic() - begin
        if not result.ok:
            result.detail += "".join(f"\n  server {server.endpoint}:\n{tail(server.log)}" for server in servers)
        self.add(result)

    def add(self, result: Result) -> None:
        self.results.append(result)
        print(result, flush=True)
        if not result.ok:
            print(result.detail, flush=True)


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    return float(((got - want) ** 2).sum() / (want**2).sum())


def run_case(table: Table, case: Case, stack: contextlib.ExitStack, servers: list[Server]) -> Result:
    want = table.reference(case)
    servers += table.start(case, stack)
    # Two of llama.cpp's servers connect to each other on a port that the first opens on all interfaces.
    env = NO_COLLECTIVES if table.is_peer else case.env
    arguments = ["--rpc", ",".join(server.endpoint for server in servers), "--forced", listed(want.tokens), *case.placement]
    log: list[str] = []
    try:
        report, logits = table.run_client(case, arguments, env, log)
    except ClientError as e:
        return Result(case.name, False, str(e).partition("\n")[0], detail=str(e))
    result = compared(case, report, logits, want, misplaced(case, log[0]))
    result.detail = "" if result.ok else tail(log[0])
    return result


def lead(logits: np.ndarray) -> float:
    """The distance between the two largest logits. Each may be off by the root of NMSE times their mean square."""
    second, first = np.partition(logits, -2)[-2:]
    return float(first - second)


def compared(case: Case, report: dict, logits: np.ndarray, want: Reference, notes: list[str]) -> Result:
    """The row of a run, with what was wrong before in `notes`. A NaN is above each bound."""
    if logits.shape != want.logits.shape:
        return Result(case.name, False, f"{logits.shape[0]} rows of logits, not {want.logits.shape[0]}")
    overall = nmse(logits, want.logits)
    worst = float(np.max([nmse(got, row) for got, row in zip(logits, want.logits, strict=True)]))
    same = sum(got == token for got, token in zip(report["greedy"], want.tokens, strict=True))
    if not overall <= NMSE:
        notes.append(f"NMSE above {NMSE:.0e}")
    if not worst <= WORST_NMSE:
        notes.append(f"NMSE of a token above {WORST_NMSE:.0e}")
    if case.dtype == "f32" and same != case.generate:
        notes.append("greedy tokens differ from those of llama.cpp alone")
    # Row i of these chose token i.
    for number, row in enumerate(want.logits[-case.generate - 1 : -1]):
        if report["greedy"][number] != want.tokens[number] and lead(row) > 2 * np.sqrt(NMSE * np.mean(row**2)):
            notes.append(f"token {number} differs, and its two likeliest do not lie that close")
    return Result(case.name, not notes, "; ".join(notes), overall, worst, f"{same}/{case.generate}")


def misplaced(case: Case, log: str) -> list[str]:
    """What the client's log says against the placement of the case."""
    notes = []
    if case.placement[:2] == TENSOR:
        if f"creating a Meta device with {case.places} devices" not in log:
            notes.append(f"no tensor split over {case.places} devices")
    else:
        # Devices of one server have the same name, and a line each.
        buffers = re.findall(r"RPC\d+\[\S+\] model buffer size", log)
        if len(buffers) != case.places:
            notes.append(f"weights in {len(buffers)} RPC buffers, not {case.places}")
    if ("pairwise communicator initialized" in log) != case.collectives:
        notes.append(f"{'no ' if case.collectives else ''}collectives")
    on_host = re.search(r"CPU KV buffer size", log) is not None
    if on_host != (KV_ON_HOST in case.placement):
        notes.append(f"the KV cache is {'' if on_host else 'not '}on the host")
    return notes


def two_versions(table: Table, stack: contextlib.ExitStack, servers: list[Server]) -> Result:
    """A client of 7.0 and one of 8.0 decode at the same time, on two ports of one server."""
    programs, dtype = table.programs, "f16"
    case = Case(TOGETHER, dtype, generate=TOGETHER_TOKENS)
    want = table.reference(case)
    options = ("--generate", str(OLDER_TOKENS), "--seed", "3")
    older_model = Model(dtype).ensure(programs.scratch)
    older_want = References(programs.scratch).get(older_model, options, CLIENT_S)
    server = stack.enter_context(programs.server(versions=("8", "7")))
    servers.append(server)
    newer_at, older_at = endpoints(server, 2)
    out = programs.scratch / "logits.f32"
    arguments = ["--model", str(programs.model(dtype)), "--tokens", listed(prompt()), "--forced", listed(want.tokens)]
    arguments += ["--generate", str(TOGETHER_TOKENS), "--logits-out", str(out), "--rpc", newer_at, "--barrier"]
    older_options = [*options, "--rpc", older_at, "--reference", str(older_want), "--barrier"]
    newer: Client8 = stack.enter_context(programs.client(arguments))
    older: Client = stack.enter_context(Client(older_model, older_options))
    newer.wait_for("ready", CLIENT_S)
    older.wait_for("ready", CLIENT_S)
    older.release()
    older.wait_for("token 1", CLIENT_S)
    newer.release()
    newer.wait_for("token 1", CLIENT_S)
    overlap = older.running()
    report, older_report = newer.report(CLIENT_S), older.report(CLIENT_S)
    logits = np.fromfile(out, np.float32).astype(np.float64).reshape(-1, report["vocab"])
    notes = [] if overlap else ["the clients did not decode at the same time"]
    if not older_report["nmse"] <= NMSE:
        notes.append(f"NMSE of 7.0 above {NMSE:.0e}")
    result = compared(case, report, logits, want, notes)
    result.note = result.note or f"7.0: NMSE {older_report['nmse']:.1e}"
    return result


def run_all(table: Table, only: str) -> None:
    for case in cases():
        if only in case.name and not (table.is_peer and case.ours_only):
            table.run(case.name, lambda stack, servers, case=case: run_case(table, case, stack, servers))
    if only in TOGETHER and not table.is_peer:
        if importlib.util.find_spec("llama_cpp") is None:
            note = "this Python has no client of 7.0 (llama_cpp); scripts/venv.sh builds it"
            table.add(Result(TOGETHER, True, note, skipped=True))
        else:
            table.run(TOGETHER, lambda stack, servers: two_versions(table, stack, servers))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--llama8", type=Path, required=True, help="folder of the programs of this crate")
    p.add_argument("--server", type=Path, default=ROOT / "target" / "release" / "rpc-server", help="fanout's server")
    p.add_argument("--peer", action="store_true", help="test llama.cpp's own server instead")
    p.add_argument("--only", default="", metavar="TEXT", help="only rows whose name contains TEXT")
    p.add_argument("--threads", type=int, default=1, help="threads of each client and server")
    a = p.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fanout-interop8-") as scratch:
        table = Table(Programs(a.server, a.llama8, Path(scratch), a.threads), a.peer)
        print(f"{'':4}  {'row':40} {'NMSE':>8} {'worst':>8}  {'greedy':8}", flush=True)
        run_all(table, a.only)
    skipped = sum(r.skipped for r in table.results)
    failed = sum(not r.ok for r in table.results)
    passed = len(table.results) - failed - skipped
    print(f"{time.monotonic() - begin:.0f} s{f', {skipped} skipped' if skipped else ''}")
    print(f"{passed} passed, {failed} failed")
    if failed or not passed:
        sys.exit(1)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Real llama.cpp clients against fanout's rpc-server: the logits must equal those of llama.cpp's local CPU.

    test_interop.py [--full] [--only TEXT] [--peer] [--protocol VERSION]

Prints a table and exits 1 if any row fails. Every client is a separate process with a deadline. --peer runs the rows
that llama.cpp's own server can serve against that server, which tells a fault of fanout from a fault of the test.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from clients import Client, ClientError, Model, References, Vision, tail
from load import IDLE, LoadError, killed_upload, latency
from make_model import DIRECT
from servers import ROOT, Server, ServerError, ours, peer

# Attention does not depend on the weights' type: one float and one block type besides f32.
FLASH_ATTN = ("f32", "f16", "q8_0")
NMSE = 1e-3
NMSE_QUANTISED_MOE = 1e-2  # selecting one other expert costs 2e-3 even on llama.cpp's own server
# Of the columns that llama.cpp's CPU rounds to 8 bits, and our GEMM to F16. Against its own results with the weights dequantised to F32,
# llama.cpp's differ by 1.0e-3 (iq2_xs, iq3_s).
NMSE_ROUNDED_COLUMNS = 2e-3
CLIENT_S = 120.0
EMULATED_S = 600.0
TOGETHER = 4  # concurrent clients
SURVIVOR_TOKENS = 256


@dataclass(frozen=True)
class Case:
    """One run of a client: the model, the client's options, and the number of servers and their devices.

    With `vision`, the client computes embeddings of an image, and only the vocabulary of the model is used.
    """

    name: str
    model: Model
    options: tuple[str, ...] = ()
    bound: float = NMSE
    servers: int = 1
    devices: str = "CPU"  # --device of each server; GPUs are emulated
    seconds: float = CLIENT_S
    vision: Vision | None = None

    @property
    def places(self) -> int:
        """Number of remote devices that the client uses."""
        return self.servers * len(self.devices.split(","))


@dataclass
class Result:
    """A row of the table."""

    name: str
    ok: bool
    note: str = ""
    nmse: float | None = None
    same: bool | None = None
    detail: str = ""
    seconds: float = 0.0


def cases(full: bool) -> list[Case]:
    fa = ("--flash-attn",)
    rows = []
    for dtype in DIRECT:
        rows.append(Case(f"llama {dtype}", Model(dtype)))
    for dtype in FLASH_ATTN:
        rows.append(Case(f"llama {dtype} flash-attn", Model(dtype), fa))
    for arch in ("qwen2", "qwen3", "qwen3moe"):
        for dtype in ("f32", "f16", "q4_0", "q8_0", "q4_k"):
            flips = arch == "qwen3moe" and dtype.startswith("q")
            bound = NMSE_QUANTISED_MOE if flips else NMSE
            rows.append(Case(f"{arch} {dtype}", Model(dtype, arch), bound=bound))
        rows.append(Case(f"{arch} f16 flash-attn", Model("f16", arch), fa))
    # Further architectures: see archs.py. deepseek2 has no quantised rows: rounding changes the selected experts and groups.
    for arch in ("gpt-oss", "deepseek2", "gemma2", "gemma3", "phi2", "phi3", "mixtral", "qwen3next"):
        rows.append(Case(f"{arch} f32", Model("f32", arch)))
        rows.append(Case(f"{arch} f16 flash-attn", Model("f16", arch), fa))
    rows.append(Case("qwen3next f16 two servers", Model("f16", "qwen3next"), servers=2))
    rows.append(Case("mamba2 f32 small batches", Model("f32", "mamba2"), ("--ubatch", "24", "--batch", "48")))
    rows.append(Case("qwen3next q4_k", Model("q4_k", "qwen3next"), bound=NMSE_QUANTISED_MOE))
    rows.append(Case("gpt-oss q8_0, mxfp4 experts", Model("q8_0", "gpt-oss"), bound=NMSE_QUANTISED_MOE))
    rows.append(Case("mixtral q4_0", Model("q4_0", "mixtral"), bound=NMSE_QUANTISED_MOE))
    for arch in ("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7"):
        for dtype in ("f32", "q4_k"):
            rows.append(Case(f"{arch} {dtype}", Model(dtype, arch)))
    for dtype in ("iq2_xxs", "iq3_s", "iq4_xs", "nvfp4"):
        rows.append(Case(f"qwen3moe {dtype}", Model(dtype, "qwen3moe"), bound=NMSE_QUANTISED_MOE))
    rows.append(Case("deepseek2 f16 KV on the host", Model("f16", "deepseek2"), ("--kv-on-host",)))
    for dtype in ("f32", "q8_0"):
        rows.append(Case(f"llama {dtype} KV on the host", Model(dtype), ("--kv-on-host",)))
        rows.append(Case(f"llama {dtype} KV on the host flash-attn", Model(dtype), ("--kv-on-host", *fa)))
        rows.append(Case(f"llama {dtype} q8_0 KV", Model(dtype), ("--kv-type", "q8_0", *fa)))
        rows.append(Case(f"llama {dtype} small batches", Model(dtype), ("--ubatch", "24", "--batch", "48")))
        rows.append(Case(f"llama {dtype} two servers", Model(dtype), servers=2))
        rows.append(Case(f"llama {dtype} CPU,CPU", Model(dtype), devices="CPU,CPU"))
    rows.append(Case("qwen3moe f16 two servers", Model("f16", "qwen3moe"), servers=2))
    # See make_vision.py.
    encoders = [("gemma3", "f32"), ("gemma3", "q8_0"), ("ldp", "f16"), ("lfm2", "f16"), ("qwen2.5vl", "f16")]
    for encoder, dtype in encoders:
        rows.append(Case(f"vision {encoder} {dtype}", Model("f16"), vision=Vision(encoder, dtype)))
    rows.append(Case("vision lfm2 f16 flash-attn", Model("f16"), fa, vision=Vision("lfm2", "f16")))
    on_gpus = ("f32", "f16", "q4_0", "q4_k_m")
    for dtype in sorted(DIRECT.keys() - set(on_gpus)):
        bound = NMSE_ROUNDED_COLUMNS if dtype.startswith("iq") else NMSE
        rows.append(Case(f"llama {dtype} CUDA 0", Model(dtype), bound=bound, devices="0", seconds=EMULATED_S))
    for devices in ("0", "0,1"):
        for dtype in on_gpus:
            on = partial(Case, model=Model(dtype), devices=devices, seconds=EMULATED_S)
            rows.append(on(f"llama {dtype} CUDA {devices}"))
            rows.append(on(f"llama {dtype} CUDA {devices} flash-attn", options=fa))
    rows.append(Case("llama f16 CUDA and CPU", Model("f16"), devices="0,CPU", seconds=EMULATED_S))
    if full:
        short = ("--prompt", "32", "--generate", "8", "--context", "256")
        rows.append(Case("llama 1b q4_0", Model("q4_0", size="1b"), short, seconds=900.0))
        rows.append(Case("llama 1b q4_0 flash-attn", Model("q4_0", size="1b"), (*short, *fa), seconds=900.0))
    return rows


def version_cases() -> list[Case]:
    """Rows for clients of older versions: what differs between versions is the messages, not the kernels."""
    rows = [Case(f"llama {dtype}", Model(dtype)) for dtype in ("f32", "q8_0", "q4_k_m")]
    rows.append(Case("llama f16 flash-attn", Model("f16"), ("--flash-attn",)))
    rows.append(Case("llama f32 KV on the host", Model("f32"), ("--kv-on-host",)))
    rows.append(Case("llama q8_0 q8_0 KV", Model("q8_0"), ("--kv-type", "q8_0", "--flash-attn")))
    rows.append(Case("llama f32 two servers", Model("f32"), servers=2))
    rows.append(Case("llama f32 CPU,CPU", Model("f32"), devices="CPU,CPU"))
    rows.append(Case("qwen3moe f16", Model("f16", "qwen3moe")))
    rows.append(Case("gemma2 f16", Model("f16", "gemma2")))
    return rows


@dataclass
class Bench:
    """State that all tests share: how to start a server, the folders of models, and the results so far."""

    start: Callable[[str], Server]  # devices → server
    references: References
    scratch: Path
    models: Path
    is_peer: bool
    only: str
    results: list[Result] = field(default_factory=list)

    def model(self, model: Model) -> Path:
        """Small models are written anew for each run, large ones are kept."""
        return model.ensure(self.scratch if model.size == "tiny" else self.models)

    def wants(self, name: str) -> bool:
        return self.only in name

    def with_servers(self, devices: str, count: int, use: Callable[[list[Server]], None]) -> None:
        """Call `use` with running servers. A server that does not start or does not end is a failed row."""
        try:
            with contextlib.ExitStack() as stack:
                use([stack.enter_context(self.start(devices)) for _ in range(count)])
        except ServerError as e:
            first = str(e).partition("\n")[0]
            self.add(Result(f"server with -d {devices}", False, first, detail=str(e)))

    def add(self, result: Result) -> None:
        self.results.append(result)
        print(row(result), flush=True)
        if not result.ok:
            print(result.detail, flush=True)

    def run(self, name: str, test: Callable[[], Result], servers: list[Server]) -> None:
        """Run one row. An error in it fails only this row, with the end of the servers' logs as the detail."""
        start = time.monotonic()
        try:
            result = test()
        except (ClientError, ServerError, LoadError, OSError) as e:
            result = Result(name, False, str(e).partition("\n")[0], detail=str(e))
        for server in servers:
            if not server.alive():
                result.ok, result.note = False, "the server died"
            elif faults := server.faults():
                result.ok, result.note = False, f"the CUDA emulator reports: {faults[0]}"
            elif fallbacks := server.fallbacks():
                result.ok, result.note = False, f"not all ran on the GPU: {fallbacks[0]}"
        result.seconds = time.monotonic() - start
        if not result.ok:
            result.detail += "".join(f"\n  server {s.endpoint}:\n{tail(s.log)}" for s in servers)
        self.add(result)


def row(r: Result) -> str:
    error = "" if r.nmse is None else f"{r.nmse:.1e}"
    same = {None: "", True: "same", False: "differ"}[r.same]
    return f"{'ok' if r.ok else 'FAIL':4}  {r.name:38} {error:>8}  {same:6} {r.seconds:6.1f} s  {r.note}"


def judge(case: Case, client: Client, report: dict) -> Result:
    """Check the logits, the tokens, and that the weights were on the devices of the case."""
    error, same = report["nmse"], report.get("same_tokens")
    notes = []
    if not error <= case.bound:
        notes.append(f"NMSE above {case.bound:.0e}")
    if case.model.dtype == "f32" and "q8_0" not in case.options and not same:
        notes.append("greedy tokens differ from the local CPU")
    buffers = client.rpc_buffers()
    if len(buffers) != case.places:
        notes.append(f"weights on {sorted(buffers)}")
    return Result(case.name, not notes, "; ".join(notes), error, same, detail=tail(client.stderr) if notes else "")


def run_case(bench: Bench, case: Case, servers: list[Server]) -> Result:
    model, program, options = bench.model(case.model), "llama_client.py", case.options
    if case.vision:
        program, options = "vision_client.py", (str(case.vision.ensure(bench.scratch)), *options)
    reference = bench.references.get(model, options, case.seconds, program)
    endpoints = ",".join(s.endpoint for s in servers)
    with Client(model, [*options, "--rpc", endpoints, "--reference", str(reference)], program) as client:
        return judge(case, client, client.report(case.seconds))


def test_cases(bench: Bench, rows: list[Case]) -> None:
    """Run the cases of each placement one after another on the same servers."""
    placements: dict[tuple[int, str], list[Case]] = {}
    for case in rows:
        if bench.wants(case.name) and not (bench.is_peer and case.devices != "CPU"):
            placements.setdefault((case.servers, case.devices), []).append(case)
    for (count, devices), group in placements.items():
        waiting = deque(group)
        before = 0
        while waiting and len(waiting) != before:  # restarts the servers after one has died, unless none starts
            before = len(waiting)
            bench.with_servers(devices, count, partial(run_group, bench, waiting))


def run_group(bench: Bench, waiting: deque[Case], servers: list[Server]) -> None:
    """Run cases of `waiting` while all servers are alive."""
    while waiting and all(s.alive() for s in servers):
        case = waiting.popleft()
        bench.run(case.name, partial(run_case, bench, case, servers), servers)


@contextlib.contextmanager
def at_barrier(bench: Bench, runs: list[tuple[Model, tuple[str, ...]]], server: Server) -> Iterator[list[Client]]:
    """Clients that have loaded their models on `server` and wait at their --barrier."""
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(Client(bench.model(model), [*options, "--rpc", server.endpoint, "--barrier"]))
            for model, options in runs
        ]
        for client in clients:
            client.wait_for("ready", CLIENT_S)
        yield clients


def test_four_at_once(bench: Bench, server: Server) -> Result:
    """Clients with different models and prompts decode concurrently: no client receives data of another."""
    name = f"{TOGETHER} clients at once"
    specs = [Model("f32"), Model("q4_k"), Model("f16", "qwen3"), Model("q8_0")]
    wanted = []
    for seed, model in enumerate(specs):
        options = ("--seed", str(seed + 1), "--generate", "64")
        reference = bench.references.get(bench.model(model), options, CLIENT_S)
        wanted.append((Case(name, model, options), reference))
    runs = [(case.model, (*case.options, "--reference", str(reference))) for case, reference in wanted]
    with at_barrier(bench, runs, server) as clients:
        for client in clients:
            client.release()
        verdicts = [
            judge(case, client, client.report(CLIENT_S)) for (case, _), client in zip(wanted, clients, strict=True)
        ]
    worst = max(verdicts, key=lambda r: r.nmse or 0.0)
    failed = [f"{m}: {r.note}" for m, r in zip(specs, verdicts, strict=True) if not r.ok]
    return Result(name, not failed, "; ".join(failed), worst.nmse, detail="".join(r.detail for r in verdicts))


def test_kill(bench: Bench, server: Server) -> Result:
    """`kill -9` of a decoding client does not change the tokens of a concurrent client."""
    name = "kill -9 beside a decoding client"
    survivor = (Model("f32"), ("--generate", str(SURVIVOR_TOKENS), "--seed", "7"))
    victim = (Model("q8_0"), ("--generate", "900"))
    with Client(bench.model(survivor[0]), [*survivor[1], "--rpc", server.endpoint]) as alone:
        want = alone.report(CLIENT_S)["tokens"]
    with at_barrier(bench, [survivor, victim], server) as (survivor_client, victim_client):
        survivor_client.release()
        victim_client.release()
        survivor_client.wait_for("token 2", CLIENT_S)
        victim_client.wait_for("token 4", CLIENT_S)
        overlap = survivor_client.running() and victim_client.running()
        victim_client.kill()
        got = survivor_client.report(CLIENT_S)["tokens"]
    if not overlap:
        return Result(name, False, "the two clients did not decode concurrently")
    return Result(name, got == want, same=got == want)


def test_load(name: str, measure: Callable[[Server], str], _: Bench, server: Server) -> Result:
    """Run a load test. `measure` raises LoadError if its bound is exceeded."""
    return Result(name, True, measure(server))


def test_ours_only(bench: Bench) -> None:
    """Tests that llama.cpp's own server cannot pass: it serves one client at a time."""
    tests: dict[str, Callable[[Bench, Server], Result]] = {
        f"{TOGETHER} clients at once": test_four_at_once,
        "kill -9 beside a decoding client": test_kill,
    }
    loads = {f"1 GiB upload, {IDLE} idle connections": latency, "killed in a 1 GiB upload": killed_upload}
    tests |= {name: partial(test_load, name, measure) for name, measure in loads.items()}
    wanted = {name: test for name, test in tests.items() if bench.wants(name)}
    if not bench.is_peer:
        for name, test in wanted.items():
            bench.with_servers("CPU", 1, partial(run_alone, bench, name, test))


def run_alone(bench: Bench, name: str, test: Callable[[Bench, Server], Result], servers: list[Server]) -> None:
    bench.run(name, partial(test, bench, servers[0]), servers)


def start_ours(a: argparse.Namespace, devices: str) -> Server:
    return ours(a.threads, devices, a.binary, protocol=a.protocol)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--full", action="store_true", help="also the 1b model")
    p.add_argument("--only", default="", metavar="TEXT", help="only rows whose name contains TEXT")
    p.add_argument("--peer", action="store_true", help="test llama.cpp's own server instead")
    p.add_argument("--binary", type=Path, help="fanout's server (default: target/release/rpc-server)")
    p.add_argument("--threads", type=int, default=2, help="threads of the server")
    p.add_argument("--models", type=Path, default=ROOT / "models", help="folder of the large models")
    p.add_argument("--protocol", default="7", metavar="VERSION", help="version of the clients; not 7: a selection of the rows")
    a = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="fanout-interop-") as scratch:
        bench = Bench(
            start=(lambda _: peer(a.threads)) if a.peer else partial(start_ours, a),
            references=References(Path(scratch)),
            scratch=Path(scratch),
            models=a.models,
            is_peer=a.peer,
            only=a.only,
        )
        start = time.monotonic()
        if a.protocol == "7":
            test_cases(bench, cases(a.full))
            test_ours_only(bench)
        else:
            test_cases(bench, version_cases())
    failed = [r for r in bench.results if not r.ok]
    print(f"{len(bench.results)} rows, {len(failed)} failed, {time.monotonic() - start:.0f} s")
    for r in failed:
        print(row(r))
    if failed or not bench.results:
        sys.exit(1)


if __name__ == "__main__":
    main()

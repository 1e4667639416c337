#!/usr/bin/env python3
"""examples/generate against llama.cpp on the same models: equal greedy tokens for every placement of the layers. The rows of
test_server_loss.py repeat this while servers are lost.

    test_generate.py [--full] [--only TEXT] --binary target/release/generate [--server target/release/rpc-server]

Prints a table and exits 1 if any row fails. GPUs are emulated.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from clients import ClientError, Client, Model, log_probabilities, tail
from make_model import SIZES
from servers import HERE, ROOT, Server, ServerError, ours, peer
from test_server_loss import ServerLossRows

PROMPT = 64
GENERATE = 16
RUN_S = 120.0
EMULATED_S = 900.0
ARCHS = ("llama", "qwen2", "qwen3", "qwen3moe")
# Further architectures and variants, each in few rows, with the size that has all kinds of its blocks.
FURTHER = {
    "gemma3": "tiny",
    "gpt-oss": "tiny",
    "granite": "tiny",
    "llama-biases": "tiny",
    "mistral3": "tiny",
    "mixtral": "tiny",
    "phi3": "tiny",
    "phi3-4k": "tiny",
    "smollm3": "deep",
    "yarn": "tiny",
}
TEXT = HERE / "perplexity.txt"
NMSE = 1e-5  # of the log probabilities of the text's tokens, with f32 KV caches


@dataclass(frozen=True)
class Case:
    """One run of generate: the model and the options."""

    name: str
    model: Model
    options: tuple[str, ...] = ()
    emulated: int = 0  # number of emulated GPUs
    generate: int = GENERATE
    prompt: int = PROMPT
    client: tuple[str, ...] = ()  # options of the reference, llama_client.py
    servers: tuple[str, ...] = ()  # keys of SERVERS; the options name their endpoints {0}, {1}
    mapped: bool = False  # whether the first device must read the weights from the mapped file


# "linked" servers may connect to each other.
SERVERS: dict[str, Callable[[Path | None], Server]] = {
    "ours": lambda binary: ours(2, binary=binary),
    "linked": lambda binary: ours(2, binary=binary, options=("--peer", "127.0.0.0/8:*")),
    "peer": lambda _: peer(2),
}

# An option, its value with placeholders for the endpoints, and the kinds of the servers.
REMOTE = (
    ("--rpc", "{0}", ("ours",)),
    ("--rpc", "{0},{1}", ("ours", "ours")),
    ("--device", "CPU,{0}", ("ours",)),
    ("--device", "{0}", ("peer",)),
)


def cases(full: bool) -> list[Case]:
    rows = []
    for arch in ARCHS:
        model = Model("f32", arch)
        for devices in ("CPU", "CPU,CPU"):
            for depth in (1, 4):
                for ubatch in (4, 64):
                    options = ("--device", devices, "--depth", str(depth), "--ubatch", str(ubatch))
                    rows.append(Case(f"{arch} f32 {devices} depth {depth} ubatch {ubatch}", model, options))
        on_gpus = ("--device", "0,1", "--depth", "4", "--ubatch", "16")
        rows.append(Case(f"{arch} f32 CUDA 0,1 depth 4 ubatch 16", model, on_gpus, emulated=2, generate=8))
        flash = ("--device", "CPU,CPU", "--flash-attn")
        rows.append(Case(f"{arch} f32 CPU,CPU flash-attn", model, flash, client=("--flash-attn",)))
        # Tensor groups, whose ranks compute parts of each layer.
        for devices, split in (("CPU,CPU", "tensor"), ("CPU,CPU,CPU", "tensor=1,2/1")):
            options = ("--device", devices, "--split", split, "--threads", "1")
            rows.append(Case(f"{arch} f32 {devices} --split {split}", model, options))
        on_servers = ("--rpc", "{},{}", "--split", "tensor")
        rows.append(Case(f"{arch} f32 linked servers --split tensor", model, on_servers, servers=("linked",) * 2))
    for arch, size in FURTHER.items():
        model = Model("f32", arch, size)
        for devices in (("CPU",), ("CPU,CPU", "--depth", "4", "--ubatch", "16"), ("CPU,CPU", "--split", "tensor")):
            options = ("--device", *devices, "--ctx", "1024")
            rows.append(Case(f"{arch} f32 {' '.join(options)}", model, options))
        # The random Mixtral is near a tie of two experts: llama.cpp's own tokens with flash attention differ from those without it and with
        # an f32 KV cache, which generate has with and without.
        if arch != "mixtral":
            flash = ("--device", "CPU,CPU", "--flash-attn", "--ctx", "1024")
            rows.append(Case(f"{arch} f32 CPU,CPU flash-attn", model, flash, client=("--flash-attn",)))
    # The factors for short contexts: those of the rows above are longer.
    short = Model("f32", "phi3")
    rows.append(Case("phi3 f32 --ctx 256", short, ("--device", "CPU", "--ctx", "256"), client=("--context", "256")))
    llama = Model("f32")
    rows.append(Case("llama f32 3 CPUs --bf16-sums", llama, ("--device", "CPU,CPU,CPU", "--split", "tensor", "--bf16-sums")))
    on_servers = ("--rpc", "{},{}", "--split", "tensor=1,2")
    rows.append(Case("llama f32 servers --split tensor=1,2", llama, on_servers, servers=("ours", "ours")))
    on_servers = ("--rpc", "{},{},{}", "--split", "tensor", "--flash-attn", "--kv-type", "q8_0")
    client = ("--flash-attn", "--kv-type", "q8_0")
    rows.append(Case("llama f32 3 linked servers q8_0 cache", llama, on_servers, client=client, servers=("linked",) * 3))
    for size in ("tiny", "1b") if full else ("tiny",):
        model, generate = Model("f32", size=size), GENERATE if size == "tiny" else 8
        for option, devices, servers in REMOTE:
            where = "llama.cpp's server" if servers == ("peer",) else devices.format("server", "server")
            for depth in (1, 4):
                options = (option, devices, "--depth", str(depth), "--ubatch", "16")
                name = f"llama {size} f32 {where} depth {depth}"
                rows.append(Case(name, model, options, generate=generate, servers=servers))
    rows.append(Case("llama f32 CUDA and CPU", llama, ("--device", "0,CPU", "--split", "1,1"), emulated=1, generate=8))
    gpus = ("--device", "0,1", "--split", "tensor")
    rows.append(Case("llama f32 CUDA 0,1 --split tensor", llama, gpus, emulated=2, generate=8))
    rows.append(Case("llama f32 --split 3,1 of CPU,CPU", llama, ("--device", "CPU,CPU", "--split", "3,1")))
    rows.append(Case("llama f32 --weights mapped", llama, ("--device", "CPU", "--weights", "mapped"), mapped=True))
    # Too little memory for packed weights.
    rows.append(Case("llama f32 mapped by --mem", llama, ("--device", "CPU", "--mem", "4M"), mapped=True))
    # With an f16 KV cache, rounding differences are enough to change tokens.
    f32_kv = ("--kv-type", "f32")
    rows.append(Case("llama q8_0 CPU,CPU", Model("q8_0"), ("--device", "CPU,CPU", *f32_kv), client=f32_kv))
    if full:
        big = Model("f32", size="1b")
        for devices in ("CPU", "CPU,CPU"):
            for depth in (1, 4):
                for ubatch in (4, 64):
                    options = ("--device", devices, "--depth", str(depth), "--ubatch", str(ubatch))
                    name = f"llama 1b f32 {devices} depth {depth} ubatch {ubatch}"
                    rows.append(Case(name, big, options, generate=8))
        on_gpus = ("--device", "0,1", "--depth", "4", "--ubatch", "4")
        rows.append(Case("llama 1b f32 CUDA 0,1 depth 4 ubatch 4", big, on_gpus, emulated=2, prompt=12, generate=4))
    return rows


class Bench:
    """The programs under test, the models, and cached reference tokens."""

    def __init__(self, binary: Path, server: Path, scratch: Path, models: Path):
        self.binary, self.server, self.scratch, self.models = binary, server, scratch, models
        self._wanted: dict[tuple[Path, int, int, tuple[str, ...]], tuple[list[int], list[int]]] = {}

    def model(self, model: Model) -> Path:
        """Small models are written anew for each run, large ones are kept."""
        return model.ensure(self.models if model.size == "1b" else self.scratch)

    def wanted(self, model: Path, case: Case) -> tuple[list[int], list[int]]:
        """The prompt of llama_client.py, and the tokens that llama.cpp generates for it."""
        key = (model, case.prompt, case.generate, case.client)
        if key not in self._wanted:
            options = ["--prompt", str(case.prompt), "--generate", str(case.generate), "--threads", "2", *case.client]
            with Client(model, options) as client:
                tokens = client.report(EMULATED_S)["tokens"]
            self._wanted[key] = (prompt(case), tokens)
        return self._wanted[key]

    def run(self, case: Case) -> str:
        """Run a case. Returns the failure, or an empty text."""
        with ExitStack() as stack:
            servers = [SERVERS[kind](self.server) for kind in case.servers]
            endpoints = [stack.enter_context(server).endpoint for server in servers]
            return self.compare(case, [option.format(*endpoints) for option in case.options])

    def compare(self, case: Case, options: list[str]) -> str:
        model = self.model(case.model)
        tokens, want = self.wanted(model, case)
        argv = [str(self.binary), str(model), "--tokens", ",".join(map(str, tokens)), "-n", str(case.generate)]
        argv += ["--json", "--temp", "0", "--ignore-eos", *options]
        if case.emulated:
            argv = [str(ROOT / "scripts/emulate.sh"), "-n", str(case.emulated), *argv]
        seconds = EMULATED_S if case.emulated or case.model.size != "tiny" else RUN_S
        env = {"CUDAEMU_MEMORY": "8G", **os.environ}
        try:
            done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=seconds, env=env)
        except subprocess.TimeoutExpired:
            return f"generate is still running after {seconds:.0f} s"
        if done.returncode != 0:
            return f"generate ended with {done.returncode}:\n{tail(done.stderr)}"
        report = json.loads(done.stdout.splitlines()[-1])
        got = report["tokens"]
        mapped = report["devices"][0]["weight_bytes_mapped"]
        if (mapped > 0) != case.mapped:
            return f"{mapped} bytes of weights are mapped"
        return "" if got == want else f"tokens {got}, llama.cpp has {want}"

    def probabilities(self, arch: str) -> str:
        """The log probability of each token of a text, which more than the greedy tokens depend on every logit."""
        path = self.model(Model("f32", arch, FURTHER.get(arch, "tiny")))
        argv = [str(self.binary), str(path), "--perplexity", str(TEXT), "--device", "CPU", "--kv-type", "f32", "--verbose"]
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=RUN_S)
        if done.returncode != 0:
            return f"generate ended with {done.returncode}:\n{tail(done.stderr)}"
        got = np.array([float(number) for number in re.findall(r"log probability (-[0-9.]+)", done.stderr)])
        want = log_probabilities(path, TEXT.read_text())
        if got.shape != want.shape:
            return f"{got.shape} tokens, llama.cpp has {want.shape}"
        nmse = float(((got - want) ** 2).sum() / ((want - want.mean()) ** 2).sum())
        return "" if nmse <= NMSE else f"NMSE {nmse:.1e}"

    def chat(self, options: list[str]) -> str:
        """A second turn, for which the KV cache has the first one, is that of a run that gets the whole conversation as its prompt."""
        model = self.model(Model("f32"))
        template = self.scratch / "chat.jinja"
        template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>")
        argv = [str(self.binary), str(model), "-n", "12", "--ignore-eos", "--echo", "--threads", "1", *options]

        def run(*more: str, lines: str = "") -> str:
            done = subprocess.run([*argv, *more], input=lines.encode(), capture_output=True, timeout=RUN_S)
            if done.returncode != 0:
                raise ClientError(f"generate ended with {done.returncode}:\n{tail(done.stderr.decode())}")
            return done.stdout.decode()

        first = run("--chat", "--temp", "0", "--chat-template", str(template), "--prompt", "Good day")
        both = run("--chat", "--temp", "0", "--chat-template", str(template), lines="Good day\nAnd then?\n")
        if not both.startswith(first):
            return f"the first turn has {both!r}, a single one {first!r}"
        second = both.removeprefix(first)
        whole, _, reply = second.partition("And then?<assistant>")
        alone = run("--prompt", f"{whole}And then?<assistant>")
        return "" if reply and second == alone else f"the second turn has {second!r}, alone it is {alone!r}"


def prompt(case: Case) -> list[int]:
    """The prompt that llama_client.py makes."""
    words = SIZES[case.model.size].vocab - 259
    return [1] + [(7919 * i + 13) % words + 259 for i in range(case.prompt - 1)]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--full", action="store_true", help="also the 1b model (4.4 GB)")
    p.add_argument("--only", default="", metavar="TEXT", help="only rows whose name contains TEXT")
    p.add_argument("--binary", type=Path, default=ROOT / "target/release/generate")
    p.add_argument("--server", type=Path, help="rpc-server (default: beside the binary)")
    p.add_argument("--models", type=Path, default=ROOT / "models", help="folder of the large models")
    a = p.parse_args()
    failed = rows = 0
    with tempfile.TemporaryDirectory(prefix="fanout-generate-") as scratch:
        binary = a.binary.resolve()
        server = (a.server or binary.with_name("rpc-server")).resolve()
        bench = Bench(binary, server, Path(scratch), a.models)
        table: list[tuple[str, Callable[[], str]]] = []
        for case in cases(a.full):
            table.append((case.name, lambda case=case: bench.run(case)))
        for arch in (*ARCHS, *FURTHER):
            table.append((f"{arch} f32 log probabilities", lambda arch=arch: bench.probabilities(arch)))
        for options in ([], ["--device", "CPU,CPU", "--ubatch", "16"]):
            table.append((" ".join(["llama f32 --chat", *options]), lambda options=options: bench.chat(options)))
        table += ServerLossRows(binary, server, bench.model).rows(a.full)
        for name, run in table:
            if a.only not in name:
                continue
            start = time.monotonic()
            try:
                wrong = run()
            except (ClientError, ServerError, OSError, ValueError, KeyError, IndexError) as e:
                wrong = f"{type(e).__name__}: {e}"
            rows, failed = rows + 1, failed + bool(wrong)
            print(f"{'FAIL' if wrong else 'ok':4}  {name:50} {time.monotonic() - start:6.1f} s  {wrong}", flush=True)
    print(f"{rows} rows, {failed} failed")
    if failed or not rows:
        sys.exit(1)


if __name__ == "__main__":
    main()

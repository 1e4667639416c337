"""Server processes as context managers: fanout's and llama.cpp's own. They use free ports and wait without fixed sleeps.

fanout's server is two processes: a supervisor, and its child, the worker that serves.
"""

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
START_S = 60.0  # a server that does not listen after this time has failed
EMULATED_KERNEL_S = 600  # longest time of a kernel on the emulated GPU, on a busy machine
STOP_S = 10.0  # from SIGTERM to the end of the process


class ServerError(Exception):
    """The server did not start, died, or did not end after SIGTERM."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A server process. It listens once the `with` block is entered; `endpoint` is its HOST:PORT, and `log` its output."""

    def __init__(self, argv: list[str], endpoint: str | None = None):
        self.argv = argv
        self.endpoint = endpoint or ""
        self._lines: list[str] = []
        self._new_lines: queue.Queue[str | None] = queue.Queue()

    def __enter__(self) -> "Server":
        env = {**os.environ, "RUST_LOG": os.environ.get("RUST_LOG", "info")}
        self._process = subprocess.Popen(
            self.argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=env
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            if self.endpoint:
                self._wait_for_connect()
            else:
                self._wait_for_line()
        except ServerError:
            self._process.kill()
            raise
        return self

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.append(line)
            self._new_lines.put(line)
        self._new_lines.put(None)

    def _wait_for_line(self) -> None:
        """Wait until fanout's server has printed its address: with port 0 the system chooses the port."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                line = self._new_lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ServerError(f"the server has not printed `listening on` within {START_S:.0f} s:\n{self.log}") from None
            if line is None:
                raise ServerError(f"{self.argv[0]} ended at start:\n{self.log}")
            if found := re.search(r"listening on (\S+:\d+)", line):
                self.endpoint = found.group(1)
                return

    def _wait_for_connect(self) -> None:
        host, port = self.endpoint.rsplit(":", 1)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if not self.alive():
                break
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)  # polls until the deadline: llama.cpp's server prints no reliable line when it is ready
        raise ServerError(f"nothing listens on {self.endpoint}:\n{self.log}")

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def faults(self) -> list[str]:
        """The faults that the CUDA emulator has reported so far."""
        return [line for line in self.log.splitlines() if line.startswith("cudaemu:")]

    def fallbacks(self) -> list[str]:
        """The server's messages about ops that a GPU does not support and that run on the CPU."""
        return [line for line in self.log.splitlines() if " does not support " in line]

    def alive(self) -> bool:
        return self._process.poll() is None

    def _workers(self) -> list[int]:
        """The children of the process."""
        pid = self._process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def _pids(self) -> list[int]:
        """The process, if it has not ended, and its children."""
        return [self._process.pid, *self._workers()] if self.alive() else []

    def kill(self) -> None:
        """End the server by SIGKILL, as the loss of its machine does; the supervisor first, which then starts no worker."""
        pids = self._pids()
        self._process.kill()
        for pid in pids[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def kill_worker(self) -> None:
        """End the worker by SIGKILL, as a crash does: its supervisor starts another one."""
        for pid in self._workers():
            os.kill(pid, signal.SIGKILL)

    def pause(self) -> None:
        """Stop the server by SIGSTOP: it sends nothing, and its connections stay open."""
        for pid in self._pids():
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self._pids():
            os.kill(pid, signal.SIGCONT)

    def resident(self) -> int:
        """Resident memory of the server in bytes."""
        status = "".join(Path(f"/proc/{pid}/status").read_text() for pid in self._pids())
        return sum(int(kilobytes) * 1024 for kilobytes in re.findall(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE))

    def cpu_seconds(self) -> float:
        """Processor time of the server's threads that are running now."""
        tasks = (task for pid in self._pids() for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def sleeps(self) -> int:
        """How often the threads that are running now have slept: their voluntary context switches."""
        tasks = (task for pid in self._pids() for task in Path(f"/proc/{pid}/task").glob("*/status"))
        counts = re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", "".join(task.read_text() for task in tasks), re.MULTILINE)
        return sum(map(int, counts))

    def wait_for_log(self, text: str, timeout_s: float) -> bool:
        """Wait until the log contains `text`: the server may write it after the client has ended. False at the timeout."""
        deadline = time.monotonic() + timeout_s
        while text not in self.log:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def refusals(self) -> list[str]:
        """Why the server has refused graphs and closed their connections, from its log, which limits such lines."""
        return re.findall(r"(GRAPH_(?:RE)?COMPUTE: .*?); connection closed", self.log)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # First the worker of a paused server: its supervisor forwards the signal.
        self.resume()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            if error is None:
                raise ServerError(f"the server is still running {STOP_S:.0f} s after SIGTERM:\n{self.log}") from None
        self._reader.join()


@cache
def answers_several_versions(binary: Path) -> bool:
    """Whether the binary has the option --protocol: builds that `bench.sh pair` compares may be older."""
    return "--protocol" in subprocess.run([binary, "--help"], capture_output=True, text=True).stdout


def ours(
    threads: int,
    devices: str = "CPU",
    binary: Path | None = None,
    port: int = 0,
    options: tuple[str, ...] = (),
    protocol: str = "7",
) -> Server:
    """fanout's release binary, on a free port unless one is given. Devices given by number are emulated GPUs. `protocol` is the
    version of the clients; a client of another version aborts.
    """
    binary = binary or ROOT / "target" / "release" / "rpc-server"
    argv = [str(binary), "-H", "127.0.0.1", "-p", str(port), "-t", str(threads), "-d", devices, *options]
    if answers_several_versions(binary):
        argv += ["--protocol", protocol]
    gpus = {device for device in devices.split(",") if device.isdigit()}
    if gpus:
        argv += ["--device-timeout", str(EMULATED_KERNEL_S)]
        argv = [str(ROOT / "scripts" / "emulate.sh"), "-n", str(len(gpus)), *argv]
    return Server(argv)


def peer(threads: int) -> Server:
    """llama.cpp's own server with its CPU device. It serves one client at a time."""
    port = free_port()
    argv = [sys.executable, str(HERE / "peer_server.py"), "--port", str(port), "--threads", str(threads)]
    return Server(argv, endpoint=f"127.0.0.1:{port}")

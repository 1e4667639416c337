"""The devices on which the table runs models: which servers they need, and what the host is told of them."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "interop"))
from servers import Server, ours  # noqa: E402


@dataclass(frozen=True)
class Devices:
    """Devices of the plug-in in a host: variables, the devices' names there, further options, and the servers behind them. `shown`
    is where the host's log says that weights are, if not on the devices.
    """

    env: dict[str, str]
    names: tuple[str, ...] = ("Fanout0",)
    options: tuple[str, ...] = ()
    servers: tuple[Server, ...] = ()
    shown: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        return self.shown or self.names


@dataclass(frozen=True)
class Programs:
    """Paths of what is tested."""

    plugin: Path
    server: Path
    hosts: dict[str, Path]  # the host program of each version
    driver: str  # folder with the emulated CUDA driver
    stub: Path  # a ggml of an untested version
    models: Path  # folder that is kept
    scratch: Path


def keygen(server: Path, file: Path) -> str:
    """Makes a secret key in a file. Returns the public key."""
    return subprocess.run([server, "keygen", file], check=True, capture_output=True, text=True).stdout.strip()


def keys(programs: Programs) -> tuple[tuple[str, ...], dict[str, str]]:
    """Options of servers with a key, and the variables of a program that they serve."""
    folder = Path(tempfile.mkdtemp(dir=programs.scratch))
    own, client, allowed = (folder / name for name in ("own", "client", "clients"))
    public = keygen(programs.server, own)
    allowed.write_text(f"{keygen(programs.server, client)} host\n")
    env = {"FANOUT_KEY": str(client), "FANOUT_SERVER_KEYS": public}
    return ("--key", str(own), "--allow-keys", str(allowed)), env


@contextlib.contextmanager
def cpu(_: Programs) -> Iterator[Devices]:
    yield Devices({"FANOUT_DEVICES": "CPU"})


@contextlib.contextmanager
def gpu(programs: Programs) -> Iterator[Devices]:
    yield Devices({"LD_LIBRARY_PATH": programs.driver, "CUDAEMU_DEVICES": "1"})


@contextlib.contextmanager
def server(programs: Programs) -> Iterator[Devices]:
    with ours(1, binary=programs.server) as one:
        yield Devices({"FANOUT_DEVICES": "none", "FANOUT_SERVERS": one.endpoint}, servers=(one,))


@contextlib.contextmanager
def tls(programs: Programs) -> Iterator[Devices]:
    options, env = keys(programs)
    with ours(1, binary=programs.server, options=options) as one:
        yield Devices({"FANOUT_DEVICES": "none", "FANOUT_SERVERS": one.endpoint, **env}, servers=(one,))


@contextlib.contextmanager
def two(programs: Programs) -> Iterator[Devices]:
    peers = ("--peer", "127.0.0.1:*")
    with ours(1, binary=programs.server, options=peers) as a, ours(1, binary=programs.server, options=peers) as b:
        env = {"FANOUT_DEVICES": "none", "FANOUT_SERVERS": f"{a.endpoint},{b.endpoint}"}
        # By free memory, both layers of the small models would go to the first server, and only the output matrix to the second.
        options = ("--split", "layer", "--tensor-split", "1,2")
        yield Devices(env, ("Fanout0", "Fanout1"), options, (a, b))


@contextlib.contextmanager
def tensor(programs: Programs) -> Iterator[Devices]:
    with two(programs) as devices:
        options = ("--split", "tensor", "--flash", "on")  # without flash attention llama.cpp refuses this split
        yield replace(devices, options=options, shown=("Meta()",))


@contextlib.contextmanager
def rpc(programs: Programs) -> Iterator[Devices]:
    with ours(1, binary=programs.server) as one:
        yield Devices({"FANOUT_DEVICES": "none"}, options=("--rpc", one.endpoint), servers=(one,))


KINDS: dict[str, Callable] = {
    "CPU": cpu,
    "GPU": gpu,
    "server": server,
    "server with keys": tls,
    "two servers": two,
    "split tensor": tensor,
    "--rpc": rpc,
}

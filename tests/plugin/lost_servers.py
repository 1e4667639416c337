"""Two servers that a test loses and brings back, and what counts as a fault of a program that uses them."""

import threading
import time
from dataclasses import dataclass, field

from devices import Devices, Programs, keys
from relay import Relay  # of tests/interop: `devices` adds the folder to the path
from servers import Server, free_port, ours

TIMEOUT_S = 3  # FANOUT_TIMEOUT: a stopped server counts as lost


class Wrong(Exception):
    """A reply that must not be, or the end of the program."""


@dataclass
class Counts:
    """What has happened in a row."""

    losses: int = 0
    right: int = 0
    errors: int = 0
    slowest_s: float = 0.0
    history: list[str] = field(default_factory=list)

    def print_row(self, name: str, begin: float, problem: str, more: str = "") -> None:
        """Prints the row of the table. A row without a problem has passed."""
        print(
            f"{'FAIL' if problem else 'ok':4}  {name:46} {self.losses:4} losses {self.right:5} right {self.errors:5} errors"
            f"{more}  back after {self.slowest_s:4.1f} s {time.monotonic() - begin:6.1f} s  {problem}",
            flush=True,
        )


class Pair:
    """Two servers on fixed ports behind relays, each of which can be lost and come back; with or without keys."""

    def __init__(self, programs: Programs, with_keys: bool = False):
        self._binary = programs.server
        self._options: tuple[str, ...] = ("--peer", "127.0.0.1:*")
        self._env = {"FANOUT_DEVICES": "none", "FANOUT_TIMEOUT": str(TIMEOUT_S)}
        if with_keys:
            # Without peers: they would have to prove keys to each other.
            self._options, env = keys(programs)
            self._env |= env
        self._ports = [free_port(), free_port()]
        self._servers: list[Server] = [self._start(0), self._start(1)]
        self._relays = [Relay(f"127.0.0.1:{port}").__enter__() for port in self._ports]
        self._change = threading.Lock()
        self._ended = False

    def _start(self, which: int) -> Server:
        return ours(1, binary=self._binary, port=self._ports[which], options=self._options).__enter__()

    def devices(self) -> Devices:
        endpoints = ",".join(relay.endpoint for relay in self._relays)
        env = {**self._env, "FANOUT_SERVERS": endpoints}
        return Devices(env, ("Fanout0", "Fanout1"), ("--split", "layer", "--tensor-split", "1,2"))

    def lose(self, which: int, how: str) -> None:
        """A connection that is cut is made again at once: between two calls of the same evaluation. A killed server takes longer."""
        if how == "cut":
            for connection in self._relays[which].connections():
                connection.end()
        elif how == "stop":
            self._servers[which].pause()
        else:
            self._servers[which].kill()

    def bring_back(self, which: int, how: str) -> None:
        with self._change:
            if self._ended:
                return  # the row has failed before its server was due
            if how == "stop":
                self._servers[which].resume()
            elif how == "kill":
                self._servers[which] = self._start(which)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        with self._change:
            self._ended = True
        for server, relay in zip(self._servers, self._relays, strict=True):
            relay.__exit__(None, None, None)
            server.resume()
            server.kill()

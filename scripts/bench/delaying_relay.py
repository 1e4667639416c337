"""A relay in front of a server that makes the link to it slow: a delay, and a limit of bandwidth for each direction."""

import queue
import socket
import threading
import time
from contextlib import suppress

import common  # noqa: F401  (the import path of the interop modules)

from relay import Relay  # isort: skip

CHUNK_BYTES = 16 << 10
PENDING = 256  # pieces on their way in one direction of a connection; then the sender waits, as at a full TCP window


class _Direction:
    """What all connections share in one direction."""

    def __init__(self, delay: float, rate: float):
        self._delay, self._rate, self._free_at, self._lock = delay, rate, 0.0, threading.Lock()

    def due(self, size: int) -> float:
        """When the last of `size` bytes that the link takes now arrives at its other end."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / self._rate
            return self._free_at + self._delay


class DelayingRelay(Relay):
    """`delay`: of one direction, in seconds; `rate`: of one direction, in bytes per second."""

    def __init__(self, upstream: str, delay: float, rate: float):
        super().__init__(upstream)
        self._directions = (_Direction(delay, rate), _Direction(delay, rate))

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        for source, sink, direction in zip((client, server), (server, client), self._directions, strict=True):
            pieces: queue.Queue[tuple[float, bytes]] = queue.Queue(PENDING)
            threading.Thread(target=_receive, args=(source, pieces, direction), daemon=True).start()
            threading.Thread(target=_send, args=(sink, pieces), daemon=True).start()


def _receive(source: socket.socket, pieces: queue.Queue, direction: _Direction) -> None:
    data = b"?"
    while data:
        data = b""
        with suppress(OSError):
            data = source.recv(CHUNK_BYTES)
        pieces.put((direction.due(len(data)), data))


def _send(sink: socket.socket, pieces: queue.Queue) -> None:
    """Send each piece when it is due; an empty one ends the direction. After an error, only empty the queue."""
    while True:
        due, data = pieces.get()
        time.sleep(max(0.0, due - time.monotonic()))
        with suppress(OSError):
            if data:
                sink.sendall(data)
            else:
                sink.shutdown(socket.SHUT_WR)
        if not data:
            return

"""A relay in front of a server that makes the link to it slow: a delay, and a limit of bandwidth for each direction."""

import queue
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType

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


class DelayingRelay:
    """Listens on a free port. `delay`: of one direction, in seconds; `rate`: of one direction, in bytes per second."""

    def __init__(self, upstream: str, delay: float, rate: float):
        host, port = upstream.rsplit(":", 1)
        self._upstream = (host, int(port))
        self._directions = (_Direction(delay, rate), _Direction(delay, rate))

    def __enter__(self) -> "DelayingRelay":
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                server = socket.create_connection(self._upstream)
            except OSError:
                client.close()
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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

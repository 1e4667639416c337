"""A relay in front of a server, whose connections a test can freeze or reset one by one."""

import select
import socket
import struct
import threading
import time
from contextlib import suppress
from types import TracebackType

WAIT_S = 60.0
PIECE = 1 << 16


class Line:
    """One connection: both of its ends here. Its thread closes them, and nobody else."""

    def __init__(self, ends: tuple[socket.socket, socket.socket]):
        self._ends = ends
        self._other, self._own = socket.socketpair()  # wakes the thread
        self._frozen = self._ended = self._fragile = self._cut = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def freeze(self) -> None:
        """From now on nothing passes, and neither end learns of it, nor that the other one has closed."""
        self._frozen = True
        self._wake()

    def reset_at_next(self) -> None:
        """With the next bytes that its opener sends, which get lost, it ends as with a router that has forgotten it."""
        self._fragile = True

    def end(self) -> None:
        self._ended = True
        self._wake()
        self._thread.join(WAIT_S)

    def _wake(self) -> None:
        with suppress(OSError):
            self._other.send(b"!")

    def _serve(self) -> None:
        with suppress(OSError):
            self._pass_on()
        for end in self._ends:
            if self._cut:
                # Closed like this, it sends RST.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()
        self._own.close()
        self._other.close()

    def _pass_on(self) -> None:
        one, two = self._ends
        sinks = {one: two, two: one}
        while not self._ended:
            watched = [] if self._frozen else list(sinks)
            for ready in select.select([self._own, *watched], [], [])[0]:
                if ready is self._own:
                    self._own.recv(PIECE)
                elif not self._frozen and not self._ended:
                    data = ready.recv(PIECE)
                    self._cut = self._fragile and ready is one
                    if not data or self._cut:
                        return
                    sinks[ready].sendall(data)


class Relay:
    """Listens on a port of the system's choice and passes connections on to `upstream`, in the order of their opening."""

    def __init__(self, upstream: str):
        host, port = upstream.rsplit(":", 1)
        self._upstream = (host, int(port))
        self._lines: list[Line] = []
        self._changed = threading.Condition()

    def __enter__(self) -> "Relay":
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
        for line in self.lines():
            line.end()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                server = socket.create_connection(self._upstream, timeout=WAIT_S)
            except OSError:
                client.close()
                continue
            for end in (client, server):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._changed:
                self._lines.append(Line((client, server)))
                self._changed.notify_all()

    def lines(self) -> list[Line]:
        """All connections so far."""
        with self._changed:
            return list(self._lines)

    def line(self, number: int) -> Line:
        """The connection of a number, from 0, once it is there."""
        deadline = time.monotonic() + WAIT_S
        with self._changed:
            while len(self._lines) <= number:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise ConnectionError(f"only {len(self._lines)} connections came to {self.endpoint}")
            return self._lines[number]

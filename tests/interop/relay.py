"""A relay in front of a server. A test can freeze, reset or close each of its connections."""

import select
import socket
import struct
import threading
import time
from contextlib import suppress
from types import TracebackType

WAIT_S = 60.0
PIECE = 1 << 16


class RelayedConnection:
    """One relayed connection: the socket to the client and the socket to the server. Only its thread closes them."""

    def __init__(self, ends: tuple[socket.socket, socket.socket]):
        self._ends = ends
        self._wake_sender, self._wake_receiver = socket.socketpair()  # wakes the thread
        self._frozen = self._ended = self._reset_at_next = self._reset = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def freeze(self) -> None:
        """Stop forwarding without closing: neither end learns that the connection is dead or that the peer has closed it."""
        self._frozen = True
        self._wake()

    def reset_at_next(self) -> None:
        """Discard the next bytes of the client and reset both ends, as a router does that has dropped the connection."""
        self._reset_at_next = True

    def end(self) -> None:
        self._ended = True
        self._wake()
        self._thread.join(WAIT_S)

    def _wake(self) -> None:
        with suppress(OSError):
            self._wake_sender.send(b"!")

    def _serve(self) -> None:
        with suppress(OSError):
            self._forward()
        for end in self._ends:
            if self._reset:
                # With a zero linger time, close() sends RST.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _forward(self) -> None:
        one, two = self._ends
        sinks = {one: two, two: one}
        while not self._ended:
            watched = [] if self._frozen else list(sinks)
            for ready in select.select([self._wake_receiver, *watched], [], [])[0]:
                if ready is self._wake_receiver:
                    self._wake_receiver.recv(PIECE)
                elif not self._frozen and not self._ended:
                    data = ready.recv(PIECE)
                    self._reset = self._reset_at_next and ready is one
                    if not data or self._reset:
                        return
                    sinks[ready].sendall(data)


class Relay:
    """Listens on a free port and forwards connections to `upstream`. Connections are numbered in the order of their opening."""

    def __init__(self, upstream: str):
        host, port = upstream.rsplit(":", 1)
        self._upstream = (host, int(port))
        self._connections: list[RelayedConnection] = []
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
        for connection in self.connections():
            connection.end()

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
            self._relay(client, server)

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        """Start to forward a new connection. Subclasses may forward it in another way; these connections are not counted."""
        with self._changed:
            self._connections.append(RelayedConnection((client, server)))
            self._changed.notify_all()

    def connections(self) -> list[RelayedConnection]:
        """All connections that were opened so far, including closed ones."""
        with self._changed:
            return list(self._connections)

    def connection(self, number: int) -> RelayedConnection:
        """Wait for connection `number`, counted from 0."""
        deadline = time.monotonic() + WAIT_S
        with self._changed:
            while len(self._connections) <= number:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise ConnectionError(f"{self.endpoint} has only {len(self._connections)} connections after {WAIT_S:.0f} s")
            return self._connections[number]

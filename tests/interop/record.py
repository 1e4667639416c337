#!/usr/bin/env python3
"""Record sessions of a real llama.cpp client with llama.cpp's own server, or list the commands of a recording.

    record.py OUT.rec MODEL.gguf [options of llama_client.py]
    record.py --list FILE.rec

A recording is little-endian and packed:

    magic "FANOUTRC", version u32 = 1, then records up to the end of the file:
    connection u32, direction u8, length u64, bytes[length]

Connections are numbered from 0 in the order of their opening. Direction 0 is client to server: one whole
request, `cmd u8 | size u64 | body`. Direction 1 is server to client: one whole response, `size u64 | body`.
Records are in the order in which the messages were forwarded; a response follows its request.
"""

import argparse
import collections
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from servers import HERE, ServerError, peer

MAGIC, VERSION = b"FANOUTRC", 1
REQUEST, RESPONSE = 0, 1
RECORD = struct.Struct("<IBQ")
CLIENT_S = 300.0
COMMANDS = (
    *("ALLOC_BUFFER", "GET_ALIGNMENT", "GET_MAX_SIZE", "BUFFER_GET_BASE", "FREE_BUFFER", "BUFFER_CLEAR"),
    *("SET_TENSOR", "SET_TENSOR_HASH", "GET_TENSOR", "COPY_TENSOR", "GRAPH_COMPUTE", "GET_DEVICE_MEMORY"),
    *("INIT_TENSOR", "GET_ALLOC_SIZE", "HELLO", "DEVICE_COUNT", "GRAPH_RECOMPUTE", "MEMSET_TENSOR"),
)
SILENT = frozenset(("SET_TENSOR", "GRAPH_COMPUTE", "GRAPH_RECOMPUTE"))
SILENT_SINCE_7 = frozenset(("FREE_BUFFER", "BUFFER_CLEAR", "INIT_TENSOR", "MEMSET_TENSOR"))  # before: an empty response


class Recorder:
    """Writes the messages of all connections in the order in which the proxy forwards them."""

    def __init__(self, out: BinaryIO):
        self._out = out
        self._lock = threading.Lock()
        out.write(MAGIC + struct.pack("<I", VERSION))

    def add(self, connection: int, direction: int, message: bytes) -> None:
        with self._lock:
            self._out.write(RECORD.pack(connection, direction, len(message)))
            self._out.write(message)


def read_exact(s: socket.socket, n: int) -> bytes | None:
    """`n` bytes, or None if the peer closed the connection between two messages."""
    data = bytearray()
    while len(data) < n:
        part = s.recv(min(n - len(data), 1 << 20))
        if not part:
            if data:
                raise EOFError(f"the connection ended after {len(data)} of {n} bytes")
            return None
        data += part
    return bytes(data)


def pump(source: socket.socket, sink: socket.socket, connection: int, direction: int, out: Recorder) -> None:
    """Forward whole messages until `source` closes.

    Each message is recorded before it is forwarded, so that a response follows its request.
    """
    header_size = 9 if direction == REQUEST else 8
    while header := read_exact(source, header_size):
        size = struct.unpack("<Q", header[-8:])[0]
        body = read_exact(source, size) if size else b""
        if body is None:
            raise EOFError(f"the connection ended after a header that announces {size} bytes")
        out.add(connection, direction, header + body)
        sink.sendall(header + body)
    sink.shutdown(socket.SHUT_WR)


class Proxy:
    """Listens on a free port and forwards every connection to `upstream`."""

    def __init__(self, upstream: str, out: Recorder):
        host, port = upstream.rsplit(":", 1)
        self._upstream = (host, int(port))
        self._out = out
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        connection = 0
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed by finish()
            server = socket.create_connection(self._upstream)
            for s in (client, server):
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink, direction in ((client, server, REQUEST), (server, client, RESPONSE)):
                t = threading.Thread(target=pump, args=(source, sink, connection, direction, self._out))
                t.start()
                self._threads.append(t)
            connection += 1

    def finish(self) -> None:
        """Stop listening and wait until all connections are closed."""
        self._listener.close()
        for t in self._threads:
            t.join(CLIENT_S)


def records(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yields (connection, direction, message) of a recording."""
    data = path.read_bytes()
    if data[:8] != MAGIC or struct.unpack_from("<I", data, 8)[0] != VERSION:
        raise ValueError(f"{path} is not a recording of version {VERSION}")
    at = 12
    while at < len(data):
        connection, direction, length = RECORD.unpack_from(data, at)
        at += RECORD.size
        yield connection, direction, data[at : at + length]
        at += length


def check(path: Path) -> None:
    """Check that each request with a response got one response, and that there are no other responses."""
    waiting: dict[int, collections.deque[str]] = collections.defaultdict(collections.deque)
    silent = SILENT
    for connection, direction, message in records(path):
        if direction == REQUEST:
            command = COMMANDS[message[0]]
            if command not in silent:
                waiting[connection].append(command)
        elif not waiting[connection]:
            raise ValueError(f"connection {connection}: a response without a request")
        elif waiting[connection].popleft() == "HELLO":
            major = message[8]
            silent = SILENT | SILENT_SINCE_7 if major >= 7 else SILENT
    if left := {c: list(q) for c, q in waiting.items() if q}:
        raise ValueError(f"unanswered: {left}")


def list_recording(path: Path) -> None:
    """Print how often each command was sent, and its bytes in both directions."""
    count: collections.Counter[str] = collections.Counter()
    sent: collections.Counter[str] = collections.Counter()
    connections = set()
    for connection, direction, message in records(path):
        connections.add(connection)
        name = COMMANDS[message[0]] if direction == REQUEST else "(responses)"
        count[name] += 1
        sent[name] += len(message)
    print(f"{path}: {path.stat().st_size} bytes, {len(connections)} connections")
    for name in [*COMMANDS, "(responses)"]:
        if count[name]:
            print(f"  {name:18} {count[name]:6} {sent[name]:9} bytes")


def record(path: Path, model: str, options: list[str]) -> None:
    with path.open("wb") as out, peer(threads=1) as server:
        proxy = Proxy(server.endpoint, Recorder(out))
        argv = [sys.executable, str(HERE / "llama_client.py"), model, "--rpc", proxy.endpoint, *options]
        subprocess.run(argv, check=True, timeout=CLIENT_S)
        proxy.finish()
    check(path)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--list", action="store_true", help="list the recording")
    p.add_argument("recording", type=Path)
    p.add_argument("model", nargs="?")
    args, options = p.parse_known_args()
    try:
        if not args.list:
            if not args.model:
                p.error("MODEL is missing")
            record(args.recording, args.model, options)
        list_recording(args.recording)
    except (ServerError, ValueError) as e:
        sys.exit(str(e))


if __name__ == "__main__":
    main()

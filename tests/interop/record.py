#!/usr/bin/env python3
"""Record sessions of a real llama.cpp client with llama.cpp's own server, or list the commands of a recording.

    record.py OUT.rec MODEL.gguf [options of llama_client.py]
    record.py --generated-weights OUT.rec MODEL.gguf [...]
    record.py --llama8 FOLDER OUT.rec MODEL.gguf [options of llama8-client]
    record.py --list FILE.rec

The client and the server speak 7.0; with --llama8, 8.0.1: FOLDER has the programs of interop8, and the client evaluates the
prompt of its tests. With --generated-weights, the server gets weights that a replay can generate instead of the model's, so
that the recording need not contain them. `tests/rpc/recordings/README.md` describes the format.
"""

import argparse
import collections
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

from recording import REQUEST, RESPONSE, Message, read, with_generated_weights, write
from servers import HERE, ROOT, ServerError, peer

CLIENT_S = 300.0
COMMANDS = (
    *("ALLOC_BUFFER", "GET_ALIGNMENT", "GET_MAX_SIZE", "BUFFER_GET_BASE", "FREE_BUFFER", "BUFFER_CLEAR"),
    *("SET_TENSOR", "SET_TENSOR_HASH", "GET_TENSOR", "COPY_TENSOR", "GRAPH_COMPUTE", "GET_DEVICE_MEMORY"),
    *("INIT_TENSOR", "GET_ALLOC_SIZE", "HELLO", "DEVICE_COUNT", "GRAPH_RECOMPUTE", "MEMSET_TENSOR"),
    *("SET_TENSOR_2D", "GET_TENSOR_2D", "COMM_INIT", "COMM_ALLREDUCE", "COMM_FREE"),
)
SILENT = frozenset(("SET_TENSOR", "GRAPH_COMPUTE", "GRAPH_RECOMPUTE", "SET_TENSOR_2D", "COMM_ALLREDUCE", "COMM_FREE"))
SILENT_SINCE_7 = frozenset(("FREE_BUFFER", "BUFFER_CLEAR", "INIT_TENSOR", "MEMSET_TENSOR"))  # before: an empty response


class Recorder:
    """Keeps the messages of all connections in the order in which the proxy forwards them."""

    def __init__(self, generated_weights: bool):
        self.messages: list[Message] = []
        self.generated_weights = generated_weights
        self._lock = threading.Lock()

    def add(self, connection: int, direction: int, message: bytes) -> None:
        with self._lock:
            self.messages.append(Message(connection, direction, message))


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
        message = header + body
        if direction == REQUEST and out.generated_weights:
            message = with_generated_weights(message)
        out.add(connection, direction, message)
        sink.sendall(message)
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


def check(path: Path) -> None:
    """Check that each request with a response got one response, and that there are no other responses."""
    waiting: dict[int, collections.deque[str]] = collections.defaultdict(collections.deque)
    silent = SILENT
    for message in read(path):
        if message.direction == REQUEST:
            command = COMMANDS[message.data[0]]
            if command not in silent:
                waiting[message.connection].append(command)
        elif not waiting[message.connection]:
            raise ValueError(f"connection {message.connection}: a response without a request")
        elif waiting[message.connection].popleft() == "HELLO":
            major = message.data[8]
            silent = SILENT | SILENT_SINCE_7 if major >= 7 else SILENT
    if left := {c: list(q) for c, q in waiting.items() if q}:
        raise ValueError(f"unanswered: {left}")


def list_recording(path: Path) -> None:
    """Print how often each command was sent, and its bytes in both directions."""
    count: collections.Counter[str] = collections.Counter()
    sent: collections.Counter[str] = collections.Counter()
    connections = set()
    for message in read(path):
        connections.add(message.connection)
        name = COMMANDS[message.data[0]] if message.direction == REQUEST else "(responses)"
        count[name] += 1
        sent[name] += len(message.data)
    print(f"{path}: {path.stat().st_size} bytes, {len(connections)} connections")
    for name in [*COMMANDS, "(responses)"]:
        if count[name]:
            print(f"  {name:18} {count[name]:6} {sent[name]:9} bytes")


def record(path: Path, args: argparse.Namespace, options: list[str]) -> None:
    recorder = Recorder(args.generated_weights)
    if args.llama8:
        sys.path.append(str(ROOT / "tests/interop8"))
        from programs import Programs, listed, prompt

        programs = Programs(fanout=Path(), llama8=args.llama8, scratch=Path(), threads=1)
        upstream = programs.peer()
    else:
        upstream = peer(threads=1)
    with upstream as server:
        proxy = Proxy(server.endpoint, recorder)
        if args.llama8:
            options = ["--model", args.model, "--rpc", proxy.endpoint, "--tokens", listed(prompt()), *options]
            with programs.client(options) as client:
                client.report(CLIENT_S)
        else:
            argv = [sys.executable, str(HERE / "llama_client.py"), args.model, "--rpc", proxy.endpoint, *options]
            subprocess.run(argv, check=True, timeout=CLIENT_S)
        proxy.finish()
    write(path, recorder.messages)
    check(path)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("--list", action="store_true", help="list the recording")
    p.add_argument("--generated-weights", action="store_true", help="replace the model's weights by ones from a seed")
    p.add_argument("--llama8", type=Path, metavar="FOLDER", help="folder of llama8-client and llama8-server")
    p.add_argument("recording", type=Path)
    p.add_argument("model", nargs="?")
    args, options = p.parse_known_args()
    try:
        if not args.list:
            if not args.model:
                p.error("MODEL is missing")
            record(args.recording, args, options)
        list_recording(args.recording)
    except (ServerError, ValueError) as e:
        sys.exit(str(e))


if __name__ == "__main__":
    main()

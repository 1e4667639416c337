"""A minimal client of protocol 7.0, for tests and benchmarks that need control over single messages."""

import socket
import struct

ALLOC_BUFFER, BUFFER_GET_BASE, SET_TENSOR, GET_TENSOR, HELLO, DEVICE_COUNT = 0, 3, 6, 8, 14, 15
F32 = 0
TIMEOUT_S = 60.0


class RawClient:
    """One connection that has exchanged HELLO."""

    def __init__(self, endpoint: str):
        host, port = endpoint.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.version = tuple(self.request(HELLO, bytes(24))[:3])

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def _read(self, n: int) -> bytes:
        data = bytearray()
        while len(data) < n:
            part = self.socket.recv(n - len(data))
            if not part:
                raise ConnectionError(f"closed by the server after {len(data)} of {n} bytes")
            data += part
        return bytes(data)

    def request(self, command: int, body: bytes = b"") -> bytes:
        """Send a request and return the body of its response."""
        self.socket.sendall(struct.pack("<BQ", command, len(body)) + body)
        return self._read(struct.unpack("<Q", self._read(8))[0])

    def device_count(self) -> int:
        return struct.unpack("<I", self.request(DEVICE_COUNT))[0]

    def alloc(self, size: int) -> tuple[int, int]:
        """A buffer of `size` bytes on device 0: its handle and its base address."""
        handle, _ = struct.unpack("<QQ", self.request(ALLOC_BUFFER, struct.pack("<IQ", 0, size)))
        if not handle:
            raise ConnectionError(f"the server cannot allocate {size} bytes")
        return handle, struct.unpack("<Q", self.request(BUFFER_GET_BASE, struct.pack("<Q", handle)))[0]

    def upload_header(self, tensor: bytes, size: int) -> None:
        """Send the head of a SET_TENSOR of `size` bytes at offset 0 of `tensor`; the caller sends the bytes."""
        length = len(tensor) + 1 + 8 + size
        self.socket.sendall(struct.pack("<BQ", SET_TENSOR, length) + tensor + struct.pack("<BQ", 0, 0))

    def download(self, tensor: bytes, offset: int, size: int) -> bytes:
        return self.request(GET_TENSOR, tensor + struct.pack("<QQ", offset, size))

    def download_into(self, tensor: bytes, offset: int, out: memoryview) -> None:
        """As `download`, but receives directly into `out`: for measurements."""
        body = tensor + struct.pack("<QQ", offset, len(out))
        self.socket.sendall(struct.pack("<BQ", GET_TENSOR, len(body)) + body)
        if struct.unpack("<Q", self._read(8))[0] != len(out):
            raise ConnectionError(f"the reply does not have the requested {len(out)} bytes")
        while out:
            got = self.socket.recv_into(out)
            if not got:
                raise ConnectionError(f"closed by the server, {len(out)} bytes are missing")
            out = out[got:]


def vector(buffer: int, address: int, elements: int) -> bytes:
    """The 296-byte record of a contiguous f32 vector without an op."""
    size = 4 * elements
    record = struct.pack("<QIQ4I4I", 1, F32, buffer, elements, 1, 1, 1, 4, size, size, size)
    record += struct.pack("<I16ii10Q", 0, *[0] * 16, 0, *[0] * 10)  # op, op_params, flags, src
    record += struct.pack("<QQQ", 0, 0, address)  # view_src, view_offs, data
    return record + b"upload".ljust(64, b"\0") + struct.pack("<i", 0)  # name, use_count

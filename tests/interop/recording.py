"""The format of recorded sessions. `tests/rpc/recordings/README.md` describes it."""

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAGIC, VERSION = b"FANOUTRC", 2
REQUEST, RESPONSE = 0, 1
RECORD = struct.Struct("<IBQ")
LITERAL, WEIGHTS, HALVES = range(3)
SET_TENSOR, GET_TENSOR = 6, 8
TENSOR, SET_TENSOR_HEAD = 296, 9 + 296 + 1 + 8
F32, F16 = 0, 1
WIDTH = {F32: 4, F16: 2}


@dataclass
class Message:
    """A whole message of a connection, with its header."""

    connection: int
    direction: int
    data: bytes


def generated_weights(dtype: int, seed: int, first: int, count: int) -> bytes:
    """Weights from a seed, exact in F16: element i is the upper 12 bits of splitmix64's output i, signed, times 2**-14. F32,
    the type of norms, has one added."""
    z = (np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    values = ((z >> np.uint64(52)).astype(np.float32) - 2048) / 16384
    return (values + 1).astype("<f4").tobytes() if dtype == F32 else values.astype("<f2").tobytes()


def dtype_of(request: bytes) -> int:
    """The type of the tensor with which a request begins."""
    return struct.unpack_from("<I", request, 9 + 8)[0]


def weights_of(request: bytes) -> tuple[int, int, int] | None:
    """Type, seed and first element of the generated weights that replace the data of a request, if it uploads weights."""
    if request[0] != SET_TENSOR:
        return None
    dtype = dtype_of(request)
    name = request[9 + TENSOR - 68 : 9 + TENSOR - 4].split(b"\0")[0]
    if not name.endswith(b".weight") or dtype not in WIDTH:
        return None
    seed = 0xCBF29CE484222325  # FNV-1a of the name
    for byte in name:
        seed = (seed ^ byte) * 0x100000001B3 % (1 << 64)
    offset = struct.unpack_from("<Q", request, SET_TENSOR_HEAD - 8)[0]
    return dtype, seed, offset // WIDTH[dtype]


def with_generated_weights(request: bytes) -> bytes:
    """The request with generated weights instead of its own, if it uploads weights."""
    if (found := weights_of(request)) is None:
        return request
    dtype, seed, first = found
    size = len(request) - SET_TENSOR_HEAD
    return request[:SET_TENSOR_HEAD] + generated_weights(dtype, seed, first, size // WIDTH[dtype])


class Packer:
    """Packs the messages of a session into segments."""

    def __init__(self) -> None:
        self._requests: dict[int, bytes] = {}  # the last one of each connection

    def pack(self, message: Message) -> bytes:
        data = message.data
        if message.direction == REQUEST:
            self._requests[message.connection] = data
        request = self._requests[message.connection]
        record = RECORD.pack(message.connection, message.direction, len(data))
        if message.direction == REQUEST and (found := weights_of(data)):
            dtype, seed, first = found
            weights = data[SET_TENSOR_HEAD:]
            if weights == generated_weights(dtype, seed, first, len(weights) // WIDTH[dtype]):
                head = literal(data[:SET_TENSOR_HEAD])
                return record + head + struct.pack("<BIBQQ", WEIGHTS, len(weights), dtype, seed, first)
        if message.direction == RESPONSE and request[0] == GET_TENSOR and dtype_of(request) == F32:
            halves = np.frombuffer(data[8:], "<f4").astype("<f2").tobytes()
            return record + literal(data[:8]) + struct.pack("<BI", HALVES, len(data) - 8) + halves
        return record + literal(data)


def literal(data: bytes) -> bytes:
    return struct.pack("<BI", LITERAL, len(data)) + data


def write(path: Path, messages: Iterable[Message]) -> None:
    packer = Packer()
    packed = b"".join(packer.pack(message) for message in messages)
    path.write_bytes(MAGIC + struct.pack("<I", VERSION) + zlib.compress(packed, 9))


def read(path: Path) -> Iterator[Message]:
    """The messages of a recording. Version 1 has whole messages; version 2 has segments, compressed."""
    data = path.read_bytes()
    version = struct.unpack_from("<I", data, 8)[0]
    if data[:8] != MAGIC or version not in (1, VERSION):
        raise ValueError(f"{path} is not a recording of version 1 or {VERSION}")
    data = data[12:] if version == 1 else zlib.decompress(data[12:])
    at = 0
    while at < len(data):
        connection, direction, length = RECORD.unpack_from(data, at)
        at += RECORD.size
        if version == 1:
            yield Message(connection, direction, data[at : at + length])
            at += length
            continue
        message = bytearray()
        while len(message) < length:
            kind, size = struct.unpack_from("<BI", data, at)
            at += 5
            if kind == LITERAL:
                message += data[at : at + size]
                at += size
            elif kind == WEIGHTS:
                dtype, seed, first = struct.unpack_from("<BQQ", data, at)
                message += generated_weights(dtype, seed, first, size // WIDTH[dtype])
                at += 17
            elif kind == HALVES:
                message += np.frombuffer(data[at : at + size // 2], "<f2").astype("<f4").tobytes()
                at += size // 2
            else:
                raise ValueError(f"{path}: no segment has the kind {kind}")
        yield Message(connection, direction, bytes(message))

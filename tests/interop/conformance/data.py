"""Random contents of tensors of every type, and their values as f32."""

import ctypes
from functools import cache

import numpy as np

from .ggml import CONVERT, load

PLAIN = {"f32": np.float32, "f16": np.float16, "f64": np.float64, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64}
FLOATS = ("f32", "f16", "bf16")
INFINITE = 0x7C00  # as f16


@cache
def scale_fields(name: str) -> tuple[int, ...]:
    """The offsets of the f16 scales in a block of a type, read from ggml's dequantiser: a scale is a pair of bytes that makes
    every value of a block of zeros infinite or NaN.
    """
    lib = load()
    size = lib.ggml_type_size(lib.types()[name])
    found = []
    for offset in range(0, size - 1, 2):
        raw = np.zeros(size, np.uint8)
        raw[offset : offset + 2] = np.array([INFINITE], np.uint16).view(np.uint8)
        if not np.isfinite(decode(name, raw)).any():
            found.append(offset)
    return tuple(found)


@cache
def magnitude(name: str) -> float:
    """The magnitude of scales with which random codes have values of about 1."""
    values = decode(name, scaled(np.random.default_rng(0), name, 64, 1.0))
    return float(1.0 / np.sqrt((values.astype(np.float64) ** 2).mean()))


def blocks(rng: np.random.Generator, name: str, count: int) -> np.ndarray:
    """`count` blocks of a quantised type: random codes, and finite scales of both signs. Values are about 1."""
    # Types that are only copied have no dequantiser.
    return scaled(rng, name, count, 0.01 if name in ("q8_1", "q8_k") else magnitude(name))


def scaled(rng: np.random.Generator, name: str, count: int, magnitude: float) -> np.ndarray:
    """`count` blocks with random codes and scales of a quarter of `magnitude` to `magnitude`."""
    lib = load()
    size = lib.ggml_type_size(lib.types()[name])
    raw = rng.integers(0, 256, (count, size), dtype=np.uint8)
    scales = (rng.uniform(0.25, 1.0, (count, 2)) * rng.choice([-1.0, 1.0], (count, 2)) * magnitude).astype(np.float16)
    if name == "q8_1":
        raw[:, 0:4] = scales.view(np.uint8)
    elif name == "q8_k":  # an f32, and the sums of 16 codes each
        raw[:, 0:4] = scales[:, :1].astype(np.float32).view(np.uint8)
        sums = raw[:, 4:260].view(np.int8).reshape(count, 16, 16).astype(np.int16).sum(axis=2, dtype=np.int16)
        raw[:, 260:292] = np.ascontiguousarray(sums).view(np.uint8)
    elif name == "mxfp4":  # an exponent
        raw[:, 0] = rng.integers(118, 130, count)
    elif name == "nvfp4":  # four numbers of 8 bits
        raw[:, 0:4] = rng.integers(0, 0x48, (count, 4))
    elif name == "iq1_m":  # the top nibbles of four words
        d = np.abs(scales[:, 0]).astype(np.float16).view(np.uint16)
        words = raw[:, 48:56].view(np.uint16) & 0x0FFF
        for k in range(4):
            words[:, k] |= ((d >> (4 * k)) & 15) << 12
        raw[:, 48:56] = words.view(np.uint8)
    else:
        for k, offset in enumerate(scale_fields(name)):
            raw[:, offset : offset + 2] = scales[:, k : k + 1].view(np.uint8)
    return raw.reshape(-1)


def encode(name: str, values: np.ndarray) -> np.ndarray:
    """Bytes of a tensor with these values. Quantised types take ggml's reference quantiser."""
    if name in PLAIN:
        return np.ascontiguousarray(values.astype(PLAIN[name])).view(np.uint8).reshape(-1)
    values = np.ascontiguousarray(values, dtype=np.float32)
    if name == "bf16":
        bits = values.view(np.uint32)
        return np.ascontiguousarray(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)).view(np.uint8).reshape(-1)
    lib = load()
    number = lib.types()[name]
    # Q8_K has its quantiser in the table of the CPU backend only.
    function = lib.traits(number).from_float_ref or lib.cpu_traits(number).from_float
    out = np.zeros(lib.ggml_row_size(number, values.size), np.uint8)
    CONVERT(function)(values.ctypes.data, out.ctypes.data, values.size)
    return out


def decode(name: str, raw: np.ndarray) -> np.ndarray:
    """The values of a tensor's bytes, as f32 (f64 and integers as they are). Types without a dequantiser as bytes."""
    if name in PLAIN:
        return raw.view(PLAIN[name])
    if name == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    lib = load()
    number = lib.types()[name]
    traits = lib.traits(number)
    if not traits.to_float:
        return raw
    out = np.empty(raw.size // traits.type_size * traits.blck_size, np.float32)
    if raw.size:
        CONVERT(traits.to_float)(raw.ctypes.data, out.ctypes.data_as(ctypes.c_void_p), out.size)
    return out

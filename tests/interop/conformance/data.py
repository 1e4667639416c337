"""Random contents of tensors of every type, and their values as f32."""

import ctypes

import numpy as np

from .ggml import CONVERT, load

# Block types: the offsets of the scale fields of a block (f16 unless a name says otherwise).
SCALES: dict[str, tuple[int, ...]] = {
    "q1_0": (0,),
    "q2_0": (0,),
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q8_1": (0, 2),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "tq1_0": (52,),
    "tq2_0": (64,),
    "iq2_xxs": (0,),
    "iq2_xs": (0,),
    "iq2_s": (0,),
    "iq3_xxs": (0,),
    "iq3_s": (0,),
    "iq1_s": (0,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
}
PLAIN = {"f32": np.float32, "f16": np.float16, "f64": np.float64, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64}
FLOATS = ("f32", "f16", "bf16")
# Codes are random bytes, so scales of this magnitude give values of about 1.
SCALE = {"q8_0": 0.01, "q8_1": 0.01, "q8_k": 0.01, "q6_k": 5e-4, "q3_k": 0.01, "q5_k": 5e-4, "q4_k": 1e-3, "q2_k": 0.02}
SCALE |= {"iq4_nl": 0.01, "iq4_xs": 4e-4, "iq2_xxs": 0.01, "iq2_xs": 0.01, "iq2_s": 0.01, "iq3_xxs": 0.005, "iq3_s": 0.004}


def blocks(rng: np.random.Generator, name: str, count: int) -> np.ndarray:
    """`count` blocks of a quantised type: random codes, and finite scales of both signs."""
    lib = load()
    size = lib.ggml_type_size(lib.types()[name])
    raw = rng.integers(0, 256, (count, size), dtype=np.uint8)
    magnitude = SCALE.get(name, 0.1)
    scales = (rng.uniform(0.25, 1.0, (count, 2)) * rng.choice([-1.0, 1.0], (count, 2)) * magnitude).astype(np.float16)
    for k, offset in enumerate(SCALES.get(name, ())):
        raw[:, offset : offset + 2] = scales[:, k : k + 1].view(np.uint8)
    if name == "q8_k":
        raw[:, 0:4] = scales[:, :1].astype(np.float32).view(np.uint8)
        sums = raw[:, 4:260].view(np.int8).reshape(count, 16, 16).astype(np.int16).sum(axis=2, dtype=np.int16)
        raw[:, 260:292] = np.ascontiguousarray(sums).view(np.uint8)
    elif name == "mxfp4":
        raw[:, 0] = rng.integers(118, 130, count)
    elif name == "nvfp4":
        raw[:, 0:4] = rng.integers(0, 0x48, (count, 4))
    elif name == "iq1_m":
        # The f16 scale lies in the top nibbles of the four words at offset 48.
        d = np.abs(scales[:, 0]).astype(np.float16).view(np.uint16)
        words = raw[:, 48:56].view(np.uint16) & 0x0FFF
        for k in range(4):
            words[:, k] |= ((d >> (4 * k)) & 15) << 12
        raw[:, 48:56] = words.view(np.uint8)
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

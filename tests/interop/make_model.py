#!/usr/bin/env python3
"""Write a GGUF model with random weights and a byte-fallback vocabulary.

The weights come from a seeded generator, so the same arguments always give the same file. The generated text is
meaningless, but shapes, operations and traffic are those of a real model. Sizes: micro for recorded sessions, tiny
for the interop tests, deep for tests with many servers, 100m and 1b for the benchmarks. f32 and f16 need only numpy and gguf;
every other type needs llama-cpp-python, whose ggml library quantises. q4_k_m, a mixture of types, is quantised from a temporary
f16 file.

    make_model.py --size tiny --type f16 tiny-f16.gguf
    make_model.py --arch qwen3moe --type iq3_s moe.gguf
    make_model.py --size 1b --type q4_k_m 1b-q4_k_m.gguf
"""

import argparse
import ctypes
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import gguf
import numpy as np
from archs import ARCHS as FURTHER

# scripts/gpu.sh copies the type table beside this file for another machine.
sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "scripts"))
import type_table  # noqa: E402


@dataclass(frozen=True)
class Size:
    """Dimensions of a model: widths in elements, `vocab` in tokens; `experts` only in a mixture of experts."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ff: int
    vocab: int
    experts: int = 8


SIZES = {
    "micro": Size(2, 64, 4, 2, 128, 320, experts=4),
    "tiny": Size(2, 256, 8, 4, 512, 512),
    "deep": Size(12, 128, 4, 2, 256, 512),
    "100m": Size(12, 768, 12, 4, 2048, 8192),
    "1b": Size(22, 2048, 32, 4, 5632, 32000),
}
ARCHS = ("llama", "qwen2", "qwen3", "qwen3moe", *FURTHER)
EXPERTS_USED = 2
# The types of weights that llama.cpp 7.0 loads. It has no F8_E4M3, and Q8_1 and Q8_K are only types of activations.
NOT_LOADED = ("F8_E4M3", "Q8_1", "Q8_K")
# Each of these types is the type of all matrices, embedding and output too.
DIRECT = {row.name.lower(): row for row in type_table.that_can("decode") if row.name not in NOT_LOADED}
# Types whose quantiser searches a grid of points. In every process, ggml prepares that search for up to 13 CPU seconds (IQ1_S).
GRIDS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
MIXTURE = "q4_k_m"  # matrices of q4_k and q6_k, as llama.cpp's quantiser chooses
TYPES = (*DIRECT, MIXTURE)


@cache
def quantiser() -> Callable[..., int]:
    """ggml_quantize_chunk of llama-cpp-python's ggml library."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("make_model.py: this type needs llama-cpp-python: run scripts/venv.sh")
    ggml = ctypes.CDLL(os.path.join(spec.submodule_search_locations[0], "lib", "libggml-base.so.0"))
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,  # type
        ctypes.c_void_p,  # f32 values
        ctypes.c_void_p,  # quantised rows
        ctypes.c_int64,  # first element
        ctypes.c_int64,  # rows
        ctypes.c_int64,  # elements of a row
        ctypes.c_void_p,  # importance of each column; none
    ]
    return ggml.ggml_quantize_chunk


def quantised(data: np.ndarray, row: type_table.Type) -> np.ndarray:
    """The f32 matrix in the type of `row`, u8 [..., rows, bytes of a row]."""
    cols = data.shape[-1]
    out = np.empty((*data.shape[:-1], cols // row.block_len * row.block_bytes), np.uint8)
    size = quantiser()(row.number, data.ctypes.data, out.ctypes.data, 0, data.size // cols, cols, None)
    assert size == out.nbytes, f"{row.name}: {size} of {out.nbytes} bytes"
    return out


def random_blocks(rng: np.random.Generator, shape: tuple[int, ...], row: type_table.Type) -> np.ndarray:
    """A matrix of random bits in a type of `GRIDS`, u8 as `quantised` returns it, with rows of unit expected norm.

    Every index of a grid, sign and small scale is valid, so only the f16 scale of each block is set. Unlike quantised normal
    numbers, random bits use all points of the grid equally.
    """
    blocks = shape[-1] // row.block_len
    raw = rng.integers(0, 256, (*shape[:-1], blocks, row.block_bytes), np.uint8)
    set_scale(raw, row, 1.0)
    dtype = gguf.GGMLQuantizationType(row.number)
    spread = gguf.quants.dequantize(raw.reshape(-1, row.block_bytes)[:64], dtype).std()
    set_scale(raw, row, shape[-1] ** -0.5 / spread)
    return raw.reshape(*shape[:-1], blocks * row.block_bytes)


def set_scale(blocks: np.ndarray, row: type_table.Type, scale: float) -> None:
    """Set the f16 scale of each block: its first two bytes, in IQ1_M the upper four bits of each of its last four u16."""
    bits = int(np.float16(scale).view(np.uint16))
    if row.name == "IQ1_M":
        for i in range(4):
            upper = blocks[..., 49 + 2 * i]
            upper[...] = upper & 0x0F | (bits >> 4 * i & 0x0F) << 4
    else:
        blocks[..., :2] = np.frombuffer(bits.to_bytes(2, "little"), np.uint8)


def vocabulary(size: int) -> tuple[list[str], list[float], list[gguf.TokenType]]:
    """SentencePiece-style pieces, scores and kinds: 3 control tokens, 256 byte tokens, then filler words."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    pieces += ["\u2581", *letters]
    for n in range(size - len(pieces)):
        pieces.append("\u2581" + "".join(letters[n // 26**k % 26] for k in range(4)))
    kinds += [gguf.TokenType.NORMAL] * (size - len(kinds))
    scores = [0.0] * 259 + [-float(i) for i in range(size - 259)]
    return pieces[:size], scores, kinds


class Writer:
    """A GGUF file under construction, with the random numbers that fill it."""

    def __init__(self, path: str, arch: str, dtype: str, seed: int):
        self.gguf = gguf.GGUFWriter(path, arch)
        self.dtype = dtype
        self.rng = np.random.default_rng(seed)

    def matrix(self, name: str, rows: int, cols: int, experts: int = 0, dtype: str | None = None) -> None:
        """A weight matrix with rows of unit expected norm, in the model's type unless `dtype` is given."""
        dtype = dtype or self.dtype
        shape = (experts, rows, cols) if experts else (rows, cols)
        row = DIRECT[dtype]
        if cols % row.block_len:
            raise ValueError(f"{name}: rows of {cols} elements are no whole blocks of {row.name}")
        if row.name in GRIDS:
            self.add_blocks(name, random_blocks(self.rng, shape, row), row)
            return
        data = self.rng.standard_normal(shape, dtype=np.float32) * np.float32(cols**-0.5)
        if dtype == "f32":
            self.gguf.add_tensor(name, data)
        elif dtype == "f16":
            self.gguf.add_tensor(name, data.astype(np.float16))
        else:
            self.add_blocks(name, quantised(data, row), row)

    def add_blocks(self, name: str, data: np.ndarray, row: type_table.Type) -> None:
        # The gguf package computes the shape from the bytes. It does not know the newest types.
        gguf.GGML_QUANT_SIZES.setdefault(row.number, (row.block_len, row.block_bytes))
        self.gguf.add_tensor(name, data, raw_dtype=row.number)

    def vector(self, name: str, shape: int | tuple[int, ...], mean: float) -> None:
        """An f32 vector, as norms and biases are in every file. `shape` may have further dimensions, the fastest one last."""
        self.gguf.add_tensor(name, (mean + 0.1 * self.rng.standard_normal(shape)).astype(np.float32))

    def finish(self) -> None:
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()


def add_vocabulary(w: gguf.GGUFWriter, size: int) -> None:
    pieces, scores, kinds = vocabulary(size)
    w.add_vocab_size(size)
    w.add_tokenizer_model("llama")
    w.add_token_list(pieces)
    w.add_token_scores(scores)
    w.add_token_types(kinds)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)


def transformer_block(w: Writer, arch: str, size: Size, block: str) -> None:
    width, ff, experts, head = size.width, size.ff, size.experts, size.width // size.heads
    kv_width = head * size.kv_heads
    w.vector(f"{block}.attn_norm.weight", width, 1.0)
    w.matrix(f"{block}.attn_q.weight", width, width)
    w.matrix(f"{block}.attn_k.weight", kv_width, width)
    w.matrix(f"{block}.attn_v.weight", kv_width, width)
    w.matrix(f"{block}.attn_output.weight", width, width)
    if arch == "qwen2":
        for part, n in (("q", width), ("k", kv_width), ("v", kv_width)):
            w.vector(f"{block}.attn_{part}.bias", n, 0.0)
    if arch.startswith("qwen3"):
        w.vector(f"{block}.attn_q_norm.weight", head, 1.0)
        w.vector(f"{block}.attn_k_norm.weight", head, 1.0)
    w.vector(f"{block}.ffn_norm.weight", width, 1.0)
    if arch == "qwen3moe":
        w.matrix(f"{block}.ffn_gate_inp.weight", experts, width, dtype="f32")
        w.matrix(f"{block}.ffn_gate_exps.weight", ff // 2, width, experts)
        w.matrix(f"{block}.ffn_up_exps.weight", ff // 2, width, experts)
        w.matrix(f"{block}.ffn_down_exps.weight", width, ff // 2, experts)
    else:
        w.matrix(f"{block}.ffn_gate.weight", ff, width)
        w.matrix(f"{block}.ffn_up.weight", ff, width)
        w.matrix(f"{block}.ffn_down.weight", width, ff)


def attention_keys(w: gguf.GGUFWriter, size: Size, head: int | None, rotated: int | None, kv_heads: int) -> None:
    """Hyperparameters of attention: `head` channels per head, if not width / heads, of which `rotated` are rotated."""
    w.add_feed_forward_length(size.ff)
    w.add_head_count(size.heads)
    w.add_head_count_kv(kv_heads)
    w.add_rope_dimension_count(rotated or head or size.width // size.heads)
    w.add_rope_freq_base(10000.0)
    if head:
        w.add_key_length(head)
        w.add_value_length(head)


def write_direct(path: str, size: Size, arch: str, dtype: str, context: int, seed: int) -> None:
    """Write a model with all matrices in one type."""
    further = FURTHER.get(arch)
    writer = Writer(path, further.name if further else arch, dtype, seed)
    w = writer.gguf
    w.add_name("random")  # llama.cpp searches the name for models like phi-3
    w.add_context_length(context)
    w.add_embedding_length(size.width)
    w.add_block_count(size.layers)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_layer_norm_eps(1e-5)
    if further:
        if further.attention:
            attention_keys(w, size, further.head, further.rotated, 1 if arch == "deepseek2" else size.kv_heads)
        else:
            w.add_feed_forward_length(size.ff)
            w.add_head_count(0)
        further.keys(w, size)
    else:
        attention_keys(w, size, None, None, size.kv_heads)
        head = size.width // size.heads
        if arch.startswith("qwen3"):
            w.add_key_length(head)
            w.add_value_length(head)
        if arch == "qwen3moe":
            w.add_expert_count(size.experts)
            w.add_expert_used_count(EXPERTS_USED)
            w.add_expert_feed_forward_length(size.ff // 2)
    add_vocabulary(w, size.vocab)
    writer.matrix("token_embd.weight", size.vocab, size.width)
    writer.vector("output_norm.weight", size.width, 1.0)
    if not (further and further.tied):
        writer.matrix("output.weight", size.vocab, size.width)
    if further and further.biased:
        writer.vector("output_norm.bias", size.width, 0.0)
        writer.vector("output.bias", size.vocab, 0.0)
    for i in range(size.layers):
        if further:
            further.block(writer, size, f"blk.{i}", i)
        else:
            transformer_block(writer, arch, size, f"blk.{i}")
    writer.finish()


def write_mixture(source: str, path: str) -> None:
    """Quantise the f16 model `source` into the mixture of types `path`."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    params.nthread = os.cpu_count() or 1
    code = llama_cpp.llama_model_quantize(source.encode(), path.encode(), params)
    if code != 0:
        sys.exit(f"llama_model_quantize failed with {code}")


def make_model(path: str, size: str, arch: str, dtype: str, context: int = 4096, seed: int = 1) -> None:
    """Write one model to `path`. The file is renamed to `path` only when it is complete."""
    folder = os.path.dirname(os.path.abspath(path))
    with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as scratch:
        complete = os.path.join(scratch, "model.gguf")
        if dtype in DIRECT:
            write_direct(complete, SIZES[size], arch, dtype, context, seed)
        else:
            source = os.path.join(scratch, "f16.gguf")
            write_direct(source, SIZES[size], arch, "f16", context, seed)
            write_mixture(source, complete)
        os.replace(complete, path)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out")
    p.add_argument("--size", choices=SIZES, default="tiny")
    p.add_argument("--arch", choices=ARCHS, default="llama")
    p.add_argument("--type", choices=TYPES, default="f16", help="type of the weight matrices")
    p.add_argument("--context", type=int, default=4096, help="context length in tokens")
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    make_model(a.out, a.size, a.arch, a.type, a.context, a.seed)


if __name__ == "__main__":
    main()

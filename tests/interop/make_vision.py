#!/usr/bin/env python3
"""Write a GGUF file with a tiny vision encoder of random weights, as llama.cpp's libmtmd loads it beside a language model.

The embeddings are as wide as the models of make_model.py --size tiny. The comments at `ENCODERS` list what each of them
computes besides a vision transformer.

    make_vision.py --encoder gemma3 --type f16 mmproj.gguf
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from archs import linear
from make_model import SIZES, Writer

WIDTH, HEADS, FF, BLOCKS = 64, 4, 128, 3
EMBEDDING = SIZES["tiny"].width  # width of the language model


@dataclass(frozen=True)
class Encoder:
    """A kind of encoder: its image, and the tensors and hyperparameters that are its own."""

    projector: str  # clip.projector_type
    rest: Callable  # writes the tensors outside the blocks, and further hyperparameters
    image: int  # side of the image that it is trained for, in pixels
    patch: int  # side of a patch, in pixels
    rms: bool = False  # RMS norms, without biases, and SwiGLU; otherwise LayerNorm and GELU


def norm(w: Writer, name: str, n: int, bias: bool = True) -> None:
    w.vector(f"{name}.weight", n, 1.0)
    if bias:
        w.vector(f"{name}.bias", n, 0.0)


def plain_type(w: Writer) -> str:
    """The type of tensors that a block type cannot store, because their rows are short or are transposed."""
    return "f32" if w.dtype == "f32" else "f16"


def kernel(w: Writer, name: str, *shape: int) -> None:
    """The kernel of a convolution: output channels, input channels, rows, columns."""
    data = w.rng.standard_normal(shape, dtype=np.float32) * np.float32(np.prod(shape[1:]) ** -0.5)
    w.gguf.add_tensor(name, data.astype(np.float32 if plain_type(w) == "f32" else np.float16))


def block(w: Writer, name: str, rms: bool) -> None:
    norm(w, f"{name}.ln1", WIDTH, not rms)
    norm(w, f"{name}.ln2", WIDTH, not rms)
    for part in ("q", "k", "v", "out"):
        linear(w, f"{name}.attn_{part}", WIDTH, WIDTH)
    if rms:
        linear(w, f"{name}.ffn_gate", FF, WIDTH)
    linear(w, f"{name}.ffn_up", FF, WIDTH)
    linear(w, f"{name}.ffn_down", WIDTH, FF)


def patches(w: Writer, encoder: Encoder, extra: int = 0) -> None:
    """The convolution that makes patches, and embeddings of their positions and of `extra` ones."""
    kernel(w, "v.patch_embd.weight", WIDTH, 3, encoder.patch, encoder.patch)
    positions = (encoder.image // encoder.patch) ** 2 + extra
    w.matrix("v.position_embd.weight", positions, WIDTH, dtype="f32")


def gemma3(w: Writer, encoder: Encoder) -> None:
    patches(w, encoder)
    w.vector("v.patch_embd.bias", WIDTH, 0.0)
    norm(w, "v.post_ln", WIDTH)
    w.vector("mm.soft_emb_norm.weight", WIDTH, 1.0)
    w.matrix("mm.input_projection.weight", WIDTH, EMBEDDING, dtype=plain_type(w))


def ldp(w: Writer, encoder: Encoder) -> None:
    w.vector("v.class_embd", WIDTH, 0.0)
    patches(w, encoder, 1)
    norm(w, "v.pre_ln", WIDTH)
    linear(w, "mm.model.mlp.1", EMBEDDING, WIDTH)
    linear(w, "mm.model.mlp.3", EMBEDDING, EMBEDDING)
    for i in (1, 2):
        name = f"mm.model.mb_block.{i}.block"
        kernel(w, f"{name}.0.0.weight", EMBEDDING, 1, 3, 3)
        norm(w, f"{name}.0.1", EMBEDDING)
        linear(w, f"{name}.1.fc1", EMBEDDING // 4, EMBEDDING)
        linear(w, f"{name}.1.fc2", EMBEDDING, EMBEDDING // 4)
        w.matrix(f"{name}.2.0.weight", EMBEDDING, EMBEDDING)
        norm(w, f"{name}.2.1", EMBEDDING)


def lfm2(w: Writer, encoder: Encoder) -> None:
    w.gguf.add_vision_projector_scale_factor(2)
    patches(w, encoder)
    w.vector("v.patch_embd.bias", WIDTH, 0.0)
    norm(w, "v.post_ln", WIDTH)
    norm(w, "mm.input_norm", 4 * WIDTH)
    linear(w, "mm.1", FF, 4 * WIDTH)
    linear(w, "mm.2", EMBEDDING, FF)


def qwen25vl(w: Writer, encoder: Encoder) -> None:
    w.gguf.add_vision_n_wa_pattern(2)
    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
        kernel(w, name, WIDTH, 3, encoder.patch, encoder.patch)
    norm(w, "v.post_ln", WIDTH, bias=False)
    linear(w, "mm.0", 4 * WIDTH, 4 * WIDTH)
    linear(w, "mm.2", EMBEDDING, 4 * WIDTH)


ENCODERS = {
    "gemma3": Encoder("gemma3", gemma3, 112, 14),  # average pooling
    "ldp": Encoder("ldp", ldp, 96, 4),  # depthwise convolutions, pooling of all patches, HARDSWISH, HARDSIGMOID
    "lfm2": Encoder("lfm2", lfm2, 56, 7),  # embeddings of positions interpolated to the size of the image
    "qwen2.5vl": Encoder("qwen2.5vl_merger", qwen25vl, 112, 14, rms=True),  # two-dimensional rope, windows of attention
}


def make_vision(path: str, encoder: Encoder, dtype: str, seed: int = 1) -> None:
    writer = Writer(path, "clip", dtype, seed)
    w = writer.gguf
    w.add_clip_has_vision_encoder(True)
    w.add_clip_projector_type(encoder.projector)
    w.add_vision_image_size(encoder.image)
    w.add_vision_patch_size(encoder.patch)
    w.add_vision_embedding_length(WIDTH)
    w.add_vision_feed_forward_length(FF)
    w.add_vision_block_count(BLOCKS)
    w.add_vision_head_count(HEADS)
    w.add_vision_projection_dim(EMBEDDING)
    w.add_vision_attention_layernorm_eps(1e-5)
    w.add_vision_image_mean([0.5, 0.5, 0.5])
    w.add_vision_image_std([0.5, 0.5, 0.5])
    if encoder.rms:
        w.add_vision_use_silu(True)
    else:
        w.add_vision_use_gelu(True)
    encoder.rest(writer, encoder)
    for i in range(BLOCKS):
        block(writer, f"v.blk.{i}", encoder.rms)
    writer.finish()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out")
    p.add_argument("--encoder", choices=ENCODERS, required=True)
    p.add_argument("--type", choices=("f32", "f16", "q8_0"), default="f16", help="type of the weight matrices")
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    make_vision(a.out, ENCODERS[a.encoder], a.type, a.seed)


if __name__ == "__main__":
    main()

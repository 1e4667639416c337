"""Blocks and hyperparameters of architectures whose graphs differ from llama's, for make_model.py.

The comments at `ARCHS` list the features of each. Widths are small, and powers of two if the blocks of a type require it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import gguf

WINDOW = 32  # positions that a sliding window sees; the tests' prompts are longer
TRAINED = 256  # context length before its extension; the tests' contexts are longer
# deepseek2: ranks of q and of the KV cache; channels of a head with and without rotation, and of a head of v.
Q_RANK, KV_RANK, ROPE, NOPE, HEAD_V = 128, 128, 32, 32, 32


@dataclass(frozen=True)
class Arch:
    """How a model is written: its hyperparameters, one block, and the tensors behind the last block."""

    name: str  # general.architecture
    keys: Callable
    block: Callable
    head: int | None = None  # channels of a head, if not width / heads
    rotated: int | None = None  # rotated channels of a head, if not all
    tied: bool = False  # the output matrix is the embedding
    biased: bool = False  # output norm and output matrix have biases


def linear(w, name: str, rows: int, cols: int) -> None:
    """A matrix with a bias."""
    w.matrix(f"{name}.weight", rows, cols)
    w.vector(f"{name}.bias", rows, 0.0)


def ffn(w, block: str, width: int, ff: int, suffix: str = "") -> None:
    w.matrix(f"{block}.ffn_gate{suffix}.weight", ff, width)
    w.matrix(f"{block}.ffn_up{suffix}.weight", ff, width)
    w.matrix(f"{block}.ffn_down{suffix}.weight", width, ff)


def experts(w, block: str, width: int, ff: int, count: int, dtype: str | None = None) -> None:
    w.matrix(f"{block}.ffn_gate_inp.weight", count, width, dtype="f32")
    w.matrix(f"{block}.ffn_gate_exps.weight", ff, width, count, dtype)
    w.matrix(f"{block}.ffn_up_exps.weight", ff, width, count, dtype)
    w.matrix(f"{block}.ffn_down_exps.weight", width, ff, count, dtype)


def qkv(w, size, block: str, head: int, matrix: Callable) -> None:
    for part, heads in (("q", size.heads), ("k", size.kv_heads), ("v", size.kv_heads)):
        matrix(w, f"{block}.attn_{part}", heads * head, size.width)


def plain(w, name: str, rows: int, cols: int) -> None:
    w.matrix(f"{name}.weight", rows, cols)


def mixtral_keys(w: gguf.GGUFWriter, size) -> None:
    w.add_expert_count(size.experts)
    w.add_expert_used_count(2)


def mixtral_block(w, size, block: str, _: int) -> None:
    w.vector(f"{block}.attn_norm.weight", size.width, 1.0)
    qkv(w, size, block, size.width // size.heads, plain)
    w.matrix(f"{block}.attn_output.weight", size.width, size.width)
    w.vector(f"{block}.ffn_norm.weight", size.width, 1.0)
    experts(w, block, size.width, size.ff, size.experts)


def gemma_keys(w: gguf.GGUFWriter, _) -> None:
    w.add_sliding_window(WINDOW)
    w.add_sliding_window_pattern(2)
    w.add_final_logit_softcapping(30.0)


def gemma2_keys(w: gguf.GGUFWriter, size) -> None:
    gemma_keys(w, size)
    w.add_attn_logit_softcapping(50.0)


def gemma2_block(w, size, block: str, _: int) -> None:
    head = 64
    for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
        w.vector(f"{block}.{norm}.weight", size.width, 1.0)
    qkv(w, size, block, head, plain)
    w.matrix(f"{block}.attn_output.weight", size.width, size.heads * head)
    ffn(w, block, size.width, size.ff)


def gemma3_block(w, size, block: str, i: int) -> None:
    gemma2_block(w, size, block, i)
    w.vector(f"{block}.attn_q_norm.weight", 64, 1.0)
    w.vector(f"{block}.attn_k_norm.weight", 64, 1.0)


def phi2_block(w, size, block: str, _: int) -> None:
    kv_width = size.width // size.heads * size.kv_heads
    w.vector(f"{block}.attn_norm.weight", size.width, 1.0)
    w.vector(f"{block}.attn_norm.bias", size.width, 0.0)
    linear(w, f"{block}.attn_qkv", size.width + 2 * kv_width, size.width)
    linear(w, f"{block}.attn_output", size.width, size.width)
    linear(w, f"{block}.ffn_up", size.ff, size.width)
    linear(w, f"{block}.ffn_down", size.width, size.ff)


def phi3_keys(w: gguf.GGUFWriter, _) -> None:
    w.add_rope_scaling_orig_ctx_len(TRAINED)
    w.add_rope_scaling_attn_factors(1.19)


def phi3_block(w, size, block: str, i: int) -> None:
    head = size.width // size.heads
    if i == 0:
        w.vector("rope_factors_long.weight", head // 2, 4.0)
        w.vector("rope_factors_short.weight", head // 2, 1.0)
    w.vector(f"{block}.attn_norm.weight", size.width, 1.0)
    w.matrix(f"{block}.attn_qkv.weight", size.width + 2 * head * size.kv_heads, size.width)
    w.matrix(f"{block}.attn_output.weight", size.width, size.width)
    w.vector(f"{block}.ffn_norm.weight", size.width, 1.0)
    w.matrix(f"{block}.ffn_up.weight", 2 * size.ff, size.width)
    w.matrix(f"{block}.ffn_down.weight", size.width, size.ff)


def gpt_oss_keys(w: gguf.GGUFWriter, size) -> None:
    w.add_sliding_window(WINDOW)
    w.add_expert_count(size.experts)
    w.add_expert_used_count(4)
    w.add_expert_feed_forward_length(size.ff // 2)
    yarn(w, 32.0)


def yarn(w: gguf.GGUFWriter, factor: float) -> None:
    w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    w.add_rope_scaling_factor(factor)
    w.add_rope_scaling_orig_ctx_len(TRAINED)


def gpt_oss_block(w, size, block: str, _: int) -> None:
    """As in the real model: experts in mxfp4 for every type of the other matrices but f32, attention sinks, and biases."""
    width, ff = size.width, size.ff // 2
    w.vector(f"{block}.attn_norm.weight", width, 1.0)
    w.vector(f"{block}.post_attention_norm.weight", width, 1.0)
    qkv(w, size, block, width // size.heads, linear)
    linear(w, f"{block}.attn_output", width, width)
    w.vector(f"{block}.attn_sinks.weight", size.heads, 1.0)
    experts(w, block, width, ff, size.experts, None if w.dtype == "f32" else "mxfp4")
    w.vector(f"{block}.ffn_gate_inp.bias", size.experts, 0.0)
    for part, n in (("gate", ff), ("up", ff), ("down", width)):
        w.matrix(f"{block}.ffn_{part}_exps.bias", size.experts, n, dtype="f32")


def deepseek2_keys(w: gguf.GGUFWriter, size) -> None:
    w.add_leading_dense_block_count(1)
    w.add_q_lora_rank(Q_RANK)
    w.add_kv_lora_rank(KV_RANK)
    w.add_key_length(KV_RANK + ROPE)
    w.add_value_length(KV_RANK)
    w.add_key_length_mla(NOPE + ROPE)
    w.add_value_length_mla(HEAD_V)
    w.add_expert_count(size.experts)
    w.add_expert_used_count(2)
    w.add_expert_feed_forward_length(size.ff // 2)
    w.add_expert_shared_count(1)
    w.add_expert_group_count(4)
    w.add_expert_group_used_count(2)
    w.add_expert_weights_scale(2.5)
    w.add_expert_weights_norm(True)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    yarn(w, 4.0)
    w.add_rope_scaling_yarn_log_mul(0.1)


def deepseek2_block(w, size, block: str, i: int) -> None:
    """Attention over a compressed KV cache (MLA). From the second block on, experts are selected within selected groups."""
    width, heads, ff = size.width, size.heads, size.ff // 2
    w.vector(f"{block}.attn_norm.weight", width, 1.0)
    w.matrix(f"{block}.attn_q_a.weight", Q_RANK, width)
    w.vector(f"{block}.attn_q_a_norm.weight", Q_RANK, 1.0)
    w.matrix(f"{block}.attn_q_b.weight", heads * (NOPE + ROPE), Q_RANK)
    w.matrix(f"{block}.attn_kv_a_mqa.weight", KV_RANK + ROPE, width)
    w.vector(f"{block}.attn_kv_a_norm.weight", KV_RANK, 1.0)
    w.matrix(f"{block}.attn_k_b.weight", KV_RANK, NOPE, heads)
    w.matrix(f"{block}.attn_v_b.weight", HEAD_V, KV_RANK, heads)
    w.matrix(f"{block}.attn_output.weight", width, heads * HEAD_V)
    w.vector(f"{block}.ffn_norm.weight", width, 1.0)
    if i == 0:
        ffn(w, block, width, size.ff)
    else:
        experts(w, block, width, ff, size.experts)
        w.vector(f"{block}.exp_probs_b.bias", size.experts, 0.0)
        ffn(w, block, width, ff, "_shexp")


def nothing(_: gguf.GGUFWriter, __) -> None:
    """Adds no hyperparameters to those that all architectures share."""


ARCHS = {
    "mixtral": Arch("llama", mixtral_keys, mixtral_block),
    "gemma2": Arch("gemma2", gemma2_keys, gemma2_block, head=64, tied=True),  # soft-caps, GEGLU, sliding window
    "gemma3": Arch("gemma3", gemma_keys, gemma3_block, head=64, tied=True),  # as gemma2, with norms of q and k
    "phi2": Arch("phi2", nothing, phi2_block, rotated=16, biased=True),  # LayerNorm, partial rope, GELU
    "phi3": Arch("phi3", phi3_keys, phi3_block),  # fused matrices, frequency factors
    "gpt-oss": Arch("gpt-oss", gpt_oss_keys, gpt_oss_block),  # sinks, biased experts, SWIGLU_OAI, YaRN
    "deepseek2": Arch("deepseek2", deepseek2_keys, deepseek2_block, rotated=ROPE),  # MLA, shared experts, groups
}

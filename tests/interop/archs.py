"""Blocks and hyperparameters of architectures whose graphs differ from llama's, for make_model.py.

The comments at `ARCHS` list the features of each. Widths are small, and powers of two if the blocks of a type require it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np

WINDOW = 32  # positions that a sliding window sees; the tests' prompts are longer
TRAINED = 256  # context length before its extension; the tests' contexts are longer
# deepseek2: ranks of q and of the KV cache; channels of a head with and without rotation, and of a head of v.
Q_RANK, KV_RANK, ROPE, NOPE, HEAD_V = 128, 128, 32, 32, 32
KERNEL = 4  # positions under the convolution of a state-space layer
MAMBA_STATE = 16
# mamba2 and qwen3next: state size, groups and heads. In qwen3next, groups are heads of k, and a head of v is as wide as a state.
MAMBA2_STATE, GROUPS, SSM_HEADS = 32, 2, 8
DELTA_STATE, DELTA_HEADS = 64, 4
RWKV_RANK, RWKV_DECAY_RANK = 32, 64  # ranks of low-rank matrices: of all but decay and gate, and of these two


@dataclass(frozen=True)
class Arch:
    """How a model is written: its hyperparameters, one block, and the tensors behind the last block."""

    name: str  # general.architecture
    keys: Callable
    block: Callable
    attention: bool = True  # has layers with attention
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


def llama_block(w, size, block: str, _: int) -> None:
    w.vector(f"{block}.attn_norm.weight", size.width, 1.0)
    qkv(w, size, block, size.width // size.heads, plain)
    w.matrix(f"{block}.attn_output.weight", size.width, size.width)
    w.vector(f"{block}.ffn_norm.weight", size.width, 1.0)
    ffn(w, block, size.width, size.ff)


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


def llama_biases_keys(w: gguf.GGUFWriter, _) -> None:
    w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    w.add_rope_scaling_factor(2.0)


def llama_biases_block(w, size, block: str, i: int) -> None:
    """All biases that llama.cpp accepts, heads of another length than width / heads, and frequency factors."""
    head = 64
    if i == 0:
        w.vector("rope_freqs.weight", head // 2, 2.0)
    w.vector(f"{block}.attn_norm.weight", size.width, 1.0)
    qkv(w, size, block, head, linear)
    linear(w, f"{block}.attn_output", size.width, size.heads * head)
    w.vector(f"{block}.ffn_norm.weight", size.width, 1.0)
    for part, rows, cols in (("gate", size.ff, size.width), ("up", size.ff, size.width), ("down", size.width, size.ff)):
        linear(w, f"{block}.ffn_{part}", rows, cols)


def mistral3_keys(w: gguf.GGUFWriter, _) -> None:
    yarn(w, 16.0, trained=16)
    w.add_rope_scaling_yarn_beta_fast(4.0)
    w.add_rope_scaling_yarn_beta_slow(0.5)
    w.add_rope_scaling_yarn_log_mul(0.7)
    w.add_attn_temperature_scale(0.1)


def phi2_block(w, size, block: str, _: int) -> None:
    kv_width = size.width // size.heads * size.kv_heads
    w.vector(f"{block}.attn_norm.weight", size.width, 1.0)
    w.vector(f"{block}.attn_norm.bias", size.width, 0.0)
    linear(w, f"{block}.attn_qkv", size.width + 2 * kv_width, size.width)
    linear(w, f"{block}.attn_output", size.width, size.width)
    linear(w, f"{block}.ffn_up", size.ff, size.width)
    linear(w, f"{block}.ffn_down", size.width, size.ff)


def yarn_keys(w: gguf.GGUFWriter, _) -> None:
    yarn(w, 4.0)


def granite_keys(w: gguf.GGUFWriter, _) -> None:
    w.add_embedding_scale(6.0)
    w.add_residual_scale(0.25)
    w.add_attention_scale(0.125)
    w.add_logit_scale(4.0)


def phi3_keys(w: gguf.GGUFWriter, _) -> None:
    w.add_rope_scaling_orig_ctx_len(TRAINED)
    w.add_rope_scaling_attn_factors(1.19)


def phi3_block(w, size, block: str, i: int) -> None:
    head = size.width // size.heads
    if i == 0:
        w.vector("rope_factors_long.weight", head // 2, 4.0)
        w.vector("rope_factors_short.weight", head // 2, 1.0)
    fused_block(w, size, block, i)


def fused_block(w, size, block: str, _: int) -> None:
    head = size.width // size.heads
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


def yarn(w: gguf.GGUFWriter, factor: float, trained: int = TRAINED) -> None:
    w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    w.add_rope_scaling_factor(factor)
    w.add_rope_scaling_orig_ctx_len(trained)


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


def state_space_keys(w: gguf.GGUFWriter, inner: int, state: int, rank: int, groups: int | None = None) -> None:
    w.add_ssm_conv_kernel(KERNEL)
    w.add_ssm_inner_size(inner)
    w.add_ssm_state_size(state)
    w.add_ssm_time_step_rank(rank)
    if groups:
        w.add_ssm_group_count(groups)


def decays(n: int) -> np.ndarray:
    """Factors of a state's decay, which must be negative: -1 to -n."""
    return -np.arange(1, n + 1, dtype=np.float32)


def mamba_keys(w: gguf.GGUFWriter, size) -> None:
    state_space_keys(w, 2 * size.width, MAMBA_STATE, size.width // 16)


def mamba_block(w, size, block: str, _: int) -> None:
    inner, rank = 2 * size.width, size.width // 16
    w.vector(f"{block}.attn_norm.weight", size.width, 1.0)
    w.matrix(f"{block}.ssm_in.weight", 2 * inner, size.width)
    w.matrix(f"{block}.ssm_conv1d.weight", inner, KERNEL, dtype="f32")
    w.vector(f"{block}.ssm_conv1d.bias", inner, 0.0)
    w.matrix(f"{block}.ssm_x.weight", rank + 2 * MAMBA_STATE, inner)
    w.matrix(f"{block}.ssm_dt.weight", inner, rank, dtype="f32")
    w.vector(f"{block}.ssm_dt.bias", inner, 0.0)
    w.gguf.add_tensor(f"{block}.ssm_a", np.tile(decays(MAMBA_STATE), (inner, 1)))
    w.vector(f"{block}.ssm_d", inner, 1.0)
    w.matrix(f"{block}.ssm_out.weight", size.width, inner)


def mamba2_keys(w: gguf.GGUFWriter, size) -> None:
    state_space_keys(w, 2 * size.width, MAMBA2_STATE, SSM_HEADS, GROUPS)


def mamba2_block(w, size, block: str, _: int) -> None:
    inner = 2 * size.width
    convolved = inner + 2 * GROUPS * MAMBA2_STATE
    w.vector(f"{block}.attn_norm.weight", size.width, 1.0)
    w.matrix(f"{block}.ssm_in.weight", inner + convolved + SSM_HEADS, size.width)
    w.matrix(f"{block}.ssm_conv1d.weight", convolved, KERNEL, dtype="f32")
    w.vector(f"{block}.ssm_conv1d.bias", convolved, 0.0)
    w.vector(f"{block}.ssm_dt.bias", SSM_HEADS, 0.0)
    w.gguf.add_tensor(f"{block}.ssm_a", decays(SSM_HEADS)[:, np.newaxis])
    w.vector(f"{block}.ssm_d", (SSM_HEADS, 1), 1.0)
    w.vector(f"{block}.ssm_norm.weight", (GROUPS, inner // GROUPS), 1.0)
    w.matrix(f"{block}.ssm_out.weight", size.width, inner)


def qwen3next_keys(w: gguf.GGUFWriter, size) -> None:
    state_space_keys(w, DELTA_STATE * DELTA_HEADS, DELTA_STATE, DELTA_HEADS, GROUPS)
    w.add_full_attention_interval(2)
    w.add_expert_count(size.experts)
    w.add_expert_used_count(2)
    w.add_expert_feed_forward_length(size.ff // 2)
    w.add_expert_shared_feed_forward_length(size.ff // 2)


def qwen3next_block(w, size, block: str, i: int) -> None:
    """A gated delta net in even layers and gated attention in odd ones, each before experts and a shared expert with a gate."""
    width, head = size.width, size.width // size.heads
    w.vector(f"{block}.attn_norm.weight", width, 1.0)
    w.vector(f"{block}.post_attention_norm.weight", width, 1.0)
    if i % 2 == 0:
        key, value = GROUPS * DELTA_STATE, DELTA_HEADS * DELTA_STATE
        w.matrix(f"{block}.attn_qkv.weight", 2 * key + value, width)
        w.matrix(f"{block}.attn_gate.weight", value, width)
        w.matrix(f"{block}.ssm_conv1d.weight", 2 * key + value, KERNEL, dtype="f32")
        w.vector(f"{block}.ssm_dt.bias", DELTA_HEADS, 0.0)
        w.gguf.add_tensor(f"{block}.ssm_a", decays(DELTA_HEADS))
        w.matrix(f"{block}.ssm_ba.weight", 2 * DELTA_HEADS, width)
        w.vector(f"{block}.ssm_norm.weight", DELTA_STATE, 1.0)
        w.matrix(f"{block}.ssm_out.weight", width, value)
    else:
        w.matrix(f"{block}.attn_q.weight", 2 * width, width)
        w.matrix(f"{block}.attn_k.weight", size.kv_heads * head, width)
        w.matrix(f"{block}.attn_v.weight", size.kv_heads * head, width)
        w.matrix(f"{block}.attn_output.weight", width, width)
        w.vector(f"{block}.attn_q_norm.weight", head, 1.0)
        w.vector(f"{block}.attn_k_norm.weight", head, 1.0)
    experts(w, block, width, size.ff // 2, size.experts)
    w.vector(f"{block}.ffn_gate_inp_shexp.weight", width, 0.0)
    ffn(w, block, width, size.ff // 2, "_shexp")


def rwkv_keys(w: gguf.GGUFWriter, size, shifts: int = 2, head: int | None = None) -> None:
    """`shifts`: how many activations of the previous token a block mixes with those of the current one."""
    w.add_wkv_head_size(head or size.width // size.heads)
    w.add_token_shift_count(shifts)


def rwkv_norms(w, size, block: str, i: int) -> None:
    if i == 0:
        w.vector("token_embd_norm.weight", size.width, 1.0)
        w.vector("token_embd_norm.bias", size.width, 0.0)
        w.vector("output_norm.bias", size.width, 0.0)
    for norm in ("attn_norm", "attn_norm_2", "time_mix_ln"):
        w.vector(f"{block}.{norm}.weight", size.width, 1.0)
        w.vector(f"{block}.{norm}.bias", size.width, 0.0)


def low_rank(w, block: str, first: str, second: str, width: int, rank: int) -> None:
    """The two matrices of a product of low rank, which llama.cpp's quantiser leaves in f32."""
    w.matrix(f"{block}.{first}.weight", rank, width, dtype="f32")
    w.matrix(f"{block}.{second}.weight", width, rank, dtype="f32")


def rwkv6_keys(w: gguf.GGUFWriter, size, shifts: int = 2) -> None:
    rwkv_keys(w, size, shifts)
    w.add_time_mix_extra_dim(RWKV_RANK)
    w.add_time_decay_extra_dim(RWKV_DECAY_RANK)


def rwkv6_time_mix(w, block: str, width: int) -> None:
    w.matrix(f"{block}.time_mix_w1.weight", 5 * RWKV_RANK, width, dtype="f32")
    w.matrix(f"{block}.time_mix_w2.weight", width, RWKV_RANK, 5, dtype="f32")
    w.vector(f"{block}.time_mix_lerp_x.weight", (1, 1, width), 0.5)
    w.vector(f"{block}.time_mix_lerp_fused.weight", (5, 1, 1, width), 0.5)
    w.vector(f"{block}.time_mix_decay.weight", width, -1.0)
    low_rank(w, block, "time_mix_decay_w1", "time_mix_decay_w2", width, RWKV_DECAY_RANK)
    for part in ("key", "value", "receptance", "gate", "output"):
        w.matrix(f"{block}.time_mix_{part}.weight", width, width)


def rwkv6_block(w, size, block: str, i: int) -> None:
    width = size.width
    rwkv_norms(w, size, block, i)
    rwkv6_time_mix(w, block, width)
    w.vector(f"{block}.time_mix_first.weight", (size.heads, width // size.heads), 0.5)
    w.vector(f"{block}.channel_mix_lerp_k.weight", (1, 1, width), 0.5)
    w.vector(f"{block}.channel_mix_lerp_r.weight", (1, 1, width), 0.5)
    w.matrix(f"{block}.channel_mix_key.weight", size.ff, width)
    w.matrix(f"{block}.channel_mix_value.weight", width, size.ff)
    w.matrix(f"{block}.channel_mix_receptance.weight", width, width)


def rwkv6qwen2_keys(w: gguf.GGUFWriter, size) -> None:
    rwkv6_keys(w, size, shifts=1)


def rwkv6qwen2_block(w, size, block: str, _: int) -> None:
    w.vector(f"{block}.attn_norm.weight", size.width, 1.0)
    rwkv6_time_mix(w, block, size.width)
    w.vector(f"{block}.ffn_norm.weight", size.width, 1.0)
    ffn(w, block, size.width, size.ff)


def rwkv7_keys(w: gguf.GGUFWriter, size) -> None:
    # ggml's loop over a head takes 32 channels at once, 64 with AVX-512, and writes behind the end of smaller heads.
    rwkv_keys(w, size, head=64)
    w.add_decay_lora_rank(RWKV_DECAY_RANK)
    w.add_iclr_lora_rank(RWKV_RANK)
    w.add_value_residual_mix_lora_rank(RWKV_RANK)
    w.add_gate_lora_rank(RWKV_DECAY_RANK)


def rwkv7_block(w, size, block: str, i: int) -> None:
    width = size.width
    rwkv_norms(w, size, block, i)
    for part, rank in (("w", RWKV_DECAY_RANK), ("a", RWKV_RANK), ("v", RWKV_RANK)):
        w.vector(f"{block}.time_mix_{part}0.weight", width, 0.0)
        low_rank(w, block, f"time_mix_{part}1", f"time_mix_{part}2", width, rank)
    low_rank(w, block, "time_mix_g1", "time_mix_g2", width, RWKV_DECAY_RANK)
    w.vector(f"{block}.time_mix_lerp_fused.weight", (6, 1, 1, width), 0.5)
    for part in ("k_k", "k_a", "r_k"):
        w.vector(f"{block}.time_mix_{part}.weight", width, 0.5)
    for part in ("key", "value", "receptance", "output"):
        w.matrix(f"{block}.time_mix_{part}.weight", width, width)
    w.vector(f"{block}.channel_mix_lerp_k.weight", (1, 1, width), 0.5)
    w.matrix(f"{block}.channel_mix_key.weight", size.ff, width)
    w.matrix(f"{block}.channel_mix_value.weight", width, size.ff)


def nothing(_: gguf.GGUFWriter, __) -> None:
    """Adds no hyperparameters to those that all architectures share."""


ARCHS = {
    "mixtral": Arch("llama", mixtral_keys, mixtral_block),
    "gemma2": Arch("gemma2", gemma2_keys, gemma2_block, head=64, tied=True),  # soft-caps, GEGLU, sliding window
    "gemma3": Arch("gemma3", gemma_keys, gemma3_block, head=64, tied=True),  # as gemma2, with norms of q and k
    "phi2": Arch("phi2", nothing, phi2_block, rotated=16, biased=True),  # LayerNorm, partial rope, GELU
    "phi3": Arch("phi3", phi3_keys, phi3_block),  # fused matrices, frequency factors
    "phi3-4k": Arch("phi3", nothing, fused_block, rotated=24),  # fused matrices, partial rope
    "llama-biases": Arch("llama", llama_biases_keys, llama_biases_block, head=64),  # biases, frequency factors, linear scaling
    "mistral3": Arch("mistral3", mistral3_keys, llama_block),  # scores grow with the position, YaRN with a multiplier
    "granite": Arch("granite", granite_keys, llama_block),  # factors on embeddings, residuals, scores and logits
    "smollm3": Arch("smollm3", nothing, llama_block),  # no rope in every fourth block
    "yarn": Arch("llama", yarn_keys, llama_block),  # a longer context by YaRN
    "gpt-oss": Arch("gpt-oss", gpt_oss_keys, gpt_oss_block),  # sinks, biased experts, SWIGLU_OAI, YaRN
    "deepseek2": Arch("deepseek2", deepseek2_keys, deepseek2_block, rotated=ROPE),  # MLA, shared experts, groups
    "mamba": Arch("mamba", mamba_keys, mamba_block, attention=False),  # convolution and scan of a state
    "mamba2": Arch("mamba2", mamba2_keys, mamba2_block, attention=False),  # as mamba, with heads and groups
    "rwkv6": Arch("rwkv6", rwkv6_keys, rwkv6_block, attention=False),  # a linear recurrence with data-dependent decay
    "rwkv6qwen2": Arch("rwkv6qwen2", rwkv6qwen2_keys, rwkv6qwen2_block, attention=False),  # gated linear attention
    "rwkv7": Arch("rwkv7", rwkv7_keys, rwkv7_block, attention=False),  # as rwkv6, with a delta rule
    # A gated delta net, attention, and experts.
    "qwen3next": Arch("qwen3next", qwen3next_keys, qwen3next_block, head=32, rotated=16),
}

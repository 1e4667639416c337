// Online softmax and arguments of FLASH_ATTN_EXT, shared by flash_attn.cu and flash_attn_mma.cu.
#pragma once
#include "common/abi.cuh"

constexpr u16 HIDDEN = 0xfc00; // -infinity: mask value of a hidden position
constexpr u32 HIDDEN_PAIR = (u32)HIDDEN << 16 | HIDDEN;
constexpr float LOG2E = 1.44269504f;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000); }

// 2^x. Scores are kept in units of ln 2, so that no other exponential is needed.
__device__ __forceinline__ float exp2_approximately(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh(x), with an absolute error of a few 2^-24.
__device__ __forceinline__ float tanh_approximately(float x) {
    return 1.0f - __fdividef(2.0f, exp2_approximately(2.0f * LOG2E * x) + 1.0f);
}

// 2^(x - top). If `top` is -infinity, all positions so far are hidden: their weights are 0, and NaN is preserved.
__device__ __forceinline__ float weight(float x, float top) {
    return exp2_approximately(x - (top == minus_infinity() ? 0.0f : top));
}

// Factor that rescales sums relative to the maximum `old` when the maximum becomes `top`.
__device__ __forceinline__ float rescaling(float old, float top) {
    return old == minus_infinity() ? 1.0f : exp2_approximately(old - top);
}

// Factor that normalises the weighted sums to the result: 1 / total, where the total includes the weight of the sink.
__device__ __forceinline__ float normalisation(float top, float total, const float *sink) {
    if (total == 0.0f) return 0.0f;
    if (!sink) return 1.0f / total;
    const float s = *sink * LOG2E, both = fmaxf(top, s), factor = rescaling(top, both);
    return factor / (total * factor + exp2_approximately(s - both));
}

struct FlashAttnArgs {
    const u8 *q, *k, *v, *mask;
    const float *sinks;
    float *dst;
    float *sums;  // weighted sums of each part: [part][query][channels in whole octets]
    float *stats; // statistics of each part: [part][query][maximum, total]
    u64 qb[3], kb[3], vb[3], mb[3]; // byte strides of dimensions 1 to 3
    u32 dk, dv;
    u32 tokens, heads, batches, positions;
    u32 per_k, per_v; // heads of q per head of k, and of v
    u32 group;        // number of consecutive heads of q that share k and v
    u32 mask_heads, mask_batches;
    u32 log_quads;     // queries per tile: 4 << log_quads
    u32 tiles;         // tiles per group
    u32 spans, octets; // spans of the channels of v, one per block; octets per span, at most 128
    u32 part;          // positions per part (split-K)
    u32 types[2];      // types of k and v, for flash_attn_any
    u32 slope_steps;   // ALiBi: heads with slope slope_bases[0]^(h + 1); the rest have odd powers of slope_bases[1]
    float slope_bases[2];
    float scale, cap;
    u32 stages; // of the tiles of k and v in shared memory: flash_attn_blocks.cu
};

// x^n
__device__ __forceinline__ float power(float x, u32 n) {
    float y = 1.0f;
#pragma unroll 1
    for (; n; n >>= 1, x *= x) {
        if (n & 1) y *= x;
    }
    return y;
}

// Slope of the mask's biases for a head (ALiBi).
__device__ __forceinline__ float alibi_slope(const FlashAttnArgs &args, u32 head) {
    const u32 steps = args.slope_steps;
    if (steps == 0) return 1.0f;
    const bool late = head >= steps;
    return power(late ? args.slope_bases[1] : args.slope_bases[0], late ? 2 * (head - steps) + 1 : head + 1);
}

// What block `x` of the grid computes: tiles, spans, groups, batches, with tiles fastest and the last tile first, because a
// causal mask gives it the most work.
struct BlockPlace {
    u32 first; // query of the group
    u32 span, head0, batch;
};

__device__ __forceinline__ BlockPlace block_place(const FlashAttnArgs &args, u32 x = blockIdx.x) {
    BlockPlace place;
    place.first = (args.tiles - 1 - x % args.tiles) * (4 << args.log_quads);
    x /= args.tiles;
    place.span = x % args.spans;
    x /= args.spans;
    const u32 groups = args.heads / args.group;
    place.head0 = x % groups * args.group, place.batch = x / groups;
    return place;
}

// Biases, or HIDDEN_PAIR. The predicates keep the compiler from branches, so that all loads of a tile are in flight together.
__device__ __forceinline__ u32 load_pair(const u16 *at, bool wanted) {
    u32 pair;
    asm("{.reg .pred p; setp.ne.u32 p, %2, 0; mov.u32 %0, %3; @p ld.global.u32 %0, [%1];}"
        : "=r"(pair)
        : "l"(__cvta_generic_to_global(at)), "r"((u32)wanted), "n"(HIDDEN_PAIR));
    return pair;
}
__device__ __forceinline__ u32 load_one(const u16 *at, bool wanted) {
    u16 bias;
    asm("{.reg .pred p; setp.ne.u32 p, %2, 0; mov.u16 %0, %3; @p ld.global.u16 %0, [%1];}"
        : "=h"(bias)
        : "l"(__cvta_generic_to_global(at)), "r"((u32)wanted), "n"(HIDDEN));
    return bias;
}

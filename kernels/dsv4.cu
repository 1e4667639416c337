// DSV4_HC_COMB, DSV4_HC_PRE, DSV4_HC_POST: hyper-connections. LIGHTNING_INDEXER: scores of the cells of a KV cache.
//
// Variants: one entry per op, of any layout. hc_comb: one token per thread, whose matrix stays in registers; hc_pre, hc_post: one
//           element per thread; indexer: KEYS cells of a token per block, keys of F32, F16 or BF16.
// Accuracy: f32 sums, in the order of the streams and of the elements.
// Limits:   dimensions below 2^31; indexer: queries of at most MAX_WIDTH elements.
// Floor:    hyper-connections read each operand once, but hc_post reads the residual once per stream, mostly from the caches. The
//           indexer has a fused multiply-add per cell, head and element, and reads the queries once per KEYS cells.
#include "common/abi.cuh"
#include "common/math.cuh"
#include "common/types.cuh"

#define STREAMS 4

struct HcCombArgs {
    const u8 *mixes, *scale, *base;
    u8 *y;
    u64 mixes_nb[2], scale_nb, base_nb, y_nb[3]; // byte strides
    u32 tokens, iterations;
    float eps;
    u32 padding;
};

// Grid: groups of blockDim.x tokens.
extern "C" __global__ void dsv4_hc_comb(HcCombArgs args) {
    const u32 token = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= args.tokens) return;
    const float factor = *(const float *)(args.scale + 2 * args.scale_nb);
    float m[STREAMS][STREAMS];
#pragma unroll
    for (int s = 0; s < STREAMS; s++) {
        float top = -__int_as_float(0x7f800000);
#pragma unroll
        for (int d = 0; d < STREAMS; d++) {
            // The matrix is behind two vectors.
            const u32 at = 2 * STREAMS + s * STREAMS + d;
            const float mix = *(const float *)(args.mixes + at * args.mixes_nb[0] + token * args.mixes_nb[1]);
            m[s][d] = mix * factor + *(const float *)(args.base + at * args.base_nb);
            top = fmaxf(top, m[s][d]);
        }
        float sum = 0.0f;
#pragma unroll
        for (int d = 0; d < STREAMS; d++) sum += m[s][d] = expf(m[s][d] - top);
#pragma unroll
        for (int d = 0; d < STREAMS; d++) m[s][d] = m[s][d] * (1.0f / sum) + args.eps;
    }
#pragma unroll 1
    for (u32 i = 0; i < args.iterations; i++) {
#pragma unroll
        for (int s = 0; s < STREAMS && i > 0; s++) {
            float sum = args.eps;
#pragma unroll
            for (int d = 0; d < STREAMS; d++) sum += m[s][d];
#pragma unroll
            for (int d = 0; d < STREAMS; d++) m[s][d] *= 1.0f / sum;
        }
#pragma unroll
        for (int d = 0; d < STREAMS; d++) {
            float sum = args.eps;
#pragma unroll
            for (int s = 0; s < STREAMS; s++) sum += m[s][d];
#pragma unroll
            for (int s = 0; s < STREAMS; s++) m[s][d] *= 1.0f / sum;
        }
    }
#pragma unroll
    for (int s = 0; s < STREAMS; s++) {
#pragma unroll
        for (int d = 0; d < STREAMS; d++) {
            *(float *)(args.y + d * args.y_nb[0] + s * args.y_nb[1] + token * args.y_nb[2]) = m[s][d];
        }
    }
}

struct HcPreArgs {
    const u8 *x, *weights;
    u8 *y;
    u64 x_nb[3], weights_nb[3], y_nb[2]; // byte strides; those of the weights are 0 along dimension 0 unless they are gates
    u32 n, streams;
    float scale;
    u32 gated;
    u32 pieces, padding;
};

// Grid: pieces of blockDim.x elements, then tokens.
extern "C" __global__ void dsv4_hc_pre(HcPreArgs args) {
    const u32 i = blockIdx.x % args.pieces * blockDim.x + threadIdx.x, token = blockIdx.x / args.pieces;
    if (i >= args.n) return;
    const u8 *x = args.x + i * args.x_nb[0] + token * args.x_nb[2];
    const u8 *weights = args.weights + i * args.weights_nb[0] + token * args.weights_nb[2];
    float sum = 0.0f;
#pragma unroll 4
    for (u32 h = 0; h < args.streams; h++, x += args.x_nb[1], weights += args.weights_nb[1]) {
        const float weight = *(const float *)weights;
        sum += *(const float *)x * (args.gated ? sigmoid(weight) : weight);
    }
    *(float *)(args.y + i * args.y_nb[0] + token * args.y_nb[1]) = sum * args.scale;
}

struct HcPostArgs {
    const u8 *x, *residual, *post, *comb;
    u8 *y;
    u64 x_nb[2], residual_nb[3], post_nb[2], comb_nb[3], y_nb[3]; // byte strides
    u32 n, streams;
    u32 pieces, padding;
};

// Grid: pieces of blockDim.x elements, streams, then tokens, the first fastest.
extern "C" __global__ void dsv4_hc_post(HcPostArgs args) {
    u32 block = blockIdx.x;
    const u32 i = block % args.pieces * blockDim.x + threadIdx.x;
    block /= args.pieces;
    const u32 d = block % args.streams, token = block / args.streams;
    if (i >= args.n) return;
    const float factor = *(const float *)(args.post + d * args.post_nb[0] + token * args.post_nb[1]);
    float sum = *(const float *)(args.x + i * args.x_nb[0] + token * args.x_nb[1]) * factor;
    const u8 *residual = args.residual + i * args.residual_nb[0] + token * args.residual_nb[2];
    if (args.comb == nullptr) {
        sum += *(const float *)(residual + d * args.residual_nb[1]);
    } else {
        const u8 *comb = args.comb + d * args.comb_nb[0] + token * args.comb_nb[2];
#pragma unroll 4
        for (u32 s = 0; s < args.streams; s++, residual += args.residual_nb[1], comb += args.comb_nb[1]) {
            sum += *(const float *)residual * *(const float *)comb;
        }
    }
    *(float *)(args.y + i * args.y_nb[0] + d * args.y_nb[1] + token * args.y_nb[2]) = sum;
}

// ---- the indexer

// Cells per block, one per lane; warps divide the heads.
#define KEYS 32
#define WARPS 8
// Heads that a thread computes at a time, for each key's element in shared memory.
#define HEADS 4
#define MAX_WIDTH 256

struct IndexerArgs {
    const u8 *q, *k, *weights, *mask;
    u8 *y;
    u64 q_nb[3], k_nb[2], weights_nb[2], mask_nb[2], y_nb[2]; // byte strides: head (q), token or cell, batch
    u32 width, heads, tokens, cells;
    u32 mask_batches, k_type;
    u32 tiles, padding; // groups of KEYS cells
};

// Grid: tiles, tokens, batches, the first fastest.
extern "C" __global__ void __launch_bounds__(KEYS *WARPS) dsv4_indexer(IndexerArgs args) {
    // The gap puts the same element of neighbouring keys into different banks.
    __shared__ float keys[KEYS][MAX_WIDTH + 1];
    __shared__ float sums[WARPS][KEYS];
    const u32 lane = threadIdx.x, warp = threadIdx.y;
    u32 block = blockIdx.x;
    const u32 first = block % args.tiles * KEYS;
    block /= args.tiles;
    const u32 token = block % args.tokens, batch = block / args.tokens;
    const u32 size = args.k_type == TYPE_F32 ? 4 : 2;
    for (u32 c = warp; c < KEYS && first + c < args.cells; c += WARPS) {
        const u8 *k = args.k + (first + c) * args.k_nb[0] + batch * args.k_nb[1];
        for (u32 e = lane; e < args.width; e += KEYS) keys[c][e] = load_float(k + e * size, args.k_type);
    }
    __syncthreads();
    // Lanes behind the last cell compute its score again, and do not store it.
    const float *own = keys[min(lane, args.cells - first - 1)];
    const u8 *of_token = args.q + token * args.q_nb[1] + batch * args.q_nb[2];
    const u8 *weights = args.weights + token * args.weights_nb[0] + batch * args.weights_nb[1];
    float score = 0.0f;
    for (u32 h = warp * HEADS; h < args.heads; h += WARPS * HEADS) {
        const u8 *q[HEADS];
        float product[HEADS] = {};
#pragma unroll
        for (u32 i = 0; i < HEADS; i++) q[i] = of_token + min(h + i, args.heads - 1) * args.q_nb[0];
#pragma unroll 4
        for (u32 e = 0; e < args.width; e++) {
            const float key = own[e];
#pragma unroll
            for (u32 i = 0; i < HEADS; i++) product[i] += key * F32::load1(q[i], e);
        }
#pragma unroll
        for (u32 i = 0; i < HEADS; i++) {
            // A product that is NaN counts as 0.
            if (h + i < args.heads && product[i] > 0.0f) score += product[i] * F32::load1(weights, h + i);
        }
    }
    sums[warp][lane] = score;
    __syncthreads();
    const u32 cell = first + lane;
    if (warp > 0 || cell >= args.cells) return;
    for (u32 w = 1; w < WARPS; w++) score += sums[w][lane];
    const u8 *mask = args.mask + token * args.mask_nb[0] + batch % args.mask_batches * args.mask_nb[1];
    F32::store1(args.y + token * args.y_nb[0] + batch * args.y_nb[1], cell, score + F16::load1(mask, cell));
}

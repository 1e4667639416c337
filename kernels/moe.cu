// Mixture of experts, fused: the router of a token, and the weighted sum of the experts' results.
//
// Variants: moe_route  p = softmax(scale logits); ids = p sorted, largest first (NaN and ties as sort.cu); w = p[ids] of the first
//                      `used` ids; sum of w, clamped; y = w / sum. One warp per token, up to 256 experts, of which up to 32 are
//                      used. All intermediate results are written as if each op ran alone;
//           moe_sum    y = x[0] w[0] + x[1] w[1] + ... for each token, added in this order, each step rounded as if it ran alone.
// Limits:   contiguous F32 and I32. y of moe_route may be w; p may be the logits.
// Floor:    each tensor is read or written once.
#include "common/abi.cuh"
#include "common/reduce.cuh"
#include "common/sort_key.cuh"

constexpr u32 MAX_EXPERTS = 256, ROUTE_WARPS = 4, EACH = MAX_EXPERTS / 32;

struct MoeRouteArgs {
    const float *logits;
    float *p;
    u32 *ids;
    float *w, *sum, *clamped; // clamped: null without a clamp
    float *y;
    u32 experts, size, used;  // size: the least power of two that is not below `experts`
    u32 tokens;
    float scale, low, high;   // bounds of the clamp
    u32 padding;
};

// Grid: x = tokens, one for each threadIdx.y.
extern "C" __global__ void __launch_bounds__(32 * ROUTE_WARPS) moe_route(MoeRouteArgs args) {
    __shared__ u64 shared[ROUTE_WARPS][MAX_EXPERTS];
    __shared__ float probabilities[ROUTE_WARPS][MAX_EXPERTS];
    const u32 token = blockIdx.x * ROUTE_WARPS + threadIdx.y, lane = threadIdx.x, n = args.experts;
    if (token >= args.tokens) return;
    u64 *keys = shared[threadIdx.y];
    float *p = probabilities[threadIdx.y];
    const float infinity = __int_as_float(0x7f800000);
    float z[EACH], top = -infinity, sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        const u32 k = lane + 32 * i;
        z[i] = k < n ? args.logits[(u64)token * n + k] * args.scale : -infinity;
        top = fmaxf(top, z[i]);
    }
    top = warp_reduce(top, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        z[i] = expf(z[i] - top);
        sum += z[i];
    }
    sum = warp_reduce(sum, [](float a, float b) { return a + b; });
    const float inverse = 1.0f / sum;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        const u32 k = lane + 32 * i;
        const float value = z[i] * inverse;
        if (k < n) args.p[(u64)token * n + k] = p[k] = value;
        if (k < args.size) keys[k] = k < n ? key_of(value, k, true) : ~0ull;
    }
    __syncwarp();
    for (u32 run = 2; run <= args.size; run *= 2) {
        for (u32 stride = run / 2; stride > 0; stride /= 2) {
            for (u32 t = lane; t < args.size / 2; t += 32) {
                const u32 a = 2 * t - (t & (stride - 1)), b = a + stride;
                const u64 low = min(keys[a], keys[b]), high = max(keys[a], keys[b]);
                const bool up = (a & run) == 0;
                keys[a] = up ? low : high;
                keys[b] = up ? high : low;
            }
            __syncwarp();
        }
    }
    for (u32 k = lane; k < n; k += 32) args.ids[(u64)token * n + k] = (u32)keys[k];
    float w = lane < args.used ? p[(u32)keys[lane]] : 0.0f;
    float total = warp_reduce(w, [](float a, float b) { return a + b; });
    const u64 at = (u64)token * args.used + lane;
    if (lane < args.used) args.w[at] = w;
    if (lane == 0) args.sum[token] = total;
    if (args.clamped != nullptr) {
        // As CLAMP (unary.cu): NaN becomes the upper bound.
        total = total < args.high ? total : args.high;
        total = total > args.low ? total : args.low;
        if (lane == 0) args.clamped[token] = total;
    }
    if (lane < args.used) args.y[at] = w / total;
}

struct MoeSumArgs {
    const float *x, *w;
    float *y;
    u32 n, used, tokens;
    u32 padding;
};

// Grid: x = pieces of blockDim.x elements, y = tokens, as a grid-stride loop.
extern "C" __global__ void __launch_bounds__(256) moe_sum(MoeSumArgs args) {
    const u32 k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= args.n) return;
    for (u32 token = blockIdx.y; token < args.tokens; token += gridDim.y) {
        const float *x = args.x + (u64)token * args.used * args.n + k, *w = args.w + (u64)token * args.used;
        float sum = __fmul_rn(x[0], w[0]);
#pragma unroll 4
        for (u32 e = 1; e < args.used; e++) sum = __fadd_rn(sum, __fmul_rn(x[(u64)e * args.n], w[e]));
        args.y[(u64)token * args.n + k] = sum;
    }
}

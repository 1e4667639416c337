// Mixture of experts: the router of a token and the weighted sum of the experts' results, fused; and the table of the experts' columns for
// MUL_MAT_ID with many tokens.
//
// Variants: moe_route  p = softmax(scale logits); ids = p sorted, largest first (NaN and ties as sort.cu); w = p[ids] of the first
//                      `used` ids; sum of w, clamped; y = w / sum. One warp per token, up to 256 experts, of which up to 32 are
//                      used. All intermediate results are written as if each op ran alone;
//           moe_sum    y = x[0] w[0] + x[1] w[1] + ... for each token, added in this order, each step rounded as if it ran alone;
//           moe_tiles  sorts the slots of all tokens by expert (common/tiles.cuh). One block: a stable counting sort, so that results do
//                      not depend on the order in which threads run. Up to 512 experts and 65536 slots.
// Limits:   contiguous F32 and I32, ids of moe_tiles at any strides. y of moe_route may be w; p may be the logits. An id out of range is
//           reported as an error, and its slot has no position.
// Floor:    each tensor is read or written once.
#include "common/abi.cuh"
#include "common/reduce.cuh"
#include "common/sort_key.cuh"
#include "common/tiles.cuh"

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

constexpr u32 TILES_THREADS = 1024, TILES_WARPS = TILES_THREADS / 32, MAX_TILED_EXPERTS = 512, EXPERT_BITS = 10;

struct MoeTilesArgs {
    const u8 *ids;
    u8 *columns;
    u32 *error_word;
    u64 table;          // byte offset of the table behind `columns`
    u64 is[2];          // byte strides of the ids
    u32 experts, used;
    u32 slots, groups;  // of the table: enough for any ids
    u32 log2_width;     // positions of a group: 3 to 7
    u32 padding;
};

// Grid: one block. Each warp sorts consecutive slots, and slots of warps come in the order of the warps.
extern "C" __global__ void __launch_bounds__(TILES_THREADS) moe_tiles(MoeTilesArgs args) {
    // By warp and expert, the last one for slots without an expert: the number of slots, then of those of earlier warps, at most 63488.
    __shared__ __align__(4) u16 counts[TILES_WARPS][MAX_TILED_EXPERTS + 2];
    __shared__ u32 firsts[MAX_TILED_EXPERTS + 1]; // position of the expert's first slot
    __shared__ u32 parts[TILES_WARPS];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, before = (1u << lane) - 1, none = args.experts;
    u32 *experts = (u32 *)(args.columns + args.table), *slots = experts + args.groups, *positions = slots + (args.groups << args.log2_width);
    for (u32 i = threadIdx.x; i < sizeof counts / 4; i += TILES_THREADS) ((u32 *)counts)[i] = 0;
    static_assert(NO_GROUP == NO_SLOT, "");
    for (u32 i = threadIdx.x; i < args.groups + (args.groups << args.log2_width); i += TILES_THREADS) experts[i] = NO_SLOT;
    __syncthreads();

    // For each slot, its expert and the number of slots of that expert before it in the warp's. Ids are read once: another queue of their owner
    // may change them meanwhile, and positions that do not agree with the counts would be out of bounds.
    const u32 share = (args.slots + TILES_THREADS - 1) / TILES_THREADS * 32;
    const u32 begin = min(warp * share, args.slots), end = min(begin + share, args.slots);
#pragma unroll 1
    for (u32 first = begin; first < end; first += 32) {
        const u32 slot = first + lane;
        u32 expert = none + 1;
        if (slot < end) {
            const u32 token = slot / args.used;
            const u32 id = *(const u32 *)(args.ids + (slot - token * args.used) * args.is[0] + token * args.is[1]);
            if (id < none) expert = id;
            else if (id == 0xffffffff) expert = none;
            else report_bad_index(args.error_word, 30);
        }
        // The lanes whose slots have the same expert.
        u32 same = __ballot_sync(0xffffffff, expert <= none);
#pragma unroll 1
        for (u32 bit = 1; bit <= none; bit *= 2) {
            const u32 with = __ballot_sync(0xffffffff, (expert & bit) != 0);
            same &= expert & bit ? with : ~with;
        }
        u32 earlier = 0;
        if (expert <= none) {
            earlier = counts[warp][expert];
            positions[slot] = (earlier + __popc(same & before)) << EXPERT_BITS | expert;
        } else if (slot < end) {
            positions[slot] = NO_SLOT;
        }
        __syncwarp();
        if (expert <= none && (same & before) == 0) counts[warp][expert] = earlier + __popc(same);
        __syncwarp();
    }
    __syncthreads();

    // One thread for each expert: prefix sums over warps, then over the groups of experts.
    u32 total = 0;
    if (threadIdx.x <= none) {
#pragma unroll 8
        for (u32 w = 0; w < TILES_WARPS; w++) {
            const u32 count = counts[w][threadIdx.x];
            counts[w][threadIdx.x] = total;
            total += count;
        }
    }
    const u32 groups = (total + (1u << args.log2_width) - 1) >> args.log2_width;
    u32 sum = groups;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(0xffffffff, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) parts[warp] = sum;
    __syncthreads();
    u32 groups_before = sum - groups;
    for (u32 w = 0; w < warp; w++) groups_before += parts[w];
    if (threadIdx.x <= none) firsts[threadIdx.x] = groups_before << args.log2_width;
    __syncthreads();

#pragma unroll 4
    for (u32 slot = begin + lane; slot < end; slot += 32) {
        const u32 both = positions[slot], expert = both & ((1 << EXPERT_BITS) - 1);
        if (both == NO_SLOT) continue;
        const u32 position = firsts[expert] + counts[warp][expert] + (both >> EXPERT_BITS);
        slots[position] = slot;
        if ((position & ((1u << args.log2_width) - 1)) == 0) experts[position >> args.log2_width] = expert < none ? expert : NO_EXPERT;
        positions[slot] = expert < none ? position : NO_SLOT;
    }
}

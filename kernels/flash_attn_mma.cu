// FLASH_ATTN_EXT on tensor cores (compute capability 8.0 or later), for few queries and k and v of F16 or BF16.
//
// A warp handles a tile of 8 queries that share their heads of k and v (consecutive heads of consecutive tokens), and tiles of 16
// positions, with an online softmax: scores by m16n8k16 mma, their exponentials relative to the running maximum, weighted sums of
// v by mma. k and v go from global memory to the registers of the warp (flash_attn_fragments.cuh), so the loop has no barriers.
// Tiles of positions that the mask hides from all 8 queries are skipped.
//
// Accuracy: an mma has 16 rows. A query is split into two values of the type of k, a big and a small one, in rows g and g + 8,
// and so are its weights. Products thus have 22 bits of F16 (about the accuracy of f32), or 16 of BF16, and sums are in f32: the
// accuracy costs only the second half of the rows, which a tile of 8 queries would leave unused.
//
// The warps of a block form groups. Each group takes every n-th tile of positions; its warps take the block's tiles of queries, and
// share their loads of k and v through the L1 cache. The groups' sums are added in shared memory, and those of the parts of
// split-K by flash_attn_merge (flash_attn.cu).
//
// Variants: flash_attn_mma_<type>, for each type of the MANIFEST.
// Limits:   rows of k and v of whole groups of 64 channels, k at most 960; even addresses, any strides, between positions below
//           2^32 bytes; q F32, mask F16 with dense rows. With F16, q * scale must be within the range of F16.
// Floor:    2 products per query, position and channel; k and v are read once per block.
#include "flash_attn_common.cuh"
#include "flash_attn_fragments.cuh"

// Swizzle of the sums in shared memory: neighbouring columns of a row use different banks.
__device__ __forceinline__ u32 sum_index(u32 i, u32 lane) { return 32 * i + (lane ^ (i & 3) << 1); }

template <class T>
__device__ __forceinline__ void attend(const FlashAttnArgs &args) {
    extern __shared__ uint4 shared[]; // [tile of queries][step][lane], then 8 fragments of each warp
    __shared__ float2 stats[MAX_WARPS * ROWS]; // [warp][query]: reference, total

    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warps = blockDim.x / 32;
    // The shuffle tells the compiler that the value is uniform in a warp.
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const u32 log_tiles = args.log_quads - 1, tiles = 1 << log_tiles;
    const BlockPlace place = block_place(args);
    const u32 rows = args.tokens * args.group, b = place.batch, head0 = place.head0;
    const u32 begin = blockIdx.y * args.part, end = min(begin + args.part, args.positions);
    const u32 groups = args.dk / KEY_CHANNELS;

    // Queries. Rows behind the last query repeat it; their results are not stored.
    const bool q_whole = ((u64)args.q | args.qb[0] | args.qb[1] | args.qb[2]) % 16 == 0;
    const float scale = args.cap == 0.0f ? args.scale * LOG2E : args.scale;
#pragma unroll 1
    for (u32 unit = warp; unit < groups << log_tiles; unit += warps) {
        const u32 group = unit >> log_tiles, tile = unit & (tiles - 1), r = min(place.first + ROWS * tile + g, rows - 1);
        const u8 *const from = args.q + r / args.group * args.qb[0] + (head0 + r % args.group) * args.qb[1] + b * args.qb[2];
        float x[8];
        load_query((const float *)from + KEY_CHANNELS * group, t, q_whole, x);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            uint4 a;
            const float *const y = x + 4 * half;
            split_pair<T>(scale * y[0], scale * y[1], a.x, a.y);
            split_pair<T>(scale * y[2], scale * y[3], a.z, a.w);
            shared[((tile * groups + group) * 2 + half) * 32 + lane] = a;
        }
    }
    __syncthreads();

    // One query per four lanes
    const u32 tile = warp & (tiles - 1), r = min(place.first + ROWS * tile + g, rows - 1), head = head0 + r % args.group;
    const uint4 *const queries = shared + tile * groups * 64 + lane;
    uint4 *const scratch = shared + tiles * groups * 64 + warp * (SLOTS * 32) + lane;
    const u16 *mask = nullptr;
    float slope = LOG2E;
    if (args.mask) {
        const u32 m = head % args.mask_heads;
        mask = (const u16 *)(args.mask + r / args.group * args.mb[0] + m * args.mb[1] + b % args.mask_batches * args.mb[2]);
        slope *= alibi_slope(args, head);
    }
    const auto load_biases = [&](u32(&to)[4], u32 position) {
        const u32 first = position + 2 * t;
        const u16 *const at = mask + first;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 c = i % 2 + i / 2 * 8;
            to[i] = HIDDEN;
            if (first + c < end) to[i] = args.mask ? at[c] : 0;
        }
    };

    const Matrix k = {args.k + head0 / args.per_k * args.kb[1] + b * args.kb[2], (u32)args.kb[0], args.positions - 1,
                      ((u64)args.k | args.kb[0] | args.kb[1] | args.kb[2]) % 16 == 0};
    const Matrix v = {args.v + head0 / args.per_v * args.vb[1] + b * args.vb[2], (u32)args.vb[0], args.positions - 1,
                      ((u64)args.v | args.vb[0] | args.vb[1] | args.vb[2]) % 16 == 0};
    const u32 channel = place.span * SPAN, channels = min(SPAN, args.dv - channel);
    float sums[16][4] = {};
    float top = minus_infinity(), total = 0.0f;
    const u32 step = TILE * (warps >> log_tiles);
    u32 at = begin + TILE * (warp >> log_tiles);
    u32 next[4];
    load_biases(next, at);
#pragma unroll 1
    for (; at < end; at += step) {
        const u32 biases[4] = {next[0], next[1], next[2], next[3]};
        const bool seen = (biases[0] != HIDDEN) | (biases[1] != HIDDEN) | (biases[2] != HIDDEN) | (biases[3] != HIDDEN);
        // Loaded ahead, because the loads of k and v depend on them.
        load_biases(next, at + step);
        if (!__any_sync(~0u, seen)) continue;

        const Values<T> values(v, at, channel, channels, scratch);
        float s[4];
        tile_scores<T>(s, k, at, groups, queries, scratch);

        if (args.cap != 0.0f) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) s[i] = args.cap * LOG2E * tanh_approximately(s[i]);
        }
        float most = minus_infinity();
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            s[i] = biases[i] == HIDDEN ? minus_infinity() : fmaf(slope, float_of_half(biases[i]), s[i]);
            most = fmaxf(most, s[i]);
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float reference = most - top > MAX_HEADROOM ? most - MIN_HEADROOM : top, factor = rescaling(top, reference);
        top = reference;
        if (__any_sync(~0u, factor != 1.0f)) {
            total *= factor;
#pragma unroll
            for (u32 n = 0; n < 16; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) sums[n][i] *= factor;
            }
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            s[i] = weight(s[i], top);
            total += s[i];
        }
        values.add_products(sums, s);
    }

    // Add the sums of the groups of warps
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (t == 0) stats[warp * ROWS + g] = make_float2(top, total);
    float4 *const all_sums = (float4 *)(shared + tiles * groups * 64);
    __syncwarp(); // the sums replace the warp's scratch memory
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) all_sums[warp * (SLOTS * 32) + sum_index(i, lane)] = Values<T>::four_sums(sums, i);
    __syncthreads();

    store_results<false>(args, place, stats, [&](u32 of_warp, u32 row, u32 column) {
        u32 i, of;
        Values<T>::place(column, i, of);
        return all_sums[of_warp * (SLOTS * 32) + sum_index(i, row * 4 + of)];
    });
}

extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, 2) ENTRY(FlashAttnArgs args) { attend<KTYPE>(args); }

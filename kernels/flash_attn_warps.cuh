// Blocks of warps with a tile of 8 queries and tiles of 16 positions each, for flash_attn_mma.cu and flash_attn_blocks.cu: constants, biases,
// and the results of a block from those of its warps.
#pragma once
#include "flash_attn_common.cuh"

constexpr u32 TILE = 16; // positions
constexpr u32 SPAN = 128; // channels of v per block
constexpr u32 MAX_WARPS = 4;
constexpr u32 ROWS = 8; // queries per tile
// Weights are relative to a reference, and the largest is between 2^7 and 2^15: in this range, F16 holds them and their small
// parts. Sums are rescaled only when the largest exceeds it.
constexpr float MIN_HEADROOM = 7.0f, MAX_HEADROOM = 15.0f;

__device__ __forceinline__ u32 load_u16(const u8 *at) { return *(const u16 *)at; }

__device__ __forceinline__ u32 join_u16(u32 low, u32 high) { return __byte_perm(low, high, 0x5410); }

// Stores the results of a block, or of its part of the positions: the sums of the groups of warps, added. `stats` has the reference and the
// total of each warp's queries; sums(warp, query of its tile, column) are those of channels 4 * column to 4 * column + 3.
//
// Parts have one reference and total for all spans. With OWN_REFERENCES, those of a span depend on its values, so sums are divided by their
// total first, and the reference becomes that of the total.
template <bool OWN_REFERENCES, class Sums>
__device__ __forceinline__ void store_results(const FlashAttnArgs &args, const BlockPlace &place, const float2 *stats, const Sums &sums) {
    const u32 log_tiles = args.log_quads - 1, warps = blockDim.x / 32;
    const u32 channel = place.span * SPAN, channels = min(SPAN, args.dv - channel);
    // Threads of a query
    const u32 log_threads = 28 - __clz(blockDim.x) - log_tiles, slot = threadIdx.x >> log_threads, query = place.first + slot;
    if (query >= args.tokens * args.group) return;
    const u32 of_tile = slot / ROWS, row = slot % ROWS;
    float factors[MAX_WARPS], all_top = minus_infinity(), all_total = 0.0f;
#pragma unroll
    for (u32 i = 0; i < MAX_WARPS; i++) {
        const u32 w = of_tile + (i << log_tiles);
        if (w < warps) all_top = fmaxf(all_top, stats[w * ROWS + row].x);
    }
#pragma unroll
    for (u32 i = 0; i < MAX_WARPS; i++) {
        const u32 w = of_tile + (i << log_tiles);
        if (w >= warps) break;
        const float2 stat = stats[w * ROWS + row];
        factors[i] = weight(stat.x, all_top);
        all_total = fmaf(factors[i], stat.y, all_total);
    }
    const bool is_part = gridDim.y > 1;
    const u64 all = (u64)args.batches * args.tokens * args.heads;
    const u32 h = place.head0 + query % args.group;
    const u64 to = ((u64)place.batch * args.tokens + query / args.group) * args.heads + h;
    float factor = 1.0f;
    if (!is_part) {
        factor = normalisation(all_top, all_total, args.sinks ? args.sinks + h : nullptr);
    } else {
        if (OWN_REFERENCES && all_total != 0.0f) factor = 1.0f / all_total, all_top += __log2f(all_total), all_total = 1.0f;
        if (place.span == 0) ((float2 *)args.stats)[blockIdx.y * all + to] = make_float2(all_top, all_total);
    }
    float *const out = (is_part ? args.sums + blockIdx.y * all * args.dv : args.dst) + to * args.dv + channel;
#pragma unroll 1
    for (u32 column = threadIdx.x & ((1 << log_threads) - 1); column < channels / 4; column += 1 << log_threads) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (u32 w = 0; w < MAX_WARPS; w++) {
            if (of_tile + (w << log_tiles) >= warps) break;
            const float4 x = sums(of_tile + (w << log_tiles), row, column);
            sum.x = fmaf(factors[w], x.x, sum.x), sum.y = fmaf(factors[w], x.y, sum.y);
            sum.z = fmaf(factors[w], x.z, sum.z), sum.w = fmaf(factors[w], x.w, sum.w);
        }
        sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
        float *const y = out + 4 * column;
        if ((u64)out % 16 == 0) *(float4 *)y = sum;
        else y[0] = sum.x, y[1] = sum.y, y[2] = sum.z, y[3] = sum.w;
    }
}

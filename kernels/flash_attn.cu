// FLASH_ATTN_EXT (flash attention): softmax(scale * q k^T + slope * mask) v for each head, all in f32, without storing the
// matrix of scores.
//
// A thread block handles a tile of up to 32 queries that share their heads of k and v (consecutive heads of consecutive
// tokens). It iterates over the KV positions, 64 at a time, with an online softmax: scores, their exponentials relative to the
// running maximum, weighted sums of v. Rows of k and v are staged in shared memory and converted to f32 once per tile. Groups
// of 64 positions that the mask hides from the whole tile are skipped.
//
// Split-K: if there are few tiles, as in decoding, the positions are split into parts, which are handled by the blocks of a
// column of the grid. Each part stores sums, maximum and total of each query in scratch memory; flash_attn_merge combines them.
//
// Variants: flash_attn_<type> for k and v of one type, for each type that KV caches use; flash_attn_any for all other pairs of
//           types, selected when it runs; flash_attn_merge combines the parts; flash_attn_halves converts k or v for prompts. This file is
//           compiled once per type with KTYPE and ENTRY, and once without them for the others.
// Limits:   any row sizes and strides; q F32, mask F16 with dense rows. The wider v, the smaller the tile: 32 queries up to 128
//           channels, 4 queries from 512 channels on; beyond 1024 channels, scores are computed once per span of channels.
// Floor:    2 products per query, position and channel; k and v are read once per tile.
#include "flash_attn_common.cuh"
#include "common/load8.cuh"
#include "common/last_block.cuh"
#include "common/quantize.cuh"

constexpr u32 THREADS = 128;
constexpr u32 WARPS = THREADS / 32;
constexpr u32 POSITIONS = 64; // positions per iteration
constexpr u32 QUERIES = 32;   // queries of the largest tile
constexpr u32 LOG_CHUNK = 3, CHUNK = 1 << LOG_CHUNK; // octets of channels of q and k staged at a time
constexpr u32 PITCH4 = 2 * CHUNK + 1; // float4s per staged row: odd, so that 8 rows use different banks

constexpr u32 BIAS_PITCH = POSITIONS + 2; // halves per row: neighbouring rows are shifted by one bank

// Rows staged in shared memory: `octets` octets from channel `k` on of rows [0, count), with a pitch of `pitch` float4s. A row
// has the lower halves of all octets first, then the upper halves, so that neighbouring lanes cause no bank conflicts.
struct Piece {
    float4 *at;
    u32 pitch;
    u32 log_lanes; // log2 of the threads per row, at least one thread per octet
    u32 k, octets, count;
};

// Stages a piece; rows behind `last` become copies of row `last`. With `check`, returns whether any value is infinite or NaN.
template <class L, bool WHOLE>
__device__ __forceinline__ bool stage(const Piece &to, const RowSource &rows, u32 last, bool check) {
    constexpr int BATCH = WHOLE ? L::BATCH : 1;
    const u32 first = threadIdx.x >> to.log_lanes, on = THREADS >> to.log_lanes;
    const u32 octet = threadIdx.x & ((1 << to.log_lanes) - 1);
    // Threads without an octet load a duplicate: loads without branches can be in flight together.
    const u32 channel = to.k + 8 * min(octet, to.octets - 1);
    float4 *lower = to.at + first * to.pitch + octet, *upper = lower + to.octets;
    float worst = 0.0f;
#pragma unroll 1
    for (u32 row = first; row < to.count; row += BATCH * on) {
        float x[BATCH][8];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            L::template load8<WHOLE>(rows, rows.at + min(row + b * on, last) * rows.step, channel, x[b]);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (row + b * on < to.count && octet < to.octets) {
                *lower = make_float4(x[b][0], x[b][1], x[b][2], x[b][3]);
                *upper = make_float4(x[b][4], x[b][5], x[b][6], x[b][7]);
            }
            lower += on * to.pitch, upper += on * to.pitch;
        }
        if (check) {
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
#pragma unroll
                for (int i = 0; i < 8; i++) worst = fmaf(x[b][i], 0.0f, worst);
            }
        }
    }
    return worst != 0.0f;
}

template <class L>
__device__ __forceinline__ bool stage(const Piece &to, const RowSource &rows, u32 last, bool check) {
    return L::BATCH > 1 && rows.whole ? stage<L, true>(to, rows, last, check) : stage<L, false>(to, rows, last, check);
}

__device__ __forceinline__ void add(float4 &sum, const float4 &x) { sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w; }

// acc += p v, for 4 queries and 8 channels. CAREFUL skips products with a weight of 0, because 0 * infinity would make hidden
// infinite values NaN. This costs time and is only needed if such values exist.
template <bool CAREFUL>
__device__ __forceinline__ void add_products(float (&acc)[4][8], const float4 &p, const float4 &v0, const float4 &v1) {
    const float ps[4] = {p.x, p.y, p.z, p.w}, vs[8] = {v0.x, v0.y, v0.z, v0.w, v1.x, v1.y, v1.z, v1.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (CAREFUL && ps[i] == 0.0f) continue;
#pragma unroll
        for (int d = 0; d < 8; d++) acc[i][d] = fmaf(ps[i], vs[d], acc[i][d]);
    }
}

// Grid: x = block_place; y = parts. A quad is four queries. Query `slot` of a tile is row slot % 4 * 8 + slot / 4 of the staged
// queries, so that neighbouring quads use neighbouring rows; in a row of scores, the four slots of a quad are neighbours.
template <class L>
__device__ __forceinline__ void attend(const FlashAttnArgs &args) {
    __shared__ float4 tile[(POSITIONS + QUERIES) * PITCH4]; // keys and queries, then values, then sums
    __shared__ float4 scores[THREADS * 4];                  // [split][position][slot]
    __shared__ u16 biases[QUERIES * BIAS_PITCH];            // [slot][position]; HIDDEN also behind the ends
    __shared__ float across[WARPS * QUERIES], factors[QUERIES];
    __shared__ u64 places[QUERIES];       // byte offsets of the rows of q
    __shared__ const u16 *masks[QUERIES]; // rows of the mask
    float4 *const queries = tile + POSITIONS * PITCH4;
    float *const score = (float *)scores;

    const u32 t = threadIdx.x, lane = t % 32, warp = t / 32;
    const u32 log_quads = args.log_quads, quads = 1 << log_quads, slots = 4 * quads;
    const BlockPlace place_of_block = block_place(args);
    const u32 first = place_of_block.first, span = place_of_block.span, head0 = place_of_block.head0, b = place_of_block.batch;
    const u32 rows = args.tokens * args.group;

    const u32 channel = span * args.octets * 8;
    const u32 octets = min(args.octets, (args.dv - channel + 7) / 8);
    const u32 begin = blockIdx.y * args.part, end = min(begin + args.part, args.positions);

    const u8 *const kp = args.k + head0 / args.per_k * args.kb[1] + b * args.kb[2];
    const u8 *const vp = args.v + head0 / args.per_v * args.vb[1] + b * args.vb[2];
    const bool k_whole = L::whole((u64)args.k | args.kb[0] | args.kb[1] | args.kb[2], args.dk);
    const bool v_whole = L::whole((u64)args.v | args.vb[0] | args.vb[1] | args.vb[2], args.dv);
    const bool q_whole = StaticType<F32>::whole((u64)args.q | args.qb[0] | args.qb[1] | args.qb[2], args.dk);

    if (t < QUERIES) {
        const u32 r = first + t % 8 * 4 + t / 8;
        places[t] = r < rows ? r / args.group * args.qb[0] + (head0 + r % args.group) * args.qb[1] + b * args.qb[2] : ~0ull;
    }

    // Work of a thread in the softmax: positions part, part + parts, … of one query.
    const u32 slot = t & (slots - 1), part = t >> (log_quads + 2), parts = THREADS >> (log_quads + 2);
    const bool is_query = first + slot < rows;
    float slope = LOG2E, top = minus_infinity(), total = 0.0f;
    if (args.mask && is_query) {
        const u32 r = first + slot, head = head0 + r % args.group, m = head % args.mask_heads;
        if (t < slots) {
            const u64 at = r / args.group * args.mb[0] + m * args.mb[1] + b % args.mask_batches * args.mb[2];
            masks[slot] = (const u16 *)(args.mask + at);
        }
        slope *= alibi_slope(args, head);
    }
    __syncthreads();

    // Work of a thread in the products: one quad of queries. For scores: 4 positions (if threads are left over, they split the
    // channels). For sums: 8 channels, and one slice of the positions.
    const u32 quad = t & (quads - 1), place = t >> log_quads & 15, split = t >> (log_quads + 4), splits = 8 >> log_quads;
    const u32 units = octets << log_quads, slices = THREADS / units;
    const u32 octet = (t >> log_quads) % octets, slice = (t >> log_quads) / octets;
    const u32 log_lanes = octets > 1 ? 32 - __clz(octets - 1) : 0;
    u32 stages = 1; // number of rounds in which the values of an iteration are staged in `tile`
#pragma unroll 1
    while (stages * ((POSITIONS + QUERIES) * PITCH4 / (2 * octets)) < POSITIONS) stages++;
    const u32 staged = (POSITIONS + stages - 1) / stages;

    float acc[4][8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int d = 0; d < 8; d++) acc[i][d] = 0.0f;
    }

#pragma unroll 1
    for (u32 start = begin; start < end; start += POSITIONS) {
        const u32 n = min(POSITIONS, end - start);
        bool seen = false, hides = false;
#pragma unroll 1
        for (u32 i = warp; i < slots; i += WARPS) {
#pragma unroll
            for (u32 c = lane; c < POSITIONS; c += 32) {
                u16 bias = HIDDEN;
                if (c < n && first + i < rows) {
                    bias = args.mask ? masks[i][start + c] : 0;
                    seen |= bias != HIDDEN, hides |= bias == HIDDEN;
                }
                biases[i * BIAS_PITCH + c] = bias;
            }
        }
        // This barrier also ensures that the products of the previous iteration are done with shared memory.
        if (!__syncthreads_or(seen)) continue;

        // Scores
        float s[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) s[i][j] = 0.0f;
        }
#pragma unroll 1
        for (u32 k = 0; k < args.dk; k += 8 * CHUNK) {
            const u32 wide = min(CHUNK, (args.dk - k + 7) / 8);
            if (k) __syncthreads();
            const RowSource keys = {kp + start * args.kb[0], args.kb[0], args.dk, args.types[0], k_whole};
            stage<L>({tile, PITCH4, LOG_CHUNK, k, wide, POSITIONS}, keys, n - 1, false);
#pragma unroll 1
            for (u32 r = t / CHUNK; r < QUERIES; r += THREADS / CHUNK) {
                if (r % 8 >= quads || t % CHUNK >= wide) break;
                const u64 at = places[r];
                const float *const from = (const float *)(args.q + at) + k + 8 * (t % CHUNK);
                float4 *const lower = queries + r * PITCH4 + t % CHUNK;
                if (q_whole && at != ~0ull) {
                    lower[0] = ((const float4 *)from)[0], lower[wide] = ((const float4 *)from)[1];
                    continue;
                }
                const u32 count = at == ~0ull ? 0 : args.dk - k - 8 * (t % CHUNK);
#pragma unroll 1
                for (u32 i = 0; i < 8; i++) ((float *)(lower + i / 4 * wide))[i % 4] = i < count ? from[i] : 0.0f;
            }
            __syncthreads();
            const float4 *key_at = tile + place * PITCH4 + split, *query_at = queries + quad * PITCH4 + split;
#pragma unroll 1
            for (u32 d = split; d < 2 * wide; d += splits, key_at += splits, query_at += splits) {
                float4 key[4], query[4];
#pragma unroll
                for (int i = 0; i < 4; i++) key[i] = key_at[16 * i * PITCH4], query[i] = query_at[8 * i * PITCH4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        s[i][j] = fmaf(key[i].x, query[j].x, s[i][j]);
                        s[i][j] = fmaf(key[i].y, query[j].y, s[i][j]);
                        s[i][j] = fmaf(key[i].z, query[j].z, s[i][j]);
                        s[i][j] = fmaf(key[i].w, query[j].w, s[i][j]);
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            scores[(split * POSITIONS + place + 16 * i) * quads + quad] = make_float4(s[i][0], s[i][1], s[i][2], s[i][3]);
        }
        __syncthreads();

        // Scale, softcap and mask of the scores, and their maxima
        float most = minus_infinity();
        float *mine = score + t; // score of position `part`; the next one of this thread is THREADS later
#pragma unroll 1
        for (u32 c = part; c < POSITIONS; c += parts, mine += THREADS) {
            const u16 bias = biases[slot * BIAS_PITCH + c];
            float z = minus_infinity();
            if (bias != HIDDEN) {
                z = 0.0f;
#pragma unroll 1
                for (u32 i = 0; i < splits; i++) z += mine[i * POSITIONS * slots];
                z *= args.scale;
                if (args.cap != 0.0f) z = args.cap * tanh_approximately(z);
                z = fmaf(slope, float_of_half(bias), z * LOG2E);
            }
            *mine = z;
            most = fmaxf(most, z);
        }
#pragma unroll 1
        for (u32 o = slots; o < 32; o *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
        if (lane < slots) across[warp * QUERIES + slot] = most;
        hides = __syncthreads_or(hides);
        most = top;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) most = fmaxf(most, across[w * QUERIES + slot]);

        // Weights
        const float factor = rescaling(top, most);
        top = most, total *= factor;
#pragma unroll 1
        for (mine = score + t; mine < score + POSITIONS * slots; mine += THREADS) {
            const float p = weight(*mine, top);
            *mine = p;
            total += p;
        }
        if (t < slots) factors[slot] = factor;
        if (__syncthreads_or(factor != 1.0f)) {
            const float f[4] = {factors[4 * quad], factors[4 * quad + 1], factors[4 * quad + 2], factors[4 * quad + 3]};
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int d = 0; d < 8; d++) acc[i][d] *= f[i];
            }
        }

        // Weighted sums
#pragma unroll 1
        for (u32 from = 0; from < n; from += staged) {
            const u32 now = min(staged, n - from);
            if (from) __syncthreads();
            const RowSource values = {vp + (start + from) * args.vb[0], args.vb[0], args.dv, args.types[1], v_whole};
            const bool bad = stage<L>({tile, 2 * octets, log_lanes, channel, octets, now}, values, now - 1, hides);
            const bool careful = __syncthreads_or(bad);
            if (slice >= slices) continue;
            const float4 *p = scores + (from + slice) * quads + quad, *v = tile + slice * 2 * octets + octet;
            const float4 *const p_end = scores + (from + now) * quads;
            const u32 p_step = slices * quads, v_step = slices * 2 * octets;
            if (careful) {
#pragma unroll 1
                for (; p < p_end; p += p_step, v += v_step) add_products<true>(acc, *p, v[0], v[octets]);
            } else {
#pragma unroll 1
                for (; p < p_end; p += p_step, v += v_step) add_products<false>(acc, *p, v[0], v[octets]);
            }
        }
    }

    // Totals, and the factors of the sums
    __syncthreads();
#pragma unroll 1
    for (u32 o = slots; o < 32; o *= 2) total += __shfl_xor_sync(~0u, total, o);
    if (lane < slots) across[warp * QUERIES + slot] = total;
    if (slice < slices) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 unit = t % units;
            tile[(2 * i * slices + slice) * units + unit] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
            tile[((2 * i + 1) * slices + slice) * units + unit] = make_float4(acc[i][4], acc[i][5], acc[i][6], acc[i][7]);
        }
    }
    __syncthreads();
    const u64 query0 = (u64)b * args.tokens * args.heads + head0, all = (u64)args.batches * args.tokens * args.heads;
    const bool is_part = gridDim.y > 1;
    if (t < slots && is_query) {
        total = 0.0f;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) total += across[w * QUERIES + slot];
        const u32 r = first + slot, token = r / args.group, h = r % args.group;
        if (!is_part) {
            factors[slot] = normalisation(top, total, args.sinks ? args.sinks + head0 + h : nullptr);
        } else {
            factors[slot] = 1.0f;
            float2 *const stats = (float2 *)args.stats + blockIdx.y * all + query0;
            if (span == 0) stats[(u64)token * args.heads + h] = make_float2(top, total);
        }
    }
    __syncthreads();

    // Add the slices, and store the channels in order
    const u32 pitch = is_part ? (args.dv + 7) / 8 * 8 : args.dv;
    float *const out = is_part ? args.sums + blockIdx.y * all * pitch : args.dst;
    const bool whole = is_part || (args.dv % 4 == 0 && (u64)args.dst % 16 == 0);
#pragma unroll 1
    for (u32 f = t; f < 8 * units; f += THREADS) {
        const u32 j = f / (2 * octets), column = f % (2 * octets), r = first + j;
        if (r >= rows) break;
        const u32 unit = (column / 2 << log_quads) + j / 4, line = 2 * (j % 4) + column % 2;
        float4 sum = tile[line * slices * units + unit];
#pragma unroll 1
        for (u32 i = 1; i < slices; i++) add(sum, tile[(line * slices + i) * units + unit]);
        const float factor = factors[j];
        sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
        const u32 c = channel + 4 * column;
        float *const to = out + (query0 + (u64)(r / args.group) * args.heads + r % args.group) * pitch + c;
        if (whole) {
            if (c < pitch) *(float4 *)to = sum;
            continue;
        }
        if (c < args.dv) to[0] = sum.x;
        if (c + 1 < args.dv) to[1] = sum.y;
        if (c + 2 < args.dv) to[2] = sum.z;
        if (c + 3 < args.dv) to[3] = sum.w;
    }
}

#ifdef KTYPE

extern "C" __global__ void __launch_bounds__(THREADS, 4) ENTRY(FlashAttnArgs args) { attend<StaticType<KTYPE>>(args); }

#else

extern "C" __global__ void __launch_bounds__(THREADS, 4) flash_attn_any(FlashAttnArgs args) { attend<RuntimeType>(args); }

struct FlashAttnMergeArgs {
    const float *sums, *stats;
    const float *sinks;
    float *dst;
    u8 *quantized;               // destination of quantised columns, or null
    u32 *counters;               // zeros, also afterwards: one for each group of 256 elements
    u32 dv, pitch, heads, parts; // parts: at most PARTS
    u64 stride;                  // bytes from one quantised column to the next
    u32 group;                   // of their scales: 32 or 256
    u32 padding;
};

constexpr u32 PARTS = 256;

// Combines the parts of split-K. Grid: x = queries, y = pieces of 128 channels. Each of up to eight warps sums some of the
// parts. The results of all heads of a token are also written as a quantised column (common/quantize.cuh), for a matrix product that
// follows. Then, dv is a multiple of 128, and two blocks share a group of 256.
extern "C" __global__ void flash_attn_merge(FlashAttnMergeArgs args) {
    __shared__ float weights[PARTS];
    __shared__ float4 partial[8][32];
    const u32 t = threadIdx.x, lane = t % 32, warp = t / 32, warps = blockDim.x / 32;
    const u64 query = blockIdx.x, queries = gridDim.x;
    const float2 *const stats = (const float2 *)args.stats + query;
    float top = minus_infinity(), total = 0.0f;
#pragma unroll 1
    for (u32 p = lane; p < args.parts; p += 32) top = fmaxf(top, stats[p * queries].x);
    for (u32 o = 16; o; o /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
#pragma unroll 1
    for (u32 p = lane; p < args.parts; p += 32) {
        const float2 part = stats[p * queries];
        const float w = part.y == 0.0f ? 0.0f : weight(part.x, part.x == minus_infinity() ? part.x : top);
        total += w * part.y;
        if (warp == 0) weights[p] = w;
    }
    for (u32 o = 16; o; o /= 2) total += __shfl_xor_sync(~0u, total, o);
    __syncthreads();
    const u32 c = blockIdx.y * 128 + lane * 4;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (c < args.pitch) {
#pragma unroll 4
        for (u32 p = warp; p < args.parts; p += warps) {
            const float w = weights[p];
            const float4 x = *(const float4 *)(args.sums + (p * queries + query) * args.pitch + c);
            sum.x = fmaf(w, x.x, sum.x), sum.y = fmaf(w, x.y, sum.y), sum.z = fmaf(w, x.z, sum.z), sum.w = fmaf(w, x.w, sum.w);
        }
    }
    partial[warp][lane] = sum;
    __syncthreads();
    const float factor = normalisation(top, total, args.sinks ? args.sinks + query % args.heads : nullptr);
    const u32 n = min(128u, args.dv - blockIdx.y * 128);
    float *const out = args.dst + query * args.dv + blockIdx.y * 128;
#pragma unroll 1
    for (u32 i = t; i < n; i += blockDim.x) {
        float result = 0.0f;
#pragma unroll 1
        for (u32 w = 0; w < warps; w++) result += ((const float *)partial[w])[i];
        out[i] = result * factor;
    }
    if (args.quantized == nullptr) return;
    const u32 k = args.heads * args.dv, first = query % args.heads * args.dv + blockIdx.y * 128;
    const u64 token = query / args.heads;
    const u8 *const row = (const u8 *)(args.dst + token * k);
    u8 *const column = args.quantized + token * args.stride;
    if (args.group == 32) {
        __syncthreads();
        if (warp == 0) quantize_piece<false>(row, column, k, first, lane);
    } else if (is_last_block(args.counters + token * (k / 256) + first / 256, 2) && warp == 0) {
        quantize_piece<true>(row, column, k, first / 256 * 256, lane);
    }
}

struct FlashAttnHalvesArgs {
    const u8 *from;
    uint4 *to;
    u64 nb[3];                   // byte strides of positions, heads and batches
    u32 n, positions, heads;     // n: channels, a multiple of 8
    u32 octets, type;            // octets in all
    u32 padding;
};

// Converts k or v to F16 for flash_attn_prompt.cu: dense rows in the order of positions, heads, batches. Values beyond the range of F16
// become the largest ones. Grid: x = pieces of THREADS octets.
extern "C" __global__ void flash_attn_halves(FlashAttnHalvesArgs args) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x, per_row = args.n / 8;
    if (i >= args.octets) return;
    const u32 row = i / per_row, head = row / args.positions;
    const u64 at = row % args.positions * args.nb[0] + head % args.heads * args.nb[1] + head / args.heads * args.nb[2];
    const bool whole = RuntimeType::whole((u64)args.from | args.nb[0] | args.nb[1] | args.nb[2], args.n);
    float x[8];
    RuntimeType::load8<false>({nullptr, 0, args.n, args.type, whole}, args.from + at, 8 * (i % per_row), x);
    u32 words[4];
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
        if (fabsf(x[j]) > 65504.0f && fabsf(x[j]) < __uint_as_float(0x7f800000)) x[j] = copysignf(65504.0f, x[j]);
    }
#pragma unroll
    for (u32 j = 0; j < 4; j++) words[j] = word_of_halves(half_of_float(x[2 * j]), half_of_float(x[2 * j + 1]));
    args.to[i] = make_uint4(words[0], words[1], words[2], words[3]);
}

#endif

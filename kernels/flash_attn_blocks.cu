// FLASH_ATTN_EXT on tensor cores (compute capability 8.0 or later), for few queries and k and v of Q8_0 or Q4_0.
//
// A warp handles a tile of 8 queries that share their heads of k and v, and tiles of 32 positions, with an online softmax, as in
// flash_attn_mma.cu. It copies the tiles that the mask shows to its own part of shared memory, one tile ahead; there are no barriers in the
// loop. Blocks of 34 or 18 bytes are at even addresses, so rows of a head start and end within words of 16 bytes: cp.async copies all words
// of 16 bytes that a row touches, and a row in shared memory starts at the same offset modulo 16 as in global memory.
//
// Scores: codes of k are bytes, the operand b of m16n8k32 as they are. Queries are rounded to 16 bits, relative to the largest of their row; the
// upper bytes are rows g of the operand a, the lower ones rows g + 8. Integer sums are exact; those of a block are multiplied by its scale.
//
// Sums: (p v)^T, so that 16 channels are the rows of m16n8k16, and weights are the operand b, where the scores are already. A code u of 8 or 4 bits
// in the low bits of an F16 is the subnormal number u * 2^-24: unpacking it takes no arithmetic, and another mma subtracts the code of 0.
// Weights are multiplied by the scales of v in F16: these are some 2^-10, so they are BOOSTed, or the weights of most positions beside
// one with a large weight (an attention sink) would lose bits.
//
// Accuracy: queries have 15 bits below their largest, weights and their products with scales 11 bits: an NMSE of at most 1e-7, which is below
// 1 % of the error of Q8_0.
//
// Even blocks of a row have their codes between words of 4 bytes: lane t = 3 joins the first and the last two bytes, so that the channels of
// these blocks are rotated by two, which the queries take into account.
//
// Variants: flash_attn_mma_<type>, for each type of the MANIFEST.
// Limits:   v below 130,000: beyond that, sums are infinite or NaN.
//           rows of k and v of whole groups of 64 channels, as many as fit in shared memory; even addresses, any strides, between positions
//           below 2^32 bytes. Rows whose addresses are no multiples of 4, or whose tensor's is none of 16, are copied two bytes at a time.
//           q F32, mask F16 with dense rows.
// Floor:    k and v are read once per tile of queries.
#include "flash_attn_block_tiles.cuh"

// A scale as F16, times a power of two.
__device__ __forceinline__ u32 boosted(u32 half, u16 boost) {
    u16 product;
    asm("mul.rn.f16 %0, %1, %2;" : "=h"(product) : "h"((u16)half), "h"(boost));
    return product;
}

// Products of two pairs of F16.
__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
    u32 word;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
    return word;
}

// The eight elements of q that a lane multiplies by block `n` of k.
template <class T>
__device__ __forceinline__ void load_query(const float *row, u32 n, u32 t, bool aligned, float (&x)[8]) {
#pragma unroll
    for (u32 i = 0; i < 8; i += 2) {
        const float *const at = row + 32 * n + LaneCodes<T>::key_channel(t, i, n % 2 ? 0 : 2);
        float2 two;
        if (aligned) two = *(const float2 *)at;
        else two = make_float2(at[0], at[1]);
        x[i] = two.x, x[i + 1] = two.y;
    }
}

// x / by. Most divisors are 1 in decoding, and a division takes about 20 instructions.
__device__ __forceinline__ u32 quotient(u32 x, u32 by) {
    if (by != 1) x /= by;
    return x;
}
__device__ __forceinline__ u32 remainder(u32 x, u32 by) {
    if (by == 1) return 0;
    return x < by ? x : x % by;
}

// As block_place.
__device__ __forceinline__ BlockPlace place_of(const FlashAttnArgs &args) {
    BlockPlace place;
    const u32 of_tiles = quotient(blockIdx.x, args.tiles), of_spans = quotient(of_tiles, args.spans);
    const u32 groups = quotient(args.heads, args.group);
    place.first = (args.tiles - 1 - (blockIdx.x - of_tiles * args.tiles)) * (4 << args.log_quads);
    place.span = of_tiles - of_spans * args.spans;
    place.batch = args.batches == 1 ? 0 : of_spans / groups;
    place.head0 = (of_spans - place.batch * groups) * args.group;
    return place;
}

template <class T>
__device__ __forceinline__ void attend(const FlashAttnArgs &args) {
    extern __shared__ uint4 shared[];          // queries: [tile][block][lane]; then of each warp: its tiles, later its sums; and scales
    __shared__ float2 stats[MAX_WARPS * ROWS]; // [warp][query]: reference, total
    using Codes = LaneCodes<T>;

    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warps = blockDim.x / 32;
    // The shuffle tells the compiler that the value is uniform in a warp.
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const u32 log_tiles = args.log_quads - 1, tiles = 1 << log_tiles;
    const BlockPlace place = place_of(args);
    const u32 rows = args.tokens * args.group, b = place.batch, head0 = place.head0;
    const u32 end = min(blockIdx.y * args.part + args.part, args.positions);
    const u32 blocks = args.dk / T::LEN, channel = place.span * SPAN, channels = min(SPAN, args.dv - channel);
    const u32 pieces_of_v = channels / T::LEN;

    const u32 of_row = blocks * T::BYTES;
    const RowTiles k(args.k, quotient(head0, args.per_k) * args.kb[1] + b * args.kb[2], args.kb, args.positions, of_row, of_row);
    const RowTiles v(args.v, quotient(head0, args.per_v) * args.vb[1] + b * args.vb[2] + channel / T::LEN * T::BYTES, args.vb, args.positions,
                     pieces_of_v * T::BYTES, min(SPAN, args.dv) / T::LEN * T::BYTES);
    u32 tile_bytes = POSITIONS * (k.pitch + v.pitch);
    const u32 stages = args.stages, ring_bytes = max(stages * tile_bytes, 4 * ROWS * SUM_PITCH);
    uint4 *const of_warps = shared + (blocks << log_tiles) * 32;
    u32 ring = shared_address(of_warps) + warp * (ring_bytes + SCALE_BYTES), scales = ring + ring_bytes;
    pin(tile_bytes), pin(ring), pin(scales);

    // One query per four lanes. Rows behind the last query repeat it; their results are not stored.
    const u32 tile = warp & (tiles - 1), r = min(place.first + ROWS * tile + g, rows - 1);
    const u32 token = args.tokens == 1 ? 0 : r / args.group, head = head0 + r - token * args.group;
    const u16 *mask = nullptr;
    float slope = LOG2E;
    bool has_pairs = false;
    if (args.mask) {
        const u32 m = remainder(head, args.mask_heads);
        mask = (const u16 *)(args.mask + token * args.mb[0] + m * args.mb[1] + remainder(b, args.mask_batches) * args.mb[2]);
        slope *= alibi_slope(args, head);
        has_pairs = (((u64)args.mask | args.mb[0] | args.mb[1] | args.mb[2]) & 3) == 0;
    }
    // Of positions 2 t and 2 t + 1, and those eight, 16 and 24 behind them.
    const auto load_biases = [&](u32(&to)[4], u32 position) {
        const u32 first = position + 2 * t;
        if (has_pairs && position + POSITIONS <= end) {
            const u32 *const from = (const u32 *)(mask + first);
#pragma unroll
            for (u32 i = 0; i < 4; i++) to[i] = from[4 * i];
            return;
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 two[2] = {HIDDEN, HIDDEN};
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
                if (first + 8 * i + e < end) two[e] = args.mask ? mask[first + 8 * i + e] : 0;
            }
            to[i] = join_u16(two[0], two[1]);
        }
    };

    // The tile whose copy is under way: its position, which is not below `end` if there is none, and its biases.
    u32 next = 0, next_biases[4] = {};
    u32 step = POSITIONS * (warps >> log_tiles), ahead = blockIdx.y * args.part + POSITIONS * (warp >> log_tiles), biases_ahead[4];
    // The tile of the last row is behind it.
    u32 last_direct = k.is_direct && v.is_direct && args.positions > POSITIONS ? args.positions - POSITIONS : 0;
    pin(step), pin(last_direct);
    load_biases(biases_ahead, ahead);
    // Starts the copy of the next tile that some query sees.
    const auto start_next = [&](u32 stage) {
#pragma unroll 1
        do {
            next = ahead;
            if (next >= end) break;
            u32 hidden = 0;
#pragma unroll
            for (u32 i = 0; i < 4; i++) next_biases[i] = biases_ahead[i], hidden |= biases_ahead[i] ^ HIDDEN_PAIR;
            ahead += step;
            // Loaded ahead, because the copies depend on them.
            load_biases(biases_ahead, ahead);
            if (!__any_sync(~0u, hidden != 0)) continue;
            if (next < last_direct) k.start(stage, next), v.start(stage + POSITIONS * k.pitch, next);
            else k.start_carefully(stage, next), v.start_carefully(stage + POSITIONS * k.pitch, next);
            break;
        } while (true);
        end_copies();
    };
    // Queries. The factor of their products:
    float unit;
    const auto convert_queries = [&] {
        const bool q_whole = (((u64)args.q | args.qb[0] | args.qb[1] | args.qb[2]) & 7) == 0;
        const float *const q = (const float *)(args.q + token * args.qb[0] + head * args.qb[1] + b * args.qb[2]);
        float largest = 0.0f, bad = 0.0f; // NaN if a value is infinite or NaN
#pragma unroll 4
        for (u32 n = 0; n < blocks; n++) {
            float x[8];
            load_query<T>(q, n, t, q_whole, x);
#pragma unroll
            for (u32 i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(x[i])), bad = fmaf(x[i], 0.0f, bad);
        }
#pragma unroll
        for (u32 i = 1; i < 4; i *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i)), bad += __shfl_xor_sync(~0u, bad, i);
        const float per_unit = largest > 1e-30f ? TOP_CODE / largest : 0.0f;
        unit = (args.cap == 0.0f ? args.scale * LOG2E : args.scale) * (largest / TOP_CODE) + bad;
#pragma unroll 1
        for (u32 n = warp >> log_tiles; n < blocks; n += warps >> log_tiles) {
            float x[8];
            load_query<T>(q, n, t, q_whole, x);
            u32 words[2][2]; // [half][lower bytes, upper bytes]
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                // 2^23 * 1.5 + 128 + code has the code plus 128 in its lower 16 bits: an upper byte, and a lower one plus 128.
                u32 bits[4];
#pragma unroll
                for (u32 i = 0; i < 4; i++) bits[i] = __float_as_uint(fmaf(x[4 * half + i], per_unit, 12583040.0f));
                const u32 first = __byte_perm(bits[0], bits[1], 0x5140), second = __byte_perm(bits[2], bits[3], 0x5140);
                words[half][0] = __byte_perm(first, second, 0x5410) ^ 0x80808080, words[half][1] = __byte_perm(first, second, 0x7632);
            }
            shared[(tile * blocks + n) * 32 + lane] = make_uint4(words[0][1], words[0][0], words[1][1], words[1][0]);
        }
    };

    u32 queries = shared_address(shared + tile * blocks * 32 + lane), join = t == 3 ? 0x7610 : 0x3210;
    u32 key_rows[4], key_words[4], value_rows[4], value_scales[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        key_rows[i] = k.row(g + 8 * i), key_words[i] = key_rows[i] + 4 * t;
        value_rows[i] = POSITIONS * k.pitch + v.row(2 * t + i % 2 + i / 2 * 8) + g * Codes::VALUE_BYTES + 2;
        value_scales[i] = POSITIONS * k.pitch + v.row(g + 8 * i) + (channels == SPAN ? t : t % 2) * T::BYTES;
        pin(key_rows[i]), pin(key_words[i]), pin(value_rows[i]), pin(value_scales[i]);
    }
    // A lane prepares the scales of block t of rows g + 8 i. If there are only two blocks, it repeats one of them.
    u32 sixteen = 16 * v.pitch, key_scale = t * T::BYTES, scale_to = scales + t * SCALE_PITCH + 4 * g, of_rows = scales + 8 * t;
    u32 pairs = scales + KEY_SCALES + g / 2 * 16 + 4 * t + g % 2 * 2, pairs_of_lane = scales + KEY_SCALES + t * 16;
    pin(queries), pin(join), pin(sixteen), pin(key_scale), pin(scale_to), pin(of_rows), pin(pairs), pin(pairs_of_lane);

    u32 minus[4] = {Codes::minus_zero(0), Codes::minus_zero(1), Codes::minus_zero(0), Codes::minus_zero(1)};
#pragma unroll
    for (u32 i = 0; i < 4; i++) minus[i] = __shfl_sync(~0u, minus[i], 0); // so that the compiler keeps them in registers
    float sums[8][4] = {}; // [16 channels][rows g and g + 8 of queries 2 t and 2 t + 1]
    float top = minus_infinity(), total = 0.0f;
    u32 now = ring, freed = ring;
    bool is_first = true;
#pragma unroll 1
    while (true) {
        wait_for_copies<0>();
        __syncwarp(); // also after the reads of the tile that the next copy overwrites
        u32 at = next, biases[4] = {next_biases[0], next_biases[1], next_biases[2], next_biases[3]};
        start_next(freed);
        if (is_first) {
            convert_queries();
            __syncthreads();
        }
        if (stages == 1) {
            wait_for_copies<0>();
            __syncwarp();
            at = next;
#pragma unroll
            for (u32 i = 0; i < 4; i++) biases[i] = next_biases[i];
        } else if (is_first) {
            freed = ring + tile_bytes, is_first = false;
            continue;
        }
        is_first = false;
        if (at >= end) break;

        // Scales of v, times BOOST, as pairs of positions, and whether some are above 1
        u32 magnitudes[4], widest = 0;
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
            const u32 half = boosted(load_shared_u16(now + value_scales[n]), Codes::BOOST_HALF);
            asm volatile("st.shared.u16 [%0], %1;" : : "r"(pairs + 64 * n), "h"((u16)half) : "memory");
            magnitudes[n] = half & 0x7fff, widest = max(widest, magnitudes[n]);
        }
        const bool is_large = __any_sync(~0u, widest > 0x3c00);

        float s[8] = {};
        u32 query_at = queries, piece = now;
#pragma unroll 1
        for (u32 left = blocks;; left -= PIECE, query_at += PIECE * 512, piece += PIECE * T::BYTES) {
            u32 rows_at[4], words_at[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) rows_at[i] = piece + key_rows[i], words_at[i] = piece + key_words[i];
            if (left != blocks) __syncwarp(); // after the reads of the scales of the piece before
            const u32 block_of_lane = left == 2 ? t % 2 * T::BYTES : key_scale;
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const float scale = float_of_half(load_shared_u16(rows_at[i] + block_of_lane));
                asm volatile("st.shared.f32 [%0], %1;" : : "r"(scale_to + 32 * i), "f"(scale) : "memory");
            }
            __syncwarp();
#pragma unroll
            for (u32 j = 0; j < PIECE; j++) {
                if (j == 2 && left == 2) break;
                const uint4 query = load_shared_four(query_at + j * 512);
                const u32 a[4] = {query.x, query.y, query.z, query.w};
                int start[4];
                Codes::start(a, start);
#pragma unroll
                for (u32 n = 0; n < 4; n++) {
                    u32 words[2];
                    Codes::load_key(rows_at[n] + j * T::BYTES, words_at[n] + j * T::BYTES, j % 2 == 0, join, words);
                    int products[4];
                    Codes::multiply(products, a, words, start);
                    float of_positions[2];
                    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                                 : "=f"(of_positions[0]), "=f"(of_positions[1]) : "r"(of_rows + j * SCALE_PITCH + 32 * n) : "memory");
#pragma unroll
                    for (u32 e = 0; e < 2; e++) {
                        s[2 * n + e] = fmaf(of_positions[e], (float)(products[e] * 256 + products[2 + e]), s[2 * n + e]);
                    }
                }
            }
            if (left <= PIECE) break;
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) s[i] *= unit;
        if (args.cap != 0.0f) {
#pragma unroll
            for (u32 i = 0; i < 8; i++) s[i] = args.cap * LOG2E * tanh_approximately(s[i]);
        }
        if (__any_sync(~0u, (biases[0] | biases[1] | biases[2] | biases[3]) != 0)) {
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                const u32 bias = i % 2 ? biases[i / 2] >> 16 : biases[i / 2] & 0xffff;
                s[i] = bias == HIDDEN ? minus_infinity() : fmaf(slope, float_of_half(bias), s[i]);
            }
        }
        float most = s[0], headroom = MAX_HEADROOM;
#pragma unroll
        for (u32 i = 1; i < 8; i++) most = fmaxf(most, s[i]);
        // Products of weights and scales must be within the range of F16.
        if (is_large) {
            u32 seen = 0;
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                const u32 bias = i % 2 ? biases[i / 2] >> 16 : biases[i / 2] & 0xffff;
                seen |= (bias != HIDDEN) << (2 * t + i % 2 + i / 2 * 8);
            }
            // Scales of hidden positions may be anything, and sums never lose the headroom again.
            seen = __reduce_or_sync(~0u, seen) >> g;
            widest = 0;
#pragma unroll
            for (u32 i = 0; i < 4; i++) widest = max(widest, seen >> 8 * i & 1 ? magnitudes[i] : 0);
            headroom -= fmaxf((float)(__reduce_max_sync(~0u, widest) >> 10) - 14.0f, 0.0f);
        }
        if (__any_sync(~0u, most - top > headroom)) {
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            const float reference = most - top > headroom ? most - headroom + (MAX_HEADROOM - MIN_HEADROOM) : top;
            const float factor = rescaling(top, reference);
            top = reference, total *= factor;
            const float of_columns[2] = {__shfl_sync(~0u, factor, 8 * t), __shfl_sync(~0u, factor, 8 * t + 4)};
#pragma unroll
            for (u32 n = 0; n < 8; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) sums[n][i] *= of_columns[i % 2];
            }
        }
        u32 weights[4];
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            s[i] = weight(s[i], top);
            total += s[i];
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) weights[i] = pair_of_floats(F16(), s[2 * i], s[2 * i + 1]);

#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 of_values[2][4], values_at[4];
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const uint4 four = load_shared_four(pairs_of_lane + (2 * half + i) * 64);
                of_values[i][0] = four.x, of_values[i][1] = four.y, of_values[i][2] = four.z, of_values[i][3] = four.w;
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++) values_at[i] = now + value_rows[i] + half * sixteen;
            if (is_large) {
                // Some may be infinite or NaN, and must not reach the sums by a weight of 0.
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    const float low = s[4 * half + 2 * i], high = s[4 * half + 2 * i + 1];
                    const u32 keep = (low == 0.0f ? 0 : 0xffff) | (high == 0.0f ? 0 : 0xffff0000);
#pragma unroll
                    for (u32 n = 0; n < 4; n++) of_values[i][n] &= keep;
                }
            }
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
                if (n == 2 && channels != SPAN) break;
                const u32 p[2] = {multiply_pairs(weights[2 * half], of_values[0][n]), multiply_pairs(weights[2 * half + 1], of_values[1][n])};
                typename Codes::Value values[4];
#pragma unroll
                for (u32 i = 0; i < 4; i++) values[i] = Codes::load_value(values_at[i] + n * T::BYTES, n % 2 == 0);
                u32 words[2][4];
#pragma unroll
                for (u32 i = 0; i < 2; i++) Codes::value_words(values[2 * i], values[2 * i + 1], words[i]);
#pragma unroll
                for (u32 m = 0; m < 2; m++) {
                    mma_halves(F16(), sums[2 * n + m], {words[0][2 * m], words[0][2 * m + 1], words[1][2 * m], words[1][2 * m + 1]}, p);
                    mma_halves(F16(), sums[2 * n + m], minus, p);
                }
            }
        }
        if (stages == 2) freed = now, now = ring + (ring + tile_bytes - now);
    }

    // Sums of the warp: [query][channel]. They replace its tiles.
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (t == 0) stats[warp * ROWS + g] = make_float2(top, total);
    wait_for_copies<0>();
    __syncwarp();
    float *const all_sums = (float *)of_warps;
    const u32 pitch_of_warps = (ring_bytes + SCALE_BYTES) / 4;
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            float four[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) four[i] = sums[2 * n + i / 2][i % 2 * 2 + e] * Codes::unit(i % 2);
            Codes::store(all_sums + warp * pitch_of_warps + (2 * t + e) * SUM_PITCH + 32 * n, g, four);
        }
    }
    __syncthreads();
    store_results<true>(args, place, stats, [&](u32 of_warp, u32 row, u32 column) {
        return *(const float4 *)(all_sums + of_warp * pitch_of_warps + row * SUM_PITCH + 4 * column);
    });
}

extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, 2) ENTRY(FlashAttnArgs args) { attend<KTYPE>(args); }

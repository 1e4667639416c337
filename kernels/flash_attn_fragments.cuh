// Fragments of k and v for the tensor cores (flash_attn_mma.cu): loads from global memory into the registers of a warp, without
// shared memory. A tile has 16 positions.
//
// With g = lane / 4 and t = lane % 4, an operand b of an mma has columns g. For scores, columns are positions, and a lane holds
// channels of positions g and g + 8. For sums, columns are channels, and a lane holds positions 2 t, 2 t + 1, 2 t + 8, 2 t + 9
// ("its four positions"), in pairs of one channel. Which channels belong to which mma is arbitrary, as long as both operands
// agree; the assignments below make loads wide.
//
// Values<T> loads a tile of up to 128 channels of v when it is constructed, and multiplies it later, so that the loads are in
// flight meanwhile. tile_scores<T> loads a tile of k and multiplies it. Rows have whole groups of 64 channels (halves).
#pragma once
#include "common/mma.cuh"
#include "common/quants.cuh"

constexpr u32 TILE = 16;             // positions
constexpr u32 SPAN = 128;            // channels of v per block
constexpr u32 KEY_CHANNELS = 32;     // channels of k per pair of mma steps
constexpr u32 SLOTS = SPAN / 32 * 2; // fragments of 16 bytes per lane, of k or v

// A matrix of k or v: rows are positions.
struct Matrix {
    const u8 *at;
    u32 step;   // bytes from one row to the next
    u32 last;   // index of the last row; it is loaded for rows behind it
    bool whole; // whether all rows are multiples of 16 bytes

    __device__ __forceinline__ const u8 *row(u32 position) const { return at + (u64)min(position, last) * step; }

    // The matrix from byte `by` of each row on.
    __device__ __forceinline__ Matrix shifted(u32 by) const { return {at + by, step, last, whole}; }
};

__device__ __forceinline__ u32 load_u16(const u8 *at) { return *(const u16 *)at; }

__device__ __forceinline__ u32 join_u16(u32 low, u32 high) { return __byte_perm(low, high, 0x5410); }

// Loads fragments 0 to 3 by load(i), and 4 to 7 if `halves` is 2.
template <class Load>
__device__ __forceinline__ void load_halves(uint4 (&to)[8], u32 halves, const Load &load) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) to[i] = load(i);
    if (halves == 1) return;
#pragma unroll
    for (u32 i = 4; i < 8; i++) to[i] = load(i);
}

// Loads fragments of 16 bytes from address(i). If they are not aligned, they go through `scratch`, of 16 bytes per lane and
// fragment, in a loop: unrolled, their loads of two bytes would double the code.
template <class Address>
__device__ __forceinline__ void load_fragments(uint4 (&to)[8], u32 halves, bool aligned, uint4 *scratch, const Address &address) {
    if (aligned) {
        load_halves(to, halves, [&](u32 i) { return *(const uint4 *)address(i); });
        return;
    }
#pragma unroll 1
    for (u32 i = 0; i < 4 * halves; i++) {
        u32 words[4];
        load_words<2>(address(i), words);
        scratch[i * 32] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    load_halves(to, halves, [&](u32 i) { return scratch[i * 32]; });
}

// Whether a byte has codes of both halves of a block.
template <class T>
constexpr bool HAS_NIBBLES = T::LEN > 1 && T::BYTES < T::LEN;

// The elements of q that a lane multiplies in a group, four from `first` on and four from `second` on: for blocks, in the order in
// which codes are unpacked.
template <class T>
__device__ __forceinline__ void load_query(const float *group, u32 t, bool aligned, float (&x)[8]) {
    const u32 first = HAS_NIBBLES<T> ? 4 * t : 8 * t, second = first + (HAS_NIBBLES<T> ? 16 : 4);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const float *const at = group + (i ? second : first);
        float4 four;
        if (aligned) four = *(const float4 *)at;
        else four = make_float4(at[0], at[1], at[2], at[3]);
        x[4 * i] = four.x, x[4 * i + 3] = four.w;
        x[4 * i + 1] = T::LEN > 1 ? four.z : four.y, x[4 * i + 2] = T::LEN > 1 ? four.y : four.z;
    }
}

// The type in which scores are multiplied.
template <class T> struct ScoreType { using Type = F16; };
template <> struct ScoreType<BF16> { using Type = BF16; };

// ---- F16, BF16

// scores = q k^T of a tile at `position`. Row g of a tile of queries is split into rows g (big) and g + 8 (small) of the operand
// a; the scores of both are added. Scores 0 to 3 are those of the lane's four positions. `queries` has a fragment per lane and
// step.
template <class T>
__device__ __forceinline__ void tile_scores(float (&scores)[4], const Matrix &k, u32 position, u32 groups, const uint4 *queries,
                                            uint4 *scratch) {
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const Matrix lane_keys = k.shifted(16 * t);
    float sums[2][4] = {};
#pragma unroll 1
    for (u32 from = 0; from < groups; from += 4) {
        const u32 halves = min(2, (groups - from) / 2);
        uint4 keys[SLOTS];
        load_fragments(keys, halves, k.whole, scratch, [&](u32 i) {
            return lane_keys.row(position + g + i % 2 * 8) + 64 * from + 64 * (i / 2);
        });
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            if (j == 2 && halves == 1) break;
#pragma unroll
            for (u32 step = 0; step < 2; step++) {
                const uint4 q = queries[(2 * (from + j) + step) * 32];
                const u32 a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                for (u32 n = 0; n < 2; n++) {
                    const uint4 &key = keys[2 * j + n];
                    mma_halves(T(), sums[n], a, {step ? key.z : key.x, step ? key.w : key.y});
                }
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) scores[i] = sums[i / 2][i % 2] + sums[i / 2][i % 2 + 2];
}

// Whether a word of two values has an infinite one or NaN: then 0 * word + so_far is NaN, otherwise it stays 0.
__device__ __forceinline__ u32 add_zero_times(F16, u32 word, u32 so_far) {
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(so_far) : "r"(word), "r"(0));
    return so_far;
}
__device__ __forceinline__ u32 add_zero_times(BF16, u32 word, u32 so_far) {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(so_far) : "r"(word), "r"(0));
    return so_far;
}

// A tile of up to 128 channels of v, for sums = p v.
template <class T>
struct Values {
    // Fragment 4 h + i: octet g of channels 64 h to 64 h + 63, at position i of the lane's four.
    uint4 octets[SLOTS];
    u32 halves; // 1 or 2

    __device__ __forceinline__ Values(const Matrix &v, u32 position, u32 channel, u32 channels, uint4 *scratch)
        : halves(channels / 64) {
        const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const Matrix lane_values = v.shifted(2 * channel + 16 * g);
        load_fragments(octets, halves, v.whole, scratch, [&](u32 i) {
            return lane_values.row(position + 2 * t + i % 2 + i % 4 / 2 * 8) + 128 * (i / 4);
        });
    }

    // Word `j` of octets: the pair of channel j of each octet at positions 2 t + 8 k and 2 t + 8 k + 1.
    __device__ __forceinline__ u32 pair(u32 h, u32 j, u32 k) const {
        const uint4 &a = octets[4 * h + 2 * k], &b = octets[4 * h + 2 * k + 1];
        const u32 as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
        return __byte_perm(as[j / 2], bs[j / 2], j % 2 ? 0x7632 : 0x5410);
    }

    // sums += p v, where p has weights of the lane's four positions for query g. A weight of 0 belongs to a hidden position, where
    // infinite values must not make the sums NaN.
    __device__ __forceinline__ void add_products(float (&sums)[16][4], const float (&p)[4]) const {
        const u32 lane = threadIdx.x % 32;
        u32 a[4];
        split_pair<T>(p[0], p[1], a[0], a[1]);
        split_pair<T>(p[2], p[3], a[2], a[3]);
        if (__any_sync(~0u, fminf(fminf(p[0], p[1]), fminf(p[2], p[3])) == 0.0f)) {
            u32 bad = 0;
#pragma unroll
            for (u32 i = 0; i < SLOTS; i++) {
                if (i == 4 && halves == 1) break;
                const uint4 &x = octets[i];
                bad = add_zero_times(T(), x.w, add_zero_times(T(), x.z, add_zero_times(T(), x.y, add_zero_times(T(), x.x, bad))));
            }
            if (__any_sync(~0u, bad != 0)) {
                // One query at a time, with the values that are hidden from it replaced by 0. Sums of other queries may become NaN.
                const u32 hidden = (p[0] == 0.0f) | (p[1] == 0.0f) << 1 | (p[2] == 0.0f) << 2 | (p[3] == 0.0f) << 3;
#pragma unroll 1
                for (u32 query = 0; query < 8; query++) {
                    const u32 bits = __shfl_sync(~0u, hidden, 4 * query + lane % 4);
                    const u32 mask0 = (bits & 1 ? 0 : 0xffff) | (bits & 2 ? 0 : 0xffff0000);
                    const u32 mask1 = (bits & 4 ? 0 : 0xffff) | (bits & 8 ? 0 : 0xffff0000);
                    multiply(sums, a, mask0, mask1, lane / 4 == query);
                }
                return;
            }
        }
        multiply(sums, a, ~0u, ~0u, true);
    }

    // `keeps`: whether the lane keeps the new sums.
    __device__ __forceinline__ void multiply(float (&sums)[16][4], const u32 (&a)[4], u32 mask0, u32 mask1, bool keeps) const {
#pragma unroll
        for (u32 n = 0; n < 16; n++) {
            if (n == 8 && halves == 1) break;
            float next[4] = {sums[n][0], sums[n][1], sums[n][2], sums[n][3]};
            mma_halves(T(), next, a, {pair(n / 8, n % 8, 0) & mask0, pair(n / 8, n % 8, 1) & mask1});
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums[n][i] = keeps ? next[i] : sums[n][i];
        }
    }

    // A lane's sums in groups of four consecutive channels.
    static __device__ __forceinline__ float4 four_sums(const float (&sums)[16][4], u32 i) {
        float four[4];
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            const float (&sum)[4] = sums[i / 4 * 8 + i % 2 * 4 + e];
            four[e] = sum[i / 2 % 2] + sum[i / 2 % 2 + 2];
        }
        return make_float4(four[0], four[1], four[2], four[3]);
    }

    // The group i and the lanes t that have the four channels from 4 * column on.
    static __device__ __forceinline__ void place(u32 column, u32 &i, u32 &t) {
        i = column / 16 * 4 + column % 4, t = column / 4 % 4;
    }
};

// ---- blocks: Q8_0, Q4_0
//
// Codes are exact in F16 and BF16. A scale is one per position and 32 channels, so scores of a block are multiplied by the scales
// of k afterwards, and weights by those of v before. The products of weights and scales may exceed the range of F16: they are BF16.

// Two codes minus ZERO as F16, from words 0x6400 + code, which are 1024 + code as F16.
template <int ZERO>
__device__ __forceinline__ u32 codes_as_f16(u32 biased) {
    constexpr u32 minus = 0xe400 + ZERO;
    u32 word;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(word) : "r"(biased), "r"(minus << 16 | minus));
    return word;
}

// The same as BF16, from words 0x4300 + code, which are 128 + code as BF16, for codes below 128.
template <int ZERO>
__device__ __forceinline__ u32 codes_as_bf16(u32 biased) {
    constexpr u32 minus = 0xc300 + ZERO, one = 0x3f80;
    u32 word;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(biased), "r"(one << 16 | one), "r"(minus << 16 | minus));
    return word;
}

// The codes of a lane in a block, as loaded and as fragments: of k, 8 codes of a position as F16, in the order of load_query;
// of v, 4 channels of two positions `a` and `b` as BF16: word i has the pair of fragment i.
template <class T> struct LaneCodes;

template <>
struct LaneCodes<Q8_0> {
    struct Key {
        u32 pairs[4];
    };

    static __device__ __forceinline__ Key load_key(const u8 *block, u32 t) {
        const u8 *const at = block + 8 * t;
        return {{load_u16(at + 2), load_u16(at + 4), load_u16(at + 6), load_u16(at + 8)}};
    }

    static __device__ __forceinline__ u32 key_word(const Key &key, u32 i) {
        const u32 word = join_u16(key.pairs[i / 2 * 2], key.pairs[i / 2 * 2 + 1]) >> i % 2 * 8;
        return codes_as_f16<128>((word & 0x00ff00ff) ^ 0x64806480);
    }

    // Channels 4 g to 4 g + 3.
    struct Value {
        u32 low, high;
    };

    static __device__ __forceinline__ Value load_value(const u8 *block, u32 g) {
        return {load_u16(block + 4 * g + 2), load_u16(block + 4 * g + 4)};
    }

    // BF16 has seven bits below its first one, so a code is the difference of 128 + its lower seven bits and 128 or 256.
    static __device__ __forceinline__ void value_words(const Value &a, const Value &b, u32 (&words)[4]) {
        constexpr u32 minus_one = 0xbf80bf80;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 pairs = i < 2 ? join_u16(a.low, b.low) : join_u16(a.high, b.high), word = pairs >> i % 2 * 8;
            const u32 bits = (word & 0x007f007f) | 0x43004300, sign = (word & 0x00800080) | 0x43004300;
            asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(words[i]) : "r"(sign), "r"(minus_one), "r"(bits));
        }
    }

    // Group i of four_sums: column i % 2 of the fragments of block i / 2.
    static __device__ __forceinline__ float sum(const float (&sums)[16][4], u32 i, u32 e) {
        const float (&sum)[4] = sums[i / 2 * 4 + e];
        return sum[i % 2] + sum[i % 2 + 2];
    }

    static __device__ __forceinline__ void place(u32 column, u32 &i, u32 &t) {
        i = column / 8 * 2 + column % 2, t = column / 2 % 4;
    }
};

template <>
struct LaneCodes<Q4_0> {
    // Nibbles 0 and 4, 2 and 6, 1 and 5, or 3 and 7 of a word, above `base`: lower nibbles are the first half of a block.
    static __device__ __forceinline__ u32 nibbles(u32 word, u32 i, u32 base) {
        return (word >> (i % 2 * 8 + i / 2 * 4) & 0x000f000f) | base << 16 | base;
    }

    struct Key {
        u32 low, high;
    };

    static __device__ __forceinline__ Key load_key(const u8 *block, u32 t) {
        return {load_u16(block + 4 * t + 2), load_u16(block + 4 * t + 4)};
    }

    static __device__ __forceinline__ u32 key_word(const Key &key, u32 i) {
        return codes_as_f16<8>(nibbles(join_u16(key.low, key.high), i, 0x6400));
    }

    // Channels 2 g, 2 g + 1, 16 + 2 g and 17 + 2 g.
    using Value = u32;

    static __device__ __forceinline__ Value load_value(const u8 *block, u32 g) { return load_u16(block + 2 * g + 2); }

    static __device__ __forceinline__ void value_words(Value a, Value b, u32 (&words)[4]) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) words[i] = codes_as_bf16<8>(nibbles(join_u16(a, b), i, 0x4300));
    }

    // Group i of four_sums: the lower or upper two fragments of block i / 2.
    static __device__ __forceinline__ float sum(const float (&sums)[16][4], u32 i, u32 e) {
        const float (&sum)[4] = sums[i / 2 * 4 + i % 2 * 2 + e % 2];
        return sum[e / 2] + sum[e / 2 + 2];
    }

    static __device__ __forceinline__ void place(u32 column, u32 &i, u32 &t) {
        i = column / 8 * 2 + column / 4 % 2, t = column % 4;
    }
};

template <class T>
__device__ __forceinline__ void block_scores(float (&scores)[4], const Matrix &k, u32 position, u32 groups, const uint4 *queries) {
    using Codes = LaneCodes<T>;
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const u8 *rows[2], *scale_rows[4];
#pragma unroll
    for (u32 i = 0; i < 2; i++) rows[i] = k.row(position + g + 8 * i);
#pragma unroll
    for (u32 i = 0; i < 4; i++) scale_rows[i] = k.row(position + 2 * t + i % 2 + i / 2 * 8), scores[i] = 0.0f;
#pragma unroll 1
    for (u32 from = 0; from < groups; from += 4) {
        const u32 halves = min(2, (groups - from) / 2);
        typename Codes::Key keys[4][2];
        u32 scales[4][4];
        // All loads come first, so that they are in flight together.
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            if (j == 2 && halves == 1) break;
#pragma unroll
            for (u32 n = 0; n < 2; n++) keys[j][n] = Codes::load_key(rows[n] + j * T::BYTES, t);
#pragma unroll
            for (u32 i = 0; i < 4; i++) scales[j][i] = load_u16(scale_rows[i] + j * T::BYTES);
        }
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            if (j == 2 && halves == 1) break;
            float sums[2][4] = {};
#pragma unroll
            for (u32 step = 0; step < 2; step++) {
                const uint4 q = queries[(2 * (from + j) + step) * 32];
                const u32 a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                for (u32 n = 0; n < 2; n++) {
                    mma_halves(F16(), sums[n], a,
                               {Codes::key_word(keys[j][n], 2 * step), Codes::key_word(keys[j][n], 2 * step + 1)});
                }
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                scores[i] = fmaf(float_of_half(scales[j][i]), sums[i / 2][i % 2] + sums[i / 2][i % 2 + 2], scores[i]);
            }
        }
#pragma unroll
        for (u32 i = 0; i < 2; i++) rows[i] += 4 * T::BYTES;
#pragma unroll
        for (u32 i = 0; i < 4; i++) scale_rows[i] += 4 * T::BYTES;
    }
}

template <>
__device__ __forceinline__ void tile_scores<Q8_0>(float (&scores)[4], const Matrix &k, u32 position, u32 groups,
                                                  const uint4 *queries, uint4 *) {
    block_scores<Q8_0>(scores, k, position, groups, queries);
}
template <>
__device__ __forceinline__ void tile_scores<Q4_0>(float (&scores)[4], const Matrix &k, u32 position, u32 groups,
                                                  const uint4 *queries, uint4 *) {
    block_scores<Q4_0>(scores, k, position, groups, queries);
}

template <class T>
struct BlockValues {
    using Codes = LaneCodes<T>;
    // Of each block of 32 channels, at the lane's four positions.
    typename Codes::Value codes[4][4];
    u32 scales[4][4];
    u32 halves;

    __device__ __forceinline__ BlockValues(const Matrix &v, u32 position, u32 channel, u32 channels, uint4 *)
        : halves(channels / 64) {
        const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const Matrix span = v.shifted(channel / 32 * T::BYTES);
        const u8 *rows[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) rows[i] = span.row(position + 2 * t + i % 2 + i / 2 * 8);
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
            if (n == 2 && halves == 1) break;
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                codes[n][i] = Codes::load_value(rows[i] + n * T::BYTES, g);
                scales[n][i] = load_u16(rows[i] + n * T::BYTES);
            }
        }
    }

    // As Values::add_products. Codes are finite, so only scales could make NaN of a weight of 0.
    __device__ __forceinline__ void add_products(float (&sums)[16][4], const float (&p)[4]) const {
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
            if (n == 2 && halves == 1) break;
            float scaled[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) scaled[i] = p[i] == 0.0f ? 0.0f : p[i] * float_of_half(scales[n][i]);
            u32 a[4], b[2][4];
            split_pair<BF16>(scaled[0], scaled[1], a[0], a[1]);
            split_pair<BF16>(scaled[2], scaled[3], a[2], a[3]);
            Codes::value_words(codes[n][0], codes[n][1], b[0]);
            Codes::value_words(codes[n][2], codes[n][3], b[1]);
#pragma unroll
            for (u32 i = 0; i < 4; i++) mma_halves(BF16(), sums[4 * n + i], a, {b[0][i], b[1][i]});
        }
    }

    static __device__ __forceinline__ float4 four_sums(const float (&sums)[16][4], u32 i) {
        return make_float4(Codes::sum(sums, i, 0), Codes::sum(sums, i, 1), Codes::sum(sums, i, 2), Codes::sum(sums, i, 3));
    }

    static __device__ __forceinline__ void place(u32 column, u32 &i, u32 &t) { Codes::place(column, i, t); }
};

template <> struct Values<Q8_0> : BlockValues<Q8_0> { using BlockValues<Q8_0>::BlockValues; };
template <> struct Values<Q4_0> : BlockValues<Q4_0> { using BlockValues<Q4_0>::BlockValues; };

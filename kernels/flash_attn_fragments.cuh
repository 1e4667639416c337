// Fragments of k and v of F16 or BF16 for the tensor cores (flash_attn_mma.cu): loads from global memory into the registers of a warp, without
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
#include "flash_attn_warps.cuh"

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

// The elements of q that a lane multiplies in a group: eight from 8 * t on.
__device__ __forceinline__ void load_query(const float *group, u32 t, bool aligned, float (&x)[8]) {
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const float *const at = group + 8 * t + 4 * i;
        float4 four;
        if (aligned) four = *(const float4 *)at;
        else four = make_float4(at[0], at[1], at[2], at[3]);
        x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
    }
}

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

// MmaDot of the types with blocks of 256, the K types. Included by mul_mat_mma.cu. As in quants_k.cuh, element j is element j %
// 32 of row j / 32 of the block.
//
// Each product of a sub-block is multiplied with its scale as an integer. Minima and zero points are taken out by two more mma
// steps: the matrix of minima (or of scales) times the sums of the columns' codes, 16 for each column. A sum is two bytes, which
// are neighbours in the fragment of b; minima meet the lower bytes, which are unsigned, in the first step, and the upper ones in
// the second.
#pragma once
#include "mul_mat_mma.cuh"

// A lane's part of a block of two rows: Super<T>(rows, t).
//
//     codes[i]    the A fragment of elements 32 i to 32 i + 31; words 0 and 1 are those of the first 16 elements, but for
//                 Q4_K and Q5_K
//     scales[s]   of sub-block s of both rows; none if they are part of the codes
//     offsets     the A fragment of the minima, or of the scales of symmetric types, with a zero behind each byte
//     d, dmin     of both rows; symmetric types have the zero point ZERO instead of dmin
template <class T>
struct Super;

// Byte `i` of a word, sign-extended: bit 3 of a selector replicates the sign, see look_up().
__device__ __forceinline__ int signed_byte_of(u32 word, u32 i) { return (int)look_up(word, 0, 0x8880 | 0x1111 * i); }

// The fragment `offsets` from the bytes of 16 sub-blocks of a row.
__device__ __forceinline__ void offsets_of(const u32 (&bytes)[4], u32 t, u32 &first, u32 &second) {
    const u32 selector = t % 2 ? 0x4342 : 0x4140;
    first = __byte_perm(t < 2 ? bytes[0] : bytes[1], 0, selector), second = __byte_perm(t < 2 ? bytes[2] : bytes[3], 0, selector);
}

// ---- Q4_K, Q5_K: sub-blocks of 32. Codes of odd rows are times ODD.

template <class T>
struct RowPairSuper {
    static constexpr bool SIGNED_OFFSETS = false;
    static constexpr int SUB_BLOCKS = 8, ZERO = 0;
    u32 codes[8][4], offsets[4];
    int scales[8][2];
    float d[2], dmin[2];

    __device__ __forceinline__ void load_scales(const RowPair<T> &rows, u32 t) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            load_halves<4>(rows.template at<typename T::DM>(r), d[r], dmin[r]);
            u32 words[3];
            load_words<4>(rows.template at<typename T::Scales>(r), words);
            const u32 low = words[0] & 0x3f3f3f3f, high = (words[2] & 0x0f0f0f0f) | (words[0] >> 2 & 0x30303030);
            const u32 low_min = words[1] & 0x3f3f3f3f, high_min = (words[2] >> 4 & 0x0f0f0f0f) | (words[1] >> 2 & 0x30303030);
#pragma unroll
            for (int s = 0; s < 4; s++) scales[s][r] = byte_of(low, s), scales[4 + s][r] = byte_of(high, s);
            // Both halves of a row have its minimum.
            const u32 selector = 0x4040 | 0x0101 * t;
            offsets[r] = __byte_perm(low_min, 0, selector), offsets[2 + r] = __byte_perm(high_min, 0, selector);
        }
    }
};

template <>
struct Super<Q4_K> : RowPairSuper<Q4_K> {
    static constexpr int ODD = 16;

    __device__ __forceinline__ Super(const RowPair<Q4_K> &rows, u32 t) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const uint2 two = *(const uint2 *)(rows.at<Q4_K::Codes>(r) + 32 * i + 8 * t);
                codes[2 * i][r] = two.x & 0x0f0f0f0f, codes[2 * i][2 + r] = two.y & 0x0f0f0f0f;
                codes[2 * i + 1][r] = two.x & 0xf0f0f0f0, codes[2 * i + 1][2 + r] = two.y & 0xf0f0f0f0;
            }
        }
        load_scales(rows, t);
    }
};

template <>
struct Super<Q5_K> : RowPairSuper<Q5_K> {
    static constexpr int ODD = 2;

    __device__ __forceinline__ Super(const RowPair<Q5_K> &rows, u32 t) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const uint2 fifth = *(const uint2 *)(rows.at<Q5_K::Fifth>(r) + 8 * t);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const uint2 two = *(const uint2 *)(rows.at<Q5_K::Codes>(r) + 32 * i + 8 * t);
                // The fifth bits of both rows as bits 4 and 5.
                const u32 first = __funnelshift_l(fifth.x, fifth.x, 4 - 2 * (int)i);
                const u32 second = __funnelshift_l(fifth.y, fifth.y, 4 - 2 * (int)i);
                codes[2 * i][r] = (two.x & 0x0f0f0f0f) | (first & 0x10101010);
                codes[2 * i][2 + r] = (two.y & 0x0f0f0f0f) | (second & 0x10101010);
                codes[2 * i + 1][r] = (two.x >> 3 & 0x1e1e1e1e) | (first & 0x20202020);
                codes[2 * i + 1][2 + r] = (two.y >> 3 & 0x1e1e1e1e) | (second & 0x20202020);
            }
        }
        load_scales(rows, t);
    }
};

// ---- Q2_K, Q3_K, Q6_K: sub-blocks of 16

// Scales up to 15 times codes up to 3 are bytes, too.
template <>
struct Super<Q2_K> {
    static constexpr bool SIGNED_OFFSETS = false;
    static constexpr int SUB_BLOCKS = 0, ZERO = 0;
    u32 codes[8][4], offsets[4];
    float d[2], dmin[2];

    __device__ __forceinline__ Super(const RowPair<Q2_K> &rows, u32 t) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            load_halves<4>(rows.at<Q2_K::DM>(r), d[r], dmin[r]);
            u32 both[4], mins[4];
            load_words<16>(rows.at<Q2_K::Scales>(r), both);
#pragma unroll
            for (u32 i = 0; i < 4; i++) mins[i] = both[i] >> 4 & 0x0f0f0f0f, both[i] &= 0x0f0f0f0f;
            offsets_of(mins, t, offsets[r], offsets[2 + r]);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 word = *(const u32 *)(rows.at<Q2_K::Codes>(r) + 16 * i + 4 * t);
#pragma unroll
                for (u32 row = 0; row < 4; row++) {
                    const u32 s = i / 2 * 8 + 2 * row + i % 2; // sub-block
                    codes[s / 2][s % 2 * 2 + r] = (word >> (2 * row) & 0x03030303) * byte_of(both[s / 4], s % 4);
                }
            }
        }
    }
};

template <class T>
struct SymmetricSuper {
    static constexpr bool SIGNED_OFFSETS = true;
    static constexpr int SUB_BLOCKS = 16, ZERO = T::ZERO;
    u32 codes[8][4], offsets[4];
    int scales[16][2];
    float d[2];

    __device__ __forceinline__ void set_scales(const u32 (&bytes)[4], u32 r, u32 t) {
        offsets_of(bytes, t, offsets[r], offsets[2 + r]);
#pragma unroll
        for (u32 s = 0; s < 16; s++) scales[s][r] = signed_byte_of(bytes[s / 4], s % 4);
    }
};

template <>
struct Super<Q3_K> : SymmetricSuper<Q3_K> {
    __device__ __forceinline__ Super(const RowPair<Q3_K> &rows, u32 t) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            d[r] = load_half<2>(rows.at<Q3_K::D>(r));
            u32 words[3], bytes[4];
            load_words<4>(rows.at<Q3_K::Scales>(r), words);
            // Four bits of each scale, and the upper two.
            bytes[0] = (words[0] & 0x0f0f0f0f) | (words[2] << 4 & 0x30303030);
            bytes[1] = (words[1] & 0x0f0f0f0f) | (words[2] << 2 & 0x30303030);
            bytes[2] = (words[0] >> 4 & 0x0f0f0f0f) | (words[2] & 0x30303030);
            bytes[3] = (words[1] >> 4 & 0x0f0f0f0f) | (words[2] >> 2 & 0x30303030);
            // The bytes minus 32. Bit 7 keeps the subtraction from borrowing of the next byte, and is removed again.
#pragma unroll
            for (u32 i = 0; i < 4; i++) bytes[i] = ((bytes[i] | 0x80808080) - 0x20202020) ^ 0x80808080;
            set_scales(bytes, r, t);
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u32 third = *(const u32 *)(rows.at<Q3_K::Third>(r) + 16 * half + 4 * t);
#pragma unroll
                for (u32 row = 0; row < 8; row++) {
                    const u32 word = *(const u32 *)(rows.at<Q3_K::Codes>(r) + row / 4 * 32 + 16 * half + 4 * t);
                    const u32 bits = row < 2 ? third << (2 - row) : third >> (row - 2);
                    codes[row][2 * half + r] = (word >> row % 4 * 2 & 0x03030303) | (bits & 0x04040404);
                }
            }
        }
    }
};

template <>
struct Super<Q6_K> : SymmetricSuper<Q6_K> {
    __device__ __forceinline__ Super(const RowPair<Q6_K> &rows, u32 t) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            d[r] = load_half<2>(rows.at<Q6_K::D>(r));
            u32 bytes[4];
            load_words<16>(rows.at<Q6_K::Scales>(r), bytes);
            set_scales(bytes, r, t);
#pragma unroll
            for (u32 i = 0; i < 4; i++) { // rows 4 (i / 2) to 4 (i / 2) + 3, first or second half
                const u32 high = *(const u32 *)(rows.at<Q6_K::High>(r) + 16 * i + 4 * t);
#pragma unroll
                for (u32 row = 0; row < 2; row++) {
                    const u32 low = *(const u32 *)(rows.at<Q6_K::Low>(r) + i / 2 * 64 + row * 32 + i % 2 * 16 + 4 * t);
                    const u32 at = i / 2 * 4 + row, pairs = high >> (2 * row), word = i % 2 * 2 + r;
                    codes[at][word] = (low & 0x0f0f0f0f) | (pairs << 4 & 0x30303030);
                    codes[at + 2][word] = (low >> 4 & 0x0f0f0f0f) | (pairs & 0x30303030);
                }
            }
        }
    }
};

// ---- products

// The sum over sub-blocks of their products times their scales. `b`: the B fragment of each 32 elements.
template <class T>
__device__ __forceinline__ void super_dot(const Super<T> &weights, const u32 (&b)[8][2], int (&dots)[4]) {
    const int none[4] = {};
    if constexpr (Super<T>::SUB_BLOCKS == 0) {
        mma_u8_s8(dots, weights.codes[0], b[0], none);
#pragma unroll
        for (u32 i = 1; i < 8; i++) mma_u8_s8(dots, weights.codes[i], b[i], dots);
    } else if constexpr (Super<T>::SUB_BLOCKS == 8) {
        int even[4] = {}, odd[4] = {};
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            int part[4];
            mma_u8_s8(part, weights.codes[i], b[i], none);
#pragma unroll
            for (u32 e = 0; e < 4; e++) (i % 2 ? odd : even)[e] += part[e] * weights.scales[i][e / 2];
        }
#pragma unroll
        for (u32 e = 0; e < 4; e++) dots[e] = even[e] * Super<T>::ODD + odd[e];
    } else {
#pragma unroll
        for (u32 e = 0; e < 4; e++) dots[e] = 0;
#pragma unroll
        for (u32 s = 0; s < 16; s++) {
            int part[4];
            const u32(&codes)[4] = weights.codes[s / 2];
            mma_half_u8_s8(part, codes[s % 2 * 2], codes[s % 2 * 2 + 1], b[s / 2][s % 2]);
#pragma unroll
            for (u32 e = 0; e < 4; e++) dots[e] += part[e] * weights.scales[s][e / 2];
        }
    }
}

template <class T>
struct MmaDot<T, true> {
    static constexpr u32 TILE_BYTES = TILE256_BYTES;
    static constexpr bool AFFINE = Super<T>::ZERO == 0;

    static __device__ __forceinline__ void add(const Super<T> &weights, const u8 *tile, float (&sums)[4]) {
        const u32 lane = threadIdx.x % 32;
        u32 b[8][2], code_sums[2];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const uint4 four = *(const uint4 *)(tile + FRAGMENT_BYTES * i + 16 * lane);
            b[2 * i][0] = four.x, b[2 * i][1] = four.y, b[2 * i + 1][0] = four.z, b[2 * i + 1][1] = four.w;
        }
        load_words<8>(tile + 4 * FRAGMENT_BYTES + 8 * lane, code_sums);
        const float2 scale = *(const float2 *)(tile + 4 * FRAGMENT_BYTES + 256 + 8 * (lane % 4));
        int dots[4], upper[4], offsets[4];
        super_dot(weights, b, dots);
        const int none[4] = {};
        u32 shifted[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) shifted[i] = weights.offsets[i] << 8;
        if constexpr (Super<T>::SIGNED_OFFSETS) mma_s8_s8(upper, shifted, code_sums, none);
        else mma_u8_s8(upper, shifted, code_sums, none);
        int start[4];
#pragma unroll
        for (u32 e = 0; e < 4; e++) start[e] = upper[e] * 256 + (AFFINE ? MAGIC_BITS : 0);
        if constexpr (Super<T>::SIGNED_OFFSETS) mma_s8_u8(offsets, weights.offsets, code_sums, start);
        else mma_u8_u8(offsets, weights.offsets, code_sums, start);
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            const float of_column = e % 2 ? scale.y : scale.x;
            if constexpr (AFFINE) {
                const float minimum = __int_as_float(offsets[e]) - MAGIC;
                const float product = weights.d[e / 2] * (float)dots[e] - weights.dmin[e / 2] * minimum;
                sums[e] = __fmaf_rn(product, of_column, sums[e]);
            } else {
                sums[e] = __fmaf_rn(weights.d[e / 2] * of_column, (float)(dots[e] - Super<T>::ZERO * offsets[e]), sums[e]);
            }
        }
    }

    template <int TILES, int = 1>
    static __device__ __forceinline__ void multiply(const Matrices &of, u32 row, u64 step_bytes, u32 part, u32 split,
                                                    float (&sums)[TILES][4]) {
        const u32 blocks = of.k / T::LEN;
        RowPair<T> rows(of, row, part);
        const u8 *tiles = of.b + part * step_bytes;
#pragma unroll 1
        for (u32 block = part; block < blocks; block += split) {
            Super<T> weights(rows, threadIdx.x % 4);
            if constexpr (Super<T>::SUB_BLOCKS == 8) weights.d[0] *= 1.0f / Super<T>::ODD, weights.d[1] *= 1.0f / Super<T>::ODD;
#pragma unroll
            for (u32 j = 0; j < TILES; j++) add(weights, tiles + j * TILE_BYTES, sums[j]);
            rows.advance(split);
            tiles += split * step_bytes;
        }
    }
};

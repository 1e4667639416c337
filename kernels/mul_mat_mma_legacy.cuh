// MmaDot of the types with blocks of 32. Included by mul_mat_mma.cu.
#pragma once
#include "mul_mat_mma.cuh"

// The A fragment of a block: Fragment<T>(rows, block, t), of the block number `block` from `rows` on.
//
//     SIGNED  whether codes are signed bytes
//     UNIT    value of code 1; minima are added to products without it, so it is 1 in types that have them
template <class T>
struct Fragment;

// Codes of 4 bits: byte i of 16 has elements i and i + 16.
template <class T>
struct NibbleFragment {
    static constexpr bool SIGNED = T::ZERO != 0;
    static constexpr float UNIT = SIGNED ? 0.0625f : 1.0f;
    u32 a[4];

    __device__ __forceinline__ NibbleFragment(const RowPair<T> &rows, u32 block, u32 t) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const u32 word = *(const u32 *)(rows.template at<typename T::Codes>(r) + 16 * block + 4 * t);
            // In the upper half of a byte, a nibble is signed once its first bit is flipped.
            if (SIGNED) a[r] = (word << 4 & 0xf0f0f0f0) ^ 0x80808080, a[2 + r] = (word & 0xf0f0f0f0) ^ 0x80808080;
            else a[r] = word & 0x0f0f0f0f, a[2 + r] = word >> 4 & 0x0f0f0f0f;
        }
    }
};

// As NibbleFragment, with fifth bits.
template <class T>
struct FifthFragment {
    static constexpr bool SIGNED = T::ZERO != 0;
    static constexpr float UNIT = SIGNED ? 0.125f : 1.0f;
    u32 a[4];

    __device__ __forceinline__ FifthFragment(const RowPair<T> &rows, u32 block, u32 t) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const u32 word = *(const u32 *)(rows.template at<typename T::Codes>(r) + 16 * block + 4 * t);
            const u32 bits = *(const u32 *)(rows.template at<typename T::Fifth>(r) + 4 * block) >> (4 * t);
            // As in add_fifth_bits(): bit i of four bits is moved to bit 7 or 4 of byte i.
            constexpr u32 SPREAD = SIGNED ? 0x10204080 : 0x02040810, FIFTH = SIGNED ? 0x80808080 : 0x10101010;
            const u32 first = (bits & 15) * SPREAD & FIFTH, second = (bits >> 16 & 15) * SPREAD & FIFTH;
            if (SIGNED) a[r] = ((word << 3 & 0x78787878) | first) ^ FIFTH, a[2 + r] = ((word >> 1 & 0x78787878) | second) ^ FIFTH;
            else a[r] = (word & 0x0f0f0f0f) | first, a[2 + r] = (word >> 4 & 0x0f0f0f0f) | second;
        }
    }
};

// Nibbles that are looked up in a table of 16 bytes, given as four words.
template <class T, u32 T0, u32 T1, u32 T2, u32 T3>
struct TableFragment {
    static constexpr bool SIGNED = true;
    static constexpr float UNIT = 1.0f;
    u32 a[4];

    __device__ __forceinline__ TableFragment(const RowPair<T> &rows, u32 block, u32 t) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const u32 nibbles = *(const u32 *)(rows.template at<typename T::Codes>(r) + 16 * block + 4 * t);
            // As in load_by_table().
            const u32 low = nibbles & 0x77777777, upper = (nibbles >> 1 & 0x44444444) | 0x32103210;
            const u32 first = __byte_perm(__byte_perm(T0, T1, low), __byte_perm(T2, T3, low), upper);
            const u32 second = __byte_perm(__byte_perm(T0, T1, low >> 16), __byte_perm(T2, T3, low >> 16), upper >> 16);
            a[r] = __byte_perm(first, second, 0x6420), a[2 + r] = __byte_perm(first, second, 0x7531);
        }
    }
};

template <>
struct Fragment<Q4_0> : NibbleFragment<Q4_0> {
    using NibbleFragment::NibbleFragment;
};
template <>
struct Fragment<Q4_1> : NibbleFragment<Q4_1> {
    using NibbleFragment::NibbleFragment;
};
template <>
struct Fragment<Q5_0> : FifthFragment<Q5_0> {
    using FifthFragment::FifthFragment;
};
template <>
struct Fragment<Q5_1> : FifthFragment<Q5_1> {
    using FifthFragment::FifthFragment;
};
// The values of both tables are those of quants_legacy.cuh, without their bias.
template <>
struct Fragment<IQ4_NL> : TableFragment<IQ4_NL, 0xbfad9881, 0xf6eaddcf, 0x26190d01, 0x71594535> {
    using TableFragment::TableFragment;
};
template <>
struct Fragment<MXFP4> : TableFragment<MXFP4, 0x03020100, 0x0c080604, 0xfdfeff00, 0xf4f8fafc> {
    using TableFragment::TableFragment;
};

template <>
struct Fragment<Q8_0> {
    static constexpr bool SIGNED = true;
    static constexpr float UNIT = 1.0f;
    u32 a[4];

    __device__ __forceinline__ Fragment(const RowPair<Q8_0> &rows, u32 block, u32 t) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const uint2 two = *(const uint2 *)(rows.at<Q8_0::Codes>(r) + 32 * block + 8 * t);
            a[r] = two.x, a[2 + r] = two.y;
        }
    }
};

// Scales of a block of both rows: those of symmetric types, and with minima those of affine ones.
template <class T>
struct MmaScales {
    static constexpr bool AFFINE = false;
    float d[2];

    __device__ __forceinline__ MmaScales(const RowPair<T> &rows, u32 block) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) d[r] = float_of_half(*(const u16 *)(rows.template at<typename T::D>(r) + 2 * block));
    }
};

template <class T>
struct MmaMinima {
    static constexpr bool AFFINE = true;
    float d[2], m[2];

    __device__ __forceinline__ MmaMinima(const RowPair<T> &rows, u32 block) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) load_halves<4>(rows.template at<typename T::DM>(r) + 4 * block, d[r], m[r]);
    }
};

template <>
struct MmaScales<Q4_1> : MmaMinima<Q4_1> {
    using MmaMinima::MmaMinima;
};
template <>
struct MmaScales<Q5_1> : MmaMinima<Q5_1> {
    using MmaMinima::MmaMinima;
};
template <>
struct MmaScales<MXFP4> {
    static constexpr bool AFFINE = false;
    float d[2];

    __device__ __forceinline__ MmaScales(const RowPair<MXFP4> &rows, u32 block) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            // As MXFP4::unit(), without a branch.
            const int e = rows.at<MXFP4::Exponent>(r)[block];
            d[r] = __int_as_float(max((e << 23) - 0x800000, (e << 21) + 0x200000));
        }
    }
};

template <class T>
struct MmaDot<T, false> {
    static constexpr u32 TILE_BYTES = TILE32_BYTES;

    // Adds the products of a block with a tile, of which `half` is the number of the group.
    static __device__ __forceinline__ void add(const Fragment<T> &weights, const MmaScales<T> &scales, const u32 (&b)[2],
                                               const u8 *tile, u32 half, u32 t, float (&sums)[4]) {
        const float4 two = *(const float4 *)(tile + FRAGMENT_BYTES + 64 * half + 16 * t);
        const float scale[2] = {two.x, two.z}, offset[2] = {two.y, two.w};
        const int start[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
        int dots[4];
        if constexpr (Fragment<T>::SIGNED) mma_s8_s8(dots, weights.a, b, start);
        else mma_u8_s8(dots, weights.a, b, start);
        float minima[2] = {};
        if constexpr (MmaScales<T>::AFFINE) {
            const float2 scaled_sums = *(const float2 *)(tile + FRAGMENT_BYTES + 128 + 32 * half + 8 * t);
            minima[0] = scaled_sums.x, minima[1] = scaled_sums.y;
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            // Exact, because the scale has 11 significant bits.
            const float product = __fmaf_rn(__int_as_float(dots[i]), scale[i % 2], offset[i % 2]);
            sums[i] = __fmaf_rn(product, scales.d[i / 2], sums[i]);
            if constexpr (MmaScales<T>::AFFINE) sums[i] = __fmaf_rn(minima[i % 2], scales.m[i / 2], sums[i]);
        }
    }

    // BLOCKS: of a step; more would not fit the registers.
    template <int TILES, int BLOCKS = TILES == 1 ? 4 : 2>
    static __device__ __forceinline__ void multiply(const Matrices &of, u32 row, u64 step_bytes, u32 part, u32 split,
                                                    float (&sums)[TILES][4]) {
        const u32 lane = threadIdx.x % 32, t = lane % 4, blocks = of.k / T::LEN, whole = blocks / BLOCKS * BLOCKS;
        RowPair<T> rows(of, row, BLOCKS * part);
        const u8 *tiles = of.b + BLOCKS / 2 * part * step_bytes;
#pragma unroll 1
        for (u32 block = BLOCKS * part; block < whole; block += BLOCKS * split) {
#pragma unroll
            for (u32 two = 0; two < BLOCKS; two += 2) {
                const Fragment<T> first(rows, two, t), second(rows, two + 1, t);
                const MmaScales<T> scales(rows, two), next_scales(rows, two + 1);
                const u8 *at = tiles + two / 2 * step_bytes;
#pragma unroll
                for (u32 j = 0; j < TILES; j++) {
                    const uint4 b = *(const uint4 *)(at + j * TILE_BYTES + 16 * lane);
                    add(first, scales, {b.x, b.y}, at + j * TILE_BYTES, 0, t, sums[j]);
                    add(second, next_scales, {b.z, b.w}, at + j * TILE_BYTES, 1, t, sums[j]);
                }
            }
            rows.advance(BLOCKS * split);
            tiles += BLOCKS / 2 * split * step_bytes;
        }
        // The blocks behind the last whole step.
#pragma unroll 1
        for (u32 block = whole + part; block < blocks; block += split) {
            const RowPair<T> last(of, row, block);
            const Fragment<T> weights(last, 0, t);
            const MmaScales<T> scales(last, 0);
            const u8 *at = of.b + block / 2 * step_bytes;
#pragma unroll
            for (u32 j = 0; j < TILES; j++) {
                const uint2 b = *(const uint2 *)(at + j * TILE_BYTES + 16 * lane + 8 * (block % 2));
                add(weights, scales, {b.x, b.y}, at + j * TILE_BYTES, block % 2, t, sums[j]);
            }
        }
#pragma unroll
        for (u32 j = 0; j < TILES; j++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums[j][i] *= Fragment<T>::UNIT;
        }
    }
};

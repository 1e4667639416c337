// QuantDot of types of quants_low_bit.cuh: IQ4_XS and NVFP4, with units of 32 elements, and TQ2_0. The others have that of all types
// with codes8. See quant_dot.cuh.
#pragma once
#include "quant_dot.cuh"
#include "quants_low_bit.cuh"

template <>
struct QuantDot<IQ4_XS> {
    static constexpr int UNIT = 32;

    struct Column {
        unsigned x[8];
        float scale;

        __device__ __forceinline__ Column(const ColumnBlock& from, int unit) : scale(*(const float*)from.scale) {
            load_words<16>(from.codes + 32 * unit, x);
            interleave<4>(x);
        }
    };

    struct Weights : Iq4Codes {
        float d;

        template <int ALIGN>
        __device__ __forceinline__ Weights(const RowBlock<ALIGN>& from, const Unit& unit) {
            unsigned head[2], words[4]; // d, the upper two bits of eight scales, their lower four bits
            load_words<alignment_of(ALIGN | 8)>(from.block, head);
            load_words<alignment_of(ALIGN | 8)>(from.block + 8 + 16 * unit, words);
            const unsigned high = head[0] >> (16 + 2 * unit) & 3, low = head[1] >> (4 * unit) & 15;
            d = __fmul_rn(float_of_half(head[0]), float_of_code<32>(low | high << 4));
            look_up_all(words, unit.zero);
        }
    };

    static __device__ __forceinline__ void add(const Weights& weights, const Column& column, float& sum) {
        sum = __fmaf_rn(weights.d * column.scale, (float)weights.dot(column.x), sum);
    }
};

// A unit has two sub-blocks of 16 elements, each with a scale.
template <>
struct QuantDot<NVFP4> {
    static constexpr int UNIT = 32;

    struct Column {
        unsigned x[8];
        int sums[2]; // of the sub-blocks
        float scale;

        __device__ __forceinline__ Column(const ColumnBlock& from, int unit) : scale(from.scale_at<NVFP4>(32 * unit)) {
            load_words<16>(from.codes + 32 * unit, x);
#pragma unroll
            for (int s = 0; s < 2; s++) {
                sums[s] = 0;
#pragma unroll
                for (int w = 0; w < 4; w++) sums[s] = dot4_signed(x[4 * s + w], 0x01010101, sums[s]);
            }
            interleave<2>(x);
        }
    };

    struct Weights {
        unsigned codes[8];
        float d[2];

        template <int ALIGN>
        __device__ __forceinline__ Weights(const RowBlock<ALIGN>& from, const Unit& unit) {
            unsigned words[4];
            load_words<alignment_of(ALIGN | 4)>(from.block + 4 + 16 * unit, words);
            const unsigned scales = load_short<ALIGN>(from.block + 2 * unit);
            d[0] = NVFP4::unit(scales & 255), d[1] = NVFP4::unit(scales >> 8);
            look_up_fp4(words, unit.zero, codes);
        }
    };

    static __device__ __forceinline__ void add(const Weights& weights, const Column& column, float& sum) {
        int dots[2];
#pragma unroll
        for (int s = 0; s < 2; s++) {
            dots[s] = -FP4_BIAS * column.sums[s];
#pragma unroll
            for (int w = 0; w < 4; w++) dots[s] = dot4(weights.codes[4 * s + w], column.x[4 * s + w], dots[s]);
        }
        sum = __fmaf_rn(column.scale, __fmaf_rn(weights.d[1], (float)dots[1], weights.d[0] * (float)dots[0]), sum);
    }
};

// A unit is one half of four neighbouring rows of 32, as of Q2_K, whose layout of codes is the same.
template <>
struct QuantDot<TQ2_0> {
    static constexpr int UNIT = 64;

    struct Column : HalfRowsColumn {
        int zero;

        __device__ __forceinline__ Column(const ColumnBlock& from, int unit) : HalfRowsColumn(from, unit) {
            zero = -lower_half(sums[0]) - upper_half(sums[0]) - lower_half(sums[1]) - upper_half(sums[1]);
        }
    };

    struct Weights {
        unsigned codes[16]; // those of row r times 4^r
        float d;

        template <int ALIGN>
        __device__ __forceinline__ Weights(const RowBlock<ALIGN>& from, int unit) : d(load_half<2>(from.block + 64)) {
            unsigned words[4];
            load_words<2>(from.block + 16 * unit, words);
#pragma unroll
            for (int i = 0; i < 16; i++) codes[i] = words[i % 4] & 0x03030303 << i / 4 * 2;
        }
    };

    static __device__ __forceinline__ void add(const Weights& weights, const Column& column, float& sum) {
        int dots[4] = {};
#pragma unroll
        for (int i = 0; i < 16; i++) dots[i / 4] = dot4(weights.codes[i], column.x[i], dots[i / 4]);
        const int dot = column.zero + dots[0] + (dots[1] >> 2) + (dots[2] >> 4) + (dots[3] >> 6);
        sum = __fmaf_rn(weights.d * column.scale, (float)dot, sum);
    }
};

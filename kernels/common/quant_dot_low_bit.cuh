// QuantDot of types of quants_low_bit.cuh: IQ4_XS, NVFP4, TQ1_0 and TQ2_0. The others have that of all types with codes8. See
// quant_dot.cuh.
#pragma once
#include "quant_dot.cuh"
#include "quants_low_bit.cuh"

// The activations of row `unit` of a block of 256: 32 elements.
struct RowColumn {
    unsigned x[8];
    float scale;

    __device__ __forceinline__ RowColumn(const ColumnBlock& from, unsigned unit) : scale(*(const float*)from.scale) {
        load_words<16>(from.codes + 32 * unit, x);
    }
};

struct SummedRowColumn : RowColumn {
    int sum;

    __device__ __forceinline__ SummedRowColumn(const ColumnBlock& from, unsigned unit) : RowColumn(from, unit) {
        const short* halves = (const short*)from.sums + unit / 4 * 8 + unit % 4;
        sum = halves[0] + halves[4];
    }
};

template <>
struct QuantDot<IQ4_XS> {
    static constexpr int UNIT = 32;

    struct Column : RowColumn {
        __device__ __forceinline__ Column(const ColumnBlock& from, unsigned unit) : RowColumn(from, unit) { interleave<4>(x); }
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

// A unit is a row. Which bytes and digits it has is constant in a lane.
template <>
struct QuantDot<TQ1_0> {
    static constexpr int UNIT = 32;
    using Column = SummedRowColumn;

    struct Weights {
        unsigned codes[8];
        float d;

        template <int ALIGN>
        __device__ __forceinline__ Weights(const RowBlock<ALIGN>& from, const Unit& lane) : d(load_half<2>(from.block + 52)) {
            // Rows 0 to 4 are digits of bytes 0 to 31. The halves of rows 5 to 7 are digits of bytes 32 to 47, but for the last half:
            // each four elements of it are a digit of bytes 48 to 51.
            const unsigned row = lane.number;
            const bool last = row == 7;
#pragma unroll
            for (unsigned half = 0; half < 2; half++) {
                const bool word_digits = last && half == 1;
                const unsigned char* at = from.block + (row < 5 ? 16 * half : word_digits ? 48 : 32);
                const unsigned digit = row < 5 ? row : last ? 4 : 2 * (row - 5) + half;
#pragma unroll
                for (unsigned w = 0; w < 4; w++) {
                    unsigned word[1];
                    load_words<2>(at + (word_digits ? 0 : 4 * w), word);
                    codes[4 * half + w] = TQ1_0::digits(word[0], word_digits ? w : digit);
                }
            }
        }
    };

    static __device__ __forceinline__ void add(const Weights& weights, const Column& column, float& sum) {
        int dot = -column.sum;
#pragma unroll
        for (int w = 0; w < 8; w++) dot = dot4(weights.codes[w], column.x[w], dot);
        sum = __fmaf_rn(weights.d * column.scale, (float)dot, sum);
    }
};

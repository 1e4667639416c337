// QuantDot of the types with blocks of 256. Included by quant_dot.cuh. As in quants_k.cuh, element j is element j % 32 of row
// j / 32 of the block. The scales of sub-blocks are multiplied as integers; the minima are multiplied with the sums of the
// activations' codes.
#pragma once

// The two halves of a word, sign-extended.
__device__ __forceinline__ int lower_half(unsigned word) { return (short)word; }
__device__ __forceinline__ int upper_half(unsigned word) { return (int)word >> 16; }

// ---- Q4_K, Q5_K: a unit is a pair of rows, whose codes share bytes.

struct RowPairColumn {
    unsigned x[16];
    int sums[2]; // the halves of a word are the sums of 16 elements of each row
    float scale;

    __device__ __forceinline__ RowPairColumn(const ColumnBlock& from, int unit) {
        load_words<16>(from.codes + 64 * unit, x);
        const unsigned char* at = from.sums + 16 * (unit / 2) + 4 * (unit % 2);
        sums[0] = *(const int*)at, sums[1] = *(const int*)(at + 8);
        scale = *(const float*)from.scale;
    }
};

// d, dmin, and as bytes of a word the scales of both rows and then their minima.
struct RowPairScales {
    float d, dmin;
    unsigned bytes;

    template <class T, class From>
    __device__ __forceinline__ void load(const From& from, int unit) {
        load_scales<typename T::DM>(from, d, dmin);
        unsigned words[3];
        load_field<typename T::Scales>(from, 0, words);
        // The first four scales and minima are the lower six bits of words 0 and 1. The others have four bits in word 2 and the
        // upper two bits of words 0 and 1. All but the loaded words is constant in a lane.
        const unsigned pair = unit % 2 ? 0x7632 : 0x5410;
        const bool first = unit < 2;
        const unsigned six = __byte_perm(words[0], words[1], pair), four = __byte_perm(words[2], words[2] >> 4, pair);
        bytes = (six >> (first ? 0 : 2) & (first ? 0x3f3f3f3f : 0x30303030)) | (four & (first ? 0 : 0x0f0f0f0f));
    }

    // `dot` is the sum of both rows' dot products, each times its scale.
    __device__ __forceinline__ void add(int dot, const RowPairColumn& column, float& sum) const {
        const int min = dot2_upper(column.sums[1], bytes, dot2_upper(column.sums[0], bytes, 0));
        sum = __fmaf_rn(d * (float)dot - dmin * (float)min, column.scale, sum);
    }
};

template <>
struct QuantDot<Q4_K> {
    static constexpr int UNIT = 64;
    using Column = RowPairColumn;

    struct Weights : RowPairScales {
        unsigned codes[16]; // words 8 to 15, the second row, are times 16

        template <class From>
        __device__ __forceinline__ Weights(const From& from, int unit) {
            unsigned words[8];
            load_field<Q4_K::Codes>(from, 32 * unit, words);
            load<Q4_K>(from, unit);
#pragma unroll
            for (int w = 0; w < 8; w++) codes[w] = words[w] & 0x0f0f0f0f, codes[8 + w] = words[w] & 0xf0f0f0f0;
        }
    };

    static __device__ __forceinline__ void add(const Weights& weights, const Column& column, float& sum) {
        int first = 0, second = 0;
#pragma unroll
        for (int w = 0; w < 8; w++) {
            first = dot4(weights.codes[w], column.x[w], first);
            second = dot4(weights.codes[8 + w], column.x[8 + w], second);
        }
        weights.RowPairScales::add(first * byte_of(weights.bytes, 0) + (second >> 4) * byte_of(weights.bytes, 1), column, sum);
    }
};

template <>
struct QuantDot<Q5_K> {
    static constexpr int UNIT = 64;
    using Column = RowPairColumn;

    struct Weights : RowPairScales {
        unsigned codes[16]; // words 8 to 15, the second row, are times 2

        template <class From>
        __device__ __forceinline__ Weights(const From& from, int unit) {
            unsigned words[8], fifth[8];
            load_field<Q5_K::Codes>(from, 32 * unit, words);
            load_field<Q5_K::Fifth>(from, 0, fifth);
            load<Q5_K>(from, unit);
#pragma unroll
            for (int w = 0; w < 8; w++) {
                // A rotation by a constant of the lane brings the fifth bits of both rows to bits 4 and 5.
                const unsigned bits = __funnelshift_l(fifth[w], fifth[w], 4 - 2 * unit);
                codes[w] = (words[w] & 0x0f0f0f0f) | (bits & 0x10101010);
                codes[8 + w] = (words[w] >> 3 & 0x1e1e1e1e) | (bits & 0x20202020);
            }
        }
    };

    static __device__ __forceinline__ void add(const Weights& weights, const Column& column, float& sum) {
        int first = 0, second = 0;
#pragma unroll
        for (int w = 0; w < 8; w++) {
            first = dot4(weights.codes[w], column.x[w], first);
            second = dot4(weights.codes[8 + w], column.x[8 + w], second);
        }
        weights.RowPairScales::add(first * byte_of(weights.bytes, 0) + (second >> 1) * byte_of(weights.bytes, 1), column, sum);
    }
};

// ---- Q2_K, Q3_K: a unit is one half of four neighbouring rows, whose codes share bytes: four sub-blocks.

struct HalfRowsColumn {
    unsigned x[16];
    unsigned sums[2]; // four halves, one for each sub-block
    float scale;

    __device__ __forceinline__ HalfRowsColumn(const ColumnBlock& from, int unit) {
#pragma unroll
        for (int row = 0; row < 4; row++) {
            unsigned words[4];
            load_words<16>(from.codes + 128 * (unit / 2) + 16 * (unit % 2) + 32 * row, words);
#pragma unroll
            for (int w = 0; w < 4; w++) x[4 * row + w] = words[w];
        }
        load_words<8>(from.sums + 8 * unit, sums);
        scale = *(const float*)from.scale;
    }
};

template <>
struct QuantDot<Q2_K> {
    static constexpr int UNIT = 64;
    using Column = HalfRowsColumn;

    struct Weights {
        unsigned codes[16]; // those of row r times 4^r
        unsigned scales, mins;
        float d, dmin;

        template <class From>
        __device__ __forceinline__ Weights(const From& from, int unit) {
            unsigned words[4], both[2];
            load_field<Q2_K::Codes>(from, 16 * unit, words);
            load_field<Q2_K::Scales>(from, 8 * (unit / 2), both);
            load_scales<Q2_K::DM>(from, d, dmin);
            const unsigned scale_min = __byte_perm(both[0], both[1], unit % 2 ? 0x7531 : 0x6420);
            scales = scale_min & 0x0f0f0f0f, mins = scale_min >> 4 & 0x0f0f0f0f;
#pragma unroll
            for (int i = 0; i < 16; i++) codes[i] = words[i % 4] & 0x03030303 << i / 4 * 2;
        }
    };

    static __device__ __forceinline__ void add(const Weights& weights, const Column& column, float& sum) {
        int dots[4] = {};
#pragma unroll
        for (int i = 0; i < 16; i++) dots[i / 4] = dot4(weights.codes[i], column.x[i], dots[i / 4]);
        // Dot products of 16 codes fit 16 bits.
        int dot = dot2(__byte_perm(dots[0], dots[1] >> 2, 0x5410), weights.scales, 0);
        dot = dot2_upper(__byte_perm(dots[2] >> 4, dots[3] >> 6, 0x5410), weights.scales, dot);
        const int min = dot2_upper(column.sums[1], weights.mins, dot2(column.sums[0], weights.mins, 0));
        sum = __fmaf_rn(weights.d * (float)dot - weights.dmin * (float)min, column.scale, sum);
    }
};

template <>
struct QuantDot<Q3_K> {
    static constexpr int UNIT = 64;

    struct Column : HalfRowsColumn {
        int zero[4];

        __device__ __forceinline__ Column(const ColumnBlock& from, int unit) : HalfRowsColumn(from, unit) {
            zero[0] = -4 * lower_half(sums[0]), zero[1] = -4 * upper_half(sums[0]);
            zero[2] = -4 * lower_half(sums[1]), zero[3] = -4 * upper_half(sums[1]);
        }
    };

    struct Weights {
        unsigned codes[16];
        int scales; // four signed bytes
        float d;

        template <class From>
        __device__ __forceinline__ Weights(const From& from, int unit) : d(load_scale<Q3_K::D>(from)) {
            const int upper = unit / 2, half = unit % 2; // rows 4 to 7; the second half
            unsigned words[4], third[4], s[3];
            load_field<Q3_K::Codes>(from, 16 * unit, words);
            load_field<Q3_K::Third>(from, 16 * half, third);
            load_field<Q3_K::Scales>(from, 0, s);
#pragma unroll
            for (int w = 0; w < 4; w++) {
                const unsigned bits = third[w] >> (4 * upper);
                codes[w] = (words[w] & 0x03030303) | (bits << 2 & 0x04040404);
                codes[4 + w] = (words[w] >> 2 & 0x03030303) | (bits << 1 & 0x04040404);
                codes[8 + w] = (words[w] >> 4 & 0x03030303) | (bits & 0x04040404);
                codes[12 + w] = (words[w] >> 6 & 0x03030303) | (bits >> 1 & 0x04040404);
            }
            // Four bits of each scale, and the upper two.
            const unsigned low = __byte_perm(s[0], s[1], half ? 0x7531 : 0x6420) >> (4 * upper), high = s[2] >> (4 * upper);
            const unsigned two = __byte_perm(high << 4, high << 2, half ? 0x7531 : 0x6420);
            // The bytes minus 32. Bit 7 keeps the subtraction from borrowing of the next byte, and is removed again.
            scales = (((low & 0x0f0f0f0f) | (two & 0x30303030) | 0x80808080) - 0x20202020) ^ 0x80808080;
        }
    };

    static __device__ __forceinline__ void add(const Weights& weights, const Column& column, float& sum) {
        int dots[4] = {column.zero[0], column.zero[1], column.zero[2], column.zero[3]};
#pragma unroll
        for (int i = 0; i < 16; i++) dots[i / 4] = dot4(weights.codes[i], column.x[i], dots[i / 4]);
        int dot = dot2_signed(__byte_perm(dots[0], dots[1], 0x5410), weights.scales, 0);
        dot = dot2_signed_upper(__byte_perm(dots[2], dots[3], 0x5410), weights.scales, dot);
        sum = __fmaf_rn(weights.d * column.scale, (float)dot, sum);
    }
};

// ---- Q6_K: a unit is 16 bytes of low bits: two sub-blocks, in rows that are two apart.

template <>
struct QuantDot<Q6_K> {
    static constexpr int UNIT = 32;

    // Rows 0 to 3 or 4 to 7; the second of the two rows that follow each other; the second half of a row.
    static __device__ __forceinline__ int rows_of(int unit) { return unit / 4; }
    static __device__ __forceinline__ int row_of(int unit) { return unit / 2 % 2; }
    static __device__ __forceinline__ int half_of(int unit) { return unit % 2; }

    struct Column {
        unsigned x[8];
        int zero[2];
        float scale;

        __device__ __forceinline__ Column(const ColumnBlock& from, int unit) {
            unsigned first[4], second[4];
            const unsigned char* codes = from.codes + 128 * rows_of(unit) + 16 * (unit % 4);
            load_words<16>(codes, first);
            load_words<16>(codes + 64, second);
#pragma unroll
            for (int w = 0; w < 4; w++) x[w] = first[w], x[4 + w] = second[w];
            const short* sums = (const short*)from.sums + 8 * rows_of(unit) + 4 * half_of(unit) + row_of(unit);
            zero[0] = -32 * sums[0], zero[1] = -32 * sums[2];
            scale = *(const float*)from.scale;
        }
    };

    struct Weights {
        unsigned codes[8];
        int scales[2];
        float d;

        template <class From>
        __device__ __forceinline__ Weights(const From& from, int unit) : d(load_scale<Q6_K::D>(from)) {
            unsigned low[4], high[4];
            load_field<Q6_K::Low>(from, 16 * unit, low);
            load_field<Q6_K::High>(from, 32 * rows_of(unit) + 16 * half_of(unit), high);
            const signed char* s = (const signed char*)from.template field<Q6_K::Scales>() + 8 * rows_of(unit) + unit % 4;
            scales[0] = s[0], scales[1] = s[4];
#pragma unroll
            for (int w = 0; w < 4; w++) {
                const unsigned pairs = high[w] >> (2 * row_of(unit));
                codes[w] = (low[w] & 0x0f0f0f0f) | (pairs << 4 & 0x30303030);
                codes[4 + w] = (low[w] >> 4 & 0x0f0f0f0f) | (pairs & 0x30303030);
            }
        }
    };

    static __device__ __forceinline__ void add(const Weights& weights, const Column& column, float& sum) {
        int first = column.zero[0], second = column.zero[1];
#pragma unroll
        for (int w = 0; w < 4; w++) {
            first = dot4(weights.codes[w], column.x[w], first);
            second = dot4(weights.codes[4 + w], column.x[4 + w], second);
        }
        sum = __fmaf_rn(weights.d * column.scale, (float)(first * weights.scales[0] + second * weights.scales[1]), sum);
    }
};

// QuantDot of the types with blocks of 32: a unit is a block, or half a block of Q8_0. Included by quant_dot.cuh.
#pragma once

// The activations of a block: codes, their scale and their sum.
struct Column32 {
    unsigned x[8];
    float scale;
    int sum;

    __device__ __forceinline__ Column32(const ColumnBlock& from, int) {
        load_words<16>(from.codes, x);
        unsigned words[2];
        load_words<8>(from.scale, words);
        scale = __uint_as_float(words[0]), sum = words[1];
    }
};

// Codes of 4 bits: words 0 to 3 are the low nibbles, words 4 to 7 the upper nibbles in place, that is, times 16.
template <class T>
struct Nibbles {
    unsigned codes[8];

    template <class From>
    __device__ __forceinline__ explicit Nibbles(const From& from) {
        unsigned words[4];
        load_field<typename T::Codes>(from, 0, words);
#pragma unroll
        for (int w = 0; w < 4; w++) codes[w] = words[w] & 0x0f0f0f0f, codes[4 + w] = words[w] & 0xf0f0f0f0;
    }

    __device__ __forceinline__ int dot(const Column32& column, int sum) const {
        int upper = 0;
#pragma unroll
        for (int w = 0; w < 4; w++) {
            sum = dot4(codes[w], column.x[w], sum);
            upper = dot4(codes[4 + w], column.x[4 + w], upper);
        }
        return sum + (upper >> 4);
    }
};

// Codes of 5 bits, in words of four elements.
template <class T>
struct FifthBits {
    unsigned codes[8];

    template <class From>
    __device__ __forceinline__ explicit FifthBits(const From& from) {
        unsigned words[4], fifth[1];
        load_field<typename T::Codes>(from, 0, words);
        load_field<typename T::Fifth>(from, 0, fifth);
#pragma unroll
        for (int w = 0; w < 8; w++) {
            // As in add_fifth_bits().
            const unsigned bits = (fifth[0] >> (4 * w) & 15) * 0x02040810 & 0x10101010;
            codes[w] = (words[w % 4] >> (w / 4 * 4) & 0x0f0f0f0f) | bits;
        }
    }

    __device__ __forceinline__ int dot(const Column32& column, int sum) const {
#pragma unroll
        for (int w = 0; w < 8; w++) sum = dot4(codes[w], column.x[w], sum);
        return sum;
    }
};

// d * (q - ZERO)
template <class T, class Codes>
struct SymmetricDot {
    static constexpr int UNIT = 32;
    using Column = Column32;

    struct Weights : Codes {
        float d;

        template <class From>
        __device__ __forceinline__ Weights(const From& from, int) : Codes(from), d(load_scale<typename T::D>(from)) {}
    };

    static __device__ __forceinline__ void add(const Weights& weights, const Column& column, float& sum) {
        const int dot = weights.dot(column, -T::ZERO * column.sum);
        sum = __fmaf_rn(weights.d * column.scale, (float)dot, sum);
    }
};

// d * q + m
template <class T, class Codes>
struct AffineDot {
    static constexpr int UNIT = 32;

    struct Column : Column32 {
        float scaled_sum;

        __device__ __forceinline__ Column(const ColumnBlock& from, int unit) : Column32(from, unit) {
            scaled_sum = scale * (float)sum;
        }
    };

    struct Weights : Codes {
        float d, m;

        template <class From>
        __device__ __forceinline__ Weights(const From& from, int) : Codes(from) {
            load_scales<typename T::DM>(from, d, m);
        }
    };

    static __device__ __forceinline__ void add(const Weights& weights, const Column& column, float& sum) {
        sum = __fmaf_rn(weights.d * column.scale, (float)weights.dot(column, 0), sum);
        sum = __fmaf_rn(weights.m, column.scaled_sum, sum);
    }
};

template <>
struct QuantDot<Q4_0> : SymmetricDot<Q4_0, Nibbles<Q4_0>> {};
template <>
struct QuantDot<Q5_0> : SymmetricDot<Q5_0, FifthBits<Q5_0>> {};
template <>
struct QuantDot<Q4_1> : AffineDot<Q4_1, Nibbles<Q4_1>> {};
template <>
struct QuantDot<Q5_1> : AffineDot<Q5_1, FifthBits<Q5_1>> {};

// Neighbouring lanes handle the halves of a block, so that their loads are contiguous.
template <>
struct QuantDot<Q8_0> {
    static constexpr int UNIT = 16;

    struct Column {
        unsigned x[4];
        float scale;

        __device__ __forceinline__ Column(const ColumnBlock& from, int unit) {
            load_words<16>(from.codes + 16 * unit, x);
            scale = *(const float*)from.scale;
        }
    };

    struct Weights {
        unsigned codes[4];
        float d;

        template <class From>
        __device__ __forceinline__ Weights(const From& from, int unit) : d(load_scale<Q8_0::D>(from)) {
            load_field<Q8_0::Codes>(from, 16 * unit, codes);
        }
    };

    static __device__ __forceinline__ void add(const Weights& weights, const Column& column, float& sum) {
        int dot = 0;
#pragma unroll
        for (int w = 0; w < 4; w++) dot = dot4_signed(weights.codes[w], column.x[w], dot);
        sum = __fmaf_rn(weights.d * column.scale, (float)dot, sum);
    }
};

// Interleaves activations whose weights are nibbles that are looked up: the nibbles of a byte belong to elements that are N words
// apart, so these elements become neighbours. This costs less than sorting the looked-up values of each row.
template <int N>
__device__ __forceinline__ void interleave(unsigned (&x)[8]) {
    unsigned y[8];
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const int at = w / N * 2 * N + w % N;
        y[2 * w] = __byte_perm(x[at], x[at + N], 0x5140);
        y[2 * w + 1] = __byte_perm(x[at], x[at + N], 0x7362);
    }
#pragma unroll
    for (int w = 0; w < 8; w++) x[w] = y[w];
}

// The activations of a block of 32 nibbles.
struct InterleavedColumn : Column32 {
    __device__ __forceinline__ InterleavedColumn(const ColumnBlock& from, int unit) : Column32(from, unit) { interleave<4>(x); }
};

// Looks up four nibbles, the lower half of a word, in tables of eight bytes. Bit 3 of a selector of the byte permutation means
// to replicate the sign bit of the selected byte: a nibble of 8 to 15 gives 0 from a table without sign bits, and 255 from one
// of negative values.
__device__ __forceinline__ unsigned look_up(unsigned first, unsigned second, unsigned nibbles) {
    unsigned result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(first), "r"(second), "r"(nibbles));
    return result;
}

// Flips bit 3 of each nibble. As assembly, because the compiler would flip the bits of both halves of a word separately.
__device__ __forceinline__ void flip_upper_bits(const unsigned (&words)[4], unsigned (&flipped)[4]) {
#pragma unroll
    for (int w = 0; w < 4; w++) asm("xor.b32 %0, %1, 0x88888888;" : "=r"(flipped[w]) : "r"(words[w]));
}

// The doubled values of E2M1 for 32 nibbles, plus BIAS. The tables hold values without a sign bit, so each nibble is found in one
// table and gives 0 in the other.
__device__ __forceinline__ void look_up_fp4(const unsigned (&words)[4], unsigned zero, unsigned (&codes)[8]) {
    unsigned flipped[4];
    flip_upper_bits(words, flipped);
#pragma unroll
    for (int w = 0; w < 8; w++) {
        const unsigned nibbles = words[w / 2] >> (w % 2 * 16), upper = flipped[w / 2] >> (w % 2 * 16);
        // 0 1 2 3, 4 6 8 12, then the same values negated
        codes[w] = look_up(0x0f0e0d0c + zero, 0x18141210 + zero, nibbles) | look_up(0x090a0b0c + zero, 0x00040608 + zero, upper);
    }
}
constexpr int FP4_BIAS = 12;

// d is 2^(e - 127), twice the scale of the codes, because that is one shift; Column halves the scale of the activations in return. e = 0 (2^-128
// for the codes, a denormal float, which ggml's CUDA kernels flush to zero) gives 0, and e = 255 (NaN of E8M0) infinity. The kernels for
// more columns, and GET_ROWS, take 2^-128 and 2^127, as the CPU does.
template <>
struct QuantDot<MXFP4> {
    static constexpr int UNIT = 32;

    struct Column : InterleavedColumn {
        __device__ __forceinline__ Column(const ColumnBlock& from, int unit) : InterleavedColumn(from, unit) { scale *= 0.5f; }
    };

    struct Weights {
        unsigned codes[8];
        float d;

        template <class From>
        __device__ __forceinline__ Weights(const From& from, const Unit& unit) {
            unsigned words[4];
            load_field<MXFP4::Codes>(from, 0, words);
            d = __uint_as_float((unsigned)from.template field<MXFP4::Exponent>()[0] << 23);
            look_up_fp4(words, unit.zero, codes);
        }
    };

    static __device__ __forceinline__ void add(const Weights& weights, const Column& column, float& sum) {
        int dot = -FP4_BIAS * column.sum;
#pragma unroll
        for (int w = 0; w < 8; w++) dot = dot4(weights.codes[w], column.x[w], dot);
        sum = __fmaf_rn(weights.d * column.scale, (float)dot, sum);
    }
};

// The values of IQ4_NL's table for 32 nibbles, as the sums of two numbers, which are formed in the dot product. Nibbles of 8 to 15
// give -1 from the table of the negative values. The table of the positive ones holds them plus 1, and gives 0 for nibbles below 8.
struct Iq4Codes {
    unsigned negative[8], positive[8];

    __device__ __forceinline__ void look_up_all(const unsigned (&words)[4], unsigned zero) {
        unsigned flipped[4];
        flip_upper_bits(words, flipped);
#pragma unroll
        for (int w = 0; w < 8; w++) {
            const unsigned nibbles = words[w / 2] >> (w % 2 * 16), upper = flipped[w / 2] >> (w % 2 * 16);
            // -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113
            negative[w] = look_up(0xbfad9881 + zero, 0xf6eaddcf + zero, nibbles);
            positive[w] = look_up(0x271a0e02 + zero, 0x725a4636 + zero, upper);
        }
    }

    __device__ __forceinline__ int dot(const unsigned (&x)[8]) const {
        int dot = 0;
#pragma unroll
        for (int w = 0; w < 8; w++) dot = dot4_signed(positive[w], x[w], dot4_signed(negative[w], x[w], dot));
        return dot;
    }
};

template <>
struct QuantDot<IQ4_NL> {
    static constexpr int UNIT = 32;
    using Column = InterleavedColumn;

    struct Weights : Iq4Codes {
        float d;

        template <class From>
        __device__ __forceinline__ Weights(const From& from, const Unit& unit) : d(load_scale<IQ4_NL::D>(from)) {
            unsigned words[4];
            load_field<IQ4_NL::Codes>(from, 0, words);
            look_up_all(words, unit.zero);
        }
    };

    static __device__ __forceinline__ void add(const Weights& weights, const Column& column, float& sum) {
        sum = __fmaf_rn(weights.d * column.scale, (float)weights.dot(column.x), sum);
    }
};

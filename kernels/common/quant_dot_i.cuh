// QuantDot of the i-quants of quants_i.cuh. A unit is a row of 32 elements; codes are decoded to signed bytes. See quant_dot.cuh. Blocks
// are at multiples of 2 bytes.
#pragma once
#include "quant_dot_low_bit.cuh"
#include "quants_i.cuh"

// d * scale * code, with SCALES scales in a unit.
template <int SCALES>
struct GridDot {
    static constexpr int UNIT = 32;

    using Column = RowColumn;

    struct Codes {
        unsigned codes[8];
        int scales[SCALES];
        float d;
    };

    // The integer is below 2^24, so that its conversion is exact.
    static __device__ __forceinline__ void add(const Codes& weights, const Column& column, float& sum) {
        int all = 0;
#pragma unroll
        for (int s = 0; s < SCALES; s++) {
            int dot = 0;
#pragma unroll
            for (int w = 8 / SCALES * s; w < 8 / SCALES * (s + 1); w++) dot = dot4_signed(weights.codes[w], column.x[w], dot);
            all += dot * weights.scales[s];
        }
        sum = __fmaf_rn(weights.d * column.scale, (float)all, sum);
    }
};

// 255 in the bytes of negative elements, of four in each word. A bit of the number stands for each of the first seven elements; the
// number of minus signs is even.
__device__ __forceinline__ void even_masks(unsigned number, unsigned (&masks)[2]) {
    masks[0] = masks_of_bits(number);
    masks[1] = masks_of_sign_bits((number >> 4) * 0x10204080 + (__popc(number) << 31));
}

// Negates magnitudes, none of which is 0.
__device__ __forceinline__ void negate(unsigned mask, unsigned& codes) { codes = (codes ^ mask) + (mask & 0x01010101); }

// The magnitudes of eight elements of an IQ2 type.
__device__ __forceinline__ void load_magnitudes(unsigned entry, const Unit& lane, unsigned& first, unsigned& second) {
    unsigned codes[2];
    by_pairs(entry, 0x2b1908 + lane.zero, codes);
    first = codes[0], second = codes[1];
}

template <>
struct QuantDot<IQ2_XXS> : GridDot<1> {
    struct Weights : Codes {
        template <int ALIGN>
        __device__ __forceinline__ Weights(const RowBlock<ALIGN>& from, const Unit& lane) {
            const unsigned unit = lane.number;
            unsigned words[2]; // four indices; four times seven bits of signs, and the scale
            load_words<2>(from.block + 2 + 8 * unit, words);
            d = load_half<2>(from.block) * 0.125f, scales[0] = words[1] >> 28 << 1 | 1;
#pragma unroll
            for (int o = 0; o < 4; o++) {
                unsigned masks[2];
                load_magnitudes(grid_2xxs<0>(byte_of(words[0], o)), lane, codes[2 * o], codes[2 * o + 1]);
                even_masks(words[1] >> (7 * o) & 127, masks);
                negate(masks[0], codes[2 * o]), negate(masks[1], codes[2 * o + 1]);
            }
        }
    };
};

// Two scales of four bits, as 2 s + 1.
__device__ __forceinline__ void nibble_scales(unsigned byte, int (&scales)[2]) {
    scales[0] = (byte << 1 & 30) | 1, scales[1] = (byte >> 3 & 30) | 1;
}

template <>
struct QuantDot<IQ2_XS> : GridDot<2> {
    struct Weights : Codes {
        template <int ALIGN>
        __device__ __forceinline__ Weights(const RowBlock<ALIGN>& from, const Unit& lane) {
            const unsigned unit = lane.number;
            d = load_half<2>(from.block) * 0.125f;
            nibble_scales(from.block[66 + unit], scales);
#pragma unroll
            for (int o = 0; o < 4; o++) {
                unsigned masks[2];
                const unsigned word = load_short<2>(from.block + 2 + 8 * unit + 2 * o); // nine bits of index, seven of signs
                load_magnitudes(grid_2xs<0>(word & 511), lane, codes[2 * o], codes[2 * o + 1]);
                even_masks(word >> 9, masks);
                negate(masks[0], codes[2 * o]), negate(masks[1], codes[2 * o + 1]);
            }
        }
    };
};

// Signs of 32 elements, a bit each: their masks.
struct SignWord {
    unsigned low, high; // nibbles in the bytes of a word

    __device__ __forceinline__ explicit SignWord(unsigned signs) : low(signs & 0x0f0f0f0f), high(signs >> 4 & 0x0f0f0f0f) {}

    // Of elements 4 * w to 4 * w + 3.
    __device__ __forceinline__ unsigned mask(int w) const { return masks_of_bits(byte_of(w % 2 ? high : low, w / 2)); }
};

template <>
struct QuantDot<IQ2_S> : GridDot<2> {
    struct Weights : Codes {
        template <int ALIGN>
        __device__ __forceinline__ Weights(const RowBlock<ALIGN>& from, const Unit& lane) {
            const unsigned unit = lane.number;
            unsigned indices[1], signs[1];
            load_words<2>(from.block + 2 + 4 * unit, indices);
            load_words<2>(from.block + 34 + 4 * unit, signs);
            const unsigned high = from.block[66 + unit];
            d = load_half<2>(from.block) * 0.125f;
            nibble_scales(from.block[74 + unit], scales);
            const SignWord masks(signs[0]);
#pragma unroll
            for (int o = 0; o < 4; o++) {
                const unsigned index = byte_of(indices[0], o) | (high << (8 - 2 * o) & 0x300);
                load_magnitudes(grid_2s<0>(index), lane, codes[2 * o], codes[2 * o + 1]);
                negate(masks.mask(2 * o), codes[2 * o]), negate(masks.mask(2 * o + 1), codes[2 * o + 1]);
            }
        }
    };
};

template <>
struct QuantDot<IQ3_XXS> : GridDot<1> {
    struct Weights : Codes {
        template <int ALIGN>
        __device__ __forceinline__ Weights(const RowBlock<ALIGN>& from, const Unit& lane) {
            const unsigned unit = lane.number;
            unsigned indices[2], word[1]; // four times seven bits of signs, and the scale
            load_words<2>(from.block + 2 + 8 * unit, indices);
            load_words<2>(from.block + 66 + 4 * unit, word);
            d = load_half<2>(from.block) * 0.25f, scales[0] = word[0] >> 28 << 1 | 1;
#pragma unroll
            for (int o = 0; o < 4; o++) {
                unsigned masks[2];
                even_masks(word[0] >> (7 * o) & 127, masks);
#pragma unroll
                for (int w = 2 * o; w < 2 * o + 2; w++) {
                    codes[w] = __byte_perm(0x1c140c04 + lane.zero, 0x3e342c24 + lane.zero, grid_3xxs<0>(byte_of(indices[w / 4], w % 4)));
                    negate(masks[w % 2], codes[w]);
                }
            }
        }
    };
};

// The magnitudes are odd, 2 u + 1 with u = 0 to 7. The complement of u stands for the negated magnitude, so that signs cost one
// operation: the sum of (2 u + 1) x is 2 * sum of u x + sum of x.
template <>
struct QuantDot<IQ3_S> {
    static constexpr int UNIT = 32;
    using Column = SummedRowColumn;

    struct Weights {
        unsigned codes[8];
        int scale;
        float d;

        template <int ALIGN>
        __device__ __forceinline__ Weights(const RowBlock<ALIGN>& from, const Unit& lane) : d(load_half<2>(from.block)) {
            const unsigned unit = lane.number;
            unsigned indices[2], signs[1];
            load_words<2>(from.block + 2 + 8 * unit, indices);
            load_words<2>(from.block + 74 + 4 * unit, signs);
            const unsigned high = from.block[66 + unit];
            scale = from.block[106 + unit / 2] >> (unit % 2 * 4) << 1 & 30 | 1;
            const SignWord masks(signs[0]);
#pragma unroll
            for (int w = 0; w < 8; w++) {
                const unsigned entry = grid_3s<0>(byte_of(indices[w / 4], w % 4) | (high << (8 - w) & 256));
                codes[w] = __byte_perm(0x03020100 + lane.zero, 0x07060504 + lane.zero, entry) ^ masks.mask(w);
            }
        }
    };

    static __device__ __forceinline__ void add(const Weights& weights, const Column& column, float& sum) {
        int dot = 0;
#pragma unroll
        for (int w = 0; w < 8; w++) dot = dot4_signed(weights.codes[w], column.x[w], dot);
        sum = __fmaf_rn(weights.d * column.scale, (float)((2 * dot + column.sum) * weights.scale), sum);
    }
};

// Eight times the elements of the grid, -8, 0 and 8, plus or minus 1.
__device__ __forceinline__ void load_shifted(unsigned entry, bool minus, unsigned& first, unsigned& second) {
    unsigned codes[2];
    by_pairs(entry, minus ? 0x07fff7 : 0x0901f9, codes);
    first = codes[0], second = codes[1];
}

template <>
struct QuantDot<IQ1_S> : GridDot<1> {
    struct Weights : Codes {
        template <int ALIGN>
        __device__ __forceinline__ Weights(const RowBlock<ALIGN>& from, const Unit& lane) {
            const unsigned unit = lane.number;
            unsigned indices[1];
            load_words<2>(from.block + 2 + 4 * unit, indices);
            const unsigned bits = load_short<2>(from.block + 34 + 2 * unit); // four times three bits of index, scale, sign
            d = load_half<2>(from.block) * 0.125f, scales[0] = (bits >> 11 & 14) | 1;
#pragma unroll
            for (int o = 0; o < 4; o++) {
                const unsigned index = byte_of(indices[0], o) | (o < 3 ? bits << (8 - 3 * o) & 0x700 : bits >> 1 & 0x700);
                load_shifted(grid_1<0>(index), bits >> 15, codes[2 * o], codes[2 * o + 1]);
            }
        }
    };
};

template <>
struct QuantDot<IQ1_M> : GridDot<2> {
    struct Weights : Codes {
        template <int ALIGN>
        __device__ __forceinline__ Weights(const RowBlock<ALIGN>& from, const Unit& lane) {
            const unsigned unit = lane.number;
            unsigned indices[1], words[2]; // words of four scales of three bits; their upper four bits are d
            load_words<2>(from.block + 4 * unit, indices);
            load_words<2>(from.block + 48, words);
            const unsigned bits = load_short<2>(from.block + 32 + 2 * unit); // four times three bits of index, and a sign
            const unsigned low = (words[0] >> 12 & 15) | (words[0] >> 24 & 0xf0);
            d = float_of_half(low | (words[1] >> 4 & 0xf00) | (words[1] >> 16 & 0xf000)) * 0.125f;
            const unsigned two = (unit < 4 ? words[0] : words[1]) >> (unit / 2 % 2 * 16 + unit % 2 * 6);
            scales[0] = (two << 1 & 14) | 1, scales[1] = (two >> 2 & 14) | 1;
#pragma unroll
            for (int o = 0; o < 4; o++) {
                const unsigned index = byte_of(indices[0], o) | (o < 3 ? bits << (8 - 4 * o) & 0x700 : bits >> 4 & 0x700);
                load_shifted(grid_1<0>(index), bits >> (4 * o + 3) & 1, codes[2 * o], codes[2 * o + 1]);
            }
        }
    };
};

// The i-quants, whose codes are indices into grids of magnitudes: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S. quants.cuh
// documents the members. There are no quantisers for them.
//
// grids.inc is generated from src/tensor/quant/grids.rs by scripts/build_ptx.py: grid_NAME(i) is entry i, whose nibbles select
// the elements' magnitudes by byte permutations: three bits for each of four elements; or two bits for each of eight, those of
// elements n and n + 4 in nibble n.
#pragma once
#include "quants_low_bit.cuh"
#include "grids.inc"

// Codes of eight elements of two bits, by a table of four bytes. That of the IQ2 types is 8, 25, 43.
__device__ __forceinline__ void by_pairs(unsigned entry, unsigned table, unsigned (&codes)[2]) {
    codes[0] = __byte_perm(table, 0, entry & 0x3333);
    codes[1] = __byte_perm(table, 0, entry >> 2 & 0x3333);
}

// Turns magnitudes, none of which is 0, to codes with ZERO = 128: bit i of `signs` makes element i negative.
__device__ __forceinline__ void apply_signs(unsigned signs, unsigned (&codes)[2]) {
#pragma unroll
    for (int w = 0; w < 2; w++) {
        // The complement plus one. No sum carries into the next byte, because no complement is 255.
        unsigned negative = masks_of_bits(signs >> (4 * w) & 15);
        codes[w] = ((codes[w] ^ negative) + (negative & 0x01010101)) ^ 0x80808080;
    }
}

// The signs for a 7-bit number: the number of minus signs is even.
__device__ __forceinline__ unsigned even_signs(unsigned number) { return number | (__popc(number) & 1) << 7; }

// A word at an address that is a multiple of ALIGN bytes, or of 2.
template <int ALIGN>
__device__ __forceinline__ unsigned load_word2(const unsigned char* from) {
    unsigned words[1];
    load_words<alignment_of(ALIGN | 2)>(from, words);
    return words[0];
}

// d * (2 s + 1) / 2^SHIFT, which is exact.
template <int ALIGN, int SHIFT>
__device__ __forceinline__ Symmetric odd_scale(const unsigned char* d, unsigned s) {
    return {__fmul_rn(load_half<ALIGN>(d), __fmul_rn(float_of_code(2 * s + 1), 1.0f / (1 << SHIFT)))};
}

struct IQ2_XXS : Blocks<IQ2_XXS> {
    static constexpr int LEN = 256, BYTES = 66, ZERO = 128;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        const unsigned char* eight = block + 2 + j / 32 * 8;
        int group = j / 8 % 4;
        by_pairs(grid_2xxs<ALIGN>(eight[group]), 0x2b1908, codes);
        apply_signs(even_signs(load_word2<ALIGN>(eight + 4) >> (7 * group) & 127), codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int j) {
        return odd_scale<ALIGN, 3>(block, block[2 + j / 32 * 8 + 7] >> 4);
    }
};

struct IQ2_XS : Blocks<IQ2_XS> {
    static constexpr int LEN = 256, BYTES = 74, ZERO = 128;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        unsigned word = load_short<ALIGN>(block + 2 + j / 8 * 2);
        by_pairs(grid_2xs<ALIGN>(word & 511), 0x2b1908, codes);
        apply_signs(even_signs(word >> 9), codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int j) {
        return odd_scale<ALIGN, 3>(block, block[66 + j / 32] >> (j / 16 % 2 * 4) & 15);
    }
};

struct IQ2_S : Blocks<IQ2_S> {
    static constexpr int LEN = 256, BYTES = 82, ZERO = 128;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        int g = j / 8;
        unsigned high = block[66 + g / 4] >> (g % 4 * 2) & 3;
        by_pairs(grid_2s<ALIGN>(block[2 + g] | high << 8), 0x2b1908, codes);
        apply_signs(block[34 + g], codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int j) {
        return odd_scale<ALIGN, 3>(block, block[74 + j / 32] >> (j / 16 % 2 * 4) & 15);
    }
};

struct IQ3_XXS : Blocks<IQ3_XXS> {
    static constexpr int LEN = 256, BYTES = 98, ZERO = 128;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
#pragma unroll
        for (int w = 0; w < 2; w++) {
            // 4, 12, 20, 28, 36, 44, 52, 62
            codes[w] = __byte_perm(0x1c140c04, 0x3e342c24, grid_3xxs<ALIGN>(block[2 + j / 4 + w]));
        }
        apply_signs(even_signs(load_word2<ALIGN>(block + 66 + j / 32 * 4) >> (j / 8 % 4 * 7) & 127), codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int j) {
        return odd_scale<ALIGN, 2>(block, block[66 + j / 32 * 4 + 3] >> 4);
    }
};

struct IQ3_S : Blocks<IQ3_S> {
    static constexpr int LEN = 256, BYTES = 110, ZERO = 128;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        unsigned high = block[66 + j / 32] >> (j / 4 % 8);
#pragma unroll
        for (int w = 0; w < 2; w++) {
            unsigned entry = grid_3s<ALIGN>(block[2 + j / 4 + w] | (high >> w & 1) << 8);
            codes[w] = __byte_perm(0x07050301, 0x0f0d0b09, entry);
        }
        apply_signs(block[74 + j / 8], codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int j) {
        return odd_scale<ALIGN, 0>(block, block[106 + j / 64] >> (j / 32 % 2 * 4) & 15);
    }
};

// Eight times the elements of the grid, -8, 0 and 8, plus or minus 1.
__device__ __forceinline__ void shifted(unsigned entry, bool minus, unsigned (&codes)[2]) {
    by_pairs(entry, minus ? 0x877f77 : 0x898179, codes);
}

struct IQ1_S : Blocks<IQ1_S> {
    static constexpr int LEN = 256, BYTES = 50, ZERO = 128;

    template <int ALIGN>
    static __device__ __forceinline__ unsigned head(const unsigned char* block, int j) {
        return load_short<ALIGN>(block + 34 + j / 32 * 2);
    }

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        unsigned bits = head<ALIGN>(block, j), high = bits >> (j / 8 % 4 * 3) & 7;
        shifted(grid_1<ALIGN>(block[2 + j / 8] | high << 8), bits >> 15, codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int j) {
        return odd_scale<ALIGN, 3>(block, head<ALIGN>(block, j) >> 12 & 7);
    }
};

struct IQ1_M : Blocks<IQ1_M> {
    static constexpr int LEN = 256, BYTES = 56, ZERO = 128;

    // No load is wider than two bytes, so that kernels need no variant for blocks at multiples of 8 bytes.
    template <bool>
    static __device__ constexpr int align() {
        return 2;
    }

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        unsigned bits = block[32 + j / 16] >> (j / 8 % 2 * 4);
        shifted(grid_1<ALIGN>(block[j / 8] | (bits & 7) << 8), bits >> 3 & 1, codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int j) {
        // The top nibbles of four words make up d.
        const unsigned char* scales = block + 48;
        unsigned d = scales[1] >> 4 | (scales[3] & 0xf0) | (scales[5] & 0xf0) << 4 | (scales[7] & 0xf0) << 8;
        unsigned word = load_short<ALIGN>(scales + j / 64 * 2);
        unsigned s = word >> (j / 32 % 2 * 6 + j / 16 % 2 * 3) & 7;
        return {__fmul_rn(float_of_half(d), __fmul_rn(float_of_code(2 * s + 1), 0.125f))};
    }
};

// Types of one to four bits without a grid: Q1_0, Q2_0, TQ1_0, TQ2_0, NVFP4, IQ4_XS. quants.cuh documents the members.
#pragma once
#include "quants.cuh"

// Spreads four numbers of two bits to the bytes of a word.
__device__ __forceinline__ unsigned bytes_of_pairs(unsigned pairs) {
    return (pairs | pairs << 6 | pairs << 12 | pairs << 18) & 0x03030303;
}

// Spreads four bits to the bytes of a word. The product places copies of them seven bits apart, and no two bits overlap.
__device__ __forceinline__ unsigned bytes_of_bits(unsigned bits) { return bits * 0x00204081 & 0x01010101; }

// Replicates the highest bit of each byte.
__device__ __forceinline__ unsigned masks_of_sign_bits(unsigned word) {
    unsigned masks;
    asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(masks) : "r"(word));
    return masks;
}

// Spreads four bits to the bytes of a word as 0 or 255. The product places them in the bytes' highest bits; it has no carries for
// numbers of up to seven bits, so that bits 4 to 6 need not be 0.
__device__ __forceinline__ unsigned masks_of_bits(unsigned bits) { return masks_of_sign_bits(bits * 0x10204080); }

// A bit is the sign: the codes are 0 and 2.
struct Q1_0 : Blocks<Q1_0> {
    static constexpr int LEN = 128, BYTES = 18, ZERO = 1;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        unsigned bits = block[2 + j / 8];
        codes[0] = bytes_of_bits(bits & 15) << 1;
        codes[1] = bytes_of_bits(bits >> 4) << 1;
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int) {
        return {load_half<ALIGN>(block)};
    }
};

struct Q2_0 : Blocks<Q2_0> {
    static constexpr int LEN = 64, BYTES = 18, ZERO = 1;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        codes[0] = bytes_of_pairs(block[2 + j / 4]);
        codes[1] = bytes_of_pairs(block[3 + j / 4]);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int) {
        return {load_half<ALIGN>(block)};
    }
};

struct TQ2_0 : Blocks<TQ2_0> {
    static constexpr int LEN = 256, BYTES = 66, ZERO = 1;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        load_bit_pairs<ALIGN>(block, j, codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int) {
        return {load_half<ALIGN>(block + 64)};
    }
};

// A byte holds five digits of base 3 (the last four bytes: four) as a fraction: digit n is the integer part of
// 3 * frac(byte * 3^n / 256).
struct TQ1_0 : Blocks<TQ1_0> {
    static constexpr int LEN = 256, BYTES = 54, ZERO = 1;

    // Digit n of each byte of a word.
    static __device__ __forceinline__ unsigned digits(unsigned word, int n) {
        unsigned power = n < 4 ? 0x1b090301 >> (8 * n) & 255 : 81;
        unsigned even = (word & 0x00ff00ff) * power & 0x00ff00ff, odd = (word >> 8 & 0x00ff00ff) * power & 0x00ff00ff;
        return (even * 3 >> 8 & 0x00ff00ff) | (odd * 3 & 0xff00ff00);
    }

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        // Elements 0 to 159: digits of bytes 0 to 31, 32 elements per digit; 160 to 239: of bytes 32 to 47, 16 elements per
        // digit; 240 to 255: of bytes 48 to 51, 4 elements per digit.
        if (j >= 240) {
            unsigned word[1];
            load_words<alignment_of(ALIGN | 16)>(block + 48, word);
            int n = (j - 240) / 4;
            codes[0] = digits(word[0], n);
            codes[1] = digits(word[0], n + 1);
            return;
        }
        int at = j < 160 ? j % 32 : 32 + j % 16, n = j < 160 ? j / 32 : (j - 160) / 16;
        load_words<alignment_of(ALIGN | 8)>(block + at, codes);
        codes[0] = digits(codes[0], n);
        codes[1] = digits(codes[1], n);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int) {
        return {load_half<ALIGN>(block + 52)};
    }
};

// The codes are the doubled values of E2M1 plus 128.
struct NVFP4 : Blocks<NVFP4> {
    static constexpr int LEN = 64, BYTES = 36, ZERO = 128;

    // Value of one unit of the codes: half of an unsigned E4M3 number. Bit 7 is not part of it; 0x7f is no number and gives 0.
    static __device__ __forceinline__ float unit(unsigned bits) {
        unsigned magnitude = bits & 127;
        // Rebases the exponent by a product, which also normalises subnormal numbers: 2^(127 - 7 - 1).
        float value = __fmul_rn(__uint_as_float(magnitude << 20), __uint_as_float((127 + 119) << 23));
        return bits == 127 ? 0.0f : value;
    }

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        // Eight bytes hold sixteen elements, the low nibbles first.
        load_by_table<alignment_of(ALIGN | 4), 0x83828180, 0x8c888684, 0x7d7e7f80, 0x74787a7c>(block + 4 + j / 16 * 8,
                                                                                            j % 16 * 2, codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int j) {
        return {unit(block[j / 16])};
    }
};

// The codes are those of IQ4_NL.
struct IQ4_XS : Blocks<IQ4_XS> {
    static constexpr int LEN = 256, BYTES = 136, ZERO = 128;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        load_by_table<alignment_of(ALIGN | 8), 0x3f2d1801, 0x766a5d4f, 0xa6998d81, 0xf1d9c5b5>(block + 8 + j / 32 * 16, j % 32,
                                                                                            codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int j) {
        int s = j / 32;
        unsigned high = block[2 + s / 4] >> (s % 4 * 2) & 3, low = block[4 + s / 2] >> (s % 2 * 4) & 15;
        return {__fmul_rn(load_half<ALIGN>(block), float_of_code<32>(low | high << 4))};
    }
};

// Blocks of 32 elements: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4. Included by quants.cuh, which says what the members are.
#pragma once

// Nibbles of 16 bytes, low ones first: those of elements j to j + 7.
template <int ALIGN>
__device__ __forceinline__ void load_nibbles(const unsigned char* bytes, int j, unsigned (&codes)[2]) {
    load_words<ALIGN>(bytes + (j & 8), codes);
    int shift = (j & 16) / 4;
    codes[0] = codes[0] >> shift & 0x0f0f0f0f;
    codes[1] = codes[1] >> shift & 0x0f0f0f0f;
}

// Adds fifth bits to eight codes: bit i of `bits` to code i.
__device__ __forceinline__ void add_fifth_bits(unsigned bits, unsigned (&codes)[2]) {
    // Copies of four bits, seven apart: bit i of copy i is bit 8 i + 4, and no two fall on the same place.
    codes[0] |= (bits & 15) * 0x02040810 & 0x10101010;
    codes[1] |= (bits >> 4) * 0x02040810 & 0x10101010;
}

// Nibbles as load_nibbles gives them, but each replaced by its byte of a table of 16, given as four words.
template <int ALIGN, unsigned T0, unsigned T1, unsigned T2, unsigned T3>
__device__ __forceinline__ void load_by_table(const unsigned char* bytes, int j, unsigned (&codes)[2]) {
    unsigned words[2];
    load_words<ALIGN>(bytes + (j & 8), words);
    int shift = (j & 16) / 4;
    // Nibble 2 i is code i, nibble 2 i + 1 is code i + 4.
    unsigned nibbles = (words[0] >> shift & 0x0f0f0f0f) | (words[1] << (4 - shift) & 0xf0f0f0f0);
    // A byte permutation looks four nibbles up in eight bytes. The fourth bit then chooses between two such results.
    unsigned low = nibbles & 0x77777777, upper = (nibbles >> 1 & 0x44444444) | 0x32103210;
    unsigned first = __byte_perm(__byte_perm(T0, T1, low), __byte_perm(T2, T3, low), upper);
    unsigned second = __byte_perm(__byte_perm(T0, T1, low >> 16), __byte_perm(T2, T3, low >> 16), upper >> 16);
    codes[0] = __byte_perm(first, second, 0x6420);
    codes[1] = __byte_perm(first, second, 0x7531);
}

struct Q4_0 : Blocks<Q4_0> {
    static constexpr int LEN = 32, BYTES = 18, ZERO = 8;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        load_nibbles<alignment_of(ALIGN | 2)>(block + 2, j, codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int) {
        return {load_half<ALIGN>(block)};
    }
};

struct Q4_1 : Blocks<Q4_1> {
    static constexpr int LEN = 32, BYTES = 20, ZERO = 0;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        load_nibbles<alignment_of(ALIGN | 4)>(block + 4, j, codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Affine scale8(const unsigned char* block, int) {
        Affine scale;
        load_halves<ALIGN>(block, scale.d, scale.m);
        return scale;
    }
};

struct Q5_0 : Blocks<Q5_0> {
    static constexpr int LEN = 32, BYTES = 22, ZERO = 16;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        load_nibbles<alignment_of(ALIGN | 2)>(block + 6, j, codes);
        add_fifth_bits(block[2 + j / 8], codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int) {
        return {load_half<ALIGN>(block)};
    }
};

struct Q5_1 : Blocks<Q5_1> {
    static constexpr int LEN = 32, BYTES = 24, ZERO = 0;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        load_nibbles<alignment_of(ALIGN | 8)>(block + 8, j, codes);
        add_fifth_bits(block[4 + j / 8], codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Affine scale8(const unsigned char* block, int) {
        Affine scale;
        load_halves<ALIGN>(block, scale.d, scale.m);
        return scale;
    }
};

struct Q8_0 : Blocks<Q8_0> {
    static constexpr int LEN = 32, BYTES = 34, ZERO = 128;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        load_words<alignment_of(ALIGN | 2)>(block + 2 + j, codes);
        codes[0] ^= 0x80808080, codes[1] ^= 0x80808080;
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int) {
        return {load_half<ALIGN>(block)};
    }
};

// Codes are the values of its table, plus 128.
struct IQ4_NL : Blocks<IQ4_NL> {
    static constexpr int LEN = 32, BYTES = 18, ZERO = 128;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        // -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113
        load_by_table<alignment_of(ALIGN | 2), 0x3f2d1801, 0x766a5d4f, 0xa6998d81, 0xf1d9c5b5>(block + 2, j, codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int) {
        return {load_half<ALIGN>(block)};
    }
};

// Codes are the doubled values of E2M1, plus 128.
struct MXFP4 : Blocks<MXFP4> {
    static constexpr int LEN = 32, BYTES = 17, ZERO = 128;

    // What one unit of the codes is worth: 2^(e - 128), which is subnormal for `e` below 2.
    static __device__ __forceinline__ float unit(unsigned e) {
        return __uint_as_float(e < 2 ? 0x200000 << e : (e - 1) << 23);
    }

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        // 0 1 2 3, 4 6 8 12, and these again, negative
        load_by_table<1, 0x83828180, 0x8c888684, 0x7d7e7f80, 0x74787a7c>(block + 1, j, codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int) {
        return {unit(block[0])};
    }
};

// Blocks of 256 elements in sub-blocks of 16 or 32: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K. Included by quants.cuh, which says what
// the members are. In the places of codes, element j is element j % 32 of row j / 32.
#pragma once

// Scale and minimum of row j / 32 of Q4_K and Q5_K. The block begins with d, dmin and twelve bytes of 6-bit numbers.
template <int ALIGN>
__device__ __forceinline__ Affine load_scale_min(const unsigned char* block, int j) {
    int row = j / 32, s = row & 3;
    float d, dmin;
    unsigned a, b, c;
    if constexpr (ALIGN >= 16) {
        unsigned head[4];
        load_words<16>(block, head);
        unsigned short halves[2];
        halves_of_word(head[0], halves[0], halves[1]);
        d = float_of_half(halves[0]), dmin = float_of_half(halves[1]);
        a = head[1] >> (8 * s) & 255, b = head[2] >> (8 * s) & 255, c = head[3] >> (8 * s) & 255;
    } else {
        load_halves<ALIGN>(block, d, dmin);
        a = block[4 + s], b = block[8 + s], c = block[12 + s];
    }
    unsigned scale = row < 4 ? a & 63 : (c & 15) | (a >> 2 & 48);
    unsigned min = row < 4 ? b & 63 : c >> 4 | (b >> 2 & 48);
    return {__fmul_rn(d, float_of_code(scale)), -__fmul_rn(dmin, float_of_code(min))};
}

// Nibbles of 128 bytes, where each 32 bytes hold two neighbouring rows (Q4_K, Q5_K).
template <int ALIGN>
__device__ __forceinline__ void load_row_nibbles(const unsigned char* bytes, int j, unsigned (&codes)[2]) {
    load_words<ALIGN>(bytes + 32 * (j / 64) + j % 32, codes);
    int shift = (j & 32) / 8;
    codes[0] = codes[0] >> shift & 0x0f0f0f0f;
    codes[1] = codes[1] >> shift & 0x0f0f0f0f;
}

// Pairs of bits in 64 bytes, where each 32 bytes hold four neighbouring rows.
template <int ALIGN>
__device__ __forceinline__ void load_bit_pairs(const unsigned char* bytes, int j, unsigned (&codes)[2]) {
    load_words<ALIGN>(bytes + 32 * (j / 128) + j % 32, codes);
    int shift = j / 32 % 4 * 2;
    codes[0] = codes[0] >> shift & 0x03030303;
    codes[1] = codes[1] >> shift & 0x03030303;
}

// Adds bits of 32 bytes, each of which holds the bits of all eight rows, as bit TO of the codes.
template <int ALIGN, int TO>
__device__ __forceinline__ void add_row_bits(const unsigned char* bytes, int j, unsigned (&codes)[2]) {
    unsigned bits[2];
    load_words<ALIGN>(bytes + j % 32, bits);
    int row = j / 32;
    codes[0] |= (bits[0] >> row & 0x01010101) << TO;
    codes[1] |= (bits[1] >> row & 0x01010101) << TO;
}

struct Q2_K : Blocks<Q2_K> {
    static constexpr int LEN = 256, BYTES = 84, ZERO = 0;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        load_bit_pairs<ALIGN>(block + 16, j, codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Affine scale8(const unsigned char* block, int j) {
        unsigned scale_min = block[j / 16];
        float d, dmin;
        load_halves<ALIGN>(block + 80, d, dmin);
        return {__fmul_rn(d, float_of_code(scale_min & 15)), -__fmul_rn(dmin, float_of_code(scale_min >> 4))};
    }
};

struct Q3_K : Blocks<Q3_K> {
    static constexpr int LEN = 256, BYTES = 110, ZERO = 4;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        load_bit_pairs<ALIGN>(block + 32, j, codes);
        add_row_bits<ALIGN, 2>(block, j, codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int j) {
        int s = j / 16;
        unsigned low = block[96 + s % 8] >> (s / 8 * 4) & 15, high = block[104 + s % 4] >> (s / 4 * 2) & 3;
        return {__fmul_rn(load_half<ALIGN>(block + 108), float_of_code<32>(low | high << 4))};
    }
};

struct Q4_K : Blocks<Q4_K> {
    static constexpr int LEN = 256, BYTES = 144, ZERO = 0;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        load_row_nibbles<ALIGN>(block + 16, j, codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Affine scale8(const unsigned char* block, int j) {
        return load_scale_min<ALIGN>(block, j);
    }
};

struct Q5_K : Blocks<Q5_K> {
    static constexpr int LEN = 256, BYTES = 176, ZERO = 0;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        load_row_nibbles<ALIGN>(block + 48, j, codes);
        add_row_bits<ALIGN, 4>(block + 16, j, codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Affine scale8(const unsigned char* block, int j) {
        return load_scale_min<ALIGN>(block, j);
    }
};

struct Q6_K : Blocks<Q6_K> {
    static constexpr int LEN = 256, BYTES = 210, ZERO = 32;

    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        // The low four bits of rows two apart share bytes, the high two are placed as in Q2_K.
        unsigned low[2];
        load_words<ALIGN>(block + 64 * (j / 128) + j % 64, low);
        int shift = (j & 64) / 16;
        load_bit_pairs<ALIGN>(block + 128, j, codes);
        codes[0] = codes[0] << 4 | (low[0] >> shift & 0x0f0f0f0f);
        codes[1] = codes[1] << 4 | (low[1] >> shift & 0x0f0f0f0f);
    }

    template <int ALIGN>
    static __device__ __forceinline__ Symmetric scale8(const unsigned char* block, int j) {
        unsigned scale = block[192 + j / 16] ^ 128;
        return {__fmul_rn(load_half<ALIGN>(block + 208), float_of_code<128>(scale))};
    }
};

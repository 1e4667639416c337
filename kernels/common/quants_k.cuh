// Blocks of 256 elements in sub-blocks of 16 or 32: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K. Included by quants.cuh, which documents the
// members. Comments on the layout of codes arrange the elements in rows of 32: element j is element j % 32 of row j / 32.
#pragma once

// Scale and minimum of row j / 32 of T, which is Q4_K or Q5_K, from d, dmin and twelve bytes of 6-bit numbers.
template <class T, class From>
__device__ __forceinline__ Affine load_scale_min(const From& from, int j) {
    using DM = typename T::DM;
    using Scales = typename T::Scales;
    int row = j / 32, s = row & 3;
    float d, dmin;
    unsigned a, b, c;
    if constexpr (!From::PACKED && From::template align<DM>() >= 16) {
        // The twelve bytes follow d and dmin.
        unsigned head[4];
        load_words<16>(from.template field<DM>(), head);
        unsigned short halves[2];
        halves_of_word(head[0], halves[0], halves[1]);
        d = float_of_half(halves[0]), dmin = float_of_half(halves[1]);
        a = head[1] >> (8 * s) & 255, b = head[2] >> (8 * s) & 255, c = head[3] >> (8 * s) & 255;
    } else {
        load_halves<From::template align<DM>()>(from.template field<DM>(), d, dmin);
        const unsigned char* scales = from.template field<Scales>();
        a = scales[s], b = scales[4 + s], c = scales[8 + s];
    }
    unsigned scale = row < 4 ? a & 63 : (c & 15) | (a >> 2 & 48);
    unsigned min = row < 4 ? b & 63 : c >> 4 | (b >> 2 & 48);
    return {__fmul_rn(d, float_of_code(scale)), -__fmul_rn(dmin, float_of_code(min))};
}

// Loads nibbles from 128 bytes, where each 32 bytes hold two neighbouring rows (Q4_K, Q5_K).
template <int ALIGN>
__device__ __forceinline__ void load_row_nibbles(const unsigned char* bytes, int j, unsigned (&codes)[2]) {
    load_words<ALIGN>(bytes + 32 * (j / 64) + j % 32, codes);
    int shift = (j & 32) / 8;
    codes[0] = codes[0] >> shift & 0x0f0f0f0f;
    codes[1] = codes[1] >> shift & 0x0f0f0f0f;
}

// Loads pairs of bits from 64 bytes, where each 32 bytes hold four neighbouring rows.
template <int ALIGN>
__device__ __forceinline__ void load_bit_pairs(const unsigned char* bytes, int j, unsigned (&codes)[2]) {
    load_words<ALIGN>(bytes + 32 * (j / 128) + j % 32, codes);
    int shift = j / 32 % 4 * 2;
    codes[0] = codes[0] >> shift & 0x03030303;
    codes[1] = codes[1] >> shift & 0x03030303;
}

// Adds one bit from 32 bytes as bit TO of the codes. Each byte holds one bit of each of the eight rows.
template <int ALIGN, int TO>
__device__ __forceinline__ void add_row_bits(const unsigned char* bytes, int j, unsigned (&codes)[2]) {
    unsigned bits[2];
    load_words<ALIGN>(bytes + j % 32, bits);
    int row = j / 32;
    codes[0] |= (bits[0] >> row & 0x01010101) << TO;
    codes[1] |= (bits[1] >> row & 0x01010101) << TO;
}

struct Q2_K : FieldBlocks<Q2_K> {
    static constexpr int LEN = 256, BYTES = 84, ZERO = 0;
    using Codes = Field<16, 64>; using Scales = Field<0, 16>; using DM = Field<80, 4>;
    using Fields = FieldList<Codes, Scales, DM>;

    template <class From>
    static __device__ __forceinline__ void read_codes(const From& from, int j, unsigned (&codes)[2]) {
        load_bit_pairs<alignment_of(From::template align<Codes>() | 8)>(from.template field<Codes>(), j, codes);
    }

    template <class From>
    static __device__ __forceinline__ Affine read_scale(const From& from, int j) {
        unsigned scale_min = from.template field<Scales>()[j / 16];
        float d, dmin;
        load_halves<From::template align<DM>()>(from.template field<DM>(), d, dmin);
        return {__fmul_rn(d, float_of_code(scale_min & 15)), -__fmul_rn(dmin, float_of_code(scale_min >> 4))};
    }
};

struct Q3_K : FieldBlocks<Q3_K> {
    static constexpr int LEN = 256, BYTES = 110, ZERO = 4;
    using Codes = Field<32, 64>; using Third = Field<0, 32>; using Scales = Field<96, 12>; using D = Field<108, 2>;
    using Fields = FieldList<Codes, Third, Scales, D>;

    template <class From>
    static __device__ __forceinline__ void read_codes(const From& from, int j, unsigned (&codes)[2]) {
        load_bit_pairs<alignment_of(From::template align<Codes>() | 8)>(from.template field<Codes>(), j, codes);
        add_row_bits<alignment_of(From::template align<Third>() | 8), 2>(from.template field<Third>(), j, codes);
    }

    template <class From>
    static __device__ __forceinline__ Symmetric read_scale(const From& from, int j) {
        int s = j / 16;
        const unsigned char* scales = from.template field<Scales>();
        unsigned low = scales[s % 8] >> (s / 8 * 4) & 15, high = scales[8 + s % 4] >> (s / 4 * 2) & 3;
        return {__fmul_rn(load_half<From::template align<D>()>(from.template field<D>()), float_of_code<32>(low | high << 4))};
    }
};

struct Q4_K : FieldBlocks<Q4_K> {
    static constexpr int LEN = 256, BYTES = 144, ZERO = 0;
    using Codes = Field<16, 128>; using Scales = Field<4, 12>; using DM = Field<0, 4>;
    using Fields = FieldList<Codes, Scales, DM>;

    template <class From>
    static __device__ __forceinline__ void read_codes(const From& from, int j, unsigned (&codes)[2]) {
        load_row_nibbles<alignment_of(From::template align<Codes>() | 8)>(from.template field<Codes>(), j, codes);
    }

    template <class From>
    static __device__ __forceinline__ Affine read_scale(const From& from, int j) {
        return load_scale_min<Q4_K>(from, j);
    }
};

struct Q5_K : FieldBlocks<Q5_K> {
    static constexpr int LEN = 256, BYTES = 176, ZERO = 0;
    using Codes = Field<48, 128>; using Fifth = Field<16, 32>; using Scales = Field<4, 12>; using DM = Field<0, 4>;
    using Fields = FieldList<Codes, Fifth, Scales, DM>;

    template <class From>
    static __device__ __forceinline__ void read_codes(const From& from, int j, unsigned (&codes)[2]) {
        load_row_nibbles<alignment_of(From::template align<Codes>() | 8)>(from.template field<Codes>(), j, codes);
        add_row_bits<alignment_of(From::template align<Fifth>() | 8), 4>(from.template field<Fifth>(), j, codes);
    }

    template <class From>
    static __device__ __forceinline__ Affine read_scale(const From& from, int j) {
        return load_scale_min<Q5_K>(from, j);
    }
};

struct Q6_K : FieldBlocks<Q6_K> {
    static constexpr int LEN = 256, BYTES = 210, ZERO = 32;
    using Low = Field<0, 128>; using High = Field<128, 64>; using Scales = Field<192, 16>; using D = Field<208, 2>;
    using Fields = FieldList<Low, High, Scales, D>;

    template <class From>
    static __device__ __forceinline__ void read_codes(const From& from, int j, unsigned (&codes)[2]) {
        // Rows that are two apart share the bytes of their low four bits; the high two bits have the layout of Q2_K.
        unsigned low[2];
        load_words<alignment_of(From::template align<Low>() | 8)>(from.template field<Low>() + 64 * (j / 128) + j % 64, low);
        int shift = (j & 64) / 16;
        load_bit_pairs<alignment_of(From::template align<High>() | 8)>(from.template field<High>(), j, codes);
        codes[0] = codes[0] << 4 | (low[0] >> shift & 0x0f0f0f0f);
        codes[1] = codes[1] << 4 | (low[1] >> shift & 0x0f0f0f0f);
    }

    template <class From>
    static __device__ __forceinline__ Symmetric read_scale(const From& from, int j) {
        unsigned scale = from.template field<Scales>()[j / 16] ^ 128;
        return {__fmul_rn(load_half<From::template align<D>()>(from.template field<D>()), float_of_code<128>(scale))};
    }
};

#ifdef MAKES_BLOCKS
// ---- quantisers; the fits are in kquant_fit.cuh

template <class Get>
__device__ __forceinline__ void pack(Q2_K, const Get& x, unsigned char* block) {
    AffineFit<16, 3, 15> fit;
    fit.fit(x);
    // Sixteen bytes hold the codes of four sub-blocks that are two apart.
#pragma unroll 1
    for (int group = 0; group < 4; group++) {
        unsigned pairs[4] = {};
#pragma unroll 1
        for (int c = 0; c < 4; c++) {
            int s = group / 2 * 8 + c * 2 + group % 2, scale, min, codes[16];
            float values[16];
            load_sub_block(x, s, values);
            fit.choose(values, s, scale, min, codes);
            block[s] = scale | min << 4;
            unsigned words[4];
            pack_bytes(codes, words);
#pragma unroll
            for (int w = 0; w < 4; w++) pairs[w] |= words[w] << (2 * c);
        }
        store_words<2>(block + 16 + 16 * group, pairs);
    }
    store_half(block + 80, fit.d), store_half(block + 82, fit.dmin);
}

// Quantises Q4_K, or Q5_K with FIFTH, which stores fifth bits before the nibbles.
template <bool FIFTH, class Get>
__device__ __forceinline__ void pack_rows(const Get& x, unsigned char* block) {
    AffineFit<32, FIFTH ? 31 : 15, 63> fit;
    fit.fit(x);
    unsigned low[8] = {}, fifth[8] = {};
    unsigned long long scales = 0, mins = 0;
#pragma unroll 1
    for (int s = 0; s < 8; s++) {
        int scale, min, codes[32];
        float values[32];
        load_sub_block(x, s, values);
        fit.choose(values, s, scale, min, codes);
        scales |= (unsigned long long)scale << (8 * s), mins |= (unsigned long long)min << (8 * s);
        unsigned words[8];
        pack_bytes(codes, words);
#pragma unroll
        for (int w = 0; w < 8; w++) {
            fifth[w] |= (words[w] >> 4 & 0x01010101) << s;
            // Low nibbles belong to even rows; combine them with the high nibbles of the next row before storing.
            words[w] &= 0x0f0f0f0f;
            low[w] = s % 2 == 0 ? words[w] : low[w] | words[w] << 4;
        }
        if (s % 2 == 1) store_words<2>(block + (FIFTH ? 48 : 16) + 16 * (s - 1), low);
    }
    if constexpr (FIFTH) store_words<2>(block + 16, fifth);
    store_half(block, fit.d), store_half(block + 2, fit.dmin);
    // Six bits each: sub-blocks 4 to 7 are stored in nibbles and in the two upper bits that sub-blocks 0 to 3 leave free.
    unsigned upper = scales >> 32, upper_min = mins >> 32;
    unsigned packed[3] = {(unsigned)scales | (upper & 0x30303030) << 2, (unsigned)mins | (upper_min & 0x30303030) << 2,
                          (upper & 0x0f0f0f0f) | (upper_min & 0x0f0f0f0f) << 4};
    store_words<2>(block + 4, packed);
}

template <class Get>
__device__ __forceinline__ void pack(Q4_K, const Get& x, unsigned char* block) {
    pack_rows<false>(x, block);
}

template <class Get>
__device__ __forceinline__ void pack(Q5_K, const Get& x, unsigned char* block) {
    pack_rows<true>(x, block);
}

template <class Get>
__device__ __forceinline__ void pack(Q3_K, const Get& x, unsigned char* block) {
    SymmetricFit<4, 32> fit;
    fit.fit(x);
    unsigned long long low_scales = 0;
    unsigned high_scales = 0;
#pragma unroll 1
    for (int odd = 0; odd < 2; odd++) {
        unsigned third[4] = {}, pairs[4] = {};
        // Sub-blocks with equal s % 2 share the bytes of the third bits; groups of four of them share the bytes of the bit
        // pairs.
#pragma unroll 1
        for (int row = 0; row < 8; row++) {
            int s = 2 * row + odd, codes[16];
            float values[16];
            load_sub_block(x, s, values);
            unsigned scale = fit.choose(values, s, codes) + 32;
            low_scales |= (unsigned long long)(scale & 15) << (8 * (s % 8) + 4 * (s / 8));
            high_scales |= (scale >> 4) << (8 * (s % 4) + 2 * (s / 4));
            unsigned words[4];
            pack_bytes(codes, words);
#pragma unroll
            for (int w = 0; w < 4; w++) {
                third[w] |= (words[w] >> 2 & 0x01010101) << row;
                pairs[w] = (row % 4 == 0 ? 0 : pairs[w]) | (words[w] & 0x03030303) << (row % 4 * 2);
            }
            if (row % 4 == 3) store_words<2>(block + 32 + 32 * (row / 4) + 16 * odd, pairs);
        }
        store_words<2>(block + 16 * odd, third);
    }
    unsigned packed[3] = {(unsigned)low_scales, (unsigned)(low_scales >> 32), high_scales};
    store_words<2>(block + 96, packed);
    store_half(block + 108, fit.d);
}

template <class Get>
__device__ __forceinline__ void pack(Q6_K, const Get& x, unsigned char* block) {
    SymmetricFit<32, 128> fit;
    fit.fit(x);
    // Sixteen bytes of high bits hold four sub-blocks that are two apart; sub-blocks that are four apart share nibbles.
#pragma unroll 1
    for (int group = 0; group < 4; group++) {
        unsigned high[4] = {}, low[4] = {};
#pragma unroll 1
        for (int i = 0; i < 4; i++) {
            int c = i / 2 + i % 2 * 2, s = group / 2 * 8 + c * 2 + group % 2, codes[16];
            float values[16];
            load_sub_block(x, s, values);
            block[192 + s] = fit.choose(values, s, codes);
            unsigned words[4];
            pack_bytes(codes, words);
#pragma unroll
            for (int w = 0; w < 4; w++) {
                high[w] |= (words[w] >> 4 & 0x03030303) << (2 * c);
                words[w] &= 0x0f0f0f0f;
                low[w] = c < 2 ? words[w] : low[w] | words[w] << 4;
            }
            if (c >= 2) store_words<2>(block + 64 * (group / 2) + 32 * (c & 1) + 16 * (group % 2), low);
        }
        store_words<2>(block + 128 + 16 * group, high);
    }
    store_half(block + 208, fit.d);
}
#endif

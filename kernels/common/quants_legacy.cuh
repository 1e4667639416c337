// Blocks of 32 elements: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4. Included by quants.cuh, which documents the members.
#pragma once

// Loads the nibbles of elements j to j + 7 from 16 bytes, which hold the low nibbles first.
template <int ALIGN>
__device__ __forceinline__ void load_nibbles(const unsigned char* bytes, int j, unsigned (&codes)[2]) {
    load_words<ALIGN>(bytes + (j & 8), codes);
    int shift = (j & 16) / 4;
    codes[0] = codes[0] >> shift & 0x0f0f0f0f;
    codes[1] = codes[1] >> shift & 0x0f0f0f0f;
}

// Adds fifth bits to eight codes: bit i of `bits` to code i.
__device__ __forceinline__ void add_fifth_bits(unsigned bits, unsigned (&codes)[2]) {
    // The product places copies of the four bits seven bits apart: bit i of copy i lands at bit 8 i + 4, and no two bits
    // overlap.
    codes[0] |= (bits & 15) * 0x02040810 & 0x10101010;
    codes[1] |= (bits >> 4) * 0x02040810 & 0x10101010;
}

// As load_nibbles, but replaces each nibble by its byte of a table of 16 bytes, which is given as four words.
template <int ALIGN, unsigned T0, unsigned T1, unsigned T2, unsigned T3>
__device__ __forceinline__ void load_by_table(const unsigned char* bytes, int j, unsigned (&codes)[2]) {
    unsigned words[2];
    load_words<ALIGN>(bytes + (j & 8), words);
    int shift = (j & 16) / 4;
    // Nibble 2 i is code i; nibble 2 i + 1 is code i + 4.
    unsigned nibbles = (words[0] >> shift & 0x0f0f0f0f) | (words[1] << (4 - shift) & 0xf0f0f0f0);
    // A byte permutation looks up four nibbles in eight bytes. The fourth bit then selects one of two such results.
    unsigned low = nibbles & 0x77777777, upper = (nibbles >> 1 & 0x44444444) | 0x32103210;
    unsigned first = __byte_perm(__byte_perm(T0, T1, low), __byte_perm(T2, T3, low), upper);
    unsigned second = __byte_perm(__byte_perm(T0, T1, low >> 16), __byte_perm(T2, T3, low >> 16), upper >> 16);
    codes[0] = __byte_perm(first, second, 0x6420);
    codes[1] = __byte_perm(first, second, 0x7531);
}

struct Q4_0 : FieldBlocks<Q4_0> {
    static constexpr int LEN = 32, BYTES = 18, ZERO = 8;
    using Codes = Field<2, 16>; using D = Field<0, 2>;
    using Fields = FieldList<Codes, D>;

    template <class From>
    static __device__ __forceinline__ void read_codes(const From& from, int j, unsigned (&codes)[2]) {
        load_nibbles<From::template align<Codes>()>(from.template field<Codes>(), j, codes);
    }

    template <class From>
    static __device__ __forceinline__ Symmetric read_scale(const From& from, int) {
        return {load_half<From::template align<D>()>(from.template field<D>())};
    }
};

struct Q4_1 : FieldBlocks<Q4_1> {
    static constexpr int LEN = 32, BYTES = 20, ZERO = 0;
    using Codes = Field<4, 16>; using DM = Field<0, 4>;
    using Fields = FieldList<Codes, DM>;

    template <class From>
    static __device__ __forceinline__ void read_codes(const From& from, int j, unsigned (&codes)[2]) {
        load_nibbles<From::template align<Codes>()>(from.template field<Codes>(), j, codes);
    }

    template <class From>
    static __device__ __forceinline__ Affine read_scale(const From& from, int) {
        Affine scale;
        load_halves<From::template align<DM>()>(from.template field<DM>(), scale.d, scale.m);
        return scale;
    }
};

struct Q5_0 : FieldBlocks<Q5_0> {
    static constexpr int LEN = 32, BYTES = 22, ZERO = 16;
    using Codes = Field<6, 16>; using Fifth = Field<2, 4>; using D = Field<0, 2>;
    using Fields = FieldList<Codes, Fifth, D>;

    template <class From>
    static __device__ __forceinline__ void read_codes(const From& from, int j, unsigned (&codes)[2]) {
        load_nibbles<From::template align<Codes>()>(from.template field<Codes>(), j, codes);
        add_fifth_bits(from.template field<Fifth>()[j / 8], codes);
    }

    template <class From>
    static __device__ __forceinline__ Symmetric read_scale(const From& from, int) {
        return {load_half<From::template align<D>()>(from.template field<D>())};
    }
};

struct Q5_1 : FieldBlocks<Q5_1> {
    static constexpr int LEN = 32, BYTES = 24, ZERO = 0;
    using Codes = Field<8, 16>; using Fifth = Field<4, 4>; using DM = Field<0, 4>;
    using Fields = FieldList<Codes, Fifth, DM>;

    template <class From>
    static __device__ __forceinline__ void read_codes(const From& from, int j, unsigned (&codes)[2]) {
        load_nibbles<From::template align<Codes>()>(from.template field<Codes>(), j, codes);
        add_fifth_bits(from.template field<Fifth>()[j / 8], codes);
    }

    template <class From>
    static __device__ __forceinline__ Affine read_scale(const From& from, int) {
        Affine scale;
        load_halves<From::template align<DM>()>(from.template field<DM>(), scale.d, scale.m);
        return scale;
    }
};

struct Q8_0 : FieldBlocks<Q8_0> {
    static constexpr int LEN = 32, BYTES = 34, ZERO = 128;
    using Codes = Field<2, 32>; using D = Field<0, 2>;
    using Fields = FieldList<Codes, D>;

    template <class From>
    static __device__ __forceinline__ void read_codes(const From& from, int j, unsigned (&codes)[2]) {
        load_words<alignment_of(From::template align<Codes>() | 8)>(from.template field<Codes>() + j, codes);
        codes[0] ^= 0x80808080, codes[1] ^= 0x80808080;
    }

    template <class From>
    static __device__ __forceinline__ Symmetric read_scale(const From& from, int) {
        return {load_half<From::template align<D>()>(from.template field<D>())};
    }
};

// The codes are the values of the format's table plus 128.
struct IQ4_NL : FieldBlocks<IQ4_NL> {
    static constexpr int LEN = 32, BYTES = 18, ZERO = 128;
    using Codes = Field<2, 16>; using D = Field<0, 2>;
    using Fields = FieldList<Codes, D>;

    template <class From>
    static __device__ __forceinline__ void read_codes(const From& from, int j, unsigned (&codes)[2]) {
        // -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113
        constexpr int ALIGN = From::template align<Codes>();
        load_by_table<ALIGN, 0x3f2d1801, 0x766a5d4f, 0xa6998d81, 0xf1d9c5b5>(from.template field<Codes>(), j, codes);
    }

    template <class From>
    static __device__ __forceinline__ Symmetric read_scale(const From& from, int) {
        return {load_half<From::template align<D>()>(from.template field<D>())};
    }
};

// The codes are the doubled values of E2M1 plus 128.
struct MXFP4 : FieldBlocks<MXFP4> {
    static constexpr int LEN = 32, BYTES = 17, ZERO = 128;
    using Codes = Field<1, 16>; using Exponent = Field<0, 1>;
    using Fields = FieldList<Codes, Exponent>;

    // Value of one unit of the codes: 2^(e - 128), which is subnormal for `e` below 2.
    static __device__ __forceinline__ float unit(unsigned e) {
        return __uint_as_float(e < 2 ? 0x200000 << e : (e - 1) << 23);
    }

    template <class From>
    static __device__ __forceinline__ void read_codes(const From& from, int j, unsigned (&codes)[2]) {
        // 0 1 2 3, 4 6 8 12, then the same values negated
        constexpr int ALIGN = From::template align<Codes>();
        load_by_table<ALIGN, 0x83828180, 0x8c888684, 0x7d7e7f80, 0x74787a7c>(from.template field<Codes>(), j, codes);
    }

    template <class From>
    static __device__ __forceinline__ Symmetric read_scale(const From& from, int) {
        return {unit(from.template field<Exponent>()[0])};
    }
};

#ifdef MAKES_BLOCKS
// ---- quantisers, with the formulas of src/tensor/quant. Codes are computed with the scale before its rounding to f16.
// Conversions to integers saturate, so that the codes stay in range even if the inverse of the scale overflows.

// The element of largest magnitude with its sign; the first of equal ones.
template <class Get>
__device__ __forceinline__ float peak_of(const Get& x) {
    float peak = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        float value = x(i);
        if (fabsf(value) > fabsf(peak)) peak = value;
    }
    return peak;
}

// Packs 32 codes: byte j holds the nibbles of codes j and j + 16; bit j of `fifth` is the fifth bit of code j.
template <class Code>
__device__ __forceinline__ void pack_codes(const Code& code, unsigned (&nibbles)[4], unsigned& fifth) {
    nibbles[0] = nibbles[1] = nibbles[2] = nibbles[3] = fifth = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        unsigned q = code(i);
        nibbles[i % 16 / 4] |= (q & 15) << (i % 4 * 8 + i / 16 * 4);
        fifth |= (q >> 4 & 1) << i;
    }
}

// Codes of Q4_0 and Q5_0, in which code ZERO is the value 0: the peak is mapped to code 0. Returns the scale.
template <int ZERO, class Get>
__device__ __forceinline__ float symmetric_block(const Get& x, unsigned (&nibbles)[4], unsigned& fifth) {
    float d = __fdiv_rn(peak_of(x), (float)-ZERO), id = inverse(d);
    pack_codes([&](int i) { return min(__float2uint_rz(mul_add(x(i), id, ZERO + 0.5f)), 2u * ZERO - 1); }, nibbles, fifth);
    return d;
}

// Codes of Q4_1 and Q5_1: the minimum is mapped to code 0, the maximum to TOP.
template <int TOP, class Get>
__device__ __forceinline__ void affine_block(const Get& x, float& d, float& least, unsigned (&nibbles)[4], unsigned& fifth) {
    float most = -3.40282347e38f, low = 3.40282347e38f;
    // Of zeros of both signs, the last one must become the minimum, as in the CPU's fold with the minimum instruction of x86.
#pragma unroll
    for (int i = 0; i < 32; i++) low = low < x(i) ? low : x(i), most = fmaxf(x(i), most);
    d = __fdiv_rn(__fsub_rn(most, low), (float)TOP), least = low;
    float id = inverse(d);
    pack_codes([&](int i) { return min(__float2uint_rz(mul_add(__fsub_rn(x(i), low), id, 0.5f)), (unsigned)TOP); }, nibbles, fifth);
}

template <class Get>
__device__ __forceinline__ void pack(Q4_0, const Get& x, unsigned char* block) {
    unsigned nibbles[4], fifth;
    store_half(block, half_of_float(symmetric_block<8>(x, nibbles, fifth)));
    store_words<2>(block + 2, nibbles);
}

template <class Get>
__device__ __forceinline__ void pack(Q4_1, const Get& x, unsigned char* block) {
    unsigned nibbles[4], fifth;
    float d, least;
    affine_block<15>(x, d, least, nibbles, fifth);
    store_half(block, half_of_float(d)), store_half(block + 2, half_of_float(least));
    store_words<2>(block + 4, nibbles);
}

template <class Get>
__device__ __forceinline__ void pack(Q5_0, const Get& x, unsigned char* block) {
    unsigned nibbles[4], fifth[1];
    store_half(block, half_of_float(symmetric_block<16>(x, nibbles, fifth[0])));
    store_words<2>(block + 2, fifth), store_words<2>(block + 6, nibbles);
}

template <class Get>
__device__ __forceinline__ void pack(Q5_1, const Get& x, unsigned char* block) {
    unsigned nibbles[4], fifth[1];
    float d, least;
    affine_block<31>(x, d, least, nibbles, fifth[0]);
    store_half(block, half_of_float(d)), store_half(block + 2, half_of_float(least));
    store_words<2>(block + 4, fifth), store_words<2>(block + 8, nibbles);
}

// Nearest integer, clamped to -127 to 127; halves are rounded away from zero; 0 for NaN.
__device__ __forceinline__ int round_code(float x) {
    // The largest float below 0.5: with 0.5 itself, the sum could round up to an integer that is not nearest to x.
    int whole = __float2int_rz(__fadd_rn(x, copysignf(0.49999997f, x)));
    return max(-127, min(127, whole));
}

template <class Get>
__device__ __forceinline__ void pack(Q8_0, const Get& x, unsigned char* block) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; i++) most = fmaxf(most, fabsf(x(i)));
    float d = __fdiv_rn(most, 127.0f), id = inverse(d);
    unsigned words[8];
#pragma unroll
    for (int w = 0; w < 8; w++) {
        words[w] = 0;
#pragma unroll
        for (int b = 0; b < 4; b++) words[w] |= (round_code(__fmul_rn(x(4 * w + b), id)) & 255) << (8 * b);
    }
    store_half(block, half_of_float(d));
    store_words<2>(block + 2, words);
}

template <class Get>
__device__ __forceinline__ void pack(MXFP4, const Get& x, unsigned char* block) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; i++) most = fmaxf(most, fabsf(x(i)));
    // The exponent field is floor(log2) + 127; values below the smallest scale use the smallest scale.
    unsigned field = __float_as_uint(most) >> 23, e = field > 2 ? field - 2 : 0;
    // Thresholds between codes: halfway between the values of the table. Products with a power of two are exact.
    const float unit = MXFP4::unit(e), halfway[7] = {0.5f, 1.5f, 2.5f, 3.5f, 5.0f, 7.0f, 10.0f};
    auto code = [&](int i) {
        float value = x(i);
        unsigned magnitude = 0;
#pragma unroll
        for (int m = 0; m < 7; m++) magnitude += fabsf(value) > __fmul_rn(halfway[m], unit);
        return magnitude > 0 && value < 0.0f ? magnitude | 8 : magnitude;
    };
    unsigned nibbles[4], fifth;
    pack_codes(code, nibbles, fifth);
    block[0] = e;
    store_words<1>(block + 1, nibbles);
}

template <class Get>
__device__ __forceinline__ void pack(IQ4_NL, const Get& x, unsigned char* block) {
    const float table[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    float peak = peak_of(x);
    // The squares of smaller magnitudes, which are the weights of the fit, would underflow.
    if (fabsf(peak) < 1e-15f) {
        unsigned zeros[4] = {0x88888888, 0x88888888, 0x88888888, 0x88888888};
        store_half(block, 0), store_words<2>(block + 2, zeros);
        return;
    }
    float id = __fdiv_rn(1.0f, __fdiv_rn(peak, -127.0f));
    // Weighted least-squares fit of the scale to the codes; the weights are the squares of the elements.
    float product = 0.0f, square = 0.0f;
    auto code = [&](int i) {
        float value = x(i), scaled = __fmul_rn(value, id), t = table[0];
        unsigned q = 0;
#pragma unroll
        for (int m = 1; m < 16; m++) {
            bool above = scaled >= (table[m - 1] + table[m]) * 0.5f;
            q += above, t = above ? table[m] : t;
        }
        float weighted = __fmul_rn(__fmul_rn(value, value), t);
        product = mul_add(weighted, value, product), square = mul_add(weighted, t, square);
        return q;
    };
    unsigned nibbles[4], fifth;
    pack_codes(code, nibbles, fifth);
    store_half(block, half_of_float(__fmul_rn(product, inverse(square))));
    store_words<2>(block + 2, nibbles);
}
#endif

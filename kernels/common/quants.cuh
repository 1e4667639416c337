// Block types: how a row of blocks is read, and how a block is made. The layouts are those of src/tensor/blocks.rs, and the values are bit for bit
// those of the CPU's dequantisers (src/tensor/quant). For load8 and load1 see types.cuh.
//
// The types themselves are in quants_legacy.cuh (blocks of 32) and quants_k.cuh (blocks of 256). Each says
//
//     codes8<ALIGN>(block, j, codes)   the codes of elements j to j + 7 of the block, a byte each; j is a multiple of 8
//     ZERO                             the code that stands for 0
//     scale8<ALIGN>(block, j)          Symmetric or Affine: what all of these eight are scaled by
//
// where the block lies at a multiple of ALIGN bytes. Products of integers can be made of the codes as they are. Beside it stands, for
// files that define MAKES_BLOCKS before their first #include,
//
//     pack(T, x, block)                one thread makes one block, byte for byte what the CPU's quantiser makes; x(i) is element
//                                      i of the block's T::LEN, in f32; the block lies at an even address, that of MXFP4 at any
//
// `x` is called several times for an element; the K types read it some dozens of times, one sub-block at a time. Values that are
// not finite, or too large for the type's scale, give unspecified codes. Sums and products that the CPU rounds one by one are
// written as intrinsics that no compiler option contracts.
#pragma once
#include "types.cuh"

// A code below 2^23, less ZERO, in f32. An exact sum is cheaper than a conversion, of which a GPU does few at a time.
template <int ZERO = 0>
__device__ __forceinline__ float float_of_code(unsigned code) {
    return __fadd_rn(__uint_as_float(0x4b000000 | code), -(8388608.0f + ZERO));
}

// As float_of_code, of byte `i` of a word.
template <int ZERO>
__device__ __forceinline__ float float_of_byte(unsigned word, int i) {
    return __fadd_rn(__uint_as_float(__byte_perm(word, 0x4b000000, 0x7540 | i)), -(8388608.0f + ZERO));
}

// d * q
struct Symmetric {
    float d;

    __device__ __forceinline__ float of(float q) const { return __fmul_rn(d, q); }
};

// d * q + m. The product is exact in every type (a half times at most eleven bits), so that one rounding is as good as two.
struct Affine {
    float d, m;

    __device__ __forceinline__ float of(float q) const { return __fmaf_rn(d, q, m); }
};

// Two halves at a multiple of ALIGN bytes.
template <int ALIGN>
__device__ __forceinline__ void load_halves(const unsigned char* from, float& first, float& second) {
    unsigned words[1];
    load_words<ALIGN>(from, words);
    unsigned short halves[2];
    halves_of_word(words[0], halves[0], halves[1]);
    first = float_of_half(halves[0]), second = float_of_half(halves[1]);
}

// A half at a multiple of ALIGN bytes.
template <int ALIGN>
__device__ __forceinline__ float load_half(const unsigned char* from) {
    if constexpr (ALIGN >= 2) return float_of_half(*(const unsigned short*)from);
    else return float_of_half(from[0] | from[1] << 8);
}

// What all block types share, by T's own members.
template <class T>
struct Blocks {
    // Where blocks of a row lie, whose start is a multiple of 16 bytes or not.
    template <bool ALIGNED>
    static __device__ constexpr int align() {
        return ALIGNED || alignment_of(T::BYTES) < 2 ? alignment_of(T::BYTES) : 2;
    }

    // The block of element k. A row has less than 2^32 blocks: that saves half of a product of 64 bits.
    static __device__ __forceinline__ const unsigned char* block_of(const unsigned char* row, long long k) {
        return row + (unsigned long long)(unsigned)((unsigned long long)k / T::LEN) * T::BYTES;
    }

    // Elements j to j + 7 of one block.
    template <int ALIGN>
    static __device__ __forceinline__ void decode8(const unsigned char* block, int j, float (&out)[8]) {
        unsigned codes[2];
        T::template codes8<ALIGN>(block, j, codes);
        auto scale = T::template scale8<ALIGN>(block, j);
#pragma unroll
        for (int i = 0; i < 8; i++) out[i] = scale.of(float_of_byte<T::ZERO>(codes[i / 4], i % 4));
    }

    template <bool ALIGNED = false>
    static __device__ __forceinline__ void load8(const unsigned char* row, long long k, float (&out)[8]) {
        decode8<align<ALIGNED>()>(block_of(row, k), (unsigned)k % T::LEN, out);
    }

    // Reads as much as load8: for elements that stand alone, not for loops over neighbours.
    static __device__ __forceinline__ float load1(const unsigned char* row, long long k) {
        const unsigned char* block = block_of(row, k);
        unsigned j = (unsigned)k % T::LEN, codes[2];
        T::template codes8<align<false>()>(block, j & ~7, codes);
        unsigned code = (j & 4 ? codes[1] : codes[0]) >> (8 * (j & 3)) & 255;
        return T::template scale8<align<false>()>(block, j & ~7).of(float_of_code<T::ZERO>(code));
    }
};

#ifdef MAKES_BLOCKS
// ---- what makers of blocks share

__device__ __forceinline__ float inverse(float d) { return d == 0.0f ? 0.0f : __fdiv_rn(1.0f, d); }

// x * a + b with both roundings.
__device__ __forceinline__ float mul_add(float x, float a, float b) { return __fadd_rn(__fmul_rn(x, a), b); }

__device__ __forceinline__ void store_half(unsigned char* to, unsigned short bits) { *(unsigned short*)to = bits; }

#include "kquant_fit.cuh"
#endif

#include "quants_k.cuh"
#include "quants_legacy.cuh"

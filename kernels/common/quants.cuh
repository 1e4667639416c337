// Block types (quantised formats): dequantisation of rows of blocks, and quantisation of blocks. The layouts are those of
// src/tensor/blocks.rs. The values are bit for bit those of the CPU's dequantisers (src/tensor/quant). load8 and load1 of
// Blocks are the interface that types.cuh describes.
//
// The types are in quants_legacy.cuh (blocks of 32) and quants_k.cuh (the K types). quants_low_bit.cuh and quants_i.cuh have the
// types without products on CUDA; a file that decodes them includes them. Each type defines
//
//     codes8<ALIGN>(block, j, codes)   the codes of elements j to j + 7 of the block, one byte each; j is a multiple of 8
//     ZERO                             the code of the value 0
//     scale8<ALIGN>(block, j)          the scale of these eight elements: Symmetric or Affine
//
// where the block's address is a multiple of ALIGN bytes. Integer products can use the codes directly. For files that define
// MAKES_BLOCKS before their first #include, each type with the capability `cuda` also defines
//
//     pack(T, x, block)                one thread quantises one block, byte for byte as the CPU's quantiser; x(i) is
//                                      element i of the T::LEN elements, in f32; the block's address is even (MXFP4: any)
//
// `x` is called several times per element; the K types call it dozens of times, one sub-block at a time. Values that are not
// finite, or too large for the type's scale, give unspecified codes. Sums and products that the CPU rounds separately are
// written as intrinsics, which the compiler does not contract to fused operations.
#pragma once
#include "types.cuh"

// Converts a code below 2^23, minus ZERO, to f32. Setting the bits of 2^23 + code and subtracting is exact, and faster than a
// conversion instruction, whose throughput is low on GPUs.
template <int ZERO = 0>
__device__ __forceinline__ float float_of_code(unsigned code) {
    return __fadd_rn(__uint_as_float(0x4b000000 | code), -(8388608.0f + ZERO));
}

// As float_of_code, for byte `i` of a word. The selector 0x7540 | i puts that byte below bytes 0, 1 and 3 of
// 0x4b000000.
template <int ZERO>
__device__ __forceinline__ float float_of_byte(unsigned word, int i) {
    return __fadd_rn(__uint_as_float(__byte_perm(word, 0x4b000000, 0x7540 | i)), -(8388608.0f + ZERO));
}

// d * q
struct Symmetric {
    float d;

    __device__ __forceinline__ float of(float q) const { return __fmul_rn(d, q); }
};

// d * q + m. The product is exact in every type: d is an f16 (11 significant bits) times an integer, and this integer and q
// have at most 11 bits together; f32 holds 24. So the fused operation rounds as the CPU does.
struct Affine {
    float d, m;

    __device__ __forceinline__ float of(float q) const { return __fmaf_rn(d, q, m); }
};

// Loads two halves from a multiple of ALIGN bytes.
template <int ALIGN>
__device__ __forceinline__ void load_halves(const unsigned char* from, float& first, float& second) {
    unsigned words[1];
    load_words<ALIGN>(from, words);
    unsigned short halves[2];
    halves_of_word(words[0], halves[0], halves[1]);
    first = float_of_half(halves[0]), second = float_of_half(halves[1]);
}

// Loads a half from a multiple of ALIGN bytes.
template <int ALIGN>
__device__ __forceinline__ float load_half(const unsigned char* from) {
    if constexpr (ALIGN >= 2) return float_of_half(*(const unsigned short*)from);
    else return float_of_half(from[0] | from[1] << 8);
}

// Base class of each block type T: derives load8 and load1 from T's codes8, scale8 and ZERO.
template <class T>
struct Blocks {
    // Alignment of the blocks of a row. If the row starts at a multiple of 16 bytes (ALIGNED), it is that of the block size,
    // else at most 2.
    template <bool ALIGNED>
    static __device__ constexpr int align() {
        return ALIGNED || alignment_of(T::BYTES) < 2 ? alignment_of(T::BYTES) : 2;
    }

    // The block of element k. A row has fewer than 2^32 blocks, so that a 32 x 32 bit product suffices.
    static __device__ __forceinline__ const unsigned char* block_of(const unsigned char* row, long long k) {
        return row + (unsigned long long)(unsigned)((unsigned long long)k / T::LEN) * T::BYTES;
    }

    // Dequantises elements j to j + 7 of one block.
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

    // Reads as many bytes as load8: for isolated elements, not for loops over neighbours.
    static __device__ __forceinline__ float load1(const unsigned char* row, long long k) {
        const unsigned char* block = block_of(row, k);
        unsigned j = (unsigned)k % T::LEN, codes[2];
        T::template codes8<align<false>()>(block, j & ~7, codes);
        unsigned code = (j & 4 ? codes[1] : codes[0]) >> (8 * (j & 3)) & 255;
        return T::template scale8<align<false>()>(block, j & ~7).of(float_of_code<T::ZERO>(code));
    }
};

#ifdef MAKES_BLOCKS
// ---- shared by the quantisers

// 1 / d, or 0 if d is 0.
__device__ __forceinline__ float inverse(float d) { return d == 0.0f ? 0.0f : __fdiv_rn(1.0f, d); }

// x * a + b, with the product rounded separately.
__device__ __forceinline__ float mul_add(float x, float a, float b) { return __fadd_rn(__fmul_rn(x, a), b); }

__device__ __forceinline__ void store_half(unsigned char* to, unsigned short bits) { *(unsigned short*)to = bits; }

#include "kquant_fit.cuh"
#endif

#include "quants_k.cuh"
#include "quants_legacy.cuh"

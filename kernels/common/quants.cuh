// Block types (quantised formats): dequantisation of rows of blocks, and quantisation of blocks. The layouts are those of
// src/tensor/blocks.rs. The values are bit for bit those of the CPU's dequantisers (src/tensor/quant). load8 and load1 of
// Blocks are the interface that types.cuh describes.
//
// The types are in quants_legacy.cuh (blocks of 32) and quants_k.cuh (the K types). quants_low_bit.cuh and quants_i.cuh have the
// types that CUDA only reads; a file that decodes them includes them. Each type defines
//
//     codes8<ALIGN>(block, j, codes)   the codes of elements j to j + 7 of the block, one byte each; j is a multiple of 8
//     ZERO                             the code of the value 0
//     scale8<ALIGN>(block, j)          the scale of these eight elements: Symmetric or Affine
//
// where the block's address is a multiple of ALIGN bytes. Integer products can use the codes directly. The types with the
// capability `cuda` define instead
//
//     Fields                           the fields of the block, in packed order (see below)
//     read_codes(from, j, codes)       as codes8, and
//     read_scale(from, j)              as scale8, from a block in either layout: RowBlock or PackedBlock
//
// and, for files that define MAKES_BLOCKS before their first #include,
//
//     pack(T, x, block)                one thread quantises one block, byte for byte as the CPU's quantiser; x(i) is
//                                      element i of the T::LEN elements, in f32; the block's address is even (MXFP4: any)
//
// Packed layout of weights: groups of consecutive rows, whose bytes are permuted in place so that each field is a plane of its
// own. With B blocks in the group, numbered through its rows, field f of block i is at byte B * (bytes of the fields before f) +
// i * (bytes of f) of the group. The fields are ordered by decreasing alignment, so that codes can be read by 16-byte loads. A
// group has the smallest power of two of rows whose bytes are a multiple of 16.
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

// Loads an unsigned number of two bytes from a multiple of ALIGN bytes.
template <int ALIGN>
__device__ __forceinline__ unsigned load_short(const unsigned char* from) {
    if constexpr (ALIGN >= 2) return *(const unsigned short*)from;
    else return from[0] | from[1] << 8;
}

// Loads a half from a multiple of ALIGN bytes.
template <int ALIGN>
__device__ __forceinline__ float load_half(const unsigned char* from) {
    return float_of_half(load_short<ALIGN>(from));
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

// ---- fields of blocks, in both layouts

// A field: its offset in ggml's block, and its bytes.
template <int AT, int SIZE>
struct Field {
    enum : int { OFFSET = AT, BYTES = SIZE }; // static members would be variables of the PTX
};

template <class T>
struct PackedPointers;

template <class... F>
struct FieldList {
    enum : int { COUNT = sizeof...(F) };

    template <class G>
    static __device__ constexpr int index() {
        int index = 0;
        bool found = false;
        ((found = found || F::OFFSET == G::OFFSET, index += found ? 0 : 1), ...);
        return index;
    }

    // Bytes of field number `f`.
    static __device__ constexpr int bytes(int f) {
        int index = 0, result = 0;
        ((result = index++ == f ? F::BYTES : result), ...);
        return result;
    }

    // Bytes of the fields before field number `f`, per block.
    static __device__ constexpr int before(int f) {
        int index = 0, sum = 0;
        ((sum += index++ < f ? F::BYTES : 0), ...);
        return sum;
    }

    // The addresses of all fields of a block of the type T.
    template <template <class> class Block, class T>
    static __device__ __forceinline__ PackedPointers<T> pointers(const Block<T>& block) {
        return {{block.template field<F>()...}};
    }
};

// A block in ggml's layout, at a multiple of ALIGN bytes.
template <int ALIGN>
struct RowBlock {
    enum : bool { PACKED = false };
    const unsigned char* block;

    template <class F>
    __device__ __forceinline__ const unsigned char* field() const {
        return block + F::OFFSET;
    }

    // Alignment of the field in bytes.
    template <class F>
    static __device__ constexpr int align() {
        return alignment_of(ALIGN | F::OFFSET);
    }
};

// Block `index` of a group of `blocks` blocks of type T in the packed layout.
template <class T>
struct PackedBlock {
    enum : bool { PACKED = true };
    const unsigned char* group;
    unsigned blocks, index;

    template <class F>
    __device__ __forceinline__ const unsigned char* field() const {
        constexpr int BEFORE = T::Fields::before(T::Fields::template index<F>());
        return group + (unsigned long long)blocks * BEFORE + (unsigned long long)index * F::BYTES;
    }

    template <class F>
    static __device__ constexpr int align() {
        return alignment_of(F::BYTES);
    }
};

// A block in the packed layout, by the addresses of its fields.
template <class T>
struct PackedPointers {
    enum : bool { PACKED = true };
    const unsigned char* at[T::Fields::COUNT];

    template <class F>
    __device__ __forceinline__ const unsigned char* field() const {
        return at[T::Fields::template index<F>()];
    }

    template <class F>
    static __device__ constexpr int align() {
        return alignment_of(F::BYTES);
    }
};

// Binary logarithm of the rows per group of the packed layout, for rows of `row_bytes`.
__device__ __forceinline__ unsigned log2_group_rows(unsigned long long row_bytes) {
    return 5 - __ffs((unsigned)row_bytes | 16);
}

// Block `block` of row `row` of a packed matrix, whose rows have `row_bytes`.
template <class T>
__device__ __forceinline__ PackedBlock<T> packed_block(const unsigned char* matrix, unsigned long long row_bytes, unsigned row,
                                                       unsigned block) {
    const unsigned blocks = row_bytes / T::BYTES, log2 = log2_group_rows(row_bytes);
    return {matrix + (row >> log2 << log2) * row_bytes, blocks << log2, (row & ((1 << log2) - 1)) * blocks + block};
}

// Dequantises elements j to j + 7 of one block in either layout.
template <class T, class From>
__device__ __forceinline__ void decode_block(const From& from, int j, float (&out)[8]) {
    unsigned codes[2];
    T::read_codes(from, j, codes);
    auto scale = T::read_scale(from, j);
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = scale.of(float_of_byte<T::ZERO>(codes[i / 4], i % 4));
}

// Base class of the block types with fields: derives codes8 and scale8 from T's read_codes and read_scale.
template <class T>
struct FieldBlocks : Blocks<T> {
    template <int ALIGN>
    static __device__ __forceinline__ void codes8(const unsigned char* block, int j, unsigned (&codes)[2]) {
        T::read_codes(RowBlock<ALIGN>{block}, j, codes);
    }

    template <int ALIGN>
    static __device__ __forceinline__ auto scale8(const unsigned char* block, int j) {
        return T::read_scale(RowBlock<ALIGN>{block}, j);
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

// Shared by the copy and row kernels: conversion of runs of elements between plain types, moves of bytes, and 64-bit indices.
#pragma once
#include "abi.cuh"
#include "types.cuh"

// Pseudo type number: as source and destination type, it moves 16-bit elements unchanged. (TYPE_F32 on both sides does so for
// 32-bit elements.)
constexpr u32 TYPE_BITS16 = 25;

__device__ __forceinline__ u32 bytes_of(u32 type) { return type == TYPE_F32 || type == TYPE_I32 ? 4 : 2; }

// Conversions between F32, F16, BF16, I32 and TYPE_BITS16, through f32.
__device__ __forceinline__ float float_of_word(u32 word, u32 type) {
    if (type == TYPE_F16) return float_of_half(word);
    if (type == TYPE_BF16) return float_of_bf16(word);
    return type == TYPE_I32 ? __int2float_rn(word) : __uint_as_float(word);
}

// Conversion to I32 truncates towards zero and saturates; NaN gives 0.
__device__ __forceinline__ u32 word_of_float(float value, u32 type) {
    if (type == TYPE_F16) return half_of_float(value);
    if (type == TYPE_BF16) return bf16_of_float(value);
    return type == TYPE_I32 ? __float2int_rz(value) : __float_as_uint(value);
}

__device__ __forceinline__ u32 load_word(const u8 *at, u32 type) { return bytes_of(type) == 4 ? *(const u32 *)at : *(const u16 *)at; }

__device__ __forceinline__ void store_word(u8 *at, u32 type, u32 word) {
    if (bytes_of(type) == 4) *(u32 *)at = word;
    else *(u16 *)at = word;
}

// Converts elements `begin` to `end` of a run, with strides of `s` and `d` bytes, by `lanes` threads; this thread is number
// `lane`. `begin` is a multiple of 4. A thread reads exactly the elements that it writes, so source and destination may be the
// same.
__device__ __forceinline__ void convert_run(const u8 *src, u64 s, u32 from, u8 *dst, u64 d, u32 to, u64 begin, u64 end,
                                            u32 lane, u32 lanes) {
    const u32 sb = bytes_of(from), db = bytes_of(to);
    const bool quads = s == sb && d == db && ((u64)src & (4 * sb - 1)) == 0 && ((u64)dst & (4 * db - 1)) == 0;
    if (quads) {
        // Coalesced accesses of four elements: neighbouring lanes access neighbouring elements, so that sectors are full. Four
        // loads per thread are in flight at a time.
        const u64 whole = (end - begin) / 4;
        src += begin * sb, dst += begin * db;
        for (u64 first = lane; first < whole; first += 4 * lanes) {
            u32 words[4][4];
            if (sb == 4) {
#pragma unroll
                for (u32 k = 0; k < 4; k++) {
                    if (first + k * lanes < whole) load_words<16>(src + 16 * (first + k * lanes), words[k]);
                }
            } else {
#pragma unroll
                for (u32 k = 0; k < 4; k++) {
                    if (first + k * lanes < whole) {
                        uint2 two = *(const uint2 *)(src + 8 * (first + k * lanes));
                        words[k][0] = two.x & 0xffff, words[k][1] = two.x >> 16;
                        words[k][2] = two.y & 0xffff, words[k][3] = two.y >> 16;
                    }
                }
            }
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                if (first + k * lanes >= whole) break;
#pragma unroll
                for (u32 i = 0; i < 4; i++) words[k][i] = word_of_float(float_of_word(words[k][i], from), to);
                // Inline assembly, because the compiler would hoist common parts out of the branches and emit narrow stores.
                const u64 at = __cvta_generic_to_global(dst + 4 * db * (first + k * lanes));
                if (db == 4) {
                    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                                 :
                                 : "l"(at), "r"(words[k][0]), "r"(words[k][1]), "r"(words[k][2]), "r"(words[k][3])
                                 : "memory");
                } else {
                    asm volatile("st.global.v2.u32 [%0], {%1, %2};"
                                 :
                                 : "l"(at), "r"(words[k][0] | words[k][1] << 16), "r"(words[k][2] | words[k][3] << 16)
                                 : "memory");
                }
            }
        }
        src += 4 * whole * sb, dst += 4 * whole * db;
        begin += 4 * whole;
    } else {
        src += begin * s, dst += begin * d;
    }
    for (u64 k = lane; k < end - begin; k += lanes) {
        store_word(dst + k * d, to, word_of_float(float_of_word(load_word(src + k * s, from), from), to));
    }
}

// Moves the bytes of a run in accesses of one Word, with four accesses per thread in flight. The remainder is moved byte by
// byte.
template <class Word>
__device__ __forceinline__ void move(const u8 *src, u8 *dst, u64 bytes, u32 lane, u32 lanes) {
    const u64 n = bytes / sizeof(Word);
    for (u64 first = lane; first < n; first += 4 * lanes) {
        Word words[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            if (first + k * lanes < n) words[k] = ((const Word *)src)[first + k * lanes];
        }
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            if (first + k * lanes < n) ((Word *)dst)[first + k * lanes] = words[k];
        }
    }
    for (u64 k = n * sizeof(Word) + lane; k < bytes; k += lanes) dst[k] = src[k];
}

// Moves the bytes of a run by `lanes` threads, in the widest accesses that divide both addresses and `width`.
__device__ __forceinline__ void move_run(const u8 *src, u8 *dst, u64 bytes, u64 width, u32 lane, u32 lanes) {
    const u64 places = (u64)src | (u64)dst | width;
    if (places % 16 == 0) move<uint4>(src, dst, bytes, lane, lanes);
    else if (places % 8 == 0) move<uint2>(src, dst, bytes, lane, lanes);
    else if (places % 4 == 0) move<u32>(src, dst, bytes, lane, lanes);
    else if (places % 2 == 0) move<u16>(src, dst, bytes, lane, lanes);
    else move<u8>(src, dst, bytes, lane, lanes);
}

// Partition of the threads of a block among rows: 2^lanes_log threads per row, or all threads for one of the `pieces` of a row.
struct RowPartition {
    u32 lanes_log, pieces;

    __device__ u32 lanes() const { return 1u << lanes_log; }
    __device__ u32 lane() const { return threadIdx.x & (lanes() - 1); }

    // The row of this thread.
    __device__ u64 row() const {
        return (u64)(blockIdx.x / pieces) * (blockDim.x >> lanes_log) + (threadIdx.x >> lanes_log);
    }

    __device__ u32 piece() const { return blockIdx.x % pieces; }
};

// Quotient and remainder of n / d. Uses 32-bit division if n fits, which is the usual case and rarely diverges within a warp.
__device__ __forceinline__ void divide(u64 n, u32 d, u64 &q, u32 &r) {
    if (n >> 32) {
        q = n / d, r = n - q * d;
    } else {
        q = (u32)n / d, r = (u32)n - (u32)q * d;
    }
}

// Index of an element in each dimension; `index_of` computes it from the element number `e` (dimension 0 fastest).
struct Index {
    u32 i[4];
};

__device__ __forceinline__ Index index_of(const Shape &shape, u64 e) {
    Index index = {};
    if (e < shape.ne[0]) {
        index.i[0] = e;
        return index;
    }
    divide(e, shape.ne[0], e, index.i[0]);
    divide(e, shape.ne[1], e, index.i[1]);
    divide(e, shape.ne[2], e, index.i[2]);
    index.i[3] = e;
    return index;
}

// Coalesced tiles: loads and stores of a row's tile by a block of threads, so that every access of a warp covers whole 32-byte
// sectors.
//
// Each thread of a block row has V * U elements: U vectors of V elements, in accesses of 8 or 16 bytes. Vector u of thread t is
// vector u * blockDim.x + t of the tile. If addresses or the end of the row do not permit vectors (`wide` is false), the tile
// has the same elements, and element j of thread t is element j * blockDim.x + t.
#pragma once

#include "abi.cuh"
#include "types.cuh"

// Elements per vector: 16 bytes of the widest type, so that a thread holds the same elements of all three tensors.
template <class A, class B, class C>
constexpr int VECTOR = A::BYTES == 2 && B::BYTES == 2 && C::BYTES == 2 ? 8 : 4;

__device__ __forceinline__ void floats_of_word(F16, u32 word, float &low, float &high) {
    unsigned short a, b;
    halves_of_word(word, a, b);
    low = float_of_half(a), high = float_of_half(b);
}
__device__ __forceinline__ void floats_of_word(BF16, u32 word, float &low, float &high) {
    low = __uint_as_float(word << 16), high = __uint_as_float(word & 0xffff0000);
}

__device__ __forceinline__ u32 word_of_floats(F16, float low, float high) {
    return word_of_halves(half_of_float(low), half_of_float(high));
}
__device__ __forceinline__ u32 word_of_floats(BF16, float low, float high) {
    return __byte_perm(bf16_bits_above(low), bf16_bits_above(high), 0x7632);
}

// As word_of_floats, for values that are not NaN: handling NaN would be a third of the work.
__device__ __forceinline__ u32 word_of_numbers(F16, float low, float high) {
    unsigned short a, b;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(a) : "f"(low));
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(b) : "f"(high));
    return word_of_halves(a, b);
}
__device__ __forceinline__ u32 word_of_numbers(BF16, float low, float high) {
    const u32 a = __float_as_uint(low), b = __float_as_uint(high);
    return __byte_perm(a + 0x7fff + (a >> 16 & 1), b + 0x7fff + (b >> 16 & 1), 0x7632);
}

// Loads V elements into `out` from index `first` on; `at` is a multiple of the vector's size.
template <class T, int V, int N>
__device__ __forceinline__ void load_vector(const u8 *at, int first, float (&out)[N]) {
    constexpr int WORDS = V * T::BYTES / 4;
    u32 words[WORDS];
    load_words<4 * WORDS>(at, words);
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        if constexpr (T::BYTES == 4) out[first + i] = __uint_as_float(words[i]);
        else floats_of_word(T(), words[i], out[first + 2 * i], out[first + 2 * i + 1]);
    }
}

// The inverse of load_vector.
template <class T, int V, int N>
__device__ __forceinline__ void store_vector(u8 *at, int first, const float (&values)[N]) {
    constexpr int WORDS = V * T::BYTES / 4;
    u32 words[WORDS];
    if constexpr (T::BYTES == 4) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) words[i] = __float_as_uint(values[first + i]);
    } else {
        bool nan = false;
#pragma unroll
        for (int i = 0; i < V; i++) nan |= values[first + i] != values[first + i];
        if (nan) {
#pragma unroll
            for (int i = 0; i < WORDS; i++) words[i] = word_of_floats(T(), values[first + 2 * i], values[first + 2 * i + 1]);
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; i++) words[i] = word_of_numbers(T(), values[first + 2 * i], values[first + 2 * i + 1]);
        }
    }
    if constexpr (WORDS == 2) *(uint2 *)at = make_uint2(words[0], words[1]);
    else *(uint4 *)at = make_uint4(words[0], words[1], words[2], words[3]);
}

// Whether the length of a row of n elements permits vectors in the tile that starts at element `begin`. Alignment is checked
// elsewhere.
template <int V, int N>
__device__ __forceinline__ bool whole_vectors(u64 begin, u64 n) {
    return n % V == 0 || begin + (u64)blockDim.x * N <= n;
}

// Loads this thread's part of the tile that starts at element `begin` of a row of n; values behind the row's end are
// unspecified.
template <class T, int V, int N>
__device__ __forceinline__ void load_tile(const u8 *row, u64 begin, u64 n, bool wide, float (&out)[N]) {
    if (wide) {
#pragma unroll
        for (int u = 0; u < N / V; u++) {
            const u64 k = begin + (u * blockDim.x + threadIdx.x) * V;
            if (k < n) load_vector<T, V>(row + k * T::BYTES, u * V, out);
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) {
            const u64 k = begin + j * blockDim.x + threadIdx.x;
            if (k < n) out[j] = T::load1(row, k);
        }
    }
}

// The inverse of load_tile.
template <class T, int V, int N>
__device__ __forceinline__ void store_tile(u8 *row, u64 begin, u64 n, bool wide, const float (&values)[N]) {
    if (wide) {
#pragma unroll
        for (int u = 0; u < N / V; u++) {
            const u64 k = begin + (u * blockDim.x + threadIdx.x) * V;
            if (k < n) store_vector<T, V>(row + k * T::BYTES, u * V, values);
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) {
            const u64 k = begin + j * blockDim.x + threadIdx.x;
            if (k < n) T::store1(row, k, values[j]);
        }
    }
}

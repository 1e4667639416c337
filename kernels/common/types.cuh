// Plain element types (F32, F16, BF16), and the loads and stores that they share with the block types of quants.cuh.
//
// Every type is a struct with LEN (elements per block; 1 here) and BYTES (bytes per block), and reads a dense row as f32:
//
//     T::load8<ALIGNED>(row, k, out)   elements k to k + 7; k is a multiple of 8
//     T::load1(row, k)                 element k
//
// ALIGNED requires that `row` is a multiple of 16 bytes, and permits the widest loads. Without it, a row of a plain type may
// start at any multiple of its element size, a row of blocks at any even address, and a row of MXFP4 at any address. No byte
// outside of the elements (or of their block) is read.
//
// Halves are handled as bits, so that no CUDA header is needed and NaN has the same bits on every target.
#pragma once

// ---- bits

__device__ __forceinline__ float float_of_half(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Rounds to nearest, ties to even. NaN becomes the quiet NaN with its sign, as on the CPU; the hardware instruction gives
// another NaN.
__device__ __forceinline__ unsigned short half_of_float(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    unsigned short nan = (__float_as_uint(value) >> 16 & 0x8000) | 0x7e00;
    return value != value ? nan : bits;
}

__device__ __forceinline__ float float_of_bf16(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

// Rounds to nearest, ties to even; the result is in the upper half of the word. NaN keeps its sign and the upper bits of its
// payload.
__device__ __forceinline__ unsigned bf16_bits_above(float value) {
    unsigned bits = __float_as_uint(value);
    return value != value ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
}

__device__ __forceinline__ unsigned short bf16_of_float(float value) { return bf16_bits_above(value) >> 16; }

// A word of two halves, `low` first in memory.
__device__ __forceinline__ unsigned word_of_halves(unsigned short low, unsigned short high) {
    unsigned word;
    asm("mov.b32 %0, {%1, %2};" : "=r"(word) : "h"(low), "h"(high));
    return word;
}

// The inverse of word_of_halves.
__device__ __forceinline__ void halves_of_word(unsigned word, unsigned short& low, unsigned short& high) {
    asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(word));
}

// ---- memory

// The greatest power of two that divides `bytes`, 16 at most.
__device__ constexpr int alignment_of(int bytes) { return (bytes | 16) & -(bytes | 16); }

// Loads N words from a multiple of ALIGN bytes, with as few load instructions as the alignment permits.
template <int ALIGN, int N>
__device__ __forceinline__ void load_words(const unsigned char* from, unsigned (&words)[N]) {
    if constexpr (ALIGN >= 16 && N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            uint4 four = *(const uint4*)(from + 4 * i);
            words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
        }
    } else if constexpr (ALIGN >= 8 && N % 2 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            uint2 two = *(const uint2*)(from + 4 * i);
            words[i] = two.x, words[i + 1] = two.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const unsigned char* at = from + 4 * i;
            if constexpr (ALIGN >= 4) {
                words[i] = *(const unsigned*)at;
            } else if constexpr (ALIGN >= 2) {
                const unsigned short* halves = (const unsigned short*)at;
                words[i] = word_of_halves(halves[0], halves[1]);
            } else {
                words[i] = __byte_perm(__byte_perm(at[0], at[1], 0x0040), __byte_perm(at[2], at[3], 0x0040), 0x5410);
            }
        }
    }
}

// Stores N words to a multiple of ALIGN bytes: the inverse of load_words.
template <int ALIGN, int N>
__device__ __forceinline__ void store_words(unsigned char* to, const unsigned (&words)[N]) {
    if constexpr (ALIGN >= 16 && N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            *(uint4*)(to + 4 * i) = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            unsigned char* at = to + 4 * i;
            if constexpr (ALIGN >= 4) {
                *(unsigned*)at = words[i];
            } else if constexpr (ALIGN >= 2) {
                ((unsigned short*)at)[0] = words[i], ((unsigned short*)at)[1] = words[i] >> 16;
            } else {
#pragma unroll
                for (int b = 0; b < 4; b++) at[b] = words[i] >> (8 * b);
            }
        }
    }
}

// ---- types

// Plain types can also be stored: store1(row, k, value) and store8<ALIGNED>(row, k, values), the inverses of load1 and load8.
struct F32 {
    static constexpr int LEN = 1, BYTES = 4;

    template <bool ALIGNED = false>
    static __device__ __forceinline__ void load8(const unsigned char* row, long long k, float (&out)[8]) {
        unsigned words[8];
        load_words<ALIGNED ? 16 : 4>(row + 4 * k, words);
#pragma unroll
        for (int i = 0; i < 8; i++) out[i] = __uint_as_float(words[i]);
    }

    static __device__ __forceinline__ float load1(const unsigned char* row, long long k) { return ((const float*)row)[k]; }

    template <bool ALIGNED = false>
    static __device__ __forceinline__ void store8(unsigned char* row, long long k, const float (&values)[8]) {
        unsigned words[8];
#pragma unroll
        for (int i = 0; i < 8; i++) words[i] = __float_as_uint(values[i]);
        store_words<ALIGNED ? 16 : 4>(row + 4 * k, words);
    }

    static __device__ __forceinline__ void store1(unsigned char* row, long long k, float value) { ((float*)row)[k] = value; }
};

struct F16 {
    static constexpr int LEN = 1, BYTES = 2;

    template <bool ALIGNED = false>
    static __device__ __forceinline__ void load8(const unsigned char* row, long long k, float (&out)[8]) {
        if constexpr (ALIGNED) {
            unsigned words[4];
            load_words<16>(row + 2 * k, words);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                unsigned short low, high;
                halves_of_word(words[i], low, high);
                out[2 * i] = float_of_half(low), out[2 * i + 1] = float_of_half(high);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) out[i] = load1(row, k + i);
        }
    }

    static __device__ __forceinline__ float load1(const unsigned char* row, long long k) {
        return float_of_half(((const unsigned short*)row)[k]);
    }

    template <bool ALIGNED = false>
    static __device__ __forceinline__ void store8(unsigned char* row, long long k, const float (&values)[8]) {
        if constexpr (ALIGNED) {
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) words[i] = word_of_halves(half_of_float(values[2 * i]), half_of_float(values[2 * i + 1]));
            store_words<16>(row + 2 * k, words);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) store1(row, k + i, values[i]);
        }
    }

    static __device__ __forceinline__ void store1(unsigned char* row, long long k, float value) {
        ((unsigned short*)row)[k] = half_of_float(value);
    }
};

struct BF16 {
    static constexpr int LEN = 1, BYTES = 2;

    template <bool ALIGNED = false>
    static __device__ __forceinline__ void load8(const unsigned char* row, long long k, float (&out)[8]) {
        if constexpr (ALIGNED) {
            unsigned words[4];
            load_words<16>(row + 2 * k, words);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                out[2 * i] = __uint_as_float(words[i] << 16);
                out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) out[i] = load1(row, k + i);
        }
    }

    static __device__ __forceinline__ float load1(const unsigned char* row, long long k) {
        return float_of_bf16(((const unsigned short*)row)[k]);
    }

    template <bool ALIGNED = false>
    static __device__ __forceinline__ void store8(unsigned char* row, long long k, const float (&values)[8]) {
        if constexpr (ALIGNED) {
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                words[i] = __byte_perm(bf16_bits_above(values[2 * i]), bf16_bits_above(values[2 * i + 1]), 0x7632);
            }
            store_words<16>(row + 2 * k, words);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) store1(row, k + i, values[i]);
        }
    }

    static __device__ __forceinline__ void store1(unsigned char* row, long long k, float value) {
        ((unsigned short*)row)[k] = bf16_of_float(value);
    }
};

// ---- ends of rows

// Loads elements k to k + 7 of a row of n elements, with zeros behind its end, at any address that is aligned to the element.
template <class T>
__device__ __forceinline__ void load_some(const unsigned char* row, unsigned long long k, unsigned long long n, float (&out)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = k + i < n ? T::load1(row, k + i) : 0.0f;
}

// ---- types selected when the kernel runs, by a number of `enum Type` (abi.cuh)

__device__ __forceinline__ float load_float(const unsigned char* at, unsigned type) {
    if (type == 0) return F32::load1(at, 0);
    return type == 1 ? F16::load1(at, 0) : BF16::load1(at, 0);
}

__device__ __forceinline__ void store_float(unsigned char* at, unsigned type, float value) {
    if (type == 0) return F32::store1(at, 0, value);
    return type == 1 ? F16::store1(at, 0, value) : BF16::store1(at, 0, value);
}

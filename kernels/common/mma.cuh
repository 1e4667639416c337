// Matrix multiply-accumulate on tensor cores (compute capability 8.0 or later): the registers of a warp hold fragments of three
// matrices; the product of two is added to the third.
#pragma once
#include "vector.cuh"

// Converts to tf32, a float with an 11-bit significand in the upper bits of a word. Rounds to nearest, ties away from zero.
__device__ __forceinline__ unsigned tf32_of_float(float value) {
    unsigned bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return bits;
}

// Splits a float into two tf32 values, `big + small`, which keep 22 bits. `big` is truncated, not rounded, so that it is finite
// if the value is.
__device__ __forceinline__ void split_tf32(float value, unsigned& big, unsigned& small) {
    big = __float_as_uint(value) & 0xffffe000;
    small = tf32_of_float(value - __uint_as_float(big));
}

// sums[16 x 8] += a[16 x 8] * b[8 x 8] in tf32. With g = lane / 4 and t = lane % 4, a lane holds
//
//     a     rows g and g + 8 of column t, then of column t + 4
//     b     rows t and t + 4 of column g
//     sums  columns 2 t and 2 t + 1 of row g, then of row g + 8
__device__ __forceinline__ void mma_tf32(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two floats rounded to a word of two F16 or BF16, `low` first in memory.
__device__ __forceinline__ unsigned pair_of_floats(F16, float low, float high) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
__device__ __forceinline__ unsigned pair_of_floats(BF16, float low, float high) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// Splits two floats into sums `big + small` of two values of T, which keep 22 bits (F16) or 16 bits (BF16).
template <class T>
__device__ __forceinline__ void split_pair(float low, float high, unsigned &big, unsigned &small) {
    big = pair_of_floats(T(), low, high);
    float big_low, big_high;
    floats_of_word(T(), big, big_low, big_high);
    small = pair_of_floats(T(), low - big_low, high - big_high);
}

// sums[16 x 8] += a[16 x 16] * b[16 x 8] in F16 or BF16. With g = lane / 4 and t = lane % 4, the words of a lane hold
//
//     a     columns 2 t and 2 t + 1 of rows g and g + 8, then columns 2 t + 8 and 2 t + 9 of these rows
//     b     rows 2 t and 2 t + 1 of column g, then rows 2 t + 8 and 2 t + 9
//     sums  as for mma_tf32
__device__ __forceinline__ void mma_halves(F16, float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_halves(BF16, float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Integer products: sums[16 x 8] = a[16 x 32] * b[32 x 8] + start. A and B are bytes, `u8` or `s8`. With g = lane / 4 and t =
// lane % 4, the words of a lane hold
//
//     a     bytes 4 t to 4 t + 3 of rows g and g + 8, then bytes 4 t + 16 to 4 t + 19 of these rows
//     b     bytes 4 t to 4 t + 3 of column g, then bytes 4 t + 16 to 4 t + 19
//     sums  as for mma_tf32
#define MMA_BYTES(name, a_type, b_type)                                                                                           \
    __device__ __forceinline__ void name(int (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], const int (&start)[4]) { \
        asm("mma.sync.aligned.m16n8k32.row.col.s32." a_type "." b_type ".s32 "                                                     \
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"                                                  \
            : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])                                                           \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(start[0]), "r"(start[1]), "r"(start[2]),       \
              "r"(start[3]));                                                                                                      \
    }
MMA_BYTES(mma_u8_s8, "u8", "s8")
MMA_BYTES(mma_s8_s8, "s8", "s8")
MMA_BYTES(mma_u8_u8, "u8", "u8")
MMA_BYTES(mma_s8_u8, "s8", "u8")
#undef MMA_BYTES

// As mma_u8_s8, of half as many bytes: the first two words of a and the first word of b.
__device__ __forceinline__ void mma_half_u8_s8(int (&sums)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(0));
}

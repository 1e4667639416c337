// Powers of two for columns of F16: the elements are multiplied by one before they are rounded, and the results by its inverse, so that
// large elements do not become infinite and small ones keep their digits.
#pragma once
#include "abi.cuh"

// The magnitude of a finite element as bits, whose order is that of magnitudes; 0 for others.
__device__ __forceinline__ u32 finite_magnitude(float x) {
    const u32 bits = __float_as_uint(x) & 0x7fffffff;
    return bits < 0x7f800000 ? bits : 0;
}

struct ColumnScale {
    float inverse = 1.0f, scale = 1.0f; // of the elements, and of the results

    // For a column whose largest finite_magnitude is `most`: it becomes 2^14 to 2^15, or less if it is below 2^-112.
    __device__ __forceinline__ ColumnScale(u32 most) {
        // The biased exponent of the largest element. From 15 on, both powers of two are normal.
        const u32 e = max(most >> 23, 15u);
        if (most != 0) inverse = __uint_as_float((268 - e) << 23), scale = __uint_as_float((e - 14) << 23);
    }
};

// Byte offset of the scale in a column of k elements: after zeros up to a multiple of 16 bytes.
__device__ __forceinline__ u32 scale_at(u32 k) { return (k + 7) / 8 * 16; }

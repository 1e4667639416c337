// Makes blocks: one thread, one block, byte for byte what the CPU's quantisers make (src/tensor/quant).
//
//     quantise<T>(x, block)   x(i) is element i of the block's T::LEN, in f32; the block lies at an even address,
//                             that of MXFP4 at any
//
// `x` is called several times for an element; the K types read it some dozens of times, one sub-block at a time.
// Values that are not finite, or too large for the type's scale, give unspecified codes.
//
// Sums and products that the CPU rounds one by one are written as intrinsics that no compiler option contracts.
#pragma once
#include "quants.cuh"

__device__ __forceinline__ float inverse(float d) { return d == 0.0f ? 0.0f : __fdiv_rn(1.0f, d); }

// x * a + b with both roundings.
__device__ __forceinline__ float mul_add(float x, float a, float b) { return __fadd_rn(__fmul_rn(x, a), b); }

__device__ __forceinline__ void store_half(unsigned char* to, unsigned short bits) { *(unsigned short*)to = bits; }

#include "quantise_k.cuh"
#include "quantise_legacy.cuh"

template <class T, class Get>
__device__ __forceinline__ void quantise(const Get& x, unsigned char* block) {
    pack(T(), x, block);
}

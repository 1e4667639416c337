// Products of rows at any address, byte by byte: slow, and rare. Included by the other files of MUL_MAT.
#pragma once
#include "mul_mat_common.cuh"

// The dot product of a row and a column, computed by a warp; all lanes receive the result.
template <class T>
__device__ __noinline__ float dot_of_bytes(const u8 *row, const u8 *column, u32 k) {
    const u32 lane = threadIdx.x % 32;
    float sum = 0.0f;
    if constexpr (T::LEN > 1) {
#pragma unroll 1
        for (u32 i = 8 * lane; i < k; i += 256) {
            float w[8];
            u32 x[8];
            T::template decode8<1>(T::block_of(row, i), i % T::LEN, w);
            load_words<1>(column + 4ull * i, x);
#pragma unroll
            for (u32 e = 0; e < 8; e++) sum += w[e] * __uint_as_float(x[e]);
        }
    } else {
#pragma unroll 1
        for (u32 i = lane; i < k; i += 32) {
            const u8 *at = row + (u64)i * T::BYTES;
            u32 word;
            if constexpr (T::BYTES == 4) word = load_word(at);
            else word = at[0] | at[1] << 8;
            sum += T::load1((const u8 *)&word, 0) * __uint_as_float(load_word(column + 4ull * i));
        }
    }
#pragma unroll
    for (u32 offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
    return sum;
}

// Computes the block's rows for up to `most` columns, with one warp per dot product: dot(row, column, k).
template <class Dot>
__device__ __forceinline__ void products_of_bytes(const Matrices &of, u32 rows, u32 most, Dot dot) {
    const u64 first = (u64)blockIdx.x * rows;
    if (first >= of.m) return;
    const u32 count = min(rows, of.m - (u32)first), columns = min(of.n, most);
#pragma unroll 1
    for (u32 i = threadIdx.x / 32; i < count * columns; i += blockDim.x / 32) {
        const u32 r = (u32)first + i % count, c = i / count;
        const float sum = dot(of.a + r * of.a1, of.b + c * of.b1, of.k);
        const u32 byte = threadIdx.x % 32;
        if (byte < 4) (of.dst + r * of.d0 + c * of.d1)[byte] = __float_as_uint(sum) >> (8 * byte);
    }
}

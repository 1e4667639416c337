// Quantised columns: activations for the matrix-vector kernels of block types.
#pragma once
#include "types.cuh"

// 8-bit codes with a scale per 32 or 256 elements, rounded to nearest. A quantised column starts at a multiple of 16
// bytes, and has one after the other
//
//     groups of 32 (blocks of 32)       i8 codes[k], then for each group the f32 scale and the i32 sum of its codes
//     groups of 256 (K types)           i8 codes[k], i16 sums[k / 16] of the codes of 16 elements, f32 scales[k / 256]
//
// The sums of 128 elements are ordered as K types use them: those of elements 0, 32, 64, 96, then those of 16, 48, 80, 112. A
// group with a value that is not finite has the scale NaN and zeros elsewhere.

__device__ __forceinline__ float load_float_anywhere(const u8 *at) {
    if (((u64)at & 3) == 0) return *(const float *)at;
    return __uint_as_float(at[0] | at[1] << 8 | at[2] << 16 | (u32)at[3] << 24);
}

// Rounds four values to codes, the bytes of a word. Groups of 32 round halves away from zero, groups of 256 to even.
template <bool LARGE>
__device__ __forceinline__ u32 codes_of(const float (&x)[4], float inverse) {
    u32 bytes[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float scaled = x[i] * inverse;
        // The largest float below 0.5: with 0.5 itself, the sum could round up to an integer that is not nearest to the value.
        bytes[i] = LARGE ? __float2int_rn(scaled) : __float2int_rz(scaled + copysignf(0.49999997f, scaled));
    }
    return __byte_perm(__byte_perm(bytes[0], bytes[1], 0x0040), __byte_perm(bytes[2], bytes[3], 0x0040), 0x5410);
}

// A lane's part of the elements that a warp quantises at a time: 128 in groups of 32, or 256 in one group (LARGE). Vector v has the
// codes of elements 128 v + 4 lane to 128 v + 4 lane + 3.
template <bool LARGE>
struct QuantizedPiece {
    static constexpr int VECTORS = LARGE ? 2 : 1;
    u32 codes[VECTORS];
    int sums[VECTORS]; // of the codes of 16 elements (LARGE) or 32
    float scale;

    // Quantises elements from `first` on of a row of k. Those beyond the end are zeros. Q8_K gives its scale the sign opposite
    // to that of the largest element. Rounding to even is symmetric, so the sign changes no product: it is always negative here.
    __device__ __forceinline__ QuantizedPiece(const u8 *row, u32 k, u32 first, u32 lane) {
        constexpr int LANES = LARGE ? 32 : 8; // per group
        const bool inside = first + 4 * lane < k;
        float x[VECTORS][4] = {};
        u32 most = 0; // as bits, whose order is that of magnitudes; infinity and NaN are the largest
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const u8 *from = row + 4ull * (first + 128 * v + 4 * lane);
            if (inside) {
                if ((u64)row % 16 == 0) {
                    const float4 four = *(const float4 *)from;
                    x[v][0] = four.x, x[v][1] = four.y, x[v][2] = four.z, x[v][3] = four.w;
                } else {
#pragma unroll
                    for (int i = 0; i < 4; i++) x[v][i] = load_float_anywhere(from + 4 * i);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) most = max(most, __float_as_uint(x[v][i]) & 0x7fffffff);
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) most = max(most, __shfl_xor_sync(0xffffffff, most, step));
        const bool finite = most < 0x7f800000, zero = most == 0 || !finite;
        const float peak = __uint_as_float(most);
        const float inverse = zero ? 0.0f : LARGE ? -127.0f / peak : 127.0f / peak;
        scale = LARGE ? 1.0f / inverse : float_of_half(half_of_float(peak / 127.0f));
        if (zero) scale = finite ? 0.0f : __uint_as_float(0x7fc00000);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            // Zeros also where the values are not finite.
            codes[v] = zero ? 0 : codes_of<LARGE>(x[v], inverse);
            sums[v] = __dp4a((int)codes[v], 0x01010101, 0);
#pragma unroll
            for (int step = LARGE ? 2 : 4; step > 0; step /= 2) sums[v] += __shfl_xor_sync(0xffffffff, sums[v], step);
        }
    }
};

// One warp quantises 128 or 256 elements of a row to a column.
template <bool LARGE>
__device__ __forceinline__ void quantize_piece(const u8 *row, u8 *column, u32 k, u32 first, u32 lane) {
    const bool inside = first + 4 * lane < k;
    const QuantizedPiece<LARGE> piece(row, k, first, lane);
#pragma unroll
    for (int v = 0; v < piece.VECTORS; v++) {
        if (inside) *(u32 *)(column + first + 128 * v + 4 * lane) = piece.codes[v];
        if (LARGE) {
            const u32 s = lane / 4;
            if (lane % 4 == 0) ((short *)(column + k))[first / 16 + 8 * v + s % 2 * 4 + s / 2] = piece.sums[v];
        } else if (inside && lane % 8 == 0) {
            *(uint2 *)(column + k + (first / 32 + lane / 8) * 8ull) = make_uint2(__float_as_uint(piece.scale), piece.sums[v]);
        }
    }
    if (LARGE && lane == 0) ((float *)(column + k + k / 8))[first / 256] = piece.scale;
}

// Shares the pieces of a row of k elements among `warps` warps: calls `piece` with the first element of each one of warp number `warp`.
template <class Piece>
__device__ __forceinline__ void for_each_piece(u32 k, u32 length, u32 warp, u32 warps, Piece piece) {
    for (u64 first = (u64)length * warp; first < k; first += (u64)length * warps) piece((u32)first);
}

// Quantises a row of k elements by `warps` warps, of which this is number `warp`.
__device__ __forceinline__ void quantize_row(const u8 *row, u8 *column, u32 k, u32 group, u32 warp, u32 warps) {
    const u32 lane = threadIdx.x % 32;
    if (group == 32) {
        for_each_piece(k, 128, warp, warps, [&](u32 first) { quantize_piece<false>(row, column, k, first, lane); });
    } else {
        for_each_piece(k, 256, warp, warps, [&](u32 first) { quantize_piece<true>(row, column, k, first, lane); });
    }
}

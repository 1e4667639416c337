// Shared by the integer products on tensor cores (mul_mat_mma.cu): the layout of the columns, and the fields of a lane's rows.
//
// MmaDot<T>::multiply<TILES>(of, row, step_bytes, part, split, sums) adds the products of rows `row` and `row + 8` with TILES
// tiles of columns: of each `split`th step of k, beginning with step `part`. `sums` are as of mma_tf32 (common/mma.cuh).
//
// Columns are stored in tiles of 8, as fragments: a load of 16 bytes per lane serves two mma steps, each of 32 elements of k.
// The tiles of all columns of a plane follow each other for the first elements of k, then for the next ones, so that the
// distance between tiles is a constant. A tile of 64 elements of types with blocks of 32 (TILE32_BYTES) has one after the other
//
//     512 bytes of codes
//     64 bytes for each of two groups of 32 elements: for each column the f32 scale, and MAGIC times the negated scale
//     32 bytes for each group: for each column the f32 scale times the sum of the codes
//
// and a tile of 256 elements of K types (TILE256_BYTES)
//
//     4 times 512 bytes of codes, each of 64 elements
//     256 bytes: for each lane 4 g + t the i16 sums of column g's codes of 16 elements, numbers 2 t, 2 t + 1, 2 t + 8 and 2 t + 9
//     32 bytes: for each column the f32 scale
//
// Codes: for lane 4 g + t, four words of column g: words t and t + 4 of the eight words of codes of the first 32 elements (or words
// 2 t and 2 t + 1: `pairs` of QuantizeTilesArgs, for Q8_0, Q4_K and Q5_K), and of the next 32. Missing elements and columns are
// zeros.
#pragma once
#include "common/mma.cuh"
#include "common/quant_dot.cuh"
#include "common/tiles.cuh"
#include "mul_mat_common.cuh"

// The fields of a block of rows `row` and `row + 8` in the packed layout. Rows beyond the end are the last one again.
template <class T>
struct RowPair {
    const u8 *fields[T::Fields::COUNT];
    u32 distances[T::Fields::COUNT];

    __device__ __forceinline__ RowPair(const Matrices &of, u32 row, u32 block) {
        const PackedPointers<T> first = T::Fields::pointers(packed_block<T>(of.a, of.a1, min(row, of.m - 1), block));
        const PackedPointers<T> second = T::Fields::pointers(packed_block<T>(of.a, of.a1, min(row + 8, of.m - 1), block));
#pragma unroll
        for (int f = 0; f < T::Fields::COUNT; f++) fields[f] = first.at[f], distances[f] = second.at[f] - first.at[f];
    }

    // Field F of row `row + 8 * r`.
    template <class F>
    __device__ __forceinline__ const u8 *at(u32 r) const {
        constexpr int f = T::Fields::template index<F>();
        return r ? fields[f] + distances[f] : fields[f];
    }

    __device__ __forceinline__ void advance(u32 blocks) {
#pragma unroll
        for (int f = 0; f < T::Fields::COUNT; f++) fields[f] += blocks * T::Fields::bytes(f);
    }
};

template <class T, bool K = T::LEN == 256>
struct MmaDot;

// Tiled GEMM of F32 on tensor cores, for products with many columns: a block stages tiles of both matrices in shared memory, and
// multiplies them as three tf32 products (split_tf32). Included by mul_mat.cu.
//
// Tensor cores truncate each sum towards zero, which biases long sums: over 4096 elements of k, the NMSE of F32 weights would be
// 1.5e-9, and 2.4e-8 if all terms are positive. So a tensor core sums only the DEPTH elements of a stage, and FADD, which rounds to
// nearest, adds its sums to those of the stages before: one FADD per three mma, for an NMSE of 1e-12 (4e-13 with random signs) up to
// 16384 elements. Every 128 elements instead would give 2e-11.
//
// A tile spans 32 elements of k, in two slabs of 16: 64 bytes per row. A lane needs elements 4 t to 4 t + 3 of its row for two
// mma steps, which is a single load of 16 bytes. (The assignment of elements to steps is arbitrary, as long as both matrices
// agree.) These groups of four are swapped (swizzled) in every other pair of rows, so that neither loads nor stores cause bank
// conflicts.
#pragma once
#include "common/mma.cuh"
#include "mul_mat_bytes.cuh"

constexpr u32 DEPTH = 32, SLAB = 16, COLUMNS = 64;

// Index of group `group` of a row within a slab, with the swizzle.
__device__ __forceinline__ u32 swizzled_index(u32 row, u32 group) { return row * SLAB + 4 * (group ^ (row >> 1 & 1)); }

// Computes a tile of 16 * WARPS rows and 64 columns with 4 or 8 warps; each warp computes 32 x 32.
template <int WARPS>
__device__ __forceinline__ void multiply_tile(const Matrices &of, bool aligned) {
    constexpr u32 HEIGHT = 16 * WARPS;
    constexpr u32 SHARE = 8 / WARPS; // half rows of columns per thread; of rows it has two
    __shared__ __align__(16) float tiles[2][2][(HEIGHT + COLUMNS) * SLAB];

    // A thread loads eight elements, half a row of a slab, at a time. Rows beyond the last one load the last row again; their
    // results are not stored.
    const u32 first = blockIdx.x * HEIGHT, half = threadIdx.x % 2, r = threadIdx.x / 2, c = r % COLUMNS;
    const u32 slab_of_column = r / COLUMNS; // used if SHARE is 1
    const bool whole = aligned && of.k % 8 == 0;
    const u8 *row_of_a = of.a + min(first + r, of.m - 1) * of.a1, *column = of.b + min(c, of.n - 1) * of.b1;
    float w[2][8], x[SHARE][8];
    auto fetch = [&](u32 k) {
#pragma unroll
        for (u32 slab = 0; slab < 2; slab++) {
            const u32 at = k + SLAB * slab + 8 * half;
            if (whole && at < of.k) F32::load8<true>(row_of_a, at, w[slab]);
            else load_some<F32>(row_of_a, at, of.k, w[slab]);
        }
#pragma unroll
        for (u32 share = 0; share < SHARE; share++) {
            const u32 at = k + SLAB * (share + slab_of_column) + 8 * half;
            if (whole && at < of.k) F32::load8<true>(column, at, x[share]);
            else load_some<F32>(column, at, of.k, x[share]);
        }
    };
    auto stage_rows = [&](float *slab, u32 row, const float (&values)[8]) {
#pragma unroll
        for (u32 i = 0; i < 8; i += 4) {
            *(float4 *)(slab + swizzled_index(row, 2 * half + i / 4)) = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
        }
    };
    auto stage_all = [&](u32 stage) {
#pragma unroll
        for (u32 slab = 0; slab < 2; slab++) stage_rows(tiles[stage][slab], r, w[slab]);
#pragma unroll
        for (u32 share = 0; share < SHARE; share++) stage_rows(tiles[stage][share + slab_of_column], HEIGHT + c, x[share]);
    };

    const u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const u32 row = warp / 2 * 32, col = warp % 2 * 32;
    const bool needed = first + row < of.m && col < of.n;
    float sums[2][4][4] = {};
    auto multiply = [&](u32 stage) {
        float of_stage[2][4][4] = {};
#pragma unroll
        for (u32 slab = 0; slab < 2; slab++) {
            const float *tile = tiles[stage][slab];
            float av[2][2][4], bv[4][4];
            auto get = [](float(&to)[4], const float *from) {
                const float4 four = *(const float4 *)from;
                to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
            };
#pragma unroll
            for (u32 n = 0; n < 4; n++) get(bv[n], tile + swizzled_index(HEIGHT + col + 8 * n + g, t));
#pragma unroll
            for (u32 m = 0; m < 2; m++) {
                get(av[m][0], tile + swizzled_index(row + 16 * m + g, t));
                get(av[m][1], tile + swizzled_index(row + 16 * m + 8 + g, t));
            }
#pragma unroll
            for (u32 step = 0; step < 4; step += 2) {
                unsigned bs[4][2], b_small[4][2];
#pragma unroll
                for (u32 n = 0; n < 4; n++) {
#pragma unroll
                    for (u32 i = 0; i < 2; i++) split_tf32(bv[n][step + i], bs[n][i], b_small[n][i]);
                }
#pragma unroll
                for (u32 m = 0; m < 2; m++) {
                    unsigned as[4], a_small[4];
#pragma unroll
                    for (u32 i = 0; i < 4; i++) split_tf32(av[m][i % 2][step + i / 2], as[i], a_small[i]);
#pragma unroll
                    for (u32 n = 0; n < 4; n++) {
                        mma_tf32(of_stage[m][n], a_small, bs[n]);
                        mma_tf32(of_stage[m][n], as, b_small[n]);
                        mma_tf32(of_stage[m][n], as, bs[n]);
                    }
                }
            }
        }
#pragma unroll
        for (u32 m = 0; m < 2; m++) {
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) sums[m][n][i] += of_stage[m][n][i];
            }
        }
    };

    fetch(0);
    stage_all(0);
    __syncthreads();
    u32 stage = 0;
#pragma unroll 1
    for (u32 k = DEPTH; k < of.k; k += DEPTH) {
        fetch(k);
        if (needed) multiply(stage);
        stage ^= 1;
        stage_all(stage);
        __syncthreads();
    }
    if (needed) multiply(stage);
    // The next columns reuse the shared memory.
    __syncthreads();

#pragma unroll
    for (u32 m = 0; m < 2; m++) {
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 y = first + row + 16 * m + g + i / 2 * 8, z = col + 8 * n + 2 * t + i % 2;
                if (y < of.m && z < of.n) *(float *)(of.dst + y * of.d0 + z * of.d1) = sums[m][n][i];
            }
        }
    }
}

// Grid: x = tiles of 16 * WARPS rows, y = tiles of 64 columns, z = planes.
template <int WARPS>
__device__ __forceinline__ void mat_tile(const MulMatArgs &args) {
    const Access how = access<F32>(args);
    if (how == BYTES) {
        for_columns<COLUMNS>(args, [](const Matrices &of) { products_of_bytes(of, 16 * WARPS, COLUMNS, dot_of_bytes<F32>); });
    } else {
        for_columns<COLUMNS>(args, [=](const Matrices &of) { multiply_tile<WARPS>(of, how == ALIGNED); });
    }
}

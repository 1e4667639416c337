// Matrix-vector kernels for plain weights (F32, F16, BF16). Included by mul_mat.cu.
//
// Each weight is converted to f32 in registers by one thread, directly before the multiplication, 8 elements of k at a time.
#pragma once
#include "mul_mat_bytes.cuh"

template <class T, int N, bool ALIGNED>
__device__ __forceinline__ void dots(const u8 *const (&rows)[GGML_LAYOUT_ROWS], const u8 *const (&columns)[N], u32 k, u32 lane, u32 lanes,
                                     float (&sums)[GGML_LAYOUT_ROWS][N]) {
#pragma unroll 1
    for (u32 i = 8 * lane; i + 8 <= k; i += 8 * lanes) {
        float w[GGML_LAYOUT_ROWS][8];
#pragma unroll
        for (u32 r = 0; r < GGML_LAYOUT_ROWS; r++) T::template load8<ALIGNED>(rows[r], i, w[r]);
#pragma unroll
        for (int c = 0; c < N; c++) {
            float x[8];
            F32::load8<ALIGNED>(columns[c], i, x);
#pragma unroll
            for (u32 r = 0; r < GGML_LAYOUT_ROWS; r++) {
#pragma unroll
                for (int e = 0; e < 8; e++) sums[r][c] = __fmaf_rn(w[r][e], x[e], sums[r][c]);
            }
        }
    }
#pragma unroll 1
    for (u32 i = k / 8 * 8 + lane; i < k; i += lanes) {
        float w[GGML_LAYOUT_ROWS];
#pragma unroll
        for (u32 r = 0; r < GGML_LAYOUT_ROWS; r++) w[r] = T::load1(rows[r], i);
#pragma unroll
        for (int c = 0; c < N; c++) {
            const float x = F32::load1(columns[c], i);
#pragma unroll
            for (u32 r = 0; r < GGML_LAYOUT_ROWS; r++) sums[r][c] = __fmaf_rn(w[r], x, sums[r][c]);
        }
    }
}

// Computes the block's rows for up to N columns. All threads of the block must call this function.
template <class T, int N>
__device__ __forceinline__ void multiply(const Matrices &of, u32 log2_lanes, bool aligned) {
    const u32 lanes = 1 << log2_lanes, lane = threadIdx.x & (lanes - 1);
    const u32 row = first_row<GGML_LAYOUT_ROWS>(log2_lanes);
    // Rows and columns beyond the end load the last one again; their results are not stored.
    const u8 *rows[GGML_LAYOUT_ROWS], *columns[N];
#pragma unroll
    for (u32 r = 0; r < GGML_LAYOUT_ROWS; r++) rows[r] = of.a + min(row + r, of.m - 1) * of.a1;
#pragma unroll
    for (u32 c = 0; c < N; c++) columns[c] = of.b + min(c, of.n - 1) * of.b1;
    float sums[GGML_LAYOUT_ROWS][N] = {};
    if (aligned) dots<T, N, true>(rows, columns, of.k, lane, lanes, sums);
    else dots<T, N, false>(rows, columns, of.k, lane, lanes, sums);
    reduce_and_store(of, log2_lanes, sums);
}

// Grid: x = groups of 128 / lanes * GGML_LAYOUT_ROWS rows, y = groups of N columns, z = planes.
template <class T, int N>
__device__ __forceinline__ void mat_vec(const MulMatArgs &args) {
    const Access how = access<T>(args);
    const u32 log2_lanes = args.log2_lanes, rows = THREADS * GGML_LAYOUT_ROWS >> log2_lanes;
    if (how == BYTES) for_columns<N>(args, [=](const Matrices &of) { products_of_bytes(of, rows, N, dot_of_bytes<T>); });
    else for_columns<N>(args, [=](const Matrices &of) { multiply<T, N>(of, log2_lanes, how == ALIGNED); });
}

// Grid: x = groups of rows as above, y = used experts, z = tokens.
template <class T>
__device__ __forceinline__ void routed(const MulMatIdArgs &args) {
    const u64 as = args.as[0] | args.as[1], bs = args.bs[0] | args.bs[1], ds = args.ds[0] | args.ds[1] | args.ds[2];
    const Access how = access<T>((u64)args.a | as, (u64)args.b | bs, (u64)args.dst | ds);
    const u32 log2_lanes = args.log2_lanes, rows = THREADS * GGML_LAYOUT_ROWS >> log2_lanes;
    if (how == BYTES) for_slots(args, [=](const Matrices &of) { products_of_bytes(of, rows, 1, dot_of_bytes<T>); });
    else for_slots(args, [=](const Matrices &of) { multiply<T, 1>(of, log2_lanes, how == ALIGNED); });
}

// Shared by the kernels of MUL_MAT and MUL_MAT_ID: arguments, loops over columns, planes and experts, and the reduction of the
// matrix-vector kernels.
//
// Split-K within a block: in the matrix-vector kernels, a group of `lanes` neighbouring threads shares ROWS rows of a and N
// columns, and reduces its partial sums at the end. Short rows use few lanes; long rows use up to a whole block if the grid would
// otherwise have too few warps.
#pragma once
#include "common/abi.cuh"
#include "common/quants.cuh"

// 4 or 2; see rows_per_group() of src/cuda/ops/mul_mat.rs.
#ifndef ROWS_PER_GROUP
#define ROWS_PER_GROUP 4
#endif
constexpr u32 THREADS = 128, ROWS = ROWS_PER_GROUP, LOG2_ROWS = ROWS / 2;
static_assert(1 << LOG2_ROWS == ROWS);

struct MulMatArgs {
    const u8 *a, *b;
    u8 *dst;
    u32 k, m, n;          // elements per row; rows of a per plane; rows of b per plane
    u32 log2_lanes;       // 2 to 7; 8 << log2_lanes elements are a multiple of a's block
    u32 planes, b2;       // planes of b; planes in dimension 2
    u32 r2, r3;           // planes of b per plane of a, in dimensions 2 and 3
    u64 as[3], bs[3];     // byte strides of rows and planes
    u64 ds[4];
};

struct MulMatIdArgs {
    const u8 *a, *b;
    u8 *dst;
    const u8 *ids;
    u32 *error_word;
    u32 k, m, experts;
    u32 log2_lanes;
    u32 used, tokens, nb; // experts for each token, tokens, rows of b for each token
    u32 padding;
    u64 as[2], bs[2];
    u64 ds[3];
    u64 is[2];            // byte strides of the ids
};

// Operands of one product: a matrix, columns, and the destination.
struct Matrices {
    const u8 *a, *b;
    u8 *dst;
    u64 a1, b1, d0, d1;
    u32 k, m, n;
};

// Alignment class of the rows: ALIGNED permits the widest loads, NATURAL loads of elements or blocks, BYTES only single bytes.
enum Access { ALIGNED, NATURAL, BYTES };

template <class T>
__device__ __forceinline__ Access access(u64 a, u64 b, u64 dst) {
    const u64 natural = T::LEN > 1 ? alignment_of(T::BYTES) : T::BYTES;
    if (a % natural || (b | dst) % 4) return BYTES;
    if constexpr (T::LEN > 1) return b % 16 ? BYTES : ALIGNED;
    return (a | b) % 16 ? NATURAL : ALIGNED;
}

__device__ __forceinline__ u32 load_word(const u8 *at) {
    u32 words[1];
    load_words<1>(at, words);
    return words[0];
}

// Calls f for each group of N columns of each plane that this block handles: column groups in y, planes in z, as a grid-stride
// loop.
template <int N, class F>
__device__ __forceinline__ void for_columns(const MulMatArgs &args, F f) {
#pragma unroll 1
    for (u32 plane = blockIdx.z; plane < args.planes; plane += gridDim.z) {
        const u32 i2 = plane % args.b2, i3 = plane / args.b2;
        const u8 *a = args.a + i2 / args.r2 * args.as[1] + i3 / args.r3 * args.as[2];
        const u8 *b = args.b + i2 * args.bs[1] + i3 * args.bs[2];
        u8 *dst = args.dst + i2 * args.ds[2] + i3 * args.ds[3];
#pragma unroll 1
        for (u64 c = (u64)blockIdx.y * N; c < args.n; c += (u64)gridDim.y * N) {
            const u8 *columns = b + c * args.bs[0];
            u8 *to = dst + c * args.ds[1];
            f({a, columns, to, args.as[0], args.bs[0], args.ds[0], args.ds[1], args.k, args.m, (u32)(args.n - c)});
        }
    }
}

template <class T>
__device__ __forceinline__ Access access(const MulMatArgs &args) {
    const u64 as = args.as[0] | args.as[1] | args.as[2], bs = args.bs[0] | args.bs[1] | args.bs[2];
    const u64 ds = args.ds[0] | args.ds[1] | args.ds[2] | args.ds[3];
    return access<T>((u64)args.a | as, (u64)args.b | bs, (u64)args.dst | ds);
}

// As for_columns, but for MUL_MAT_ID: calls f with the matrix of the expert for each row of b that this block handles.
template <class F>
__device__ __forceinline__ void for_slots(const MulMatIdArgs &args, F f) {
#pragma unroll 1
    for (u32 t = blockIdx.z; t < args.tokens; t += gridDim.z) {
#pragma unroll 1
        for (u32 e = blockIdx.y; e < args.used; e += gridDim.y) {
            const u32 id = load_word(args.ids + e * args.is[0] + t * args.is[1]);
            // No expert: the products of rows without elements are zeros.
            const bool none = id == 0xffffffff;
            if (id >= args.experts && !none) {
                report_bad_index(args.error_word, 30);
                continue;
            }
            const u8 *a = none ? args.a : args.a + id * args.as[1];
            const u8 *b = args.b + e % args.nb * args.bs[0] + t * args.bs[1];
            u8 *dst = args.dst + e * args.ds[1] + t * args.ds[2];
            f({a, b, dst, args.as[0], 0, args.ds[0], 0, none ? 0 : args.k, args.m, 1});
        }
    }
}

// ---- split-K

// The first of the ROWS rows of this thread in block number `block` of the matrix.
__device__ __forceinline__ u32 first_row(u32 log2_lanes, u32 block = blockIdx.x) {
    return ((block << (7 - log2_lanes)) + (threadIdx.x >> log2_lanes)) * ROWS;
}

// Sums the partial sums of each group of `lanes` threads, and calls `store` with address, sum and row of each element of the
// block's rows, for up to N columns. All threads of the block must call this function.
template <int N, class Store>
__device__ __forceinline__ void reduce(const Matrices &of, u32 log2_lanes, u32 block, float (&sums)[ROWS][N], Store store) {
    const u32 lanes = 1 << log2_lanes;
    const u32 log2_all = 7 + LOG2_ROWS - log2_lanes, groups = 1 << (7 - log2_lanes); // log2 of the rows per block; groups per block
    const u32 together = min(lanes, 32u);
#pragma unroll 1
    for (u32 offset = together / 2; offset > 0; offset /= 2) {
#pragma unroll
        for (u32 i = 0; i < ROWS * N; i++) sums[i % ROWS][i / ROWS] += __shfl_xor_sync(0xffffffff, sums[i % ROWS][i / ROWS], offset);
    }
    // Sums of up to 32 lanes, through shared memory, so that neighbouring threads store neighbouring rows (coalesced).
    __shared__ __align__(16) float parts[THREADS / 4][N][ROWS];
    if (threadIdx.x % together == 0) {
        const u32 part = threadIdx.x / together;
#pragma unroll
        for (int c = 0; c < N; c++) {
            if constexpr (ROWS == 4) *(float4 *)parts[part][c] = make_float4(sums[0][c], sums[1][c], sums[2][c], sums[3][c]);
            else *(float2 *)parts[part][c] = make_float2(sums[0][c], sums[1][c]);
        }
    }
    __syncthreads();
    const u32 all = groups * ROWS, per_group = lanes / together;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < all * N; i += THREADS) {
        const u32 c = i >> log2_all, local = i & (all - 1), r = block * all + local;
        if (r >= of.m || c >= of.n) continue;
        float sum = 0.0f;
#pragma unroll 1
        for (u32 p = 0; p < per_group; p++) sum += parts[local / ROWS * per_group + p][c][local % ROWS];
        store((float *)(of.dst + r * of.d0 + c * of.d1), sum, r);
    }
    // The next columns reuse the shared memory.
    __syncthreads();
}

// As reduce; stores the sums.
template <int N>
__device__ __forceinline__ void reduce_and_store(const Matrices &of, u32 log2_lanes, float (&sums)[ROWS][N]) {
    reduce<N>(of, log2_lanes, blockIdx.x, sums, [](float *to, float sum, u32) { *to = sum; });
}

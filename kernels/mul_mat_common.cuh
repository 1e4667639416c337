// Shared by the kernels of MUL_MAT and MUL_MAT_ID: arguments, loops over columns, planes and experts, and the reduction of the
// matrix-vector kernels.
//
// Split-K within a block: in the matrix-vector kernels, a group of `lanes` neighbouring threads shares ROWS rows of a and N
// columns, and reduces its partial sums at the end. Short rows use few lanes; long rows use up to a whole block if the grid would
// otherwise have too few bytes in flight.
#pragma once
#include "common/abi.cuh"
#include "common/quants.cuh"

// Kernels of a module per type: ENTRY(prefix, bounds) begins the definition of prefix_NAME.
#define ENTRY3(prefix, name) prefix##_##name
#define ENTRY2(prefix, name) ENTRY3(prefix, name)
#define ENTRY(prefix, ...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__) ENTRY2(prefix, NAME)

// Rows of a group of lanes over ggml's layout: 4 or 2; see LaneGroups of src/cuda/ops/mul_mat.rs.
#ifndef ROWS_PER_GROUP
#define ROWS_PER_GROUP 4
#endif
constexpr u32 THREADS = 128, GGML_LAYOUT_ROWS = ROWS_PER_GROUP;

// Binary logarithm of 2, 4 or 8.
__device__ constexpr u32 log2_of(u32 rows) { return rows == 8 ? 3 : rows / 2; }

struct MulMatArgs {
    const u8 *a, *b;
    u8 *dst;
    u32 k, m, n;          // elements per row; rows of a per plane; rows of b per plane
    u32 log2_lanes;       // 2 to 7, of packed weights 5 to 7; 8 << log2_lanes elements are a multiple of a's block
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

// Hides how a pointer into global memory was computed. Otherwise the compiler computes addresses from their parts in each step of a loop,
// or, behind a selection of pointers, uses slower accesses that decide between the memories.
template <class P>
__device__ __forceinline__ void keep(P *&pointer) {
    size_t address = __cvta_generic_to_global(pointer); // so that the compiler still knows the address space
    asm("" : "+l"(address));
    pointer = (P *)__cvta_global_to_generic(address);
}

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

// Calls f with the addresses of a, b and dst for each plane that this block handles: planes in z, as a grid-stride loop.
template <class F>
__device__ __forceinline__ void for_planes(const MulMatArgs &args, F f) {
#pragma unroll 1
    for (u32 plane = blockIdx.z; plane < args.planes; plane += gridDim.z) {
        const u8 *a = args.a, *b = args.b;
        u8 *dst = args.dst;
        if (args.planes > 1) { // decoding has one, and should not divide
            const u32 i2 = plane % args.b2, i3 = plane / args.b2;
            a += i2 / args.r2 * args.as[1] + i3 / args.r3 * args.as[2];
            b += i2 * args.bs[1] + i3 * args.bs[2];
            dst += i2 * args.ds[2] + i3 * args.ds[3];
        }
        f(a, b, dst);
    }
}

// Calls f for each group of N columns of each plane that this block handles: column groups in y, planes in z, as a grid-stride
// loop.
template <int N, class F>
__device__ __forceinline__ void for_columns(const MulMatArgs &args, F f) {
    for_planes(args, [=, &args](const u8 *a, const u8 *b, u8 *dst) {
#pragma unroll 1
        for (u64 c = (u64)blockIdx.y * N; c < args.n; c += (u64)gridDim.y * N) {
            const u8 *columns = b + c * args.bs[0];
            u8 *to = dst + c * args.ds[1];
            f({a, columns, to, args.as[0], args.bs[0], args.ds[0], args.ds[1], args.k, args.m, (u32)(args.n - c)});
        }
    });
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
template <u32 ROWS>
__device__ __forceinline__ u32 first_row(u32 log2_lanes, u32 block = blockIdx.x) {
    return ((block << (7 - log2_lanes)) + (threadIdx.x >> log2_lanes)) * ROWS;
}

// Reduce-scatter by recursive halving: in each step, a lane sends the sums of one half of its rows to the lane at a distance, by a shuffle,
// and keeps the other half; sums[0] is left. 8 rows take 4 + 2 + 1 shuffles, instead of 8 in each step.
template <u32 HALF, u32 ROWS, int N>
__device__ __forceinline__ void halve_rows(float (&sums)[ROWS][N], u32 distance) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (u32 r = 0; r < HALF; r++) {
#pragma unroll
        for (int c = 0; c < N; c++) {
            const float low = sums[r][c], high = sums[r + HALF][c];
            sums[r][c] = (upper ? high : low) + __shfl_xor_sync(0xffffffff, upper ? low : high, distance);
        }
    }
    if constexpr (HALF > 1) halve_rows<HALF / 2>(sums, distance / 2);
}

// Sums the partial sums of each group of `lanes` threads, and calls `store` with address, sum, row and slot of each element of the
// block's rows, for up to N columns. A thread gets each slot, from 0 to N - 1, once at most, and for the same element in each call. All
// threads of the block must call this function. WHOLE_WARPS: there are at least 32 lanes.
template <bool WHOLE_WARPS = false, u32 ROWS, int N, class Store>
__device__ __forceinline__ void reduce(const Matrices &of, u32 log2_lanes, u32 block, float (&sums)[ROWS][N], Store store) {
    constexpr u32 LOG2_ROWS = log2_of(ROWS);
    const u32 log2_shuffle_lanes = WHOLE_WARPS ? 5 : min(log2_lanes, 5u), shuffle_lanes = 1 << log2_shuffle_lanes;
    halve_rows<ROWS / 2>(sums, shuffle_lanes / 2);
    const u32 lanes_per_sum = shuffle_lanes >> LOG2_ROWS; // lanes with a part of the same sum
#pragma unroll
    for (u32 distance = 16 >> LOG2_ROWS; distance > 0; distance /= 2) {
#pragma unroll
        for (int c = 0; c < N; c++) {
            const float other = __shfl_xor_sync(0xffffffff, sums[0][c], distance);
            if (WHOLE_WARPS || distance < lanes_per_sum) sums[0][c] += other;
        }
    }
    const bool stores = (threadIdx.x & (lanes_per_sum - 1)) == 0;
    const u32 row = (threadIdx.x >> (log2_shuffle_lanes - LOG2_ROWS)) % ROWS, rows_before = block << (7 - log2_lanes) << LOG2_ROWS;
    if (log2_lanes <= 5) {
        const u32 r = rows_before + (threadIdx.x >> log2_lanes << LOG2_ROWS) + row;
        if (stores && r < of.m) {
#pragma unroll
            for (int c = 0; c < N; c++) {
                if (c < of.n) store((float *)(of.dst + r * of.d0 + c * of.d1), sums[0][c], r, c);
            }
        }
        __syncwarp(); // all lanes shuffle again for the next columns
        return;
    }
    // A group has two or four warps, whose parts of a sum lie side by side in shared memory.
    __shared__ float parts[N][THREADS / 32 * ROWS];
    const u32 log2_warps = log2_lanes - 5, warp = threadIdx.x / 32;
    if (stores) {
        const u32 at = (((warp >> log2_warps) * ROWS + row) << log2_warps) + (warp & ((1 << log2_warps) - 1));
#pragma unroll
        for (int c = 0; c < N; c++) parts[c][at] = sums[0][c];
    }
    __syncthreads();
    const u32 log2_rows = 7 + LOG2_ROWS - log2_lanes, c = threadIdx.x >> log2_rows; // rows of the block
    const u32 local = threadIdx.x & ((1 << log2_rows) - 1), r = rows_before + local;
    if (c < min(of.n, N) && r < of.m) {
        const float *from = &parts[c][local << log2_warps];
        float sum = from[0] + from[1];
        if (log2_warps > 1) sum += from[2] + from[3];
        store((float *)(of.dst + r * of.d0 + c * of.d1), sum, r, 0);
    }
    // The next columns reuse the shared memory.
    __syncthreads();
}

// As reduce; stores the sums.
template <u32 ROWS, int N>
__device__ __forceinline__ void reduce_and_store(const Matrices &of, u32 log2_lanes, float (&sums)[ROWS][N]) {
    reduce(of, log2_lanes, blockIdx.x, sums, [](float *to, float sum, u32, int) { *to = sum; });
}

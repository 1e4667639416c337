// Reductions: SUM of all elements; COUNT_EQUAL, the number of equal elements of two tensors; SUM_ROWS and MEAN (the sum divided by
// the length) of rows; ARGMAX (the last index of the largest value; NaN is ignored; 0 if all are NaN); and CUMSUM, the prefix sums
// of rows.
//
// Variants: reduce_sum     partial sums of F32, F16 or BF16: contiguous, in 16-byte accesses if the address permits, or of any
//                          layout, one element per thread;
//           reduce_count_equal  partial counts of equal I32, of any layout, one element per thread;
//           reduce_rows    SUM_ROWS, MEAN, ARGMAX: one row per warp (several rows per block) or per block; few long rows are
//                          split into pieces;
//           reduce_merge   merges the pieces of rows, of a SUM or of a COUNT_EQUAL;
//           reduce_cumsum  one row per warp or block, scanned piece by piece.
// Accuracy: sums are in f64; CUMSUM is in f32, in the order of a parallel scan.
// Limits:   dimensions and number of rows below 2^31; any strides and element addresses.
// Floor:    each element is read once; CUMSUM also writes each element once.
#include "common/abi.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

enum Kind : u32 { SUM = 0, MEAN = 1, ARGMAX = 2 };

// ---- SUM and COUNT_EQUAL

struct ReduceSumArgs {
    const u8 *x;
    double *parts; // partial sum of each block
    Shape xs;
    u64 n;
    u32 type;
    u32 packed;
};

// Grid-stride loop of 16-byte accesses.
template <class T>
__device__ __forceinline__ double sum_packed(const u8 *x, u64 n) {
    constexpr int WIDE = 16 / T::BYTES;
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    double sums[4] = {};
    u64 done = 0;
    if (((u64)x & 15) == 0) {
        done = n / WIDE * WIDE;
#pragma unroll 4
        for (u64 i = thread; i < n / WIDE; i += threads) {
            const uint4 four = ((const uint4 *)x)[i];
            const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if constexpr (T::BYTES == 4) {
                    sums[j] += __uint_as_float(words[j]);
                } else {
                    unsigned short low, high;
                    halves_of_word(words[j], low, high);
                    sums[j] += T::load1((const u8 *)&low, 0);
                    sums[j] += T::load1((const u8 *)&high, 0);
                }
            }
        }
    }
#pragma unroll 4
    for (u64 k = done + thread; k < n; k += threads) sums[0] += T::load1(x, k);
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

__device__ __forceinline__ double sum_any(const ReduceSumArgs &args) {
    const u64 threads = (u64)gridDim.x * blockDim.x;
    double sum = 0.0;
    for (u64 k = (u64)blockIdx.x * blockDim.x + threadIdx.x; k < args.n; k += threads) {
        const u64 row = k / args.xs.ne[0];
        u32 i1, i2, i3;
        args.xs.split((u32)row, i1, i2, i3);
        sum += load_float(args.x + args.xs.at((u32)(k - row * args.xs.ne[0]), i1, i2, i3), args.type);
    }
    return sum;
}

extern "C" __global__ void reduce_sum(ReduceSumArgs args) {
    __shared__ double parts[32];
    double sum;
    if (!args.packed) sum = sum_any(args);
    else if (args.type == TYPE_F32) sum = sum_packed<F32>(args.x, args.n);
    else if (args.type == TYPE_F16) sum = sum_packed<F16>(args.x, args.n);
    else sum = sum_packed<BF16>(args.x, args.n);
    sum = block_sum(sum, parts);
    if (threadIdx.x == 0) args.parts[blockIdx.x] = sum;
}

struct CountEqualArgs {
    const u8 *x, *y;
    double *parts; // count of each block
    Shape xs, ys;
    u64 n;
};

// Places at which two tensors of I32 are equal, of any layout.
extern "C" __global__ void reduce_count_equal(CountEqualArgs args) {
    __shared__ double parts[32];
    const u64 threads = (u64)gridDim.x * blockDim.x;
    u32 count = 0;
    for (u64 k = (u64)blockIdx.x * blockDim.x + threadIdx.x; k < args.n; k += threads) {
        const u64 row = k / args.xs.ne[0];
        const u32 i0 = (u32)(k - row * args.xs.ne[0]);
        u32 i1, i2, i3;
        args.xs.split((u32)row, i1, i2, i3);
        count += *(const u32 *)(args.x + args.xs.at(i0, i1, i2, i3)) == *(const u32 *)(args.y + args.ys.at(i0, i1, i2, i3));
    }
    const double sum = block_sum((double)count, parts);
    if (threadIdx.x == 0) args.parts[blockIdx.x] = sum;
}

// ---- rows

// Combines a value and its index into one integer that orders by value, then by index.
__device__ __forceinline__ u64 key(float value, u32 index) {
    const u32 bits = __float_as_uint(value + 0.0f); // maps -0 to 0
    return (u64)((int)bits < 0 ? ~bits : bits | 0x80000000) << 32 | index;
}

// Result of a piece of a row: a sum, or a key.
union Part {
    double sum;
    u64 best;
};

__device__ __forceinline__ Part block_part(u32 kind, Part part, Part *parts) {
    if (kind == ARGMAX) part.best = block_reduce(part.best, 0ull, &parts->best, [](u64 a, u64 b) { return a > b ? a : b; });
    else part.sum = block_sum(part.sum, &parts->sum);
    return part;
}

// Stores the result of a row. `type` is the type of y, for SUM; counts, which a double holds exactly, are I64. MEAN rounds the sum to f32 before the division.
__device__ __forceinline__ void store(u32 kind, u32 type, u8 *y, Part part, u32 n) {
    if (kind == ARGMAX) *(u32 *)y = (u32)part.best;
    else if (type == TYPE_I64) *(i64 *)y = (i64)part.sum;
    else store_float(y, type, kind == MEAN ? (float)part.sum / (float)n : (float)part.sum);
}

struct ReduceRowsArgs {
    const u8 *x;
    u8 *y;
    Part *parts; // result of each piece, if rows have several
    Shape xs, ys;
    u32 kind;
    u32 vector; // whether 16-byte accesses are possible if the address x is aligned
    u32 pieces; // pieces per row
    u32 length; // elements per piece, a multiple of 4; the last piece of a row may be shorter
};

// The sum, or the best key, of this thread's part of a piece of n elements, which starts at index `first` of its row.
template <bool VECTOR>
__device__ __forceinline__ Part piece(const u8 *x, u64 step, u32 n, u32 first, u32 kind) {
    constexpr int N = 16;
    const u32 t = threadIdx.x, team = blockDim.x;
    double sums[4] = {};
    float best = -__int_as_float(0x7f800000);
    u32 index = 0;
    for (u32 k = 0; k < n; k += N * team) {
        float v[N];
        load_kept<VECTOR>(x + k * step, step, n - k, t, team, 0.0f, v);
        if (kind != ARGMAX) {
#pragma unroll
            for (int i = 0; i < N; i++) sums[i % 4] += v[i];
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) {
                const u32 at = kept_index<VECTOR>(i, t, team);
                if (at < n - k && v[i] >= best) best = v[i], index = first + k + at;
            }
        }
    }
    Part part;
    if (kind == ARGMAX) part.best = key(best, index);
    else part.sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return part;
}

// One piece of a row per blockIdx.x and threadIdx.y. A block has several only if each is handled by one warp.
extern "C" __global__ void reduce_rows(ReduceRowsArgs args) {
    __shared__ Part parts[32];
    const Shape &xs = args.xs;
    u32 row = blockIdx.x * blockDim.y + threadIdx.y, number = 0;
    if (args.pieces > 1) row = blockIdx.x / args.pieces, number = blockIdx.x % args.pieces;
    u32 i1 = row, i2 = 0, i3 = 0;
    if (xs.ne[2] * xs.ne[3] != 1) xs.split(row, i1, i2, i3);
    if (i1 >= xs.ne[1] || i3 >= xs.ne[3]) return;
    const u32 first = number * args.length, n = min(args.length, xs.ne[0] - first);
    const u8 *x = args.x + xs.at(first, i1, i2, i3);
    Part part = args.vector && ((u64)args.x & 15) == 0 ? piece<true>(x, 4, n, first, args.kind)
                                                       : piece<false>(x, xs.nb[0], n, first, args.kind);
    part = block_part(args.kind, part, parts);
    if (threadIdx.x != 0) return;
    if (args.pieces > 1) args.parts[blockIdx.x] = part;
    else store(args.kind, TYPE_F32, args.y + args.ys.row(i1, i2, i3), part, xs.ne[0]);
}

struct ReduceMergeArgs {
    const Part *parts;
    u8 *y;
    Shape ys;
    u32 kind;
    u32 type;
    u32 pieces;
    u32 n; // elements per row
};

// One block per row.
extern "C" __global__ void reduce_merge(ReduceMergeArgs args) {
    __shared__ Part shared[32];
    const Part *parts = args.parts + (u64)blockIdx.x * args.pieces;
    Part part;
    part.best = 0; // also the bits of a sum of 0
    for (u32 i = threadIdx.x; i < args.pieces; i += blockDim.x) {
        if (args.kind == ARGMAX) part.best = max(part.best, parts[i].best);
        else part.sum += parts[i].sum;
    }
    part = block_part(args.kind, part, shared);
    u32 i1, i2, i3;
    args.ys.split(blockIdx.x, i1, i2, i3);
    if (threadIdx.x == 0) store(args.kind, args.type, args.y + args.ys.row(i1, i2, i3), part, args.n);
}

// ---- CUMSUM

struct CumsumArgs {
    const u8 *x;
    u8 *y;
    Shape xs, ys;
    u32 vector; // whether 16-byte accesses are possible if the addresses x and y are aligned
    u32 padding;
};

// -0, the neutral element of addition for all values including -0.
__device__ __forceinline__ float negative_zero() { return __uint_as_float(0x80000000); }

// Inclusive prefix sum of x over the lanes of the warp.
__device__ __forceinline__ float warp_scan(float x) {
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        const float before = __shfl_up_sync(0xffffffff, x, i);
        if (threadIdx.x % 32 >= i) x = before + x;
    }
    return x;
}

// Exclusive prefix sum of x over the threads of the team; `total` receives the sum over all. `parts` as for block_reduce.
__device__ __forceinline__ float scan_before(float x, float *parts, float &total) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float upto = warp_scan(x);
    const float left = __shfl_up_sync(0xffffffff, upto, 1);
    float before = lane == 0 ? negative_zero() : left;
    total = __shfl_sync(0xffffffff, upto, 31);
    if (blockDim.x == 32) return before;
    if (lane == 31) parts[warp] = upto;
    __syncthreads();
    const u32 warps = blockDim.x / 32;
    const float sums = warp_scan(lane < warps ? parts[lane] : negative_zero());
    total = __shfl_sync(0xffffffff, sums, warps - 1);
    const float others = __shfl_sync(0xffffffff, sums, warp == 0 ? 0 : warp - 1);
    return warp == 0 ? before : others + before;
}

template <int N>
__device__ __forceinline__ void cumsum(const u8 *x, u64 xstep, u8 *y, u64 ystep, u32 n) {
    __shared__ float parts[2][32];
    constexpr bool VECTOR = N == 4;
    const u32 t = threadIdx.x, team = blockDim.x;
    float sum = negative_zero();
    float next[N];
    load_kept<VECTOR>(x, xstep, n, t, team, 0.0f, next);
    for (u32 k = 0, turn = 0; k < n; k += N * team, turn ^= 1) {
        float v[N];
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = next[i];
        // Load the next piece while this one is scanned.
        const u64 after = (u64)k + N * team;
        if (after < n) load_kept<VECTOR>(x + after * xstep, xstep, n - (u32)after, t, team, 0.0f, next);
#pragma unroll
        for (int i = 1; i < N; i++) v[i] = v[i - 1] + v[i];
        float total;
        const float before = sum + scan_before(v[N - 1], parts[turn], total);
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = before + v[i];
        sum += total;
        store_kept<VECTOR>(y + k * ystep, ystep, n - k, t, team, v);
    }
}

// One row per blockIdx.x and threadIdx.y. A block has several rows only if each is handled by one warp.
extern "C" __global__ void __launch_bounds__(1024) reduce_cumsum(CumsumArgs args) {
    const Shape &xs = args.xs;
    const u32 row = blockIdx.x * blockDim.y + threadIdx.y;
    u32 i1 = row, i2 = 0, i3 = 0;
    if (xs.ne[2] * xs.ne[3] != 1) xs.split(row, i1, i2, i3);
    if (i1 >= xs.ne[1] || i3 >= xs.ne[3]) return;
    const u8 *x = args.x + xs.row(i1, i2, i3);
    u8 *y = args.y + args.ys.row(i1, i2, i3);
    if (args.vector && aligned(args.x, args.y, 16)) cumsum<4>(x, 4, y, 4, xs.ne[0]);
    else cumsum<1>(x, xs.nb[0], y, args.ys.nb[0], xs.ne[0]);
}

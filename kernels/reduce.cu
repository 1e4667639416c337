// Reductions: SUM of all elements, SUM_ROWS and MEAN (the sum divided by the length) of rows, ARGMAX (the last index of the
// largest value, NaN never, 0 if there is nothing else), and CUMSUM, the running sums of rows.
//
// Variants: reduce_sum     partial sums of F32, F16 or BF16: packed, in 16-byte accesses where the address allows them, or of
//                          any layout, an element a thread;
//           reduce_rows    SUM_ROWS, MEAN, ARGMAX: a row for each warp (several rows a block) or block; few long rows in pieces;
//           reduce_merge   what the pieces of rows, or of a SUM, come to;
//           reduce_cumsum  a row for each warp or block, scanned piece by piece.
// Sums in f64; CUMSUM in f32, in the order of a scan.
// Limits:   dimensions below 2^31, rows too; any strides and element addresses.
// Floor:    each element is read once; CUMSUM writes as much.
#include "common/abi.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

enum Kind : u32 { SUM = 0, MEAN = 1, ARGMAX = 2 };

// ---- SUM

struct Sum {
    const u8 *x;
    double *parts; // of each block
    Shape xs;
    u64 n;
    u32 type;
    u32 packed;
};

// The blocks take turns with pieces of blockDim.x 16-byte accesses.
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

__device__ __forceinline__ double sum_any(const Sum &args) {
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

extern "C" __global__ void reduce_sum(Sum args) {
    __shared__ double parts[32];
    double sum;
    if (!args.packed) sum = sum_any(args);
    else if (args.type == TYPE_F32) sum = sum_packed<F32>(args.x, args.n);
    else if (args.type == TYPE_F16) sum = sum_packed<F16>(args.x, args.n);
    else sum = sum_packed<BF16>(args.x, args.n);
    sum = block_sum(sum, parts);
    if (threadIdx.x == 0) args.parts[blockIdx.x] = sum;
}

// ---- rows

// A value and its index as one number: the larger value, and of equal ones the larger index, is the larger number.
__device__ __forceinline__ u64 key(float value, u32 index) {
    const u32 bits = __float_as_uint(value + 0.0f); // -0 is 0
    return (u64)((int)bits < 0 ? ~bits : bits | 0x80000000) << 32 | index;
}

// What a piece of a row comes to: a sum, or a key.
union Part {
    double sum;
    u64 best;
};

__device__ __forceinline__ Part block_part(u32 kind, Part part, Part *parts) {
    if (kind == ARGMAX) part.best = block_reduce(part.best, 0ull, &parts->best, [](u64 a, u64 b) { return a > b ? a : b; });
    else part.sum = block_sum(part.sum, &parts->sum);
    return part;
}

// A row's result. `type` is that of a SUM; MEAN rounds the sum first.
__device__ __forceinline__ void store(u32 kind, u32 type, u8 *y, Part part, u32 n) {
    if (kind == ARGMAX) *(u32 *)y = (u32)part.best;
    else store_float(y, type, kind == MEAN ? (float)part.sum / (float)n : (float)part.sum);
}

struct Rows {
    const u8 *x;
    u8 *y;
    Part *parts; // of each piece, where there are several of a row
    Shape xs, ys;
    u32 kind;
    u32 vector; // whether 16-byte accesses are possible where x itself allows them
    u32 pieces; // of a row
    u32 length; // of a piece, the last of a row may be shorter: a multiple of 4
};

// The sum, or the best key, of this thread's part of a piece of n elements; the first of them has index `first` in its row.
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

// A piece of a row for each blockIdx.x and threadIdx.y. More than one a block only if each is a warp's.
extern "C" __global__ void reduce_rows(Rows args) {
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

struct Merge {
    const Part *parts;
    u8 *y;
    Shape ys;
    u32 kind;
    u32 type;
    u32 pieces;
    u32 n; // elements of a row
};

// A block for each row.
extern "C" __global__ void reduce_merge(Merge args) {
    __shared__ Part shared[32];
    const Part *parts = args.parts + (u64)blockIdx.x * args.pieces;
    Part part;
    part.best = 0; // the bits of a sum of 0 too
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

struct Cumsum {
    const u8 *x;
    u8 *y;
    Shape xs, ys;
    u32 vector; // whether 16-byte accesses are possible where x and y themselves allow them
    u32 padding;
};

// -0, which changes nothing, -0 included.
__device__ __forceinline__ float nothing() { return __uint_as_float(0x80000000); }

// The sum of x over the team's threads up to this one.
__device__ __forceinline__ float warp_scan(float x) {
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        const float before = __shfl_up_sync(0xffffffff, x, i);
        if (threadIdx.x % 32 >= i) x = before + x;
    }
    return x;
}

// The sum of x over the team's threads before this one; `total` becomes that over all. `parts` as for block_reduce.
__device__ __forceinline__ float scan_before(float x, float *parts, float &total) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float upto = warp_scan(x);
    const float left = __shfl_up_sync(0xffffffff, upto, 1);
    float before = lane == 0 ? nothing() : left;
    total = __shfl_sync(0xffffffff, upto, 31);
    if (blockDim.x == 32) return before;
    if (lane == 31) parts[warp] = upto;
    __syncthreads();
    const u32 warps = blockDim.x / 32;
    const float sums = warp_scan(lane < warps ? parts[lane] : nothing());
    total = __shfl_sync(0xffffffff, sums, warps - 1);
    const float others = __shfl_sync(0xffffffff, sums, warp == 0 ? 0 : warp - 1);
    return warp == 0 ? before : others + before;
}

template <int N>
__device__ __forceinline__ void cumsum(const u8 *x, u64 xstep, u8 *y, u64 ystep, u32 n) {
    __shared__ float parts[2][32];
    constexpr bool VECTOR = N == 4;
    const u32 t = threadIdx.x, team = blockDim.x;
    float sum = nothing();
    float next[N];
    load_kept<VECTOR>(x, xstep, n, t, team, 0.0f, next);
    for (u32 k = 0, turn = 0; k < n; k += N * team, turn ^= 1) {
        float v[N];
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = next[i];
        // The next piece is on its way while this one is scanned.
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

// A row for each blockIdx.x and threadIdx.y. More than one a block only if each is a warp's.
extern "C" __global__ void __launch_bounds__(1024) reduce_cumsum(Cumsum args) {
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

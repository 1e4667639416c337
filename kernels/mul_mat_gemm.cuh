// GEMM on tensor cores (m16n8k16, sums in f32) for products with many columns; compute capability 8.0 or later.
//
// A block computes a tile of ROWS rows of a and COLUMNS columns of b, in steps of 32 elements of k. Both matrices are staged in shared
// memory as F16 or BF16: STAGES tiles of each, which cp.async fills while the warps multiply an earlier one. A row of a staged tile has
// 64 bytes: four chunks of 16. Chunk c of row r is at position c ^ (r / 2 % 4) (XOR swizzle), so that neither the copies nor ldmatrix,
// which reads the same chunk of eight rows, have bank conflicts.
//
// Split-K: blocks in y of the grid share k if there are too few tiles for all multiprocessors. Each stores its sums in scratch memory; the
// last one adds them up in the order of k, so that results do not depend on timing.
//
// The columns of b are in scratch memory too (mul_mat_halves of mul_mat.cu): rounded to the type of the staged tiles, each with a power
// of two by which its results are multiplied.
#pragma once
#include "common/async.cuh"
#include "common/mma.cuh"
#include "common/quantize.cuh"
#include "mul_mat_common.cuh"

struct GemmArgs {
    const u8 *a, *b;
    u8 *dst;
    float4 *parts;  // sums of each block, if k is split
    u32 *counts;    // for each tile, the blocks that have stored their sums
    u32 k, m, n;    // elements per row; rows of a per plane; columns of b per plane
    u32 share;      // elements of k for each block in y: a multiple of GEMM_DEPTH, so that a block starts at a multiple of 64 bytes in a row
    u32 planes, b2; // planes of b; planes in dimension 2
    u32 r2, r3;     // planes of b per plane of a, in dimensions 2 and 3
    u64 as[3], bs[3]; // byte strides of rows and planes
    u64 ds[4];
};

constexpr u32 GEMM_ROWS = 128, GEMM_THREADS = 128; // of a tile, and of its block
constexpr u32 GEMM_DEPTH = 32, GEMM_CHUNK = 8;     // elements of k in a step, and in a chunk
constexpr u32 GEMM_ROW_BYTES = 2 * GEMM_DEPTH;

// Byte offset of a chunk in a staged tile. It stays right if a multiple of 8 rows is added; ^ 32 flips bit 1 of the chunk in a tile at a
// multiple of 64 bytes.
__device__ __forceinline__ u32 chunk_at(u32 row, u32 chunk) { return row * GEMM_ROW_BYTES + (chunk ^ (row / 2 % 4)) * 16; }

// What stages rows: `start` the next step of all rows, if `wanted`; `start_some` as many elements of this thread's chunk, and zeros; `back`
// returns by some steps, because the copies are ahead of the products. BUSY: staging needs the registers in which fragments of the
// next step would be loaded during the products.
//
// Rows of halves at multiples of 16 bytes, which cp.async copies to HEIGHT rows of a staged tile. Rows past the end read the last row again;
// their sums are not stored.
template <u32 HEIGHT, u32 THREADS>
struct AlignedHalves {
    static constexpr u32 COUNT = HEIGHT * 4 / THREADS, APART = THREADS / 4; // copies of a thread, and the rows between two of them
    static_assert(APART % 8 == 0 && HEIGHT % APART == 0, "see chunk_at");
    const u8 *next;                                                          // the first row's next element
    u32 offsets[COUNT], to;

    // Rows from `first` on, of `count`, which are `stride` bytes apart, and their elements from `k` on.
    __device__ __forceinline__ AlignedHalves(const u8 *rows, u64 stride, u32 first, u32 count, u32 k) {
        next = rows + first * stride + 2ull * k;
        const u32 row = threadIdx.x / 4, chunk = threadIdx.x % 4;
        to = chunk_at(row, chunk);
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) offsets[i] = min(row + APART * i, count - 1 - first) * (u32)stride + 16 * chunk;
    }

    static constexpr bool BUSY = false;

    // Steps for so many elements.
    static __device__ __forceinline__ int steps(u32 elements) { return (elements + GEMM_DEPTH - 1) / GEMM_DEPTH; }

    __device__ __forceinline__ void start(u32 tile, bool wanted) {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) copy_async_if(tile + to + i * APART * GEMM_ROW_BYTES, next + offsets[i], wanted);
        next += GEMM_ROW_BYTES;
    }

    __device__ __forceinline__ void back(u32 steps) { next -= steps * GEMM_ROW_BYTES; }

    __device__ __forceinline__ void start_some(u32 tile, u32 elements) {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) copy_async(tile + to + i * APART * GEMM_ROW_BYTES, next + offsets[i], 2 * elements);
        next += GEMM_ROW_BYTES;
    }
};

// As AlignedHalves, for rows at any even address: without cp.async, and slowly.
template <u32 HEIGHT, u32 THREADS>
struct UnalignedHalves {
    const u8 *next;
    u64 stride;
    u32 last, row, to;

    __device__ __forceinline__ UnalignedHalves(const u8 *rows, u64 stride, u32 first, u32 count, u32 k) : stride(stride) {
        row = threadIdx.x / 4, last = count - 1 - first;
        const u32 chunk = threadIdx.x % 4;
        next = rows + first * stride + 2ull * k + 16 * chunk;
        to = chunk_at(row, chunk);
    }

    static constexpr bool BUSY = false;

    static __device__ __forceinline__ int steps(u32 elements) { return (elements + GEMM_DEPTH - 1) / GEMM_DEPTH; }

    __device__ __forceinline__ void back(u32 steps) { next -= steps * GEMM_ROW_BYTES; }
    __device__ __forceinline__ void start(u32 tile, bool wanted) { start_some(tile, wanted ? GEMM_CHUNK : 0); }

    __device__ __forceinline__ void start_some(u32 tile, u32 elements) {
#pragma unroll 1
        for (u32 r = 0; r < HEIGHT; r += THREADS / 4) {
            const u16 *from = (const u16 *)(next + min(row + r, last) * stride);
            u32 words[GEMM_CHUNK / 2];
#pragma unroll
            for (u32 i = 0; i < GEMM_CHUNK; i += 2) {
                words[i / 2] = word_of_halves(i < elements ? from[i] : 0, i + 1 < elements ? from[i + 1] : 0);
            }
            store_shared(tile + to + r * GEMM_ROW_BYTES, words);
        }
        next += GEMM_ROW_BYTES;
    }
};

// A tile of ROWS x COLUMNS, by warps that each compute WARP_ROWS x WARP_COLUMNS. T is the type of the staged tiles.
template <class T, u32 ROWS, u32 COLUMNS, u32 WARP_ROWS, u32 WARP_COLUMNS, u32 STAGES>
struct Gemm {
    static constexpr u32 THREADS = 32 * (ROWS / WARP_ROWS) * (COLUMNS / WARP_COLUMNS);
    static constexpr u32 M = WARP_ROWS / 16, N = WARP_COLUMNS / 8; // fragments of a warp
    static constexpr u32 ROW_TILE = ROWS * GEMM_ROW_BYTES, STAGE = ROW_TILE + COLUMNS * GEMM_ROW_BYTES;
    static_assert(ROWS == GEMM_ROWS && THREADS == GEMM_THREADS && STAGE % 64 == 0 && STAGES * STAGE <= 48 << 10, "");
    using Columns = AlignedHalves<COLUMNS, THREADS>;

    struct Fragments {
        u32 a[M][4], b[N / 2][4];

        __device__ __forceinline__ void load(u32 from_a, u32 from_b) {
#pragma unroll
            for (u32 m = 0; m < M; m++) load_matrices(a[m], from_a + 16 * m * GEMM_ROW_BYTES);
#pragma unroll
            for (u32 n = 0; n < N / 2; n++) load_matrices(b[n], from_b + 16 * n * GEMM_ROW_BYTES);
        }

        __device__ __forceinline__ void multiply(float (&sums)[M][N][4]) const {
#pragma unroll
            for (u32 m = 0; m < M; m++) {
#pragma unroll
                for (u32 n = 0; n < N; n++) {
                    const u32 pair[2] = {b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]};
                    mma_halves(T(), sums[m][n], a[m], pair);
                }
            }
        }
    };

    // The first row and column of this warp in the block's tile.
    static __device__ __forceinline__ u32 warp_row() { return threadIdx.x / 32 % (ROWS / WARP_ROWS) * WARP_ROWS; }
    static __device__ __forceinline__ u32 warp_column() { return threadIdx.x / 32 / (ROWS / WARP_ROWS) * WARP_COLUMNS; }

    // Adds the products of the next `count` elements. `shared` is the address of the stages. A pass stages STAGES - 1 steps, then runs the
    // loop. Only that start copies incomplete chunks, so that a count that is no multiple of 32 takes a second pass for the last step.
    // `columns` is by value, because run_blocks repeats the products; it reads the largest scale from `rows`.
    //
    // One barrier per step is enough: a step fills the stage of the step before, whose last loads of fragments come before the barrier that
    // ends it. So these must stay before the barrier, and `start` after it. Each step ends a group of copies, also an empty one, because
    // wait_for_copies counts groups.
    template <class Rows>
    static __device__ __forceinline__ void add_products(Rows &rows, Columns columns, u32 shared, u32 count, float (&sums)[M][N][4]) {
        const u32 lane = threadIdx.x % 32, chunk = threadIdx.x % 4 * GEMM_CHUNK, last = (STAGES - 1) * STAGE;
        const u32 a0 = shared + chunk_at(warp_row() + lane % 16, lane / 16);
        const u32 b_of_a = shared + ROW_TILE + chunk_at(warp_column() + lane % 8 + lane / 16 * 8, lane / 8 % 2) - a0;
#pragma unroll 1
        while (count > 0) {
            const u32 elements = count < GEMM_DEPTH ? count : count / GEMM_DEPTH * GEMM_DEPTH;
            count -= elements;
#pragma unroll
            for (u32 s = 0; s < STAGES - 1; s++) {
                const int inside = min(max((int)(elements - s * GEMM_DEPTH - chunk), 0), (int)GEMM_CHUNK);
                rows.start_some(shared + s * STAGE, inside);
                columns.start_some(shared + s * STAGE + ROW_TILE, inside);
                end_copies();
            }
            wait_for_copies<STAGES - 2>();
            __syncthreads();
            // The second half of a step has chunks 2 and 3: the first half's positions with bit 1 flipped.
            u32 from = a0, to = shared + last;
            Fragments first, second;
            if (!Rows::BUSY) first.load(from, from + b_of_a);
#pragma unroll 1
            for (int left = Rows::steps(elements); left > 0; left--) {
                if (Rows::BUSY) first.load(from, from + b_of_a);
                else second.load(from ^ 32, (from + b_of_a) ^ 32);
                rows.start(to, left >= (int)STAGES);
                columns.start(to + ROW_TILE, left >= (int)STAGES);
                end_copies();
                if (Rows::BUSY) second.load(from ^ 32, (from + b_of_a) ^ 32);
                first.multiply(sums);
                if (Rows::BUSY) second.multiply(sums);
                from = from == a0 + last ? a0 : from + STAGE;
                to = to == shared + last ? shared : to + STAGE;
                wait_for_copies<STAGES - 2>();
                __syncthreads();
                if (!Rows::BUSY) {
                    if (left > 1) first.load(from, from + b_of_a);
                    second.multiply(sums);
                }
            }
            rows.back(STAGES - 1);
            columns.back(STAGES - 1);
            // The next pass could write to where copies of zeros are still under way, if there were fewer steps than stages.
            wait_for_copies<0>();
        }
    }

    // The stages, which fill the 48 KiB that are the limit of static shared memory, so that there can be no other variable. After the products
    // and a barrier, with SCALED, they have numbers by which the sums of rows are multiplied; after another barrier, the word of is_last_block.
    static __device__ __forceinline__ u8 *stages() {
        __shared__ __align__(128) u8 bytes[STAGES * STAGE];
        return bytes;
    }
    static __device__ __forceinline__ float row_scale(u32 m, u32 h) {
        return ((float *)stages())[warp_row() + 16 * m + 8 * h + threadIdx.x % 32 / 4];
    }

    // Stores the number of the tile's row threadIdx.x. All threads must call this function, after a barrier that follows the products.
    static __device__ __forceinline__ void set_row_scale(float scale) {
        static_assert(THREADS == ROWS, "a thread has a row");
        ((float *)stages())[threadIdx.x] = scale;
        __syncthreads();
    }

    // Grid: x = tiles, those of the same rows one after the other, so that blocks that run at the same time share rows of a; y = shares of k;
    // z = planes.
    template <bool SCALED, class Multiply>
    static __device__ __forceinline__ void run(const GemmArgs &args, Multiply multiply) {
        const u32 tiles_of_columns = (args.n + COLUMNS - 1) / COLUMNS;
        const u32 first_row = blockIdx.x / tiles_of_columns * ROWS, first_column = blockIdx.x % tiles_of_columns * COLUMNS;
        const u8 *a = args.a, *b = args.b;
        u8 *dst = args.dst;
        if (args.planes > 1) {
            const u32 i2 = blockIdx.z % args.b2, i3 = blockIdx.z / args.b2;
            a += i2 / args.r2 * args.as[1] + i3 / args.r3 * args.as[2];
            b += i2 * args.bs[1] + i3 * args.bs[2];
            dst += i2 * args.ds[2] + i3 * args.ds[3];
        }
        const u32 begin = blockIdx.y * args.share, count = min(args.k - begin, args.share);
        float sums[M][N][4] = {};
        multiply(a, first_row, Columns(b, args.bs[0], first_column, args.n, begin), begin, count, shared_address(stages()), sums);
        // Read again: row and column would otherwise be computed before the products, and take registers.
        u32 thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        const u32 row = first_row + warp_row() + thread % 32 / 4, column = first_column + warp_column() + 2 * (thread % 4);
        // Before split-K: the shares of a row may have been multiplied by different powers of two.
        const u8 *scale_of_first = b + (args.k + 7) / 8 * 16; // after the elements of the column
        float of_rows[M][2];
#pragma unroll
        for (u32 m = 0; m < M; m++) {
#pragma unroll
            for (u32 h = 0; h < 2; h++) of_rows[m][h] = SCALED ? row_scale(m, h) : 1.0f;
        }
#pragma unroll
        for (u32 n = 0; n < N; n++) {
            const u32 next = min(column + 8 * n + 1, args.n - 1);
            const float scales[2] = {*(const float *)(scale_of_first + min(column + 8 * n, args.n - 1) * args.bs[0]),
                                     *(const float *)(scale_of_first + next * args.bs[0])};
#pragma unroll
            for (u32 m = 0; m < M; m++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    float &sum = sums[m][n][i];
                    // The smaller one first, so that a finite result does not become infinite.
                    const float of_row = of_rows[m][i / 2], of_column = scales[i % 2];
                    sum = SCALED ? fmaxf(of_row, of_column) * (fminf(of_row, of_column) * sum) : of_column * sum;
                }
            }
        }
        if (gridDim.y > 1) {
            const u32 tile = blockIdx.z * gridDim.x + blockIdx.x;
            float4 *parts = args.parts + (u64)tile * gridDim.y * (M * N * THREADS) + threadIdx.x;
            float4 *part = parts + blockIdx.y * (M * N * THREADS);
#pragma unroll
            for (u32 m = 0; m < M; m++) {
#pragma unroll
                for (u32 n = 0; n < N; n++) {
                    float(&four)[4] = sums[m][n];
                    part[(m * N + n) * THREADS] = make_float4(four[0], four[1], four[2], four[3]);
                    four[0] = four[1] = four[2] = four[3] = 0.0f;
                }
            }
            if (!is_last_block(args.counts + tile, gridDim.y, *(u32 *)stages())) return;
#pragma unroll 1
            for (u32 y = 0; y < gridDim.y; y++, parts += M * N * THREADS) {
#pragma unroll
                for (u32 m = 0; m < M; m++) {
#pragma unroll
                    for (u32 n = 0; n < N; n++) {
                        const float4 four = __ldcg(parts + (m * N + n) * THREADS); // L1 is not coherent
                        sums[m][n][0] += four.x, sums[m][n][1] += four.y, sums[m][n][2] += four.z, sums[m][n][3] += four.w;
                    }
                }
            }
        }
        u8 *to[N][2];
#pragma unroll
        for (u32 n = 0; n < N; n++) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) to[n][i] = dst + (column + 8 * n + i) * args.ds[1];
        }
#pragma unroll
        for (u32 m = 0; m < M; m++) {
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                const u32 y = row + 16 * m + 8 * h;
                if (y >= args.m) continue;
                const u64 at = y * args.ds[0];
#pragma unroll
                for (u32 n = 0; n < N; n++) {
#pragma unroll
                    for (u32 i = 0; i < 2; i++) {
                        if (column + 8 * n + i < args.n) *(float *)(to[n][i] + at) = sums[m][n][2 * h + i];
                    }
                }
            }
        }
    }

    // The product of halves.
    static __device__ __forceinline__ void run_halves(const GemmArgs &args) {
        run<false>(args, [&](const u8 *a, u32 first, const Columns &columns, u32 begin, u32 count, u32 shared, float(&sums)[M][N][4]) {
            if (((u64)a | args.as[0]) % 16 == 0) {
                AlignedHalves<ROWS, THREADS> rows(a, args.as[0], first, args.m, begin);
                add_products(rows, columns, shared, count, sums);
            } else {
                UnalignedHalves<ROWS, THREADS> rows(a, args.as[0], first, args.m, begin);
                add_products(rows, columns, shared, count, sums);
            }
        });
    }
};

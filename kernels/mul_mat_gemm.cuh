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
// MUL_MAT_ID with many tokens: a plane is a group of slots of one expert, by a table, and a tile gathers its rows of b (BlockPlace).
//
// The columns of b are in scratch memory too (mul_mat_halves of mul_mat.cu, conv_patches.cu): rounded to the type of the staged tiles, each
// with a power of two by which its results are multiplied.
#pragma once
#include "common/async.cuh"
#include "common/column_scale.cuh"
#include "common/last_block.cuh"
#include "common/mma.cuh"
#include "common/tiles.cuh"
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
    // MUL_MAT_ID with many tokens: byte offset behind b of a table of experts' columns (common/tiles.cuh); 0: none. With a table, planes are its
    // groups, of n columns each; as[1] is the distance of the experts' weights, bs[0] of rows of b, and ds[1] of slots.
    u64 table;
    u32 used, rows; // with a table: slots, and rows of b, per token
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

    // Elements from `k` on of rows that are `stride` bytes apart. Row r of the tile is number row_of(r), less than 2^32 bytes behind `rows`.
    template <class RowOf>
    __device__ __forceinline__ AlignedHalves(const u8 *rows, u64 stride, u32 k, RowOf row_of) {
        next = rows + 2ull * k;
        const u32 row = threadIdx.x / 4, chunk = threadIdx.x % 4;
        to = chunk_at(row, chunk);
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) offsets[i] = row_of(row + APART * i) * (u32)stride + 16 * chunk;
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

    // Rows of the tile after row `last` read that row again.
    __device__ __forceinline__ UnalignedHalves(const u8 *rows, u64 stride, u32 k, u32 last) : stride(stride), last(last) {
        row = threadIdx.x / 4;
        const u32 chunk = threadIdx.x % 4;
        next = rows + 2ull * k + 16 * chunk;
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

// The part of the product that a block computes. `run` makes one before and one after the products, during which the fields would take
// registers. Volatile reads of the block's index keep the compiler from merging both.
template <u32 ROWS, u32 COLUMNS>
struct BlockPlace {
    const u8 *a, *b;    // of the plane; without a table, from the tile's first row and column on
    u8 *dst;            // of the plane
    const u32 *slots;   // of the tile's columns; null without a table
    u32 row, column;    // the first ones of the tile
    bool no_group, no_expert; // with a table: the grid has more planes than there are groups; the slots have no expert

    __device__ __forceinline__ BlockPlace(const GemmArgs &args) : a(args.a), b(args.b), dst(args.dst), slots(nullptr), no_group(false), no_expert(false) {
        u32 x, plane;
        asm volatile("mov.u32 %0, %%ctaid.x; mov.u32 %1, %%ctaid.z;" : "=r"(x), "=r"(plane));
        const u32 tiles_of_columns = (args.n + COLUMNS - 1) / COLUMNS;
        row = x / tiles_of_columns * ROWS, column = x % tiles_of_columns * COLUMNS;
        if (args.table != 0) {
            const u32 *experts = (const u32 *)(b + args.table), expert = experts[plane];
            no_group = expert == NO_GROUP, no_expert = expert == NO_EXPERT;
            if (expert < NO_EXPERT) a += expert * args.as[1];
            slots = experts + args.planes + plane * COLUMNS;
        } else {
            if (args.planes > 1) {
                const u32 i2 = plane % args.b2, i3 = plane / args.b2;
                a += i2 / args.r2 * args.as[1] + i3 / args.r3 * args.as[2];
                b += i2 * args.bs[1] + i3 * args.bs[2];
                dst += i2 * args.ds[2] + i3 * args.ds[3];
            }
            b += column * args.bs[0];
        }
        a += row * args.as[0];
    }

    // The number of the tile's column c in dst, or NO_SLOT.
    __device__ __forceinline__ u32 slot(const GemmArgs &args, u32 c) const {
        if (slots != nullptr) return slots[c];
        return column + c < args.n ? column + c : NO_SLOT;
    }

    // The row of b of the tile's column c; for a missing column, that of another one.
    __device__ __forceinline__ u32 row_of_b(const GemmArgs &args, u32 c) const {
        if (slots == nullptr) return min(c, args.n - 1 - column);
        const u32 own = slots[c], slot = own == NO_SLOT ? slots[0] : own, token = slot / args.used;
        return token * args.rows + (slot - token * args.used) % args.rows;
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

    // Values that the threads of a block exchange after the products. They overlay the stages, which may fill the 48 KiB of static shared
    // memory.
    struct Tail {
        float of_rows[ROWS];    // with SCALED: by which the sums of rows are multiplied
        float scales[COLUMNS];  // by which those of columns are multiplied
        u32 slots[COLUMNS];     // of the columns in dst
        u32 is_last;
    };
    static_assert(sizeof(Tail) <= STAGES * STAGE, "");
    static __device__ __forceinline__ u8 *stages() {
        __shared__ __align__(128) u8 bytes[STAGES * STAGE];
        return bytes;
    }

    // Grid: x = tiles, those of the same rows one after the other, so that blocks that run at the same time share rows of a; y = shares of k;
    // z = planes. `multiply` adds the products to sums; with SCALED, it returns the number by which row threadIdx.x is multiplied.
    template <bool SCALED, class Multiply>
    static __device__ __forceinline__ void run(const GemmArgs &args, Multiply multiply) {
        static_assert(COLUMNS <= THREADS && ROWS == THREADS, "a thread has a row, and a column");
        using Place = BlockPlace<ROWS, COLUMNS>;
        float sums[M][N][4] = {}, of_row;
        {
            const Place place(args);
            if (place.no_group) return;
            const u32 begin = blockIdx.y * args.share, count = place.no_expert ? 0 : min(args.k - begin, args.share);
            const Columns columns(place.b, args.bs[0], begin, [&](u32 c) { return place.row_of_b(args, c); });
            of_row = multiply(place.a, args.m - 1 - place.row, columns, begin, count, shared_address(stages()), sums);
        }
        // All threads have waited for their copies to the memory of the tail, also for those of zeros.
        __syncthreads();
        Tail &tail = *(Tail *)stages();
        u32 thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        const Place place(args);
        if (SCALED) tail.of_rows[thread] = of_row;
        if (thread < COLUMNS) {
            tail.slots[thread] = place.slot(args, thread);
            // Behind the elements of the column.
            tail.scales[thread] = *(const float *)(place.b + place.row_of_b(args, thread) * args.bs[0] + scale_at(args.k));
        }
        __syncthreads();
        const u32 row = warp_row() + thread % 32 / 4, column = warp_column() + 2 * (thread % 4); // in the tile
        // Before split-K: the shares of a row may have been multiplied by different powers of two.
        float of_rows[M][2];
#pragma unroll
        for (u32 m = 0; m < M; m++) {
#pragma unroll
            for (u32 h = 0; h < 2; h++) of_rows[m][h] = SCALED ? tail.of_rows[row + 16 * m + 8 * h] : 1.0f;
        }
#pragma unroll
        for (u32 n = 0; n < N; n++) {
            const float2 scales = *(const float2 *)(tail.scales + column + 8 * n);
#pragma unroll
            for (u32 m = 0; m < M; m++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    float &sum = sums[m][n][i];
                    // The smaller one first, so that a finite result does not become infinite.
                    const float of_row = of_rows[m][i / 2], of_column = i % 2 ? scales.y : scales.x;
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
            if (!is_last_block(args.counts + tile, gridDim.y, tail.is_last)) return;
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
        u32 missing[N];
#pragma unroll
        for (u32 n = 0; n < N; n++) {
            const uint2 slots = *(const uint2 *)(tail.slots + column + 8 * n);
            to[n][0] = place.dst + slots.x * args.ds[1], to[n][1] = place.dst + slots.y * args.ds[1];
            missing[n] = (slots.x == NO_SLOT) | (slots.y == NO_SLOT) << 1;
        }
#pragma unroll
        for (u32 m = 0; m < M; m++) {
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                const u32 y = place.row + row + 16 * m + 8 * h;
                if (y >= args.m) continue;
                const u64 at = y * args.ds[0];
#pragma unroll
                for (u32 n = 0; n < N; n++) {
#pragma unroll
                    for (u32 i = 0; i < 2; i++) {
                        if (!(missing[n] >> i & 1)) *(float *)(to[n][i] + at) = sums[m][n][2 * h + i];
                    }
                }
            }
        }
    }

    // The product of halves.
    static __device__ __forceinline__ void run_halves(const GemmArgs &args) {
        run<false>(args, [&](const u8 *a, u32 last, const Columns &columns, u32 begin, u32 count, u32 shared, float(&sums)[M][N][4]) {
            if (((u64)a | args.as[0]) % 16 == 0) {
                AlignedHalves<ROWS, THREADS> rows(a, args.as[0], begin, [=](u32 r) { return min(r, last); });
                add_products(rows, columns, shared, count, sums);
            } else {
                UnalignedHalves<ROWS, THREADS> rows(a, args.as[0], begin, last);
                add_products(rows, columns, shared, count, sums);
            }
            return 1.0f;
        });
    }
};

// Matrix-vector kernels for block types: integer dot products (dp4a) of rows in either layout with quantised activations, see
// common/quant_dot.cuh and common/quantize.cuh. Included by mul_mat.cu and mul_mat_packed.cu.
//
// A lane handles the same unit of ROWS rows at a time; neighbouring lanes handle neighbouring units, so that their loads are
// contiguous. The activations of a unit are loaded once for these rows.
#pragma once
#include "common/quant_dot.cuh"
#include "mul_mat_bytes.cuh"

// The planes of a quantised column at one block.
template <class T>
__device__ __forceinline__ ColumnBlock column_block(const u8 *column, u32 k, u32 block) {
    if constexpr (T::LEN == 256) {
        return {column + (u64)block * 256, column + k + (u64)block * 32, column + k + k / 8 + (u64)block * 4};
    } else {
        const u8 *scale = column + k + (u64)block * (T::LEN / 4);
        return {column + (u64)block * T::LEN, scale + 4, scale};
    }
}

// As dot_of_bytes, for quantised columns.
template <class T>
__device__ __noinline__ float quant_dot_of_bytes(const u8 *row, const u8 *column, u32 k) {
    float sum = 0.0f;
#pragma unroll 1
    for (u32 i = 8 * (threadIdx.x % 32); i < k; i += 256) {
        float w[8], part = 0.0f;
        u32 x[2];
        T::template decode8<1>(T::block_of(row, i), i % T::LEN, w);
        const ColumnBlock at = column_block<T>(column, k, i / T::LEN);
        load_words<8>(at.codes + i % T::LEN, x);
#pragma unroll
        for (u32 e = 0; e < 8; e++) part += w[e] * float_of_byte<128>(x[e / 4] ^ 0x80808080, e % 4);
        sum += part * at.template scale_at<T>(i % T::LEN);
    }
#pragma unroll
    for (u32 offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
    return sum;
}

// A lane's block of ROWS neighbouring rows in ggml's layout, from `row` on. Rows beyond the end are the last one again. Blocks are at
// multiples of ALIGN bytes.
template <class T, u32 ROWS = GGML_LAYOUT_ROWS, int ALIGN = T::template align<true>()>
struct RowCursor {
    enum : u32 { COUNT = ROWS };
    const u8 *rows[ROWS];

    __device__ __forceinline__ RowCursor(const Matrices &of, u32 row, u32 block) {
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) rows[r] = of.a + min(row + r, of.m - 1) * of.a1 + (u64)block * T::BYTES;
    }

    __device__ __forceinline__ RowBlock<ALIGN> at(u32 r) const { return {rows[r]}; }

    __device__ __forceinline__ void advance(u32 blocks) {
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) rows[r] += blocks * T::BYTES;
    }
};

// As RowCursor, in the packed layout: the addresses of the fields in the first row, and how far the other rows are from it.
template <class T, u32 ROWS>
struct PackedCursor {
    enum : u32 { COUNT = ROWS };
    const u8 *fields[T::Fields::COUNT];
    u32 distances[ROWS][T::Fields::COUNT];

    // Rows beyond the end are replaced by others. The first row is a multiple of ROWS, so the rows are in one group or in whole ones.
    __device__ __forceinline__ PackedCursor(const Matrices &of, u32 row, u32 block) {
        const u32 blocks = of.k / T::LEN, row_bytes = blocks * T::BYTES, log2 = log2_group_rows(row_bytes), mask = (1 << log2) - 1;
        if (row >= of.m) row = 0;
        const u32 left = of.m - row;
        const u8 *group = of.a + (u64)(row & ~mask) * row_bytes;
#pragma unroll
        for (int f = 0; f < T::Fields::COUNT; f++) {
            const u32 bytes = T::Fields::bytes(f);
            fields[f] = group + ((blocks << log2) * T::Fields::before(f) + ((row & mask) * blocks + block) * bytes);
            // In a group, the blocks of a field lie one after the other; groups are as far apart as rows.
            auto distance = [=](u32 r) { return r * (log2 < log2_of(2 * r) ? row_bytes : blocks * bytes); };
            const u32 one = distance(1), two = distance(2), four = distance(4);
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) distances[r][f] = (r & 1) * one + r / 2 % 2 * two + r / 4 * four;
        }
#pragma unroll
        for (u32 r = 1; r < ROWS; r++) {
#pragma unroll
            for (int f = 0; f < T::Fields::COUNT; f++) {
                if (r >= left) distances[r][f] = 0;
                // Hides how it was computed, as the step of quant_sums. Longer blocks have too few registers for that.
                if (T::LEN == 32) asm volatile("" : "+r"(distances[r][f]));
            }
        }
    }

    __device__ __forceinline__ PackedPointers<T> at(u32 r) const {
        PackedPointers<T> all;
#pragma unroll
        for (int f = 0; f < T::Fields::COUNT; f++) all.at[f] = fields[f] + distances[r][f];
        return all;
    }

    __device__ __forceinline__ void advance(u32 blocks) {
#pragma unroll
        for (int f = 0; f < T::Fields::COUNT; f++) fields[f] += blocks * T::Fields::bytes(f);
    }
};

// Computes the partial sums of this thread's rows in a block of rows of the matrix, for up to N columns.
template <class T, class Cursor, class Dot = QuantDot<T>, u32 ROWS, int N>
__device__ __forceinline__ void quant_sums(const Matrices &of, u32 log2_lanes, u32 block_of_rows, float (&sums)[ROWS][N]) {
    using Weights = typename Dot::Weights;
    constexpr u32 UNITS = T::LEN / Dot::UNIT;
    static_assert(UNITS <= (T::LEN > 32 ? 32 : 4), "the fewest lanes of src/cuda/ops/mul_mat.rs do not cover a block");
    // A step covers whole blocks, so that a lane's unit within its block is constant.
    const u32 lanes = 1 << log2_lanes, lane = threadIdx.x & (lanes - 1), blocks = of.k / T::LEN;
    u32 step = lanes / UNITS;
    asm volatile("" : "+r"(step)); // hides how it was computed; otherwise the compiler computes it again in each step
    const Unit unit = {(int)(lane % UNITS), (log2_lanes + lane) >> 16};
    Cursor rows(of, first_row<ROWS>(log2_lanes, block_of_rows), lane / UNITS);
    // Eight addresses would cost registers that are then spilled.
    u32 distances[N];
    const u8 *first = of.b;
    keep(first);
#pragma unroll
    for (u32 c = 0; c < N; c++) distances[c] = min(c, of.n - 1) * (u32)of.b1;
#pragma unroll 1
    for (u32 block = lane / UNITS; block < blocks; block += step) {
        auto multiply = [&](const Weights(&weights)[ROWS]) {
#pragma unroll
            for (int c = 0; c < N; c++) {
                const typename Dot::Column column(column_block<T>(first + distances[c], of.k, block), unit);
#pragma unroll
                for (u32 r = 0; r < ROWS; r++) Dot::add(weights[r], column, sums[r][c]);
            }
        };
        auto weights = [&](u32 r) { return Weights(rows.at(r), unit); };
        if constexpr (ROWS == 8) {
            multiply({weights(0), weights(1), weights(2), weights(3), weights(4), weights(5), weights(6), weights(7)});
        } else if constexpr (ROWS == 4) {
            multiply({weights(0), weights(1), weights(2), weights(3)});
        } else {
            multiply({weights(0), weights(1)});
        }
        rows.advance(step);
    }
}

// Computes the block's rows for up to N columns. All threads of the block must call this function.
template <class T, int N, class Cursor, class Dot = QuantDot<T>>
__device__ __forceinline__ void quant_multiply(const Matrices &of, u32 log2_lanes) {
    float sums[Cursor::COUNT][N] = {};
    quant_sums<T, Cursor, Dot>(of, log2_lanes, blockIdx.x, sums);
    reduce_and_store(of, log2_lanes, sums);
}

// Whether the rows of a and the elements of dst are at their natural alignment, so that no access must be split into bytes.
template <class T>
__device__ __forceinline__ bool aligned_rows(u64 a, u64 dst) {
    return a % alignment_of(T::BYTES) == 0 && dst % 4 == 0;
}

// Grid: x = groups of 128 / lanes * GGML_LAYOUT_ROWS rows, y = groups of N columns, z = planes.
template <class T, int N>
__device__ __forceinline__ void quant_mat_vec(const MulMatArgs &args) {
    const u64 as = args.as[0] | args.as[1] | args.as[2], ds = args.ds[0] | args.ds[1] | args.ds[2] | args.ds[3];
    const u32 log2_lanes = args.log2_lanes, rows = THREADS * GGML_LAYOUT_ROWS >> log2_lanes;
    if (aligned_rows<T>((u64)args.a | as, (u64)args.dst | ds)) {
        for_columns<N>(args, [=](const Matrices &of) { quant_multiply<T, N, RowCursor<T>>(of, log2_lanes); });
    } else {
        for_columns<N>(args, [=](const Matrices &of) { products_of_bytes(of, rows, N, quant_dot_of_bytes<T>); });
    }
}

// Grid: x = groups of rows as above, y = used experts, z = tokens.
template <class T>
__device__ __forceinline__ void quant_routed(const MulMatIdArgs &args) {
    const u64 as = args.as[0] | args.as[1], ds = args.ds[0] | args.ds[1] | args.ds[2];
    const u32 log2_lanes = args.log2_lanes, rows = THREADS * GGML_LAYOUT_ROWS >> log2_lanes;
    if (aligned_rows<T>((u64)args.a | as, (u64)args.dst | ds)) {
        for_slots(args, [=](const Matrices &of) { quant_multiply<T, 1, RowCursor<T>>(of, log2_lanes); });
    } else {
        for_slots(args, [=](const Matrices &of) { products_of_bytes(of, rows, 1, quant_dot_of_bytes<T>); });
    }
}

// MUL_MAT, MUL_MAT_ID and GET_ROWS of packed weights: the kernels of mul_mat.cu and copy_from_blocks.cu with the same results,
// over the packed layout (common/quants.cuh). mul_mat_pack converts weights to it and back. One module per
// block type of a: TYPE is its struct, NAME its part of the entries' names. A second module has the variants for GPUs without the
// instructions of mul_mat_mma.cu (WIDE).
//
// Fusion, for up to two columns: up to three products of the same columns in one grid, each with the addition of a vector to its
// columns; two products and the SWIGLU of their results: each block computes both products of its rows, one after the other, and the
// last block of a piece of rows quantises it.
//
// Variants: mul_mat_packed_vec1, _vec2, mul_mat_packed_id: see mul_mat_dot.cuh;
//           mul_mat_packed_vec4, _vec8 (WIDE): the same without fusion;
//           mul_mat_packed_rows: GET_ROWS.
// Limits:   a starts at a multiple of 16 bytes, and so do its planes; its rows are dense; a plane has whole groups of rows, of
//           which four have fewer than 2^32 bytes. dst is at a multiple of 4 bytes.
// Floor:    a is read once per 8 columns, b once per 4 rows of a.
#include "common/copy_blocks.cuh"
#include "common/math.cuh"
#include "common/quantize.cuh"
#include "mul_mat_dot.cuh"

#define ENTRY3(prefix, name) prefix##_##name
#define ENTRY2(prefix, name) ENTRY3(prefix, name)
#define ENTRY(prefix, ...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__) ENTRY2(prefix, NAME)

#ifdef WIDE
// Grid: x = groups of 512 / lanes rows, y = groups of N columns, z = planes.
template <int N>
__device__ __forceinline__ void wide_mat_vec(const MulMatArgs &args) {
    const u32 log2_lanes = args.log2_lanes;
    for_columns<N>(args, [=](const Matrices &of) { quant_multiply<TYPE, N, PackedCursor<TYPE>>(of, log2_lanes); });
}

ENTRY(mul_mat_packed_vec4, 128, 1)(MulMatArgs args) { wide_mat_vec<4>(args); }
ENTRY(mul_mat_packed_vec8, 128, 1)(MulMatArgs args) { wide_mat_vec<8>(args); }
#else
// Another product of the grid: its first block in x, and its rows.
struct GridProduct {
    u32 first, m;
};

// Where a gated product also writes its result as quantised columns, for the product that follows; null if it does not.
struct QuantizedResult {
    u8 *columns;
    u32 *counters; // zeros, also afterwards: one for each piece of rows of each column of blocks
    u64 stride;    // bytes from one quantised column to the next
};

// As MulMatArgs. With more products, there is one plane, and the results are dense.
struct PackedVecArgs {
    const u8 *a, *b;
    u8 *dst;
    const u8 *more_a[2];
    u8 *more_dst[2];
    const float *biases[3]; // added to the columns of the results, by product; null: nothing is added
    QuantizedResult quantized; // of the dense result of a gated product
    u32 k, m, n;
    u32 log2_lanes; // at least 5 if `gated`
    u32 planes, b2;
    u32 r2, r3;
    u64 as[3], bs[3];
    u64 ds[4];
    GridProduct more[2]; // `first` is beyond the grid where there is no such product
    u32 gated;      // whether dst is the SWIGLU of the products of a and of more_a[0]
    u32 padding;
};

// As quant_multiply, for packed weights. If `gated`, the result is the SWIGLU of two products: silu(a b) (up b). Otherwise `bias` is
// added to each column, unless it is null.
template <int N>
__device__ __forceinline__ void packed_multiply(const Matrices &of, u32 log2_lanes, u32 block, bool gated, const u8 *up,
                                                const float *bias) {
    float gate = 0.0f; // with 32 or more lanes, a thread stores one element at most
#pragma unroll 1
    for (u32 pass = 0; pass <= gated; pass++) {
        Matrices product = of;
        if (pass == 1) product.a = up;
        float sums[ROWS][N] = {};
        quant_sums<TYPE, N, PackedCursor<TYPE>>(product, log2_lanes, block, sums);
        reduce<N>(product, log2_lanes, block, sums, [&](float *to, float sum, u32 row) {
            if (!gated) *to = bias == nullptr ? sum : sum + bias[row];
            else if (pass == 0) gate = sum;
            else *to = silu(gate) * sum;
        });
    }
}

// Rows of a block if each group of rows has one lane (log2).
constexpr u32 LOG2_BLOCK_ROWS = 7 + LOG2_ROWS;
static_assert(THREADS == 128, "");

// Quantises a piece of n dense results of m rows, as soon as all blocks have stored their rows of the piece: the last block does it. A
// function of its own keeps the PTX small.
__device__ __noinline__ void quantize_results(u8 *columns, u64 stride, u32 *counters, const float *results, u32 m, u32 n,
                                              u32 log2_rows) {
    constexpr bool LARGE = TYPE::LEN == 256;
    constexpr u32 PIECE = LARGE ? 256 : 128;
    const u32 piece = (blockIdx.x << log2_rows) / PIECE, first = piece * PIECE;
    const u32 blocks = ((min(m - first, PIECE) - 1) >> log2_rows) + 1;
    if (!is_last_block(counters + piece, blocks)) return;
    for (u32 c = threadIdx.x / 32; c < n; c += THREADS / 32) {
        quantize_piece<LARGE>((const u8 *)(results + (u64)c * m), columns + c * stride, m, first, threadIdx.x % 32);
    }
}

// Grid: x = groups of 512 / lanes rows of each product, y = groups of N columns, z = planes.
template <int N>
__device__ __forceinline__ void packed_mat_vec(const PackedVecArgs &args) {
    MulMatArgs product = {args.a, args.b, args.dst, args.k, args.m, args.n, args.log2_lanes, args.planes, args.b2, args.r2, args.r3,
                          {args.as[0], args.as[1], args.as[2]}, {args.bs[0], args.bs[1], args.bs[2]},
                          {args.ds[0], args.ds[1], args.ds[2], args.ds[3]}};
    u32 block = blockIdx.x;
    const float *bias = args.biases[0];
    if (block >= args.more[0].first) {
        const bool last = block >= args.more[1].first;
        product.a = last ? args.more_a[1] : args.more_a[0];
        product.dst = last ? args.more_dst[1] : args.more_dst[0];
        bias = last ? args.biases[2] : args.biases[1];
        product.m = last ? args.more[1].m : args.more[0].m;
        product.ds[1] = 4ull * product.m;
        block -= last ? args.more[1].first : args.more[0].first;
    }
    const u32 log2_lanes = args.log2_lanes;
    for_columns<N>(product, [=, &args](const Matrices &of) {
        packed_multiply<N>(of, log2_lanes, block, args.gated, args.more_a[0], bias);
    });
    if (args.quantized.columns != nullptr) {
        const QuantizedResult to = args.quantized;
        quantize_results(to.columns, to.stride, to.counters, (const float *)args.dst, args.m, args.n, LOG2_BLOCK_ROWS - log2_lanes);
    }
}

// Minimum of blocks per multiprocessor, about as many as without fusion: otherwise, ptxas would take up to 40 more registers for the same
// loop. With more blocks, some targets would spill registers; those of types with a plane of high bits (Q3_K and Q5_K) earlier.
constexpr bool HAS_HIGH_BITS = TYPE::LEN == 256 && (TYPE::BYTES == 110 || TYPE::BYTES == 176);
constexpr int BLOCKS1 = TYPE::LEN == 32 ? 6 : HAS_HIGH_BITS ? 3 : 4, BLOCKS2 = TYPE::LEN == 32 ? 4 : HAS_HIGH_BITS ? 2 : 3;

ENTRY(mul_mat_packed_vec1, 128, BLOCKS1)(PackedVecArgs args) { packed_mat_vec<1>(args); }
ENTRY(mul_mat_packed_vec2, 128, BLOCKS2)(PackedVecArgs args) { packed_mat_vec<2>(args); }

// As MulMatIdArgs, and the weights of the second product of a SWIGLU, or null.
struct PackedIdArgs {
    const u8 *a, *b;
    u8 *dst;
    const u8 *ids;
    u32 *error_word;
    const u8 *up;
    QuantizedResult quantized;
    u32 k, m, experts;
    u32 log2_lanes; // at least 5 with `up`
    u32 used, tokens, nb;
    u32 padding;
    u64 as[2], bs[2];
    u64 ds[3];
    u64 is[2];
};

// Grid: x = groups of rows as above, y = used experts, z = tokens.
ENTRY(mul_mat_packed_id, 128, BLOCKS1)(PackedIdArgs args) {
    const MulMatIdArgs product = {args.a, args.b, args.dst, args.ids, args.error_word, args.k, args.m, args.experts, args.log2_lanes,
                                  args.used, args.tokens, args.nb, 0, {args.as[0], args.as[1]}, {args.bs[0], args.bs[1]},
                                  {args.ds[0], args.ds[1], args.ds[2]}, {args.is[0], args.is[1]}};
    const u8 *gate = args.a, *up = args.up;
    const u32 log2_lanes = args.log2_lanes;
    for_slots(product, [=](const Matrices &of) {
        packed_multiply<1>(of, log2_lanes, blockIdx.x, up != nullptr, up + (of.a - gate), nullptr);
    });
    // The grid has a block for each slot.
    if (args.quantized.columns != nullptr) {
        const u32 slot = blockIdx.z * args.used + blockIdx.y, pieces = (args.m - 1) / (TYPE::LEN == 256 ? 256 : 128) + 1;
        const float *results = (const float *)args.dst + (u64)slot * args.m;
        const QuantizedResult to = args.quantized;
        quantize_results(to.columns + slot * to.stride, 0, to.counters + slot * pieces, results, args.m, 1, LOG2_BLOCK_ROWS - log2_lanes);
    }
}

// Grid: x = groups of eight elements, as copy_from_blocks.cu.
ENTRY(mul_mat_packed_rows, 1024)(CopyFromBlocksArgs args) {
    copy_from_blocks(args, [&](const Index &i, float(&values)[8]) {
        const u8 *plane = args.x + args.xs.row(0, i.i[2], i.i[3]);
        decode_block<TYPE>(packed_block<TYPE>(plane, args.xs.nb[1], i.i[1], i.i[0] / TYPE::LEN), i.i[0] % TYPE::LEN, values);
    });
}
#endif

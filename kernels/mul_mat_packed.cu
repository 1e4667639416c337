// MUL_MAT, MUL_MAT_ID and GET_ROWS of packed weights: the kernels of mul_mat.cu and copy_from_blocks.cu with the same results,
// over the packed layout (common/quants.cuh). mul_mat_pack converts weights to it and back. One module per
// block type of a: TYPE is its struct, NAME its part of the entries' names. A second module has the variants for GPUs without the
// instructions of mul_mat_mma.cu (WIDE).
//
// Fusion, for up to two columns: see mul_mat_products.cuh. For a SWIGLU, each block computes both products of its rows, one after the
// other, and the last block of a piece of rows quantises it.
//
// Variants: mul_mat_packed_vec1, _vec2, mul_mat_packed_id: see mul_mat_dot.cuh;
//           mul_mat_packed_vec4, _vec8 (WIDE): the same without fusion;
//           mul_mat_packed_rows: GET_ROWS.
// Limits:   a starts at a multiple of 16 bytes, and so do its planes; its rows are dense; a plane has whole groups of rows, of
//           which eight have fewer than 2^32 bytes. dst is at a multiple of 4 bytes.
// Floor:    a is read once per 8 columns, b once per 2 to 8 rows of a.
#include "common/copy_blocks.cuh"
#include "common/last_block.cuh"
#include "common/quantize.cuh"
#include "mul_mat_dot.cuh"
#include "mul_mat_products.cuh"

// Rows of a group of lanes, for N columns; see LaneGroups of src/cuda/ops/mul_mat.rs. With more rows, the instructions before and
// behind the loop over k, and the loads of columns, are shared by more weights; with more columns or longer blocks, there are too few
// registers.
constexpr u32 PACKED_ROWS = 4, PACKED_ROWS_ONE_COLUMN = 8, PACKED_ROWS_K_EIGHT_COLUMNS = 2;
template <int N>
__device__ constexpr u32 packed_rows() {
    if (TYPE::LEN == 32 && N == 1) return PACKED_ROWS_ONE_COLUMN;
    return TYPE::LEN == 256 && N == 8 ? PACKED_ROWS_K_EIGHT_COLUMNS : PACKED_ROWS;
}

#ifdef WIDE
// Grid: x = groups of 128 / lanes * packed_rows<N>() rows, y = groups of N columns, z = planes.
template <int N>
__device__ __forceinline__ void wide_mat_vec(const MulMatArgs &args) {
    const u32 log2_lanes = args.log2_lanes;
    for_columns<N>(args, [=](const Matrices &of) { quant_multiply<TYPE, N, PackedCursor<TYPE, packed_rows<N>()>>(of, log2_lanes); });
}

ENTRY(mul_mat_packed_vec4, 128, 1)(MulMatArgs args) { wide_mat_vec<4>(args); }
ENTRY(mul_mat_packed_vec8, 128, 1)(MulMatArgs args) { wide_mat_vec<8>(args); }
#else
// As quant_multiply, for packed weights; see store_product.
template <int N>
__device__ __forceinline__ void packed_multiply(const Matrices &of, u32 log2_lanes, u32 block, bool gated, const u8 *up,
                                                const float *bias) {
    float gate[N] = {};
#pragma unroll 1
    for (u32 pass = 0; pass <= gated; pass++) {
        Matrices product = of;
        if (pass == 1) product.a = up;
        constexpr u32 ROWS = packed_rows<N>();
        float sums[ROWS][N] = {};
        quant_sums<TYPE, PackedCursor<TYPE, ROWS>>(product, log2_lanes, block, sums);
        reduce<true>(product, log2_lanes, block, sums, [&](float *to, float sum, u32 row, int slot) {
            store_product(to, sum, row, bias, gated, pass, gate[slot]);
        });
    }
}

// Rows of a block (log2), for N columns.
template <int N>
__device__ __forceinline__ u32 log2_block_rows(u32 log2_lanes) {
    static_assert(THREADS == 128, "");
    return 7 + log2_of(packed_rows<N>()) - log2_lanes;
}

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

// Grid: x = groups of 128 / lanes * packed_rows<N>() rows of each product, z = planes. There are up to N columns.
template <int N>
__device__ __forceinline__ void packed_mat_vec(const ProductsArgs &args) {
    const BlockProduct product(args);
    const u32 log2_lanes = args.log2_lanes;
    for_planes(product.args, [&](const u8 *a, const u8 *b, u8 *dst) {
        const MulMatArgs &p = product.args;
        const Matrices of = {a, b, dst, 0, p.bs[0], p.ds[0], p.ds[1], p.k, p.m, p.n};
        packed_multiply<N>(of, log2_lanes, product.block, args.gated, args.more_a[0], product.bias);
    });
    if (args.quantized.columns != nullptr) {
        const QuantizedResult to = args.quantized;
        quantize_results(to.columns, to.stride, to.counters, (const float *)args.dst, args.m, args.n, log2_block_rows<N>(log2_lanes));
    }
}

// Minimum of blocks per multiprocessor, as many as the registers of the loop permit: otherwise, ptxas would take up to 40 more for it. With
// more blocks, some targets would spill registers; those of types with a plane of high bits (Q3_K and Q5_K) earlier.
constexpr bool HAS_HIGH_BITS = TYPE::LEN == 256 && (TYPE::BYTES == 110 || TYPE::BYTES == 176);
constexpr int BLOCKS1 = HAS_HIGH_BITS ? 3 : 4, BLOCKS2 = TYPE::LEN == 32 ? 4 : HAS_HIGH_BITS ? 2 : 3;

ENTRY(mul_mat_packed_vec1, 128, BLOCKS1)(ProductsArgs args) { packed_mat_vec<1>(args); }
ENTRY(mul_mat_packed_vec2, 128, BLOCKS2)(ProductsArgs args) { packed_mat_vec<2>(args); }

// As MulMatIdArgs, and the weights of the second product of a SWIGLU, or null.
struct PackedIdArgs {
    const u8 *a, *b;
    u8 *dst;
    const u8 *ids;
    u32 *error_word;
    const u8 *up;
    QuantizedResult quantized;
    u32 k, m, experts;
    u32 log2_lanes; // at least 5
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
        quantize_results(to.columns + slot * to.stride, 0, to.counters + slot * pieces, results, args.m, 1, log2_block_rows<1>(log2_lanes));
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

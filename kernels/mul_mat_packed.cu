// MUL_MAT, MUL_MAT_ID and GET_ROWS of packed weights: the kernels of mul_mat.cu and copy_from_blocks.cu, with the same
// arguments and results, over the packed layout (common/quants.cuh). mul_mat_pack converts weights to it and back. One module per
// block type of a: TYPE is its struct, NAME its part of the entries' names. A second module has the variants for GPUs without the
// instructions of mul_mat_mma.cu (WIDE).
//
// Variants: mul_mat_packed_vec1, _vec2, mul_mat_packed_id: see mul_mat_dot.cuh;
//           mul_mat_packed_vec4, _vec8 (WIDE): the same;
//           mul_mat_packed_rows: GET_ROWS.
// Limits:   a starts at a multiple of 16 bytes, and so do its planes; its rows are dense; a plane has whole groups of rows, of
//           which four have fewer than 2^32 bytes. dst is at a multiple of 4 bytes.
// Floor:    a is read once per 8 columns, b once per 4 rows of a.
#include "common/copy_blocks.cuh"
#include "mul_mat_dot.cuh"

#define ENTRY3(prefix, name) prefix##_##name
#define ENTRY2(prefix, name) ENTRY3(prefix, name)
#define ENTRY(prefix, ...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__) ENTRY2(prefix, NAME)

// Grid: x = groups of 512 / lanes rows, y = groups of N columns, z = planes.
template <int N>
__device__ __forceinline__ void packed_mat_vec(const MulMatArgs &args) {
    const u32 log2_lanes = args.log2_lanes;
    for_columns<N>(args, [=](const Matrices &of) { quant_multiply<TYPE, N, PackedCursor<TYPE>>(of, log2_lanes); });
}

#ifdef WIDE
ENTRY(mul_mat_packed_vec4, 128, 1)(MulMatArgs args) { packed_mat_vec<4>(args); }
ENTRY(mul_mat_packed_vec8, 128, 1)(MulMatArgs args) { packed_mat_vec<8>(args); }
#else
ENTRY(mul_mat_packed_vec1, 128, 1)(MulMatArgs args) { packed_mat_vec<1>(args); }
ENTRY(mul_mat_packed_vec2, 128, 1)(MulMatArgs args) { packed_mat_vec<2>(args); }

// Grid: x = groups of rows as above, y = used experts, z = tokens.
ENTRY(mul_mat_packed_id, 128, 1)(MulMatIdArgs args) {
    const u32 log2_lanes = args.log2_lanes;
    for_slots(args, [=](const Matrices &of) { quant_multiply<TYPE, 1, PackedCursor<TYPE>>(of, log2_lanes); });
}

// Grid: x = groups of eight elements, as copy_from_blocks.cu.
ENTRY(mul_mat_packed_rows, 1024)(CopyFromBlocksArgs args) {
    copy_from_blocks(args, [&](const Index &i, float(&values)[8]) {
        const u8 *plane = args.x + args.xs.row(0, i.i[2], i.i[3]);
        decode_block<TYPE>(packed_block<TYPE>(plane, args.xs.nb[1], i.i[1], i.i[0] / TYPE::LEN), i.i[0] % TYPE::LEN, values);
    });
}
#endif

// MUL_MAT and MUL_MAT_ID of block types that are not repacked: the vector kernels of mul_mat.cu, with the same arguments and
// results. One module per type of a: TYPE is its struct, NAME its part of the entries' names.
//
// Variants: mul_mat_vec1, mul_mat_vec4: as many columns (rows of b) per block; mul_mat_id: one row of b with the matrix of its
//           expert. See mul_mat_dot.cuh. vec1 and id call one function, so that a module contains the loop over k once.
// Limits:   blocks of a are at multiples of 2 bytes, and fast at the natural alignment of their size; elements of dst are aligned; b
//           is quantised by mul_mat_quantize.
// Floor:    a is read once per 4 columns, b once per 2 rows of a.
#define ROWS_PER_GROUP 2 // decoding takes most of the time, so sharing the activations of more rows would save little
#include "common/quant_dot_i.cuh"
#include "mul_mat_dot.cuh"

// quant_multiply for any alignment of blocks that their type permits. Blocks that are not at the natural alignment of their size are
// rare, so they share one loop for any number of columns.
template <int N>
__device__ __noinline__ void multiply_unpacked(Matrices of, u32 log2_lanes) {
    constexpr int WIDE = TYPE::align<true>(), NARROW = TYPE::align<false>();
    keep(of.a); // in global memory, which the parameters of a function do not say
    if (WIDE == NARROW || ((u64)of.a | of.a1) % WIDE == 0) {
        quant_multiply<TYPE, N, RowCursor<TYPE, GGML_LAYOUT_ROWS, WIDE>>(of, log2_lanes);
    } else if constexpr (N == 1) {
        quant_multiply<TYPE, 1, RowCursor<TYPE, GGML_LAYOUT_ROWS, NARROW>, CodesDot<TYPE, 16>>(of, log2_lanes);
    } else {
#pragma unroll 1
        for (u32 c = 0; c < min(of.n, N); c++) {
            Matrices one = of;
            one.b += c * of.b1, one.dst += c * of.d1, one.n = 1;
            multiply_unpacked<1>(one, log2_lanes);
        }
    }
}

// Grid: x = groups of 256 / lanes rows, y = groups of N columns, z = planes.
ENTRY(mul_mat_vec1, 128, 1)(MulMatArgs args) {
    for_columns<1>(args, [&](const Matrices &of) { multiply_unpacked<1>(of, args.log2_lanes); });
}
ENTRY(mul_mat_vec4, 128, 1)(MulMatArgs args) {
    for_columns<4>(args, [&](const Matrices &of) { multiply_unpacked<4>(of, args.log2_lanes); });
}

// Grid: x = groups of rows as above, y = used experts, z = tokens.
ENTRY(mul_mat_id, 128, 1)(MulMatIdArgs args) {
    for_slots(args, [&](const Matrices &of) { multiply_unpacked<1>(of, args.log2_lanes); });
}

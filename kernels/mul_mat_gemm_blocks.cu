// MUL_MAT of block types with many columns, and MUL_MAT_ID with many tokens, on tensor cores, compute capability 8.0 or later: see
// mul_mat_gemm_blocks.cuh. One module per type of a: TYPE is its struct, NAME its part of the entries' names, PACKS is defined if its weights
// are packed.
//
// Variants: mul_mat_gemm128: tiles of 128 rows and columns per block. There is none of 64 columns: for so few, types with packed weights use
//           mul_mat_mma.cu, and the others are rare.
// Limits:   packed weights, or blocks at multiples of 2 bytes; elements of dst are aligned. Rows are less than 2^25 bytes apart.
// Floor:    a is read once per 128 columns, b once per 128 rows of a.
#include "common/abi.cuh"
#include "common/quants.cuh"
#include "mul_mat_gemm_blocks.cuh"

#ifdef PACKS
using Row = PackedRow<TYPE>;
#else
using Row = PlainRow<TYPE>;
#endif
ENTRY(mul_mat_gemm128, 128, 2)(GemmArgs args) { run_blocks<TYPE, Row, Gemm<F16, 128, 128, 64, 64, 3>>(args); }

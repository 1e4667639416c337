// MUL_MAT with many columns, and MUL_MAT_ID with many tokens, on tensor cores, compute capability 8.0 or later: see mul_mat_gemm.cuh. One
// module per type of a: TYPE is its struct, NAME its part of the entries' names.
//
// Variants: mul_mat_gemm64, _gemm128: tiles of 128 rows and as many columns per block.
// Limits:   a and dst are aligned to their elements; rows of a are fast at multiples of 16 bytes. Rows and columns are less than 2^25
//           bytes apart.
// Floor:    a is read once per 64 or 128 columns, b once per 128 rows of a.
#include "common/abi.cuh"
#include "common/quants.cuh"
#include "mul_mat_gemm.cuh"

ENTRY(mul_mat_gemm64, GEMM_THREADS, 3)(GemmArgs args) { Gemm<TYPE, GEMM_ROWS, 64, 64, 32, 4>::run_halves(args); }
ENTRY(mul_mat_gemm128, GEMM_THREADS, 2)(GemmArgs args) { Gemm<TYPE, GEMM_ROWS, 128, 64, 64, 3>::run_halves(args); }

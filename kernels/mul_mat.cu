// MUL_MAT: dst[i3, i2, n, m] = sum over k of a[i3 / r3, i2 / r2, m, k] * b[i3, i2, n, k], and MUL_MAT_ID, where the plane of
// a is chosen for each row of b by a table. Products and sums are in f32, or better, of activations that are not rounded
// (but to tf32 in the tiled product). One module for each type of a: TYPE is its struct, NAME its part of the entries' names.
//
// Variants: mul_mat_vec1, _vec2, _vec4, _vec8: as many columns (rows of b) in a block, see mul_mat_vec.cuh;
//           mul_mat_id: a row of b and the matrix of its expert;
//           mul_mat_tile64, _tile128: as many rows and 64 columns in a block, on tensor cores, see mul_mat_tile.cuh;
//           mul_mat_widen: rows of b in F16 or BF16 as packed f32, for all of these (in a module without a TYPE).
// Limits:   b is F32. Rows of a and of b are dense, and may lie at any address: they are fast where blocks lie at a multiple
//           of their natural alignment, rows of elements at one of 16 bytes. An id that is no expert is refused.
// Floor:    a is read once for each 8 columns (64 in the tiled product), b once for each 4 rows of a (64 or 128).
#include "common/abi.cuh"
#include "common/quants.cuh"

#ifdef TYPE
#include "mul_mat_vec.cuh"
#define ENTRY3(prefix, name) prefix##_##name
#define ENTRY2(prefix, name) ENTRY3(prefix, name)
// Without a number of blocks, ptxas gives up registers for more of them, and spills.
#define ENTRY(prefix, threads) extern "C" __global__ void __launch_bounds__(threads, 1) ENTRY2(prefix, NAME)

#if __CUDA_ARCH__ >= 800
#include "mul_mat_tile.cuh"

ENTRY(mul_mat_tile64, 128)(Product args) { mat_tile<TYPE, 4>(args); }
ENTRY(mul_mat_tile128, 256)(Product args) { mat_tile<TYPE, 8>(args); }
#else // these are the same on all targets
ENTRY(mul_mat_vec1, 128)(Product args) { mat_vec<TYPE, 1>(args); }
ENTRY(mul_mat_vec2, 128)(Product args) { mat_vec<TYPE, 2>(args); }
ENTRY(mul_mat_vec4, 128)(Product args) { mat_vec<TYPE, 4>(args); }
ENTRY(mul_mat_vec8, 128)(Product args) { mat_vec<TYPE, 8>(args); }
ENTRY(mul_mat_id, 128)(Routed args) { routed<TYPE>(args); }
#endif

#else

struct Widen {
    const u8 *b;
    float *packed;
    Shape shape;
    u64 stride; // elements between packed rows
    u32 type, padding;
};

// Blocks: rows in x, pieces of blockDim.x elements in y.
extern "C" __global__ void mul_mat_widen(Widen args) {
    u32 i1, i2, i3;
    args.shape.split(blockIdx.x, i1, i2, i3);
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < args.shape.ne[0]; i += gridDim.y * blockDim.x) {
        const u8 *at = args.b + args.shape.at(i, i1, i2, i3);
        const u16 bits = at[0] | at[1] << 8; // at any address
        args.packed[blockIdx.x * args.stride + i] = args.type == TYPE_F16 ? float_of_half(bits) : float_of_bf16(bits);
    }
}
#endif

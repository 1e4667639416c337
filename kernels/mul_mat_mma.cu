// MUL_MAT of packed weights (common/quants.cuh) with quantised columns on tensor cores: products of 8-bit codes (m16n8k32),
// compute capability 8.0 or later. mul_mat_quantize_tiles prepares the columns. One module per block type of a: TYPE is its
// struct, NAME its part of the entries' names.
//
// Variants: mul_mat_mma1, _mma2, _mma4, and for types with blocks of 32 _mma8: as many tiles of 8 columns per block.
// Limits:   as mul_mat_packed.cu.
// Floor:    a is read once per 8 to 64 columns (32 of K types), b once per 16 rows of a.
//
// A warp computes 16 rows. The warps of a block have other rows, or other parts of k (split-K, added up in the end). Nothing is
// staged in shared memory: codes of weights are loaded by the lanes whose fragments need them, columns are stored as fragments,
// and the level-1 cache serves the warps with the same columns. Products of codes are exact in int32; f32 begins at the scale of
// the block.
#include "mul_mat_mma_k.cuh"
#include "mul_mat_mma_legacy.cuh"

constexpr u32 MMA_ROWS = 16, MMA_THREADS = 256, MMA_WARPS = MMA_THREADS / 32;

// Computes up to 128 rows and TILES times 8 columns. All threads of the block must call this function.
template <class T, int TILES>
__device__ __forceinline__ void mma_multiply(const Matrices &of, u64 step_bytes, u32 log2_split) {
    const u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const u32 split = 1 << log2_split, part = warp & (split - 1), tiles = MMA_WARPS >> log2_split;
    const u32 first = (blockIdx.x * tiles + (warp >> log2_split)) * MMA_ROWS;
    float sums[TILES][4] = {};
    if (first < of.m) MmaDot<T>::template multiply<TILES>(of, first + g, step_bytes, part, split, sums);
    // By column, with a stride that makes the stores of a warp free of bank conflicts.
    __shared__ float parts[MMA_WARPS][8 * TILES][MMA_ROWS + 4];
#pragma unroll
    for (u32 j = 0; j < TILES; j++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) parts[warp][8 * j + 2 * t + i % 2][g + i / 2 * 8] = sums[j][i];
    }
    __syncthreads();
    const u32 rows = MMA_ROWS * tiles, begin = blockIdx.x * rows;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < rows * 8 * TILES; i += MMA_THREADS) {
        const u32 row = i & (rows - 1), c = i / rows;
        if (begin + row >= of.m || c >= of.n) continue;
        float sum = 0.0f;
#pragma unroll 1
        for (u32 p = 0; p < split; p++) sum += parts[(row / MMA_ROWS << log2_split) + p][c][row % MMA_ROWS];
        *(float *)(of.dst + (begin + row) * of.d0 + c * of.d1) = sum;
    }
    // The next columns reuse the shared memory.
    __syncthreads();
}

// Grid: x = groups of 128 >> log2_lanes rows, y = groups of TILES times 8 columns, z = planes.
template <int TILES>
__device__ __forceinline__ void mma_mat_mul(const MulMatArgs &args) {
    const u32 log2_split = args.log2_lanes;
    // All columns of a plane, in whole groups.
    const u64 step_bytes = (args.n + 8ull * TILES - 1) / (8 * TILES) * TILES * MmaDot<TYPE>::TILE_BYTES;
    for_columns<8 * TILES>(args, [=](const Matrices &of) { mma_multiply<TYPE, TILES>(of, step_bytes, log2_split); });
}

#define ENTRY3(prefix, name) prefix##_##name
#define ENTRY2(prefix, name) ENTRY3(prefix, name)
#define ENTRY(prefix, ...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__) ENTRY2(prefix, NAME)

ENTRY(mul_mat_mma1, MMA_THREADS, 2)(MulMatArgs args) { mma_mat_mul<1>(args); }
ENTRY(mul_mat_mma2, MMA_THREADS, TYPE::LEN == 32 ? 2 : 1)(MulMatArgs args) { mma_mat_mul<2>(args); }
ENTRY(mul_mat_mma4, MMA_THREADS, 1)(MulMatArgs args) { mma_mat_mul<4>(args); }
// With 8 tiles, some targets would spill registers of K types.
#define K_TYPE_q2_k 1
#define K_TYPE_q3_k 1
#define K_TYPE_q4_k 1
#define K_TYPE_q5_k 1
#define K_TYPE_q6_k 1
#if !ENTRY2(K_TYPE, NAME)
ENTRY(mul_mat_mma8, MMA_THREADS, 1)(MulMatArgs args) { mma_mat_mul<8>(args); }
#endif

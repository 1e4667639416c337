// MUL_MAT of packed weights (common/quants.cuh) with quantised columns on tensor cores: products of 8-bit codes (m16n8k32),
// compute capability 8.0 or later; and MUL_MAT_ID with many tokens, by a table of the columns of each expert (moe_tiles of moe.cu).
// mul_mat_quantize_tiles prepares the columns. One module per block type of a: TYPE is its struct, NAME its part of the entries' names.
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

constexpr u32 MMA_ROWS = 16, MMA_THREADS = 256, MMA_WARPS = MMA_THREADS / 32, LOG2_BLOCK_ROWS = 7;
static_assert(MMA_ROWS * MMA_WARPS == 1 << LOG2_BLOCK_ROWS, "");

// As MulMatArgs. With a table of experts' columns (common/tiles.cuh), planes are its groups, of n columns each; as[1] is the distance of
// the experts' weights, and ds[1] of slots.
struct TiledArgs {
    MulMatArgs product;
    u64 table; // byte offset of the table behind b; 0: none
};

// The slots of the columns of a group, or null without a table. Hides the table's address from the compiler, which would otherwise keep the
// result in registers throughout the loop over k.
template <int TILES>
__device__ __forceinline__ const u32 *slots_of(const TiledArgs &args, u32 group) {
    u64 table = args.table;
    if (table == 0) return nullptr;
    asm("" : "+l"(table));
    return (const u32 *)(args.product.b + table) + args.product.planes + group * 8 * TILES;
}

// Computes up to 128 rows and TILES times 8 columns from `column` on, which are zeros if there are no weights (`none`). The destination in
// `of` is not used. All threads of the block must call this function. SMALL: there is a loop of its own
// for up to 8 columns, as the last group of an expert often has.
template <class T, int TILES, bool SMALL>
__device__ __forceinline__ void mma_multiply(const TiledArgs &args, const Matrices &of, u32 plane, bool none, u32 column,
                                             u64 step_bytes, u32 log2_split) {
    const u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const u32 split = 1 << log2_split, part = warp & (split - 1), tiles = MMA_WARPS >> log2_split;
    const u32 first = (blockIdx.x * tiles + (warp >> log2_split)) * MMA_ROWS;
    float sums[TILES][4] = {};
    if (first < of.m && !none) {
        bool one_tile = false;
        if constexpr (SMALL) {
            const u32 *slots = slots_of<TILES>(args, plane);
            one_tile = slots != nullptr ? slots[8] == NO_SLOT : of.n <= 8; // as mul_mat_quantize_tiles expects
        }
        if (SMALL && one_tile) {
            float tile[1][4] = {};
            MmaDot<T>::template multiply<1, 2>(of, first + g, step_bytes, part, split, tile);
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums[0][i] = tile[0][i];
        } else {
            MmaDot<T>::template multiply<TILES>(of, first + g, step_bytes, part, split, sums);
        }
    }
    // By column, with a stride that makes the stores of a warp free of bank conflicts.
    __shared__ float parts[MMA_WARPS][8 * TILES][MMA_ROWS + 4];
#pragma unroll
    for (u32 j = 0; j < TILES; j++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) parts[warp][8 * j + 2 * t + i % 2][g + i / 2 * 8] = sums[j][i];
    }
    __syncthreads();
    // Each thread stores columns of one row.
    const u32 *slots = slots_of<TILES>(args, plane);
    const u32 log2_rows = LOG2_BLOCK_ROWS - log2_split, row = threadIdx.x & ((1 << log2_rows) - 1);
    const u32 r = (blockIdx.x << log2_rows) + row;
    if (r < of.m) {
        u8 *to = args.product.dst + r * of.d0 + column * of.d1;
        if (args.table == 0 && args.product.planes > 1) {
            asm("" : "+r"(plane)); // as in slots_of
            to += plane % args.product.b2 * args.product.ds[2] + plane / args.product.b2 * args.product.ds[3];
        }
#pragma unroll 1
        for (u32 c = threadIdx.x >> log2_rows; c < min(of.n, 8 * TILES); c += MMA_THREADS >> log2_rows) {
            const u32 slot = slots != nullptr ? slots[c] : c;
            if (slot == NO_SLOT) continue;
            const float *from = &parts[row / MMA_ROWS << log2_split][c][row % MMA_ROWS];
            float sum = from[0];
#pragma unroll 1
            for (u32 p = 1; p < split; p++) sum += from[p * (8 * TILES * (MMA_ROWS + 4))];
            *(float *)(to + slot * of.d1) = sum;
        }
    }
    // The next columns reuse the shared memory.
    __syncthreads();
}

// Grid: x = groups of 128 >> log2_lanes rows, y = groups of TILES times 8 columns, z = planes.
template <int TILES, bool SMALL = false>
__device__ __forceinline__ void mma_mat_mul(const TiledArgs &all) {
    const MulMatArgs &args = all.product;
    const u32 log2_split = args.log2_lanes;
    // All columns of a plane, in whole groups.
    const u64 step_bytes = (args.n + 8ull * TILES - 1) / (8 * TILES) * TILES * MmaDot<TYPE>::TILE_BYTES;
#pragma unroll 1
    for (u32 plane = blockIdx.z; plane < args.planes; plane += gridDim.z) {
        const u8 *a = args.a, *b = args.b;
        bool none = false;
        if (all.table != 0) {
            const u32 expert = ((const u32 *)(b + all.table))[plane];
            if (expert == NO_GROUP) return; // nor have the groups behind it
            none = expert == NO_EXPERT;
            a += (none ? 0 : expert) * args.as[1];
            b += plane * args.bs[1];
        } else if (args.planes > 1) {
            const u32 i2 = plane % args.b2, i3 = plane / args.b2;
            a += i2 / args.r2 * args.as[1] + i3 / args.r3 * args.as[2];
            b += i2 * args.bs[1] + i3 * args.bs[2];
        }
#pragma unroll 1
        for (u64 c = (u64)blockIdx.y * 8 * TILES; c < args.n; c += (u64)gridDim.y * 8 * TILES) {
            const Matrices of = {a, b + c * args.bs[0], nullptr, args.as[0], args.bs[0], args.ds[0], args.ds[1],
                                 args.k, args.m, (u32)(args.n - c)};
            mma_multiply<TYPE, TILES, SMALL>(all, of, plane, none, (u32)c, step_bytes, log2_split);
        }
    }
}

template <class T, bool K = T::LEN == 256>
constexpr bool IS_SYMMETRIC_32 = false;
template <class T>
constexpr bool IS_SYMMETRIC_32<T, false> = !MmaScales<T>::AFFINE;

ENTRY(mul_mat_mma1, MMA_THREADS, 2)(TiledArgs args) { mma_mat_mul<1>(args); }
ENTRY(mul_mat_mma2, MMA_THREADS, TYPE::LEN == 32 ? 2 : 1)(TiledArgs args) { mma_mat_mul<2>(args); }
// Of types with minima, two blocks would spill registers.
ENTRY(mul_mat_mma4, MMA_THREADS, IS_SYMMETRIC_32<TYPE> ? 2 : 1)(TiledArgs args) { mma_mat_mul<4, true>(args); }
// With 8 tiles, some targets would spill registers of K types.
#define K_TYPE_q2_k 1
#define K_TYPE_q3_k 1
#define K_TYPE_q4_k 1
#define K_TYPE_q5_k 1
#define K_TYPE_q6_k 1
#if !ENTRY2(K_TYPE, NAME)
ENTRY(mul_mat_mma8, MMA_THREADS, 1)(TiledArgs args) { mma_mat_mul<8>(args); }
#endif

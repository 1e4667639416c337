// C = A B on tensor cores: A (m x k) and B (k x n) row-major f16, C row-major f32. A block of 128 threads makes a tile of
// 64 x 64, each warp a quarter of 32 x 32. m and n are multiples of 64, k of 32.
// gemm_mma loads tiles by ordinary copies; gemm_mma_async copies the next tile by cp.async while it works on this one.

#include <cuda_fp16.h>

#define TILE 64
#define DEPTH 32
#define A_STRIDE (DEPTH + 8)  // eight halves of padding: ldmatrix then reads its eight rows from different banks
#define B_STRIDE (TILE + 8)

__device__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ void load_matrix_x4(unsigned (&to)[4], const half* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row)));
}

__device__ void load_matrix_x2_transposed(unsigned (&to)[2], const half* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(shared_address(row)));
}

__device__ void multiply_add(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// One tile's products into a warp's 2 x 4 fragments of 16 x 8.
__device__ void multiply_tile(float (&sums)[2][4][4], const half* a, const half* b, int warp_row, int warp_column, int lane) {
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        unsigned left[2][4], right[4][2];
#pragma unroll
        for (int r = 0; r < 2; r++) load_matrix_x4(left[r], a + (warp_row + r * 16 + lane % 16) * A_STRIDE + k + lane / 16 * 8);
#pragma unroll
        for (int s = 0; s < 4; s++) load_matrix_x2_transposed(right[s], b + (k + lane % 16) * B_STRIDE + warp_column + s * 8);
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int s = 0; s < 4; s++) multiply_add(sums[r][s], left[r], right[s]);
    }
}

__device__ void store_tile(float* c, const float (&sums)[2][4][4], int row, int column, int n, int lane) {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int s = 0; s < 4; s++) {
            float* to = c + (size_t)(row + r * 16 + lane / 4) * n + column + s * 8 + lane % 4 * 2;
            *(float2*)to = make_float2(sums[r][s][0], sums[r][s][1]);
            *(float2*)(to + 8 * (size_t)n) = make_float2(sums[r][s][2], sums[r][s][3]);
        }
}

extern "C" __global__ void __launch_bounds__(128) gemm_mma(const half* a, const half* b, float* c, int m, int n, int k) {
    __shared__ __align__(16) half a_tile[TILE * A_STRIDE], b_tile[DEPTH * B_STRIDE];
    int t = threadIdx.x, lane = t % 32, warp_row = t / 64 * 32, warp_column = t / 32 % 2 * 32;
    int row = blockIdx.y * TILE, column = blockIdx.x * TILE;
    float sums[2][4][4] = {};
    for (int from = 0; from < k; from += DEPTH) {
#pragma unroll
        for (int chunk = t; chunk < 256; chunk += 128) {
            *(uint4*)(a_tile + chunk / 4 * A_STRIDE + chunk % 4 * 8) = *(const uint4*)(a + (size_t)(row + chunk / 4) * k + from + chunk % 4 * 8);
            *(uint4*)(b_tile + chunk / 8 * B_STRIDE + chunk % 8 * 8) = *(const uint4*)(b + (size_t)(from + chunk / 8) * n + column + chunk % 8 * 8);
        }
        __syncthreads();
        multiply_tile(sums, a_tile, b_tile, warp_row, warp_column, lane);
        __syncthreads();
    }
    store_tile(c, sums, row + warp_row, column + warp_column, n, lane);
}

#if __CUDA_ARCH__ >= 800
__device__ void copy_async_16(half* to, const half* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(__cvta_generic_to_global(from)) : "memory");
}

__device__ void copy_tiles_async(half* a_tile, half* b_tile, const half* a, const half* b, int n, int k, int t) {
#pragma unroll
    for (int chunk = t; chunk < 256; chunk += 128) {
        copy_async_16(a_tile + chunk / 4 * A_STRIDE + chunk % 4 * 8, a + (size_t)(chunk / 4) * k + chunk % 4 * 8);
        copy_async_16(b_tile + chunk / 8 * B_STRIDE + chunk % 8 * 8, b + (size_t)(chunk / 8) * n + chunk % 8 * 8);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(128) gemm_mma_async(const half* a, const half* b, float* c, int m, int n, int k) {
    __shared__ __align__(16) half a_tile[2][TILE * A_STRIDE], b_tile[2][DEPTH * B_STRIDE];
    int t = threadIdx.x, lane = t % 32, warp_row = t / 64 * 32, warp_column = t / 32 % 2 * 32;
    int row = blockIdx.y * TILE, column = blockIdx.x * TILE;
    a += (size_t)row * k;
    b += column;
    float sums[2][4][4] = {};
    copy_tiles_async(a_tile[0], b_tile[0], a, b, n, k, t);
    int stage = 0;
    for (int from = 0; from < k; from += DEPTH, stage ^= 1) {
        if (from + DEPTH < k) {
            copy_tiles_async(a_tile[stage ^ 1], b_tile[stage ^ 1], a + from + DEPTH, b + (size_t)(from + DEPTH) * n, n, k, t);
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        } else {
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        }
        __syncthreads();
        multiply_tile(sums, a_tile[stage], b_tile[stage], warp_row, warp_column, lane);
        __syncthreads();
    }
    store_tile(c, sums, row + warp_row, column + warp_column, n, lane);
}
#endif

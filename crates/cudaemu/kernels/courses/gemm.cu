// C = A B for row-major f32 matrices, A of m x k and B of k x n.

// One thread per element, straight from global memory.
extern "C" __global__ void gemm_naive(const float* a, const float* b, float* c, int m, int n, int k) {
    int row = blockIdx.y * blockDim.y + threadIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= m || column >= n) return;
    float sum = 0;
    for (int i = 0; i < k; i++) sum += a[row * k + i] * b[i * n + column];
    c[row * n + column] = sum;
}

// Tiles of 16 x 16 in shared memory; 16 x 16 threads; any sizes.
extern "C" __global__ void gemm_tiled(const float* a, const float* b, float* c, int m, int n, int k) {
    __shared__ float a_tile[16][16], b_tile[16][16];
    int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 16 + y, column = blockIdx.x * 16 + x;
    float sum = 0;
    for (int from = 0; from < k; from += 16) {
        a_tile[y][x] = row < m && from + x < k ? a[row * k + from + x] : 0.0f;
        b_tile[y][x] = from + y < k && column < n ? b[(from + y) * n + column] : 0.0f;
        __syncthreads();
        for (int i = 0; i < 16; i++) sum += a_tile[y][i] * b_tile[i][x];
        __syncthreads();
    }
    if (row < m && column < n) c[row * n + column] = sum;
}

// Tiles of 64 x 64 by 256 threads, 4 x 4 elements in the registers of each, 128-bit loads. Sizes are multiples of 64 (m, n)
// and 16 (k).
extern "C" __global__ void __launch_bounds__(256) gemm_registers(const float* a, const float* b, float* c, int m, int n, int k) {
    __shared__ __align__(16) float a_tile[16][64], b_tile[16][64];
    int t = threadIdx.x, x = t % 16, y = t / 16;
    int row = blockIdx.y * 64, column = blockIdx.x * 64;
    float sum[4][4] = {};
    for (int from = 0; from < k; from += 16) {
        float4 four = *(const float4*)(a + (size_t)(row + t / 4) * k + from + t % 4 * 4);
        a_tile[t % 4 * 4 + 0][t / 4] = four.x;
        a_tile[t % 4 * 4 + 1][t / 4] = four.y;
        a_tile[t % 4 * 4 + 2][t / 4] = four.z;
        a_tile[t % 4 * 4 + 3][t / 4] = four.w;
        *(float4*)&b_tile[y][x * 4] = *(const float4*)(b + (size_t)(from + y) * n + column + x * 4);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float4 left = *(float4*)&a_tile[i][y * 4], right = *(float4*)&b_tile[i][x * 4];
            float lefts[4] = {left.x, left.y, left.z, left.w}, rights[4] = {right.x, right.y, right.z, right.w};
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int s = 0; s < 4; s++) sum[r][s] = fmaf(lefts[r], rights[s], sum[r][s]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float4 four = make_float4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
        *(float4*)(c + (size_t)(row + y * 4 + r) * n + column + x * 4) = four;
    }
}

// Convolutions: neighbours within a radius, weighted by a filter in constant memory. Outside, the input counts as 0.

#define RADIUS 3
__constant__ float filter_1d[2 * RADIUS + 1];          // filled by the host
__constant__ float filter_2d[2 * RADIUS + 1][2 * RADIUS + 1];  // filled by the host

extern "C" __global__ void convolve_1d_naive(const float* in, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = 0;
    for (int k = -RADIUS; k <= RADIUS; k++)
        if (i + k >= 0 && i + k < n) sum += filter_1d[k + RADIUS] * in[i + k];
    out[i] = sum;
}

// A tile and its halo in shared memory. 128 threads.
extern "C" __global__ void convolve_1d_tiled(const float* in, float* out, int n) {
    __shared__ float cells[128 + 2 * RADIUS];
    int t = threadIdx.x, first = blockIdx.x * 128 - RADIUS;
    for (int k = t; k < 128 + 2 * RADIUS; k += 128) cells[k] = first + k >= 0 && first + k < n ? in[first + k] : 0.0f;
    __syncthreads();
    int i = blockIdx.x * 128 + t;
    if (i >= n) return;
    float sum = 0;
#pragma unroll
    for (int k = 0; k <= 2 * RADIUS; k++) sum += filter_1d[k] * cells[t + k];
    out[i] = sum;
}

// 16 x 16 threads, a tile of 22 x 22.
extern "C" __global__ void convolve_2d_tiled(const float* in, float* out, int width, int height) {
    __shared__ float cells[16 + 2 * RADIUS][16 + 2 * RADIUS];
    int left = blockIdx.x * 16 - RADIUS, top = blockIdx.y * 16 - RADIUS;
    for (int y = threadIdx.y; y < 16 + 2 * RADIUS; y += 16)
        for (int x = threadIdx.x; x < 16 + 2 * RADIUS; x += 16) {
            bool inside = top + y >= 0 && top + y < height && left + x >= 0 && left + x < width;
            cells[y][x] = inside ? in[(top + y) * width + left + x] : 0.0f;
        }
    __syncthreads();
    int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
    if (x >= width || y >= height) return;
    float sum = 0;
    for (int dy = 0; dy <= 2 * RADIUS; dy++)
        for (int dx = 0; dx <= 2 * RADIUS; dx++) sum += filter_2d[dy][dx] * cells[threadIdx.y + dy][threadIdx.x + dx];
    out[y * width + x] = sum;
}

// One step of heat in three dimensions, marching in z with three planes in registers; 16 x 16 threads over x and y.
extern "C" __global__ void heat_3d(const float* in, float* out, int nx, int ny, int nz, float rate) {
    int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
    if (x < 1 || y < 1 || x >= nx - 1 || y >= ny - 1) return;
    size_t plane = (size_t)nx * ny, at = (size_t)y * nx + x;
    float below = in[at], here = in[at + plane];
    for (int z = 1; z < nz - 1; z++) {
        at += plane;
        float above = in[at + plane];
        float around = in[at - 1] + in[at + 1] + in[at - nx] + in[at + nx];
        out[at] = here + rate * (below + above + around - 6.0f * here);
        below = here;
        here = above;
    }
}

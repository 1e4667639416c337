// Counts of each byte value in n bytes; `counts` has 256 cells, which begin as 0.

extern "C" __global__ void histogram_global(const unsigned char* in, unsigned* counts, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&counts[in[i]], 1);
}

// Each block counts in shared memory first.
extern "C" __global__ void histogram_shared(const unsigned char* in, unsigned* counts, int n) {
    __shared__ unsigned local[256];
    for (int k = threadIdx.x; k < 256; k += blockDim.x) local[k] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&local[in[i]], 1);
    __syncthreads();
    for (int k = threadIdx.x; k < 256; k += blockDim.x)
        if (local[k] != 0) atomicAdd(&counts[k], local[k]);
}

// Each warp counts in a copy of its own, 16 bytes per load. At most 8 warps; n is a multiple of 16.
extern "C" __global__ void histogram_per_warp(const uint4* in, unsigned* counts, int n) {
    __shared__ unsigned local[8][256];
    for (int k = threadIdx.x; k < 8 * 256; k += blockDim.x) local[k / 256][k % 256] = 0;
    __syncthreads();
    unsigned* mine = local[threadIdx.x / 32];
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n / 16; i += gridDim.x * blockDim.x) {
        uint4 words = in[i];
        unsigned each[4] = {words.x, words.y, words.z, words.w};
        for (int w = 0; w < 4; w++)
            for (int shift = 0; shift < 32; shift += 8) atomicAdd(&mine[each[w] >> shift & 255], 1);
    }
    __syncthreads();
    for (int k = threadIdx.x; k < 256; k += blockDim.x) {
        unsigned sum = 0;
        for (int w = 0; w < 8; w++) sum += local[w][k];
        if (sum != 0) atomicAdd(&counts[k], sum);
    }
}

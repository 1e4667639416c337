// Bitonic sort of a power of two of keys, ascending.

__device__ void order(unsigned& a, unsigned& b, bool ascending) {
    if ((a > b) == ascending) {
        unsigned other = a;
        a = b;
        b = other;
    }
}

// Sorts 2 * blockDim.x keys (a power of two, at most 2048) per block in shared memory; odd blocks descend where
// `alternate` is set, as the steps over several blocks need.
extern "C" __global__ void bitonic_block(unsigned* keys, int alternate) {
    __shared__ unsigned cells[2048];
    int t = threadIdx.x, n = 2 * blockDim.x;
    keys += blockIdx.x * n;
    cells[t] = keys[t];
    cells[t + n / 2] = keys[t + n / 2];
    bool up = !(alternate && blockIdx.x % 2);
    for (int size = 2; size <= n; size *= 2)
        for (int stride = size / 2; stride > 0; stride /= 2) {
            __syncthreads();
            int at = 2 * t - (t & (stride - 1));
            order(cells[at], cells[at + stride], ((at & size) == 0) == up);
        }
    __syncthreads();
    keys[t] = cells[t];
    keys[t + n / 2] = cells[t + n / 2];
}

// One step over all keys in global memory; half as many threads as keys.
extern "C" __global__ void bitonic_step(unsigned* keys, int size, int stride) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    int at = 2 * t - (t & (stride - 1));
    order(keys[at], keys[at + stride], (at & size) == 0);
}

// 32 keys per warp, in registers by shuffles.
extern "C" __global__ void bitonic_warp(unsigned* keys) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
    unsigned key = keys[i];
#pragma unroll
    for (int size = 2; size <= 32; size *= 2)
#pragma unroll
        for (int stride = size / 2; stride > 0; stride /= 2) {
            unsigned other = __shfl_xor_sync(0xffffffff, key, stride);
            bool keep_smaller = ((lane & stride) == 0) == ((lane & size) == 0);
            key = keep_smaller ? min(key, other) : max(key, other);
        }
    keys[i] = key;
}

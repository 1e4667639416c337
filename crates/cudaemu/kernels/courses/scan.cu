// Prefix sums. The block versions take blockDim.x (at most 1024) elements per block; `totals` gets each block's sum.

// Hillis and Steele: log n steps over all elements, inclusive. Dynamic shared memory: 2 * blockDim.x ints.
extern "C" __global__ void scan_hillis_steele(const int* in, int* out, int* totals) {
    extern __shared__ int cells[];
    int t = threadIdx.x, n = blockDim.x;
    int* from = cells;
    int* to = cells + n;
    from[t] = in[blockIdx.x * n + t];
    __syncthreads();
    for (int step = 1; step < n; step *= 2) {
        to[t] = t >= step ? from[t] + from[t - step] : from[t];
        __syncthreads();
        int* other = from;
        from = to;
        to = other;
    }
    out[blockIdx.x * n + t] = from[t];
    if (t == n - 1) totals[blockIdx.x] = from[t];
}

// Blelloch: up the tree and down again, exclusive, two elements per thread, a word of padding for each 32. Dynamic shared
// memory: 2 * blockDim.x + blockDim.x / 16 ints; blockDim.x is a power of two.
#define PADDED(at) ((at) + (at) / 32)
extern "C" __global__ void scan_blelloch(const int* in, int* out, int* totals) {
    extern __shared__ int cells[];
    int t = threadIdx.x, n = 2 * blockDim.x;
    in += blockIdx.x * n;
    out += blockIdx.x * n;
    cells[PADDED(t)] = in[t];
    cells[PADDED(t + n / 2)] = in[t + n / 2];
    int step = 1;
    for (int active = n / 2; active > 0; active /= 2, step *= 2) {
        __syncthreads();
        if (t < active) cells[PADDED(step * (2 * t + 2) - 1)] += cells[PADDED(step * (2 * t + 1) - 1)];
    }
    if (t == 0) {
        totals[blockIdx.x] = cells[PADDED(n - 1)];
        cells[PADDED(n - 1)] = 0;
    }
    for (int active = 1; active < n; active *= 2) {
        step /= 2;
        __syncthreads();
        if (t < active) {
            int low = PADDED(step * (2 * t + 1) - 1), high = PADDED(step * (2 * t + 2) - 1);
            int value = cells[low];
            cells[low] = cells[high];
            cells[high] += value;
        }
    }
    __syncthreads();
    out[t] = cells[PADDED(t)];
    out[t + n / 2] = cells[PADDED(t + n / 2)];
}

__device__ int warp_inclusive(int value) {
    for (int step = 1; step < 32; step *= 2) {
        int below = __shfl_up_sync(0xffffffff, value, step);
        if (threadIdx.x % 32 >= step) value += below;
    }
    return value;
}

// Shuffles within warps, then over the warps, inclusive. blockDim.x is a multiple of 32.
__device__ int block_inclusive(int value, int* warps) {
    int t = threadIdx.x;
    int sum = warp_inclusive(value);
    if (t % 32 == 31) warps[t / 32] = sum;
    __syncthreads();
    if (t < 32) warps[t] = warp_inclusive(t < blockDim.x / 32 ? warps[t] : 0);
    __syncthreads();
    return t < 32 ? sum : sum + warps[t / 32 - 1];
}
extern "C" __global__ void scan_shuffle(const int* in, int* out, int* totals) {
    __shared__ int warps[32];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int sum = block_inclusive(in[i], warps);
    out[i] = sum;
    if (threadIdx.x == blockDim.x - 1) totals[blockIdx.x] = sum;
}

// out[i] += offsets[block]: the last step of a scan in three launches.
extern "C" __global__ void scan_add_offsets(int* out, const int* offsets) {
    out[blockIdx.x * blockDim.x + threadIdx.x] += offsets[blockIdx.x];
}

// The whole scan in one launch: blocks take numbers in the order of their start, and wait for the preceding number. `state` has
// one cell per block, initially 0: bit 63 is set together with the running sum. `ticket` is initially 0.
extern "C" __global__ void scan_chained(const int* in, int* out, unsigned long long* state, unsigned* ticket, int n) {
    __shared__ int warps[32];
    __shared__ unsigned block;
    __shared__ int before;
    if (threadIdx.x == 0) block = atomicAdd(ticket, 1);
    __syncthreads();
    int i = block * blockDim.x + threadIdx.x;
    int sum = block_inclusive(i < n ? in[i] : 0, warps);
    if (threadIdx.x == blockDim.x - 1) {
        unsigned long long seen = block == 0 ? 1ull << 63 : 0;
        while (!(seen >> 63)) seen = ((volatile unsigned long long*)state)[block - 1];
        before = (int)seen;
        ((volatile unsigned long long*)state)[block] = 1ull << 63 | (unsigned)(before + sum);
    }
    __syncthreads();
    if (i < n) out[i] = before + sum;
}

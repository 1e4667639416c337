// Sums of n floats in the versions that a course goes through; each block adds its part to *out, which begins as 0.
// Launch with 256 threads, and with enough blocks that every element has a thread (half as many for first_add and later).

#define BLOCK 256

// Neighbours first: lanes diverge in every step.
extern "C" __global__ void reduce_interleaved(const float* in, float* out, int n) {
    __shared__ float cells[BLOCK];
    int t = threadIdx.x, i = blockIdx.x * BLOCK + t;
    cells[t] = i < n ? in[i] : 0.0f;
    __syncthreads();
    for (int step = 1; step < BLOCK; step *= 2) {
        if (t % (2 * step) == 0) cells[t] += cells[t + step];
        __syncthreads();
    }
    if (t == 0) atomicAdd(out, cells[0]);
}

// Whole warps stay together, but the strides conflict in the banks of shared memory.
extern "C" __global__ void reduce_bank_conflicts(const float* in, float* out, int n) {
    __shared__ float cells[BLOCK];
    int t = threadIdx.x, i = blockIdx.x * BLOCK + t;
    cells[t] = i < n ? in[i] : 0.0f;
    __syncthreads();
    for (int step = 1; step < BLOCK; step *= 2) {
        int at = 2 * step * t;
        if (at < BLOCK) cells[at] += cells[at + step];
        __syncthreads();
    }
    if (t == 0) atomicAdd(out, cells[0]);
}

// Halves: no divergence within a warp and no conflicts.
extern "C" __global__ void reduce_sequential(const float* in, float* out, int n) {
    __shared__ float cells[BLOCK];
    int t = threadIdx.x, i = blockIdx.x * BLOCK + t;
    cells[t] = i < n ? in[i] : 0.0f;
    __syncthreads();
    for (int step = BLOCK / 2; step > 0; step /= 2) {
        if (t < step) cells[t] += cells[t + step];
        __syncthreads();
    }
    if (t == 0) atomicAdd(out, cells[0]);
}

// The last warp continues without block barriers, on volatile shared memory with warp barriers.
extern "C" __global__ void reduce_first_add(const float* in, float* out, int n) {
    __shared__ float cells[BLOCK];
    int t = threadIdx.x, i = blockIdx.x * BLOCK * 2 + t;
    cells[t] = (i < n ? in[i] : 0.0f) + (i + BLOCK < n ? in[i + BLOCK] : 0.0f);
    __syncthreads();
#pragma unroll
    for (int step = BLOCK / 2; step > 32; step /= 2) {
        if (t < step) cells[t] += cells[t + step];
        __syncthreads();
    }
    if (t < 32) {
        volatile float* warp = cells;
#pragma unroll
        for (int step = 32; step > 0; step /= 2) {
            float other = warp[t + step];
            __syncwarp();
            warp[t] += other;
            __syncwarp();
        }
    }
    if (t == 0) atomicAdd(out, cells[0]);
}

// Shuffles within warps, then one warp over the warps' sums.
extern "C" __global__ void reduce_shuffle(const float* in, float* out, int n) {
    __shared__ float warps[BLOCK / 32];
    int t = threadIdx.x;
    float sum = 0;
    for (int i = blockIdx.x * BLOCK + t; i < n; i += gridDim.x * BLOCK) sum += in[i];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffff, sum, step);
    if (t % 32 == 0) warps[t / 32] = sum;
    __syncthreads();
    if (t < BLOCK / 32) {
        sum = warps[t];
        for (int step = BLOCK / 64; step > 0; step /= 2) sum += __shfl_down_sync((1u << (BLOCK / 32)) - 1, sum, step, BLOCK / 32);
        if (t == 0) atomicAdd(out, sum);
    }
}

// Four elements per load. n is a multiple of 4.
extern "C" __global__ void reduce_vector(const float4* in, float* out, int n) {
    int t = threadIdx.x;
    float sum = 0;
    for (int i = blockIdx.x * BLOCK + t; i < n / 4; i += gridDim.x * BLOCK) {
        float4 value = in[i];
        sum += (value.x + value.y) + (value.z + value.w);
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (t % 32 == 0) atomicAdd(out, sum);
}

// Index of the largest value: *best holds the value's ordered bits above the complement of its index, and starts as 0.
extern "C" __global__ void arg_max(const float* in, unsigned long long* best, int n) {
    unsigned long long largest = 0;
    for (int i = blockIdx.x * BLOCK + threadIdx.x; i < n; i += gridDim.x * BLOCK) {
        unsigned bits = __float_as_uint(in[i]);
        unsigned ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
        unsigned long long key = (unsigned long long)ordered << 32 | (unsigned)~i;
        largest = key > largest ? key : largest;
    }
    for (int step = 16; step > 0; step /= 2) {
        unsigned long long other = __shfl_xor_sync(0xffffffff, largest, step);
        largest = other > largest ? other : largest;
    }
    if (threadIdx.x % 32 == 0) atomicMax(best, largest);
}

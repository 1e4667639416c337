// Barriers of a block: plain, reducing, named, for a part of the block, arriving without waiting.

// Each phase reads what another warp wrote in the phase before.
extern "C" __global__ void rotate(const int* in, int* out, int rounds) {
    __shared__ int cells[2][256];
    int t = threadIdx.x, n = blockDim.x;
    cells[0][t] = in[blockIdx.x * n + t];
    for (int round = 0; round < rounds; round++) {
        __syncthreads();
        cells[(round + 1) & 1][t] = cells[round & 1][(t + 33) % n] + 1;
    }
    out[blockIdx.x * n + t] = cells[rounds & 1][t];
}

extern "C" __global__ void reducing_barriers(const int* in, int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int value = in[i];
    out[3 * i] = __syncthreads_count(value > 0);
    out[3 * i + 1] = __syncthreads_and(value > -5) != 0;
    out[3 * i + 2] = __syncthreads_or(value > 5) != 0;
}

// 256 threads: each half meets at a barrier of its own, 1 or 2, and all of them at 0.
extern "C" __global__ void named_halves(const int* in, int* out) {
    __shared__ int cells[256];
    int t = threadIdx.x, half = t / 128, low = t % 128;
    cells[t] = in[t];
    asm volatile("bar.sync %0, 128;" ::"r"(half + 1) : "memory");
    int value = cells[half * 128 + 127 - low];
    if (half == 0) {
        asm volatile("bar.sync 1, 128;" ::: "memory");
        cells[t] = value * 2;
    } else {
        asm volatile("barrier.sync 2, 128;" ::: "memory");
        cells[t] = value * 3;
    }
    __syncthreads();
    out[t] = cells[255 - t];
}

// Warp 0 produces, the others (96 threads) consume: the producer arrives at "full" without waiting.
extern "C" __global__ void producer_consumer(const int* in, int* out, int rounds) {
    __shared__ int cells[32];
    int t = threadIdx.x;
    int sum = 0;
    for (int round = 0; round < rounds; round++) {
        if (t < 32) {
            cells[t] = in[round * 32 + t];
            __threadfence_block();
            asm volatile("bar.arrive 1, 128;" ::: "memory");
            asm volatile("bar.sync 2, 128;" ::: "memory");
        } else {
            asm volatile("bar.sync 1, 128;" ::: "memory");
            sum += cells[(t * 5) % 32];
            asm volatile("bar.arrive 2, 128;" ::: "memory");
        }
    }
    if (t >= 32) out[t - 32] = sum;
}

// The two halves of a warp reach the barrier one after the other: allowed without .aligned.
extern "C" __global__ void unaligned_barrier(int* out) {
    __shared__ int cells[64];
    int t = threadIdx.x;
    cells[t] = t;
    if (t & 1) {
        asm volatile("barrier.sync 0;" ::: "memory");
        out[t] = cells[63 - t] * 10;
    } else {
        asm volatile("barrier.sync 0;" ::: "memory");
        out[t] = cells[63 - t] * 100;
    }
}

// Threads past n exit before the barrier, in whole warps: exited threads count as arrived.
extern "C" __global__ void early_exit(const int* in, int* out, int warps) {
    __shared__ int cells[256];
    int t = threadIdx.x;
    if (t >= warps * 32) return;
    cells[t] = in[t];
    __syncthreads();
    out[t] = cells[warps * 32 - 1 - t];
}

// The last block to finish adds up the partial sums of all blocks: a sum in one launch without a grid barrier.
__device__ unsigned finished;
extern "C" __global__ void sum_last_block(const float* in, int n, float* partial, float* out) {
    __shared__ float cells[256];
    __shared__ bool last;
    int t = threadIdx.x;
    float sum = 0;
    for (int i = blockIdx.x * blockDim.x + t; i < n; i += gridDim.x * blockDim.x) sum += in[i];
    cells[t] = sum;
    for (int step = blockDim.x / 2; step > 0; step /= 2) {
        __syncthreads();
        if (t < step) cells[t] += cells[t + step];
    }
    if (t == 0) {
        partial[blockIdx.x] = cells[0];
        __threadfence();
        last = atomicInc(&finished, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && t == 0) {
        float total = 0;
        for (int k = 0; k < gridDim.x; k++) total += ((volatile float*)partial)[k];
        out[0] = total;
    }
}

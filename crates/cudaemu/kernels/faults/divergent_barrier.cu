// Fault: the lanes of one warp reach an aligned barrier separately. 64 threads.

extern "C" __global__ void divergent_barrier_clean(const int* in, int* out) {
    __shared__ int cells[64];
    int t = threadIdx.x;
    if (t & 1) cells[t] = in[t] * 3;
    else cells[t] = in[t] + 1;
    __syncthreads();
    out[t] = cells[63 - t];
}

// A barrier in a branch that half of the lanes take.
extern "C" __global__ void barrier_in_branch_fault(const int* in, int* out) {
    __shared__ int cells[64];
    int t = threadIdx.x;
    cells[t] = in[t];
    if (t & 1) {
        cells[t] += 5;
        __syncthreads();
    }
    __syncthreads();
    out[t] = cells[63 - t];
}

// Each half has its own barrier.
extern "C" __global__ void barrier_in_both_branches_fault(const int* in, int* out) {
    __shared__ int cells[64];
    int t = threadIdx.x;
    if (t & 1) {
        cells[t] = in[t] * 3;
        __syncthreads();
        out[t] = cells[63 - t];
    } else {
        cells[t] = in[t] + 1;
        __syncthreads();
        out[t] = cells[63 - t] * 2;
    }
}

// A barrier in a loop that lanes leave at different times.
extern "C" __global__ void barrier_in_loop_fault(const int* rounds, int* out) {
    int t = threadIdx.x, sum = 0;
    for (int k = 0; k < rounds[t]; k++) {
        sum += k * t;
        __syncthreads();
    }
    __syncthreads();
    out[t] = sum;
}

// The same loop with an equal number of rounds for all lanes.
extern "C" __global__ void barrier_in_loop_clean(int rounds, int* out) {
    int t = threadIdx.x, sum = 0;
    for (int k = 0; k < rounds; k++) {
        sum += k * t;
        __syncthreads();
    }
    out[t] = sum;
}

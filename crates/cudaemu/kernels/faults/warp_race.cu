// Fault: lanes of one warp exchange data through shared memory without __syncwarp: they need not run in lockstep. 32 threads.

extern "C" __global__ void warp_race_clean(const int* in, int* out) {
    __shared__ volatile int cells[32];
    int t = threadIdx.x, value = in[t];
    for (int step = 1; step < 32; step *= 2) {
        cells[t] = value;
        __syncwarp();
        value += cells[t ^ step];
        __syncwarp();
    }
    out[t] = value;
}

extern "C" __global__ void warp_race_fault(const int* in, int* out) {
    __shared__ volatile int cells[32];
    int t = threadIdx.x, value = in[t];
    for (int step = 1; step < 32; step *= 2) {
        cells[t] = value;
        value += cells[t ^ step];
    }
    out[t] = value;
}

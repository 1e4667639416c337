// Fault: a read of shared memory that no thread of the block has written. 64 threads.

extern "C" __global__ void uninitialised_shared_clean(const int* in, int* out) {
    __shared__ int cells[65];
    cells[threadIdx.x] = in[threadIdx.x];
    if (threadIdx.x == 0) cells[64] = 0;
    __syncthreads();
    out[threadIdx.x] = cells[threadIdx.x] + cells[threadIdx.x + 1];
}

extern "C" __global__ void uninitialised_shared_fault(const int* in, int* out) {
    __shared__ int cells[65];
    cells[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = cells[threadIdx.x] + cells[threadIdx.x + 1];  // cells[64] for the last thread
}

// An atomic reads too.
extern "C" __global__ void uninitialised_shared_atomic_fault(const int* in, int* out) {
    __shared__ int cells[8];
    atomicAdd(&cells[threadIdx.x & 7], in[threadIdx.x]);
    __syncthreads();
    if (threadIdx.x < 8) out[threadIdx.x] = cells[threadIdx.x];
}

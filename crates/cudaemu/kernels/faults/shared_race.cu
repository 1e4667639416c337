// Fault: two warps access the same shared memory between barriers, and one of them writes. 256 threads.

// Clean: written, barrier, read, barrier, written again.
extern "C" __global__ void shared_race_clean(const int* in, int* out) {
    __shared__ int cells[256];
    int t = threadIdx.x;
    cells[t] = in[t];
    __syncthreads();
    int value = cells[255 - t];
    __syncthreads();
    cells[t] = value * 2;
    __syncthreads();
    out[t] = cells[(t + 64) & 255];
}

// Read after write with no barrier between.
extern "C" __global__ void read_after_write_fault(const int* in, int* out) {
    __shared__ int cells[256];
    int t = threadIdx.x;
    cells[t] = 0;
    __syncthreads();
    cells[t] = in[t];
    out[t] = cells[255 - t];
}

// The second barrier is missing: one warp overwrites what another has yet to read.
extern "C" __global__ void write_after_read_fault(const int* in, int* out) {
    __shared__ int cells[256];
    int t = threadIdx.x;
    cells[t] = in[t];
    __syncthreads();
    int value = cells[255 - t];
    cells[t] = value * 2;
    __syncthreads();
    out[t] = cells[t];
}

// Two threads write different values to one cell.
extern "C" __global__ void write_after_write_fault(const int* in, int* out) {
    __shared__ int cells[128];
    int t = threadIdx.x;
    cells[t & 127] = in[t];
    __syncthreads();
    out[t] = cells[t & 127];
}

// An atomic and a plain write; atomics alone do not race.
extern "C" __global__ void atomic_race_fault(const int* in, int* out) {
    __shared__ int sum;
    int t = threadIdx.x;
    if (t == 0) sum = 0;
    __syncthreads();
    if (t == 0) sum = in[0];
    else atomicAdd(&sum, in[t]);
    __syncthreads();
    if (t == 0) *out = sum;
}
extern "C" __global__ void atomic_race_clean(const int* in, int* out) {
    __shared__ int sum;
    int t = threadIdx.x;
    if (t == 0) sum = 0;
    __syncthreads();
    atomicAdd(&sum, in[t]);
    __syncthreads();
    if (t == 0) *out = sum;
}

// Bytes of one word by different threads do not race.
extern "C" __global__ void neighbouring_bytes_clean(const unsigned char* in, unsigned char* out) {
    __shared__ unsigned char cells[256];
    int t = threadIdx.x;
    cells[t ^ 3] = in[t];
    __syncthreads();
    out[t] = cells[t];
}

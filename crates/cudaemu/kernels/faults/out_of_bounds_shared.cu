// Fault: an access outside the shared memory of the block, static or dynamic. 64 threads; dynamic memory of 64 ints.

extern "C" __global__ void shared_static_clean(const int* in, int* out) {
    __shared__ int cells[64];
    cells[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = cells[(threadIdx.x + 1) & 63];
}

// `index` is 1 << 20 for one thread, past any block's memory.
extern "C" __global__ void shared_static_fault(const int* in, const int* index, int* out) {
    __shared__ int cells[64];
    cells[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = cells[index[threadIdx.x]];
}

extern "C" __global__ void shared_dynamic_clean(const int* in, int* out) {
    extern __shared__ int dynamic[];
    dynamic[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = dynamic[63 - threadIdx.x];
}

// One element past the requested size.
extern "C" __global__ void shared_dynamic_write_fault(const int* in, int* out) {
    extern __shared__ int dynamic[];
    dynamic[threadIdx.x + 1] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = dynamic[64 - threadIdx.x];
}

extern "C" __global__ void shared_dynamic_read_fault(const int* in, int* out) {
    extern __shared__ int dynamic[];
    dynamic[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = dynamic[64 - threadIdx.x];
}

// Fault: a global access outside its allocation, behind the end, before the start, or past a guard by a wide margin.
// Launch with more threads than n; in and out have n elements.

extern "C" __global__ void out_of_bounds_clean(const float* in, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i] + 1.0f;
}

extern "C" __global__ void read_past_end_fault(const float* in, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i + 1] + 1.0f;  // in[n] for the last thread
}

extern "C" __global__ void write_past_end_fault(const float* in, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = i < n ? in[i] + 1.0f : 0.0f;
}

extern "C" __global__ void read_before_start_fault(const float* in, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i - 1] + 1.0f;  // in[-1] for the first thread
}

extern "C" __global__ void write_before_start_fault(const float* in, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i - 1] = in[i] + 1.0f;
}

// The first element of the vector is inside, its end is not: for example n = 4 k + 2.
extern "C" __global__ void vector_over_end_fault(const float* in, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (4 * i < n) {
        float4 four = *(const float4*)(in + 4 * i);
        out[i] = four.x + four.y + four.z + four.w;
    }
}

extern "C" __global__ void atomic_past_end_fault(const float* in, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(out + i, 1.0f);
}

// Fault: a read of device memory that nothing has written since it was allocated. The host fills `in` (n elements) for the
// clean run, and half of it for the fault: one kernel serves both. A copy of unwritten memory is no fault by itself.

extern "C" __global__ void uninitialised_global(const int* in, int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i] > 0 ? 1 : 2;
}

// Writes every second element, or all of them: the next launch reads the unwritten elements.
extern "C" __global__ void write_every_second(int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && i % 2 == 0) out[i] = i;
}
extern "C" __global__ void write_every(int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = i;
}

// Fault: the kernel stops itself by a trap, or by an assertion. Clean: the condition never holds.

extern "C" __global__ void trap_where_negative(const int* in, int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (in[i] < 0) __trap();
    out[i] = in[i];
}

extern "C" __global__ void assert_where_negative(const int* in, int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    assert(in[i] >= 0 && "the values are not negative");
    out[i] = in[i];
}

// Breaks a promise to the compiler, so the behaviour is undefined.
extern "C" __global__ void unreachable_where_negative(const int* in, int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (in[i] < 0) {
        out[i] = -1;
        asm volatile("trap;");
        __builtin_unreachable();
    }
    out[i] = in[i];
}

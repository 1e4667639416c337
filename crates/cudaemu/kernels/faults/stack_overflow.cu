// Fault: recursion deeper than the thread's stack. A small depth is valid: one kernel serves both.

__device__ __noinline__ int deep(int depth, const int* in) {
    int frame[64];
    for (int k = 0; k < 64; k++) frame[k] = in[k] + depth;
    int below = depth > 0 ? deep(depth - 1, in) : 0;
    return below + frame[(depth + below) & 63];
}

extern "C" __global__ void recurse(int depth, const int* in, int* out) { out[threadIdx.x] = deep(depth, in); }

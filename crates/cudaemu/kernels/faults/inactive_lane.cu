// Fault: a shuffle reads from a lane that does not execute it, or a lane outside of the mask executes it. 32 threads.

extern "C" __global__ void inactive_lane_clean(const int* in, int* out) {
    int t = threadIdx.x, value = in[t];
    int other = __shfl_down_sync(0xffffffff, value, 16);
    if (t < 16) value += other;
    if (t < 16) value += __shfl_xor_sync(0x0000ffff, value, 8);
    out[t] = value;
}

// The upper half has left the branch: its values are undefined.
extern "C" __global__ void source_lane_fault(const int* in, int* out) {
    int t = threadIdx.x, value = in[t];
    if (t < 16) value += __shfl_down_sync(0x0000ffff, value, 16);
    out[t] = value;
}

// Lane 31 executes the shuffle without being in the mask.
extern "C" __global__ void mask_without_caller_fault(const int* in, int* out) {
    int t = threadIdx.x;
    out[t] = __shfl_xor_sync(0x7fffffff, in[t], 1);
}

// The mask contains lanes that have exited: the others do not wait for them and do not read from them.
extern "C" __global__ void mask_of_exited_clean(const int* in, int* out) {
    int t = threadIdx.x;
    if (t >= 24) return;
    out[t] = __shfl_xor_sync(0xffffffff, in[t], 1);
}

// The same for a vote.
extern "C" __global__ void vote_without_caller_fault(const int* in, int* out) {
    int t = threadIdx.x;
    out[t] = __ballot_sync(0x0000ffff, in[t] > 0);
}

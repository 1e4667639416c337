// Fault: an endless loop, which the instruction limit (watchdog) must stop. The host sets the flag to 1 for the valid run.

extern "C" __global__ void wait_for_flag(const volatile int* flag, int* out) {
    while (*flag == 0) {}
    out[threadIdx.x] = 1;
}

// One lane of the warp never leaves.
extern "C" __global__ void one_lane_stays(int steps, int stuck, int* out) {
    int t = threadIdx.x, sum = 0;
    for (int k = 0; k != steps; k += t == stuck ? 0 : 1) {
        sum += k;
        asm volatile("" ::: "memory");
    }
    out[t] = sum;
}

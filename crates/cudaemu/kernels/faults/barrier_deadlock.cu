// Fault: warps wait forever, at barriers that the others never reach. 64 threads.

extern "C" __global__ void barrier_deadlock_clean(int* out) {
    if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;" ::: "memory");
    else asm volatile("bar.sync 1, 64;" ::: "memory");
    out[threadIdx.x] = 1;
}

// The warps wait at different barriers.
extern "C" __global__ void different_barriers_fault(int* out) {
    if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;" ::: "memory");
    else asm volatile("bar.sync 2, 64;" ::: "memory");
    out[threadIdx.x] = 1;
}

// 96 threads are expected, 64 arrive.
extern "C" __global__ void too_few_threads_fault(int* out) {
    asm volatile("bar.sync 1, 96;" ::: "memory");
    out[threadIdx.x] = 1;
}

// Lanes wait at a warp barrier for lanes that wait at the barrier of the block.
extern "C" __global__ void warp_and_block_barrier_fault(int* out) {
    if (threadIdx.x & 1) __syncwarp();
    else asm volatile("barrier.sync 0;" ::: "memory");
    out[threadIdx.x] = 1;
}

// Fault: shared memory is read before the asynchronous copy into it is waited for. 64 threads, 16 bytes each; target 80.

#define COPY_16(TO, FROM) \
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(TO)), "l"(FROM) : "memory")
#define COPY_4(TO, FROM) \
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((unsigned)__cvta_generic_to_shared(TO)), "l"(FROM) : "memory")
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(N) asm volatile("cp.async.wait_group " #N ";" ::: "memory")

extern "C" __global__ void async_wait_clean(const uint4* in, uint4* out) {
    __shared__ uint4 cells[64];
    int t = threadIdx.x;
    COPY_16(&cells[t], in + t);
    COMMIT;
    WAIT(0);
    __syncthreads();
    out[t] = cells[63 - t];
}

// Committed, and a barrier, but no wait.
extern "C" __global__ void async_wait_missing_fault(const uint4* in, uint4* out) {
    __shared__ uint4 cells[64];
    int t = threadIdx.x;
    cells[t] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    COPY_16(&cells[t], in + t);
    COMMIT;
    __syncthreads();
    out[t] = cells[63 - t];
}

// Waits until one group is pending, which is the group it reads.
extern "C" __global__ void async_wait_too_early_fault(const uint4* in, uint4* out) {
    __shared__ uint4 cells[2][64];
    int t = threadIdx.x;
    COPY_16(&cells[0][t], in + t);
    COMMIT;
    COPY_16(&cells[1][t], in + 64 + t);
    COMMIT;
    WAIT(1);
    __syncthreads();
    out[t] = cells[1][t];
}

// Waits for its own copy, but reads another thread's without a barrier.
extern "C" __global__ void async_barrier_missing_fault(const uint4* in, uint4* out) {
    __shared__ uint4 cells[64];
    int t = threadIdx.x;
    COPY_16(&cells[t], in + t);
    COMMIT;
    WAIT(0);
    out[t] = cells[63 - t];
}

// Two stages, read in turn; wait_all, and the last 4-byte copy with fewer bytes of source than of destination.
extern "C" __global__ void async_stages_clean(const int* in, int* out) {
    __shared__ int cells[2][64];
    int t = threadIdx.x;
    COPY_4(&cells[0][t], in + t);
    COMMIT;
    COPY_4(&cells[1][t], in + 64 + t);
    COMMIT;
    WAIT(1);
    __syncthreads();
    int sum = cells[0][63 - t];
    __syncthreads();
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"((unsigned)__cvta_generic_to_shared(&cells[0][t])), "l"(in + 128 + t), "r"(t & 1 ? 4 : 0) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    out[t] = sum + cells[1][63 - t] + cells[0][63 - t];  // zero where no bytes were copied
}

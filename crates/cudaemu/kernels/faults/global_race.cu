// Fault: blocks or threads of different warps write the same global memory without atomics. The clean twin uses them.

extern "C" __global__ void global_count_clean(int* count) { atomicAdd(count, 1); }

extern "C" __global__ void global_count_fault(int* count) { *count = *count + 1; }

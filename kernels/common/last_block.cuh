// Split-K: which block of several is the last one to store its sums.
#pragma once
#include "abi.cuh"

// Counts a block that has stored its results. Returns whether it is the last one of `blocks` blocks, which may then read the results of
// all. `count` is 0 before the first block and after the last one. All threads of the block must call this function; `is_last` is a word of
// shared memory that is not in use.
__device__ __forceinline__ bool is_last_block(u32 *count, u32 blocks, u32 &is_last) {
    // Stores of all threads come before the count, loads of the last block after it.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(count, 1) == blocks - 1;
        if (is_last) *count = 0;
        __threadfence();
    }
    __syncthreads();
    return is_last;
}

__device__ __forceinline__ bool is_last_block(u32 *count, u32 blocks) {
    __shared__ u32 is_last;
    return is_last_block(count, blocks, is_last);
}

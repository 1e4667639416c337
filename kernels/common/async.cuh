// Asynchronous copies to shared memory (cp.async), and loads of fragments from there (ldmatrix): compute capability 8.0 or later.
#pragma once
#include "abi.cuh"

// Address of shared memory, as the instructions below take it.
__device__ __forceinline__ u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }

// Starts the copy of the first `bytes` bytes of 16 to shared memory; the rest becomes zeros. Both addresses are multiples of 16. With 0
// bytes, nothing is read.
__device__ __forceinline__ void copy_async(u32 to, const u8 *from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes) : "memory");
}

// Starts the copy of 16 bytes, if `wanted`. Takes fewer instructions than copy_async, which computes addresses for partial copies.
__device__ __forceinline__ void copy_async_if(u32 to, const u8 *from, bool wanted) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}"
                 : : "r"(to), "l"(__cvta_generic_to_global(from)), "r"((u32)wanted) : "memory");
}

// Ends a group of copies. Groups may be empty.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }

// Waits until this thread's groups of copies have arrived, apart from the last LEFT groups. Those of other threads are visible after a barrier
// that follows their waits.
template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" : : "n"(LEFT) : "memory");
}

// Loads four matrices of 8 rows with 8 halves each. Lane i has the address of row i % 8 of matrix i / 8, a multiple of 16 bytes. Word j of
// lane 4 g + t receives elements 2 t and 2 t + 1 of row g of matrix j.
__device__ __forceinline__ void load_matrices(u32 (&words)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at)
                 : "memory");
}

// As load_matrices, with each matrix transposed: word j of lane 4 g + t receives column g of rows 2 t and 2 t + 1 of matrix j.
__device__ __forceinline__ void load_transposed(u32 (&words)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at)
                 : "memory");
}

// Stores 16 bytes to shared memory.
__device__ __forceinline__ void store_shared(u32 at, const u32 (&words)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" : : "r"(at), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

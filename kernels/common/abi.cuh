// What kernels share with the launch site (src/cuda/kernel.rs, src/cuda/ops/mod.rs): how arguments lie in memory.
//
// Every entry takes one struct by value: its pointers first, then its numbers. The Rust side mirrors the numbers with a
// #[repr(C)] struct of the same name, and refuses to launch when the sizes differ.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Type numbers as on the wire.
enum Type : u32 { TYPE_F32 = 0, TYPE_F16 = 1, TYPE_BF16 = 30, TYPE_I32 = 26, TYPE_I64 = 27 };

// Element counts and byte strides of a tensor, dimension 0 fastest. Counts are below 2^31; strides are not.
struct Shape {
    u32 ne[4];
    u64 nb[4];

    // Bytes from the first element to row [i1, i2, i3].
    __device__ u64 row(u32 i1, u32 i2, u32 i3) const { return i1 * nb[1] + i2 * nb[2] + i3 * nb[3]; }

    __device__ u64 at(u32 i0, u32 i1, u32 i2, u32 i3) const { return i0 * nb[0] + row(i1, i2, i3); }

    // Row number `r`, counted with dimension 1 fastest, as [i1, i2, i3].
    __device__ void split(u32 r, u32 &i1, u32 &i2, u32 &i3) const {
        i1 = r % ne[1];
        r /= ne[1];
        i2 = r % ne[2];
        i3 = r / ne[2];
    }
};

// Says that op number `op` met an index outside its table; the queue fails with it. The node's other rows go on.
__device__ inline void refuse(u32 *verdict, u32 op) { *(volatile u32 *)verdict = op + 1; }

// Whether both addresses are multiples of `bytes`, a power of two.
__device__ inline bool aligned(const void *a, const void *b, u32 bytes) { return (((u64)a | (u64)b) & (bytes - 1)) == 0; }

// Binary interface between kernels and the launch site (src/cuda/kernel.rs, src/cuda/ops/mod.rs): layout of the arguments.
//
// Every entry takes one struct by value: first its pointers, then its scalar arguments. The Rust side mirrors the scalars in a
// #[repr(C)] struct of the same name, and rejects the node if the sizes differ.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Numbers of element types, as on the wire.
enum Type : u32 { TYPE_F32 = 0, TYPE_F16 = 1, TYPE_BF16 = 30, TYPE_I32 = 26, TYPE_I64 = 27 };

// Element counts and byte strides of a tensor, fastest dimension first. Counts are below 2^31; strides may be larger.
struct Shape {
    u32 ne[4];
    u64 nb[4];

    // Byte offset of row [i1, i2, i3].
    __device__ u64 row(u32 i1, u32 i2, u32 i3) const { return i1 * nb[1] + i2 * nb[2] + i3 * nb[3]; }

    __device__ u64 at(u32 i0, u32 i1, u32 i2, u32 i3) const { return i0 * nb[0] + row(i1, i2, i3); }

    // Splits row number `r` (dimension 1 fastest) into [i1, i2, i3].
    __device__ void split(u32 r, u32 &i1, u32 &i2, u32 &i3) const {
        i1 = r % ne[1];
        r /= ne[1];
        i2 = r % ne[2];
        i3 = r / ne[2];
    }
};

// Reports to the host that op number `op` met an index outside its table, which fails the queue. The kernel skips that row and
// completes the others. All reports are equally good, so that threads may overwrite each other's.
__device__ inline void report_bad_index(u32 *error_word, u32 op) { *(volatile u32 *)error_word = op + 1; }

// Whether both addresses are multiples of `bytes`, which is a power of two.
__device__ inline bool aligned(const void *a, const void *b, u32 bytes) { return (((u64)a | (u64)b) & (bytes - 1)) == 0; }

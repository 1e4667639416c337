// Element-wise kernels: d = f(a, b). elementwise: for rows that are dense in a and d, and dense or a single element in b;
// elementwise_any: for all layouts.
//
// The launch site (src/cuda/ops/elementwise.rs) reduces the dimensions to a row of n elements, a dimension over which each
// thread iterates, and two more. A stride of 0 in b is a broadcast; if the iterated dimension has it, a thread loads its
// elements of b once and keeps them in registers.
#pragma once

#include "vector.cuh"

struct ElementwiseArgs {
    u64 n;             // elements per row
    u64 a_at, b_at;    // byte offsets of the first elements
    u64 a[3], b[3], d[3]; // byte strides of the outer dimensions; first, the dimension over which threads iterate
    u32 count[3];      // indices of the outer dimensions
    u32 tiles;         // tiles per row
    u32 chunks;        // chunks of the first dimension, one per block
    u32 chunk;         // indices of that dimension per chunk
    u32 dense_b;       // whether b has a row of elements; otherwise a single element
    u32 wide;          // whether all strides are multiples of the vector size
};

// Grid: tiles, chunks, count[1], count[2], the first fastest. Threads: x within the row, y along the first dimension. N
// elements per thread. f takes (float (&a)[N], const float (&b)[N]) and stores its results in a.
template <class A, class B, class D, int N, class F>
__device__ __forceinline__ void elementwise(const ElementwiseArgs &z, const u8 *a, const u8 *b, u8 *d, F f) {
    constexpr int V = VECTOR<A, B, D>;
    u32 block = blockIdx.x;
    const u32 tile = block % z.tiles;
    block /= z.tiles;
    const u32 chunk = block % z.chunks;
    block /= z.chunks;
    const u32 i2 = block % z.count[1], i3 = block / z.count[1];
    a += z.a_at;
    b += z.b_at;
    const u64 begin = (u64)tile * blockDim.x * N;
    bool wide = z.wide && whole_vectors<V, N>(begin, z.n);
    wide = wide && aligned(a, a, V * A::BYTES) && (aligned(b, b, V * B::BYTES) || !z.dense_b) && aligned(d, d, V * D::BYTES);
    const u32 end = min(z.count[0], (chunk + 1) * z.chunk);
    a += i2 * z.a[1] + i3 * z.a[2];
    b += i2 * z.b[1] + i3 * z.b[2];
    d += i2 * z.d[1] + i3 * z.d[2];
    float x[N], y[N];
    bool have = false;
#pragma unroll 1
    for (u32 i = chunk * z.chunk + threadIdx.y; i < end; i += blockDim.y) {
        load_tile<A, V>(a + i * z.a[0], begin, z.n, wide, x);
        if (!have) {
            if (z.dense_b) {
                load_tile<B, V>(b + i * z.b[0], begin, z.n, wide, y);
            } else {
                const float one = B::load1(b + i * z.b[0], 0);
#pragma unroll
                for (int k = 0; k < N; k++) y[k] = one;
            }
            have = z.b[0] == 0;
        }
        f(x, y);
        store_tile<D, V>(d + i * z.d[0], begin, z.n, wide, x);
    }
}

// Variant for all layouts, with types selected when the kernel runs; b is broadcast in each dimension.
struct ElementwiseAnyArgs {
    Shape a, b, d;
    u64 a_at, b_at;
    u32 types[3];
    u32 pieces; // pieces of blockDim.x elements per row
};

// Grid: pieces, then groups of blockDim.y rows; one element per thread.
template <class F>
__device__ __forceinline__ void elementwise_any(const ElementwiseAnyArgs &z, const u8 *a, const u8 *b, u8 *d, F f) {
    const u32 piece = blockIdx.x % z.pieces;
    const u32 row = blockIdx.x / z.pieces * blockDim.y + threadIdx.y;
    const u32 i0 = piece * blockDim.x + threadIdx.x;
    u32 i1, i2, i3;
    z.d.split(row, i1, i2, i3);
    if (i0 >= z.d.ne[0] || i3 >= z.d.ne[3]) return;
    float x[1] = {load_float(a + z.a_at + z.a.at(i0, i1, i2, i3), z.types[0])};
    const u64 at = z.b.at(i0 % z.b.ne[0], i1 % z.b.ne[1], i2 % z.b.ne[2], i3 % z.b.ne[3]);
    const float y[1] = {load_float(b + z.b_at + at, z.types[1])};
    f(x, y);
    store_float(d + z.d.at(i0, i1, i2, i3), z.types[2], x[0]);
}

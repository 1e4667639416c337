// d = f(a, b), element by element, of rows that lie dense in a and d, and dense or as a single element in b.
//
// The launch site has put the dimensions into this form: a row of n elements, a dimension that a thread goes along, and
// two more. A step of 0 in b is a broadcast; along such a dimension a thread keeps what it has read of b.
#pragma once

#include "vector.cuh"

struct Zip {
    u64 n;             // elements of a row
    u64 a_at, b_at;    // bytes from the pointers to the first elements
    u64 a[3], b[3], d[3]; // byte steps of the outer dimensions, the one that threads go along first
    u32 count[3];      // their counts
    u32 tiles;         // tiles of a row
    u32 chunks;        // parts of the first dimension, each a block's
    u32 chunk;         // its indices in a part
    u32 dense_b;       // whether b has a row of elements, or one
    u32 wide;          // whether all steps are multiples of the vectors
};

// Blocks: tiles, chunks, count[1], count[2], the first fastest; threads: x in the row, y along the first dimension.
// N elements a thread. f takes them as (float (&a)[N], const float (&b)[N]) and leaves its results in a.
template <class A, class B, class D, int N, class F>
__device__ __forceinline__ void zip(const Zip &z, const u8 *a, const u8 *b, u8 *d, F f) {
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

// The same for every pair of layouts, and types known only when the kernel runs; b repeats in each dimension.
struct ZipAny {
    Shape a, b, d;
    u64 a_at, b_at;
    u32 types[3];
    u32 pieces; // pieces of blockDim.x elements in a row
};

// Blocks: pieces, then rows by blockDim.y; an element a thread.
template <class F>
__device__ __forceinline__ void zip_any(const ZipAny &z, const u8 *a, const u8 *b, u8 *d, F f) {
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

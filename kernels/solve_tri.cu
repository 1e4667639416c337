// SOLVE_TRI: A X = B with a lower triangular A, by forward substitution.
//
// Variants: one, F32, contiguous. A thread solves one column. The rows above are read from shared memory while they fit it, else
//           from the destination; each thread reads only what it has written.
// Accuracy: f32 sums, from the first row on.
// Limits:   dimensions below 2^31.
// Traffic:  A is read once per warp, B once; X is written once.
#include "common/abi.cuh"

struct SolveTriArgs {
    const u8 *a, *b;
    u8 *x;
    u32 n, columns; // rows of A; columns of B and X
    u32 groups;     // groups of blockDim.x columns per matrix
    u32 kept;       // whether shared memory has n rows of blockDim.x values
};

extern __shared__ float solved[];

// Grid: groups, then matrices.
extern "C" __global__ void solve_tri_f32(SolveTriArgs args) {
    const u32 column = blockIdx.x % args.groups * blockDim.x + threadIdx.x;
    const u64 matrix = blockIdx.x / args.groups;
    if (column >= args.columns) return;
    const float *a = (const float *)args.a + matrix * args.n * args.n;
    const u64 first = matrix * args.n * args.columns + column;
    const float *b = (const float *)args.b + first;
    float *x = (float *)args.x + first;
    const float *above = args.kept ? solved + threadIdx.x : x;
    const u32 step = args.kept ? blockDim.x : args.columns;
    for (u32 i = 0; i < args.n; i++, a += args.n) {
        float sum = 0.0f;
#pragma unroll 8
        for (u32 t = 0; t < i; t++) sum += a[t] * above[(u64)t * step];
        const float value = (b[(u64)i * args.columns] - sum) / a[i];
        x[(u64)i * args.columns] = value;
        if (args.kept) solved[i * blockDim.x + threadIdx.x] = value;
    }
}

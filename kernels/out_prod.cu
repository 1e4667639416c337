// OUT_PROD: sums of outer products, d[i, j] = sum over k of a[i, k] * b[j, k].
//
// Variants: one per type of a: F32, F16, BF16; b and d are F32. Rows of a and d are dense. A thread has one column of ROWS rows of d,
//           which share the elements of a.
// Accuracy: f32 sums, in the order of k.
// Limits:   dimensions below 2^31.
// Floor:    one fused multiply-add per product. a is read once per ROWS rows of d.
#include "common/abi.cuh"
#include "common/types.cuh"

// Rows of d per thread.
#define ROWS 8

struct OutProdArgs {
    const u8 *a, *b;
    u8 *d;
    u64 as[3], bs[4], ds[3]; // byte strides: of dimensions 1 to 3, of b from 0 on
    u32 n, m, depth;         // elements and rows of d; products per element
    u32 ne[2];               // counts of dimensions 2 and 3
    u32 repeats[2];          // consecutive planes of b that share one of a
    u32 pieces;              // pieces of blockDim.x elements per row
};

// Grid: pieces, groups of blockDim.y * ROWS rows, then planes, the first fastest.
template <class A>
__device__ __forceinline__ void out_prod(const OutProdArgs &args) {
    const u32 groups = (args.m + blockDim.y * ROWS - 1) / (blockDim.y * ROWS);
    u32 block = blockIdx.x;
    const u32 i = block % args.pieces * blockDim.x + threadIdx.x;
    block /= args.pieces;
    const u32 j = (block % groups * blockDim.y + threadIdx.y) * ROWS;
    block /= groups;
    const u32 i2 = block % args.ne[0], i3 = block / args.ne[0];
    if (i >= args.n || j >= args.m) return;
    const u32 count = min(args.m - j, ROWS);
    const u8 *a = args.a + i2 / args.repeats[0] * args.as[1] + i3 / args.repeats[1] * args.as[2];
    const u8 *b = args.b + j * args.bs[0] + i2 * args.bs[2] + i3 * args.bs[3];
    u64 row[ROWS];
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) row[r] = min(r, count - 1) * args.bs[0];
    float sum[ROWS] = {};
#pragma unroll 2
    for (u32 k = 0; k < args.depth; k++, a += args.as[0], b += args.bs[1]) {
        const float element = A::load1(a, i);
#pragma unroll
        for (int r = 0; r < ROWS; r++) sum[r] += element * F32::load1(b + row[r], 0);
    }
    u8 *d = args.d + j * args.ds[0] + i2 * args.ds[1] + i3 * args.ds[2];
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
        if (r < count) F32::store1(d + r * args.ds[0], i, sum[r]);
    }
}

extern "C" __global__ void __launch_bounds__(256) out_prod_f32(OutProdArgs args) { out_prod<F32>(args); }
extern "C" __global__ void __launch_bounds__(256) out_prod_f16(OutProdArgs args) { out_prod<F16>(args); }
extern "C" __global__ void __launch_bounds__(256) out_prod_bf16(OutProdArgs args) { out_prod<BF16>(args); }

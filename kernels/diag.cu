// DIAG, DIAG_MASK_INF, DIAG_MASK_ZERO and TRI: a band of diagonals of each matrix is copied, the rest has one value.
//
// Variants: one, F32, any layout, one element per thread. DIAG reads its vector as a matrix with a stride of 0.
// Limits:   dimensions below 2^31.
// Traffic:  the band is read once, the destination is written once.
#include "common/abi.cuh"

struct DiagArgs {
    const u8 *x;
    u8 *y;
    Shape xs, ys;
    i64 low, high; // element [i0, i1] is copied if low <= i0 - i1 <= high
    float outside; // value of the others
    u32 pieces;    // pieces of blockDim.x elements per row
};

// Grid: pieces, then groups of blockDim.y rows; one element per thread.
extern "C" __global__ void diag_band(DiagArgs args) {
    const u32 i0 = blockIdx.x % args.pieces * blockDim.x + threadIdx.x;
    const u32 row = blockIdx.x / args.pieces * blockDim.y + threadIdx.y;
    u32 i1, i2, i3;
    args.ys.split(row, i1, i2, i3);
    if (i0 >= args.ys.ne[0] || i3 >= args.ys.ne[3]) return;
    const i64 diagonal = (i64)i0 - i1;
    const bool inside = diagonal >= args.low && diagonal <= args.high;
    const float value = inside ? *(const float *)(args.x + args.xs.at(i0, i1, i2, i3)) : args.outside;
    *(float *)(args.y + args.ys.at(i0, i1, i2, i3)) = value;
}

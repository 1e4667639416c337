// REPEAT_BACK: each element of the destination is the sum of its copies in the gradient.
//
// Variants: one, F32 of any layout, one element of the destination per thread.
// Accuracy: the bits of the CPU: f32 sums, copies along dimension 0 first.
// Limits:   dimensions below 2^31.
// Traffic:  the gradient is read once, the destination is written once.
#include "common/abi.cuh"

struct RepeatBackArgs {
    const u8 *x;
    u8 *y;
    Shape xs, ys;
    u32 copies[4]; // of the destination in the gradient, per dimension
    u32 pieces;    // pieces of blockDim.x elements per row
    u32 padding;
};

// Grid: pieces, then groups of blockDim.y rows.
extern "C" __global__ void repeat_back_f32(RepeatBackArgs args) {
    const u32 i0 = blockIdx.x % args.pieces * blockDim.x + threadIdx.x;
    const u32 row = blockIdx.x / args.pieces * blockDim.y + threadIdx.y;
    const Shape &ys = args.ys;
    u32 i1, i2, i3;
    ys.split(row, i1, i2, i3);
    if (i0 >= ys.ne[0] || i3 >= ys.ne[3]) return;
    float sum = 0.0f;
    for (u32 k3 = 0; k3 < args.copies[3]; k3++) {
        for (u32 k2 = 0; k2 < args.copies[2]; k2++) {
            for (u32 k1 = 0; k1 < args.copies[1]; k1++) {
                const u8 *x = args.x + args.xs.at(i0, k1 * ys.ne[1] + i1, k2 * ys.ne[2] + i2, k3 * ys.ne[3] + i3);
                for (u32 k0 = 0; k0 < args.copies[0]; k0++, x += ys.ne[0] * args.xs.nb[0]) sum += *(const float *)x;
            }
        }
    }
    *(float *)(args.y + ys.at(i0, i1, i2, i3)) = sum;
}

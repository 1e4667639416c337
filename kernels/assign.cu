// ACC and SET: b is added to, or replaces, the elements of a region of the destination. A launch of concat_runs copies a first,
// unless the op runs in place.
//
// Variants: one, 4-byte elements, any layout of b, one element per thread.
// Limits:   dimensions below 2^31.
// Traffic:  b is read once; the region is written once, and read once by ACC.
#include "common/abi.cuh"

struct AssignArgs {
    const u8 *b;
    u8 *y;
    Shape bs;
    u64 offset;    // byte offset of the region in the destination
    u64 region[4]; // its byte strides
    u32 add;       // 1: ACC, f32; 0: SET
    u32 pieces;    // pieces of blockDim.x elements per row
};

// Grid: pieces, then groups of blockDim.y rows; one element per thread.
extern "C" __global__ void assign_region(AssignArgs args) {
    const u32 i0 = blockIdx.x % args.pieces * blockDim.x + threadIdx.x;
    const u32 row = blockIdx.x / args.pieces * blockDim.y + threadIdx.y;
    u32 i1, i2, i3;
    args.bs.split(row, i1, i2, i3);
    if (i0 >= args.bs.ne[0] || i3 >= args.bs.ne[3]) return;
    const u32 bits = *(const u32 *)(args.b + args.bs.at(i0, i1, i2, i3));
    u8 *at = args.y + args.offset + i0 * args.region[0] + i1 * args.region[1] + i2 * args.region[2] + i3 * args.region[3];
    if (args.add) *(float *)at += __uint_as_float(bits);
    else *(u32 *)at = bits;
}

// PAD, PAD_REFLECT_1D and ROLL: each element of the destination is an element of the source, or 0.
//
// Variants: one, for 4-byte elements and any layout, one element per thread.
// Limits:   dimensions below 2^31.
// Traffic:  the destination is written once; elements of the source are read once for each time that they appear.
#include "common/abi.cuh"

// How a coordinate of the destination, less the padding before it, becomes one of the source.
enum Outside : u32 {
    ZERO = 0,     // outside of the source the element is 0
    CIRCULAR = 1, // the source repeats
    REFLECT = 2,  // dimension 0 is mirrored at its first and its last element, which do not repeat
};

struct PadArgs {
    const u8 *x;
    u8 *y;
    Shape xs, ys;
    i64 before[4]; // padding in front of the source, per dimension
    u32 outside;
    u32 pieces; // pieces of blockDim.x elements per row
};

// The coordinate of the source for coordinate `i` of the destination; false if there is none.
__device__ __forceinline__ bool source(u32 outside, i64 i, i64 n, u32 &from) {
    if (outside == CIRCULAR) {
        i %= n;
        i = i < 0 ? i + n : i;
    } else if (outside == REFLECT) {
        i = i < 0 ? -i : i;
        i = i < n ? i : 2 * (n - 1) - i;
    }
    from = (u32)i;
    return i >= 0 && i < n;
}

// Grid: pieces, then groups of blockDim.y rows; one element per thread.
extern "C" __global__ void pad_any(PadArgs args) {
    const u32 i0 = blockIdx.x % args.pieces * blockDim.x + threadIdx.x;
    const u32 row = blockIdx.x / args.pieces * blockDim.y + threadIdx.y;
    u32 i[4] = {i0};
    args.ys.split(row, i[1], i[2], i[3]);
    if (i0 >= args.ys.ne[0] || i[3] >= args.ys.ne[3]) return;
    u32 from[4];
    bool inside = true;
#pragma unroll
    for (int d = 0; d < 4; d++) inside &= source(args.outside, (i64)i[d] - args.before[d], args.xs.ne[d], from[d]);
    const u32 bits = inside ? *(const u32 *)(args.x + args.xs.at(from[0], from[1], from[2], from[3])) : 0;
    *(u32 *)(args.y + args.ys.at(i[0], i[1], i[2], i[3])) = bits;
}

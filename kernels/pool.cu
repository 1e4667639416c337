// POOL_1D and POOL_2D: the maximum or the mean of a window that moves over rows, or over planes.
//
// Variants: one, for F32 and F16 sources of any layout, one output per thread. POOL_1D has a window of one row.
// Accuracy: the bits of the CPU: f32 sums in the order of the rows.
// Limits:   dimensions below 2^31.
// Traffic:  an element is read once per window that covers it, mostly from the L1 cache; the destination is written once.
#include "common/abi.cuh"
#include "common/types.cuh"

enum Kind : u32 { MAXIMUM = 0, MEAN = 1 };

struct PoolArgs {
    const u8 *x;
    u8 *y;
    Shape xs, ys;
    i64 kernel[2], stride[2], padding[2]; // along dimensions 0 and 1
    u32 kind, type;
    u32 whole;  // whether a mean is the sum divided by the whole window, not by the elements inside of the image
    u32 pieces; // pieces of blockDim.x outputs per row
};

// The elements of a window that lie in an image of n elements along dimension d: `begin` to `end`.
__device__ __forceinline__ void inside(const PoolArgs &args, int d, u32 output, u32 n, u32 &begin, u32 &end) {
    const i64 start = output * args.stride[d] - args.padding[d];
    begin = (u32)min(max(start, (i64)0), (i64)n);
    end = (u32)min(max(start + args.kernel[d], (i64)0), (i64)n);
}

// Grid: pieces, then groups of blockDim.y rows.
extern "C" __global__ void pool_any(PoolArgs args) {
    const u32 i0 = blockIdx.x % args.pieces * blockDim.x + threadIdx.x;
    const u32 row = blockIdx.x / args.pieces * blockDim.y + threadIdx.y;
    u32 i1, i2, i3;
    args.ys.split(row, i1, i2, i3);
    if (i0 >= args.ys.ne[0] || i3 >= args.ys.ne[3]) return;
    u32 x, x_end, y, y_end;
    inside(args, 0, i0, args.xs.ne[0], x, x_end);
    inside(args, 1, i1, args.xs.ne[1], y, y_end);
    const u32 width = x_end - x;
    float value = args.kind == MAXIMUM ? -3.402823466e+38f : 0.0f;
    for (; y < y_end; y++) {
        const u8 *from = args.x + args.xs.at(x, y, i2, i3);
        for (u32 k = 0; k < width; k++, from += args.xs.nb[0]) {
            const float element = args.type == TYPE_F32 ? F32::load1(from, 0) : F16::load1(from, 0);
            // A NaN is replaced by the element after it, as on the CPU: fmaxf would ignore it.
            if (args.kind == MEAN) value += element;
            else value = element < value ? value : element;
        }
    }
    if (args.kind == MEAN) {
        if (args.whole) value /= (float)(args.kernel[0] * args.kernel[1]);
        else value = width == 0 ? 0.0f : value / (float)width;
    }
    *(float *)(args.y + args.ys.at(i0, i1, i2, i3)) = value;
}

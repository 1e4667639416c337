// IM2COL and IM2COL_3D: the patches of an image as columns of a matrix. COL2IM_1D: sums of columns into a signal.
//
// Variants: im2col_patches, for images of one to three dimensions, F32 or F16, with strides of any size. A thread has one element of
//           a patch for several adjacent outputs, so that it locates the element in the kernel once;
//           col2im_1d, for F32, F16 and BF16, one sample per thread.
// Accuracy: the bits of the CPU. COL2IM_1D adds in f32, in the order of the columns.
// Limits:   dimensions below 2^31, and elements of the padded image below 2^31.
// Traffic:  an element of the image is read once per patch that has it, mostly from the L1 cache; the destination is written once.
#include "common/abi.cuh"
#include "common/types.cuh"

// Adjacent outputs per thread.
#define OUTPUTS 8

struct Im2colArgs {
    const u8 *x;
    u8 *y;
    u64 xs[5];              // byte strides of the image: x, y, z, channel, image
    u64 ys[4];              // byte strides of the destination: element of a patch, output along x and y, plane
    u32 kernel[3];          // elements along x, y, z
    u32 extent[3];          // elements of the image
    u32 outputs[3];         // outputs along x, y, z
    int stride[3], padding[3], dilation[3];
    u32 patch, planes;      // elements of a patch; planes of the destination: outputs along z, then images
    u32 pieces, groups;     // pieces of blockDim.x elements per patch; groups of OUTPUTS outputs per row
    u32 x_type, y_type;
};

// Grid: pieces, groups, then rows of outputs in groups of blockDim.y.
extern "C" __global__ void im2col_patches(Im2colArgs args) {
    u32 block = blockIdx.x;
    const u32 i0 = block % args.pieces * blockDim.x + threadIdx.x;
    block /= args.pieces;
    const u32 first = block % args.groups * OUTPUTS;
    const u32 line = block / args.groups * blockDim.y + threadIdx.y;
    const u32 oy = line % args.outputs[1], plane = line / args.outputs[1];
    if (i0 >= args.patch || plane >= args.planes) return;
    const u32 kx = i0 % args.kernel[0], ky = i0 / args.kernel[0] % args.kernel[1];
    const u32 depth = i0 / args.kernel[0] / args.kernel[1], kz = depth % args.kernel[2], channel = depth / args.kernel[2];
    const u32 oz = plane % args.outputs[2], image = plane / args.outputs[2];
    const int y = (int)oy * args.stride[1] + (int)ky * args.dilation[1] - args.padding[1];
    const int z = (int)oz * args.stride[2] + (int)kz * args.dilation[2] - args.padding[2];
    const bool is_inside = (u32)y < args.extent[1] && (u32)z < args.extent[2];
    const u8 *from = args.x + y * args.xs[1] + z * args.xs[2] + channel * args.xs[3] + image * args.xs[4];
    u8 *to = args.y + i0 * args.ys[0] + first * args.ys[1] + oy * args.ys[2] + plane * args.ys[3];
    int x = (int)first * args.stride[0] + (int)kx * args.dilation[0] - args.padding[0];
    const u32 count = min(args.outputs[0] - first, OUTPUTS);
#pragma unroll 4
    for (u32 i = 0; i < count; i++, x += args.stride[0], to += args.ys[1]) {
        float value = 0.0f;
        if (is_inside && (u32)x < args.extent[0]) {
            const u8 *at = from + (u32)x * args.xs[0];
            value = args.x_type == TYPE_F32 ? F32::load1(at, 0) : F16::load1(at, 0);
        }
        if (args.y_type == TYPE_F32) F32::store1(to, 0, value);
        else F16::store1(to, 0, value);
    }
}

struct Col2imArgs {
    const u8 *x;
    u8 *y;
    u64 xs[2];             // byte strides of the elements of a column, and of the columns
    u64 ys[2];             // byte strides of the samples and of the channels
    u32 length, channels;  // of the signal
    u32 samples, columns;  // samples of a channel in a column; number of columns
    u32 stride, padding;   // samples between two columns; samples that are dropped at the beginning
    u32 type, pieces;
};

// Grid: pieces of blockDim.x samples, then channels.
extern "C" __global__ void col2im_1d(Col2imArgs args) {
    const u32 i = blockIdx.x % args.pieces * blockDim.x + threadIdx.x, channel = blockIdx.x / args.pieces;
    if (i >= args.length) return;
    // In the signal with both ends. Column c has samples c * stride to c * stride + samples - 1.
    const u32 at = i + args.padding;
    u32 column = at < args.samples ? 0 : (at - args.samples) / args.stride + 1;
    const u32 end = min(args.columns, at / args.stride + 1);
    float sum = 0.0f;
    for (; column < end; column++) {
        const u64 element = (u64)channel * args.samples + (at - column * args.stride);
        sum += load_float(args.x + element * args.xs[0] + column * args.xs[1], args.type);
    }
    store_float(args.y + i * args.ys[0] + channel * args.ys[1], args.type, sum);
}

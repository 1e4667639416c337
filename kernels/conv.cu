// CONV_2D, CONV_2D_DW, CONV_3D: convolutions with zero padding. CONV_TRANSPOSE_1D, CONV_TRANSPOSE_2D: their transposes.
//
// All are direct convolutions: a thread adds the products of one output position for 1 or CHANNELS output channels, which share the
// elements of the image. A transposed convolution of step s is one with a dilation of -1: output o has the taps
// o % s + j * s, and tap j reads input o / s - j.
//
// Variants: conv_f32, conv_f16: one output channel per thread, for the types of the kernel; conv_wide_f32, conv_wide_f16: CHANNELS
//           output channels. The image is F32. Any layout: neighbouring threads have neighbouring positions, or neighbouring
//           channels if these are adjacent in memory.
// Accuracy: f32 sums.
// Limits:   dimensions below 2^31, and elements of the padded image below 2^31.
// Floor:    one fused multiply-add per tap and output, and no memory for patches. From compute capability 8.0 on, CONV_2D and CONV_3D with
//           contiguous kernels of F16 and many channels are products on tensor cores instead (conv_patches.cu).
#include "common/abi.cuh"
#include "common/types.cuh"

// Output channels per thread of the wide entries.
#define CHANNELS 8

struct ConvArgs {
    const u8 *kernel, *x;
    u8 *y;
    u64 ks[5];      // byte strides of the kernel: tap along x, y, z, input channel, output channel
    u64 xs[6];      // byte strides of the image: x, y, z, input channel, image, output channel (depthwise)
    u64 ys[5];      // byte strides of the output: x, y, z, channel, image
    u32 taps[3];    // of the kernel along x, y, z
    u32 extent[3];  // of the image
    u32 outputs[3];
    int stride[3], padding[3], dilation[3];
    u32 step[3];    // of a transposed convolution along each dimension, else 1
    u32 in_channels, out_channels, images;
    u32 positions;  // outputs of a channel
    u32 channels_last; // whether threadIdx.x counts groups of channels instead of positions
};

// The taps of an output along dimension d.
struct Taps {
    u32 first, count; // the first tap of the kernel, further ones are `step` apart; number of taps
    int at;           // element of the image that the first tap reads; further ones are `dilation` apart
};

__device__ __forceinline__ Taps taps_of(const ConvArgs &args, int d, u32 output) {
    Taps taps;
    const u32 step = args.step[d], turn = step == 1 ? output : output / step;
    taps.first = output - turn * step;
    taps.count = args.taps[d] <= taps.first ? 0 : (args.taps[d] - taps.first + step - 1) / step;
    taps.at = (int)turn * args.stride[d] - args.padding[d];
    return taps;
}

// The outputs of N channels from channel `oc` on at a position. Channels behind the last one repeat it, and are not stored.
template <class K, int N>
__device__ __forceinline__ void outputs(const ConvArgs &args, u32 position, u32 oc, u32 image) {
    const u32 ox = position % args.outputs[0], line = position / args.outputs[0];
    const u32 oy = line % args.outputs[1], oz = line / args.outputs[1];
    const Taps tx = taps_of(args, 0, ox), ty = taps_of(args, 1, oy), tz = taps_of(args, 2, oz);
    const u32 count = min(args.out_channels - oc, N);
    const u64 kx = args.step[0] * args.ks[0], ky = args.step[1] * args.ks[1], kz = args.step[2] * args.ks[2];
    const u8 *of_channel = args.kernel + tx.first * args.ks[0] + ty.first * args.ks[1] + tz.first * args.ks[2];
    const u8 *plane = args.x + image * args.xs[4] + oc * args.xs[5];
    u64 channel[N];
#pragma unroll
    for (u32 n = 0; n < N; n++) channel[n] = (oc + min(n, count - 1)) * args.ks[4];
    float sum[N] = {};
#pragma unroll 1
    for (u32 ic = 0; ic < args.in_channels; ic++, plane += args.xs[3], of_channel += args.ks[3]) {
        int z = tz.at;
#pragma unroll 1
        for (u32 k = 0; k < tz.count; k++, z += args.dilation[2]) {
            if ((u32)z >= args.extent[2]) continue;
            int y = ty.at;
#pragma unroll 1
            for (u32 j = 0; j < ty.count; j++, y += args.dilation[1]) {
                if ((u32)y >= args.extent[1]) continue;
                const u8 *row = plane + (u32)y * args.xs[1] + (u32)z * args.xs[2];
                const u8 *tap = of_channel + j * ky + k * kz;
                int x = tx.at;
#pragma unroll 2
                for (u32 i = 0; i < tx.count; i++, x += args.dilation[0], tap += kx) {
                    if ((u32)x >= args.extent[0]) continue;
                    const float element = F32::load1(row + (u32)x * args.xs[0], 0);
#pragma unroll
                    for (int n = 0; n < N; n++) sum[n] += element * K::load1(tap + channel[n], 0);
                }
            }
        }
    }
    u8 *to = args.y + ox * args.ys[0] + oy * args.ys[1] + oz * args.ys[2] + oc * args.ys[3] + image * args.ys[4];
#pragma unroll
    for (u32 n = 0; n < N; n++) {
        if (n < count) F32::store1(to + n * args.ys[3], 0, sum[n]);
    }
}

// Grid: in x positions and in y groups of channels, or the other way round; in z images.
template <class K, int N>
__device__ __forceinline__ void convolve(const ConvArgs &args) {
    const u32 groups = (args.out_channels + N - 1) / N;
    const u32 x = blockIdx.x * blockDim.x + threadIdx.x, x_count = args.channels_last ? groups : args.positions;
    const u32 y_count = args.channels_last ? args.positions : groups;
    if (x >= x_count) return;
    for (u32 image = blockIdx.z; image < args.images; image += gridDim.z) {
        for (u32 y = blockIdx.y * blockDim.y + threadIdx.y; y < y_count; y += gridDim.y * blockDim.y) {
            outputs<K, N>(args, args.channels_last ? y : x, (args.channels_last ? x : y) * N, image);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 3) conv_f32(ConvArgs args) { convolve<F32, 1>(args); }
extern "C" __global__ void __launch_bounds__(256, 3) conv_f16(ConvArgs args) { convolve<F16, 1>(args); }
extern "C" __global__ void __launch_bounds__(256, 2) conv_wide_f32(ConvArgs args) { convolve<F32, CHANNELS>(args); }
extern "C" __global__ void __launch_bounds__(256, 2) conv_wide_f16(ConvArgs args) { convolve<F16, CHANNELS>(args); }

// UPSCALE: scales images to a larger or smaller size. Planes are always those of the nearest element.
//
// Variants: upscale_nearest, upscale_bilinear, upscale_bicubic; upscale_antialias: the weighted mean of all elements under a
//           triangle filter. F32 of any layout, one value per thread.
// Accuracy: the bits of the CPU: compiled without fused multiply-adds.
// Limits:   dimensions below 2^31.
// Traffic:  an element is read once per value that depends on it, mostly from the L1 cache; the destination is written once.
#include "common/abi.cuh"

struct UpscaleArgs {
    const u8 *x;
    u8 *y;
    Shape xs, ys;
    float factor[4];  // elements of the destination for each element of the source, per dimension
    float offset;     // distance of an element's centre from its index, in dimensions 0 and 1
    float support[2]; // half widths of the filter, in elements
    u32 pieces;       // pieces of blockDim.x values per row
};

// The indices of this thread's value; false behind the end of its row or of the rows.
__device__ __forceinline__ bool value_of_thread(const UpscaleArgs &args, u32 (&i)[4]) {
    i[0] = blockIdx.x % args.pieces * blockDim.x + threadIdx.x;
    const u32 row = blockIdx.x / args.pieces * blockDim.y + threadIdx.y;
    args.ys.split(row, i[1], i[2], i[3]);
    return i[0] < args.ys.ne[0] && i[3] < args.ys.ne[3];
}

__device__ __forceinline__ u32 nearest(const UpscaleArgs &args, int d, u32 i) {
    return (u32)min((u64)((float)i / args.factor[d]), (u64)(args.xs.ne[d] - 1));
}

// The plane of the source that contains a value's elements.
__device__ __forceinline__ const u8 *plane(const UpscaleArgs &args, const u32 (&i)[4]) {
    return args.x + args.xs.row(0, nearest(args, 2, i[2]), nearest(args, 3, i[3]));
}

__device__ __forceinline__ float element(const UpscaleArgs &args, const u8 *plane, u32 x, u32 y) {
    return *(const float *)(plane + x * args.xs.nb[0] + y * args.xs.nb[1]);
}

__device__ __forceinline__ void store(const UpscaleArgs &args, const u32 (&i)[4], float value) {
    *(float *)(args.y + args.ys.at(i[0], i[1], i[2], i[3])) = value;
}

// The coordinate of value `i` in the source.
__device__ __forceinline__ float coordinate(const UpscaleArgs &args, int d, u32 i) {
    return ((float)i + args.offset) / args.factor[d] - args.offset;
}

__device__ __forceinline__ u32 clamped(const UpscaleArgs &args, int d, i64 x) {
    return (u32)min(max(x, (i64)0), (i64)args.xs.ne[d] - 1);
}

// Grid of all entries: pieces, then groups of blockDim.y rows.
extern "C" __global__ void upscale_nearest(UpscaleArgs args) {
    u32 i[4];
    if (!value_of_thread(args, i)) return;
    store(args, i, element(args, plane(args, i), nearest(args, 0, i[0]), nearest(args, 1, i[1])));
}

extern "C" __global__ void upscale_bilinear(UpscaleArgs args) {
    u32 i[4];
    if (!value_of_thread(args, i)) return;
    u32 at[2][2];
    float weight[2][2];
#pragma unroll
    for (int d = 0; d < 2; d++) {
        const float x = coordinate(args, d, i[d]);
        const i64 low = (i64)floorf(x);
        at[d][0] = clamped(args, d, low), at[d][1] = clamped(args, d, low + 1);
        weight[d][1] = fminf(fmaxf(x - (float)at[d][0], 0.0f), 1.0f);
        weight[d][0] = 1.0f - weight[d][1];
    }
    const u8 *from = plane(args, i);
    float value = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int x = k % 2, y = k / 2;
        const float part = element(args, from, at[0][x], at[1][y]) * weight[0][x] * weight[1][y];
        value = k == 0 ? part : value + part;
    }
    store(args, i, value);
}

// The parameter of cubic convolution, as in PyTorch.
constexpr float CUBIC = -0.75f;

// The kernel of cubic convolution for distances up to 1, and from 1 to 2.
__device__ __forceinline__ float cubic_inner(float x) { return ((CUBIC + 2.0f) * x - (CUBIC + 3.0f)) * x * x + 1.0f; }
__device__ __forceinline__ float cubic_outer(float x) {
    return ((CUBIC * x - 5.0f * CUBIC) * x + 8.0f * CUBIC) * x - 4.0f * CUBIC;
}

extern "C" __global__ void upscale_bicubic(UpscaleArgs args) {
    u32 i[4];
    if (!value_of_thread(args, i)) return;
    u32 at[2][4];
    float weight[2][4];
#pragma unroll
    for (int d = 0; d < 2; d++) {
        const float x = coordinate(args, d, i[d]), low = floorf(x), behind = x - low;
#pragma unroll
        for (int k = 0; k < 4; k++) at[d][k] = clamped(args, d, (i64)low + k - 1);
        weight[d][0] = cubic_outer(behind + 1.0f), weight[d][1] = cubic_inner(behind);
        weight[d][2] = cubic_inner(1.0f - behind), weight[d][3] = cubic_outer(2.0f - behind);
    }
    const u8 *from = plane(args, i);
    float value = 0.0f;
#pragma unroll
    for (int y = 0; y < 4; y++) {
        float row = 0.0f;
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const float part = element(args, from, at[0][x], at[1][y]) * weight[0][x];
            row = x == 0 ? part : row + part;
        }
        value = y == 0 ? row * weight[1][0] : value + row * weight[1][y];
    }
    store(args, i, value);
}

// The elements under the filter of value `i`: `begin` to `end`. Also returns the coordinate of its centre.
__device__ __forceinline__ float filtered(const UpscaleArgs &args, int d, u32 i, u32 &begin, u32 &end) {
    const float x = ((float)i + args.offset) / args.factor[d];
    const u64 n = args.xs.ne[d];
    begin = (u32)min((u64)fmaxf(x - args.support[d] + args.offset, 0.0f), n);
    end = (u32)min((u64)fmaxf(x + args.support[d] + args.offset, 0.0f), n);
    return x;
}

__device__ __forceinline__ float filter_weight(const UpscaleArgs &args, int d, u32 element, float x) {
    return fmaxf(1.0f - fabsf(((float)element - x + args.offset) * (1.0f / args.support[d])), 0.0f);
}

extern "C" __global__ void upscale_antialias(UpscaleArgs args) {
    u32 i[4];
    if (!value_of_thread(args, i)) return;
    u32 x_begin, x_end, y_begin, y_end;
    const float x = filtered(args, 0, i[0], x_begin, x_end), y = filtered(args, 1, i[1], y_begin, y_end);
    const u8 *from = plane(args, i);
    float sum = 0.0f, total = 0.0f;
    for (u32 row = y_begin; row < y_end; row++) {
        const float weight_y = filter_weight(args, 1, row, y);
        for (u32 column = x_begin; column < x_end; column++) {
            const float weight = filter_weight(args, 0, column, x) * weight_y;
            // Elements without weight do not count, not even infinite ones.
            if (weight > 0.0f) {
                sum += element(args, from, column, row) * weight;
                total += weight;
            }
        }
    }
    store(args, i, total > 0.0f ? sum / total : sum);
}

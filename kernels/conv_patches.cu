// CONV_2D and CONV_3D by im2col and GEMM on tensor cores, compute capability 8.0 or later: the patches of the image become columns of F16
// in scratch memory, which mul_mat_gemm.cu multiplies with a kernel of F16, whose rows are output channels.
//
// A column has the elements that an output reads, in the order of the kernel's: x fastest, then y, z and the channels; zeros outside of the
// image. Each column is multiplied by a power of two (common/column_scale.cuh), as in mul_mat_halves.
//
// Variants: conv_pixel_amax: the largest finite magnitude of each pixel over the channels. A column's power of two follows from those of its
//                 pixels, which are a part of its elements. So the image is read once to find all powers, not once per tap;
//           conv_patches: the columns of some positions of some images;
//           conv_aligned_rows: copies the rows of a kernel to multiples of 16 bytes, which the GEMM stages by cp.async. It would load rows
//                 at other addresses by single elements, and patch embeddings have rows of 3 x 14 x 14.
// Limits:   as conv.cu; fewer than 2^31 pixels.
// Traffic:  an element of the image is read once per tap, mostly from the L1 cache; columns are written once, in whole sectors.
//
// Neighbouring lanes have neighbouring positions, so that they read neighbouring elements, and all lanes of a warp are at the same tap. A
// warp collects a piece of 32 columns in shared memory, from which it stores whole sectors of each column.
#include "common/abi.cuh"
#include "common/column_scale.cuh"
#include "common/mma.cuh"
#include "common/types.cuh"

constexpr u32 PATCH_WARPS = 8;       // of a block
constexpr u32 PATCH_COLUMNS = 32;    // of a block: one per lane
constexpr u32 PATCH_PIECE = 64;      // elements of a column that a warp collects at a time
constexpr u32 PATCH_WORDS = PATCH_PIECE / 2 + 1; // of a piece; odd, so that lanes access different banks

struct PatchArgs {
    const u8 *x;
    u32 *largest;   // of each pixel, in the order x, y, z, image
    u8 *columns;    // of conv_patches, else null
    u64 xs[5];      // byte strides of the image: x, y, z, input channel, image
    u64 column;     // bytes of a column
    u32 taps[3];    // of the kernel along x, y, z
    u32 extent[3];  // of the image
    u32 outputs[3];
    int stride[3], padding[3], dilation[3];
    u32 in_channels, k; // elements of a column: taps times in_channels
    u32 pixels, first_image; // pixels of an image
    u32 positions, first; // outputs of a channel, from number `first` on, of which columns are made
};

// The largest of the values that the warps of the block have for a lane.
__device__ __forceinline__ u32 largest_of_warps(u32 (&shared)[PATCH_WARPS][PATCH_COLUMNS], u32 most) {
    const u32 lane = threadIdx.x % 32;
    shared[threadIdx.x / 32][lane] = most;
    __syncthreads();
#pragma unroll
    for (u32 w = 0; w < PATCH_WARPS; w++) most = max(most, shared[w][lane]);
    return most;
}

struct AlignedRowsArgs {
    const u16 *from;
    u16 *to;
    u32 k, padded; // elements of a row, and those with the zeros after them
};

// Grid: x = rows.
extern "C" __global__ void __launch_bounds__(32 * PATCH_WARPS) conv_aligned_rows(AlignedRowsArgs args) {
    const u16 *from = args.from + (u64)blockIdx.x * args.k;
    u16 *to = args.to + (u64)blockIdx.x * args.padded;
    for (u32 i = threadIdx.x; i < args.padded; i += blockDim.x) to[i] = i < args.k ? from[i] : 0;
}

// Grid: x = groups of 32 pixels, z = images.
extern "C" __global__ void __launch_bounds__(32 * PATCH_WARPS) conv_pixel_amax(PatchArgs args) {
    __shared__ u32 shared[PATCH_WARPS][PATCH_COLUMNS];
    const u32 warp = threadIdx.x / 32;
    const u32 pixel = blockIdx.x * PATCH_COLUMNS + threadIdx.x % 32;
    const u32 x = pixel % args.extent[0], line = pixel / args.extent[0], y = line % args.extent[1], z = line / args.extent[1];
    const u8 *from = args.x + x * args.xs[0] + y * args.xs[1] + z * args.xs[2] + blockIdx.z * args.xs[4];
    u32 most = 0;
    if (pixel < args.pixels) {
#pragma unroll 4
        for (u32 c = warp; c < args.in_channels; c += PATCH_WARPS) most = max(most, finite_magnitude(F32::load1(from + c * args.xs[3], 0)));
    }
    most = largest_of_warps(shared, most);
    if (warp == 0 && pixel < args.pixels) args.largest[(u64)blockIdx.z * args.pixels + pixel] = most;
}

// The elements of a patch in order. All but the place in the image is the same in all lanes.
struct PatchCursor {
    int origin[3], at[3]; // places in the image of the patch's first element, and of the next one
    u32 tap[3], channel;  // the next element in the kernel
    const u8 *next;
    i64 steps[4];         // bytes from an element to the next; what is added to them at the end of taps along x, y and z
    bool inside;          // whether the row of the next element is in the image

    // From element k on of the patch at an origin in an image.
    __device__ __forceinline__ PatchCursor(const PatchArgs &args, const u8 *image, const int (&origin)[3], u32 k) {
        next = image;
        i64 back = 0;
#pragma unroll
        for (u32 d = 0; d < 3; d++) {
            const u32 turn = k / args.taps[d];
            tap[d] = k - turn * args.taps[d], k = turn;
            this->origin[d] = origin[d], at[d] = origin[d] + (int)tap[d] * args.dilation[d];
            next += (i64)at[d] * (i64)args.xs[d];
            const i64 step = (i64)args.dilation[d] * (i64)args.xs[d];
            steps[d] = step - back, back = args.taps[d] * step;
        }
        channel = k, next += channel * args.xs[3], steps[3] = (i64)args.xs[3] - back;
        begin_row(args);
    }

    __device__ __forceinline__ void begin_row(const PatchArgs &args) {
        inside = channel < args.in_channels && (u32)at[1] < args.extent[1] && (u32)at[2] < args.extent[2];
    }

    // The next element; 0 outside of the image, and after the last one.
    __device__ __forceinline__ float load(const PatchArgs &args) {
        const float element = inside && (u32)at[0] < args.extent[0] ? F32::load1(next, 0) : 0.0f;
        at[0] += args.dilation[0], next += steps[0];
        if (++tap[0] == args.taps[0]) {
            tap[0] = 0, at[0] = origin[0], at[1] += args.dilation[1], next += steps[1];
            if (++tap[1] == args.taps[1]) {
                tap[1] = 0, at[1] = origin[1], at[2] += args.dilation[2], next += steps[2];
                if (++tap[2] == args.taps[2]) tap[2] = 0, at[2] = origin[2], channel++, next += steps[3];
            }
            begin_row(args);
        }
        return element;
    }
};

// Grid: x = groups of 32 positions, y = shares of the pieces of a column, z = images.
extern "C" __global__ void __launch_bounds__(32 * PATCH_WARPS) conv_patches(PatchArgs args) {
    __shared__ u32 shared[PATCH_WARPS][PATCH_COLUMNS];
    __shared__ u32 pieces[PATCH_WARPS][PATCH_COLUMNS * PATCH_WORDS];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 column = blockIdx.x * PATCH_COLUMNS, columns = min(args.positions - column, PATCH_COLUMNS);
    const u32 image = args.first_image + blockIdx.z;
    // Lanes after the last column repeat it, and store nothing.
    u32 output = args.first + column + min(lane, columns - 1);
    int origin[3];
#pragma unroll
    for (u32 d = 0; d < 3; d++) {
        const u32 turn = output / args.outputs[d];
        origin[d] = (int)(output - turn * args.outputs[d]) * args.stride[d] - args.padding[d];
        output = turn;
    }
    u32 most = 0;
    const u32 *largest = args.largest + (u64)image * args.pixels;
    const u32 taps = args.taps[0] * args.taps[1] * args.taps[2];
    for (u32 t = warp; t < taps; t += PATCH_WARPS) {
        const u32 line = t / args.taps[0];
        const u32 x = origin[0] + (int)(t - line * args.taps[0]) * args.dilation[0];
        const u32 y = origin[1] + (int)(line % args.taps[1]) * args.dilation[1];
        const u32 z = origin[2] + (int)(line / args.taps[1]) * args.dilation[2];
        if (x < args.extent[0] && y < args.extent[1] && z < args.extent[2]) {
            most = max(most, largest[((u64)z * args.extent[1] + y) * args.extent[0] + x]);
        }
    }
    const ColumnScale of(largest_of_warps(shared, most));
    u8 *to = args.columns + ((u64)blockIdx.z * args.positions + column) * args.column;
    if (blockIdx.y == 0 && warp == 0 && lane < columns) *(float *)(to + lane * args.column + scale_at(args.k)) = of.scale;
    const u32 padded = (args.k + 7) / 8 * 8;
    u32 *piece = pieces[warp];
    // The first pieces go to different blocks: few columns need all multiprocessors more than whole blocks.
    for (u32 k = (warp * gridDim.y + blockIdx.y) * PATCH_PIECE; k < padded; k += gridDim.y * PATCH_WARPS * PATCH_PIECE) {
        PatchCursor cursor(args, args.x + image * args.xs[4], origin, k);
        const u32 count = min(padded - k, PATCH_PIECE);
        // Eight loads are under way at a time.
#pragma unroll 1
        for (u32 i = 0; i < count; i += 8) {
            float elements[8];
#pragma unroll
            for (u32 e = 0; e < 8; e++) elements[e] = cursor.load(args);
#pragma unroll
            for (u32 e = 0; e < 8; e += 2) {
                piece[lane * PATCH_WORDS + (i + e) / 2] = pair_of_floats(F16(), of.inverse * elements[e], of.inverse * elements[e + 1]);
            }
        }
        __syncwarp();
        // Eight lanes store 128 bytes of a column.
        const u32 e = lane % 8 * 8;
#pragma unroll 1
        for (u32 c = lane / 8; c < columns && e < count; c += 4) {
            u32 words[4];
#pragma unroll
            for (u32 w = 0; w < 4; w++) words[w] = piece[c * PATCH_WORDS + e / 2 + w];
            store_words<16>(to + c * args.column + 2ull * (k + e), words);
        }
        __syncwarp();
    }
}

// ARANGE: y[i] = start + step * i. TIMESTEP_EMBEDDING: cosines and sines of each time at frequencies that fall exponentially.
//
// Variants: one entry per op, F32, one element per thread.
// Limits:   dimensions below 2^31.
// Traffic:  the destination is written once.
#include "common/abi.cuh"

struct ArangeArgs {
    u8 *y;
    u64 n;
    u64 stride; // bytes between elements
    float start, step;
};

// Grid: ceil(n / blockDim.x) blocks.
extern "C" __global__ void arange_f32(ArangeArgs args) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    // Rounded after the product, as the CPU rounds.
    if (i < args.n) *(float *)(args.y + i * args.stride) = __fadd_rn(args.start, __fmul_rn(args.step, (float)i));
}

struct TimestepArgs {
    const u8 *x;
    u8 *y;
    u64 xs;     // bytes between times
    u64 ys[2];  // byte strides of the destination
    u32 ne[2];  // counts of the destination: elements per time, times
    u32 half;   // number of frequencies
    float exponent; // frequency j is exp(exponent * j / half)
};

// Grid: pieces of blockDim.x elements, then times.
extern "C" __global__ void timestep_f32(TimestepArgs args) {
    const u32 pieces = (args.ne[0] + blockDim.x - 1) / blockDim.x;
    const u32 i0 = blockIdx.x % pieces * blockDim.x + threadIdx.x, i1 = blockIdx.x / pieces;
    if (i0 >= args.ne[0]) return;
    const float t = *(const float *)(args.x + i1 * args.xs);
    float value = 0.0f; // the last element of an odd count
    if (i0 < 2 * args.half) {
        const u32 j = i0 < args.half ? i0 : i0 - args.half;
        const float angle = t * expf(__fdiv_rn(args.exponent * (float)j, (float)args.half));
        value = i0 < args.half ? cosf(angle) : sinf(angle);
    }
    *(float *)(args.y + i0 * args.ys[0] + i1 * args.ys[1]) = value;
}

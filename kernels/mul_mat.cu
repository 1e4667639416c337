// MUL_MAT: dst[i3, i2, n, m] = sum over k of a[i3 / r3, i2 / r2, m, k] * b[i3, i2, n, k]; and MUL_MAT_ID, where a table of ids
// selects the plane of a (the expert) for each row of b. Products and sums are in f32 (tf32 products with f32 sums in the tiled
// kernels). With quantised weights, activations are rounded to 8 bits first, as in llama.cpp on the CPU. One module per type of
// a: TYPE is its struct, NAME its part of the entries' names.
//
// Variants: mul_mat_vec1, _vec2, _vec4, _vec8: as many columns (rows of b) per block, see mul_mat_vec.cuh;
//           mul_mat_id: one row of b with the matrix of its expert;
//           mul_mat_tile64, _tile128: as many rows and 64 columns per block, on tensor cores, see mul_mat_tile.cuh;
//           mul_mat_widen: converts rows of b from F16 or BF16 to dense f32, for all of these (in the module without a TYPE);
//           mul_mat_round: rounds rows of b to 8 bits in groups of 32 or 256 with a common scale, stored as dense f32.
// Limits:   b is F32. Rows of a and of b are dense and may start at any address. They are fast if blocks are aligned to the
//           natural alignment of their size, and rows of plain elements to 16 bytes. An expert id of -1 gives a row of zeros;
//           another invalid id is reported as an error.
// Floor:    a is read once per 8 columns (64 in the tiled kernels), b once per 4 rows of a (64 or 128).
#include "common/abi.cuh"
#include "common/quants.cuh"

#ifdef TYPE
#include "mul_mat_vec.cuh"
#define ENTRY3(prefix, name) prefix##_##name
#define ENTRY2(prefix, name) ENTRY3(prefix, name)
#define ENTRY(prefix, ...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__) ENTRY2(prefix, NAME)

#if __CUDA_ARCH__ >= 800
#include "mul_mat_tile.cuh"

// Without an explicit minimum of one block, ptxas would limit registers to fit one more block per multiprocessor, and spill.
ENTRY(mul_mat_tile64, 128, 1)(MulMatArgs args) { mat_tile<TYPE, 4>(args); }
ENTRY(mul_mat_tile128, 256, 1)(MulMatArgs args) { mat_tile<TYPE, 8>(args); }
#else // the same on all targets
ENTRY(mul_mat_vec1, 128)(MulMatArgs args) { mat_vec<TYPE, 1>(args); }
ENTRY(mul_mat_vec2, 128)(MulMatArgs args) { mat_vec<TYPE, 2>(args); }
ENTRY(mul_mat_vec4, 128)(MulMatArgs args) { mat_vec<TYPE, 4>(args); }
ENTRY(mul_mat_vec8, 128)(MulMatArgs args) { mat_vec<TYPE, 8>(args); }
ENTRY(mul_mat_id, 128)(MulMatIdArgs args) { routed<TYPE>(args); }
#endif

#else

struct WidenArgs {
    const u8 *b;
    float *packed;
    Shape shape;
    u64 stride; // elements from one packed row to the next
    u32 type, padding;
};

// Grid: x = rows, y = pieces of blockDim.x elements.
extern "C" __global__ void mul_mat_widen(WidenArgs args) {
    u32 i1, i2, i3;
    args.shape.split(blockIdx.x, i1, i2, i3);
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < args.shape.ne[0]; i += gridDim.y * blockDim.x) {
        const u8 *at = args.b + args.shape.at(i, i1, i2, i3);
        const u16 bits = at[0] | at[1] << 8; // the address may be odd
        args.packed[blockIdx.x * args.stride + i] = args.type == TYPE_F16 ? float_of_half(bits) : float_of_bf16(bits);
    }
}

struct RoundArgs {
    const u8 *b;
    float *packed;
    Shape shape;
    u64 stride; // elements from one packed row to the next
    u32 group;  // elements per scale: 32 or 256
    u32 padding;
};

__device__ __forceinline__ float load_float_anywhere(const u8 *at) {
    if (((u64)at & 3) == 0) return *(const float *)at;
    return __uint_as_float(at[0] | at[1] << 8 | at[2] << 16 | (u32)at[3] << 24);
}

// One warp rounds one group, with N values per lane. Groups with values that are not finite stay unchanged.
template <int N>
__device__ __forceinline__ void round_group(const u8 *from, float *to, u32 lane) {
    float x[N], most = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = load_float_anywhere(from + 4 * (lane + 32 * i));
        // Once `most` is NaN, it stays NaN.
        if (most == most && !(fabsf(x[i]) <= fabsf(most))) most = x[i];
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffff, most, step);
        const bool takes = !(fabsf(other) <= fabsf(most)) || (fabsf(other) == fabsf(most) && other > most);
        if (takes && most == most) most = other;
    }
    const bool finite = fabsf(most) <= 3.4028235e38f;
    // Groups of 32 use the scale of Q8_0, a half. Groups of 256 use that of Q8_K, which maps the value of largest magnitude to
    // -127.
    const float inverse = N == 1 ? 127.0f / fabsf(most) : -127.0f / most;
    const float scale = N == 1 ? float_of_half(half_of_float(fabsf(most) / 127.0f)) : 1.0f / inverse;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float code = N == 1 ? roundf(x[i] * inverse) : fminf(rintf(x[i] * inverse), 127.0f);
        to[lane + 32 * i] = !finite ? x[i] : most == 0.0f ? 0.0f : code * scale;
    }
}

// Grid: x = rows, y = groups, one warp per group.
extern "C" __global__ void mul_mat_round(RoundArgs args) {
    const u32 lane = threadIdx.x % 32, groups = args.shape.ne[0] / args.group;
    u32 i1, i2, i3;
    args.shape.split(blockIdx.x, i1, i2, i3);
    for (u32 g = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32; g < groups; g += gridDim.y * (blockDim.x / 32)) {
        const u8 *from = args.b + args.shape.at(g * args.group, i1, i2, i3);
        float *to = args.packed + blockIdx.x * args.stride + g * args.group;
        if (args.group == 32) round_group<1>(from, to, lane);
        else round_group<8>(from, to, lane);
    }
}
#endif

// MUL_MAT: dst[i3, i2, n, m] = sum over k of a[i3 / r3, i2 / r2, m, k] * b[i3, i2, n, k]; and MUL_MAT_ID, where a table of ids
// selects the plane of a (the expert) for each row of b. Sums are in f32. With quantised weights, activations are rounded to 8 bits
// first, as in llama.cpp on the CPU. One module per type of a: TYPE is its struct, NAME its part of the entries' names, BLOCKS is
// defined if it is a block type. mul_mat_packed.cu has the same kernels for packed weights.
//
// Variants: mul_mat_vec1, _vec4, and for plain types _vec2, _vec8: as many columns (rows of b) per block. For plain types, products
//                 are in f32, see mul_mat_vec.cuh; for block types, of 8-bit codes, see mul_mat_dot.cuh;
//           mul_mat_id: one row of b with the matrix of its expert;
//           mul_mat_tile64, _tile128: as many rows and 64 columns per block, on tensor cores (tf32), see mul_mat_tile.cuh.
//           In the module without a TYPE:
//           mul_mat_widen: converts rows of b from F16 or BF16 to dense f32, for plain types;
//           mul_mat_quantize: rounds rows of b to 8-bit codes in groups of 32 or 256 with a common scale, for the vector kernels of
//                 block types and mul_mat_id;
//           mul_mat_round: as mul_mat_quantize, but stores the rounded values as dense f32, for the tiled kernels;
//           mul_mat_pack: converts rows of a block type in place to the packed layout, or back.
// Limits:   b is F32, or quantised. Rows of a and of f32 columns are dense and may start at any address. They are fast if blocks are
//           aligned to the natural alignment of their size, and rows of plain elements to 16 bytes. The quantised columns of a
//           block have fewer than 2^32 bytes. An expert id of -1 gives a row of zeros; another invalid id is reported as an error.
// Floor:    a is read once per 8 columns (4 for block types, 64 in the tiled kernels), b once per 4 rows of a (64 or 128).
#include "common/abi.cuh"
#include "common/quants.cuh"

#ifdef TYPE
#ifdef BLOCKS
#include "mul_mat_dot.cuh"
#else
#include "mul_mat_vec.cuh"
#endif
#define ENTRY3(prefix, name) prefix##_##name
#define ENTRY2(prefix, name) ENTRY3(prefix, name)
#define ENTRY(prefix, ...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__) ENTRY2(prefix, NAME)

#if __CUDA_ARCH__ >= 800
#include "mul_mat_tile.cuh"

// Without an explicit minimum of one block, ptxas would limit registers to fit one more block per multiprocessor, and spill.
ENTRY(mul_mat_tile64, 128, 1)(MulMatArgs args) { mat_tile<TYPE, 4>(args); }
ENTRY(mul_mat_tile128, 256, 1)(MulMatArgs args) { mat_tile<TYPE, 8>(args); }
#else // the same on all targets
#ifdef BLOCKS
ENTRY(mul_mat_vec1, 128, 1)(MulMatArgs args) { quant_mat_vec<TYPE, 1>(args); }
ENTRY(mul_mat_vec4, 128, 1)(MulMatArgs args) { quant_mat_vec<TYPE, 4>(args); }
ENTRY(mul_mat_id, 128, 1)(MulMatIdArgs args) { quant_routed<TYPE>(args); }
#else
ENTRY(mul_mat_vec1, 128, 1)(MulMatArgs args) { mat_vec<TYPE, 1>(args); }
ENTRY(mul_mat_vec2, 128, 1)(MulMatArgs args) { mat_vec<TYPE, 2>(args); }
ENTRY(mul_mat_vec4, 128, 1)(MulMatArgs args) { mat_vec<TYPE, 4>(args); }
ENTRY(mul_mat_vec8, 128, 1)(MulMatArgs args) { mat_vec<TYPE, 8>(args); }
ENTRY(mul_mat_id, 128, 1)(MulMatIdArgs args) { routed<TYPE>(args); }
#endif
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

// Activations for the matrix-vector kernels of block types: 8-bit codes with a scale per 32 or 256 elements, rounded as by
// mul_mat_round. A quantised column starts at a multiple of 16 bytes, and has one after the other
//
//     groups of 32 (blocks of 32)       i8 codes[k], then for each group the f32 scale and the i32 sum of its codes
//     groups of 256 (K types)           i8 codes[k], i16 sums[k / 16] of the codes of 16 elements, f32 scales[k / 256]
//
// The sums of 128 elements are ordered as K types use them: those of elements 0, 32, 64, 96, then those of 16, 48, 80, 112. A
// group with a value that is not finite has the scale NaN and zeros elsewhere.
struct QuantizeArgs {
    const u8 *b;
    u8 *quantized;
    Shape shape;
    u64 stride; // bytes from one quantised column to the next
    u32 group;  // 32 or 256
    u32 padding;
};

// Rounds four values to codes, the bytes of a word. Groups of 32 round halves away from zero, groups of 256 to even.
template <bool LARGE>
__device__ __forceinline__ u32 codes_of(const float (&x)[4], float inverse) {
    u32 bytes[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float scaled = x[i] * inverse;
        // The largest float below 0.5: with 0.5 itself, the sum could round up to an integer that is not nearest to the value.
        bytes[i] = LARGE ? __float2int_rn(scaled) : __float2int_rz(scaled + copysignf(0.49999997f, scaled));
    }
    return __byte_perm(__byte_perm(bytes[0], bytes[1], 0x0040), __byte_perm(bytes[2], bytes[3], 0x0040), 0x5410);
}

// One warp quantises 128 elements, in groups of 32, or 256 elements, one group. Q8_K gives its scale
// the sign opposite to that of the largest element. Rounding to even is symmetric, so the sign changes no product: it is always
// negative here.
template <bool LARGE>
__device__ __forceinline__ void quantize_piece(const QuantizeArgs &args, const u8 *row, u8 *column, u32 first, u32 lane) {
    constexpr int VECTORS = LARGE ? 2 : 1, LANES = LARGE ? 32 : 8; // vectors of four elements per lane; lanes per group
    const u32 k = args.shape.ne[0];
    const bool inside = first + 4 * lane < k;
    float x[VECTORS][4] = {};
    u32 most = 0; // as bits, whose order is that of magnitudes; infinity and NaN are the largest
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const u8 *from = row + 4ull * (first + 128 * v + 4 * lane);
        if (inside) {
            if ((u64)row % 16 == 0) {
                const float4 four = *(const float4 *)from;
                x[v][0] = four.x, x[v][1] = four.y, x[v][2] = four.z, x[v][3] = four.w;
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++) x[v][i] = load_float_anywhere(from + 4 * i);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) most = max(most, __float_as_uint(x[v][i]) & 0x7fffffff);
    }
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) most = max(most, __shfl_xor_sync(0xffffffff, most, step));
    const bool finite = most < 0x7f800000, zero = most == 0 || !finite;
    const float peak = __uint_as_float(most);
    const float inverse = zero ? 0.0f : LARGE ? -127.0f / peak : 127.0f / peak;
    float scale = LARGE ? 1.0f / inverse : float_of_half(half_of_float(peak / 127.0f));
    if (zero) scale = finite ? 0.0f : __uint_as_float(0x7fc00000);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        // Zeros also where the values are not finite.
        const u32 codes = zero ? 0 : codes_of<LARGE>(x[v], inverse);
        if (inside) *(u32 *)(column + first + 128 * v + 4 * lane) = codes;
        int sum = __dp4a((int)codes, 0x01010101, 0);
#pragma unroll
        for (int step = LARGE ? 2 : 4; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
        if (LARGE) {
            const u32 s = lane / 4;
            if (lane % 4 == 0) ((short *)(column + k))[first / 16 + 8 * v + s % 2 * 4 + s / 2] = sum;
        } else if (inside && lane % 8 == 0) {
            *(uint2 *)(column + k + (first / 32 + lane / 8) * 8ull) = make_uint2(__float_as_uint(scale), sum);
        }
    }
    if (LARGE && lane == 0) ((float *)(column + k + k / 8))[first / 256] = scale;
}

// Grid: x = rows, y = pieces of 1024 (groups of 32) or 2048 (groups of 256) elements, by 8 warps.
extern "C" __global__ void mul_mat_quantize(QuantizeArgs args) {
    u32 i1, i2, i3;
    args.shape.split(blockIdx.x, i1, i2, i3);
    const u8 *row = args.b + args.shape.row(i1, i2, i3);
    u8 *column = args.quantized + blockIdx.x * args.stride;
    const u32 lane = threadIdx.x % 32, warp = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    const u32 warps = gridDim.y * (blockDim.x / 32), k = args.shape.ne[0];
    if (args.group == 32) {
        for (u64 first = 128ull * warp; first < k; first += 128ull * warps) quantize_piece<false>(args, row, column, first, lane);
    } else {
        for (u64 first = 256ull * warp; first < k; first += 256ull * warps) quantize_piece<true>(args, row, column, first, lane);
    }
}

// Converts groups of rows in place to the packed layout, which quants.cuh documents, or back.
struct PackBlocksArgs {
    u8 *a;          // the first group, at a multiple of 16 bytes
    u64 groups;
    u32 blocks;     // per group
    u32 block_bytes;
    u32 fields;
    u32 unpack;     // 1: from the packed layout to ggml's
    u32 offsets[4]; // of the fields in ggml's block, in packed order
    u32 bytes[4];
};

// Largest group: MAX_GROUP_BYTES of src/cuda/layout.rs.
constexpr u32 PACK_SHARED_BYTES = 48 << 10;

// Where byte `at` of a group in one layout is in the other one.
__device__ __forceinline__ u32 pack_source(const PackBlocksArgs &args, u32 at) {
    u32 before = 0;
    if (args.unpack) {
        const u32 block = at / args.block_bytes, inside = at % args.block_bytes;
        for (u32 f = 0; f < args.fields; f++) {
            if (inside - args.offsets[f] < args.bytes[f]) {
                return args.blocks * before + block * args.bytes[f] + inside - args.offsets[f];
            }
            before += args.bytes[f];
        }
    } else {
        for (u32 f = 0; f < args.fields; f++) {
            const u32 inside = at - args.blocks * before;
            if (inside < args.blocks * args.bytes[f]) {
                return inside / args.bytes[f] * args.block_bytes + args.offsets[f] + inside % args.bytes[f];
            }
            before += args.bytes[f];
        }
    }
    return at;
}

// Grid: x = groups, as a grid-stride loop.
extern "C" __global__ void __launch_bounds__(256) mul_mat_pack(PackBlocksArgs args) {
    __shared__ __align__(16) u8 stage[PACK_SHARED_BYTES];
    const u32 bytes = args.blocks * args.block_bytes;
    // Bytes that stay together in both layouts: those of fields and offsets that are all even come in pairs.
    bool even = true;
    for (u32 f = 0; f < args.fields; f++) even = even && (args.offsets[f] | args.bytes[f]) % 2 == 0;
    for (u64 group = blockIdx.x; group < args.groups; group += gridDim.x) {
        u8 *a = args.a + group * bytes;
        for (u32 i = 16 * threadIdx.x; i < bytes; i += 16 * blockDim.x) *(uint4 *)(stage + i) = *(const uint4 *)(a + i);
        __syncthreads();
        for (u32 i = 4 * threadIdx.x; i < bytes; i += 4 * blockDim.x) {
            u32 word = 0;
            if (even) {
                for (u32 b = 0; b < 4; b += 2) word |= (u32) * (const u16 *)(stage + pack_source(args, i + b)) << (8 * b);
            } else {
                for (u32 b = 0; b < 4; b++) word |= (u32)stage[pack_source(args, i + b)] << (8 * b);
            }
            *(u32 *)(a + i) = word;
        }
        __syncthreads();
    }
}
#endif

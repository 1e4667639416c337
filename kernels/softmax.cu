// SOFT_MAX: y = e^(z - max) / (sum of e^(z - max) + e^(sink - max)) over each row, where z = x scale + slope(head) mask. The
// mask (F16 or F32) is broadcast over heads and batches, the slope is that of ALiBi or 1, and the sink is one additional logit
// per head.
//
// Variants: softmax_warp: one warp per row of up to 256 elements, blockDim.y rows per block; softmax_block: one block of at
//           least n / 16 threads per row of up to 16384 elements; softmax_long: one block per row of any length. The first two
//           keep the row in registers, in 16-byte accesses if rows start at multiples of 16 bytes.
// Limits:   fewer than 2^31 rows, of fewer than 2^31 elements each.
// Floor:    each element is read once and written once (softmax_long reads twice); each row of the mask is read once if it
//           stays in the cache between heads. y may be x, or an F32 mask of the same shape.
#include "common/abi.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// ALiBi slope of head `h` of `heads`, for max_bias > 0: 2^(-max_bias (h + 1) / steps) for the first `steps` heads, where
// `steps` is the greatest power of two up to `heads`; odd powers of half the step for the remaining heads.
__device__ __forceinline__ float alibi_slope(float max_bias, unsigned heads, unsigned h) {
    const unsigned steps = 1u << (31 - __clz(heads));
    const float power = h < steps ? (float)(h + 1) : (float)(2 * (h - steps) + 1) * 0.5f;
    return exp2f(-max_bias * power / (float)steps);
}

struct SoftMaxArgs {
    const u8 *x, *mask, *sinks;
    u8 *y;
    // x and y are contiguous with counts [n, m, heads, batches], fastest dimension first.
    u32 n, m, heads;
    u32 rows;
    // Rows, heads and batches of the mask, which is contiguous, and its type.
    u32 mask_m, mask_heads, mask_batches;
    u32 mask_type;
    u64 sink_step;
    float scale, max_bias;
};

// Addresses and parameters of one row.
struct Row {
    const u8 *x, *mask;
    u8 *y;
    float slope, sink;

    __device__ Row(const SoftMaxArgs &args, u32 r) {
        const u32 i1 = r % args.m, h = r / args.m % args.heads, i3 = r / args.m / args.heads;
        const u64 at = 4ull * args.n * r;
        x = args.x + at, y = args.y + at;
        const u64 mask_row = ((u64)(i3 % args.mask_batches) * args.mask_heads + h % args.mask_heads) * args.mask_m + i1;
        mask = args.mask ? args.mask + mask_row * args.n * (args.mask_type == TYPE_F16 ? 2 : 4) : nullptr;
        slope = args.max_bias > 0.0f ? alibi_slope(args.max_bias, args.heads, h) : 1.0f;
        sink = args.sinks ? *(const float *)(args.sinks + h * args.sink_step) : minus_infinity();
    }
};

// Loads values 4 i to 4 i + 3 of this thread (in the order of load_kept) from a mask of halves.
template <bool VECTOR>
__device__ __forceinline__ void four_halves(const u8 *mask, u32 n, int i, float (&out)[4]) {
    const u32 t = threadIdx.x, team = blockDim.x;
    if constexpr (VECTOR) {
        const u32 k = kept_index<true>(4 * i, t, team);
        const uint2 words = k < n ? *(const uint2 *)(mask + 2ull * k) : make_uint2(0, 0);
        u16 low, high;
        halves_of_word(words.x, low, high);
        out[0] = float_of_half(low), out[1] = float_of_half(high);
        halves_of_word(words.y, low, high);
        out[2] = float_of_half(low), out[3] = float_of_half(high);
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 k = kept_index<false>(4 * i + j, t, team);
            out[j] = k < n ? F16::load1(mask, k) : 0.0f;
        }
    }
}

// Processes a row of up to N * blockDim.x elements by the team of threads in x.
template <bool VECTOR, int N>
__device__ __forceinline__ void kept(const SoftMaxArgs &args, const Row &row, float *parts) {
    const u32 n = args.n, t = threadIdx.x, team = blockDim.x;
    float z[N];
    load_kept<VECTOR>(row.x, 4, n, t, team, minus_infinity(), z);
#pragma unroll
    for (int i = 0; i < N; i++) z[i] *= args.scale;
    if (row.mask != nullptr) {
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            float four[4];
            if (args.mask_type == TYPE_F16) {
                four_halves<VECTOR>(row.mask, n, i, four);
            } else if constexpr (VECTOR) {
                const u32 k = kept_index<true>(4 * i, t, team);
                const float4 m = k < n ? *(const float4 *)(row.mask + 4ull * k) : make_float4(0, 0, 0, 0);
                four[0] = m.x, four[1] = m.y, four[2] = m.z, four[3] = m.w;
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const u32 k = kept_index<false>(4 * i + j, t, team);
                    four[j] = k < n ? F32::load1(row.mask, k) : 0.0f;
                }
            }
#pragma unroll
            for (int j = 0; j < 4; j++) z[4 * i + j] += row.slope * four[j];
        }
    }
    // Values behind the end must stay -infinity; a scale that is not positive has changed them.
    if (!(args.scale > 0.0f)) {
#pragma unroll
        for (int i = 0; i < N; i++) z[i] = kept_index<VECTOR>(i, t, team) < n ? z[i] : minus_infinity();
    }
    float top = row.sink;
#pragma unroll
    for (int i = 0; i < N; i++) top = fmaxf(top, z[i]);
    top = block_max(top, parts);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        z[i] = expf(z[i] - top);
        sum += z[i];
    }
    sum = block_sum(sum, parts + 32);
    const float factor = 1.0f / (sum + (args.sinks ? expf(row.sink - top) : 0.0f));
#pragma unroll
    for (int i = 0; i < N; i++) z[i] *= factor;
    store_kept<VECTOR>(row.y, 4, n, t, team, z);
}

template <int N>
__device__ __forceinline__ void any_kept(const SoftMaxArgs &args, u32 r) {
    __shared__ float parts[64];
    const Row row(args, r);
    // Decided for all rows at once, so that the branch is uniform over the grid.
    if (args.n % 4 == 0 && aligned(args.x, args.y, 16) && aligned(args.mask, nullptr, 16)) kept<true, N>(args, row, parts);
    else kept<false, N>(args, row, parts);
}

// Blocks of 32 x R threads handle R rows each.
extern "C" __global__ void softmax_warp(SoftMaxArgs args) {
    const u32 r = blockIdx.x * blockDim.y + threadIdx.y;
    if (r < args.rows) any_kept<8>(args, r);
}

// One block of a multiple of 32 threads per row.
extern "C" __global__ void __launch_bounds__(1024) softmax_block(SoftMaxArgs args) { any_kept<16>(args, blockIdx.x); }

__device__ __forceinline__ float logit(const SoftMaxArgs &args, const Row &row, u64 k) {
    float z = F32::load1(row.x, k) * args.scale;
    if (row.mask != nullptr) {
        z += row.slope * (args.mask_type == TYPE_F16 ? F16::load1(row.mask, k) : F32::load1(row.mask, k));
    }
    return z;
}

// As softmax_block, for rows of any length. Online softmax: each thread keeps a running maximum and the sum of exponentials
// relative to it.
extern "C" __global__ void __launch_bounds__(1024) softmax_long(SoftMaxArgs args) {
    __shared__ float parts[64];
    const Row row(args, blockIdx.x);
    float top = minus_infinity(), sum = 0.0f;
    for (u64 k = threadIdx.x; k < args.n; k += blockDim.x) {
        const float z = logit(args, row, k);
        // NaN must propagate to the sum, and -infinity must not produce NaN (-infinity minus -infinity).
        if (z > top) {
            sum = sum * expf(top - z) + 1.0f;
            top = z;
        } else if (z != minus_infinity()) {
            sum += expf(z - top);
        }
    }
    const float all = block_max(fmaxf(top, row.sink), parts);
    sum = block_sum(sum == 0.0f ? 0.0f : sum * expf(top - all), parts + 32);
    sum += args.sinks ? expf(row.sink - all) : 0.0f;
    // A row of only -infinity has sum 0, so its result is NaN: there is no distribution.
    const float factor = 1.0f / sum;
    for (u64 k = threadIdx.x; k < args.n; k += blockDim.x) {
        F32::store1(row.y, k, expf(logit(args, row, k) - all) * factor);
    }
}

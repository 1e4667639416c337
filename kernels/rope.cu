// ROPE (rotary position embedding) and ROPE_BACK, the rotation by the negative angles: rotates pairs of channels by angles that grow with the token's position, (a, b) -> (a cos -
// b sin, a sin + b cos), and copies the other channels. The angle of pair j is position * step^j, computed as a running product
// in f32 (the op is defined this way), divided by the pair's factor, scaled, and interpolated by YaRN. The angles equal those
// of src/cpu/ops/rope.rs bit for bit.
//
// Variants: rope_f32, rope_f16; rope_set_rows: ROPE fused with SET_ROWS, writes the F32 result to rows of an F32, F16 or BF16
//           cache; rope_cache: ROPE of queries, rope_set_rows of keys and SET_ROWS of values in one grid, with RMS_NORM of the heads
//           of queries and keys before; rope_factors: copies the factors to scratch memory if y aliases them. A block handles up to CHUNK pairs of
//           one token for several heads, and computes cosines and sines once, in shared memory. Accesses are 16 bytes if all
//           rows and parts of rows start at multiples of 16, otherwise one element.
// Limits:   dimensions below 2^31; rows of x and y dense. y may be x.
// Floor:    each element is read once and written once.
#include "common/abi.cuh"
#include "common/types.cuh"

// Pairs per block.
#define CHUNK 512

// Numbers of RopeMode. NORMAL pairs neighbouring channels; all other modes pair channel j with channel j + pairs.
enum Mode : u32 { NORMAL = 0, NEOX = 1, MROPE = 2, VISION = 3, IMROPE = 4 };

struct RopeParams {
    Shape xs, ys;
    u64 position_step, factor_step;
    u32 mode, first, pairs;
    // Ratio of the angles of consecutive pairs.
    float step;
    u32 sections[4];
    float freq_scale, ext_factor, low, high;
    // Factors of cosines and of sines (YaRN). They are equal, but for the sign in ROPE_BACK.
    float magnitude, sine_magnitude;
    // Grid: token, batch, part of the heads, chunk of the pairs; the last is fastest. vector: whether strides and counts permit
    // 16-byte accesses.
    u32 parts, chunks, vector;
    u32 padding;
};

struct RopeArgs {
    const u8 *x, *positions, *factors;
    u8 *y;
    RopeParams params;
};

struct RopeSetRowsArgs {
    const u8 *x, *positions, *factors, *ids;
    u8 *y;
    u32 *error_word;
    RopeParams params;
    u64 id_step;
    // Type numbers; number of the op SET_ROWS for error reports.
    u32 id_type, y_type, op, padding;
};

// ---- angles

// 32 zero bits, then the fractional bits of 2 / pi.
__constant__ u32 two_over_pi[8] = {0, 0xa2f9836e, 0x4e441529, 0xfc2757d1, 0xf534ddc0, 0xdb629599, 0x3c439041, 0xfe5163ab};

// Cosine and sine with an error of at most 2 ulp or 1e-11 for all finite angles, without the local memory that sincosf uses for
// large ones. Payne-Hanek reduction: x is an integer times a power of two, so the product with only those
// 64 bits of 2 / pi that contribute less than four quarter turns is exact enough.
__device__ __forceinline__ void cos_sin(float x, float &cos, float &sin) {
    const u32 bits = __float_as_uint(x) & 0x7fffffff;
    if (bits >= 0x7f800000) {
        cos = sin = x - x;
        return;
    }
    float r = fabsf(x);
    u32 quarters = 0;
    if (r > 0.78f) {
        const u32 at = (bits >> 23) - 120, word = at / 32;
        const u32 above = __funnelshift_l(two_over_pi[word + 1], two_over_pi[word], at);
        const u32 below = __funnelshift_l(two_over_pi[word + 2], two_over_pi[word + 1], at);
        // In units of 2^-62 quarter turns.
        const u64 turned = ((u64)above << 32 | below) * ((bits & 0x7fffff) | 0x800000);
        quarters = (turned + (1ull << 61)) >> 62;
        r = (float)(i64)(turned - ((u64)quarters << 62)) * 0x1.921fb6p-62f;
    }
    const float s = r * r;
    const float p = r + r * s * (-1.0f / 6 + s * (1.0f / 120 + s * (-1.0f / 5040 + s * (1.0f / 362880))));
    const float q = 1 + s * (-0.5f + s * (1.0f / 24 + s * (-1.0f / 720 + s * (1.0f / 40320 - s * (1.0f / 3628800)))));
    const float c = quarters & 1 ? p : q, d = quarters & 1 ? q : p;
    cos = (quarters + 1) & 2 ? -c : c;
    sin = ((quarters & 2) != 0) != (x < 0.0f) ? -d : d;
}

// Selects which of the token's positions (axis) rotates pair j, and the exponent of `step` (steps).
__device__ __forceinline__ void axis_of(const RopeParams &args, u32 j, u32 &axis, u32 &steps) {
    axis = 0, steps = j;
    if (args.mode < MROPE) return;
    const u32 t = args.sections[0], h = args.sections[1], w = args.sections[2];
    const u32 sector = j % (t + h + w + args.sections[3]);
    if (args.mode == IMROPE) {
        const u32 k = sector % 3;
        axis = sector / 3 < (k == 0 ? t : k == 1 ? h : w) ? k : 3;
        return;
    }
    axis = (sector >= t) + (sector >= t + h) + (sector >= t + h + w);
    const u32 start = axis == 0 ? 0 : axis == 1 ? t : axis == 2 ? t + h : t + h + w;
    // VISION restarts the exponent in each section; of sections that start at the same pair (empty ones), only the first
    // counts.
    const bool first = axis == 0 || (axis == 1 ? t : axis == 2 ? h : w) > 0;
    if (args.mode == VISION && first) steps = sector - start;
}

__device__ __forceinline__ float angle(const RopeParams &args, const u8 *positions, const u8 *factors, u32 token, u32 j) {
    u32 axis, steps;
    axis_of(args, j, axis, steps);
    const u64 at = (u64)axis * args.xs.ne[2] + token;
    float unscaled = (float)*(const int *)(positions + at * args.position_step);
#pragma unroll 8
    for (u32 i = 0; i < steps; i++) unscaled *= args.step;
    if (factors != nullptr) unscaled /= *(const float *)(factors + j * args.factor_step);
    const float scaled = args.freq_scale * unscaled;
    if (args.ext_factor == 0.0f) return scaled;
    const float above = ((float)j - args.low) / fmaxf(args.high - args.low, 0.001f);
    const float mix = __fmul_rn(1.0f - fminf(fmaxf(above, 0.0f), 1.0f), args.ext_factor);
    return __fadd_rn(__fmul_rn(scaled, 1.0f - mix), __fmul_rn(unscaled, mix));
}

// ---- rows

// Loads 16 bytes: N elements.
template <class T>
struct Sixteen {
    static constexpr u32 N = 16 / T::BYTES;

    static __device__ __forceinline__ void load(const u8 *row, u32 k, float (&out)[N]) {
        if constexpr (N == 8) {
            T::template load8<true>(row, k, out);
        } else {
            const float4 four = *(const float4 *)(row + 4ull * k);
            out[0] = four.x, out[1] = four.y, out[2] = four.z, out[3] = four.w;
        }
    }
};

template <class T>
struct One {
    static constexpr u32 N = 1;

    static __device__ __forceinline__ void load(const u8 *row, u32 k, float (&out)[1]) { out[0] = T::load1(row, k); }
};

// Stores elements k to k + N - 1 of a row; the address is a multiple of the size of N elements.
template <int N>
__device__ __forceinline__ void store(u8 *row, u32 k, u32 type, const float (&v)[N]) {
    if constexpr (N == 1) {
        store_float(row + (u64)k * (type == TYPE_F32 ? 4 : 2), type, v[0]);
    } else if constexpr (N == 8) {
        F16::store8<true>(row, k, v);
    } else if (type == TYPE_F32) {
        *(float4 *)(row + 4ull * k) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
        u16 bits[4];
#pragma unroll
        for (int i = 0; i < 4; i++) bits[i] = type == TYPE_F16 ? half_of_float(v[i]) : bf16_of_float(v[i]);
        *(uint2 *)(row + 2ull * k) = make_uint2(word_of_halves(bits[0], bits[1]), word_of_halves(bits[2], bits[3]));
    }
}

// Rotates a pair. Written as intrinsics, so that the compiler contracts the operations in all kernels alike: the fused kernel
// gives the same bits.
__device__ __forceinline__ void rotate_pair(float &a, float &b, float cos, float sin) {
    const float x = a, y = b;
    a = __fmaf_rn(x, cos, -__fmul_rn(y, sin));
    b = __fmaf_rn(x, sin, __fmul_rn(y, cos));
}

// Work of a block: a part of the heads of a token, and a chunk of the pairs.
struct Part {
    u32 token, batch, part, chunk;

    __device__ Part(const RopeParams &args, u32 i) {
        chunk = i % args.chunks, i /= args.chunks;
        part = i % args.parts, i /= args.parts;
        batch = i % args.xs.ne[3], token = i / args.xs.ne[3];
    }
};

// Computes the cosines and sines of the part's pairs in shared memory.
__device__ __forceinline__ void angles(const RopeParams &args, const u8 *positions, const u8 *factors, const Part &at,
                                       float *cos, float *sin) {
    const u32 start = at.chunk * CHUNK, pairs = min(args.pairs - start, (u32)CHUNK);
    for (u32 j = threadIdx.y * blockDim.x + threadIdx.x; j < pairs; j += blockDim.x * blockDim.y) {
        float c, s;
        cos_sin(angle(args, positions, factors, at.token, start + j), c, s);
        cos[j] = c * args.magnitude, sin[j] = s * args.sine_magnitude;
    }
    __syncthreads();
}

// RMS_NORM of each head, before the rotation: the scales of the block's heads, and the weights; null without a norm.
struct HeadNorm {
    const float *scales;
    const u8 *weights;
};

// Rotates the part. `x` and `y` point to head 0 of the token; `x_step` and `y_step` are the byte strides of heads. Channels
// outside of the pairs are written only with `copy`, and never with a norm.
template <class Load>
__device__ __forceinline__ void rotate(const RopeParams &args, const Part &at, const u8 *x, u8 *y, u64 x_step, u64 y_step,
                                       u32 type, bool copy, const float *cos, const float *sin, HeadNorm norm = {}) {
    constexpr u32 N = Load::N;
    const u32 start = at.chunk * CHUNK, pairs = min(args.pairs - start, (u32)CHUNK);
    const u32 heads = (args.xs.ne[1] + args.parts - 1) / args.parts, across = N * blockDim.x;
    const u32 head = at.part * heads + threadIdx.y, end = min(at.part * heads + heads, args.xs.ne[1]);
    const bool neighbours = args.mode == NORMAL;
    x += head * x_step, y += head * y_step;
    x_step *= blockDim.y, y_step *= blockDim.y;
    for (u32 j = N * threadIdx.x; j < pairs; j += across) {
        // Modes that pair the halves: N channels of each half, pairs from j on. NORMAL (neighbours): N channels of each half of
        // the chunk, so that the accesses of a warp are coalesced too: pairs from j / 2 on, and from (pairs + j) / 2 on.
        u32 a = args.first + start + j, b = a + args.pairs, first = j, second = j + N / 2;
        if (neighbours) {
            a += N == 1 ? start + j : start, b = a + (N == 1 ? 1 : pairs);
            if (N > 1) first = j / 2, second = (pairs + j) / 2;
        }
        float c[N], s[N];
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            const u32 k = N == 1 || i < N / 2 ? first + i : second + i - N / 2;
            c[i] = cos[k], s[i] = sin[k];
        }
        const u8 *from = x;
        u8 *to = y;
        for (u32 r = head; r < end; r += blockDim.y, from += x_step, to += y_step) {
            float v[N], w[N];
            Load::load(from, a, v);
            Load::load(from, b, w);
            if (norm.weights != nullptr) {
                float first[N], second[N];
                Load::load(norm.weights, a, first);
                Load::load(norm.weights, b, second);
                const float scale = norm.scales[r - at.part * heads];
#pragma unroll
                for (u32 i = 0; i < N; i++) v[i] = v[i] * scale * first[i], w[i] = w[i] * scale * second[i];
            }
            if (!neighbours || N == 1) {
#pragma unroll
                for (u32 i = 0; i < N; i++) rotate_pair(v[i], w[i], c[i], s[i]);
            } else {
#pragma unroll
                for (u32 i = 0; i + 1 < N; i += 2) {
                    rotate_pair(v[i], v[i + 1], c[i / 2], s[i / 2]);
                    rotate_pair(w[i], w[i + 1], c[(N + i) / 2], s[(N + i) / 2]);
                }
            }
            store<N>(to, a, type, v);
            store<N>(to, b, type, w);
        }
    }
    if (!copy) return;
    // Channels outside of the pairs, divided among the chunks.
    const u32 outside = args.xs.ne[0] - 2 * args.pairs;
    for (u32 k = at.chunk * across + N * threadIdx.x; k < outside; k += args.chunks * across) {
        const u32 channel = k < args.first ? k : k + 2 * args.pairs;
        const u8 *from = x;
        u8 *to = y;
        for (u32 r = head; r < end; r += blockDim.y, from += x_step, to += y_step) {
            float v[N];
            Load::load(from, channel, v);
            store<N>(to, channel, type, v);
        }
    }
}

template <class T>
__device__ __forceinline__ void rope(const RopeArgs &args, u32 type) {
    __shared__ float cos[CHUNK], sin[CHUNK];
    const RopeParams &params = args.params;
    const Part at(params, blockIdx.x);
    angles(params, args.positions, args.factors, at, cos, sin);
    const u8 *x = args.x + params.xs.row(0, at.token, at.batch);
    u8 *y = args.y + params.ys.row(0, at.token, at.batch);
    // If y is x, the channels outside of the pairs are already in place.
    const bool copy = args.x != args.y, vector = params.vector && aligned(args.x, args.y, 16);
    const u64 x_step = params.xs.nb[1], y_step = params.ys.nb[1];
    if (vector) rotate<Sixteen<T>>(params, at, x, y, x_step, y_step, type, copy, cos, sin);
    else rotate<One<T>>(params, at, x, y, x_step, y_step, type, copy, cos, sin);
}

extern "C" __global__ void __launch_bounds__(256) rope_f32(RopeArgs args) { rope<F32>(args, TYPE_F32); }
extern "C" __global__ void __launch_bounds__(256) rope_f16(RopeArgs args) { rope<F16>(args, TYPE_F16); }

// Row ids of a SET_ROWS.
struct RowIds {
    const u8 *ids;
    u64 step;
    u32 type;

    __device__ __forceinline__ i64 of(u32 token) const {
        const u8 *at = ids + token * step;
        return type == TYPE_I64 ? *(const i64 *)at : *(const int *)at;
    }
};

// Whether the block writes the row of a token of a cache of `rows` rows, and its id. Reports a row outside of the cache. If several
// tokens have the same id, only the last one is written. All threads of the block must call this function.
__device__ __forceinline__ bool finds_row(const RowIds &ids, u32 token, u32 tokens, u32 rows, u32 *error_word, u32 op, i64 &id) {
    id = ids.of(token);
    if (id < 0 || id >= rows) {
        report_bad_index(error_word, op);
        return false;
    }
    int again = 0;
    const u32 threads = blockDim.x * blockDim.y;
    for (u32 i = token + 1 + threadIdx.y * blockDim.x + threadIdx.x; i < tokens; i += threads) again |= ids.of(i) == id;
    return !__syncthreads_or(again);
}

// ROPE fused with SET_ROWS. Head h of a token is written to channels h * ne[0] and up of the cache row. One batch.
extern "C" __global__ void __launch_bounds__(256) rope_set_rows(RopeSetRowsArgs args) {
    __shared__ float cos[CHUNK], sin[CHUNK];
    const RopeParams &params = args.params;
    const Part at(params, blockIdx.x);
    i64 id;
    const RowIds ids = {args.ids, args.id_step, args.id_type};
    if (!finds_row(ids, at.token, params.xs.ne[2], params.ys.ne[1], args.error_word, args.op, id)) return;
    angles(params, args.positions, args.factors, at, cos, sin);
    const u8 *x = args.x + params.xs.row(0, at.token, 0);
    u8 *y = args.y + id * params.ys.nb[1];
    const u64 x_step = params.xs.nb[1], y_step = (u64)params.xs.ne[0] * (args.y_type == TYPE_F32 ? 4 : 2);
    const bool vector = params.vector && aligned(args.x, args.y, 16);
    if (vector) rotate<Sixteen<F32>>(params, at, x, y, x_step, y_step, args.y_type, true, cos, sin);
    else rotate<One<F32>>(params, at, x, y, x_step, y_step, args.y_type, true, cos, sin);
}

// Most heads of queries or keys with a norm.
constexpr u32 MAX_NORM_HEADS = 128;

// Computes the scales of RMS_NORM of the part's heads in shared memory. blockDim.x is a power of two up to 32.
__device__ __forceinline__ void head_scales(const RopeParams &args, const Part &at, const u8 *x, u64 x_step, float eps,
                                            float *scales) {
    const u32 heads = (args.xs.ne[1] + args.parts - 1) / args.parts, first = at.part * heads, n = args.xs.ne[0];
    const u32 end = min(first + heads, args.xs.ne[1]);
    // The threads of a head are neighbours in a warp; those of other heads may have ended the loop.
    const u32 lane = (threadIdx.y * blockDim.x + threadIdx.x) % 32;
    const u32 mask = (u32)(((1ull << blockDim.x) - 1) << (lane - threadIdx.x));
    for (u32 r = first + threadIdx.y; r < end; r += blockDim.y) {
        float square = 0.0f;
        for (u32 k = threadIdx.x; k < n; k += blockDim.x) {
            const float value = F32::load1(x + r * x_step, k);
            square += value * value;
        }
        for (u32 step = blockDim.x / 2; step > 0; step /= 2) square += __shfl_xor_sync(mask, square, step);
        if (threadIdx.x == 0) scales[r - first] = 1.0f / sqrtf(square / (float)n + eps);
    }
    __syncthreads();
}

// Keys or values and their cache.
struct CacheRows {
    u64 x_step, y_step;   // bytes from one token to the next, and from one row of the cache to the next
    u64 id_step;
    u32 id_type, y_type;
    u32 row, rows;        // elements of a row; rows of the cache
};

struct RopeCacheArgs {
    const u8 *q, *positions, *factors;
    u8 *y;
    const u8 *k, *k_ids;
    u8 *k_cache;
    const u8 *v, *v_ids;
    u8 *v_cache;
    const u8 *q_norm, *k_norm; // weights of RMS_NORM of heads before ROPE, or null; then all channels are rotated, in one chunk
    u32 *error_word;
    RopeParams params;    // of the queries; one batch. `vector`: also of the keys
    CacheRows keys, values;
    u64 head_step;        // bytes from one head of the keys to the next
    u32 heads, parts;     // of the keys, as params.xs.ne[1] and params.parts
    u32 q_blocks, k_blocks; // blocks of the grid for queries, and for keys behind them; then one for each token's values
    u32 v_vector;         // whether strides and counts of the values permit 16-byte accesses
    u32 op;               // number of the op SET_ROWS for error reports
    float q_eps, k_eps;   // of the norms
};

template <class Load>
__device__ __forceinline__ void store_values(const u8 *x, u8 *y, u32 n, u32 type) {
    const u32 threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
    for (u32 k = Load::N * thread; k < n; k += Load::N * threads) {
        float v[Load::N];
        Load::load(x, k, v);
        store<Load::N>(y, k, type, v);
    }
}

extern "C" __global__ void __launch_bounds__(256) rope_cache(RopeCacheArgs args) {
    __shared__ float cos[CHUNK], sin[CHUNK], scales[MAX_NORM_HEADS];
    const u32 tokens = args.params.xs.ne[2];
    i64 id;
    if (blockIdx.x >= args.q_blocks + args.k_blocks) {
        const u32 token = blockIdx.x - args.q_blocks - args.k_blocks;
        const RowIds ids = {args.v_ids, args.values.id_step, args.values.id_type};
        if (!finds_row(ids, token, tokens, args.values.rows, args.error_word, args.op, id)) return;
        const u8 *x = args.v + token * args.values.x_step;
        u8 *y = args.v_cache + id * args.values.y_step;
        if (args.v_vector && aligned(args.v, args.v_cache, 16)) store_values<Sixteen<F32>>(x, y, args.values.row, args.values.y_type);
        else store_values<One<F32>>(x, y, args.values.row, args.values.y_type);
        return;
    }
    // Queries and keys differ in their addresses, and in the number and division of their heads.
    RopeParams params = args.params;
    const bool keys = blockIdx.x >= args.q_blocks;
    if (keys) params.xs.ne[1] = args.heads, params.parts = args.parts;
    const Part at(params, keys ? blockIdx.x - args.q_blocks : blockIdx.x);
    const u8 *x = args.q + params.xs.row(0, at.token, 0);
    u8 *y = args.y + params.ys.row(0, at.token, 0);
    u64 x_step = params.xs.nb[1], y_step = params.ys.nb[1];
    u32 type = TYPE_F32;
    if (keys) {
        const RowIds ids = {args.k_ids, args.keys.id_step, args.keys.id_type};
        if (!finds_row(ids, at.token, tokens, args.keys.rows, args.error_word, args.op, id)) return;
        type = args.keys.y_type;
        x = args.k + at.token * args.keys.x_step, y = args.k_cache + id * args.keys.y_step;
        x_step = args.head_step, y_step = (u64)params.xs.ne[0] * (type == TYPE_F32 ? 4 : 2);
    }
    angles(params, args.positions, args.factors, at, cos, sin);
    const HeadNorm norm = {scales, keys ? args.k_norm : args.q_norm};
    if (norm.weights != nullptr) head_scales(params, at, x, x_step, keys ? args.k_eps : args.q_eps, scales);
    const bool vector = params.vector && aligned(args.q, args.y, 16) && aligned(args.k, args.k_cache, 16) &&
                        aligned(args.q_norm, args.k_norm, 16);
    const bool copy = norm.weights == nullptr && (keys || args.q != args.y);
    if (vector) rotate<Sixteen<F32>>(params, at, x, y, x_step, y_step, type, copy, cos, sin, norm);
    else rotate<One<F32>>(params, at, x, y, x_step, y_step, type, copy, cos, sin, norm);
}

struct RopeFactorsArgs {
    const u8 *from;
    u8 *to;
    u64 step;
    u32 n, padding;
};

extern "C" __global__ void rope_factors(RopeFactorsArgs args) {
    const u32 k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k < args.n) ((float *)args.to)[k] = *(const float *)(args.from + k * args.step);
}

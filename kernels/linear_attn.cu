// RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN and GATED_DELTA_NET. src/ops/linear_attn.rs has the formulas.
//
// Variants: <rule>_<E>: a warp takes the part of the state that belongs to one value through all tokens. Its lanes are keys, of
//           which each has up to E.
// Limits:   heads of up to 32 E keys.
// Floor:    the state is read once and written once; each warp reads the vectors of the tokens, which stay in the caches.
#include "common/abi.cuh"
#include "common/reduce.cuh"

// Where the vectors of the tokens lie: strides in bytes. Heads repeat; `shared_by` consecutive sequences share a sequence.
struct Vectors {
    u64 head, token, sequence;
    u32 heads, shared_by;

    __device__ const float *at(const u8 *start, u32 h, u32 t, u32 s) const {
        return (const float *)(start + h % heads * head + t * token + s / shared_by * sequence);
    }
};

struct LinearAttnArgs {
    // r of RWKV is q. a is the bonus of RWKV_WKV6, a of RWKV_WKV7, beta of GATED_DELTA_NET; b is that of RWKV_WKV7.
    const u8 *q, *k, *v, *decay, *a, *b, *state;
    u8 *y;
    Vectors q_at, k_at, v_at;
    // Elements of the state between two keys and between two values.
    u32 key_step, value_step;
    u32 size, heads, tokens, sequences;
    // Values of decay per head: 1 or size.
    u32 decays;
    // Blocks of states in y.
    u32 snapshots;
    float scale;
    u32 values;  // of all heads and sequences
};

enum Rule { WKV6, WKV7, GATED, DELTA };

__device__ __forceinline__ float warp_total(float x) {
    return warp_reduce(x, [](float a, float b) { return a + b; });
}

// Block (32, values).
template <Rule RULE, int E>
__device__ __forceinline__ void recur(const LinearAttnArgs &args) {
    const u32 number = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x, size = args.size;
    if (number >= args.values) return;
    const u32 value = number % size, matrix = number / size, head = matrix % args.heads, s = matrix / args.heads;
    const u64 first = (u64)matrix * size * size + (u64)value * args.value_step;
    float m[E], bonus[E];
#pragma unroll
    for (int e = 0; e < E; e++) {
        const u32 i = lane + 32 * e;
        m[e] = i < size ? ((const float *)args.state)[first + (u64)i * args.key_step] : 0.0f;
        if (RULE == WKV6) bonus[e] = i < size ? ((const float *)args.a)[(u64)head * size + i] : 0.0f;
    }
    float *y = (float *)args.y;
    const u64 matrices = (u64)args.heads * args.sequences;
    float *states = y + matrices * args.tokens * size;
    for (u32 t = 0; t < args.tokens; t++) {
        const u64 place = ((u64)s * args.tokens + t) * args.heads + head;
        const float *q = args.q_at.at(args.q, head, t, s), *k = args.k_at.at(args.k, head, t, s);
        const float v = args.v_at.at(args.v, head, t, s)[value];
        const float *decay = (const float *)args.decay + place * args.decays;
        const float *a = (const float *)args.a + place * size, *b = (const float *)args.b + place * size;
        float sum = 0.0f, factor = 0.0f;
        if (RULE == WKV7 || RULE == DELTA) {
#pragma unroll
            for (int e = 0; e < E; e++) {
                const u32 i = lane + 32 * e;
                if (i < size) {
                    if (RULE == DELTA) m[e] *= expf(decay[args.decays == 1 ? 0 : i]);
                    factor += m[e] * (RULE == DELTA ? k[i] : a[i]);
                }
            }
            factor = warp_total(factor);
            if (RULE == DELTA) factor = (v - factor) * ((const float *)args.a)[place];
        }
#pragma unroll
        for (int e = 0; e < E; e++) {
            const u32 i = lane + 32 * e;
            if (i < size) {
                if (RULE == WKV6) {
                    const float kv = k[i] * v;
                    sum += q[i] * (kv * bonus[e] + m[e]);
                    m[e] = m[e] * decay[i] + kv;
                } else {
                    if (RULE == WKV7) m[e] = m[e] * decay[i] + v * k[i] + factor * b[i];
                    if (RULE == GATED) m[e] = m[e] * decay[i] + k[i] * v;
                    if (RULE == DELTA) m[e] += factor * k[i];
                    sum += m[e] * q[i];
                }
            }
        }
        sum = warp_total(sum) * args.scale;
        if (lane == 0) y[place * size + value] = sum;
        const u32 behind = args.tokens - 1 - t;
        if (behind < args.snapshots) {
            float *block = states + behind * matrices * size * size;
#pragma unroll
            for (int e = 0; e < E; e++) {
                const u32 i = lane + 32 * e;
                if (i < size) block[first + (u64)i * args.key_step] = m[e];
            }
        }
    }
}

#define ENTRIES(name, rule)                                                                               \
    extern "C" __global__ void name##_2(LinearAttnArgs args) { recur<rule, 2>(args); }                     \
    extern "C" __global__ void name##_8(LinearAttnArgs args) { recur<rule, 8>(args); }

ENTRIES(wkv6, WKV6)
ENTRIES(wkv7, WKV7)
ENTRIES(gated_linear_attn, GATED)
ENTRIES(gated_delta_net, DELTA)

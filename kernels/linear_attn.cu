// RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN and GATED_DELTA_NET. src/ops/linear_attn.rs has the formulas.
//
// Variants: <rule>_<keys>, for heads of up to so many keys; gated_delta_net_by_key has a gate for each key. Each rule has its own PTX
//           file (RULE, ENTRY), because a model uses one of them. A block takes 32 columns of a head's state through all
//           tokens, or 16 with 256 keys (recurrence.cuh).
// Limits:   heads of up to 256 keys.
// Floor:    each vector and the state is read once, results are written once, and an element of the state takes three
//           multiply-adds per token with the delta rule. Blocks of a head read its q and k again, from the L2 cache.
#include "recurrence.cuh"

// Where the vectors of the tokens lie: strides in bytes. Heads repeat; `shared_by` consecutive sequences share a sequence.
struct Vectors {
    u64 head, token, sequence;
    u32 heads, shared_by;

    __device__ OfTokens at(const u8 *start, u32 h, u32 s) const {
        return {start + h % heads * head + s / shared_by * sequence, token};
    }
};

struct LinearAttnArgs {
    // r of RWKV is q. a is the bonus of RWKV_WKV6, a of RWKV_WKV7, beta of GATED_DELTA_NET; b is that of RWKV_WKV7.
    const u8 *q, *k, *v, *decay, *a, *b, *state;
    u8 *y;
    Vectors q_at, k_at, v_at;
    u32 size, heads, tokens, sequences;
    // Blocks of states in y.
    u32 snapshots;
    float scale;
};

// Blocks: pieces of a head, heads, sequences.
template <int LANES, int K>
__device__ __forceinline__ void run(const LinearAttnArgs &args) {
    const u32 size = args.size, pieces = (size + BLOCK_COLUMNS<LANES> - 1) / BLOCK_COLUMNS<LANES>;
    const u32 matrix = blockIdx.x / pieces, head = matrix % args.heads, s = matrix / args.heads;
    const u64 matrices = (u64)args.heads * args.sequences, of_state = (u64)size * size;
    // Contiguous vectors with `n` elements per head.
    const auto dense = [&](const u8 *start, u32 n) {
        const u64 bytes = 4ull * n;
        return OfTokens{start + ((u64)s * args.tokens * args.heads + head) * bytes, args.heads * bytes};
    };
    Recurrence r = {};
    r.vectors[KEY] = args.k_at.at(args.k, head, s);
    r.vectors[QUERY] = args.q_at.at(args.q, head, s);
    r.values = args.v_at.at(args.v, head, s);
    if (RULE == DELTA) r.gates = dense(args.decay, 1);
    else r.vectors[DECAY] = dense(args.decay, size);
    if (RULE == DELTA || RULE == DELTA_BY_KEY) r.rates = dense(args.a, 1);
    if (RULE == WKV6) r.bonus = (const float *)args.a + (u64)head * size;
    if (RULE == WKV7) r.vectors[PROBE] = dense(args.a, size), r.vectors[PUSH] = dense(args.b, size);
    r.state = (const float *)args.state + matrix * of_state;
    r.y = (float *)args.y + ((u64)s * args.tokens * args.heads + head) * size;
    r.y_step = (u64)args.heads * size;
    r.states = (float *)args.y + matrices * args.tokens * size + matrix * of_state;
    r.states_step = matrices * of_state;
    r.keys = r.columns = size;
    r.tokens = args.tokens, r.snapshots = args.snapshots, r.scale = args.scale;
    recur<RULE, LANES, K>(r, blockIdx.x % pieces * BLOCK_COLUMNS<LANES>);
}

#define KEYS(name, keys, lanes) \
    extern "C" __global__ void __launch_bounds__(RECURRENCE_THREADS) name##_##keys(LinearAttnArgs args) { run<lanes, keys / lanes>(args); }
#define ENTRIES(name) KEYS(name, 64, 8) KEYS(name, 128, 8) KEYS(name, 256, 16)
ENTRIES(ENTRY)

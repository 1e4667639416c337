// SSM_CONV and SSM_SCAN, the ops of state-space models (Mamba-1 and Mamba-2). src/ops/ssm.rs has the formulas.
//
// Variants: ssm_conv: a block computes a tile of channels and tokens, whose part of x it copies to shared memory, because x is
//           dense along the tokens and y along the channels. ssm_scan_head_<n> (Mamba-2): a block takes 32 rows of up to n elements
//           through all tokens, or 16 with 256 elements (recurrence.cuh). ssm_scan_row_<n> (Mamba-1): some lanes of a warp take a
//           row of up to n elements through all tokens.
//           Longer windows than 64 tokens, which no model has, are read where they lie.
// Limits:   rows of the state of up to 256 elements.
// Floor:    x, the weights, the state, b and c are read once per block or row, results are written once.
#include "common/abi.cuh"
#include "recurrence.cuh"

// Op number, for report_bad_index().
constexpr u32 SSM_SCAN = 77;

struct ConvArgs {
    const u8 *x, *w;
    u8 *y;
    // Bytes between the sequences of x, and between the tokens and the sequences of y.
    u64 x_sequence, y_token, y_sequence;
    u32 window, d_conv, channels, tokens;
};

constexpr u32 TILE_CHANNELS = 32, TILE_TOKENS = 64, MAX_SHARED_WINDOW = 64;

// Block (32, 4): lanes are channels. Shared memory: rows of the tile's window of x, then the weights; both have an odd length,
// so that the lanes read from different banks.
extern "C" __global__ void ssm_conv(ConvArgs args) {
    extern __shared__ float shared[];
    const u32 row = (TILE_TOKENS + args.d_conv - 1) | 1, weights_row = args.d_conv | 1;
    float *weights = shared + TILE_CHANNELS * row;
    const u32 c0 = blockIdx.x * TILE_CHANNELS, t0 = blockIdx.y * TILE_TOKENS, sequence = blockIdx.z;
    const u32 channels = min(TILE_CHANNELS, args.channels - c0), tokens = min(TILE_TOKENS, args.tokens - t0);
    const u32 inputs = tokens + args.d_conv - 1, lane = threadIdx.x;
    const float *x = (const float *)(args.x + sequence * args.x_sequence) + t0;
    float *y = (float *)(args.y + sequence * args.y_sequence + t0 * args.y_token) + c0 + lane;
    if (args.d_conv > MAX_SHARED_WINDOW) {
        if (lane >= channels) return;
        const u64 channel = c0 + lane;
        const float *w = (const float *)args.w + channel * args.d_conv;
        for (u32 t = threadIdx.y; t < tokens; t += blockDim.y) {
            float sum = 0.0f;
            for (u32 j = 0; j < args.d_conv; j++) sum += x[channel * args.window + t + j] * w[j];
            *(float *)((u8 *)y + t * args.y_token) = sum;
        }
        return;
    }
    for (u32 c = threadIdx.y; c < channels; c += blockDim.y) {
        const u64 channel = c0 + c;
        for (u32 i = lane; i < inputs; i += 32) shared[c * row + i] = x[channel * args.window + i];
        for (u32 j = lane; j < args.d_conv; j += 32) {
            weights[c * weights_row + j] = ((const float *)args.w)[channel * args.d_conv + j];
        }
    }
    __syncthreads();
    if (lane >= channels) return;
    for (u32 t = threadIdx.y; t < tokens; t += blockDim.y) {
        float sum = 0.0f;
        for (u32 j = 0; j < args.d_conv; j++) sum += shared[lane * row + t + j] * weights[lane * weights_row + j];
        *(float *)((u8 *)y + t * args.y_token) = sum;
    }
}

struct ScanArgs {
    const u8 *states, *x, *dt, *a, *b, *c, *ids;
    u8 *y;
    u32 *error_word;
    // Bytes between the tokens and between the sequences of x, b and c.
    u64 x_token, x_sequence, b_token, b_sequence, c_token, c_sequence, ids_step;
    u32 n, hd, heads, heads_per_group, tokens, sequences, slots;
    u32 snapshots; // blocks of states in y
};

// Mamba-1, where each element of a row has its own decay. LANES lanes share a row, and each has up to E elements. Block (32, WARPS).
template <int LANES, int E>
__device__ __forceinline__ void scan_row(const ScanArgs &args) {
    const u32 number = (blockIdx.x * blockDim.y + threadIdx.y) * (32 / LANES) + threadIdx.x / LANES;
    const u32 lane = threadIdx.x % LANES, n = args.n, width = args.hd * args.heads;
    const u32 row = number % width, s = number / width, head = row / args.hd;
    // All lanes of a warp take part in its shuffles, so that those without a row stay.
    bool works = s < args.sequences;
    const int slot = works ? *(const int *)(args.ids + s * args.ids_step) : 0;
    if (works && (u32)slot >= args.slots) {
        works = false;
        if (lane == 0) report_bad_index(args.error_word, SSM_SCAN);
    }
    const u8 *const x_at = args.x + s * args.x_sequence + 4ull * row;
    const u64 of_group = 4ull * n * (head / args.heads_per_group);
    const u8 *const b_at = args.b + s * args.b_sequence + of_group, *const c_at = args.c + s * args.c_sequence + of_group;
    const u64 token = (u64)s * args.tokens;
    float state[E], a[E], dt = 0.0f, x = 0.0f, b[E], c[E];
    bool inside[E];
    const auto load = [&](u32 t) {
        if (works) dt = ((const float *)args.dt)[(token + t) * args.heads + head], x = *(const float *)(x_at + t * args.x_token);
#pragma unroll
        for (int e = 0; e < E; e++) {
            if (!inside[e]) continue;
            b[e] = ((const float *)(b_at + t * args.b_token))[lane + LANES * e];
            c[e] = ((const float *)(c_at + t * args.c_token))[lane + LANES * e];
        }
    };
#pragma unroll
    for (int e = 0; e < E; e++) {
        const u32 i = lane + LANES * e;
        inside[e] = works && i < n;
        state[e] = inside[e] ? ((const float *)args.states)[((u64)slot * width + row) * n + i] : 0.0f;
        a[e] = inside[e] ? ((const float *)args.a)[(u64)head * n + i] : 0.0f;
        b[e] = c[e] = 0.0f;
    }
    float *y = (float *)args.y;
    load(0);
    for (u32 t = 0; t < args.tokens; t++) {
        const float step = softplus(dt), input = x * step;
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < E; e++) {
            state[e] = state[e] * expf(step * a[e]) + b[e] * input;
            sum += state[e] * c[e];
        }
        // Those of the next token, before the shuffles, which then overlap with the loads.
        if (t + 1 < args.tokens) load(t + 1);
        sum = column_sum<LANES>(sum);
        if (works && lane == 0) y[(token + t) * width + row] = sum;
    }
    float *to = y + (u64)width * args.tokens * args.sequences + ((u64)s * width + row) * n;
#pragma unroll
    for (int e = 0; e < E; e++) {
        if (inside[e]) to[lane + LANES * e] = state[e];
    }
}

extern "C" __global__ void ssm_scan_row_16(ScanArgs args) { scan_row<4, 4>(args); }
extern "C" __global__ void ssm_scan_row_256(ScanArgs args) { scan_row<32, 8>(args); }

// Mamba-2, where a head has one decay. Blocks: pieces of a head, heads, sequences.
template <int LANES, int K>
__device__ __forceinline__ void scan_head(const ScanArgs &args) {
    const u32 pieces = (args.hd + BLOCK_COLUMNS<LANES> - 1) / BLOCK_COLUMNS<LANES>;
    const u32 matrix = blockIdx.x / pieces, head = matrix % args.heads, s = matrix / args.heads;
    const int slot = *(const int *)(args.ids + s * args.ids_step);
    if ((u32)slot >= args.slots) {
        if (threadIdx.x == 0) report_bad_index(args.error_word, SSM_SCAN);
        return;
    }
    const u64 width = (u64)args.hd * args.heads, of_state = (u64)args.n * args.hd, of_group = head / args.heads_per_group * 4ull * args.n;
    Recurrence r = {};
    r.vectors[KEY] = {args.b + s * args.b_sequence + of_group, args.b_token};
    r.vectors[QUERY] = {args.c + s * args.c_sequence + of_group, args.c_token};
    r.values = {args.x + s * args.x_sequence + 4ull * head * args.hd, args.x_token};
    r.gates = {args.dt + 4 * ((u64)s * args.tokens * args.heads + head), 4ull * args.heads};
    r.a = ((const float *)args.a)[head];
    r.state = (const float *)args.states + ((u64)slot * args.heads + head) * of_state;
    r.y = (float *)args.y + (u64)s * args.tokens * width + (u64)head * args.hd;
    r.y_step = width;
    r.states = (float *)args.y + width * args.tokens * args.sequences + matrix * of_state;
    r.states_step = width * args.n * args.sequences;
    r.keys = args.n, r.columns = args.hd, r.tokens = args.tokens, r.snapshots = args.snapshots, r.scale = 1.0f;
    recur<SCAN, LANES, K>(r, blockIdx.x % pieces * BLOCK_COLUMNS<LANES>);
}

#define HEAD_ENTRY(keys, lanes) \
    extern "C" __global__ void __launch_bounds__(RECURRENCE_THREADS) ssm_scan_head_##keys(ScanArgs args) { scan_head<lanes, keys / lanes>(args); }
HEAD_ENTRY(64, 8)
HEAD_ENTRY(128, 8)
HEAD_ENTRY(256, 16)

// SSM_CONV and SSM_SCAN, the ops of state-space models (Mamba-1 and Mamba-2). src/ops/ssm.rs has the formulas.
//
// Variants: ssm_conv: a block computes a tile of channels and tokens, whose part of x it copies to shared memory, because x is
//           dense along the tokens and y along the channels. ssm_scan_<E>: a warp takes one row of the state through all
//           tokens, with up to E elements in each lane.
//           Longer windows than 64 tokens, which no model has, are read where they lie.
// Limits:   rows of the state of up to 32 E elements.
// Floor:    x, the weights, the state, b and c are read once per block or row, results are written once.
#include "common/abi.cuh"
#include "common/reduce.cuh"

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
    // Blocks of states in y, and whether each element of a row has its own decay.
    u32 snapshots, by_element;
    u32 rows;  // of all sequences
};

// Softplus as ggml defines it.
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Block (32, rows).
template <int E>
__device__ __forceinline__ void scan(const ScanArgs &args) {
    const u32 number = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x, n = args.n;
    if (number >= args.rows) return;
    const u32 width = args.hd * args.heads, row = number % width, sequence = number / width, head = row / args.hd;
    const int slot = *(const int *)(args.ids + sequence * args.ids_step);
    if ((u32)slot >= args.slots) {
        if (lane == 0) report_bad_index(args.error_word, SSM_SCAN);
        return;
    }
    const u32 group = head / args.heads_per_group;
    float state[E], a[E];
#pragma unroll
    for (int e = 0; e < E; e++) {
        const u32 i = lane + 32 * e;
        const bool inside = i < n;
        state[e] = inside ? ((const float *)args.states)[((u64)slot * width + row) * n + i] : 0.0f;
        a[e] = inside ? ((const float *)args.a)[args.by_element ? (u64)head * n + i : head] : 0.0f;
    }
    float *y = (float *)args.y;
    float *states = y + (u64)width * args.tokens * args.sequences;
    const u64 block = (u64)width * n * args.sequences, place = ((u64)sequence * width + row) * n;
    for (u32 t = 0; t < args.tokens; t++) {
        const u64 token = (u64)sequence * args.tokens + t;
        const float step = softplus(((const float *)args.dt)[token * args.heads + head]);
        const float x = ((const float *)(args.x + t * args.x_token + sequence * args.x_sequence))[row] * step;
        const float *b = (const float *)(args.b + t * args.b_token + sequence * args.b_sequence) + (u64)group * n;
        const float *c = (const float *)(args.c + t * args.c_token + sequence * args.c_sequence) + (u64)group * n;
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < E; e++) {
            const u32 i = lane + 32 * e;
            if (i < n) {
                state[e] = state[e] * expf(step * a[e]) + b[i] * x;
                sum += state[e] * c[i];
            }
        }
        sum = warp_reduce(sum, [](float a, float b) { return a + b; });
        if (lane == 0) y[token * width + row] = sum;
        const u32 behind = args.tokens - 1 - t;
        if (behind < args.snapshots) {
#pragma unroll
            for (int e = 0; e < E; e++) {
                const u32 i = lane + 32 * e;
                if (i < n) states[behind * block + place + i] = state[e];
            }
        }
    }
}

extern "C" __global__ void ssm_scan_1(ScanArgs args) { scan<1>(args); }
extern "C" __global__ void ssm_scan_4(ScanArgs args) { scan<4>(args); }
extern "C" __global__ void ssm_scan_8(ScanArgs args) { scan<8>(args); }

// The loop over tokens of recurrences with a matrix of state per head (linear_attn.cu, ssm.cu). A block takes some columns of a
// head's matrix (the values) through all tokens. The state stays in registers: LANES lanes share the keys of a column, and each
// lane has K keys of two columns.
//
// What tokens share among the columns (keys, queries, decays) goes through shared memory, a tile of tokens at a time: each
// thread loads the next tile into registers while the block computes, and there is one barrier per tile.
//
// The sum of state times probe, which the delta rule needs before it can update the state, would put a chain of shuffles into
// each token. So token t computes this sum of token t + 1 from the state before its own update, and adds what the update
// contributes: factor times (push . next probe). The shuffles then overlap with the update.
#pragma once
#include "common/abi.cuh"

// The rules of an element of the state m, of a key and a value v:
//     WKV6          out += q (m + bonus k v), m = m decay + k v
//     GATED         m = m decay + k v, out += q m
//     SCAN          as GATED; one decay for all keys, and v times a rate
//     WKV7          m = m decay + k v + factor push, where factor = sum(m probe) of the old state; out += q m
//     DELTA         m = m decay + k factor, where factor = rate (v - sum(m decay k)); one decay for all keys; out += q m
//     DELTA_BY_KEY  as DELTA with a decay per key
enum Rule { WKV6, WKV7, GATED, SCAN, DELTA, DELTA_BY_KEY };

// Vectors with an element per key. DELTA_BY_KEY computes its probe, decay times k.
enum Vector { KEY, QUERY, DECAY, PROBE, PUSH };

constexpr u32 RECURRENCE_THREADS = 128;

// Columns of a block.
template <int LANES>
constexpr u32 BLOCK_COLUMNS = RECURRENCE_THREADS / LANES * 2;

// What belongs to the tokens of a head: the address for token 0, and bytes from token to token.
struct OfTokens {
    const u8 *at;
    u64 step;

    __device__ const float *token(u32 t) const { return (const float *)(at + t * step); }
};

// The recurrence of a head.
struct Recurrence {
    OfTokens vectors[5], values;
    // Logarithm of the decay (DELTA) or the step before softplus (SCAN); rate of the delta rule.
    OfTokens gates, rates;
    const float *bonus; // WKV6
    float a;            // SCAN: the decay is exp(a step).
    const float *state;
    // Block of states behind the last token, and elements from there to the block of one token less.
    float *states;
    u64 states_step;
    float *y;
    u64 y_step; // elements
    u32 keys, columns, tokens, snapshots;
    float scale;
};

// Softplus as ggml defines it.
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// 1 / x for an x whose inverse is a normal number.
__device__ __forceinline__ float inverse(float x) {
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

// Sum over the lanes of a column.
template <int LANES>
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
    for (int i = 1; i < LANES; i *= 2) x += __shfl_xor_sync(0xffffffff, x, i);
    return x;
}

// As column_sum, of two columns: even lanes receive the sum of the first, odd lanes that of the second.
template <int LANES>
__device__ __forceinline__ float column_sums(const float (&x)[2]) {
    const bool odd = threadIdx.x & 1;
    float kept = odd ? x[1] : x[0];
    kept += __shfl_xor_sync(0xffffffff, odd ? x[0] : x[1], 1);
#pragma unroll
    for (int i = 2; i < LANES; i *= 2) kept += __shfl_xor_sync(0xffffffff, kept, i);
    return kept;
}

// In two chains of additions.
template <int K>
__device__ __forceinline__ float dot(const float (&x)[K], const float (&y)[K]) {
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int i = 0; i < K; i += 2) even += x[i] * y[i], odd += x[i + 1] * y[i + 1];
    return even + odd;
}

template <Rule RULE, int LANES, int K>
struct Recurrent {
    static constexpr bool BY_KEY = RULE != SCAN && RULE != DELTA, IS_DELTA = RULE == DELTA || RULE == DELTA_BY_KEY,
                          PROBES = RULE == WKV7 || IS_DELTA, SNAPSHOTS = IS_DELTA || RULE == SCAN;
    // Vectors in global memory and in shared memory, and the one with which a state is probed.
    static constexpr int LOADED = RULE == WKV7 ? 5 : BY_KEY ? 3 : 2, STAGED = RULE == DELTA_BY_KEY ? 4 : LOADED,
                         PROBED = RULE == DELTA ? KEY : PROBE;
    // A thread stages four keys of a token. Two tiles are read and one is written at a time; the fourth makes the number of slots a
    // power of two.
    static constexpr u32 PIECES = LANES * K / 4, TILE = RECURRENCE_THREADS / PIECES, SLOTS = 4 * TILE;
    static constexpr u32 COLUMNS = BLOCK_COLUMNS<LANES>, VALUES = (TILE * COLUMNS + RECURRENCE_THREADS - 1) / RECURRENCE_THREADS;
    static_assert(TILE % 2 == 0, "the loop takes two tokens at a time");

    struct Shared {
        float4 vectors[SLOTS][STAGED][PIECES];
        float values[SLOTS][COLUMNS];
        float2 pairs[SLOTS]; // decay of all keys, rate
    };

    const Recurrence &r;
    Shared &shared;
    const u32 thread, lane, first_column, column;
    bool wide;
    float4 staged[LOADED];
    float staged_values[VALUES];
    float2 staged_pair;
    float m[2][K]; // without the factor `decayed`
    float decayed = 1.0f, total[2], out[2];
    // Where the lane writes the result of the token before this one, and the first token behind which the state is written.
    float *result;
    bool writes;
    u32 kept;

    __device__ Recurrent(const Recurrence &r, Shared &shared, u32 first_column)
        : r(r), shared(shared), thread(threadIdx.x), lane(thread % LANES), first_column(first_column),
          column(first_column + thread / LANES * 2) {
        u64 all = r.keys * 4;
#pragma unroll
        for (int v = 0; v < LOADED; v++) all |= (u64)r.vectors[v].at | r.vectors[v].step;
        wide = all % 16 == 0;
        const u32 c = column + (lane & 1);
        result = r.y + c;
        writes = lane < 2 && c < r.columns;
        kept = r.tokens - min(r.tokens, r.snapshots);
    }

    // Loads the tile that starts with token `start`; zeros behind the last token and the last key.
    __device__ __forceinline__ void load(u32 start) {
        const u32 t = start + thread / PIECES, key = thread % PIECES * 4;
#pragma unroll
        for (int v = 0; v < LOADED; v++) staged[v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const u32 left = t < r.tokens && key < r.keys ? r.keys - key : 0;
        if (wide && left > 0) {
#pragma unroll
            for (int v = 0; v < LOADED; v++) staged[v] = *(const float4 *)(r.vectors[v].token(t) + key);
        } else {
#pragma unroll
            for (int v = 0; v < LOADED; v++) {
                const float *at = r.vectors[v].token(t) + key;
                if (left > 0) staged[v].x = at[0];
                if (left > 1) staged[v].y = at[1];
                if (left > 2) staged[v].z = at[2];
                if (left > 3) staged[v].w = at[3];
            }
        }
#pragma unroll
        for (u32 i = 0; i < VALUES; i++) {
            const u32 number = thread + i * RECURRENCE_THREADS, token = start + number / COLUMNS, c = first_column + number % COLUMNS;
            const bool inside = number < TILE * COLUMNS && token < r.tokens && c < r.columns;
            staged_values[i] = inside ? r.values.token(token)[c] : 0.0f;
        }
        staged_pair = make_float2(0.0f, 0.0f);
        if (thread < TILE && start + thread < r.tokens) {
            if (RULE == DELTA || RULE == SCAN) staged_pair.x = *r.gates.token(start + thread);
            if (IS_DELTA) staged_pair.y = *r.rates.token(start + thread);
        }
    }

    // Stores the loaded tile, which starts with token `start`, to shared memory.
    __device__ __forceinline__ void store(u32 start) {
        const u32 slot = (start + thread / PIECES) % SLOTS, piece = thread % PIECES;
        if (RULE == DELTA_BY_KEY) {
            float4 &d = staged[DECAY];
            const float4 &k = staged[KEY];
            d = make_float4(expf(d.x), expf(d.y), expf(d.z), expf(d.w));
            shared.vectors[slot][STAGED - 1][piece] = make_float4(d.x * k.x, d.y * k.y, d.z * k.z, d.w * k.w);
        }
#pragma unroll
        for (int v = 0; v < LOADED; v++) shared.vectors[slot][v][piece] = staged[v];
#pragma unroll
        for (u32 i = 0; i < VALUES; i++) {
            const u32 number = thread + i * RECURRENCE_THREADS;
            if (number < TILE * COLUMNS) shared.values[(start + number / COLUMNS) % SLOTS][number % COLUMNS] = staged_values[i];
        }
        if (!(IS_DELTA || RULE == SCAN) || thread >= TILE) return;
        if (RULE == SCAN) staged_pair = make_float2(r.a * softplus(staged_pair.x), softplus(staged_pair.x));
        shared.pairs[(start + thread) % SLOTS] = make_float2(expf(staged_pair.x), staged_pair.y);
    }

    // The lane's keys of a vector.
    __device__ __forceinline__ void read(float (&x)[K], u32 slot, int vector) const {
#pragma unroll
        for (int i = 0; i < K; i += 4) {
            const float4 four = shared.vectors[slot][vector][i / 4 * LANES + lane];
            x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
        }
    }

    // Calls each(index, x) for the elements of the lane in a block of states; four neighbours at a time where possible.
    template <class Four, class One>
    __device__ __forceinline__ void each_state(const void *block, const Four &four, const One &one) {
        // Keys are neighbours, except in WKV6 and GATED.
        constexpr bool BY_VALUE = RULE == WKV6 || RULE == GATED;
        const bool whole = !BY_VALUE && ((u64)block | (r.keys * 4)) % 16 == 0;
#pragma unroll
        for (int c = 0; c < 2; c++) {
            if (column + c >= r.columns) continue;
#pragma unroll
            for (int i = 0; i < K; i += 4) {
                const u32 key = (i / 4 * LANES + lane) * 4;
                const u64 first = BY_VALUE ? (u64)key * r.columns + column + c : (u64)(column + c) * r.keys + key;
                if (whole) {
                    if (key < r.keys) four(first, &m[c][i]);
                    continue;
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (key + j < r.keys) one(first + (BY_VALUE ? j * r.columns : j), m[c][i + j]);
                }
            }
        }
    }

    __device__ __forceinline__ void load_state() {
#pragma unroll
        for (int i = 0; i < 2 * K; i++) m[i / K][i % K] = 0.0f;
        each_state(
            r.state,
            [&](u64 at, float *x) {
                const float4 four = *(const float4 *)(r.state + at);
                x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
            },
            [&](u64 at, float &x) { x = r.state[at]; });
    }

    __device__ __forceinline__ void store_state(float *block) {
        each_state(
            block,
            [&](u64 at, const float *x) {
                *(float4 *)(block + at) = make_float4(decayed * x[0], decayed * x[1], decayed * x[2], decayed * x[3]);
            },
            [&](u64 at, float x) { block[at] = decayed * x; });
    }

    // Token t. `now` and `next` are the probes of tokens t and t + 1; this function loads `next`.
    __device__ __forceinline__ void step(u32 t, const float (&bonus)[K], const float (&now)[K], float (&next)[K], float2 &pair) {
        const u32 slot = t % SLOTS, next_slot = min(t + 1, r.tokens - 1) % SLOTS;
        const float2 rated = pair, both = *(const float2 *)&shared.values[slot][column - first_column];
        const float v[2] = {both.x, both.y};
        float q[K], k[K];
        read(q, slot, QUERY);
        if (!IS_DELTA) read(k, slot, KEY);
        if (PROBES) read(next, next_slot, PROBED);
        pair = shared.pairs[next_slot];
        if (!BY_KEY) {
            // One decay for all keys multiplies a common factor, as long as that is neither too small nor too large.
            const float both_decays = decayed * rated.x;
            if (both_decays > 0x1p-16f && both_decays < 0x1p16f) {
                decayed = both_decays;
            } else {
                // One after the other: their product may overflow where the state does not.
#pragma unroll
                for (int i = 0; i < 2 * K; i++) m[i / K][i % K] = m[i / K][i % K] * decayed * rated.x;
                decayed = 1.0f;
            }
        }
        // The result of the token before. Its shuffles overlap with the sums of this token, because it is written only after them.
        const float before = column_sums<LANES>(out);
        if (RULE == WKV6) {
            float kq = 0.0f;
#pragma unroll
            for (int i = 0; i < K; i++) kq += bonus[i] * k[i] * q[i];
#pragma unroll
            for (int c = 0; c < 2; c++) out[c] = dot(m[c], q) + kq * v[c];
        }
        if (BY_KEY) {
            float d[K];
            read(d, slot, DECAY);
#pragma unroll
            for (int i = 0; i < 2 * K; i++) m[i / K][i % K] *= d[i % K];
        }
        if (!IS_DELTA) {
            const float factor = RULE == SCAN ? rated.y * inverse(decayed) : 1.0f;
#pragma unroll
            for (int i = 0; i < 2 * K; i++) m[i / K][i % K] += k[i % K] * (v[i / K] * factor);
        }
        if (PROBES) {
            float push[K], sums[2], factor[2];
            if (RULE != DELTA) read(push, slot, RULE == WKV7 ? PUSH : KEY);
#pragma unroll
            for (int i = 0; i < K && RULE == DELTA; i++) push[i] = now[i];
#pragma unroll
            for (int c = 0; c < 2; c++) sums[c] = column_sum<LANES>(dot(m[c], next)) * decayed;
            const float cross = column_sum<LANES>(dot(push, next));
#pragma unroll
            for (int c = 0; c < 2; c++) {
                factor[c] = IS_DELTA ? (v[c] - total[c]) * rated.y : total[c];
                total[c] = (sums[c] + factor[c] * cross) * (RULE == DELTA ? pair.x : 1.0f);
                if (RULE == DELTA) factor[c] *= inverse(decayed);
            }
#pragma unroll
            for (int i = 0; i < 2 * K; i++) m[i / K][i % K] += factor[i / K] * push[i % K];
        }
        if (RULE != WKV6) {
#pragma unroll
            for (int c = 0; c < 2; c++) out[c] = dot(m[c], q) * (decayed * r.scale);
        }
        if (t > 0) {
            if (writes) *result = before;
            result += r.y_step;
        }
        if (SNAPSHOTS && t >= kept) store_state(r.states + (r.tokens - 1 - t) * r.states_step);
    }

    // Stores the tile that starts with token `start`, if there is one, and loads the next one.
    __device__ __forceinline__ void advance(u32 start) {
        if (start % TILE != 0 || start >= r.tokens) return;
        store(start);
        __syncthreads();
        load(start + TILE);
    }

    __device__ __forceinline__ void run() {
        load(0);
        load_state();
        store(0);
        __syncthreads();
        load(TILE);
        float bonus[K], probes[2][K];
        if (RULE == WKV6) {
#pragma unroll
            for (int i = 0; i < K; i++) {
                const u32 key = (i / 4 * LANES + lane) * 4 + i % 4;
                bonus[i] = key < r.keys ? r.bonus[key] : 0.0f;
            }
        }
        float2 pair = shared.pairs[0];
        if (PROBES) {
            read(probes[0], 0, PROBED);
#pragma unroll
            for (int c = 0; c < 2; c++) total[c] = column_sum<LANES>(dot(m[c], probes[0])) * (RULE == DELTA ? pair.x : 1.0f);
        }
        out[0] = out[1] = 0.0f;
        if constexpr (RULE == DELTA) {
            // Two tokens at a time, so that a probe need not move to the registers of the one before.
#pragma unroll 1
            for (u32 t = 0;; t += 2) {
                step(t, bonus, probes[0], probes[1], pair);
                if (t + 1 == r.tokens) break;
                advance(t + 2);
                step(t + 1, bonus, probes[1], probes[0], pair);
                if (t + 2 == r.tokens) break;
            }
        } else {
#pragma unroll 1
            for (u32 t = 0; t < r.tokens; t++) {
                advance(t + 1);
                step(t, bonus, probes[0], probes[1], pair);
            }
        }
        if (!SNAPSHOTS) store_state(r.states);
        const float last = column_sums<LANES>(out);
        if (writes) *result = last;
    }
};

template <Rule RULE, int LANES, int K>
__device__ __forceinline__ void recur(const Recurrence &r, u32 first_column) {
    __shared__ typename Recurrent<RULE, LANES, K>::Shared shared;
    Recurrent<RULE, LANES, K>(r, shared, first_column).run();
}

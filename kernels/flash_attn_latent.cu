// FLASH_ATTN_EXT with latent attention (MLA) on tensor cores (compute capability 8.0 or later), for F16 and BF16: v is the first channels of
// k's rows, and all heads share them. So a tile of k in shared memory is the tile of v, too.
//
// A block handles ROWS queries (consecutive heads of consecutive tokens), and tiles of 32 positions with an online softmax. Its eight
// warps split k's channels into four groups: each has the fragments of its group of queries in registers, and computes parts of the scores by
// m16n8k16 mma. The parts are exchanged through shared memory. For the weighted sums, each warp has an eighth of v's channels, for all
// queries, in registers.
//
// Warps w and w + 4 share a group of channels, each for half of the queries (ROWS = 64) or of the positions (ROWS = 16). After the
// exchange, each warp has the scores of an eighth of the queries, and stores their weights in shared memory. With 16 queries, a block takes half of
// the registers, so that two fit a multiprocessor.
//
// Tiles alternate in two stages, which cp.async fills one tile ahead. The queries pass through the stages before the first tile.
//
// Masks, accuracy and values that are not finite: as in flash_attn_prompt.cu.
//
// Variants: one file per type, number of channels (k's and v's) and ROWS.
// Limits:   no softcap; v is at k's address, with k's strides; k at even addresses, with strides of positions below 2^32 bytes; q F32, mask F16 with
//           dense rows. Blocks with k that is not at multiples of 16 bytes are slow. ROWS = 64 takes up to 99 KiB of shared memory.
// Floor:    2 products per query, position and channel; k is read once per block.
#include "common/abi.cuh"

constexpr u32 THREADS = 256;
#include "flash_attn_tiles.cuh"

constexpr u32 GROUPS = 4;      // groups of channels of the scores
constexpr u32 OWNED = ROWS / WARPS; // queries of a warp's scores
constexpr u32 LANES = 32 / OWNED, PAIRS = 16 / LANES; // of a query's scores, and pairs of them per lane

// This thread's number. If registers are scarce, it is asked for again where an address depends on it: otherwise the addresses take registers all
// the time.
__device__ __forceinline__ u32 thread_again() {
    if (ROWS * CHANNELS < 64 * 576) return threadIdx.x;
    u32 x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// A tile of 32 positions of WIDTH channels, swizzled as in Tiles. Threads copy eight neighbouring chunks of a position at a time.
template <u32 WIDTH>
struct LatentTile {
    static_assert(WIDTH % 64 == 0, "");
    static constexpr u32 POSITIONS = 32, CHUNKS = WIDTH / 8, PITCH = 16 * CHUNKS, BYTES = POSITIONS * PITCH;
    static constexpr u32 COPIES = CHUNKS / 8; // per thread

    static __device__ __forceinline__ u32 at(u32 row, u32 chunk) { return row * PITCH + (chunk ^ row % 8) * 16; }

    // A thread copies chunks threadIdx.x % 8 + 8 i of row threadIdx.x / 8, to own() + 128 i.
    static __device__ __forceinline__ u32 own() {
        const u32 thread = thread_again();
        return at(thread / 8, thread % 8);
    }

    // Starts the copy of a tile: rows from `position` on, and the last one for those behind it.
    static __device__ __forceinline__ void start(u32 stage, const u8 *rows, const FlashAttnArgs &args, u32 position) {
        const u32 thread = thread_again(), step = args.kb[0];
        const u8 *const from = rows + (u64)min(position + thread / 8, args.positions - 1) * step + 16 * (thread % 8);
        stage += own();
        if (((u64)rows | step) % 16 == 0) {
#pragma unroll
            for (u32 i = 0; i < COPIES; i++) copy_async_if(stage + 128 * i, from + 128 * i, true);
            return;
        }
#pragma unroll 1
        for (u32 i = 0; i < COPIES; i++) {
            u32 words[4];
            load_words<2>(from + 128 * i, words);
            store_shared(stage + 128 * i, words);
        }
    }
};

// Two floats in shared memory.
__device__ __forceinline__ void store_pair(u32 at, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" : : "r"(at), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ float2 load_pair(u32 at) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(at) : "memory");
    return pair;
}

// What the scores of a query need.
struct __align__(16) Row {
    float factor; // of scores
    float slope;  // of biases
    u64 biases;   // address
};

// What is needed rarely, and would take registers all the time.
struct BlockFacts {
    const u8 *k;
    u32 scanned; // position from which on the mask was scanned
    u32 biased;  // which of these tiles are biased
    u32 has_bad; // whether results have had values that are not finite added
};

// The end of this block's positions.
__device__ __forceinline__ u32 end_again(const FlashAttnArgs &args) {
    u32 y;
    asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(y));
    return min((y + 1) * args.part, args.positions);
}

// Advances to the tiles that are scanned next. All threads call it.
__device__ __forceinline__ void next_scan(BlockFacts &facts, u32 size) {
    __syncthreads();
    if (threadIdx.x == 0) facts.scanned += SCANNED_TILES * size;
    __syncthreads();
}

// Where shared memory has what. Exchanged parts of scores are pairs, [part][warp][lane].
// For 16 queries, it is a matrix of queries and positions.
template <class Tile>
struct Layout {
    static constexpr u32 PARTS = ROWS == 64 ? 4 * (GROUPS - 1) : GROUPS, PART = 8 * THREADS;
    static constexpr u32 PARTS_AT = 2 * Tile::BYTES;
    static constexpr u32 ROWS_AT = PARTS_AT + PARTS * PART; // Row per query
    static constexpr u32 FACTORS_AT = ROWS_AT + 16 * ROWS;  // float per query: factor of sums
    static constexpr u32 SCAN_AT = FACTORS_AT + 4 * ROWS;
    static constexpr u32 TOTALS_AT = SCAN_AT + 8 * WARPS;   // float per thread: its totals of weights
    static constexpr u32 TOPS_AT = TOTALS_AT + 4 * THREADS; // float per query: its reference of weights
    static constexpr u32 BLOCK_AT = TOPS_AT + 4 * ROWS, END = BLOCK_AT + sizeof(BlockFacts);
};

// Stores the queries, scaled as in flash_attn_prompt.cu, as rows of a tile at the start of `memory`, and the factors of their scores and biases.
template <class T, class Tile>
__device__ __forceinline__ void stage_queries(const FlashAttnArgs &args, const BlockPlace &place, u8 *memory) {
    constexpr u32 FOURS = (Tile::CHUNKS * 2 + 31) / 32;
    const u32 thread = thread_again(), lane = thread % 32, warp = thread / 32, queries = args.tokens * args.group;
    const bool is_whole = ((u64)args.q | args.qb[0] | args.qb[1] | args.qb[2]) % 16 == 0;
#pragma unroll OWNED < 4 ? OWNED : 4
    for (u32 row = OWNED * warp; row < OWNED * warp + OWNED; row++) {
        const u32 query = min(place.first + row, queries - 1), head = place.head0 + query % args.group;
        const float *const from = (const float *)(args.q + query / args.group * args.qb[0] + head * args.qb[1] + place.batch * args.qb[2]);
        float4 x[FOURS];
        float most = 0.0f;
#pragma unroll
        for (u32 i = 0; i < FOURS; i++) {
            const u32 at = lane + 32 * i;
            x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (at >= Tile::CHUNKS * 2) continue;
            if (is_whole) x[i] = ((const float4 *)from)[at];
            else x[i] = make_float4(from[4 * at], from[4 * at + 1], from[4 * at + 2], from[4 * at + 3]);
            most = fmaxf(most, fmaxf(fmaxf(fabsf(x[i].x), fabsf(x[i].y)), fmaxf(fabsf(x[i].z), fabsf(x[i].w))));
        }
#pragma unroll
        for (u32 o = 16; o; o /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
        float factor;
        const float up = query_scale(most, args.scale, factor);
#pragma unroll
        for (u32 i = 0; i < FOURS; i++) {
            const u32 at = lane + 32 * i;
            if (at >= Tile::CHUNKS * 2) continue;
            *(uint2 *)(memory + Tile::at(row, at / 2) + at % 2 * 8) =
                make_uint2(pair_of_floats(T(), up * x[i].x, up * x[i].y), pair_of_floats(T(), up * x[i].z, up * x[i].w));
        }
        if (lane == 0) ((Row *)(memory + Layout<Tile>::ROWS_AT))[row].factor = factor;
    }
    if (thread < ROWS) {
        Row &row = ((Row *)(memory + Layout<Tile>::ROWS_AT))[thread];
        const u32 query = min(place.first + thread, queries - 1);
        row.slope = alibi_slope(args, place.head0 + query % args.group);
        row.biases = args.mask ? (u64)mask_row(args, place, query) : 0;
    }
}

// Biases of a lane's pairs of positions, the first of which is `first`, for a mask or without.
__device__ __forceinline__ void load_biases(u32 (&pairs)[PAIRS], const FlashAttnArgs &args, const u16 *row, u32 first) {
    const u32 end = end_again(args);
    const bool in_pairs = ((u64)args.mask | args.mb[0] | args.mb[1] | args.mb[2]) % 4 == 0 && args.positions % 2 == 0;
#pragma unroll
    for (u32 n = 0; n < PAIRS; n++) {
        const u32 at = first + 8 * n;
        if (!args.mask) pairs[n] = (at < end ? 0 : HIDDEN) | (at + 1 < end ? 0 : (u32)HIDDEN << 16);
        else if (in_pairs) pairs[n] = load_pair(row + at, at < end);
        else pairs[n] = load_one(row + at, at < end) | load_one(row + at + 1, at + 1 < end) << 16;
    }
}

// The largest of a query's values, and their sum.
__device__ __forceinline__ float most_of_query(float x) {
#pragma unroll
    for (u32 o = 1; o < LANES; o *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
    return x;
}
__device__ __forceinline__ float sum_of_query(float x) {
#pragma unroll
    for (u32 o = 1; o < LANES; o *= 2) x += __shfl_xor_sync(~0u, x, o);
    return x;
}

// Turns a lane's scores into weights relative to the reference `top`. Returns the factor of earlier sums.
__device__ __forceinline__ float weigh(float (&s)[PAIRS][2], float &top, float &total, const FlashAttnArgs &args, const Row &row, bool is_biased,
                                       u32 position) {
    const float by = LOG2E * row.factor; // scores times `by` are in units of ln 2
    if (is_biased) {
        const float relative = __fdividef(LOG2E * row.slope, by);
        u32 pairs[PAIRS];
        load_biases(pairs, args, (const u16 *)row.biases, position + thread_again() % LANES * 2);
#pragma unroll
        for (u32 i = 0; i < 2 * PAIRS; i++) {
            const float bias = float_of_half(pairs[i / 2] >> i % 2 * 16);
            float &score = s[i / 2][i % 2];
            score = bias == minus_infinity() ? bias : fmaf(relative, bias, score);
        }
    }
    float most = minus_infinity();
#pragma unroll
    for (u32 i = 0; i < 2 * PAIRS; i++) most = fmaxf(most, s[i / 2][i % 2]);
    most = by * most_of_query(most);
    const float reference = most - top > MAX_HEADROOM ? most - MIN_HEADROOM : top;
    const float factor = rescaling(top, reference), shift = reference == minus_infinity() ? 0.0f : reference;
    top = reference;
    float sum = total * factor;
#pragma unroll
    for (u32 i = 0; i < 2 * PAIRS; i++) {
        float &score = s[i / 2][i % 2];
        score = exp2_approximately(fmaf(score, by, -shift));
        sum += score;
    }
    total = sum;
    return factor;
}

template <class T, u32 WIDTH, u32 VALUES>
__device__ __forceinline__ void attend(const FlashAttnArgs &args) {
    using Tile = LatentTile<WIDTH>;
    using At = Layout<Tile>;
    static_assert(ROWS == 16 || ROWS == 64, "");
    static_assert(At::END <= 99 << 10, "GPUs of capability 8.6, 8.9 and 12.0 have no more");
    static_assert(ROWS * Tile::PITCH <= 2 * Tile::BYTES, "the queries are staged where the tiles will be");
    constexpr u32 STEPS = WIDTH / 16 / GROUPS, M = ROWS / 16, N = VALUES / WARPS / 8; // fragments of sums: M by N
    constexpr u32 HEIGHT = ROWS == 64 ? 2 : 1, PASSES = HEIGHT; // a warp's fragments of scores: HEIGHT by 2 per pass
    // The lane for which a part of a score is has an address that differs in bits 8 and 9: those of `memory` must be 0.
    extern __shared__ __align__(1024) u8 memory[];
    static_assert(At::PARTS_AT % 1024 == 0, "");
    const BlockPlace place = block_place(args);
    const u32 queries = args.tokens * args.group;
    const u32 shared = shared_address(memory);

    stage_queries<T, Tile>(args, place, memory);
    BlockFacts &facts = *(BlockFacts *)(memory + At::BLOCK_AT);
    if (threadIdx.x == 0) facts = {args.k + place.head0 / args.per_k * args.kb[1] + place.batch * args.kb[2], blockIdx.y * args.part, 0, 0};
    __syncthreads();
    // Fragments of queries: of the lower half of the warps those of queries 0 to 31, of the others those of 32 to 63, with the eights in an order
    // in which the warp's own ones are first. Steps of a group of channels are GROUPS apart, so that they differ by an immediate offset.
    u32 q[HEIGHT][STEPS][4];
#pragma unroll
    for (u32 m = 0; m < HEIGHT; m++) {
        const u32 thread = thread_again(), lane = thread % 32, warp = thread / 32, group = warp % GROUPS;
        const u32 eight = ROWS == 64 ? warp / 4 * 4 + (group ^ (2 * m + lane / 8 % 2)) : lane / 8 % 2;
        const u32 from = shared + Tile::at(8 * eight + lane % 8, 2 * group + lane / 16);
#pragma unroll
        for (u32 i = 0; i < STEPS; i++) load_matrices(q[m][i], from + 128 * i);
    }
    __syncthreads();

    float sums[M][N][4] = {};
    if (threadIdx.x < ROWS) ((float *)(memory + At::TOPS_AT))[threadIdx.x] = minus_infinity();
    ((float *)(memory + At::TOTALS_AT))[threadIdx.x] = 0.0f;
#pragma unroll 1
    for (; facts.scanned < end_again(args); next_scan(facts, Tile::POSITIONS)) {
        Scan scan = Scan::of<Tile::POSITIONS>(args, place_again(args), facts.scanned, end_again(args), (u32 *)(memory + At::SCAN_AT));
        if (!scan.seen) continue;
        if (threadIdx.x == 0) facts.biased = scan.biased;
        u32 stage = shared, tile = __ffs(scan.seen) - 1;
        Tile::start(stage, facts.k, args, facts.scanned + tile * Tile::POSITIONS);
        end_copies();
#pragma unroll 1
        while (true) {
            const u32 at = tile * Tile::POSITIONS; // from facts.scanned on
            wait_for_copies<0>();
            __syncthreads();
            const bool is_biased = facts.biased >> tile & 1;
            scan.seen &= scan.seen - 1;
            tile = __ffs(scan.seen) - 1;
            if (scan.seen) Tile::start(2 * shared + Tile::BYTES - stage, facts.k, args, facts.scanned + tile * Tile::POSITIONS);
            end_copies();

            float s[PAIRS][2];
            u32 thread = thread_again();
            const u32 keys = stage + Tile::at((ROWS == 64 ? 0 : thread / 128 * 16) + thread % 8 + thread % 32 / 16 * 8,
                                              2 * (thread / 32 % GROUPS) + thread / 8 % 2);
#pragma unroll
            for (u32 pass = 0; pass < PASSES; pass++) {
                float c[HEIGHT][2][4] = {};
#pragma unroll
                for (u32 i = 0; i < STEPS; i++) {
                    u32 b[4];
                    load_matrices(b, keys + 16 * pass * Tile::PITCH + 128 * i);
#pragma unroll
                    for (u32 m = 0; m < HEIGHT; m++) {
                        mma_halves(T(), c[m][0], q[m][i], {b[0], b[1]});
                        mma_halves(T(), c[m][1], q[m][i], {b[2], b[3]});
                    }
                }
                if constexpr (ROWS == 64) {
                    // Part `to` goes to the warp whose number differs from this one's by XOR.
                    const u32 parts = shared + At::PARTS_AT + 8 * thread;
#pragma unroll
                    for (u32 to = 1; to < GROUPS; to++) {
#pragma unroll
                        for (u32 n = 0; n < 2; n++) {
                            const float(&part)[4] = c[to / 2][n];
                            store_pair((parts ^ to * 256) + (4 * (to - 1) + 2 * pass + n) * At::PART, part[to % 2 * 2], part[to % 2 * 2 + 1]);
                        }
                    }
#pragma unroll
                    for (u32 i = 0; i < 4; i++) s[2 * pass + i / 2][i % 2] = c[0][i / 2][i % 2];
                } else {
                    // Rows of 128 bytes. Eight positions are at their number XOR that of the row.
                    const u32 row = thread % 32 / 4;
                    const u32 parts = shared + At::PARTS_AT + thread / 32 % GROUPS * At::PART + row * 128 +
                                      (thread / 128 * 2 ^ row % 4) * 32 + thread % 4 * 8;
#pragma unroll
                    for (u32 n = 0; n < 2; n++) {
                        store_pair(parts ^ 32 * n, c[0][n][0], c[0][n][1]);
                        store_pair((parts ^ 32 * n) + 8 * 128, c[0][n][2], c[0][n][3]);
                    }
                }
            }

            if (is_biased) {
                // Values that are not finite
                u8 *const own = memory + (stage - shared) + Tile::own();
                u32 bad = 0;
#pragma unroll
                for (u32 i = 0; i < VALUES / 64; i++) {
                    const uint4 four = *(const uint4 *)(own + 128 * i);
                    bad = add_zero_times(T(), four.x, bad), bad = add_zero_times(T(), four.y, bad);
                    bad = add_zero_times(T(), four.z, bad), bad = add_zero_times(T(), four.w, bad);
                }
                if (__syncthreads_or(bad)) {
                    add_bad_values<T, Tile>(args, place_again(args), memory + (stage - shared), facts.scanned + at, end_again(args), facts.has_bad);
                    __syncthreads();
                    facts.has_bad = 1;
#pragma unroll 1
                    for (u32 i = 0; i < 4 * (VALUES / 64); i++) {
                        u32 *const word = (u32 *)(own + 128 * (i / 4)) + i % 4;
                        *word = finite_values<T>(*word);
                    }
                    __syncthreads();
                }
            } else {
                __syncthreads();
            }

            // Weights replace the parts that only this warp has read: rows of 64 bytes, with swizzled chunks.
            thread = thread_again();
            const u32 row = thread / LANES, in_row = thread % LANES;
            u8 *to;
            if constexpr (ROWS == 64) {
                const u32 parts = shared + At::PARTS_AT + 8 * thread;
#pragma unroll
                for (u32 i = 0; i < At::PARTS; i++) {
                    const float2 part = load_pair(parts + i * At::PART);
                    s[i % 4][0] += part.x, s[i % 4][1] += part.y;
                }
                to = memory + At::PARTS_AT + row % 8 / 4 * At::PART + row / 8 * 256 + row % 4 * 64 + in_row * 4;
            } else {
                const u32 parts = shared + At::PARTS_AT + row * 128 + (in_row / 4 ^ row % 4) * 32 + in_row % 4 * 8;
#pragma unroll
                for (u32 i = 0; i < At::PARTS; i++) {
                    const float2 part = load_pair(parts + i * At::PART);
                    if (i == 0) s[0][0] = part.x, s[0][1] = part.y;
                    else s[0][0] += part.x, s[0][1] += part.y;
                }
                to = memory + At::PARTS_AT + row * 128 + row / 4 % 2 * 64 + (in_row / 4 ^ row % 4) * 16 + in_row % 4 * 4;
            }
            float *const top_at = (float *)(memory + At::TOPS_AT) + row;
            float top = *top_at;
            const float factor = weigh(s, top, ((float *)(memory + At::TOTALS_AT))[thread], args, ((const Row *)(memory + At::ROWS_AT))[row],
                                       is_biased, facts.scanned + at);
            __syncwarp();
#pragma unroll
            for (u32 n = 0; n < PAIRS; n++) *(u32 *)(to + (ROWS == 64 ? n ^ row / 2 % 4 : 0) * 16) = pair_of_floats(T(), s[n][0], s[n][1]);
            if (in_row == 0) ((float *)(memory + At::FACTORS_AT))[row] = factor, *top_at = top;
            if (__syncthreads_or(factor != 1.0f)) {
#pragma unroll
                for (u32 i = 0; i < 2 * M; i++) {
                    const float factor = ((const float *)(memory + At::FACTORS_AT))[thread % 32 / 4 + 8 * i];
#pragma unroll
                    for (u32 n = 0; n < N; n++) sums[i / 2][n][i % 2 * 2] *= factor, sums[i / 2][n][i % 2 * 2 + 1] *= factor;
                }
            }

            // Weighted sums
            thread = thread_again();
            const u32 values = stage + Tile::at(thread % 16, N * (thread / 32) + thread % 32 / 16);
            // Rows thread % 16, chunks thread % 32 / 16
            const u32 eighth = thread % 8, weights_at = shared + At::PARTS_AT +
                (ROWS == 64 ? eighth / 4 * At::PART + thread % 16 / 8 * 256 + eighth % 4 * 64 + (thread % 32 / 16 ^ eighth / 2) * 16
                            : thread % 16 * 128 + eighth / 4 * 64 + (thread % 32 / 16 ^ eighth % 4) * 16);
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                u32 w[M][4];
#pragma unroll
                for (u32 m = 0; m < M; m++) load_matrices(w[m], (weights_at ^ 32 * j) + 512 * m);
#pragma unroll
                for (u32 n = 0; n < N; n += 2) {
                    u32 b[4];
                    load_transposed(b, (values ^ 16 * n) + 16 * j * Tile::PITCH);
#pragma unroll
                    for (u32 m = 0; m < M; m++) {
                        mma_halves(T(), sums[m][n], w[m], {b[0], b[1]});
                        mma_halves(T(), sums[m][n + 1], w[m], {b[2], b[3]});
                    }
                }
            }
            if (!scan.seen) break;
            stage = 2 * shared + Tile::BYTES - stage;
        }
    }

    // Factors of results, and statistics of parts
    const BlockPlace again = place_again(args);
    const u32 thread = thread_again(), lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const float total = sum_of_query(((const float *)(memory + At::TOTALS_AT))[thread]);
    if (thread % LANES == 0) {
        const u32 row = thread / LANES, query = min(again.first + row, queries - 1);
        const float top = ((const float *)(memory + At::TOPS_AT))[row];
        float factor = 1.0f;
        if (gridDim.y == 1) factor = normalisation(top, total, args.sinks ? args.sinks + again.head0 + query % args.group : nullptr);
        else if (again.first + row < queries) *Result::of(args, again, query).stats = make_float2(top, total);
        ((float *)(memory + At::FACTORS_AT))[row] = factor;
    }
    __syncthreads();

    // Results, through shared memory, so that stores are coalesced
    constexpr u32 WIDE = 8 * N, PITCH = WIDE + 8, FOURS = WIDE / 4;
    static_assert(4 * 16 * PITCH * WARPS <= 2 * Tile::BYTES, "");
    float *const rows_of_sums = (float *)memory + 16 * PITCH * warp;
    const bool stores_fours = ((u64)args.dst | (u64)args.sums) % 16 == 0;
#pragma unroll
    for (u32 m = 0; m < M; m++) {
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < 2 * N; i++) {
            const float(&sum)[4] = sums[m][i / 2];
            *(float2 *)(rows_of_sums + (g + i % 2 * 8) * PITCH + i / 2 * 8 + 2 * t) = make_float2(sum[i % 2 * 2], sum[i % 2 * 2 + 1]);
        }
        __syncwarp();
#pragma unroll 1
        for (u32 of = lane / FOURS; of < 16; of += 32 / FOURS) {
            const u32 row = 16 * m + of;
            if (again.first + row >= queries) break;
            const float factor = ((const float *)(memory + At::FACTORS_AT))[row];
            float *const to = Result::of(args, again, again.first + row).sums + WIDE * warp + lane % FOURS * 4;
            float4 sum = *(const float4 *)(rows_of_sums + of * PITCH + lane % FOURS * 4);
            sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
            if (facts.has_bad) sum.x += to[0], sum.y += to[1], sum.z += to[2], sum.w += to[3];
            if (stores_fours) *(float4 *)to = sum;
            else to[0] = sum.x, to[1] = sum.y, to[2] = sum.z, to[3] = sum.w;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, ROWS == 16 ? 2 : 1) ENTRY(FlashAttnArgs args) { attend<TYPE, CHANNELS, VALUE_CHANNELS>(args); }

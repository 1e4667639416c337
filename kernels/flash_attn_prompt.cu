// FLASH_ATTN_EXT on tensor cores for 16 queries or more per head of k and v (compute capability 8.0 or later), for k and v of F16 or BF16.
//
// A block handles 64 queries that share their heads of k and v (consecutive heads of consecutive tokens), 16 per warp, as fragments
// in registers. It iterates over tiles of 64 positions (32 above 128 channels) with an online softmax: scores by m16n8k16 mma, their
// exponentials relative to a reference near the running maximum, weighted sums of v by mma. The totals of the weights are a product with ones.
//
// Tiles of k and v alternate in three stages of shared memory, which cp.async fills two half steps ahead. So each half step
// needs one barrier: it fills the stage that the half step before has read. Above 192 channels there are two stages, each filled one half
// step ahead. The fragments come by ldmatrix, those of v transposed.
//
// The mask is scanned first, 32 tiles at a time: tiles that it hides from all queries of the block are skipped, and tiles in which all
// biases are 0 do without it. Masks whose rows are not at multiples of 16 bytes are not scanned.
//
// Accuracy: queries and weights are rounded to the type of k and v, once; sums are in f32. Queries are multiplied by a power of two
// per row, so that nothing exceeds the range of F16. A value of v that is not finite must not reach queries from which it is hidden, although
// their weights of 0 are multiplied with it: in such tiles it is added to the results of the queries that see it, and becomes 0.
//
// Variants: one file per type and number of channels. Fewer channels are padded with zeros.
// Limits:   multiples of 8 channels, those of v not more than those of k; k and v at even addresses, with strides of positions
//           below 2^32 bytes; q F32, mask F16 with dense rows. Blocks with k or v that are not at multiples of 16 bytes are slow.
// Floor:    2 products per query, position and channel; k and v are read once per block.
#include "common/abi.cuh"

constexpr u32 THREADS = 128;
constexpr u32 ROWS = 64; // queries of a block: 16 per warp
#include "flash_attn_tiles.cuh"

// Biases of a tile without a mask
__device__ __align__(4) u16 no_biases[64];

// Word [n][h]: biases `first` + 8 n and the next one of those from at[h] on; `left` are before the end.
template <u32 N>
__device__ __forceinline__ void load_biases(u32 (&words)[N][2], const u16 *const (&at)[2], int first, int left, bool in_pairs) {
    if (in_pairs) {
#pragma unroll
        for (u32 i = 0; i < 2 * N; i++) {
            const int of = first + 8 * (i / 2);
            words[i / 2][i % 2] = load_pair(at[i % 2] + of, of < left);
        }
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 2 * N; i++) {
        const int of = first + 8 * (i / 2);
        words[i / 2][i % 2] = load_one(at[i % 2] + of, of < left) | load_one(at[i % 2] + of + 1, of + 1 < left) << 16;
    }
}

// Queries as fragments, and for each lane's two rows the factor of scores. The queries are scaled in a loop that stores them to `memory`:
// unrolled, it would be a sixth of the code. The first steps are loaded from there.
template <class T, u32 STEPS, u32 HELD>
__device__ __forceinline__ void load_queries(u32 (&q)[HELD][4], float (&factors)[2], const float *const (&rows)[2], const FlashAttnArgs &args,
                                             uint4 *memory) {
    float up[2], most[2] = {};
#pragma unroll 4
    for (u32 i = 0; i < args.dk; i += 8) {
#pragma unroll
        for (u32 h = 0; h < 2; h++) most[h] = fmaxf(most[h], fmaxf(fabsf(rows[h][i]), fabsf(rows[h][i + 1])));
    }
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 1));
        most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 2));
        up[h] = query_scale(most[h], args.scale, factors[h]);
    }
#pragma unroll 1
    for (u32 i = 0; i < STEPS; i++) {
        u32 words[4] = {};
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const float *const from = rows[j % 2] + 16 * i + j / 2 * 8;
            if (2 * i + j / 2 < args.dk / 8) words[j] = pair_of_floats(T(), up[j % 2] * from[0], up[j % 2] * from[1]);
        }
        memory[THREADS * i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
#pragma unroll
    for (u32 i = 0; i < HELD; i++) {
        const uint4 four = memory[THREADS * i];
        q[i][0] = four.x, q[i][1] = four.y, q[i][2] = four.z, q[i][3] = four.w;
    }
}

template <class T, u32 WIDTH>
__device__ __forceinline__ void attend(const FlashAttnArgs &args) {
    using Tile = Tiles<WIDTH>;
    constexpr u32 HELD = Tile::HELD, N = Tile::POSITIONS / 8, M = WIDTH / 8; // fragments of queries, scores and sums
    constexpr u32 ONES = ones(T());
    constexpr u32 BIASES = WIDTH > 192 ? 2 : N; // in flight together, times 4: as many as there are registers for
    __shared__ __align__(128) u8 memory[Tile::SHARED];
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // The shuffle tells the compiler that the value is uniform in a warp.
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const BlockPlace place = block_place(args);
    const u32 queries = args.tokens * args.group, first = place.first + 16 * warp;
    const u32 begin = blockIdx.y * args.part, end = min(begin + args.part, args.positions);
    const bool is_active = first < queries;

    // Rows behind the last query repeat it; their results are not stored.
    u32 q[HELD][4];
    float factors[2]; // of scores
    u32 biases_at[2] = {2 * t, 2 * t};
    const float *rows[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        const u32 query = min(first + g + 8 * h, queries - 1), head = place.head0 + query % args.group;
        rows[h] = (const float *)(args.q + query / args.group * args.qb[0] + head * args.qb[1] + place.batch * args.qb[2]) + 2 * t;
        if (args.mask) biases_at[h] += mask_row(args, place, query) - (const u16 *)args.mask;
    }
    // Its last steps stay there if not all are held in registers; the first ones are where the stages will be.
    const uint4 *const queries_at = (const uint4 *)(memory + Tile::QUERIES_AT - HELD * STEP_BYTES) + threadIdx.x;
    load_queries<T, Tile::STEPS>(q, factors, rows, args, (uint4 *)queries_at);
    __syncthreads();
    const RowCopies<Tile> k(args.k + place.head0 / args.per_k * args.kb[1] + place.batch * args.kb[2], args.kb[0],
                            (u64)args.k | args.kb[1] | args.kb[2], args.dk, args.positions - 1);
    const RowCopies<Tile> v(args.v + place.head0 / args.per_v * args.vb[1] + place.batch * args.vb[2], args.vb[0],
                            (u64)args.v | args.vb[1] | args.vb[2], args.dv, args.positions - 1);
    const u32 shared = shared_address(memory);
    // Padding. That of k stays zero, because rows of v are not longer; that of v only has to be initialised.
    if (Tile::chunk() < Tile::CHUNKS && !(k.is_mine && v.is_mine)) {
        const u32 zeros[4] = {};
#pragma unroll 1
        for (u32 row = Tile::row(); row < Tile::STAGES * Tile::POSITIONS; row += Tile::ROWS_APART) {
            store_shared(shared + Tile::at(row, Tile::chunk()), zeros);
        }
    }
    // Without memory of its own, the scan uses the first row's chunks 0 and 1, which are padding if rows of v have 8 channels.
    if (Tile::SCAN_AT == 0) __syncthreads();
    const u32 key_row = Tile::at(lane % 8 + lane / 16 * 8, lane / 8 % 2), value_row = Tile::at(lane % 16, lane / 16);

    float sums[M][4] = {}, totals[4] = {};
    bool has_bad = false; // whether results have had values that are not finite added
    float tops[2] = {minus_infinity(), minus_infinity()};
#pragma unroll 1
    for (u32 scanned = begin; scanned < end; scanned += SCANNED_TILES * Tile::POSITIONS) {
        Scan scan = Scan::of<Tile::POSITIONS>(args, place, scanned, end, (u32 *)(memory + Tile::SCAN_AT));
        if (!scan.seen) continue;
        u32 keys = shared, values = shared + Tile::BYTES, spare = shared + 2 * Tile::BYTES; // a third stage, if there is one
        // The first pass only starts copies.
        u32 tile = SCANNED_TILES;
#pragma unroll 1
        while (true) {
            const u32 at = scanned + tile * Tile::POSITIONS;
            const bool computed = tile < SCANNED_TILES, computes = computed && is_active, is_biased = computed && scan.biased >> tile & 1;
            const bool goes_on = scan.seen != 0;
            tile = __ffs(scan.seen) - 1;
            scan.seen &= scan.seen - 1;
            const u32 next = scanned + tile * Tile::POSITIONS;

            wait_for_copies<Tile::STAGES - 2>();
            __syncthreads();
            if (Tile::STAGES == 3) k.start(spare, next, goes_on);
            else v.start(values, at, computed);
            end_copies();
            float s[N][4] = {};
            if (computes) {
#pragma unroll
                for (u32 i = 0; i < Tile::STEPS; i++) {
                    u32 a[4];
                    if (i < HELD) {
#pragma unroll
                        for (u32 j = 0; j < 4; j++) a[j] = q[i][j];
                    } else {
                        const uint4 four = queries_at[THREADS * i];
                        a[0] = four.x, a[1] = four.y, a[2] = four.z, a[3] = four.w;
                    }
                    const u32 from = Tile::later(keys + key_row, 2 * i);
#pragma unroll
                    for (u32 n = 0; n < N; n += 2) {
                        u32 b[4];
                        load_matrices(b, from + 8 * n * Tile::PITCH);
                        mma_halves(T(), s[n], a, {b[0], b[1]});
                        mma_halves(T(), s[n + 1], a, {b[2], b[3]});
                    }
                }
                // Scores times `by` are in units of ln 2.
                float by[2] = {factors[0], factors[1]};
                if (args.cap != 0.0f) {
                    // tanh(x) = 1 - 2 / (exp(2 x) + 1)
                    const float cap = args.cap * LOG2E;
#pragma unroll
                    for (u32 n = 0; n < N; n++) {
#pragma unroll
                        for (u32 i = 0; i < 4; i++) {
                            const float power = exp2_approximately(2.0f * LOG2E * by[i / 2] * s[n][i]);
                            s[n][i] = fmaf(-2.0f * cap, __fdividef(1.0f, power + 1.0f), cap);
                        }
                    }
                    by[0] = by[1] = 1.0f;
                } else {
                    by[0] *= LOG2E, by[1] *= LOG2E;
                }
                if (is_biased) {
                    // Relative to `by`, which the scores are multiplied with later
                    float relative[2] = {LOG2E, LOG2E};
                    if (args.slope_steps) {
#pragma unroll
                        for (u32 h = 0; h < 2; h++) {
                            const u32 query = min(first + g + 8 * h, queries - 1);
                            relative[h] *= alibi_slope(args, place_again(args).head0 + query % args.group);
                        }
                    }
#pragma unroll
                    for (u32 h = 0; h < 2; h++) relative[h] = __fdividef(relative[h], by[h]);
                    const int left = end - at - 2 * t;
                    const bool in_pairs = ((u64)args.mask | args.mb[0] | args.mb[1] | args.mb[2]) % 4 == 0 && args.positions % 2 == 0;
                    const u16 *const all_biases = args.mask ? (const u16 *)args.mask : no_biases;
                    const u16 *const from[2] = {all_biases + biases_at[0] + (args.mask ? at : 0), all_biases + biases_at[1] + (args.mask ? at : 0)};
#pragma unroll
                    for (u32 n0 = 0; n0 < N; n0 += BIASES) {
                        u32 biases[BIASES][2];
                        load_biases(biases, from, 8 * n0, left, in_pairs);
#pragma unroll
                        for (u32 n = 0; n < BIASES; n++) {
#pragma unroll
                            for (u32 i = 0; i < 4; i++) {
                                const float bias = float_of_half(biases[n][i / 2] >> i % 2 * 16);
                                float &score = s[n0 + n][i];
                                const float biased = fmaf(relative[i / 2], bias, score);
                                score = bias == minus_infinity() ? bias : biased;
                            }
                        }
                    }
                }
                float shifts[2], rescaled[2];
#pragma unroll
                for (u32 h = 0; h < 2; h++) {
                    float most = minus_infinity();
#pragma unroll
                    for (u32 n = 0; n < N; n++) most = fmaxf(most, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
                    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                    most = by[h] * fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                    const float reference = most - tops[h] > MAX_HEADROOM ? most - MIN_HEADROOM : tops[h];
                    rescaled[h] = rescaling(tops[h], reference);
                    tops[h] = reference, shifts[h] = reference == minus_infinity() ? 0.0f : reference;
                }
                if (__any_sync(~0u, (rescaled[0] != 1.0f) | (rescaled[1] != 1.0f))) {
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        totals[i] *= rescaled[i / 2];
#pragma unroll
                        for (u32 m = 0; m < M; m++) sums[m][i] *= rescaled[i / 2];
                    }
                }
#pragma unroll
                for (u32 n = 0; n < N; n++) {
#pragma unroll
                    for (u32 i = 0; i < 4; i++) s[n][i] = exp2_approximately(fmaf(s[n][i], by[i / 2], -shifts[i / 2]));
                }
            }

            wait_for_copies<Tile::STAGES - 2>();
            __syncthreads();
            if (Tile::STAGES == 3) v.start(keys, next, goes_on);
            else k.start(keys, next, goes_on);
            end_copies();
            if (is_biased) {
                // Values that are not finite
                u32 bad = 0;
                if (v.is_mine) {
#pragma unroll
                    for (u32 i = 0; i < Tile::COPIES; i++) {
                        const uint4 four = *(const uint4 *)(memory + (values - shared) + Tile::own(i));
                        bad = add_zero_times(T(), four.x, bad), bad = add_zero_times(T(), four.y, bad);
                        bad = add_zero_times(T(), four.z, bad), bad = add_zero_times(T(), four.w, bad);
                    }
                }
                if (__syncthreads_or(bad)) {
                    add_bad_values<T, Tile>(args, place_again(args), memory + (values - shared), at, end, has_bad);
                    has_bad = true;
                    __syncthreads();
                    if (v.is_mine) {
#pragma unroll 1
                        for (u32 i = 0; i < 4 * Tile::COPIES; i++) {
                            const u32 row = Tile::row() + i / 4 * Tile::ROWS_APART;
                            u32 *const word = (u32 *)(memory + (values - shared) + Tile::at(row, Tile::chunk())) + i % 4;
                            *word = finite_values<T>(*word);
                        }
                    }
                    __syncthreads();
                }
            }
            if (computes) {
#pragma unroll
                for (u32 j = 0; j < N / 2; j++) {
                    const float (&low)[4] = s[2 * j], (&high)[4] = s[2 * j + 1];
                    const u32 a[4] = {pair_of_floats(T(), low[0], low[1]), pair_of_floats(T(), low[2], low[3]),
                                      pair_of_floats(T(), high[0], high[1]), pair_of_floats(T(), high[2], high[3])};
                    mma_halves(T(), totals, a, {ONES, ONES});
#pragma unroll
                    for (u32 m = 0; m < M; m += 2) {
                        u32 b[4];
                        load_transposed(b, Tile::later(values + value_row, m) + 16 * j * Tile::PITCH);
                        mma_halves(T(), sums[m], a, {b[0], b[1]});
                        mma_halves(T(), sums[m + 1], a, {b[2], b[3]});
                    }
                }
            }
            if (!goes_on) break;
            if (Tile::STAGES == 3) {
                const u32 free = values;
                values = keys, keys = spare, spare = free;
            }
        }
        wait_for_copies<0>();
        __syncthreads();
    }

    // Results, through shared memory, so that stores are coalesced
    constexpr u32 WIDE = WIDTH < 128 ? WIDTH : 128, PITCH = WIDE + 8;
    static_assert(4 * ROWS * PITCH <= Tile::SHARED, "");
    float *const rows_of_sums = (float *)memory + 16 * PITCH * warp;
    const BlockPlace again = place_again(args);
    const u32 row0 = again.first + 16 * warp;
    float normal[2] = {1.0f, 1.0f};
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        const u32 head = again.head0 + min(row0 + g + 8 * h, queries - 1) % args.group;
        if (gridDim.y == 1) normal[h] = normalisation(tops[h], totals[2 * h], args.sinks ? args.sinks + head : nullptr);
    }
#pragma unroll
    for (u32 channel = 0; channel < WIDTH; channel += WIDE) {
        __syncwarp();
#pragma unroll
        for (u32 m = 0; m < WIDE / 8; m++) {
            if (channel / 8 + m >= M) break;
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                const float(&sum)[4] = sums[channel / 8 + m];
                *(float2 *)(rows_of_sums + (g + 8 * h) * PITCH + 8 * m + 2 * t) = make_float2(sum[2 * h], sum[2 * h + 1]);
            }
        }
        __syncwarp();
#pragma unroll 1
        for (u32 row = 0; row < 16 && row0 + row < queries; row++) {
            const u32 from = row % 8 * 4;
            const float factor = __shfl_sync(~0u, row < 8 ? normal[0] : normal[1], from);
            const float top = __shfl_sync(~0u, row < 8 ? tops[0] : tops[1], from);
            const float total = __shfl_sync(~0u, row < 8 ? totals[0] : totals[2], from);
            const Result result = Result::of(args, again, row0 + row);
            if (gridDim.y > 1 && lane == 0 && channel == 0) *result.stats = make_float2(top, total);
#pragma unroll 1
            for (u32 i = lane; i < WIDE && channel + i < args.dv; i += 32) {
                float sum = factor * rows_of_sums[row * PITCH + i];
                if (has_bad) sum += result.sums[channel + i];
                result.sums[channel + i] = sum;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, CHANNELS > 80 ? 2 : 3) ENTRY(FlashAttnArgs args) { attend<TYPE, CHANNELS>(args); }

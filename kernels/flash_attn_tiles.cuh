// Tiles of k, v and the mask for flash_attn_prompt.cu and flash_attn_latent.cu, which define THREADS and ROWS (queries of a block): copies to shared
// memory, the scan of the mask, and values that are not finite.
#pragma once
#include "common/async.cuh"
#include "common/mma.cuh"
#include "flash_attn_common.cuh"

constexpr u32 WARPS = THREADS / 32;
constexpr u32 STEP_BYTES = 16 * THREADS; // a step's fragments of queries of all warps
constexpr u32 SCANNED_TILES = 32;  // tiles whose masks are scanned at a time: one bit each

// Weights are relative to a reference, and the largest is between 2^7 and 2^15: in this range, F16 holds them and those that are much
// smaller. Sums are rescaled only when the largest exceeds it.
constexpr float MIN_HEADROOM = 7.0f, MAX_HEADROOM = 15.0f;

// A tile of positions in shared memory. A row is a position; it has WIDTH channels of k or v, in chunks of 8 (16 bytes).
// ldmatrix reads the same chunk of eight rows. These must be in different banks: either a row has an odd number of chunks, with one
// unused, or chunk c of row r is at c ^ r % 8 (XOR swizzle). The latter fits three tiles of 128 channels into 48 KiB.
template <u32 WIDTH>
struct Tiles {
    static_assert(WIDTH % 16 == 0, "");
    static constexpr u32 POSITIONS = WIDTH > 128 ? 32 : 64;
    static constexpr u32 CHUNKS = WIDTH / 8;
    static constexpr bool IS_SWIZZLED = CHUNKS % 8 == 0;
    static constexpr u32 PITCH = 16 * (IS_SWIZZLED ? CHUNKS : CHUNKS + 1), BYTES = POSITIONS * PITCH;
    // Above 192 channels, half of the fragments of the queries are in shared memory, which leaves room for two tiles.
    static constexpr u32 STEPS = WIDTH / 16, HELD = WIDTH > 192 ? STEPS / 2 : STEPS, STAGES = HELD < STEPS ? 2 : 3;
    static constexpr u32 QUERIES_AT = HELD < STEPS ? STAGES * BYTES : HELD * STEP_BYTES, END = STAGES * BYTES + (STEPS - HELD) * STEP_BYTES;
    // The masks of four warps, behind the stages or in the first 32 bytes.
    static constexpr u32 SCAN_AT = END + 32 <= 48 << 10 ? END : 0, SHARED = SCAN_AT ? END + 32 : END;

    // A thread copies one chunk of each ROWS_APART-th row.
    static constexpr u32 LANES = CHUNKS <= 8 ? 8 : CHUNKS <= 16 ? 16 : 32, ROWS_APART = THREADS / LANES, COPIES = POSITIONS / ROWS_APART;

    static __device__ __forceinline__ u32 at(u32 row, u32 chunk) { return row * PITCH + (IS_SWIZZLED ? chunk ^ row % 8 : chunk) * 16; }

    // The address `chunks` chunks (an even number) after that of an even chunk or the next one.
    static __device__ __forceinline__ u32 later(u32 from, u32 chunks) {
        return IS_SWIZZLED ? (from ^ chunks % 8 * 16) + chunks / 8 * 128 : from + 16 * chunks;
    }

    // This thread's row and chunk.
    static __device__ __forceinline__ u32 row() { return threadIdx.x / LANES; }
    static __device__ __forceinline__ u32 chunk() { return threadIdx.x % LANES; }

    // Offset of this thread's copy `i`.
    static __device__ __forceinline__ u32 own(u32 i) {
        return at(row() + ROWS_APART * i % 8, chunk()) + ROWS_APART * i / 8 * 8 * PITCH;
    }
};

// Rows of k or v, as this thread copies them.
template <class Tile>
struct RowCopies {
    const u8 *from; // this thread's chunk of the first row
    u32 step;       // bytes from one row to the next
    u32 last;       // index of the last row, which is also copied for rows behind it
    bool is_mine;   // whether rows have this thread's chunk
    bool is_whole;  // whether all chunks are at multiples of 16 bytes

    __device__ __forceinline__ RowCopies(const u8 *rows, u64 step, u64 address_bits, u32 channels, u32 last)
        : from(rows + 16 * Tile::chunk()), step(step), last(last), is_mine(Tile::chunk() < channels / 8),
          is_whole((address_bits | step) % 16 == 0) {
        // Without this, the compiler computes these again for each tile.
        asm("" : "+l"(from));
    }

    // Starts the copy of the tile at `position`, if `wanted`.
    __device__ __forceinline__ void start(u32 stage, u32 position, bool wanted) const {
        if (!wanted || !is_mine) return;
        u32 row = position + Tile::row();
        if (is_whole && position + Tile::POSITIONS <= last + 1) {
            const u8 *next = from + (u64)row * step;
#pragma unroll
            for (u32 i = 0; i < Tile::COPIES; i++) copy_async_if(stage + Tile::own(i), next + i * (u64)Tile::ROWS_APART * step, true);
            return;
        }
#pragma unroll 1
        for (u32 i = Tile::row(); i < Tile::POSITIONS; i += Tile::ROWS_APART, row += Tile::ROWS_APART) {
            const u8 *const next = from + (u64)min(row, last) * step;
            const u32 to = stage + Tile::at(i, Tile::chunk());
            if (is_whole) {
                copy_async_if(to, next, true);
                continue;
            }
            u32 words[4];
            load_words<2>(next, words);
            store_shared(to, words);
        }
    }
};

// The mask's row of a query of this block's heads.
__device__ __forceinline__ const u16 *mask_row(const FlashAttnArgs &args, const BlockPlace &place, u32 query) {
    const u32 head = (place.head0 + query % args.group) % args.mask_heads;
    return (const u16 *)(args.mask + query / args.group * args.mb[0] + head * args.mb[1] + place.batch % args.mask_batches * args.mb[2]);
}

// What the mask says about up to SCANNED_TILES tiles of positions, one bit each.
struct Scan {
    u32 seen;   // some query sees a position
    u32 biased; // some bias is not 0, or a position is hidden or behind the end

    // Tiles of `SIZE` positions from `begin` on, for the queries from place.first on. `words` is shared memory for two words per warp; all
    // threads have left it when this function returns.
    template <u32 SIZE>
    static __device__ __forceinline__ Scan of(const FlashAttnArgs &args, const BlockPlace &place, u32 begin, u32 end, u32 *words) {
        const u32 count = min((end - begin + SIZE - 1) / SIZE, SCANNED_TILES);
        if (!args.mask) {
            const bool is_cut = (end - begin) % SIZE != 0 && end - begin < SIZE * SCANNED_TILES;
            return {~0u >> (32 - count), is_cut ? 1u << (count - 1) : 0};
        }
        if (((u64)args.mask | args.mb[0] | args.mb[1] | args.mb[2]) % 16 != 0 || args.positions % 8 != 0) {
            return {~0u >> (32 - count), ~0u};
        }
        constexpr u32 AT_ONCE = 32 * 8, LOADS = SIZE * SCANNED_TILES / AT_ONCE; // positions that a warp loads at once
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        // Heads that share a mask have the same row for all queries of a token.
        const u32 by = args.mask_heads == 1 ? args.group : 1, queries = args.tokens * args.group;
        const u32 last = min(place.first + ROWS, queries) - 1;
        u32 seen = 0, biased = 0; // one bit for each load
#pragma unroll 1
        for (u32 row = place.first / by + warp; row <= last / by; row += WARPS) {
            const uint4 *const from = (const uint4 *)(mask_row(args, place, row * by) + begin) + lane;
#pragma unroll 4
            for (u32 i = 0; i < LOADS; i++) {
                uint4 four = make_uint4(HIDDEN_PAIR, HIDDEN_PAIR, HIDDEN_PAIR, HIDDEN_PAIR);
                if (8 * lane + AT_ONCE * i < end - begin) four = from[32 * i];
                if ((four.x ^ HIDDEN_PAIR) | (four.y ^ HIDDEN_PAIR) | (four.z ^ HIDDEN_PAIR) | (four.w ^ HIDDEN_PAIR)) seen |= 1 << i;
                if (four.x | four.y | four.z | four.w) biased |= 1 << i;
            }
        }
        constexpr u32 PER_LOAD = AT_ONCE / SIZE;
        u32 of_lane[2] = {};
#pragma unroll 1
        for (u32 i = lane * 8 / SIZE; i < SCANNED_TILES; i += PER_LOAD, seen /= 2, biased /= 2) {
            of_lane[0] |= (seen & 1) << i, of_lane[1] |= (biased & 1) << i;
        }
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 of_warp = __reduce_or_sync(~0u, of_lane[i]);
            if (lane == 0) words[2 * warp + i] = of_warp;
        }
        __syncthreads();
        u32 all[2] = {};
#pragma unroll
        for (u32 i = 0; i < 2 * WARPS; i++) all[i % 2] |= words[i];
        __syncthreads();
        return {all[0], all[1]};
    }
};

// Whether a value of a word is infinite or NaN: then 0 * word + so_far is NaN, otherwise it stays 0 (or -0).
__device__ __forceinline__ u32 add_zero_times(F16, u32 word, u32 so_far) {
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(so_far) : "r"(word), "r"(0));
    return so_far;
}
__device__ __forceinline__ u32 add_zero_times(BF16, u32 word, u32 so_far) {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(so_far) : "r"(word), "r"(0));
    return so_far;
}

// Two ones.
__device__ constexpr u32 ones(F16) { return 0x3c003c00; }
__device__ constexpr u32 ones(BF16) { return 0x3f803f80; }

// The word with values that are not finite replaced by 0.
template <class T>
__device__ __forceinline__ u32 finite_values(u32 word) {
    const u32 bad = add_zero_times(T(), word, 0) & 0x7fff7fff;
    return word & ((bad & 0xffff ? 0 : 0xffff) | (bad >> 16 ? 0 : 0xffff0000));
}

// block_place, computed again where it is rarely needed: otherwise it takes registers all the time.
__device__ __forceinline__ BlockPlace place_again(const FlashAttnArgs &args) {
    u32 x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return block_place(args, x);
}

// Where the results of a query go: to dst, or to the sums of this part.
struct Result {
    float *sums;
    float2 *stats;

    static __device__ __forceinline__ Result of(const FlashAttnArgs &args, const BlockPlace &place, u32 query) {
        const u64 all = (u64)args.batches * args.tokens * args.heads;
        const u64 at = ((u64)place.batch * args.tokens + query / args.group) * args.heads + place.head0 + query % args.group;
        if (gridDim.y == 1) return {args.dst + at * args.dv, nullptr};
        return {args.sums + (blockIdx.y * all + at) * args.dv, (float2 *)args.stats + blockIdx.y * all + at};
    }
};

// A bit for each position of a tile.
template <u32 POSITIONS> struct BitsOf { using Type = u64; };
template <> struct BitsOf<32> { using Type = u32; };

// Adds values that are not finite to the results, which are not in use yet, of the queries that see them. A thread has a channel, and bits of
// the positions of its bad values: so a query takes few instructions, however many of them there are.
template <class T, class Tile>
__device__ __forceinline__ void add_bad_values(const FlashAttnArgs &args, const BlockPlace &place, const u8 *tile, u32 position, u32 end,
                                               u32 had_bad) {
    const u32 last = min(place.first + ROWS, args.tokens * args.group), positions = min(Tile::POSITIONS, end - position);
    const u32 lane = threadIdx.x % 32;
    const float infinity = __uint_as_float(0x7f800000);
    using Bits = typename BitsOf<Tile::POSITIONS>::Type;
#pragma unroll 1
    for (u32 first = 0; first < args.dv; first += THREADS) {
        const u32 channel = first + threadIdx.x;
        Bits above = 0, below = 0, others = 0; // infinities and NaN
        if (channel < args.dv) {
#pragma unroll 1
            for (u32 i = 0; i < positions; i++) {
                const float value = T::load1(tile + Tile::at(i, channel / 8), channel % 8);
                const Bits bit = (Bits)1 << i;
                if (value == infinity) above |= bit;
                else if (value == -infinity) below |= bit;
                else if (value != value) others |= bit;
            }
        }
        if (had_bad && !__any_sync(~0u, (above | below | others) != 0)) continue;
#pragma unroll 1
        for (u32 query = place.first; query < last; query++) {
            asm volatile("" : "+r"(had_bad)); // one loop for both cases
            Bits seen = ~(Bits)0;
            if (args.mask) {
                const u16 *const mask = mask_row(args, place, query) + position;
                seen = __ballot_sync(~0u, lane < positions && mask[lane] != HIDDEN);
                if constexpr (sizeof(Bits) == 8) {
                    seen |= (Bits)__ballot_sync(~0u, lane + 32 < positions && mask[lane + 32] != HIDDEN) << 32;
                }
            }
            float sum = 0.0f;
            if (seen & above) sum += infinity;
            if (seen & below) sum -= infinity;
            if (seen & others) sum = __uint_as_float(0x7fffffff);
            if (channel >= args.dv || (had_bad && sum == 0.0f)) continue;
            float *const to = Result::of(args, place, query).sums + channel;
            *to = had_bad ? *to + sum : sum;
        }
    }
}

// The factor by which a query is multiplied before it is rounded, and that of its scores, from its largest absolute value.
__device__ __forceinline__ float query_scale(float most, float scale, float &factor) {
    // Queries times 2^by are below 2^8, so that what is rounded to 0 is below 2^-31 of the largest. Smaller ones do not matter. The limit of 60
    // keeps a bias divided by the factor finite: the scale is at least 2^-40.
    const int exponent = __float_as_uint(most) >> 23, by = exponent == 0 || exponent == 255 ? 0 : min(134 - exponent, 60);
    float up = __uint_as_float((127 + by) << 23);
    factor = __uint_as_float((127 - by) << 23) * fabsf(scale);
    if (scale < 0.0f) up = -up; // factors are positive, for the sake of maxima
    return up;
}

// Tiles of k and v of Q8_0 or Q4_0 for flash_attn_blocks.cu: copies to shared memory, and operands of mma from there.
#pragma once
#include "common/async.cuh"
#include "common/mma.cuh"
#include "common/quants.cuh"
#include "flash_attn_warps.cuh"

constexpr u32 SUM_PITCH = SPAN + 4;   // floats per query, of a warp's sums
constexpr u32 POSITIONS = 32;         // of a tile: two of an mma
constexpr u32 SCALE_PITCH = 4 * (POSITIONS + 8); // bytes of the scales of k of a block, with which four blocks use different banks
constexpr u32 KEY_SCALES = 4 * SCALE_PITCH, SCALE_BYTES = KEY_SCALES + 8 * POSITIONS; // of four blocks: those of k in F32, those of v in F16
constexpr u32 PIECE = 4;               // blocks of a row that are multiplied at a time
constexpr float TOP_CODE = 32639.0f;   // of a query: 127 * 256 + 127

// A tile in shared memory: 16 rows with this pitch, an odd number of 16 bytes, so that the same word of eight rows is in different banks.
// `bits`: all strides, combined by or.
__device__ __forceinline__ u32 row_pitch(u32 bytes, u64 bits) {
    const u32 alignment = (u32)((bits | 16) & -(bits | 16)), before = alignment < 4 ? 0 : 16 - alignment;
    return ((bytes + before + 15) / 16 | 1) * 16;
}

__device__ __forceinline__ u32 load_shared(u32 at) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
    return word;
}
__device__ __forceinline__ u32 load_shared_u16(u32 at) {
    u16 half;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(at) : "memory");
    return half;
}
__device__ __forceinline__ uint4 load_shared_four(u32 at) {
    uint4 four;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w) : "r"(at) : "memory");
    return four;
}

// Copies 16 bytes through L1: warps with other queries read the same rows.
__device__ __forceinline__ void copy_async_16(u32 to, const u8 *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" : : "r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
}

// Keeps a value in a register: the compiler would compute it again for each tile.
__device__ __forceinline__ void pin(u32 &value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void pin(const u8 *&value) { asm volatile("" : "+l"(value)); }

// The rows of k or v of a head, as a warp copies them.
struct RowTiles {
    const u8 *at;
    u32 step, last; // bytes from one row to the next; index of the last row
    u32 bytes;      // of a row
    u32 pitch;      // in shared memory
    bool is_direct; // whether rows are copied in words of 16 bytes, as they are in global memory
    // Direct copies: each pass copies eight words of each row, by eight lanes; then a lane copies up to two words of its row.
    const u8 *row_of_eight, *rest;
    u32 to_of_eight, to_of_rest, passes, rest_words, limit;

    __device__ __forceinline__ RowTiles(const u8 *tensor, u64 offset, const u64 (&nb)[3], u32 positions, u32 bytes, u32 of_row)
        : at(tensor + offset), step((u32)nb[0]), last(positions - 1), bytes(bytes), pitch(row_pitch(of_row, nb[0] | nb[1] | nb[2])) {
        // Steps of 16 bytes keep the words of a row within the next row.
        is_direct = ((u64)tensor % 16 | (nb[0] | nb[1] | nb[2]) % 4) == 0 && nb[0] >= 16 && nb[0] < 1 << 30;
        const u32 lane = threadIdx.x % 32, before = start_of(lane / 8), words = (before + bytes + 15) / 16;
        const u32 most = __reduce_max_sync(~0u, words);
        passes = most < 8 || most % 8 > 2 ? (most + 7) / 8 : most / 8;
        row_of_eight = at + (u64)(lane / 8) * step - before, to_of_eight = lane / 8 * pitch, limit = 16 * words - 16;
        const u32 before_rest = start_of(lane), own = (before_rest + bytes + 15) / 16;
        rest = at + (u64)lane * step - before_rest + 128 * passes, to_of_rest = lane * pitch + 128 * passes;
        rest_words = own > 8 * passes ? own - 8 * passes : 0;
        pin(pitch), pin(row_of_eight), pin(rest), pin(to_of_eight), pin(to_of_rest), pin(passes), pin(rest_words), pin(limit);
    }

    // Offset of a row of a tile within its first word of 16 bytes. A tile's first position is a multiple of 16, so all tiles have the same.
    __device__ __forceinline__ u32 start_of(u32 row) const { return is_direct ? ((u32)(u64)at + row * step) % 16 : 0; }
    // Offset of a row of a tile in shared memory.
    __device__ __forceinline__ u32 row(u32 i) const { return i * pitch + start_of(i); }

    // Starts the copy of a tile without the last row. Bytes behind the end of a row belong to the next one.
    __device__ __forceinline__ void start(u32 stage, u32 position) const {
        const u64 skipped = (u64)position * step;
        u32 offset = threadIdx.x % 8 * 16;
#pragma unroll 1
        for (u32 pass = 1;; pass++, offset += 128) {
            if (offset <= limit) {
                const u8 *from = row_of_eight + skipped + offset;
                u32 to = stage + to_of_eight + offset;
#pragma unroll
                for (u32 i = 0; i < POSITIONS / 4; i++, from += 4 * step, to += 4 * pitch) copy_async_16(to, from);
            }
            if (pass == passes) break;
        }
        if (rest_words > 0) {
            copy_async_16(stage + to_of_rest, rest + skipped);
            if (rest_words > 1) copy_async_16(stage + to_of_rest + 16, rest + skipped + 16);
        }
    }

    // Starts the copy of any tile. No byte behind a row's end is read; rows behind the last one become zeros or copies of it.
    __device__ __forceinline__ void start_carefully(u32 stage, u32 position) const {
        const u32 lane = threadIdx.x % 32;
#pragma unroll 1
        for (u32 i = lane / 8; i < POSITIONS; i += 4) {
            const u8 *const from = at + (u64)min(position + i, last) * step;
            const u32 before = start_of(i);
#pragma unroll 1
            for (u32 n = lane % 8; is_direct && 16 * n < before + bytes; n += 8) {
                const bool is_behind = position + i > last;
                copy_async(stage + i * pitch + 16 * n, is_behind ? at - start_of(0) : from - before + 16 * n,
                           is_behind ? 0 : min(before + bytes - 16 * n, 16));
            }
#pragma unroll 1
            for (u32 n = lane % 8; !is_direct && 4 * n < bytes; n += 8) {
                const u32 pair = join_u16(load_u16(from + 4 * n), load_u16(from + 4 * n + 2));
                asm volatile("st.shared.u32 [%0], %1;" : : "r"(stage + i * pitch + 4 * n), "r"(pair) : "memory");
            }
        }
    }
};

template <class T> struct LaneCodes;

template <>
struct LaneCodes<Q8_0> {
    // Scales of v are multiplied by it, so that the largest of v is some 2^16 in both types: as float and as F16.
    static constexpr float BOOST = 64.0f;
    static constexpr u16 BOOST_HALF = 0x5400;

    // The code of 0 in the F16 words of value_words, negative, in rows g (0) or g + 8 (1); and the factor of these rows' sums.
    static __device__ constexpr u32 minus_zero(u32) { return 0x80808080; }
    static __device__ constexpr float unit(u32) { return 16777216.0f / BOOST; }

    // Channel of a block that byte i of the operand b has, without the rotation.
    static __device__ __forceinline__ u32 key_channel(u32 t, u32 i, u32 rotation) { return (4 * t + i % 4 + i / 4 * 16 + rotation) % 32; }

    // The operand b of a row from a block, and from word t of it. `join` is the selector for the last word of even blocks.
    static __device__ __forceinline__ void load_key(u32 block, u32 word, bool is_even, u32 join, u32 (&words)[2]) {
        const u32 codes = word + (is_even ? 4 : 2);
        words[0] = load_shared(codes), words[1] = load_shared(codes + 16);
        if (is_even) words[1] = __byte_perm(words[1], load_shared(block), join);
    }
    static __device__ __forceinline__ void multiply(int (&sums)[4], const u32 (&a)[4], const u32 (&words)[2], const int (&start)[4]) {
        mma_s8_s8(sums, a, words, start);
    }
    static __device__ __forceinline__ void start(const u32 (&)[4], int (&sums)[4]) { sums[0] = sums[1] = sums[2] = sums[3] = 0; }

    // Channels 4 g to 4 g + 3 at a position.
    struct Value {
        u32 low, high;
    };
    static constexpr u32 VALUE_BYTES = 4;
    static __device__ __forceinline__ Value load_value(u32 codes, bool is_even) {
        if (is_even) return {load_shared_u16(codes), load_shared_u16(codes + 2)};
        const u32 word = load_shared(codes);
        return {word, word >> 16};
    }
    // Words of two positions: rows g and g + 8 of the first 16 channels, then of the others.
    static __device__ __forceinline__ void value_words(const Value &a, const Value &b, u32 (&words)[4]) {
        const u32 low = join_u16(a.low, b.low), high = join_u16(a.high, b.high);
        words[0] = (low & 0x00ff00ff) ^ 0x00800080, words[1] = (low >> 8 & 0x00ff00ff) ^ 0x00800080;
        words[2] = (high & 0x00ff00ff) ^ 0x00800080, words[3] = (high >> 8 & 0x00ff00ff) ^ 0x00800080;
    }
    // Stores a lane's sums of a block.
    static __device__ __forceinline__ void store(float *block, u32 g, const float (&x)[4]) {
        *(float4 *)(block + 4 * g) = make_float4(x[0], x[1], x[2], x[3]);
    }
};

template <>
struct LaneCodes<Q4_0> {
    // Scales of v are multiplied by it, so that the largest of v is some 2^16 in both types: as float and as F16.
    static constexpr float BOOST = 4.0f;
    static constexpr u16 BOOST_HALF = 0x4400;

    // The upper nibble of a byte counts 16 times.
    static __device__ constexpr u32 minus_zero(u32 half) { return half ? 0x80808080 : 0x80088008; }
    static __device__ constexpr float unit(u32 half) { return (half ? 1048576.0f : 16777216.0f) / BOOST; }

    static __device__ __forceinline__ u32 key_channel(u32 t, u32 i, u32 rotation) { return (4 * t + i % 4 + rotation) % 16 + i / 4 * 16; }

    static __device__ __forceinline__ void load_key(u32 block, u32 word, bool is_even, u32 join, u32 (&words)[2]) {
        u32 codes = load_shared(word + (is_even ? 4 : 2));
        if (is_even) codes = __byte_perm(codes, load_shared(block), join);
        words[0] = codes & 0x0f0f0f0f, words[1] = codes >> 4 & 0x0f0f0f0f;
    }
    static __device__ __forceinline__ void multiply(int (&sums)[4], const u32 (&a)[4], const u32 (&words)[2], const int (&start)[4]) {
        mma_s8_u8(sums, a, words, start);
    }
    // -8 times the sums of the queries.
    static __device__ __forceinline__ void start(const u32 (&a)[4], int (&sums)[4]) { mma_s8_s8(sums, a, {0xf8f8f8f8, 0xf8f8f8f8}, {0, 0, 0, 0}); }

    // Channels 2 g, 16 + 2 g, 2 g + 1, 17 + 2 g.
    using Value = u32;
    static constexpr u32 VALUE_BYTES = 2;
    static __device__ __forceinline__ Value load_value(u32 codes, bool) { return load_shared_u16(codes); }
    static __device__ __forceinline__ void value_words(Value a, Value b, u32 (&words)[4]) {
        const u32 all = join_u16(a, b), second = all >> 8;
        words[0] = all & 0x000f000f, words[1] = all & 0x00f000f0, words[2] = second & 0x000f000f, words[3] = second & 0x00f000f0;
    }
    static __device__ __forceinline__ void store(float *block, u32 g, const float (&x)[4]) {
        *(float2 *)(block + 2 * g) = make_float2(x[0], x[2]), *(float2 *)(block + 2 * g + 16) = make_float2(x[1], x[3]);
    }
};

// Quantises floats to blocks of TYPE, byte for byte as the CPU does: CPY, and SET_ROWS to the rows that ids select.
//
// Variants: one module per TYPE, with the entry ENTRY (copy_to_<type>); x is F32, F16 or BF16, of any layout. Elements are
//           loaded into shared memory by coalesced accesses; each thread quantises one block; the blocks are stored through
//           shared memory too.
// Limits:   dimensions below 2^31; each aligned group of four elements lies in one row of x.
// Floor:    each element is read once, each block written once.
#define MAKES_BLOCKS
#include "common/copy.cuh"
#include "common/ids.cuh"
#include "common/quants.cuh"

struct CopyToBlocksArgs {
    const u8 *x, *ids;
    u8 *y;
    const u64 *claims;
    u32 *error_word;
    Shape xs, ys; // counted in elements
    Ids list;
    u64 blocks;
    u32 type; // type of x
    u32 mode; // a TargetMode
};

// Destination of the blocks. DENSE: y is contiguous; STRIDED: y has any strides; NAMED: ids select the rows of y (SET_ROWS).
enum TargetMode : u32 { DENSE, STRIDED, NAMED };

constexpr u32 THREADS = 128, LEN = TYPE::LEN, BYTES = TYPE::BYTES, PITCH = LEN + 1;
// Quantised blocks per thread block: as many as fit in shared memory; one thread quantises each.
constexpr u32 BLOCKS = LEN == 32 ? 128 : 32;

// Address for the block that starts with element e. Null if the block is not stored, because its id is invalid or a later equal
// id overrides it.
__device__ __forceinline__ u8 *target(const CopyToBlocksArgs &args, u64 e) {
    if (args.mode == STRIDED) {
        const Index i = index_of(args.ys, e);
        return args.y + args.ys.at(i.i[0] / LEN, i.i[1], i.i[2], i.i[3]);
    }
    const Index i = index_of(args.xs, e);
    const u32 a = i.i[2] % args.list.lists[0], b = i.i[3] % args.list.lists[1];
    const i64 id = args.list.at(args.ids, i.i[1], a, b);
    if (!args.list.inside(id)) {
        report_bad_index(args.error_word, SET_ROWS);
        return nullptr;
    }
    if (!last_of_equal(args.list, args.ids, args.claims, i.i[1], a, b, id)) return nullptr;
    return args.y + args.ys.at(i.i[0] / LEN, id, i.i[2], i.i[3]);
}

extern "C" __global__ void ENTRY(CopyToBlocksArgs args) {
    __shared__ float values[BLOCKS * PITCH];
    __shared__ uint4 packed[BLOCKS * BYTES / 16];
    __shared__ u8 *to[BLOCKS];
    const u64 first = (u64)blockIdx.x * BLOCKS;
    const u32 count = min((u64)BLOCKS, args.blocks - first), size = bytes_of(args.type);
    for (u32 q = threadIdx.x; q < count * (LEN / 4); q += THREADS) {
        const Index i = index_of(args.xs, first * LEN + 4 * q);
        const u8 *src = args.x + args.xs.at(i.i[0], i.i[1], i.i[2], i.i[3]);
        u32 words[4];
        if (args.xs.nb[0] == size && ((u64)src & (4 * size - 1)) == 0) {
            if (size == 4) {
                load_words<16>(src, words);
            } else {
                const uint2 two = *(const uint2 *)src;
                words[0] = two.x & 0xffff, words[1] = two.x >> 16, words[2] = two.y & 0xffff, words[3] = two.y >> 16;
            }
        } else {
#pragma unroll
            for (u32 k = 0; k < 4; k++) words[k] = load_word(src + k * args.xs.nb[0], args.type);
        }
        float *at = values + q / (LEN / 4) * PITCH + q % (LEN / 4) * 4;
#pragma unroll
        for (u32 k = 0; k < 4; k++) at[k] = float_of_word(words[k], args.type);
    }
    __syncthreads();
    if (threadIdx.x < count) {
        u8 *there = args.mode == DENSE ? args.y : target(args, (first + threadIdx.x) * LEN);
        to[threadIdx.x] = there;
        const float *from = values + threadIdx.x * PITCH;
        if (there) pack(TYPE(), [=](int k) { return from[k]; }, (u8 *)packed + threadIdx.x * BYTES);
    }
    __syncthreads();
    if (args.mode == DENSE) return move_run((const u8 *)packed, args.y + first * BYTES, count * BYTES, 0, threadIdx.x, THREADS);
    // Blocks are at even addresses, unless their size is odd.
    constexpr u32 STEP = BYTES % 2 ? 1 : 2, STEPS = BYTES / STEP;
    for (u32 w = threadIdx.x; w < count * STEPS; w += THREADS) {
        u8 *there = to[w / STEPS];
        if (there == nullptr) continue;
        if (STEP == 1) there[w % STEPS] = ((const u8 *)packed)[w];
        else ((u16 *)there)[w % STEPS] = ((const u16 *)packed)[w];
    }
}

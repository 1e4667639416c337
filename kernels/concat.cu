// CONCAT (one launch per source) and REPEAT: copies of bytes between layouts, for every type.
//
// Variants: one. The launch site (src/cuda/ops/concat.rs) reduces the copy to runs of bytes that are dense in source and
//           destination (at least one block), a loop that repeats a run in the destination, and up to seven more loops. A run
//           may also be filled with one element of 1, 2, 4 or 8 bytes.
// Limits:   counts below 2^32, runs of any length.
// Floor:    the source is read once per part of the repeats; the destination is written once.
#include "common/abi.cuh"

struct ConcatArgs {
    const u8 *src;
    u8 *dst;
    u64 dst_at;           // byte offset of the first run
    u64 bytes;            // bytes per run
    u64 repeat;           // byte stride of the repeats in the destination
    u64 from[7], to[7];   // byte strides of the loops in source and destination
    u32 count[7];         // counts of the loops
    u32 dims;
    u32 rows;             // number of runs in the source
    u32 repeats, parts, part; // repeats of a run; number of parts, one per block; repeats per part
    u32 tiles;            // tiles per run
    u32 tile;             // bytes per tile, a multiple of 16
    u32 unit;             // bytes of the element that fills the runs; 0 if the runs are copied
    u32 align;            // greatest power of two, up to 16, that divides all strides
};

// The copy of a block: bytes `begin` to `end` of a run, to `repeats` destinations with a stride of `step` bytes.
struct CopySpan {
    const u8 *src;
    u8 *dst;
    u64 begin, end, step;
    u32 repeats;
};

// Copies by accesses of one W, with four accesses per thread in flight.
template <class W>
__device__ __forceinline__ void copy(const CopySpan &p) {
    const u64 stride = blockDim.x * sizeof(W);
#pragma unroll 1
    for (u64 k = p.begin + threadIdx.x * sizeof(W); k + sizeof(W) <= p.end; k += 4 * stride) {
        W words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (k + i * stride + sizeof(W) <= p.end) words[i] = *(const W *)(p.src + k + i * stride);
        }
        u8 *to = p.dst + k;
#pragma unroll 1
        for (u32 r = 0; r < p.repeats; r++, to += p.step) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (k + i * stride + sizeof(W) <= p.end) *(W *)(to + i * stride) = words[i];
            }
        }
    }
    // Remainder at the end of a run.
    for (u64 k = p.end - (p.end - p.begin) % sizeof(W) + threadIdx.x; k < p.end; k += blockDim.x) {
        const u8 byte = p.src[k];
        for (u32 r = 0; r < p.repeats; r++) p.dst[k + r * p.step] = byte;
    }
}

// Loads an element of 1, 2, 4 or 8 bytes, repeated to 8 bytes.
__device__ __forceinline__ u64 element(const u8 *at, u32 bytes) {
    switch (bytes) {
    case 1: return 0x0101010101010101 * *at;
    case 2: return 0x0001000100010001 * *(const unsigned short *)at;
    case 4: return 0x0000000100000001 * *(const u32 *)at;
    default: return *(const u64 *)at;
    }
}

__device__ __forceinline__ void store_pattern(uint4 *to, u64 k, u64 pattern) {
    *to = make_uint4((u32)pattern, (u32)(pattern >> 32), (u32)pattern, (u32)(pattern >> 32));
}
template <class W>
__device__ __forceinline__ void store_pattern(W *to, u64 k, u64 pattern) {
    *to = (W)(pattern >> 8 * (k & 7));
}

// Fills a run with `pattern`, which is the element repeated to 8 bytes.
template <class W>
__device__ __forceinline__ void fill(const CopySpan &p, u64 pattern) {
    const u64 stride = blockDim.x * sizeof(W);
    for (u32 r = 0; r < p.repeats; r++) {
        u8 *to = p.dst + r * p.step;
        for (u64 k = p.begin + threadIdx.x * sizeof(W); k + sizeof(W) <= p.end; k += stride) store_pattern((W *)(to + k), k, pattern);
        for (u64 k = p.end - (p.end - p.begin) % sizeof(W) + threadIdx.x; k < p.end; k += blockDim.x) store_pattern(to + k, k, pattern);
    }
}

template <class W>
__device__ __forceinline__ void copy_or_fill(const CopySpan &p, u32 unit) {
    if (unit == 0) copy<W>(p);
    else fill<W>(p, element(p.src, unit));
}

// Grid: tiles, parts, then groups of blockDim.y rows, the first fastest.
extern "C" __global__ void concat_runs(ConcatArgs args) {
    u32 block = blockIdx.x;
    const u32 tile = block % args.tiles;
    block /= args.tiles;
    const u32 part = block % args.parts;
    u32 row = block / args.parts * blockDim.y + threadIdx.y;
    if (row >= args.rows) return;
    CopySpan p;
    p.src = args.src;
    p.dst = args.dst + args.dst_at;
    const u32 align = args.align | (u32)(u64)p.dst | (args.unit ? 0 : (u32)(u64)p.src);
    p.step = args.repeat;
    p.repeats = min(args.part, args.repeats - part * args.part);
    p.begin = (u64)tile * args.tile;
    p.end = min(args.bytes, p.begin + args.tile);
    for (u32 d = 0; d < args.dims; d++) {
        const u32 i = row % args.count[d];
        row /= args.count[d];
        p.src += i * args.from[d];
        p.dst += i * args.to[d];
    }
    p.dst += (u64)part * args.part * args.repeat;
    if (align % 16 == 0) copy_or_fill<uint4>(p, args.unit);
    else if (align % 8 == 0) copy_or_fill<u64>(p, args.unit);
    else if (align % 4 == 0) copy_or_fill<u32>(p, args.unit);
    else if (align % 2 == 0) copy_or_fill<unsigned short>(p, args.unit);
    else copy_or_fill<u8>(p, args.unit);
}

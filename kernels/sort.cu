// ARGSORT and TOP_K: the indices of each row of F32 by value, NaN beyond the infinity of its sign, equal values by index.
//
// A value and its index become one integer, as src/cpu/ops/sort.rs has it; all keys of a row differ, so every sort is stable.
//
// Variants: sort_tile orders tiles of up to 4096 keys in shared memory (bitonic), several rows a block where they are short.
//           A row of one tile is done then. Longer ones go through scratch memory: sort_merge doubles the length of the
//           ordered runs; or, for the few largest, sort_tile is run again on the first keys of each tile.
// Limits:   rows below 2^31 elements.
// Floor:    rows of one tile are read once, and their indices written once. Longer ones take a read and a write of 8 bytes
//           an element for each doubling.
#include "common/abi.cuh"

// One tile's keys lie in shared memory: row threadIdx.y of the block has `size` of them.
struct Tile {
    const u8 *x;
    const u64 *from;
    u64 *to;
    u8 *y;
    Shape xs, ys;
    // Keys of row r lie at from + r * from_step, and go to to + r * to_step: r counts from `first`, the row that they are of.
    u64 from_step, to_step;
    u32 first, rows;
    // Elements of a row, or its keys in `from`; tiles of a row; keys of a tile (a power of two); first ones that are kept.
    u32 count, tiles, size, keep;
    u32 descending;
    // Whether the elements come from x or `from`; and whether indices go to y or keys to `to`.
    u32 from_x, to_y;
    u32 padding;
};

// Before all keys of lower values, or of higher ones.
__device__ __forceinline__ u64 key_of(float value, u32 index, u32 descending) {
    const u32 bits = __float_as_uint(value);
    const u32 ascending = bits >> 31 ? ~bits : bits | 0x80000000;
    return (u64)(descending ? ~ascending : ascending) << 32 | index;
}

// What one stage writes, the next reads: keys of 32 lanes lie in one piece of 64 where both exchange within 32.
__device__ __forceinline__ void barrier(u32 stride, u32 next) {
    if (stride > 32 || next > 32) __syncthreads();
    else __syncwarp();
}

// Blocks of size / 2 threads (512 at most) in x, and one or more tiles in y; shared memory for the keys of all.
extern "C" __global__ void __launch_bounds__(512) sort_tile(Tile args) {
    extern __shared__ u64 shared[];
    u64 *keys = shared + threadIdx.y * args.size;
    const u64 unit = (u64)blockIdx.x * blockDim.y + threadIdx.y;
    const u32 row = unit / args.tiles, tile = unit % args.tiles;
    const u32 start = tile * args.size;
    // A block may have more rows than are left: it goes on with nothing, to meet the others at the barriers.
    const u32 count = row < args.rows ? min(args.size, args.count - start) : 0;
    u32 i1 = 0, i2 = 0, i3 = 0;
    args.xs.split(args.first + row, i1, i2, i3);
    for (u32 k = threadIdx.x; k < args.size; k += blockDim.x) {
        u64 key = ~0ull;
        if (k < count) {
            if (args.from_x) {
                const float value = *(const float *)(args.x + args.xs.at(start + k, i1, i2, i3));
                key = key_of(value, start + k, args.descending);
            } else {
                key = args.from[row * args.from_step + start + k];
            }
        }
        keys[k] = key;
    }
    __syncthreads();
    for (u32 run = 2; run <= args.size; run *= 2) {
        for (u32 stride = run / 2; stride > 0; stride /= 2) {
            for (u32 t = threadIdx.x; t < args.size / 2; t += blockDim.x) {
                const u32 a = 2 * t - (t & (stride - 1)), b = a + stride;
                const u64 low = min(keys[a], keys[b]), high = max(keys[a], keys[b]);
                const bool up = (a & run) == 0;
                keys[a] = up ? low : high;
                keys[b] = up ? high : low;
            }
            barrier(stride, stride > 1 ? stride / 2 : run);
        }
    }
    __syncthreads();
    const u32 kept = min(args.keep, count);
    for (u32 k = threadIdx.x; k < kept; k += blockDim.x) {
        if (args.to_y) *(u32 *)(args.y + args.ys.at(k, i1, i2, i3)) = (u32)keys[k];
        else args.to[row * args.to_step + (u64)tile * args.keep + k] = keys[k];
    }
}

struct Merge {
    const u64 *from;
    u64 *to;
    u8 *y;
    Shape ys;
    u32 first, rows;
    // Keys of a row, those of them that go to y, and the length of the ordered runs.
    u32 count, keep;
    u64 run;
    u32 to_y, padding;
};

// Runs 2 i and 2 i + 1 of each row become one. A thread for each key, blocks in x over the keys of a row and in y over rows: its
// place is its own in its run, and the number of lower keys in the other.
extern "C" __global__ void sort_merge(Merge args) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= args.count) return;
    for (u32 row = blockIdx.y; row < args.rows; row += gridDim.y) {
        const u64 *keys = args.from + (u64)row * args.count;
        const u64 key = keys[i];
        const u64 run = i / args.run, start = (run ^ 1) * args.run;
        // Of the other run: keys before `low` are lower, those from `high` on are not.
        u64 low = min(start, (u64)args.count), high = min(start + args.run, (u64)args.count);
        while (low < high) {
            const u64 middle = (low + high) / 2;
            if (keys[middle] < key) low = middle + 1;
            else high = middle;
        }
        const u64 at = i - run * args.run + (low - min(start, (u64)args.count)) + (run & ~1ull) * args.run;
        if (!args.to_y) {
            args.to[(u64)row * args.count + at] = key;
        } else if (at < args.keep) {
            u32 i1, i2, i3;
            args.ys.split(args.first + row, i1, i2, i3);
            *(u32 *)(args.y + args.ys.at(at, i1, i2, i3)) = (u32)key;
        }
    }
}

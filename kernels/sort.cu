// ARGSORT and TOP_K: the indices of each row of F32, sorted by value. NaN sorts beyond the infinity of its sign; equal values
// are sorted by index.
//
// A value and its index are combined into one 64-bit key, as in src/cpu/ops/sort.rs. All keys of a row differ, so any sort is
// stable.
//
// Variants: sort_tile sorts tiles of up to 4096 keys in shared memory (bitonic sort), several short rows per block. Rows of one
//           tile are then done. Longer rows use scratch memory: sort_merge merges pairs of sorted runs; or, for a TOP_K of few,
//           sort_tile is run again on the first keys of each tile.
// Limits:   rows below 2^31 elements.
// Floor:    rows of one tile are read once, and their indices written once. Longer rows need a read and a write of 8 bytes per
//           element for each merge pass.
#include "common/abi.cuh"
#include "common/sort_key.cuh"

// Arguments of sort_tile. The tile of each threadIdx.y has `size` keys in shared memory.
struct SortTileArgs {
    const u8 *x;
    const u64 *from;
    u64 *to;
    u8 *y;
    Shape xs, ys;
    // Keys of row `first` + r are read at from + r * from_step and written at to + r * to_step.
    u64 from_step, to_step;
    u32 first, rows;
    // Keys per row; tiles per row; keys per tile (a power of two); first keys of a tile that are written.
    u32 count, tiles, size, keep;
    u32 descending;
    // Whether the input is the elements of x (else keys in `from`); whether the output is indices in y (else keys in `to`).
    u32 from_x, to_y;
    u32 padding;
};

// Barrier between two stages of the bitonic sort. If both exchange within a distance of 32, each warp works on its own 64 keys,
// and a warp barrier suffices.
__device__ __forceinline__ void barrier(u32 stride, u32 next) {
    if (stride > 32 || next > 32) __syncthreads();
    else __syncwarp();
}

// Blocks of size / 2 threads (at most 512) in x, and one or more tiles in y; dynamic shared memory for the keys of all tiles.
extern "C" __global__ void __launch_bounds__(512) sort_tile(SortTileArgs args) {
    extern __shared__ u64 shared[];
    u64 *keys = shared + threadIdx.y * args.size;
    const u64 unit = (u64)blockIdx.x * blockDim.y + threadIdx.y;
    const u32 row = unit / args.tiles, tile = unit % args.tiles;
    const u32 start = tile * args.size;
    // Threads without a row continue with no keys, because all threads of the block must reach the barriers.
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

struct SortMergeArgs {
    const u64 *from;
    u64 *to;
    u8 *y;
    Shape ys;
    u32 first, rows;
    // Keys per row; keys that are written to y; length of the sorted runs.
    u32 count, keep;
    u64 run;
    u32 to_y, padding;
};

// Merges runs 2 i and 2 i + 1 of each row. One thread per key; grid: x = keys of a row, y = rows. The rank of a key in the
// merged run is its index in its own run plus the number of lower keys in the sibling run, found by binary search.
extern "C" __global__ void sort_merge(SortMergeArgs args) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= args.count) return;
    for (u32 row = blockIdx.y; row < args.rows; row += gridDim.y) {
        const u64 *keys = args.from + (u64)row * args.count;
        const u64 key = keys[i];
        const u64 run = i / args.run, start = (run ^ 1) * args.run;
        // Binary search in the sibling run: keys before `low` are lower; keys from `high` on are not.
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

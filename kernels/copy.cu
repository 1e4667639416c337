// DUP, CPY, CONT between plain types, and of any type to itself: element k of x (dimension 0 fastest) becomes element k of y.
// The launch site describes both tensors by one loop nest, y's densest loop first. Blocks are moved unchanged.
// copy_to_blocks.cu and copy_from_blocks.cu quantise and dequantise.
//
// Variants: copy_rows       moves runs of bytes that are dense in both tensors, in the widest accesses that addresses and
//                           strides permit
//           copy_convert    converts runs of elements between F32, F16 and BF16, from these to I32, and from I32 to F32
//           copy_transpose  moves elements that are dense along loop 0 of y and loop 1 of x, through tiles in shared memory, so
//                           that loads and stores are coalesced
//           copy_any        handles shapes without a common loop nest, one element (or block) per thread
// Limits:   four loops around a run, each below 2^31.
// Floor:    each element is read once and written once.
#include "common/copy.cuh"

// The loops around a run: counts, and byte strides in source and destination. A row is one iteration of the nest.
struct LoopNest {
    u32 count[4];
    u64 s[4], d[4];

    __device__ void locate(u64 row, const u8 *&src, u8 *&dst) const {
        if (row == 0) return;
#pragma unroll
        for (int k = 0; k < 3; k++) {
            u32 i;
            divide(row, count[k], row, i);
            src += i * s[k], dst += i * d[k];
        }
        src += row * s[3], dst += row * d[3];
    }
};

struct CopyRowsArgs {
    const u8 *x;
    u8 *y;
    LoopNest nest;
    u64 rows, run; // number of runs; bytes per run, or elements for copy_convert
    RowPartition partition;
    u32 types[2];
};

// ---- copy_rows

// Bytes per piece of a run.
constexpr u64 PIECE = 16384;

extern "C" __global__ void copy_rows(CopyRowsArgs args) {
    const u64 row = args.partition.row();
    if (row >= args.rows) return;
    const u8 *src = args.x;
    u8 *dst = args.y;
    args.nest.locate(row, src, dst);
    const u64 begin = args.partition.piece() * PIECE;
    const u64 bytes = min(args.partition.pieces == 1 ? args.run : PIECE, args.run - begin);
    src += begin, dst += begin;
    const u32 lane = args.partition.lane(), lanes = args.partition.lanes();
    // A short run uses accesses that divide its length, which is faster than wide accesses with a remainder of single bytes.
    move_run(src, dst, bytes, args.run < 256 ? args.run : 0, lane, lanes);
}

// ---- copy_convert

// Elements per piece of a run.
constexpr u64 ELEMENTS = 4096;

extern "C" __global__ void copy_convert(CopyRowsArgs args) {
    const u64 row = args.partition.row();
    if (row >= args.rows) return;
    const u8 *src = args.x;
    u8 *dst = args.y;
    args.nest.locate(row, src, dst);
    const u32 from = args.types[0], to = args.types[1];
    const u64 begin = args.partition.piece() * ELEMENTS;
    const u64 end = args.partition.pieces == 1 ? args.run : min(begin + ELEMENTS, args.run);
    convert_run(src, bytes_of(from), from, dst, bytes_of(to), to, begin, end, args.partition.lane(), args.partition.lanes());
}

// ---- copy_transpose

struct TransposeArgs {
    const u8 *x;
    u8 *y;
    LoopNest nest; // loop 0 is dense in y, loop 1 in x
    u32 tiles[2];
    u32 types[2];
    u32 bytes; // bytes per element that is moved unchanged; 0 if the types differ
    u32 padding;
};

// Side of a tile in elements, and rows of a tile that the block handles at a time. Tile rows are padded by one element to avoid
// bank conflicts.
constexpr u32 SIDE = 32, HEIGHT = 8;

template <class Load, class Store>
__device__ __forceinline__ void exchange(const TransposeArgs &args, const u8 *src, u8 *dst, u32 x0, u32 y0, Load load,
                                         Store store) {
    const u32 x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
#pragma unroll
    for (u32 k = 0; k < SIDE; k += HEIGHT) {
        if (x0 + y + k < args.nest.count[0] && y0 + x < args.nest.count[1]) {
            load(src + (x0 + y + k) * args.nest.s[0] + (y0 + x) * args.nest.s[1], (y + k) * (SIDE + 1) + x);
        }
    }
    __syncthreads();
#pragma unroll
    for (u32 k = 0; k < SIDE; k += HEIGHT) {
        if (x0 + x < args.nest.count[0] && y0 + y + k < args.nest.count[1]) {
            store(dst + (x0 + x) * args.nest.d[0] + (y0 + y + k) * args.nest.d[1], x * (SIDE + 1) + y + k);
        }
    }
}

template <class Word>
__device__ __forceinline__ void exchange_as(const TransposeArgs &args, const u8 *src, u8 *dst, u32 x0, u32 y0, Word *tile) {
    exchange(args, src, dst, x0, y0, [=](const u8 *at, u32 k) { tile[k] = *(const Word *)at; },
             [=](u8 *at, u32 k) { *(Word *)at = tile[k]; });
}

// Grid: tiles of loops 0 and 1, then loops 2 and 3; SIDE * HEIGHT threads per block.
extern "C" __global__ void copy_transpose(TransposeArgs args) {
    __shared__ u64 memory[SIDE * (SIDE + 1)];
    u32 rest = blockIdx.x;
    const u32 x0 = rest % args.tiles[0] * SIDE;
    rest /= args.tiles[0];
    const u32 y0 = rest % args.tiles[1] * SIDE;
    rest /= args.tiles[1];
    const u32 i2 = rest % args.nest.count[2], i3 = rest / args.nest.count[2];
    const u8 *src = args.x + i2 * args.nest.s[2] + i3 * args.nest.s[3];
    u8 *dst = args.y + i2 * args.nest.d[2] + i3 * args.nest.d[3];
    if (args.bytes == 1) return exchange_as(args, src, dst, x0, y0, (u8 *)memory);
    if (args.bytes == 2) return exchange_as(args, src, dst, x0, y0, (u16 *)memory);
    if (args.bytes == 4) return exchange_as(args, src, dst, x0, y0, (u32 *)memory);
    if (args.bytes == 8) return exchange_as(args, src, dst, x0, y0, (u64 *)memory);
    float *tile = (float *)memory;
    const u32 from = args.types[0], to = args.types[1];
    exchange(args, src, dst, x0, y0, [=](const u8 *at, u32 k) { tile[k] = float_of_word(load_word(at, from), from); },
             [=](u8 *at, u32 k) { store_word(at, to, word_of_float(tile[k], to)); });
}

// ---- copy_any

struct CopyAnyArgs {
    const u8 *x;
    u8 *y;
    Shape xs, ys; // counted in blocks for block types
    u64 n;
    u32 types[2];
    u32 bytes; // bytes per element or block that is moved unchanged; 0 if the types differ
    u32 padding;
};

extern "C" __global__ void copy_any(CopyAnyArgs args) {
    const u64 n = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= args.n) return;
    const Index i = index_of(args.xs, n), j = index_of(args.ys, n);
    const u8 *src = args.x + args.xs.at(i.i[0], i.i[1], i.i[2], i.i[3]);
    u8 *dst = args.y + args.ys.at(j.i[0], j.i[1], j.i[2], j.i[3]);
    const u32 bytes = args.bytes, from = args.types[0], to = args.types[1];
    if (bytes == 0) return store_word(dst, to, word_of_float(float_of_word(load_word(src, from), from), to));
    const u64 places = (u64)src | (u64)dst | bytes;
    if (places % 4 == 0) {
        for (u32 k = 0; k < bytes; k += 4) *(u32 *)(dst + k) = *(const u32 *)(src + k);
    } else if (places % 2 == 0) {
        for (u32 k = 0; k < bytes; k += 2) *(u16 *)(dst + k) = *(const u16 *)(src + k);
    } else {
        for (u32 k = 0; k < bytes; k++) dst[k] = src[k];
    }
}

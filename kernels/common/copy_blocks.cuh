// Dequantisation of the elements that a CPY or GET_ROWS selects, for blocks in either layout.
#pragma once
#include "copy.cuh"
#include "ids.cuh"
#include "quants.cuh"

struct CopyFromBlocksArgs {
    const u8 *x, *ids;
    u8 *y;
    u32 *error_word;
    Shape xs, ys; // counted in elements
    Ids list;
    u64 n;    // number of groups of eight elements
    u32 type; // type of y
    u32 named; // whether ids select the rows (GET_ROWS)
};

// Each thread writes eight elements. decode(index, values) dequantises those from `index` on, which is in elements of x.
template <class Decode>
__device__ __forceinline__ void copy_from_blocks(const CopyFromBlocksArgs &args, Decode decode) {
    const u64 n = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= args.n) return;
    const Index j = index_of(args.ys, 8 * n);
    Index i = j;
    if (args.named) {
        const i64 id = args.list.at(args.ids, j.i[1], j.i[2], j.i[3]);
        if (!args.list.inside(id)) return report_bad_index(args.error_word, GET_ROWS);
        i.i[1] = id;
    } else {
        i = index_of(args.xs, 8 * n);
    }
    float values[8];
    decode(i, values);
    u8 *dst = args.y + args.ys.at(j.i[0], j.i[1], j.i[2], j.i[3]);
    if (args.ys.nb[0] == bytes_of(args.type) && (u64)dst % 16 == 0) {
        if (args.type == TYPE_F32) F32::store8<true>(dst, 0, values);
        else if (args.type == TYPE_F16) F16::store8<true>(dst, 0, values);
        else BF16::store8<true>(dst, 0, values);
        return;
    }
#pragma unroll
    for (u32 k = 0; k < 8; k++) store_word(dst + k * args.ys.nb[0], args.type, word_of_float(values[k], args.type));
}

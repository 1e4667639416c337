// Dequantises blocks of TYPE to floats, bit for bit as the CPU does: CPY, and GET_ROWS of the rows that ids select.
//
// Variants: one module per TYPE, with the entry ENTRY (copy_from_<type>); y is F32, F16 or BF16, of any layout. Each thread
//           handles eight elements.
// Limits:   dimensions below 2^31; each aligned group of eight elements lies in one row of y.
// Floor:    each block is read once, each element written once.
#include "common/copy.cuh"
#include "common/ids.cuh"
#include "common/quants.cuh"
#include "common/quants_i.cuh"

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

extern "C" __global__ void ENTRY(CopyFromBlocksArgs args) {
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
    const u8 *block = args.x + args.xs.at(i.i[0] / TYPE::LEN, i.i[1], i.i[2], i.i[3]);
    constexpr int WIDE = TYPE::align<true>(), NARROW = TYPE::align<false>();
    float values[8];
    if (WIDE == NARROW || (u64)block % WIDE == 0) TYPE::decode8<WIDE>(block, i.i[0] % TYPE::LEN, values);
    else TYPE::decode8<NARROW>(block, i.i[0] % TYPE::LEN, values);
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

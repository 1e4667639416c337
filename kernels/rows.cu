// GET_ROWS and SET_ROWS of plain types. copy_from_blocks.cu and copy_to_blocks.cu handle block types.
//
// Variants: rows_get     y[i, j, l, :] = table[row ids[i, j, l], j, l, :]: F32, F16, BF16 -> F32; I32 -> I32
//           rows_set     y[row ids[i, j % c1, l % c2], j, l, :] = x[i, j, l, :]: F32, F16 -> F32, F16, BF16, I32
//           rows_clear, rows_claim   build the claim tables for long lists, before a SET_ROWS of any type: a hash table finds
//                                    the last of equal ids in linear time
// Limits:   dimensions below 2^31. An index outside the table is reported as an error; its row is not written.
// Floor:    each selected element is read once and written once, each id read once.
#include "common/copy.cuh"
#include "common/ids.cuh"

struct GetRowsArgs {
    const u8 *table, *ids;
    u8 *y;
    u32 *error_word;
    Shape ts, ys;
    Ids list;
    RowPartition partition;
    u32 types[2];
};

// Elements per piece of a row.
constexpr u64 ELEMENTS = 4096;

__device__ __forceinline__ void piece_of(const RowPartition &partition, u64 n, u64 &begin, u64 &end) {
    begin = partition.piece() * ELEMENTS;
    end = partition.pieces == 1 ? n : min(begin + ELEMENTS, n);
}

extern "C" __global__ void rows_get(GetRowsArgs args) {
    const u64 row = args.partition.row();
    if (row >= (u64)args.ys.ne[1] * args.ys.ne[2] * args.ys.ne[3]) return;
    u32 i, j, l;
    args.ys.split(row, i, j, l);
    const i64 id = args.list.at(args.ids, i, j, l);
    if (!args.list.inside(id)) return report_bad_index(args.error_word, GET_ROWS);
    u64 begin, end;
    piece_of(args.partition, args.ys.ne[0], begin, end);
    convert_run(args.table + args.ts.row(id, j, l), args.ts.nb[0], args.types[0], args.y + args.ys.row(i, j, l), args.ys.nb[0],
                args.types[1], begin, end, args.partition.lane(), args.partition.lanes());
}

struct SetRowsArgs {
    const u8 *x, *ids;
    u8 *y;
    const u64 *claims;
    u32 *error_word;
    Shape xs, ys;
    Ids list;
    RowPartition partition;
    u32 types[2];
};

extern "C" __global__ void rows_set(SetRowsArgs args) {
    const u64 row = args.partition.row();
    if (row >= (u64)args.xs.ne[1] * args.xs.ne[2] * args.xs.ne[3]) return;
    u32 i, j, l;
    args.xs.split(row, i, j, l);
    const u32 a = j % args.list.lists[0], b = l % args.list.lists[1];
    const i64 id = args.list.at(args.ids, i, a, b);
    if (!args.list.inside(id)) return report_bad_index(args.error_word, SET_ROWS);
    if (!last_of_equal(args.list, args.ids, args.claims, i, a, b, id)) return;
    u64 begin, end;
    piece_of(args.partition, args.xs.ne[0], begin, end);
    convert_run(args.x + args.xs.row(i, j, l), args.xs.nb[0], args.types[0], args.y + args.ys.row(id, j, l), args.ys.nb[0],
                args.types[1], begin, end, args.partition.lane(), args.partition.lanes());
}

struct ClearClaimsArgs {
    u64 *claims;
    u64 n;
};

extern "C" __global__ void rows_clear(ClearClaimsArgs args) {
    const u64 k = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (k < args.n) args.claims[k] = 0;
}

struct ClaimArgs {
    const u8 *ids;
    u64 *claims;
    Ids list;
};

// One id per thread; all lists are enumerated in x.
extern "C" __global__ void rows_claim(ClaimArgs args) {
    const u64 n = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 rest;
    u32 k;
    divide(n, args.list.count, rest, k);
    if (rest >= (u64)args.list.lists[0] * args.list.lists[1]) return;
    const u32 i = (u32)rest % args.list.lists[0], j = (u32)rest / args.list.lists[0];
    const i64 id = args.list.at(args.ids, k, i, j);
    if (args.list.inside(id)) claim(args.claims + rest * args.list.claims, args.list.claims, id, k);
}

// GET_ROWS and SET_ROWS of plain types. Block types are in copy_from_blocks.cu and copy_to_blocks.cu.
//
// Variants: rows_get     y[i, j, l, :] = table[row ids[i, j, l], j, l, :]: F32, F16, BF16 -> F32; I32 -> I32
//           rows_set     y[row ids[i, j % c1, l % c2], j, l, :] = x[i, j, l, :]: F32, F16 -> F32, F16, BF16, I32
//           rows_clear, rows_claim   for long lists, before a SET_ROWS of any type: find the last of equal ids in linear time
// Limits:   dimensions below 2^31. An index outside the table is refused; its row is left alone.
// Floor:    each chosen element is read once and written once, each id read once.
#include "common/copy.cuh"
#include "common/ids.cuh"

struct Get {
    const u8 *table, *ids;
    u8 *y;
    u32 *verdict;
    Shape ts, ys;
    Ids list;
    Share share;
    u32 types[2];
};

// Elements of a piece of a row.
constexpr u64 ELEMENTS = 4096;

__device__ __forceinline__ void piece_of(const Share &share, u64 n, u64 &begin, u64 &end) {
    begin = share.piece() * ELEMENTS;
    end = share.pieces == 1 ? n : min(begin + ELEMENTS, n);
}

extern "C" __global__ void rows_get(Get args) {
    const u64 row = args.share.row();
    if (row >= (u64)args.ys.ne[1] * args.ys.ne[2] * args.ys.ne[3]) return;
    u32 i, j, l;
    args.ys.split(row, i, j, l);
    const i64 id = args.list.at(args.ids, i, j, l);
    if (!args.list.inside(id)) return refuse(args.verdict, GET_ROWS);
    u64 begin, end;
    piece_of(args.share, args.ys.ne[0], begin, end);
    convert_run(args.table + args.ts.row(id, j, l), args.ts.nb[0], args.types[0], args.y + args.ys.row(i, j, l), args.ys.nb[0],
                args.types[1], begin, end, args.share.lane(), args.share.lanes());
}

struct Set {
    const u8 *x, *ids;
    u8 *y;
    const u64 *claims;
    u32 *verdict;
    Shape xs, ys;
    Ids list;
    Share share;
    u32 types[2];
};

extern "C" __global__ void rows_set(Set args) {
    const u64 row = args.share.row();
    if (row >= (u64)args.xs.ne[1] * args.xs.ne[2] * args.xs.ne[3]) return;
    u32 i, j, l;
    args.xs.split(row, i, j, l);
    const u32 a = j % args.list.lists[0], b = l % args.list.lists[1];
    const i64 id = args.list.at(args.ids, i, a, b);
    if (!args.list.inside(id)) return refuse(args.verdict, SET_ROWS);
    if (!last_of_equal(args.list, args.ids, args.claims, i, a, b, id)) return;
    u64 begin, end;
    piece_of(args.share, args.xs.ne[0], begin, end);
    convert_run(args.x + args.xs.row(i, j, l), args.xs.nb[0], args.types[0], args.y + args.ys.row(id, j, l), args.ys.nb[0],
                args.types[1], begin, end, args.share.lane(), args.share.lanes());
}

struct Clear {
    u64 *claims;
    u64 n;
};

extern "C" __global__ void rows_clear(Clear args) {
    const u64 k = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (k < args.n) args.claims[k] = 0;
}

struct Claim {
    const u8 *ids;
    u64 *claims;
    Ids list;
};

// An id a thread; lists in y and z of the grid are one number in x.
extern "C" __global__ void rows_claim(Claim args) {
    const u64 n = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 rest;
    u32 k;
    divide(n, args.list.count, rest, k);
    if (rest >= (u64)args.list.lists[0] * args.list.lists[1]) return;
    const u32 i = (u32)rest % args.list.lists[0], j = (u32)rest / args.list.lists[0];
    const i64 id = args.list.at(args.ids, k, i, j);
    if (args.list.inside(id)) claim(args.claims + rest * args.list.claims, args.list.claims, id, k);
}

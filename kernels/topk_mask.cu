// TOP_K_MASK: rows of -inf, but for kept cells, which have the value of a given mask.
//
// Variants: one, for masks of F32 and F16. A block fills a row, then copies its kept cells. Cells that are kept twice get one value
//           twice.
// Limits:   dimensions below 2^31; rows of the mask and the destination are dense.
// Traffic:  the destination is written once; the picks, their scores and blocks are read once, of the mask the kept cells.
#include "common/abi.cuh"

struct TopkMaskArgs {
    const u8 *mask, *picks, *score, *blocks, *extra;
    u8 *y;
    Shape ms, ys;
    u64 picks_nb[4], score_nb[4], blocks_nb[2], extra_nb[4]; // byte strides
    u32 n_picks;          // entries of a row of picks
    u32 limit;            // picks from this number on are skipped
    u32 n_block, n_extra; // cells of a block; extra cells of a row
    u32 size, padding;    // bytes of an element of the mask
};

__device__ __forceinline__ void keep(const TopkMaskArgs &args, const u8 *mask, u8 *y, int cell) {
    if ((u32)cell >= args.ys.ne[0]) return;
    if (args.size == 4) ((u32 *)y)[cell] = ((const u32 *)mask)[cell];
    else ((u16 *)y)[cell] = ((const u16 *)mask)[cell];
}

// Grid: rows.
extern "C" __global__ void topk_mask(TopkMaskArgs args) {
    u32 i1, i2, i3;
    args.ys.split(blockIdx.x, i1, i2, i3);
    u8 *y = args.y + args.ys.row(i1, i2, i3);
    const u8 *mask = args.mask + args.ms.row(i1 % args.ms.ne[1], i2 % args.ms.ne[2], i3 % args.ms.ne[3]);
    for (u32 i = threadIdx.x; i < args.ys.ne[0]; i += blockDim.x) {
        if (args.size == 4) ((u32 *)y)[i] = 0xff800000;
        else ((u16 *)y)[i] = 0xfc00;
    }
    __syncthreads();
    const u8 *picks = args.picks + i1 * args.picks_nb[1] + i2 * args.picks_nb[2] + i3 * args.picks_nb[3];
    const u8 *score = args.score + i1 * args.score_nb[1] + i2 * args.score_nb[2] + i3 * args.score_nb[3];
    // A thread has one cell of the block of one pick at a time.
    const u64 kept = (u64)args.n_picks * args.n_block;
    for (u64 i = threadIdx.x; i < kept; i += blockDim.x) {
        const u32 number = (u32)(i / args.n_block), cell = (u32)(i - (u64)number * args.n_block);
        const int pick = *(const int *)(picks + number * args.picks_nb[0]);
        if ((u32)pick >= args.limit) continue;
        // False also for NaN.
        const bool counts = args.score == nullptr || *(const float *)(score + pick * args.score_nb[0]) > -__int_as_float(0x7f800000);
        if (!counts) continue;
        if (args.blocks == nullptr) keep(args, mask, y, pick);
        else keep(args, mask, y, *(const int *)(args.blocks + cell * args.blocks_nb[0] + pick * args.blocks_nb[1]));
    }
    const u8 *extra = args.extra + i1 * args.extra_nb[1] + i2 * args.extra_nb[2] + i3 * args.extra_nb[3];
    for (u32 i = threadIdx.x; i < args.n_extra; i += blockDim.x) keep(args, mask, y, *(const int *)(extra + i * args.extra_nb[0]));
}

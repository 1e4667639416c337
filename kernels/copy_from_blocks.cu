// Dequantises blocks of TYPE to floats, bit for bit as the CPU does: CPY, and GET_ROWS of the rows that ids select.
//
// Variants: one module per TYPE, with the entry ENTRY (copy_from_<type>); y is F32, F16 or BF16, of any layout. Each thread
//           handles eight elements.
// Limits:   dimensions below 2^31; each aligned group of eight elements lies in one row of y.
// Floor:    each block is read once, each element written once.
#include "common/copy_blocks.cuh"
#include "common/quants_i.cuh"

extern "C" __global__ void ENTRY(CopyFromBlocksArgs args) {
    copy_from_blocks(args, [&](const Index &i, float(&values)[8]) {
        const u8 *block = args.x + args.xs.at(i.i[0] / TYPE::LEN, i.i[1], i.i[2], i.i[3]);
        constexpr int WIDE = TYPE::align<true>(), NARROW = TYPE::align<false>();
        if (WIDE == NARROW || (u64)block % WIDE == 0) TYPE::decode8<WIDE>(block, i.i[0] % TYPE::LEN, values);
        else TYPE::decode8<NARROW>(block, i.i[0] % TYPE::LEN, values);
    });
}

// Sizes of the tiles of quantised columns, which mul_mat_mma.cuh documents; and the table of the columns of experts.
#pragma once

constexpr unsigned FRAGMENT_BYTES = 512; // codes of 64 elements
constexpr unsigned TILE32_BYTES = 704;   // a fragment, then scales and sums
constexpr unsigned TILE256_BYTES = 2336; // four fragments, then sums and scales
static_assert(TILE32_BYTES == FRAGMENT_BYTES + 2 * (64 + 32) && TILE256_BYTES == 4 * FRAGMENT_BYTES + 256 + 32, "");

// An int between -2^22 and 2^22 plus the bits of this float are the bits of the float 1.5 * 2^23 plus the int.
constexpr int MAGIC_BITS = 0x4b400000;
constexpr float MAGIC = 12582912.0f;

// MUL_MAT_ID with many tokens. A slot is one expert of one token, number `token * used + index`: a column of the product. The columns of
// an expert are slots in ascending order, in groups of WIDTH = 8, 16, 32, 64 or 128 positions, of which only the last has missing ones. A table
// (moe_tiles) has one after the other
//
//     u32 experts[groups]        the expert of each group, NO_EXPERT for slots without one (id -1), or NO_GROUP behind the last group
//     u32 slots[groups * WIDTH]  the slot of each position, or NO_SLOT
//     u32 positions[slots]       the position of each slot, or NO_SLOT without an expert
constexpr unsigned NO_GROUP = 0xffffffff, NO_EXPERT = 0xfffffffe, NO_SLOT = 0xffffffff;

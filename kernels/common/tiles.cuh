// Sizes of the tiles of quantised columns, which mul_mat_mma.cuh documents.
#pragma once

constexpr unsigned FRAGMENT_BYTES = 512; // codes of 64 elements
constexpr unsigned TILE32_BYTES = 704;   // a fragment, then scales and sums
constexpr unsigned TILE256_BYTES = 2336; // four fragments, then sums and scales
static_assert(TILE32_BYTES == FRAGMENT_BYTES + 2 * (64 + 32) && TILE256_BYTES == 4 * FRAGMENT_BYTES + 256 + 32, "");

// An int between -2^22 and 2^22 plus the bits of this float are the bits of the float 1.5 * 2^23 plus the int.
constexpr int MAGIC_BITS = 0x4b400000;
constexpr float MAGIC = 12582912.0f;

// MUL_MAT: dst[i3, i2, n, m] = sum over k of a[i3 / r3, i2 / r2, m, k] * b[i3, i2, n, k]; and MUL_MAT_ID, where a table of ids
// selects the plane of a (the expert) for each row of b. Sums are in f32. With quantised weights, activations are rounded to 8
// bits first, as in llama.cpp on the CPU. One module per type of a: TYPE is its struct, NAME its part of the entries' names,
// BLOCKS is defined if it is a block type. mul_mat_packed.cu and mul_mat_mma.cu have kernels for packed weights, mul_mat_half.cu
// for F16 and BF16, mul_mat_gemm.cu for many columns.
//
// Variants: mul_mat_vec1, _vec4, and for plain types _vec2, _vec8: as many columns (rows of b) per block. For plain types, products
//                 are in f32, see mul_mat_vec.cuh; for block types, of 8-bit codes, see mul_mat_dot.cuh;
//           mul_mat_id: one row of b with the matrix of its expert;
//           mul_mat_tile64, _tile128: as many rows and 64 columns per block, on tensor cores (tf32), for F32, see mul_mat_tile.cuh.
//           In the module without a TYPE:
//           mul_mat_widen: converts rows of b from F16 or BF16 to dense f32, for plain types;
//           mul_mat_quantize: rounds rows of b to 8-bit codes in groups of 32 or 256 with a common scale, for the vector kernels of
//                 block types and mul_mat_id;
//           mul_mat_halves: rounds rows of b to F16 or BF16, for mul_mat_gemm.cu and mul_mat_gemm_blocks.cu;
//           mul_mat_quantize_tiles: as mul_mat_quantize, but stores fragments of tiles of 8 columns, for mul_mat_mma.cu;
//                 those of a token for each of its experts;
//           mul_mat_pack: converts rows of a block type in place to the packed layout, or back.
// Limits:   b is F32, or quantised. Rows of a and of f32 columns are dense and may start at any address. They are fast if blocks are
//           aligned to the natural alignment of their size, and rows of plain elements to 16 bytes. The quantised columns of a
//           block have fewer than 2^32 bytes. An expert id of -1 gives a row of zeros; another invalid id is reported as an error.
// Floor:    a is read once per 8 columns (4 for block types, 64 in the tiled kernels), b once per 4 rows of a (64 or 128).
#include "common/abi.cuh"
#include "common/column_scale.cuh"
#include "common/quantize.cuh"
#include "common/quants.cuh"
#include "common/vector.cuh"

#ifdef TYPE
#ifdef BLOCKS
#include "mul_mat_dot.cuh"
#else
#include "mul_mat_vec.cuh"
#endif
#if __CUDA_ARCH__ >= 800
#include "mul_mat_tile.cuh"

// Without an explicit minimum of one block, ptxas would limit registers to fit one more block per multiprocessor, and spill.
ENTRY(mul_mat_tile64, 128, 1)(MulMatArgs args) { mat_tile<4>(args); }
ENTRY(mul_mat_tile128, 256, 1)(MulMatArgs args) { mat_tile<8>(args); }
#else // the same on all targets
#ifdef BLOCKS
ENTRY(mul_mat_vec1, 128, 1)(MulMatArgs args) { quant_mat_vec<TYPE, 1>(args); }
ENTRY(mul_mat_vec4, 128, 1)(MulMatArgs args) { quant_mat_vec<TYPE, 4>(args); }
ENTRY(mul_mat_id, 128, 1)(MulMatIdArgs args) { quant_routed<TYPE>(args); }
#else
ENTRY(mul_mat_vec1, 128, 1)(MulMatArgs args) { mat_vec<TYPE, 1>(args); }
ENTRY(mul_mat_vec2, 128, 1)(MulMatArgs args) { mat_vec<TYPE, 2>(args); }
ENTRY(mul_mat_vec4, 128, 1)(MulMatArgs args) { mat_vec<TYPE, 4>(args); }
ENTRY(mul_mat_vec8, 128, 1)(MulMatArgs args) { mat_vec<TYPE, 8>(args); }
ENTRY(mul_mat_id, 128, 1)(MulMatIdArgs args) { routed<TYPE>(args); }
#endif
#endif

#else
#include "common/tiles.cuh"

struct WidenArgs {
    const u8 *b;
    float *packed;
    Shape shape;
    u64 stride; // elements from one packed row to the next
    u32 type, padding;
};

// Grid: x = rows, y = pieces of blockDim.x elements.
extern "C" __global__ void mul_mat_widen(WidenArgs args) {
    u32 i1, i2, i3;
    args.shape.split(blockIdx.x, i1, i2, i3);
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < args.shape.ne[0]; i += gridDim.y * blockDim.x) {
        const u8 *at = args.b + args.shape.at(i, i1, i2, i3);
        const u16 bits = at[0] | at[1] << 8; // the address may be odd
        args.packed[blockIdx.x * args.stride + i] = args.type == TYPE_F16 ? float_of_half(bits) : float_of_bf16(bits);
    }
}

struct HalvesArgs {
    const u8 *b;
    u8 *halves;
    Shape shape;
    u64 stride;    // bytes from one converted row to the next
    u32 type, to;  // of b; of the halves
};

// Rounds rows to F16, multiplied by a power of two (common/column_scale.cuh), or to BF16. Zeros follow up to a multiple of 16 bytes, then the
// inverse of the power of two, as f32.
// Grid: x = rows.
constexpr u32 HALVES_THREADS = 256;
extern "C" __global__ void __launch_bounds__(HALVES_THREADS) mul_mat_halves(HalvesArgs args) {
    __shared__ u32 most_of_warps[HALVES_THREADS / 32];
    u32 i1, i2, i3;
    args.shape.split(blockIdx.x, i1, i2, i3);
    const u8 *row = args.b + args.shape.row(i1, i2, i3);
    u8 *to = args.halves + blockIdx.x * args.stride;
    const u32 k = args.shape.ne[0];
    auto load = [&](u32 i) {
        const u8 *at = row + (u64)i * args.shape.nb[0];
        if (args.type == TYPE_F32) return load_float_anywhere(at);
        const u16 bits = at[0] | at[1] << 8; // the address may be odd
        return args.type == TYPE_F16 ? float_of_half(bits) : float_of_bf16(bits);
    };
    // Eight elements, with zeros after the end.
    const bool whole = args.type == TYPE_F32 && args.shape.nb[0] == 4 && (u64)row % 16 == 0;
    auto load8 = [&](u32 i, float(&x)[8]) {
        if (whole && i + 8 <= k) return F32::load8<true>(row, i, x);
#pragma unroll
        for (u32 e = 0; e < 8; e++) x[e] = i + e < k ? load(i + e) : 0.0f;
    };
    u32 most = 0;
    if (args.to == TYPE_F16) {
        for (u32 i = 8 * threadIdx.x; i < k; i += 8 * HALVES_THREADS) {
            float x[8];
            load8(i, x);
#pragma unroll
            for (u32 e = 0; e < 8; e++) most = max(most, finite_magnitude(x[e]));
        }
#pragma unroll
        for (u32 step = 16; step > 0; step /= 2) most = max(most, __shfl_xor_sync(0xffffffff, most, step));
        if (threadIdx.x % 32 == 0) most_of_warps[threadIdx.x / 32] = most;
        __syncthreads();
#pragma unroll
        for (u32 w = 0; w < HALVES_THREADS / 32; w++) most = max(most, most_of_warps[w]);
    }
    const ColumnScale of(most);
    for (u32 i = 8 * threadIdx.x; i < k; i += 8 * HALVES_THREADS) {
        float x[8];
        load8(i, x);
        u32 words[4];
#pragma unroll
        for (u32 w = 0; w < 4; w++) {
            const float low = x[2 * w] * of.inverse, high = x[2 * w + 1] * of.inverse;
            words[w] = args.to == TYPE_F16 ? word_of_floats(F16(), low, high) : word_of_floats(BF16(), low, high);
        }
        store_words<16>(to + 2ull * i, words);
    }
    if (threadIdx.x == 0) *(float *)(to + scale_at(k)) = of.scale;
}

// Quantised columns: see common/quantize.cuh.
struct QuantizeArgs {
    const u8 *b;
    u8 *quantized;
    Shape shape;
    u64 stride; // bytes from one quantised column to the next
    u32 group;  // 32 or 256
    u32 padding;
};

// As for_each_piece, with all warps in y of the grid.
template <class Piece>
__device__ __forceinline__ void for_each_piece_of_grid(u32 k, u32 length, Piece piece) {
    const u32 warps = blockDim.x / 32;
    for_each_piece(k, length, blockIdx.y * warps + threadIdx.x / 32, gridDim.y * warps, piece);
}

// Grid: x = rows, y = pieces of 1024 (groups of 32) or 2048 (groups of 256) elements, by 8 warps.
extern "C" __global__ void mul_mat_quantize(QuantizeArgs args) {
    u32 i1, i2, i3;
    args.shape.split(blockIdx.x, i1, i2, i3);
    const u32 warps = blockDim.x / 32;
    quantize_row(args.b + args.shape.row(i1, i2, i3), args.quantized + blockIdx.x * args.stride, args.shape.ne[0], args.group,
                 blockIdx.y * warps + threadIdx.x / 32, gridDim.y * warps);
}

// As QuantizeArgs, for tiles of 8 columns (mul_mat_mma.cuh). With a table of experts' columns (common/tiles.cuh), planes are its groups.
struct QuantizeTilesArgs {
    const u8 *b;
    u8 *quantized;
    Shape shape;
    u32 group;   // 32 or 256
    u32 pairs;   // 1: a lane's fragment has neighbouring words
    u32 columns; // per plane: as many consecutive rows of b; with a table, slots per token
    u32 tiles;   // per plane
    u64 table;   // byte offset of the table behind `quantized`; 0: none
    u32 groups;  // of the table
    u32 padding;
};

// Address of the word of codes of column `c` of a tile for elements 4 * word to 4 * word + 3 of 64.
__device__ __forceinline__ u32 fragment_at(u32 c, u32 word, u32 pairs) {
    const u32 w = word % 8, t = pairs ? w / 2 : w % 4, second = pairs ? w % 2 : w / 4;
    return 16 * (4 * c + t) + word / 8 * 8 + second * 4;
}

// Stores the elements that a warp has quantised, from `first` on, to column `c` of its tiles, of which the first is `tile`.
template <bool LARGE>
__device__ __forceinline__ void store_to_tile(const QuantizeTilesArgs &args, const QuantizedPiece<LARGE> &piece, u8 *tile, u32 c, u32 first,
                                              u32 lane) {
    const u32 k = args.shape.ne[0];
    if (LARGE) {
        u8 *to = tile + (u64)(first / 256) * args.tiles * TILE256_BYTES, *behind = to + 4 * FRAGMENT_BYTES;
#pragma unroll
        for (u32 v = 0; v < piece.VECTORS; v++) {
            const u32 word = 32 * v + lane; // of 64, in four fragments
            *(u32 *)(to + word / 16 * FRAGMENT_BYTES + fragment_at(c, word % 16, args.pairs)) = piece.codes[v];
            const u32 s = lane / 4; // number of the sum among eight
            if (lane % 4 == 0) ((short *)behind)[(4 * c + s / 2) * 4 + 2 * v + s % 2] = piece.sums[v];
        }
        if (lane == 0) ((float *)(behind + 256))[c] = piece.scale;
    } else {
        // The tile may be only half as long as the warp's elements.
        const u32 chunk = first / 64 + lane / 16, half = lane / 8 % 2;
        if (chunk >= (k + 63) / 64) return;
        u8 *to = tile + (u64)chunk * args.tiles * TILE32_BYTES, *behind = to + FRAGMENT_BYTES;
        *(u32 *)(to + fragment_at(c, lane % 16, args.pairs)) = piece.codes[0];
        if (lane % 8 == 0) {
            ((float2 *)(behind + 64 * half))[c] = make_float2(piece.scale, -MAGIC * piece.scale);
            ((float *)(behind + 128 + 32 * half))[c] = piece.scale * (float)piece.sums[0];
        }
    }
}

// One warp quantises 128 or 256 elements of row number blockIdx.x.
template <bool LARGE>
__device__ __forceinline__ void quantize_to_tiles(const QuantizeTilesArgs &args, u32 first, u32 lane) {
    const u32 width = 8 * args.tiles, rows = args.shape.ne[1], all_rows = rows * args.shape.ne[2];
    const u64 steps = LARGE ? args.shape.ne[0] / 256 : (args.shape.ne[0] + 63) / 64, bytes = LARGE ? TILE256_BYTES : TILE32_BYTES;
    const u32 *experts = (const u32 *)(args.quantized + args.table), *slots = experts + args.groups;
    // Missing columns are zeros.
    bool missing;
    u32 i1 = 0, i2 = 0, i3 = 0;
    // The columns to store: numbers i, i + step ... below `end`, or those at these places of a list.
    const u32 *list = nullptr;
    u32 i = blockIdx.x, step = 1, end = i + 1;
    if (args.table == 0) {
        const u32 plane = i / width, column = i - plane * width;
        missing = column >= args.columns;
        args.shape.split(plane * args.columns + (missing ? 0 : column), i1, i2, i3);
    } else if (missing = i >= all_rows; !missing) {
        // The row may be a column of several experts.
        i2 = i / rows, i1 = i - i2 * rows;
        list = slots + args.groups * width + i2 * args.columns;
        i = i1, step = rows, end = args.columns;
    } else {
        // In the tiles that are read: with four tiles, only the first one if that has all slots of the group.
        const u32 group = i - all_rows;
        if (experts[group] >= NO_EXPERT) return;
        const u32 *of_group = slots + group * width;
        i = 0, end = args.tiles == 4 && of_group[8] == NO_SLOT ? 8 : width;
        while (i < end && of_group[i] != NO_SLOT) i++;
        i += group * width, end += group * width;
    }
    const QuantizedPiece<LARGE> piece(args.b + args.shape.row(i1, i2, i3), missing ? 0 : args.shape.ne[0], first, lane);
#pragma unroll 1
    for (; i < end; i += 32 * step) {
        // A load for all columns.
        const u32 at = i + lane * step;
        const u32 of_lane = at >= end ? NO_SLOT : list != nullptr ? list[at] : at;
        const u32 group = of_lane / width, tile_of_lane = of_lane / 8 - group * args.tiles;
#pragma unroll 1
        for (u32 columns = __ballot_sync(0xffffffff, of_lane != NO_SLOT); columns != 0; columns &= columns - 1) {
            const u32 source = __ffs(columns) - 1, plane = __shfl_sync(0xffffffff, group, source);
            const u32 tile = __shfl_sync(0xffffffff, tile_of_lane, source), c = __shfl_sync(0xffffffff, of_lane, source) % 8;
            store_to_tile(args, piece, args.quantized + (plane * steps * args.tiles + tile) * bytes, c, first, lane);
            __syncwarp();
        }
    }
}

// Grid: x = columns of whole tiles, or rows of b and then groups of the table; y as mul_mat_quantize.
extern "C" __global__ void mul_mat_quantize_tiles(QuantizeTilesArgs args) {
    const u32 lane = threadIdx.x % 32;
    if (args.group == 32) {
        for_each_piece_of_grid(args.shape.ne[0], 128, [&](u32 first) { quantize_to_tiles<false>(args, first, lane); });
    } else {
        for_each_piece_of_grid(args.shape.ne[0], 256, [&](u32 first) { quantize_to_tiles<true>(args, first, lane); });
    }
}

// Converts groups of rows in place to the packed layout, which quants.cuh documents, or back.
struct PackBlocksArgs {
    u8 *a;          // the first group, at a multiple of 16 bytes
    u64 groups;
    u32 blocks;     // per group
    u32 block_bytes;
    u32 fields;
    u32 unpack;     // 1: from the packed layout to ggml's
    u32 offsets[4]; // of the fields in ggml's block, in packed order
    u32 bytes[4];
};

// Largest group: MAX_GROUP_BYTES of src/cuda/layout.rs.
constexpr u32 PACK_SHARED_BYTES = 48 << 10;

// Where byte `at` of a group in one layout is in the other one.
__device__ __forceinline__ u32 pack_source(const PackBlocksArgs &args, u32 at) {
    u32 before = 0;
    if (args.unpack) {
        const u32 block = at / args.block_bytes, inside = at % args.block_bytes;
        for (u32 f = 0; f < args.fields; f++) {
            if (inside - args.offsets[f] < args.bytes[f]) {
                return args.blocks * before + block * args.bytes[f] + inside - args.offsets[f];
            }
            before += args.bytes[f];
        }
    } else {
        for (u32 f = 0; f < args.fields; f++) {
            const u32 inside = at - args.blocks * before;
            if (inside < args.blocks * args.bytes[f]) {
                return inside / args.bytes[f] * args.block_bytes + args.offsets[f] + inside % args.bytes[f];
            }
            before += args.bytes[f];
        }
    }
    return at;
}

// Grid: x = groups, as a grid-stride loop.
extern "C" __global__ void __launch_bounds__(256) mul_mat_pack(PackBlocksArgs args) {
    __shared__ __align__(16) u8 stage[PACK_SHARED_BYTES];
    const u32 bytes = args.blocks * args.block_bytes;
    // Bytes that stay together in both layouts: those of fields and offsets that are all even come in pairs.
    bool even = true;
    for (u32 f = 0; f < args.fields; f++) even = even && (args.offsets[f] | args.bytes[f]) % 2 == 0;
    for (u64 group = blockIdx.x; group < args.groups; group += gridDim.x) {
        u8 *a = args.a + group * bytes;
        for (u32 i = 16 * threadIdx.x; i < bytes; i += 16 * blockDim.x) *(uint4 *)(stage + i) = *(const uint4 *)(a + i);
        __syncthreads();
        for (u32 i = 4 * threadIdx.x; i < bytes; i += 4 * blockDim.x) {
            u32 word = 0;
            if (even) {
                for (u32 b = 0; b < 4; b += 2) word |= (u32) * (const u16 *)(stage + pack_source(args, i + b)) << (8 * b);
            } else {
                for (u32 b = 0; b < 4; b++) word |= (u32)stage[pack_source(args, i + b)] << (8 * b);
            }
            *(u32 *)(a + i) = word;
        }
        __syncthreads();
    }
}
#endif

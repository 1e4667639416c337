// Weights of block types for the GEMM of mul_mat_gemm.cuh: each thread dequantises a row to F16.
//
// A weight is (code - ZERO) * d + m. The byte 0x64 above a code makes the half 1024 + code; a packed subtraction removes 1024 + ZERO of two
// weights, and a packed multiplication (or FMA) applies d and m. These are f32 and may be out of range for F16, so a row is multiplied by a
// power of two, by whose inverse the sums are multiplied. It is the same for all rows of a type at first. If the largest d or m of a row is
// out of range, the block repeats its products with another one for that row. That is rare: rows of models have neither so small nor so large
// weights.
#pragma once
#include "common/quants_i.cuh"
#include "mul_mat_gemm.cuh"

// ---- accesses of a row of blocks

// A block in the packed layout, by 32-bit offsets from an address that is the same for all threads: such loads need fewer instructions.
template <class T>
struct OffsetBlock {
    enum : bool { PACKED = true };
    const u8 *base;
    u32 group, blocks, index; // byte offset of the group; blocks in the group; number of the block

    u32 skip = 0;

    template <class F>
    __device__ __forceinline__ const u8 *field() const {
        constexpr int BEFORE = T::Fields::before(T::Fields::template index<F>());
        return base + (group + blocks * BEFORE + index * F::BYTES) + skip;
    }

    template <class F>
    static __device__ constexpr int align() {
        return alignment_of(F::BYTES);
    }
};

// Codes of elements j to j + 31 of a block. In blocks of 256, bytes of neighbours within 32 elements are neighbours.
template <class T>
__device__ __forceinline__ void read_codes32(T, const OffsetBlock<T> &block, u32 j, u32 (&codes)[4][2]) {
#pragma unroll
    for (u32 c = 0; c < 4; c++) {
        OffsetBlock<T> at = block;
        if (T::LEN == 256) at.skip = 8 * c;
        T::read_codes(at, T::LEN == 256 ? j : 8 * c, codes[c]);
    }
}
__device__ __forceinline__ void read_codes32(Q4_K, const OffsetBlock<Q4_K> &block, u32 j, u32 (&codes)[4][2]) {
    u32 words[8];
    load_words<16>(block.field<Q4_K::Codes>() + j / 64 * 32, words);
#pragma unroll
    for (u32 w = 0; w < 8; w++) codes[w / 2][w % 2] = words[w] >> (j & 32) / 8 & 0x0f0f0f0f;
}
__device__ __forceinline__ void read_codes32(Q6_K, const OffsetBlock<Q6_K> &block, u32 j, u32 (&codes)[4][2]) {
    u32 low[8], high[8];
    load_words<16>(block.field<Q6_K::Low>() + j / 128 * 64 + j % 64, low);
    load_words<16>(block.field<Q6_K::High>() + j / 128 * 32, high);
    // A rotation moves the two bits to their place, to the left or to the right.
    const u32 shift = (j & 64) / 16, rotation = 4 - j / 32 % 4 * 2;
#pragma unroll
    for (u32 w = 0; w < 8; w++) {
        codes[w / 2][w % 2] = (__funnelshift_l(high[w], high[w], rotation) & 0x30303030) | (low[w] >> shift & 0x0f0f0f0f);
    }
}

// Packed weights: `row` is one of 128 from `a` on, whose number is a multiple of 128.
template <class T>
struct PackedRow {
    OffsetBlock<T> start;

    __device__ __forceinline__ PackedRow(const u8 *a, u64 row_bytes, u32 row) {
        const u32 blocks = (u32)row_bytes / T::BYTES, log2 = log2_group_rows(row_bytes);
        keep(a);
        start = {a, (row >> log2 << log2) * (u32)row_bytes, blocks << log2, (row & ((1 << log2) - 1)) * blocks};
    }

    __device__ __forceinline__ OffsetBlock<T> block(u32 b) const { return {start.base, start.group, start.blocks, start.index + b}; }
    __device__ __forceinline__ void codes(u32 b, u32 j, u32 (&codes)[4][2]) const { read_codes32(T(), block(b), j, codes); }
    __device__ __forceinline__ auto scale(u32 b, u32 j) const { return T::read_scale(block(b), j); }
};

// Weights in ggml's layout, at multiples of 2 bytes: two bytes at a time, also where wider loads would be possible.
template <class T>
struct PlainRow {
    const u8 *row;

    __device__ __forceinline__ PlainRow(const u8 *a, u64 row_bytes, u32 row) : row(a + row * row_bytes) {}

    __device__ __forceinline__ void codes(u32 b, u32 j, u32 (&codes)[4][2]) const {
#pragma unroll
        for (u32 c = 0; c < 4; c++) T::template codes8<T::template align<false>()>(row + (u64)b * T::BYTES, j + 8 * c, codes[c]);
    }
    __device__ __forceinline__ auto scale(u32 b, u32 j) const {
        return T::template scale8<T::template align<false>()>(row + (u64)b * T::BYTES, j);
    }
};

// ---- dequantisation

__device__ __forceinline__ u32 pair_of_half(float value) { return pair_of_floats(F16(), value, value); }

// Weights with the same scale.
template <class T>
constexpr u32 SCALED = 32;
#define SCALED_16(type) template <> constexpr u32 SCALED<type> = 16;
SCALED_16(Q2_K) SCALED_16(Q3_K) SCALED_16(Q6_K) SCALED_16(IQ2_XS) SCALED_16(IQ2_S) SCALED_16(IQ1_M) SCALED_16(NVFP4)
#undef SCALED_16

// Scales as pairs of halves.
struct HalfScale {
    u32 d;

    __device__ __forceinline__ HalfScale() {}
    __device__ __forceinline__ HalfScale(const Symmetric &scale, float factor, float &most) : d(pair_of_half(scale.d * factor)) {
        most = fmaxf(most, fabsf(scale.d));
    }

    __device__ __forceinline__ u32 of(u32 code) const {
        u32 weights;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(weights) : "r"(code), "r"(d));
        return weights;
    }
};

struct HalfScaleMin {
    u32 d, m;

    __device__ __forceinline__ HalfScaleMin() {}
    __device__ __forceinline__ HalfScaleMin(const Affine &scale, float factor, float &most)
        : d(pair_of_half(scale.d * factor)), m(pair_of_half(scale.m * factor)) {
        most = fmaxf(most, fmaxf(fabsf(scale.d), fabsf(scale.m) * (1.0f / 64))); // 31 * 256 + 64 * 256 is no overflow
    }

    __device__ __forceinline__ u32 of(u32 code) const {
        u32 weights;
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(weights) : "r"(code), "r"(d), "r"(m));
        return weights;
    }
};

__device__ __forceinline__ HalfScale half_scale(const Symmetric &scale, float factor, float &most) { return {scale, factor, most}; }
__device__ __forceinline__ HalfScaleMin half_scale(const Affine &scale, float factor, float &most) { return {scale, factor, most}; }

// The row of a staged tile that a thread dequantises: the interface of AlignedHalves. Loads run a step ahead of the dequantisation.
template <class T, class Row>
struct DequantizedRow {
    using Scale = decltype(half_scale(((const Row *)nullptr)->scale(0, 0), 0.0f, *(float *)nullptr));
    Row row;
    u32 next, last; // the step to load next; the last one
    u32 to;
    float factor, most;
    u32 codes[4][2];
    Scale scales[32 / SCALED<T>];

    __device__ __forceinline__ DequantizedRow(Row row, u32 k, u32 count, float factor)
        : row(row), next(k / GEMM_DEPTH), last((k + count) / GEMM_DEPTH - 1), to(threadIdx.x), factor(factor), most(0.0f) {
        load();
    }

    __device__ __forceinline__ void load() {
        constexpr u32 STEPS = T::LEN / GEMM_DEPTH;
        const u32 b = next / STEPS, j = next % STEPS * GEMM_DEPTH;
        row.codes(b, j, codes);
#pragma unroll
        for (u32 s = 0; s < 32 / SCALED<T>; s++) scales[s] = half_scale(row.scale(b, j + SCALED<T> * s), factor, most);
        next = min(next + 1, last); // the last step again, which needs no branch
    }

    static constexpr bool BUSY = true;

    // The shuffle hides that the number is the same in all threads: ptxas needs more instructions for the predicates of uniform numbers.
    static __device__ __forceinline__ int steps(u32 elements) {
        return __shfl_sync(0xffffffff, elements / GEMM_DEPTH, threadIdx.x % 32);
    }

    __device__ __forceinline__ void start(u32 tile, bool) {
#pragma unroll
        for (u32 c = 0; c < 4; c++) {
            u32 words[4];
#pragma unroll
            for (u32 w = 0; w < 4; w++) {
                const u32 magic = __byte_perm(codes[c][w / 2], 0x64646464, w % 2 ? 0x4342 : 0x4140);
                constexpr u32 ZERO = 0x6400 + T::ZERO;
                u32 code;
                asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(code) : "r"(magic), "r"(ZERO << 16 | ZERO));
                words[w] = scales[8 * c / SCALED<T>].of(code);
            }
            store_shared(tile + chunk_at(to, c), words);
        }
        load();
    }

    __device__ __forceinline__ void start_some(u32 tile, u32) { start(tile, true); }
    __device__ __forceinline__ void back(u32) {} // k is a multiple of 32, so that there is one pass
};

// The first factor of all rows: of types with few bits, scales are larger; those of NVFP4 are at most 224, and at least 2^-10.
template <class T>
constexpr float FIRST_FACTOR = 256.0f;
#define FIRST_FACTOR_OF(type, factor) template <> constexpr float FIRST_FACTOR<type> = factor;
FIRST_FACTOR_OF(NVFP4, 1.0f) FIRST_FACTOR_OF(TQ1_0, 32.0f) FIRST_FACTOR_OF(TQ2_0, 32.0f) FIRST_FACTOR_OF(Q1_0, 32.0f) FIRST_FACTOR_OF(Q2_0, 32.0f)
#undef FIRST_FACTOR_OF

// The factor of a row with this largest scale: `factor`, if that makes it 2^-10 to 256. Beyond 256, a code (128 at most) times the scale would
// overflow; below 2^-10, scales of less than a 16th of it would be subnormal halves, with fewer digits. NVFP4's are multiples of 2^-10.
__device__ __forceinline__ float factor_for(float most, float factor) {
    const float scale = most * factor;
    if (most == 0.0f || !(most < __uint_as_float(0x7f800000)) || (scale >= 1.0f / 1024 && scale <= 256.0f)) return factor;
    // The power of two that makes it 128 to 256, if that and its inverse are normal.
    return __uint_as_float(min(max((int)(261 - (__float_as_uint(most) >> 23)), 1), 253) << 23);
}

// The product of weights of a block type. Row: PackedRow<T> or PlainRow<T>, which read a row.
template <class T, class Row, class G>
__device__ __forceinline__ void run_blocks(const GemmArgs &args) {
    G::template run<true>(args, [&](const u8 *a, u32 last, const typename G::Columns &columns, u32 begin, u32 count, u32 shared,
                     float(&sums)[G::M][G::N][4]) {
        const Row row(a, args.as[0], min(threadIdx.x, last));
        float factor = FIRST_FACTOR<T>, used;
        // No third pass: another queue of the owner may change the weights meanwhile.
#pragma unroll 1
        for (u32 pass = 0; pass < 2; pass++) {
#pragma unroll
            for (u32 m = 0; m < G::M; m++) {
#pragma unroll
                for (u32 n = 0; n < G::N; n++) sums[m][n][0] = sums[m][n][1] = sums[m][n][2] = sums[m][n][3] = 0.0f;
            }
            DequantizedRow<T, Row> rows(row, begin, count, factor);
            G::add_products(rows, columns, shared, count, sums);
            // The new factor brings the largest scale into the range, or as near as a power of two can.
            used = factor;
            factor = factor_for(rows.most, factor);
            if (!__syncthreads_or(factor != used)) break;
        }
        return 1.0f / used;
    });
}

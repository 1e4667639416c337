// Integer dot products of blocks with quantised activations, for the matrix-vector kernels. The layout of the activations is
// documented in quantize.cuh.
//
// QuantDot<T> divides a block of type T into units, so that one lane handles one unit at a time, with 16-byte loads of codes
// from the packed layout:
//
//     UNIT                        elements of a unit
//     Weights(from, unit)         loads a unit of a block in either layout (RowBlock, PackedBlock, PackedPointers) as bytes
//                                 that dp4a can multiply
//     Column(x, unit)             loads the activations of a unit from the block's part of a column
//     add(weights, column, sum)   adds the dot product to `sum`
//
// Codes, scales of sub-blocks and zero points are integers; f32 begins at the scale of the block. A zero point z is taken out
// through the sum of the activations' codes: sum of (q - z) x = sum of q x - z * sum of x. Codes in the upper bits of a byte
// stay there; their sums are shifted instead.
#pragma once
#include "quants.cuh"

// sum + the dot product of four unsigned bytes and four signed ones.
__device__ __forceinline__ int dot4(unsigned a, int b, int sum) {
    int result;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
    return result;
}

// As dot4, for signed bytes.
__device__ __forceinline__ int dot4_signed(int a, int b, int sum) {
    int result;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
    return result;
}

// sum + the dot product of two signed halves of a word and bytes 0 and 1 of another one, or bytes 2 and 3 (dot2_upper).
__device__ __forceinline__ int dot2(int halves, unsigned bytes, int sum) {
    int result;
    asm("dp2a.lo.s32.u32 %0, %1, %2, %3;" : "=r"(result) : "r"(halves), "r"(bytes), "r"(sum));
    return result;
}
__device__ __forceinline__ int dot2_upper(int halves, unsigned bytes, int sum) {
    int result;
    asm("dp2a.hi.s32.u32 %0, %1, %2, %3;" : "=r"(result) : "r"(halves), "r"(bytes), "r"(sum));
    return result;
}
__device__ __forceinline__ int dot2_signed(int halves, int bytes, int sum) {
    int result;
    asm("dp2a.lo.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(halves), "r"(bytes), "r"(sum));
    return result;
}
__device__ __forceinline__ int dot2_signed_upper(int halves, int bytes, int sum) {
    int result;
    asm("dp2a.hi.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(halves), "r"(bytes), "r"(sum));
    return result;
}

// Byte `i` of a word, zero-extended.
__device__ __forceinline__ int byte_of(unsigned word, int i) { return __byte_perm(word, 0, 0x4440 | i); }

// Loads N words of field F, from byte `at` of it, which is a multiple of 4 * N.
template <class F, class From, int N>
__device__ __forceinline__ void load_field(const From& from, int at, unsigned (&words)[N]) {
    load_words<alignment_of(From::template align<F>() | 4 * N)>(from.template field<F>() + at, words);
}

// Loads a field of one half, and a field of two.
template <class F, class From>
__device__ __forceinline__ float load_scale(const From& from) {
    return load_half<From::template align<F>()>(from.template field<F>());
}
template <class F, class From>
__device__ __forceinline__ void load_scales(const From& from, float& d, float& m) {
    load_halves<From::template align<F>()>(from.template field<F>(), d, m);
}

// The parts of a quantised column that belong to one block.
struct ColumnBlock {
    const unsigned char* codes;
    const unsigned char* sums;  // of blocks of 256; elsewhere scales have the sum behind them
    const unsigned char* scale; // the first one, if a block has several groups of 32

    // The scale of element j of the block, which is of type T.
    template <class T>
    __device__ __forceinline__ float scale_at(int j) const {
        return *(const float*)(scale + (T::LEN == 256 ? 0 : j / 32 * 8));
    }
};

// Number of a unit in its block, the same in all steps of a lane. `zero` is 0, which the compiler does not know: a constant plus
// `zero` stays in a register, where each use of the constant itself might load it again. It differs between lanes, as far as the
// compiler knows: a uniform register would be copied to another one for each use, since an instruction reads only one of them.
struct Unit {
    int number;
    unsigned zero;

    __device__ __forceinline__ operator int() const { return number; }
};

// For any type, by codes8 and scale8. A unit is LEN elements with a common scale, in ggml's layout.
template <class T, int LEN>
struct CodesDot {
    static constexpr int UNIT = LEN;

    struct Column {
        unsigned x[LEN / 4];
        float scale;

        __device__ __forceinline__ Column(const ColumnBlock& from, int unit) {
            load_words<16>(from.codes + LEN * unit, x);
            scale = from.template scale_at<T>(LEN * unit);
        }
    };

    struct Weights {
        unsigned codes[LEN / 4]; // signed bytes
        float d;

        template <int ALIGN>
        __device__ __forceinline__ Weights(const RowBlock<ALIGN>& from, int unit) {
            d = T::template scale8<ALIGN>(from.block, LEN * unit).d;
#pragma unroll
            for (int w = 0; w < LEN / 4; w += 2) {
                unsigned eight[2];
                T::template codes8<ALIGN>(from.block, LEN * unit + 4 * w, eight);
                // Codes minus ZERO. Bit 7 keeps the bytes from borrowing of the next one, and is inverted again.
#pragma unroll
                for (int i = 0; i < 2; i++) codes[w + i] = (eight[i] + (128 - T::ZERO) * 0x01010101u) ^ 0x80808080;
            }
        }
    };

    static __device__ __forceinline__ void add(const Weights& weights, const Column& column, float& sum) {
        int dot = 0;
#pragma unroll
        for (int w = 0; w < LEN / 4; w++) dot = dot4_signed(weights.codes[w], column.x[w], dot);
        sum = __fmaf_rn(weights.d * column.scale, (float)dot, sum);
    }
};

template <class T>
struct QuantDot : CodesDot<T, 32> {};

#include "quant_dot_legacy.cuh"
#include "quant_dot_k.cuh"

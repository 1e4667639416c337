// Rows read eight elements at a time, zeros behind the end: by Typed<T>, for a type of types.cuh or quants.cuh, or by Any, for
// one that is known only when the kernel runs.
#pragma once
#include "abi.cuh"
#include "types.cuh"
#include "quants.cuh"

// Rows of `n` elements, `step` bytes apart. `whole`: all can be read by whole octets, the widest way.
struct Rows {
    const u8 *at;
    u64 step;
    u32 n, type;
    bool whole;
};

template <class T>
struct Typed {
    // Octets whose loads are under way at once. Blocks need registers for their conversion.
    static constexpr int BATCH = T::LEN > 1 ? 2 : 4;

    // Whether rows of `n` elements at multiples of `place` are whole. Of blocks, no address need be a better multiple than
    // their size is.
    static __device__ __forceinline__ bool whole(u64 place, u32 n) {
        if constexpr (T::LEN > 1) return alignment_of(T::BYTES) <= 2 || place % alignment_of(T::BYTES) == 0;
        else return place % 16 == 0 && n % 8 == 0;
    }

    template <bool WHOLE>
    static __device__ __forceinline__ void load8(const Rows &rows, const u8 *row, u32 k, float (&x)[8]) {
        if constexpr (T::LEN > 1 || WHOLE) T::template load8<WHOLE>(row, k, x);
        else load_some<T>(row, k, rows.n, x);
    }
};

// Types known only when the kernel runs. Here `whole` is another case of the choice, not another version of the loop.
struct Any {
    static constexpr int BATCH = 1;

    static __device__ __forceinline__ bool whole(u64 place, u32 n) { return place % 16 == 0 && n % 8 == 0; }

    template <class T>
    static __device__ __forceinline__ void plain(const Rows &rows, const u8 *row, u32 k, float (&x)[8]) {
        if (rows.whole) T::template load8<true>(row, k, x);
        else load_some<T>(row, k, rows.n, x);
    }

    template <bool>
    static __device__ __forceinline__ void load8(const Rows &rows, const u8 *row, u32 k, float (&x)[8]) {
        // Numbers of the types as on the wire.
        switch (rows.type) {
        case 0: return plain<F32>(rows, row, k, x);
        case 1: return plain<F16>(rows, row, k, x);
        case 2: return Q4_0::load8(row, k, x);
        case 3: return Q4_1::load8(row, k, x);
        case 6: return Q5_0::load8(row, k, x);
        case 7: return Q5_1::load8(row, k, x);
        case 8: return Q8_0::load8(row, k, x);
        case 10: return Q2_K::load8(row, k, x);
        case 11: return Q3_K::load8(row, k, x);
        case 12: return Q4_K::load8(row, k, x);
        case 13: return Q5_K::load8(row, k, x);
        case 14: return Q6_K::load8(row, k, x);
        case 20: return IQ4_NL::load8(row, k, x);
        case 39: return MXFP4::load8(row, k, x);
        default: return plain<BF16>(rows, row, k, x);
        }
    }
};

// Rows read eight elements at a time, zeros behind the end: by Typed<T>, for a type of types.cuh or quants.cuh, or by Any, for
// one that is known only when the kernel runs.
#pragma once
#include "abi.cuh"
#include "types.cuh"
#include "quants.cuh"
#include "block_types.inc" // generated from the table of types: scripts/build_ptx.py

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
#define LOAD_BLOCK(number, type) \
    case number: return type::load8(row, k, x);
            EACH_BLOCK_TYPE(LOAD_BLOCK)
#undef LOAD_BLOCK
        default: return plain<BF16>(rows, row, k, x);
        }
    }
};

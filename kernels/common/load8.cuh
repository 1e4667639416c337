// Loaders that read rows in octets (8 consecutive elements) as f32, with zeros behind the end of the row. StaticType<T> is the
// loader for a type of types.cuh or quants.cuh; RuntimeType selects the type when the kernel runs.
#pragma once
#include "abi.cuh"
#include "types.cuh"
#include "quants.cuh"
#include "block_types.inc" // generated from the table of element types by scripts/build_ptx.py

// Rows of `n` elements with a stride of `step` bytes. `whole`: all rows can be read in whole octets by the widest accesses.
struct RowSource {
    const u8 *at;
    u64 step;
    u32 n, type;
    bool whole;
};

template <class T>
struct StaticType {
    // Number of octets whose loads are in flight at once. Block types need registers for their conversion.
    static constexpr int BATCH = T::LEN > 1 ? 2 : 4;

    // Whether rows of `n` elements are whole. `address_bits` is the bitwise OR of the addresses and strides. Blocks need no
    // better alignment than their size has.
    static __device__ __forceinline__ bool whole(u64 address_bits, u32 n) {
        if constexpr (T::LEN > 1) return alignment_of(T::BYTES) <= 2 || address_bits % alignment_of(T::BYTES) == 0;
        else return address_bits % 16 == 0 && n % 8 == 0;
    }

    template <bool WHOLE>
    static __device__ __forceinline__ void load8(const RowSource &rows, const u8 *row, u32 k, float (&x)[8]) {
        if constexpr (T::LEN > 1 || WHOLE) T::template load8<WHOLE>(row, k, x);
        else load_some<T>(row, k, rows.n, x);
    }
};

// Loader for a type that is known only when the kernel runs. `whole` is tested at each load; it selects no second version of
// the loop.
struct RuntimeType {
    static constexpr int BATCH = 1;

    static __device__ __forceinline__ bool whole(u64 address_bits, u32 n) { return address_bits % 16 == 0 && n % 8 == 0; }

    template <class T>
    static __device__ __forceinline__ void plain(const RowSource &rows, const u8 *row, u32 k, float (&x)[8]) {
        if (rows.whole) T::template load8<true>(row, k, x);
        else load_some<T>(row, k, rows.n, x);
    }

    struct Octet {
        float x[8];
    };

    // A function of its own, because it is most of the code of a kernel.
    static __device__ __noinline__ Octet load_octet(const u8 *row, u32 k, u32 n, u32 type, bool whole) {
        Octet octet;
        const RowSource rows = {nullptr, 0, n, type, whole};
        // Type numbers as on the wire.
        switch (rows.type) {
        case 0: plain<F32>(rows, row, k, octet.x); break;
        case 1: plain<F16>(rows, row, k, octet.x); break;
#define LOAD_BLOCK(number, type) \
    case number: type::load8(row, k, octet.x); break;
            EACH_BLOCK_TYPE(LOAD_BLOCK)
#undef LOAD_BLOCK
        default: plain<BF16>(rows, row, k, octet.x);
        }
        return octet;
    }

    template <bool>
    static __device__ __forceinline__ void load8(const RowSource &rows, const u8 *row, u32 k, float (&x)[8]) {
        const Octet octet = load_octet(row, k, rows.n, rows.type, rows.whole);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = octet.x[i];
    }
};

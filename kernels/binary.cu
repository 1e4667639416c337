// ADD, ADD1, SUB, MUL, DIV: d = a op b, computed in f32, with b broadcast to a's shape; and ADD_ID, which adds the row of b that an
// id selects.
//
// Variants: binary_A_B_D for the combinations of types that models use: coalesced 16-byte accesses; b is a row or one element
//           per row, and is kept in registers along a dimension in which it is broadcast; binary_any for all other float types
//           and layouts, one element per thread; binary_add_id, f32 only.
// Limits:   dimensions below 2^31; binary_A_B_D: rows of any length, dense in a and d.
// Floor:    a is read and d written once; b is read once per chunk of a dimension in which it is broadcast.
#include "common/abi.cuh"
#include "common/types.cuh"
#include "common/elementwise.cuh"

struct BinaryArgs {
    const u8 *a, *b;
    u8 *d;
    ElementwiseArgs elementwise;
    u32 op; // 0: add, 1: subtract, 2: multiply, 3: divide
    u32 padding;
};

struct BinaryAnyArgs {
    const u8 *a, *b;
    u8 *d;
    ElementwiseAnyArgs elementwise;
    u32 op;
    u32 padding;
};

template <int N, class F>
__device__ __forceinline__ void map(float (&x)[N], const float (&y)[N], F f) {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = f(x[i], y[i]);
}

// The branch is taken once per N elements, and uniformly by all threads of a launch.
template <int N>
__device__ __forceinline__ void apply(u32 op, float (&x)[N], const float (&y)[N]) {
    switch (op) {
    case 0: return map(x, y, [](float x, float y) { return x + y; });
    case 1: return map(x, y, [](float x, float y) { return x - y; });
    case 2: return map(x, y, [](float x, float y) { return x * y; });
    case 3: return map(x, y, [](float x, float y) { return x / y; });
    }
}

#define ENTRY(NAME, A, B, D)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256, 5) NAME(BinaryArgs args) {                                               \
        elementwise<A, B, D, 8>(args.elementwise, args.a, args.b, args.d,                                                      \
                                [&](float(&x)[8], const float(&y)[8]) { apply(args.op, x, y); });                              \
    }

ENTRY(binary_f32_f32_f32, F32, F32, F32)
ENTRY(binary_f16_f32_f32, F16, F32, F32)
ENTRY(binary_f16_f32_f16, F16, F32, F16)
ENTRY(binary_f16_f16_f16, F16, F16, F16)
ENTRY(binary_bf16_f32_f32, BF16, F32, F32)
ENTRY(binary_bf16_f32_bf16, BF16, F32, BF16)
ENTRY(binary_bf16_bf16_bf16, BF16, BF16, BF16)

extern "C" __global__ void binary_any(BinaryAnyArgs args) {
    elementwise_any(args.elementwise, args.a, args.b, args.d, [&](float(&x)[1], const float(&y)[1]) { apply(args.op, x, y); });
}

struct AddIdArgs {
    const u8 *a, *b, *ids;
    u8 *d;
    u32 *error_word;
    u64 a_nb[2], ids_nb[2], d_nb[2]; // byte strides of the experts of a token, and of the tokens
    u64 b_nb;
    u32 n, rows, used, experts;
    u32 tiles;
    u32 wide; // whether all strides are multiples of 16 bytes
    u32 code; // number of the op, for error reports
    u32 padding;
};

// Grid: tiles, then groups of blockDim.y rows; 8 elements per thread.
extern "C" __global__ void binary_add_id(AddIdArgs args) {
    const u32 tile = blockIdx.x % args.tiles;
    const u32 row = blockIdx.x / args.tiles * blockDim.y + threadIdx.y;
    if (row >= args.rows) return;
    const u32 i1 = row % args.used, i2 = row / args.used;
    const int id = *(const int *)(args.ids + i1 * args.ids_nb[0] + i2 * args.ids_nb[1]);
    const bool none = id == -1;
    if ((u32)id >= args.experts && !none) {
        report_bad_index(args.error_word, args.code);
        return;
    }
    const u64 begin = (u64)tile * blockDim.x * 8;
    const bool wide =
        args.wide && whole_vectors<4, 8>(begin, args.n) && aligned(args.a, args.b, 16) && aligned(args.d, args.d, 16);
    float x[8], y[8];
    load_tile<F32, 4>(args.a + i1 * args.a_nb[0] + i2 * args.a_nb[1], begin, args.n, wide, x);
    if (!none) {
        load_tile<F32, 4>(args.b + (u64)id * args.b_nb, begin, args.n, wide, y);
        apply(0, x, y);
    }
    store_tile<F32, 4>(args.d + i1 * args.d_nb[0] + i2 * args.d_nb[1], begin, args.n, wide, x);
}

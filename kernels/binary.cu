// d = a + b, a - b, a * b, a / b, computed in f32, where b repeats in each dimension to a's shape; and ADD_ID, a row of b
// added by its number.
//
// Variants: binary_A_B_D for the pairs of types that models have: rows in 16-byte accesses, b a row, or one element for a
//           whole row, kept in registers along a dimension in which it repeats; binary_any for the other pairs of float types
//           and every layout, an element a thread; binary_add_id, f32 only.
// Limits:   dimensions below 2^31; binary_A_B_D: rows of any length, dense in a and d.
// Floor:    a and d are read and written once, b once for each chunk of a dimension in which it repeats.
#include "common/abi.cuh"
#include "common/types.cuh"
#include "common/zip.cuh"

struct Args {
    const u8 *a, *b;
    u8 *d;
    Zip zip;
    u32 op; // 0 to 3: add, subtract, multiply, divide
    u32 padding;
};

struct AnyArgs {
    const u8 *a, *b;
    u8 *d;
    ZipAny zip;
    u32 op;
    u32 padding;
};

template <int N, class F>
__device__ __forceinline__ void map(float (&x)[N], const float (&y)[N], F f) {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = f(x[i], y[i]);
}

// The choice is made once for N elements: all threads of a launch take the same way.
template <int N>
__device__ __forceinline__ void apply(u32 op, float (&x)[N], const float (&y)[N]) {
    switch (op) {
    case 0: return map(x, y, [](float x, float y) { return x + y; });
    case 1: return map(x, y, [](float x, float y) { return x - y; });
    case 2: return map(x, y, [](float x, float y) { return x * y; });
    case 3: return map(x, y, [](float x, float y) { return x / y; });
    }
}

#define ENTRY(NAME, A, B, D)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 5) NAME(Args args) {                                                       \
        zip<A, B, D, 8>(args.zip, args.a, args.b, args.d, [&](float(&x)[8], const float(&y)[8]) { apply(args.op, x, y); });      \
    }

ENTRY(binary_f32_f32_f32, F32, F32, F32)
ENTRY(binary_f16_f32_f32, F16, F32, F32)
ENTRY(binary_f16_f32_f16, F16, F32, F16)
ENTRY(binary_f16_f16_f16, F16, F16, F16)
ENTRY(binary_bf16_f32_f32, BF16, F32, F32)
ENTRY(binary_bf16_f32_bf16, BF16, F32, BF16)
ENTRY(binary_bf16_bf16_bf16, BF16, BF16, BF16)

extern "C" __global__ void binary_any(AnyArgs args) {
    zip_any(args.zip, args.a, args.b, args.d, [&](float(&x)[1], const float(&y)[1]) { apply(args.op, x, y); });
}

struct AddId {
    const u8 *a, *b, *ids;
    u8 *d;
    u32 *verdict;
    u64 a_nb[2], ids_nb[2], d_nb[2]; // byte steps of the experts of a token, and of the tokens
    u64 b_nb;
    u32 n, rows, used, experts;
    u32 tiles;
    u32 wide; // whether all steps are multiples of 16
    u32 code; // the op's number
    u32 padding;
};

// Blocks: tiles, then rows by blockDim.y; 8 elements a thread.
extern "C" __global__ void binary_add_id(AddId args) {
    const u32 tile = blockIdx.x % args.tiles;
    const u32 row = blockIdx.x / args.tiles * blockDim.y + threadIdx.y;
    if (row >= args.rows) return;
    const u32 i1 = row % args.used, i2 = row / args.used;
    const int id = *(const int *)(args.ids + i1 * args.ids_nb[0] + i2 * args.ids_nb[1]);
    if ((u32)id >= args.experts) {
        refuse(args.verdict, args.code);
        return;
    }
    const u64 begin = (u64)tile * blockDim.x * 8;
    const bool wide = args.wide && whole_vectors<4, 8>(begin, args.n) && aligned(args.a, args.b, 16) && aligned(args.d, args.d, 16);
    float x[8], y[8];
    load_tile<F32, 4>(args.a + i1 * args.a_nb[0] + i2 * args.a_nb[1], begin, args.n, wide, x);
    load_tile<F32, 4>(args.b + (u64)id * args.b_nb, begin, args.n, wide, y);
    apply(0, x, y);
    store_tile<F32, 4>(args.d + i1 * args.d_nb[0] + i2 * args.d_nb[1], begin, args.n, wide, x);
}

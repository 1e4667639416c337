// Element-wise ops of one tensor: y = f(x), computed in f32. SQR, SQRT, LOG, SIN, COS, SCALE, CLAMP,
// LEAKY_RELU, FILL and the 22 kinds of UNARY.
//
// Variants: unary_packed for contiguous tensors of one type, 8 elements per thread, in coalesced 16-byte accesses if the
//           addresses permit; unary_any for all other float types and layouts, one element per thread. Both select types when
//           they run, because the functions are many and long: a copy per type would multiply the code.
// Limits:   any number of elements; dimensions below 2^31 for unary_any.
// Traffic:  each element is read once (FILL reads nothing) and written once.
#include "common/abi.cuh"
#include "common/math.cuh"
#include "common/types.cuh"
#include "common/vector.cuh"

// The number of the function (kinds of UNARY as on the wire; from 32 on, separate ops) and its parameters.
struct UnaryParams {
    u32 which;
    float p[4];
};

struct UnaryPackedArgs {
    const u8 *x;
    u8 *y;
    u64 n;
    UnaryParams op;
    u32 type;
};

struct UnaryAnyArgs {
    const u8 *x;
    u8 *y;
    Shape xs, ys;
    u32 types[2];
    UnaryParams op;
    u32 pieces; // pieces of blockDim.x elements per row
};

// The function that does not read x.
constexpr u32 FILL = 36;

template <int N, class F>
__device__ __forceinline__ void map(float (&x)[N], F f) {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = f(x[i]);
}

__device__ __forceinline__ float hard_sigmoid(float x) {
    return fminf(fmaxf((x + 3.0f) / 6.0f, 0.0f), 1.0f); // 0 for NaN
}

// The branch is taken once per N elements, and uniformly by all threads of a launch.
template <int N>
__device__ __forceinline__ void apply(const UnaryParams &op, float (&x)[N]) {
    const float a = op.p[0], b = op.p[1], c = op.p[2], d = op.p[3];
    switch (op.which) {
    case 0: return map(x, [](float x) { return fabsf(x); }); // ABS
    case 1: return map(x, [](float x) { return (float)((x > 0.0f) - (x < 0.0f)); }); // SGN
    case 2: return map(x, [](float x) { return -x; }); // NEG
    case 3: return map(x, [](float x) { return x > 0.0f ? 1.0f : 0.0f; }); // STEP
    case 4: return map(x, [](float x) { return tanhf(x); }); // TANH
    case 5: return map(x, [](float x) { return x > 0.0f ? x : expm1f(x); }); // ELU
    case 6: return map(x, [](float x) { return x > 0.0f ? x : 0.0f; }); // RELU
    case 7: return map(x, [](float x) { return sigmoid(x); }); // SIGMOID
    case 8: return map(x, [](float x) { return gelu(x); }); // GELU
    case 9: return map(x, [](float x) { return gelu_quick(x); }); // GELU_QUICK
    case 10: return map(x, [](float x) { return silu(x); }); // SILU
    case 11: return map(x, [](float x) { return x * hard_sigmoid(x); }); // HARDSWISH
    case 12: return map(x, [](float x) { return hard_sigmoid(x); }); // HARDSIGMOID
    case 13: return map(x, [](float x) { return expf(x); }); // EXP
    case 14: return map(x, [](float x) { return expf(x) - 1.0f; }); // EXPM1: this difference, not expm1f, as the op is defined
    case 15: return map(x, [](float x) { return x > 20.0f ? x : log1pf(expf(x)); }); // SOFTPLUS
    case 16: return map(x, [](float x) { return gelu_erf(x); }); // GELU_ERF
    case 17: // XIELU: a = alpha_n, b = alpha_p, c = beta, d = eps
        return map(x, [=](float x) { return (x > 0.0f ? b * x * x : (expm1f(fminf(x, d)) - x) * a) + c * x; });
    case 18: return map(x, [](float x) { return floorf(x); }); // FLOOR
    case 19: return map(x, [](float x) { return ceilf(x); }); // CEIL
    case 20: return map(x, [](float x) { return roundf(x); }); // ROUND
    case 21: return map(x, [](float x) { return truncf(x); }); // TRUNC
    case 32: return map(x, [](float x) { return x * x; }); // SQR
    case 33: return map(x, [](float x) { return sqrtf(x); }); // SQRT
    case 34: // SCALE: a = scale, b = bias; adding a bias of 0 would turn -0 into 0
        return map(x, [=](float x) { return b == 0.0f ? x * a : x * a + b; });
    case 35: // CLAMP: a = min, b = max; NaN becomes max
        return map(x, [=](float x) {
            x = x < b ? x : b;
            return x > a ? x : a;
        });
    case FILL: return map(x, [=](float) { return a; });
    case 37: return map(x, [](float x) { return logf(x); }); // LOG
    case 38: return map(x, [](float x) { return sinf(x); }); // SIN
    case 39: return map(x, [](float x) { return cosf(x); }); // COS
    case 40: // LEAKY_RELU: a = slope; both sides are 0 for NaN
        return map(x, [=](float x) { return (x > 0.0f ? x : 0.0f) + a * (x < 0.0f ? x : 0.0f); });
    }
}

// This thread's part of the block's tile; see vector.cuh.
template <class T>
struct Part {
    static constexpr int V = VECTOR<T, T, T>;

    static __device__ __forceinline__ bool wide(const UnaryPackedArgs &args, u64 begin) {
        return whole_vectors<V, 8>(begin, args.n) && aligned(args.x, args.y, 16);
    }
    static __device__ __forceinline__ void load(const UnaryPackedArgs &args, u64 begin, float (&x)[8]) {
        load_tile<T, V>(args.x, begin, args.n, wide(args, begin), x);
    }
    static __device__ __forceinline__ void store(const UnaryPackedArgs &args, u64 begin, const float (&x)[8]) {
        store_tile<T, V>(args.y, begin, args.n, wide(args, begin), x);
    }
};

// Grid: ceil(n / 8 / blockDim.x) blocks.
extern "C" __global__ void unary_packed(UnaryPackedArgs args) {
    const u64 begin = (u64)blockIdx.x * blockDim.x * 8;
    float x[8] = {};
    if (args.op.which != FILL) {
        if (args.type == TYPE_F32) Part<F32>::load(args, begin, x);
        else if (args.type == TYPE_F16) Part<F16>::load(args, begin, x);
        else Part<BF16>::load(args, begin, x);
    }
    apply(args.op, x);
    if (args.type == TYPE_F32) Part<F32>::store(args, begin, x);
    else if (args.type == TYPE_F16) Part<F16>::store(args, begin, x);
    else Part<BF16>::store(args, begin, x);
}

// Grid: pieces, then groups of blockDim.y rows; one element per thread.
extern "C" __global__ void unary_any(UnaryAnyArgs args) {
    const u32 i0 = blockIdx.x % args.pieces * blockDim.x + threadIdx.x;
    const u32 row = blockIdx.x / args.pieces * blockDim.y + threadIdx.y;
    u32 i1, i2, i3;
    args.ys.split(row, i1, i2, i3);
    if (i0 >= args.ys.ne[0] || i3 >= args.ys.ne[3]) return;
    float x[1] = {};
    if (args.op.which != FILL) x[0] = load_float(args.x + args.xs.at(i0, i1, i2, i3), args.types[0]);
    apply(args.op, x);
    store_float(args.y + args.ys.at(i0, i1, i2, i3), args.types[1], x[0]);
}

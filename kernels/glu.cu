// GLU, gated linear units: d = activation(x) * g, computed in f32; x and g are the halves of a row, or two tensors.
//
// Variants: glu_f32, glu_f16, glu_bf16 for dense rows of one type, in coalesced 16-byte accesses; glu_any for all other float
//           types and layouts, one element per thread. The kind (numbered as on the wire) is selected when the kernel runs.
// Limits:   dimensions below 2^31.
// Floor:    x and g are read once, d is written once.
#include "common/abi.cuh"
#include "common/math.cuh"
#include "common/types.cuh"
#include "common/elementwise.cuh"

struct GluParams {
    u32 kind;
    float alpha, limit;
    u32 padding;
};

struct GluArgs {
    const u8 *x, *g;
    u8 *d;
    ElementwiseArgs elementwise;
    GluParams params;
};

struct GluAnyArgs {
    const u8 *x, *g;
    u8 *d;
    ElementwiseAnyArgs elementwise;
    GluParams params;
};

// min(x, limit); NaN stays NaN.
__device__ __forceinline__ float below(float x, float limit) { return x > limit ? limit : x; }

// x clamped to [-limit, limit]; NaN stays NaN. If the limit is negative, the lower bound wins.
__device__ __forceinline__ float within(float x, float limit) {
    x = below(x, limit);
    return x < -limit ? -limit : x;
}

template <int N, class F>
__device__ __forceinline__ void map(float (&x)[N], const float (&g)[N], F f) {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = f(x[i], g[i]);
}

// The branch is taken once per N elements, and uniformly by all threads of a launch.
template <int N>
__device__ __forceinline__ void apply(const GluParams &params, float (&x)[N], const float (&g)[N]) {
    const float alpha = params.alpha, limit = params.limit;
    switch (params.kind) {
    case 0: return map(x, g, [](float x, float g) { return x > 0.0f ? x * g : 0.0f; });
    case 1: return map(x, g, [](float x, float g) { return gelu(x) * g; });
    case 2: return map(x, g, [](float x, float g) { return silu(x) * g; });
    case 3:
        return map(x, g, [=](float x, float g) {
            x = below(x, limit);
            return x / (1.0f + expf(-alpha * x)) * (within(g, limit) + 1.0f);
        });
    case 4: return map(x, g, [](float x, float g) { return gelu_erf(x) * g; });
    case 5: return map(x, g, [](float x, float g) { return gelu_quick(x) * g; });
    case 6: return map(x, g, [=](float x, float g) { return silu(below(x, limit)) * within(g, limit); });
    }
}

template <class T>
__device__ __forceinline__ void dense(const GluArgs &args) {
    elementwise<T, T, T, 8>(args.elementwise, args.x, args.g, args.d,
                            [&](float(&x)[8], const float(&g)[8]) { apply(args.params, x, g); });
}

extern "C" __global__ void __launch_bounds__(256, 4) glu_f32(GluArgs args) { dense<F32>(args); }
extern "C" __global__ void __launch_bounds__(256, 4) glu_f16(GluArgs args) { dense<F16>(args); }
extern "C" __global__ void __launch_bounds__(256, 4) glu_bf16(GluArgs args) { dense<BF16>(args); }

extern "C" __global__ void glu_any(GluAnyArgs args) {
    elementwise_any(args.elementwise, args.x, args.g, args.d,
                    [&](float(&x)[1], const float(&g)[1]) { apply(args.params, x, g); });
}

// Activation functions in f32, with the formulas of src/cpu/ops/math.rs.
#pragma once

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// GELU by the tanh approximation: x/2 (1 + tanh(0.79788456 x (1 + 0.044715 x^2))) = x / (1 + e^-2(...)); 0 for x <= -10.
__device__ __forceinline__ float gelu(float x) {
    float y = x / (1.0f + expf(-1.5957692f * x * (1.0f + 0.044715f * x * x)));
    return x <= -10.0f ? 0.0f : y;
}

__device__ __forceinline__ float gelu_quick(float x) { return x / (1.0f + expf(-1.702f * x)); }

// GELU by the error function, x/2 (1 + erf(x / sqrt 2)), computed by erfc to avoid the cancellation for x < 0.
__device__ __forceinline__ float gelu_erf(float x) { return 0.5f * x * erfcf(-0.70710678118654752440f * x); }

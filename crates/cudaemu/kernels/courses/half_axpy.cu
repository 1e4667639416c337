// y = alpha x + y and dot products in packed 16-bit floats: half2 and bfloat162, two elements per thread.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void axpy_half2(int n, half alpha, const half2* x, half2* y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n / 2) y[i] = __hfma2(__half2half2(alpha), x[i], y[i]);
}

#if __CUDA_ARCH__ >= 800
extern "C" __global__ void axpy_bfloat162(int n, __nv_bfloat16 alpha, const __nv_bfloat162* x, __nv_bfloat162* y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n / 2) y[i] = __hfma2(__bfloat162bfloat162(alpha), x[i], y[i]);
}
#endif

// Products in 16 bits, sums in f32; *out begins as 0.
extern "C" __global__ void dot_half2(int n, const half2* x, const half2* y, float* out) {
    float sum = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n / 2; i += gridDim.x * blockDim.x) {
        float2 product = __half22float2(x[i] * y[i]);
        sum += product.x + product.y;
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (threadIdx.x % 32 == 0) atomicAdd(out, sum);
}

// Sums in half precision, by packed shuffles and packed atomics.
extern "C" __global__ void sum_half2(int n, const half2* x, half2* out) {
    half2 sum = __float2half2_rn(0.0f);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n / 2; i += gridDim.x * blockDim.x) sum = __hadd2(sum, x[i]);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (threadIdx.x % 32 == 0) atomicAdd(out, sum);
}

// GELU by tanh over f16 through f32, and SiLU over bf16.
extern "C" __global__ void gelu_half(int n, const half* x, half* y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = __half2float(x[i]);
    y[i] = __float2half_rn(0.5f * v * (1.0f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v))));
}
extern "C" __global__ void silu_bfloat16(int n, const __nv_bfloat16* x, __nv_bfloat16* y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = __bfloat162float(x[i]);
    y[i] = __float2bfloat16_rn(v / (1.0f + __expf(-v)));
}

// Conversions of 8-bit floats, e4m3 and e5m2: the instructions of target 89 and later, bits by software before.
// Two values per element, both saturating; columns as in formats.cu.

#include <cuda_fp8.h>

#define INDEX                                          \
    int i = blockIdx.x * blockDim.x + threadIdx.x;     \
    if (i >= n) return
#define OUT(K) out[(size_t)(K) * n + i]

extern "C" __global__ void float_to_fp8(const float2* in, unsigned short* out, int n) {
    INDEX;
    float2 x = in[i];
    OUT(0) = __nv_cvt_float2_to_fp8x2(x, __NV_SATFINITE, __NV_E4M3);
    OUT(1) = __nv_cvt_float2_to_fp8x2(x, __NV_SATFINITE, __NV_E5M2);
    OUT(2) = __nv_cvt_float_to_fp8(x.x, __NV_SATFINITE, __NV_E4M3);
    OUT(3) = __nv_cvt_float_to_fp8(x.y, __NV_SATFINITE, __NV_E5M2);
    OUT(4) = __nv_cvt_float_to_fp8(x.x, __NV_NOSAT, __NV_E4M3);
    OUT(5) = __nv_cvt_float_to_fp8(x.y, __NV_NOSAT, __NV_E5M2);
}

extern "C" __global__ void half_to_fp8(const half2* in, unsigned short* out, int n) {
    INDEX;
    __half2_raw x = in[i];
    OUT(0) = __nv_cvt_halfraw2_to_fp8x2(x, __NV_SATFINITE, __NV_E4M3);
    OUT(1) = __nv_cvt_halfraw2_to_fp8x2(x, __NV_SATFINITE, __NV_E5M2);
}

extern "C" __global__ void fp8_to_half(const unsigned short* in, half2* out, int n) {
    INDEX;
    OUT(0) = __nv_cvt_fp8x2_to_halfraw2(in[i], __NV_E4M3);
    OUT(1) = __nv_cvt_fp8x2_to_halfraw2(in[i], __NV_E5M2);
}

// Through the types, to f32 and bf16.
extern "C" __global__ void fp8_types(const unsigned char* in, float* out, int n) {
    INDEX;
    __nv_fp8_e4m3 a;
    __nv_fp8_e5m2 b;
    a.__x = in[i];
    b.__x = in[i];
    OUT(0) = (float)a, OUT(1) = (float)b, OUT(2) = (float)__nv_fp8_e4m3((float)b), OUT(3) = (float)__nv_fp8_e5m2((float)a);
    OUT(4) = __bfloat162float((__nv_bfloat16)a);
}

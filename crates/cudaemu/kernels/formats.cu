// Number formats: conversions with every rounding, saturation, math functions and integer intrinsics. Each kernel computes
// a row of results per element, and OUT(k) names column k of it.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define INDEX                                          \
    int i = blockIdx.x * blockDim.x + threadIdx.x;     \
    if (i >= n) return
#define OUT(K) out[(size_t)(K) * n + i]

extern "C" __global__ void float_to_integers(const float* in, long long* out, int n) {
    INDEX;
    float x = in[i];
    OUT(0) = __float2int_rn(x), OUT(1) = __float2int_rz(x), OUT(2) = __float2int_ru(x), OUT(3) = __float2int_rd(x);
    OUT(4) = __float2uint_rn(x), OUT(5) = __float2uint_rz(x), OUT(6) = __float2uint_ru(x), OUT(7) = __float2uint_rd(x);
    OUT(8) = __float2ll_rn(x), OUT(9) = __float2ll_rz(x), OUT(10) = __float2ll_ru(x), OUT(11) = __float2ll_rd(x);
    OUT(12) = __float2ull_rn(x), OUT(13) = __float2ull_rz(x), OUT(14) = __float2ull_ru(x), OUT(15) = __float2ull_rd(x);
    OUT(16) = (signed char)x, OUT(17) = (unsigned char)x, OUT(18) = (short)x, OUT(19) = (unsigned short)x;
    OUT(20) = (int)x, OUT(21) = (unsigned)x, OUT(22) = (long long)x, OUT(23) = (unsigned long long)x;
}

extern "C" __global__ void double_to_integers(const double* in, long long* out, int n) {
    INDEX;
    double x = in[i];
    OUT(0) = __double2int_rn(x), OUT(1) = __double2int_rz(x), OUT(2) = __double2int_ru(x), OUT(3) = __double2int_rd(x);
    OUT(4) = __double2uint_rn(x), OUT(5) = __double2uint_rz(x), OUT(6) = __double2uint_ru(x), OUT(7) = __double2uint_rd(x);
    OUT(8) = __double2ll_rn(x), OUT(9) = __double2ll_rz(x), OUT(10) = __double2ll_ru(x), OUT(11) = __double2ll_rd(x);
    OUT(12) = __double2ull_rn(x), OUT(13) = __double2ull_rz(x), OUT(14) = __double2ull_ru(x), OUT(15) = __double2ull_rd(x);
    OUT(16) = __double2hiint(x), OUT(17) = __double2loint(x), OUT(18) = __double_as_longlong(x);
}

extern "C" __global__ void integers_to_float(const long long* in, float* out, int n) {
    INDEX;
    long long x = in[i];
    int s = (int)x;
    unsigned u = (unsigned)x;
    unsigned long long v = (unsigned long long)x;
    OUT(0) = __int2float_rn(s), OUT(1) = __int2float_rz(s), OUT(2) = __int2float_ru(s), OUT(3) = __int2float_rd(s);
    OUT(4) = __uint2float_rn(u), OUT(5) = __uint2float_rz(u), OUT(6) = __uint2float_ru(u), OUT(7) = __uint2float_rd(u);
    OUT(8) = __ll2float_rn(x), OUT(9) = __ll2float_rz(x), OUT(10) = __ll2float_ru(x), OUT(11) = __ll2float_rd(x);
    OUT(12) = __ull2float_rn(v), OUT(13) = __ull2float_rz(v), OUT(14) = __ull2float_ru(v), OUT(15) = __ull2float_rd(v);
    OUT(16) = (float)(signed char)x, OUT(17) = (float)(unsigned char)x, OUT(18) = (float)(short)x, OUT(19) = (float)(unsigned short)x;
    OUT(20) = __int_as_float(s), OUT(21) = __uint_as_float(u);
}

extern "C" __global__ void integers_to_double(const long long* in, double* out, int n) {
    INDEX;
    long long x = in[i];
    unsigned long long v = (unsigned long long)x;
    OUT(0) = __int2double_rn((int)x), OUT(1) = __uint2double_rn((unsigned)x);
    OUT(2) = __ll2double_rn(x), OUT(3) = __ll2double_rz(x), OUT(4) = __ll2double_ru(x), OUT(5) = __ll2double_rd(x);
    OUT(6) = __ull2double_rn(v), OUT(7) = __ull2double_rz(v), OUT(8) = __ull2double_ru(v), OUT(9) = __ull2double_rd(v);
    OUT(10) = __hiloint2double((int)(x >> 32), (int)x), OUT(11) = __longlong_as_double(x);
}

extern "C" __global__ void double_to_float(const double* in, float* out, int n) {
    INDEX;
    double x = in[i];
    OUT(0) = __double2float_rn(x), OUT(1) = __double2float_rz(x), OUT(2) = __double2float_ru(x), OUT(3) = __double2float_rd(x);
}

extern "C" __global__ void float_to_half(const float* in, unsigned short* out, int n) {
    INDEX;
    float x = in[i];
    OUT(0) = __half_as_ushort(__float2half_rn(x)), OUT(1) = __half_as_ushort(__float2half_rz(x));
    OUT(2) = __half_as_ushort(__float2half_ru(x)), OUT(3) = __half_as_ushort(__float2half_rd(x));
    half2 both = __floats2half2_rn(x, -x);
    OUT(4) = __half_as_ushort(both.x), OUT(5) = __half_as_ushort(both.y);
    OUT(6) = __half_as_ushort(__double2half((double)x));
}

extern "C" __global__ void half_to_others(const unsigned short* in, double* out, int n) {
    INDEX;
    half x = __ushort_as_half(in[i]);
    OUT(0) = __half2float(x), OUT(1) = (double)x;
    OUT(2) = __half2int_rn(x), OUT(3) = __half2int_rz(x), OUT(4) = __half2int_ru(x), OUT(5) = __half2int_rd(x);
    OUT(6) = __half2uint_rn(x), OUT(7) = __half2short_rn(x), OUT(8) = __half2ushort_rz(x), OUT(9) = (double)__half2ll_rn(x);
    OUT(10) = (double)__half2ull_rz(x), OUT(11) = __half2char_rz(x), OUT(12) = __half2uchar_rz(x);
}

extern "C" __global__ void integers_to_half(const int* in, unsigned short* out, int n) {
    INDEX;
    int x = in[i];
    OUT(0) = __half_as_ushort(__int2half_rn(x)), OUT(1) = __half_as_ushort(__int2half_rz(x));
    OUT(2) = __half_as_ushort(__int2half_ru(x)), OUT(3) = __half_as_ushort(__int2half_rd(x));
    OUT(4) = __half_as_ushort(__uint2half_rn(x)), OUT(5) = __half_as_ushort(__short2half_rn((short)x));
    OUT(6) = __half_as_ushort(__ushort2half_rn((unsigned short)x)), OUT(7) = __half_as_ushort(__ll2half_rn(x));
}

// Arithmetic in f16, scalar and packed.
extern "C" __global__ void half_arithmetic(const half* a, const half* b, half* out, int n) {
    INDEX;
    half x = a[i], y = b[i];
    OUT(0) = __hadd(x, y), OUT(1) = __hsub(x, y), OUT(2) = __hmul(x, y), OUT(3) = __hfma(x, y, x);
}

extern "C" __global__ void half2_arithmetic(const half2* a, const half2* b, half2* out, int n) {
    INDEX;
    half2 x = a[i], y = b[i];
    OUT(0) = __hadd2(x, y), OUT(1) = __hsub2(x, y), OUT(2) = __hmul2(x, y), OUT(3) = __hfma2(x, y, x);
}

extern "C" __global__ void float_to_bfloat16(const float* in, unsigned short* out, int n) {
    INDEX;
    float x = in[i];
    OUT(0) = __bfloat16_as_ushort(__float2bfloat16_rn(x)), OUT(1) = __bfloat16_as_ushort(__float2bfloat16_rz(x));
    OUT(2) = __bfloat16_as_ushort(__float2bfloat16_ru(x)), OUT(3) = __bfloat16_as_ushort(__float2bfloat16_rd(x));
    __nv_bfloat162 both = __floats2bfloat162_rn(x, -x);
    OUT(4) = __bfloat16_as_ushort(both.x), OUT(5) = __bfloat16_as_ushort(both.y);
    OUT(6) = __bfloat16_as_ushort(__double2bfloat16((double)x));
}

extern "C" __global__ void bfloat16_to_others(const unsigned short* in, double* out, int n) {
    INDEX;
    __nv_bfloat16 x = __ushort_as_bfloat16(in[i]);
    OUT(0) = __bfloat162float(x), OUT(1) = __bfloat162int_rn(x), OUT(2) = __bfloat162int_rz(x), OUT(3) = __bfloat162uint_ru(x);
    OUT(4) = __bfloat162short_rn(x), OUT(5) = (double)__bfloat162ll_rn(x), OUT(6) = __bfloat162uchar_rz(x);
    OUT(7) = __bfloat162float(__int2bfloat16_rn(in[i] * 257)), OUT(8) = __bfloat162float(__ll2bfloat16_rz(in[i] * 65537ll));
}

extern "C" __global__ void bfloat16_arithmetic(const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* out, int n) {
    INDEX;
    __nv_bfloat16 x = a[i], y = b[i];
    OUT(0) = __hadd(x, y), OUT(1) = __hsub(x, y), OUT(2) = __hmul(x, y), OUT(3) = __hfma(x, y, x);
}

extern "C" __global__ void bfloat162_arithmetic(const __nv_bfloat162* a, const __nv_bfloat162* b, __nv_bfloat162* out, int n) {
    INDEX;
    __nv_bfloat162 x = a[i], y = b[i];
    OUT(0) = __hadd2(x, y), OUT(1) = __hsub2(x, y), OUT(2) = __hmul2(x, y), OUT(3) = __hfma2(x, y, x);
}

// f32 arithmetic with each rounding, and saturation.
extern "C" __global__ void float_rounding(const float* a, const float* b, float* out, int n) {
    INDEX;
    float x = a[i], y = b[i], p = fabsf(x);
    OUT(0) = __fadd_rn(x, y), OUT(1) = __fadd_rz(x, y), OUT(2) = __fadd_ru(x, y), OUT(3) = __fadd_rd(x, y);
    OUT(4) = __fmul_rn(x, y), OUT(5) = __fmul_rz(x, y), OUT(6) = __fmul_ru(x, y), OUT(7) = __fmul_rd(x, y);
    OUT(8) = __fmaf_rn(x, y, x), OUT(9) = __fmaf_rz(x, y, x), OUT(10) = __fmaf_ru(x, y, x), OUT(11) = __fmaf_rd(x, y, x);
    OUT(12) = __fdiv_rn(x, y), OUT(13) = __fdiv_rz(x, y), OUT(14) = __fdiv_ru(x, y), OUT(15) = __fdiv_rd(x, y);
    OUT(16) = __frcp_rn(x), OUT(17) = __frcp_rz(x), OUT(18) = __frcp_ru(x), OUT(19) = __frcp_rd(x);
    OUT(20) = __fsqrt_rn(p), OUT(21) = __fsqrt_rz(p), OUT(22) = __fsqrt_ru(p), OUT(23) = __fsqrt_rd(p);
    OUT(24) = __fsub_rn(x, y), OUT(25) = __fsub_rz(x, y), OUT(26) = __frsqrt_rn(p);
    OUT(27) = __saturatef(x), OUT(28) = __saturatef(x + y), OUT(29) = __saturatef(x * y), OUT(30) = __saturatef(fmaf(x, y, x));
}

extern "C" __global__ void double_rounding(const double* a, const double* b, double* out, int n) {
    INDEX;
    double x = a[i], y = b[i], p = fabs(x);
    OUT(0) = __dadd_rn(x, y), OUT(1) = __dadd_rz(x, y), OUT(2) = __dadd_ru(x, y), OUT(3) = __dadd_rd(x, y);
    OUT(4) = __dmul_rn(x, y), OUT(5) = __dmul_rz(x, y), OUT(6) = __dmul_ru(x, y), OUT(7) = __dmul_rd(x, y);
    OUT(8) = __fma_rn(x, y, x), OUT(9) = __fma_rz(x, y, x), OUT(10) = __fma_ru(x, y, x), OUT(11) = __fma_rd(x, y, x);
    OUT(12) = __ddiv_rn(x, y), OUT(13) = __ddiv_rz(x, y), OUT(14) = __ddiv_ru(x, y), OUT(15) = __ddiv_rd(x, y);
    OUT(16) = __dsqrt_rn(p), OUT(17) = __dsqrt_rz(p), OUT(18) = __dsqrt_ru(p), OUT(19) = __dsqrt_rd(p);
    OUT(20) = __drcp_rn(x), OUT(21) = __drcp_rz(x), OUT(22) = __drcp_ru(x), OUT(23) = __drcp_rd(x);
}

extern "C" __global__ void float_math(const float* a, const float* b, float* out, int n) {
    INDEX;
    float x = a[i], y = b[i], p = fabsf(x);
    float sine, cosine, whole;
    int exponent, quotient;
    OUT(0) = sinf(x), OUT(1) = cosf(x), OUT(2) = tanf(x), OUT(3) = expf(x), OUT(4) = exp2f(x), OUT(5) = exp10f(x), OUT(6) = expm1f(x);
    OUT(7) = logf(p), OUT(8) = log2f(p), OUT(9) = log10f(p), OUT(10) = log1pf(p), OUT(11) = powf(p, y), OUT(12) = tanhf(x);
    OUT(13) = erff(x), OUT(14) = erfcf(x), OUT(15) = rsqrtf(p), OUT(16) = sqrtf(p), OUT(17) = cbrtf(x), OUT(18) = hypotf(x, y);
    OUT(19) = floorf(x), OUT(20) = ceilf(x), OUT(21) = truncf(x), OUT(22) = rintf(x), OUT(23) = roundf(x), OUT(24) = fmodf(x, y);
    OUT(25) = copysignf(x, y), OUT(26) = atan2f(x, y), OUT(27) = asinf(x), OUT(28) = sinhf(x), OUT(29) = lgammaf(p);
    OUT(30) = fdimf(x, y), OUT(31) = nextafterf(x, y), OUT(32) = ldexpf(x, 5), OUT(33) = frexpf(x, &exponent), OUT(34) = exponent;
    OUT(35) = modff(x, &whole), OUT(36) = whole, OUT(37) = remquof(x, y, &quotient), OUT(38) = quotient & 7;
    sincosf(x, &sine, &cosine);
    OUT(39) = sine, OUT(40) = cosine, OUT(41) = (float)lrintf(x), OUT(42) = (float)ilogbf(x), OUT(43) = normcdff(x);
}

// The approximate instructions by name.
extern "C" __global__ void float_intrinsics(const float* a, const float* b, float* out, int n) {
    INDEX;
    float x = a[i], y = b[i], p = fabsf(x);
    OUT(0) = __sinf(x), OUT(1) = __cosf(x), OUT(2) = __tanf(x), OUT(3) = __expf(x), OUT(4) = __exp10f(x), OUT(5) = __logf(p);
    OUT(6) = __log2f(p), OUT(7) = __log10f(p), OUT(8) = __powf(p, y), OUT(9) = __fdividef(x, y), OUT(10) = rsqrtf(p);
    float result;
#define APPROXIMATE(K, INSTRUCTION, X)                                     \
    asm(INSTRUCTION " %0, %1;" : "=f"(result) : "f"(X));                   \
    OUT(K) = result
    APPROXIMATE(11, "ex2.approx.f32", x);
    APPROXIMATE(12, "ex2.approx.ftz.f32", x);
    APPROXIMATE(13, "lg2.approx.f32", p);
    APPROXIMATE(14, "lg2.approx.ftz.f32", p);
    APPROXIMATE(15, "rcp.approx.f32", x);
    APPROXIMATE(16, "rcp.approx.ftz.f32", x);
    APPROXIMATE(17, "sqrt.approx.f32", p);
    APPROXIMATE(18, "sqrt.approx.ftz.f32", p);
    APPROXIMATE(19, "rsqrt.approx.f32", p);
    APPROXIMATE(20, "rsqrt.approx.ftz.f32", p);
    APPROXIMATE(21, "sin.approx.f32", x);
    APPROXIMATE(22, "cos.approx.ftz.f32", x);
    APPROXIMATE(23, "tanh.approx.f32", x);
    asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
    OUT(24) = result;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
    OUT(25) = result;
}

extern "C" __global__ void double_math(const double* a, const double* b, double* out, int n) {
    INDEX;
    double x = a[i], y = b[i], p = fabs(x);
    OUT(0) = sqrt(p), OUT(1) = x / y, OUT(2) = exp(x), OUT(3) = log(p), OUT(4) = pow(p, y), OUT(5) = tanh(x), OUT(6) = erf(x);
    OUT(7) = rsqrt(p), OUT(8) = floor(x), OUT(9) = ceil(x), OUT(10) = trunc(x), OUT(11) = rint(x), OUT(12) = round(x);
    OUT(13) = fmod(x, y), OUT(14) = copysign(x, y), OUT(15) = cbrt(x), OUT(16) = exp2(x), OUT(17) = log2(p), OUT(18) = atan(x);
    OUT(19) = fma(x, y, x), OUT(20) = __longlong_as_double(__double_as_longlong(x) ^ 1);
}

extern "C" __global__ void integer_intrinsics(const unsigned* a, const unsigned* b, unsigned* out, int n) {
    INDEX;
    unsigned x = a[i], y = b[i];
    int s = (int)x, t = (int)y;
    OUT(0) = __clz(s), OUT(1) = __popc(x), OUT(2) = __brev(x), OUT(3) = __ffs(s), OUT(4) = __byte_perm(x, y, x >> 16);
    OUT(5) = __byte_perm(x, y, 0x5140), OUT(6) = __funnelshift_l(x, y, y), OUT(7) = __funnelshift_r(x, y, y);
    OUT(8) = __funnelshift_lc(x, y, y), OUT(9) = __funnelshift_rc(x, y, y);
    OUT(10) = __mulhi(s, t), OUT(11) = __umulhi(x, y), OUT(12) = __dp4a(s, t, s), OUT(13) = __dp4a(x, y, x);
    OUT(14) = __dp2a_lo(s, t, s), OUT(15) = __dp2a_hi(s, t, s), OUT(16) = __dp2a_lo(x, y, x), OUT(17) = __dp2a_hi(x, y, x);
    OUT(18) = __hadd(s, t), OUT(19) = __rhadd(s, t), OUT(20) = __uhadd(x, y);
    OUT(21) = abs(s), OUT(22) = min(s, t), OUT(23) = max(s, t), OUT(24) = min(x, y), OUT(25) = max(x, y);
    OUT(26) = (x << (y & 31)) | (x >> (32 - (y & 31) & 31)), OUT(27) = (x & 0xff00) >> 8, OUT(28) = (int)(x << 12) >> 20;
    OUT(29) = (x & y) | (~x & t), OUT(30) = x ^ y ^ (unsigned)i;
}

extern "C" __global__ void wide_intrinsics(const unsigned long long* a, const unsigned long long* b, unsigned long long* out, int n) {
    INDEX;
    unsigned long long x = a[i], y = b[i];
    long long s = (long long)x, t = (long long)y;
    OUT(0) = __clzll(s), OUT(1) = __popcll(x), OUT(2) = __brevll(x), OUT(3) = __ffsll(s), OUT(4) = __mul64hi(s, t);
    OUT(5) = __umul64hi(x, y), OUT(6) = min(s, t), OUT(7) = max(x, y), OUT(8) = x >> (y & 63), OUT(9) = s >> (y & 63);
    OUT(10) = (unsigned long long)(unsigned)x * (unsigned)y, OUT(11) = (long long)(int)x * (int)y, OUT(12) = llabs(s);
    OUT(13) = x * y + x, OUT(14) = x << (y & 63);
}

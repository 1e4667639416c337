// One thread per element, and loops over a grid: the plainest address arithmetic, in every number type.

extern "C" __global__ void vector_add(const float* a, const float* b, float* c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

extern "C" __global__ void saxpy(int n, float alpha, const float* x, float* y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = alpha * x[i] + y[i];
}

// Any grid covers any n.
extern "C" __global__ void saxpy_grid_stride(size_t n, float alpha, const float* __restrict__ x, float* __restrict__ y) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) y[i] = alpha * x[i] + y[i];
}

extern "C" __global__ void daxpy(int n, double alpha, const double* x, double* y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = alpha * x[i] + y[i];
}

// y[i] = x[i * stride + offset], a negative stride included.
extern "C" __global__ void gather_strided(const int* x, int* y, int n, long long stride, long long offset) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i * stride + offset];
}

// out holds 8 values per element: sum, difference, product, quotient, remainder, and, xor, shift.
#define INTEGER_ARITHMETIC(NAME, T)                                                             \
    extern "C" __global__ void arithmetic_##NAME(const T* a, const T* b, T* out, int n) {       \
        int i = blockIdx.x * blockDim.x + threadIdx.x;                                          \
        if (i >= n) return;                                                                     \
        T x = a[i], y = b[i];                                                                   \
        T* to = out + 8 * i;                                                                    \
        to[0] = (T)(x + y);                                                                     \
        to[1] = (T)(x - y);                                                                     \
        to[2] = (T)(x * y);                                                                     \
        to[3] = y != 0 ? (T)(x / y) : (T)0;                                                     \
        to[4] = y != 0 ? (T)(x % y) : (T)0;                                                     \
        to[5] = (T)(x & y);                                                                     \
        to[6] = (T)(x ^ ~y);                                                                    \
        to[7] = (T)((x << (y & 7)) | (x >> (y & 3)));                                           \
    }
INTEGER_ARITHMETIC(s8, signed char)
INTEGER_ARITHMETIC(u8, unsigned char)
INTEGER_ARITHMETIC(s16, short)
INTEGER_ARITHMETIC(u16, unsigned short)
INTEGER_ARITHMETIC(s32, int)
INTEGER_ARITHMETIC(u32, unsigned)
INTEGER_ARITHMETIC(s64, long long)
INTEGER_ARITHMETIC(u64, unsigned long long)

// out holds 7 values per element: sum, difference, product, quotient, fused a*b+a, minimum, maximum.
#define FLOAT_ARITHMETIC(NAME, T, FMA, MIN, MAX)                                                \
    extern "C" __global__ void arithmetic_##NAME(const T* a, const T* b, T* out, int n) {       \
        int i = blockIdx.x * blockDim.x + threadIdx.x;                                          \
        if (i >= n) return;                                                                     \
        T x = a[i], y = b[i];                                                                   \
        T* to = out + 7 * i;                                                                    \
        to[0] = x + y;                                                                          \
        to[1] = x - y;                                                                          \
        to[2] = x * y;                                                                          \
        to[3] = x / y;                                                                          \
        to[4] = FMA(x, y, x);                                                                   \
        to[5] = MIN(x, y);                                                                      \
        to[6] = MAX(x, y);                                                                      \
    }
FLOAT_ARITHMETIC(f32, float, fmaf, fminf, fmaxf)
FLOAT_ARITHMETIC(f64, double, fma, fmin, fmax)

// Six bits per element, from bit 0: <, <=, ==, !=, >, >=; bit 6: x is NaN; bit 7: x is infinite. NaN is unordered.
#define COMPARE(NAME, T, NAN_BIT, INF_BIT)                                                                      \
    extern "C" __global__ void compare_##NAME(const T* a, const T* b, unsigned* out, int n) {                   \
        int i = blockIdx.x * blockDim.x + threadIdx.x;                                                          \
        if (i >= n) return;                                                                                     \
        T x = a[i], y = b[i];                                                                                   \
        out[i] = (x < y) | (x <= y) << 1 | (x == y) << 2 | (x != y) << 3 | (x > y) << 4 | (x >= y) << 5 |       \
                 (NAN_BIT) << 6 | (INF_BIT) << 7;                                                               \
    }
COMPARE(s32, int, 0, 0)
COMPARE(u32, unsigned, 0, 0)
COMPARE(s64, long long, 0, 0)
COMPARE(u64, unsigned long long, 0, 0)
COMPARE(s16, short, 0, 0)
COMPARE(u8, unsigned char, 0, 0)
COMPARE(f32, float, (isnan(x) ? 1 : 0), (isinf(x) ? 1 : 0))
COMPARE(f64, double, (isnan(x) ? 1 : 0), (isinf(x) ? 1 : 0))

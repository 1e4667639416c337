// Functions that are not inlined: plain, recursive, with structures in and out, and mutually recursive.

__device__ __noinline__ float polynomial(float x, float a, float b) { return (a * x + b) * x; }

__device__ __noinline__ unsigned factorial(unsigned n) {
    unsigned below = n <= 1 ? 1 : n * factorial(n - 1);
    return below;
}

__device__ __noinline__ unsigned long long fibonacci(unsigned n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }

__device__ __noinline__ bool is_odd(unsigned n);
__device__ __noinline__ bool is_even(unsigned n) { return n == 0 ? true : is_odd(n - 1); }
__device__ __noinline__ bool is_odd(unsigned n) { return n == 0 ? false : is_even(n - 1); }

struct Range {
    double low, high;
    int count;
    unsigned char tag;
};
__device__ __noinline__ Range widen(Range range, double by) {
    range.low -= by, range.high += by, range.count++, range.tag ^= 0x55;
    return range;
}

__device__ __noinline__ void add_to(int* where, int value) { *where += value; }

// A deep frame: each level has its own array.
__device__ __noinline__ int sum_digits(int depth, int seed) {
    int digits[10];
    for (int k = 0; k < 10; k++) digits[k] = (seed + k * depth) % 10;
    int below = depth > 0 ? sum_digits(depth - 1, digits[seed % 10] + depth) : 0;
    return below + digits[(seed + depth) % 10];
}

extern "C" __global__ void call_plain(const float* x, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = polynomial(x[i], 2.0f, 3.0f) + polynomial(-x[i], 1.0f, (float)i);
}

// Lanes recurse to different depths.
extern "C" __global__ void call_recursive(unsigned* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[4 * i] = factorial(i % 13);
    out[4 * i + 1] = (unsigned)fibonacci(i % 9);
    out[4 * i + 2] = is_even(i);
    out[4 * i + 3] = sum_digits(i % 7, i);
}

extern "C" __global__ void call_with_structure(const double* x, double* out) {
    int i = threadIdx.x;
    Range range = {x[i], x[i] + 1.0, i, (unsigned char)i};
    range = widen(range, 0.5);
    range = widen(range, x[i]);
    out[4 * i] = range.low, out[4 * i + 1] = range.high, out[4 * i + 2] = range.count, out[4 * i + 3] = range.tag;
}

// At most 64 threads: out[i] grows by 3 i + 12.
extern "C" __global__ void call_by_reference(int* out) {
    int i = threadIdx.x, local = i;
    __shared__ int shared[64];
    shared[i & 63] = 2 * i;
    add_to(&local, 5);
    add_to(&shared[i & 63], 7);
    add_to(&out[i], local + shared[i & 63]);
}

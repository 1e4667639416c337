// printf with every kind of format, its return value, and assert.

extern "C" __global__ void print_formats(int* returned) {
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    int n = 0;
    n += printf("plain text, a percent sign %%\n");
    n += printf("%d|%5d|%-5d|%05d|%+d|% d\n", -42, 42, 42, 42, 42, 42);
    n += printf("%i %u %o %x %X %#x %#o\n", -1, 4000000000u, 8, 0xbeef, 0xbeef, 255, 8);
    n += printf("%hd %hhd %ld %lld %lu %llu %zu\n", (short)-3, (signed char)-4, -5L, -6LL, 7UL, 18446744073709551615ULL, sizeof(int));
    n += printf("%f|%10.3f|%-10.2f|%e|%.2E|%g|%G\n", 1.5, 3.14159, 2.5, 12345.678, 0.00012, 1e-5, 1e20);
    n += printf("%a %f %f %f\n", 1.0, __int_as_float(0x7f800000), __int_as_float(0xff800000), -0.0);
    n += printf("%c%c %s|%10s|%-6s|%.2s\n", 'o', 'k', "string", "right", "left", "cut");
    n += printf("%*d|%.*f\n", 6, 7, 2, 1.23456);
    n += printf("%p\n", (void*)0x1234);
    *returned = n;
}

// One line per thread, in any order.
extern "C" __global__ void print_threads() {
    printf("block %u thread %u\n", blockIdx.x, threadIdx.x);
}

// More arguments than fit in registers.
extern "C" __global__ void print_many(const double* x) {
    if (threadIdx.x == 0) printf("%g %g %g %g %g %g %g %g %d\n", x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], 8);
}

// Succeeds if every value is below the limit; otherwise the kernel stops with an assertion failure.
extern "C" __global__ void assert_below(const int* values, int limit) {
    assert(values[blockIdx.x * blockDim.x + threadIdx.x] < limit);
}

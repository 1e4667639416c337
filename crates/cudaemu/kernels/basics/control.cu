// Control flow: switches, loops that lanes leave at different times, early returns, locks, clocks and sleeping.

// A dense switch.
extern "C" __global__ void switch_dense(const int* what, int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int value = i;
    switch (what[i]) {
    case 0: value = value * 3 + 1; break;
    case 1: value = value / 7; break;
    case 2: value = __popc(value); break;
    case 3: value = -value; [[fallthrough]];
    case 4: value ^= 0x5555; break;
    case 5: for (int k = 0; k < i % 5; k++) value += k * value; break;
    case 6: value = value % 11; break;
    case 7: value = out[i] + 1; break;
    case 8: value = value << (value & 3); break;
    case 9: return;
    default: value = -1;
    }
    out[i] = value;
}

// Steps until the Collatz sequence of i + 1 reaches 1: the lanes leave the loop at different times.
extern "C" __global__ void collatz(unsigned* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned steps = 0;
    for (unsigned long long value = i + 1; value != 1; steps++) value = value & 1 ? 3 * value + 1 : value / 2;
    out[i] = steps;
}

// Nested loops with break and continue: the number of primes below limits[i].
extern "C" __global__ void count_primes(const int* limits, int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int count = 0;
    for (int candidate = 2;; candidate++) {
        if (candidate >= limits[i]) break;
        bool prime = true;
        for (int divisor = 2; divisor * divisor <= candidate; divisor++) {
            if (candidate % divisor) continue;
            prime = false;
            break;
        }
        if (!prime) continue;
        count++;
    }
    out[i] = count;
}

// Short-circuit conditions: `values` may be read only where the index is in range.
extern "C" __global__ void short_circuit(const int* values, const int* indices, int n, int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int at = indices[i];
    out[i] = (at >= 0 && at < n && values[at] > 0) || at == -7;
}

// The kernel stops with an error where a value is negative.
extern "C" __global__ void trap_on_negative(const int* values) {
    if (values[blockIdx.x * blockDim.x + threadIdx.x] < 0) __trap();
}

// Threads with odd numbers leave by exit; the rest write 1.
extern "C" __global__ void exit_odd(int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i & 1) asm volatile("exit;");
    out[i] = 1;
}

// out[0] = 1 where both clocks and the timer moved forward over a sleep.
extern "C" __global__ void clocks(int* out) {
    unsigned long long ticks = clock64();
    unsigned short_ticks = clock();
    unsigned long long time, later;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(later));
    out[threadIdx.x] = clock64() > ticks && clock() != short_ticks && later >= time;
}

// A lock that every thread takes once. Needs the independent progress of diverged lanes that targets from 70 promise.
extern "C" __global__ void lock_per_thread(int* lock, volatile int* total) {
    bool done = false;
    while (!done) {
        if (atomicCAS(lock, 0, 1) == 0) {
            *total = *total + 1;
            __threadfence();
            atomicExch(lock, 0);
            done = true;
        }
    }
}

// Block 1 waits for what block 0 writes: needs both to be resident (launch it with two blocks).
extern "C" __global__ void wait_for_other_block(volatile int* flag, volatile int* value, int* out) {
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) {
            *value = 42;
            __threadfence();
            *flag = 1;
        }
    } else if (threadIdx.x == 0) {
        while (*flag == 0) __nanosleep(20);
        __threadfence();
        out[0] = *value;
    }
}

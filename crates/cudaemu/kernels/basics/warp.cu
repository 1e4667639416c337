// Communication within a warp: shuffles, votes, reductions and the mask of active lanes.

#define WHERE                                         \
    int i = blockIdx.x * blockDim.x + threadIdx.x;    \
    [[maybe_unused]] int lane = threadIdx.x & 31

#define SHUFFLES(NAME, T)                                                                            \
    extern "C" __global__ void shuffle_##NAME(const T* in, T* out) {                                 \
        WHERE;                                                                                       \
        T value = in[i];                                                                             \
        T* to = out + 8 * i;                                                                         \
        to[0] = __shfl_sync(0xffffffff, value, 5);                                                   \
        to[1] = __shfl_sync(0xffffffff, value, lane * 7, 16);                                        \
        to[2] = __shfl_up_sync(0xffffffff, value, 3);                                                \
        to[3] = __shfl_up_sync(0xffffffff, value, 1, 8);                                             \
        to[4] = __shfl_down_sync(0xffffffff, value, 3);                                              \
        to[5] = __shfl_down_sync(0xffffffff, value, 2, 4);                                           \
        to[6] = __shfl_xor_sync(0xffffffff, value, 1);                                               \
        to[7] = __shfl_xor_sync(0xffffffff, value, 20, 16);                                          \
    }
SHUFFLES(s32, int)
SHUFFLES(f32, float)
SHUFFLES(u64, unsigned long long)
SHUFFLES(f64, double)

// Whether the lane read from exists, which only assembly can see: bit 0 up, bit 1 down, bit 2 indexed.
extern "C" __global__ void shuffle_in_range(unsigned* out) {
    WHERE;
    unsigned up, down, indexed;
    asm volatile("{ .reg .pred p; .reg .b32 t; shfl.sync.up.b32 t|p, %1, 4, 0x1000, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(up) : "r"(lane));
    asm volatile("{ .reg .pred p; .reg .b32 t; shfl.sync.down.b32 t|p, %1, 9, 31, -1; selp.u32 %0, 1, 0, p; }" : "=r"(down) : "r"(lane));
    asm volatile("{ .reg .pred p; .reg .b32 t; shfl.sync.idx.b32 t|p, %1, %2, 0x181f, -1; selp.u32 %0, 1, 0, p; }" : "=r"(indexed) : "r"(lane), "r"(lane + 2));
    out[i] = up | down << 1 | indexed << 2;
}

// Only the lanes of the mask execute the shuffle; the others execute other code meanwhile.
extern "C" __global__ void shuffle_part(const int* in, int* out) {
    WHERE;
    int value = in[i];
    if (lane % 4 == 1) value += __shfl_xor_sync(0x22222222, value, 8);
    else value -= 1;
    out[i] = value;
}

extern "C" __global__ void votes(const int* in, unsigned* out) {
    WHERE;
    bool holds = in[i] > 0;
    unsigned* to = out + 8 * i;
    to[0] = __any_sync(0xffffffff, holds);
    to[1] = __all_sync(0xffffffff, holds);
    to[2] = __ballot_sync(0xffffffff, holds);
    to[3] = __uni_sync(0xffffffff, holds);
    to[4] = 0;
    if (holds) to[4] = __activemask();
    __syncwarp();
    to[5] = __ballot_sync(0xffffffff, !holds && lane > 15);
    if (lane < 16) {
        to[6] = __ballot_sync(0x0000ffff, holds);
        to[7] = __popc(__activemask());
    } else {
        to[6] = __any_sync(0xffff0000, holds);
        to[7] = __all_sync(0xffff0000, holds);
    }
}

// Sum, largest and first over a warp, by shuffles.
extern "C" __global__ void warp_reduce(const float* in, float* out) {
    WHERE;
    float sum = in[i], largest = in[i];
    for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, step);
        largest = fmaxf(largest, __shfl_down_sync(0xffffffff, largest, step));
    }
    if (lane == 0) {
        out[2 * (i / 32)] = sum;
        out[2 * (i / 32) + 1] = largest;
    }
}

// Running sum over a warp.
extern "C" __global__ void warp_scan(const int* in, int* out) {
    WHERE;
    int sum = in[i];
    for (int step = 1; step < 32; step *= 2) {
        int below = __shfl_up_sync(0xffffffff, sum, step);
        if (lane >= step) sum += below;
    }
    out[i] = sum;
}

// Appends the positive values to a list with one atomic per warp: the active lanes elect a leader.
extern "C" __global__ void compact(const int* in, int n, int* out, int* count) {
    WHERE;
    if (i < n && in[i] > 0) {
        unsigned active = __activemask();
        int leader = __ffs(active) - 1, at = 0;
        if (lane == leader) at = atomicAdd(count, __popc(active));
        at = __shfl_sync(active, at, leader);
        out[at + __popc(active & ((1u << lane) - 1))] = in[i];
    }
}

extern "C" __global__ void warp_reduce_integers(const int* in, unsigned* out) {
    WHERE;
    int value = in[i];
    unsigned* to = out + 8 * i;
    to[0] = __reduce_add_sync(0xffffffff, value);
    to[1] = __reduce_add_sync(0xffffffff, (unsigned)value);
    to[2] = __reduce_min_sync(0xffffffff, value);
    to[3] = __reduce_min_sync(0xffffffff, (unsigned)value);
    to[4] = __reduce_max_sync(0xffffffff, value);
    to[5] = __reduce_max_sync(0xffffffff, (unsigned)value);
    to[6] = __reduce_or_sync(0xffffffff, (unsigned)value) ^ __reduce_xor_sync(0xffffffff, (unsigned)value);
    to[7] = lane < 8 ? __reduce_and_sync(0x000000ff, (unsigned)value) : __reduce_add_sync(0xffffff00, value);
}

// Neighbours exchange through shared memory with a warp barrier on each side.
extern "C" __global__ void exchange_by_shared(const int* in, int* out) {
    __shared__ int cells[1024];
    WHERE;
    int value = in[i];
    for (int round = 0; round < 5; round++) {
        cells[threadIdx.x] = value;
        __syncwarp();
        value += cells[threadIdx.x ^ (1 << round)];
        __syncwarp();
    }
    out[i] = value;
}

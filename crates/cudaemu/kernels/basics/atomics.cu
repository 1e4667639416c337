// Atomics of each kind and type, in global and shared memory, with and without use of the old value, in each scope.
// Every thread works on one of `slots` cells: cell = thread % slots.

#define WHERE int i = blockIdx.x * blockDim.x + threadIdx.x, cell = i % slots

// Global: results are only in memory, which the compiler turns into reductions.
#define REDUCE(NAME, T, CALL)                                                                             \
    extern "C" __global__ void reduce_##NAME(T* cells, const T* values, int slots) {                      \
        WHERE;                                                                                            \
        T* at = cells + cell;                                                                             \
        T value = values[i];                                                                              \
        CALL;                                                                                             \
    }
// Global: each thread keeps the old value that it saw.
#define FETCH(NAME, T, CALL)                                                                              \
    extern "C" __global__ void fetch_##NAME(T* cells, const T* values, T* old, int slots) {               \
        WHERE;                                                                                            \
        T* at = cells + cell;                                                                             \
        T value = values[i];                                                                              \
        old[i] = CALL;                                                                                    \
    }
// Shared: cells (at most 64) are copied in, worked on, and copied out by each block.
#define SHARED(NAME, T, CALL)                                                                             \
    extern "C" __global__ void shared_##NAME(T* cells, const T* values, T* old, int slots) {              \
        __shared__ T local[64];                                                                           \
        WHERE;                                                                                            \
        if (threadIdx.x < slots) local[threadIdx.x] = cells[blockIdx.x * slots + threadIdx.x];            \
        __syncthreads();                                                                                  \
        T* at = local + cell;                                                                             \
        T value = values[i];                                                                              \
        old[i] = CALL;                                                                                    \
        __syncthreads();                                                                                  \
        if (threadIdx.x < slots) cells[blockIdx.x * slots + threadIdx.x] = local[threadIdx.x];            \
    }
#define ALL(NAME, T, CALL) REDUCE(NAME, T, CALL) FETCH(NAME, T, CALL) SHARED(NAME, T, CALL)

ALL(add_s32, int, atomicAdd(at, value))
ALL(add_u32, unsigned, atomicAdd(at, value))
ALL(add_u64, unsigned long long, atomicAdd(at, value))
ALL(add_f32, float, atomicAdd(at, value))
ALL(add_f64, double, atomicAdd(at, value))
ALL(sub_s32, int, atomicSub(at, value))
ALL(min_s32, int, atomicMin(at, value))
ALL(min_u32, unsigned, atomicMin(at, value))
ALL(min_s64, long long, atomicMin(at, value))
ALL(min_u64, unsigned long long, atomicMin(at, value))
ALL(max_s32, int, atomicMax(at, value))
ALL(max_u32, unsigned, atomicMax(at, value))
ALL(max_s64, long long, atomicMax(at, value))
ALL(max_u64, unsigned long long, atomicMax(at, value))
ALL(and_u32, unsigned, atomicAnd(at, value))
ALL(and_u64, unsigned long long, atomicAnd(at, value))
ALL(or_u32, unsigned, atomicOr(at, value))
ALL(or_u64, unsigned long long, atomicOr(at, value))
ALL(xor_u32, unsigned, atomicXor(at, value))
ALL(xor_u64, unsigned long long, atomicXor(at, value))
ALL(inc_u32, unsigned, atomicInc(at, value))
ALL(dec_u32, unsigned, atomicDec(at, value))
ALL(exch_u32, unsigned, atomicExch(at, value))
ALL(exch_f32, float, atomicExch(at, value))
ALL(exch_u64, unsigned long long, atomicExch(at, value))
// Where the cell is 0 it becomes the value.
ALL(cas_u32, unsigned, atomicCAS(at, 0u, value))
ALL(cas_u64, unsigned long long, atomicCAS(at, 0ull, value))

// Scopes other than the device.
FETCH(add_block_u32, unsigned, atomicAdd_block(at, value))
FETCH(add_system_u32, unsigned, atomicAdd_system(at, value))
FETCH(max_block_s32, int, atomicMax_block(at, value))
FETCH(cas_system_u64, unsigned long long, atomicCAS_system(at, 0ull, value))
FETCH(add_block_f32, float, atomicAdd_block(at, value))

// The largest float by a loop of compare and swap.
extern "C" __global__ void max_f32_by_cas(float* cells, const float* values, int slots) {
    WHERE;
    unsigned* at = (unsigned*)(cells + cell);
    unsigned seen = *at;
    while (__uint_as_float(seen) < values[i]) {
        unsigned before = atomicCAS(at, seen, __float_as_uint(values[i]));
        if (before == seen) break;
        seen = before;
    }
}

// An address that may be global or shared: the generic form.
extern "C" __global__ void generic_add(int* cells, int* out) {
    __shared__ int local;
    if (threadIdx.x == 0) local = 0;
    __syncthreads();
    int* at = threadIdx.x % 2 ? &local : cells;
    atomicAdd(at, (int)threadIdx.x);
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = local;
}

// Memory orders: 0 in `data` is seen neither after the flag was acquired nor after the fences.
extern "C" __global__ void message_passing(int* data, int* flag, int* out) {
    if (blockIdx.x == 0) {
        if (threadIdx.x != 0) return;
        asm volatile("st.relaxed.gpu.global.u32 [%0], 7;" ::"l"(data) : "memory");
        asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        asm volatile("fence.sc.sys;" ::: "memory");
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(flag) : "memory");
    } else if (threadIdx.x == 0) {
        int seen, value;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        } while (seen != 2);
        asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(data) : "memory");
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(seen) : "l"(flag) : "memory");
        out[0] = value;
        out[1] = seen;
        __threadfence_block();
        __threadfence();
        __threadfence_system();
    }
}

// The compiler's own atomics with an order and a scope.
extern "C" __global__ void ordered_builtins(unsigned* cells, unsigned* out) {
    unsigned i = threadIdx.x;
    unsigned value;
    __nv_atomic_fetch_add(cells, i, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_DEVICE);
    out[i] = __nv_atomic_fetch_or(cells + 1, 1u << (i & 31), __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_BLOCK);
    __nv_atomic_store_n(cells + 2 + i, i, __NV_ATOMIC_RELEASE, __NV_THREAD_SCOPE_DEVICE);
    value = __nv_atomic_load_n(cells + 2 + i, __NV_ATOMIC_ACQUIRE, __NV_THREAD_SCOPE_SYSTEM);
    out[i] += value;
}

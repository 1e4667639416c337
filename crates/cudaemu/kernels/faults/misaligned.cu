// Fault: an address that is not a multiple of the access size. `bytes` is aligned to 256; `offset` is in bytes, a multiple of
// the size for the clean run: one kernel serves both.

#define MISALIGNED(NAME, T)                                                                              \
    extern "C" __global__ void misaligned_read_##NAME(const char* bytes, T* out, int offset) {           \
        out[threadIdx.x] = *(const T*)(bytes + offset + threadIdx.x * sizeof(T));                        \
    }                                                                                                    \
    extern "C" __global__ void misaligned_write_##NAME(char* bytes, const T* in, int offset) {           \
        *(T*)(bytes + offset + threadIdx.x * sizeof(T)) = in[threadIdx.x];                               \
    }
MISALIGNED(u16, unsigned short)
MISALIGNED(u32, unsigned)
MISALIGNED(u64, unsigned long long)
MISALIGNED(v4_u32, uint4)

extern "C" __global__ void misaligned_shared(int* out, int offset) {
    __shared__ __align__(16) char bytes[4 * 64 + 16];
    *(int*)(bytes + offset + 4 * threadIdx.x) = threadIdx.x;
    out[threadIdx.x] = *(int*)(bytes + offset + 4 * threadIdx.x);
}

extern "C" __global__ void misaligned_atomic(char* bytes, int offset) { atomicAdd((int*)(bytes + offset), 1); }

// Copies n elements in every width and vector form, by plain, read-only, cached and volatile accesses.

#define COPY(NAME, T)                                                          \
    extern "C" __global__ void copy_##NAME(const T* from, T* to, int n) {      \
        int i = blockIdx.x * blockDim.x + threadIdx.x;                         \
        if (i < n) to[i] = from[i];                                            \
    }
COPY(u8, unsigned char)
COPY(s8, signed char)
COPY(u16, unsigned short)
COPY(u32, unsigned)
COPY(f32, float)
COPY(u64, unsigned long long)
COPY(f64, double)
COPY(v2_u8, uchar2)
COPY(v4_u8, uchar4)
COPY(v2_u16, ushort2)
COPY(v4_u16, ushort4)
COPY(v2_u32, uint2)
COPY(v4_u32, uint4)
COPY(v2_f32, float2)
COPY(v4_f32, float4)
COPY(v2_u64, ulonglong2)
COPY(v2_f64, double2)

// Loads that may pass through the read-only cache.
#define COPY_READ_ONLY(NAME, T)                                                                            \
    extern "C" __global__ void copy_ldg_##NAME(const T* __restrict__ from, T* __restrict__ to, int n) {    \
        int i = blockIdx.x * blockDim.x + threadIdx.x;                                                     \
        if (i < n) to[i] = __ldg(from + i);                                                                \
    }
COPY_READ_ONLY(u8, unsigned char)
COPY_READ_ONLY(u16, unsigned short)
COPY_READ_ONLY(u32, unsigned)
COPY_READ_ONLY(u64, unsigned long long)
COPY_READ_ONLY(f32, float)
COPY_READ_ONLY(f64, double)
COPY_READ_ONLY(v2_u32, uint2)
COPY_READ_ONLY(v4_f32, float4)
COPY_READ_ONLY(v4_u8, uchar4)
COPY_READ_ONLY(v2_u64, ulonglong2)

#define COPY_CACHED(NAME, LOAD, STORE)                                                                    \
    extern "C" __global__ void copy_##NAME(const unsigned* from, unsigned* to, int n) {                   \
        int i = blockIdx.x * blockDim.x + threadIdx.x;                                                    \
        if (i < n) STORE(to + i, LOAD(from + i));                                                         \
    }                                                                                                     \
    extern "C" __global__ void copy_##NAME##_v4(const float4* from, float4* to, int n) {                  \
        int i = blockIdx.x * blockDim.x + threadIdx.x;                                                    \
        if (i < n) STORE(to + i, LOAD(from + i));                                                         \
    }
COPY_CACHED(streaming, __ldcs, __stcs)
COPY_CACHED(l2_only, __ldcg, __stcg)
COPY_CACHED(all_levels, __ldca, __stwb)
COPY_CACHED(last_use, __ldlu, __stwt)
COPY_CACHED(uncached, __ldcv, __stwt)

extern "C" __global__ void copy_volatile(const volatile unsigned* from, volatile unsigned* to, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = from[i];
}

// A structure whose size is not a power of two: the compiler splits it.
struct Record {
    unsigned key;
    unsigned short flags;
    unsigned char kind;
    double weight;
    float coordinates[3];
};
extern "C" __global__ void copy_records(const Record* from, Record* to, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = from[i];
}

// Bytes to words and back: memcpy by hand and by built-in.
extern "C" __global__ void copy_bytes(const unsigned char* from, unsigned char* to, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i * 16 + 16 <= n) memcpy(to + i * 16, from + i * 16, 16);
}

extern "C" __global__ void fill_bytes(unsigned char* to, int value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i * 16 + 16 <= n) memset(to + i * 16, value, 16);
}

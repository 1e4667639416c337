// Every state space: module-wide constants and variables with initial values, static and dynamic shared memory, local
// arrays, generic pointers that turn out to be any of them, and parameters of every kind.

__constant__ float coefficients[4] = {1.0f, -2.0f, 0.5f, 4.0f};
__constant__ int settings[8];  // filled by the host, through the module's global "settings"
__device__ unsigned table[16] = {1, 1, 2, 3, 5, 8, 13, 21};
__device__ double scale = 2.5;
__device__ unsigned counter;
__device__ char text[] = "warp";

// out[i] = c0 + c1 x + c2 x^2 + c3 x^3
extern "C" __global__ void constant_polynomial(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = 0;
    for (int k = 3; k >= 0; k--) sum = sum * x[i] + coefficients[k];
    out[i] = sum;
}

// out[i] = settings[i % 8] + i
extern "C" __global__ void constant_from_host(int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = settings[i & 7] + i;
}

// out[0..16) = table, out[16..20) = "warp"; counter goes up by one per thread.
extern "C" __global__ void device_globals(unsigned* out, double* scaled) {
    int i = threadIdx.x;
    if (i < 16) out[i] = table[i];
    if (i < 4) out[16 + i] = text[i];
    scaled[i] = scale * i;
    atomicAdd(&counter, 1);
}

// Each block reverses its 256 elements.
extern "C" __global__ void shared_static_reverse(const float* in, float* out) {
    __shared__ float tile[256];
    int i = threadIdx.x;
    tile[i] = in[blockIdx.x * 256 + i];
    __syncthreads();
    out[blockIdx.x * 256 + i] = tile[255 - i];
}

// As above for blockDim.x elements; dynamic shared memory holds floats and, behind them, their indices as bytes.
extern "C" __global__ void shared_dynamic_reverse(const float* in, float* out) {
    extern __shared__ float dynamic[];
    unsigned char* index = (unsigned char*)(dynamic + blockDim.x);
    int i = threadIdx.x;
    dynamic[i] = in[blockIdx.x * blockDim.x + i];
    index[i] = (unsigned char)(blockDim.x - 1 - i);
    __syncthreads();
    out[blockIdx.x * blockDim.x + i] = dynamic[index[i]];
}

// A local array indexed by data: out[i] = the (i % 16)th value after sorting 16 of them by insertion.
extern "C" __global__ void local_sort(const int* in, int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int values[16];
    for (int k = 0; k < 16; k++) values[k] = in[i * 16 + k];
    for (int k = 1; k < 16; k++) {
        int value = values[k], at = k;
        for (; at > 0 && values[at - 1] > value; at--) values[at] = values[at - 1];
        values[at] = value;
    }
    out[i] = values[in[i * 16] & 15];
}

__device__ __noinline__ int sum_of(const int* values, int n) {
    int sum = 0;
    for (int k = 0; k < n; k++) sum += values[k];
    return sum;
}

// The same function over global, shared and local memory, by generic pointers; i % 3 selects the result for out[i].
extern "C" __global__ void generic_pointers(const int* in, int* out) {
    __shared__ int shared[8];
    int local[8];
    int i = threadIdx.x;
    if (i < 8) shared[i] = in[i] * 10;
    for (int k = 0; k < 8; k++) local[(k + i) & 7] = in[k] * 100;
    __syncthreads();
    const int* chosen = i % 3 == 0 ? in : i % 3 == 1 ? shared : local;
    out[i] = sum_of(chosen, 8);
}

// The state space of an address: bit 0 global, 1 shared, 2 constant, 3 local.
__device__ unsigned space_of(const void* p) {
    return (__isGlobal(p) ? 1u : 0u) | (__isShared(p) ? 2u : 0u) | (__isConstant(p) ? 4u : 0u) | (__isLocal(p) ? 8u : 0u);
}
extern "C" __global__ void spaces_of_addresses(unsigned* out) {
    __shared__ int shared[2];
    int local[2];
    if (threadIdx.x < 2) shared[threadIdx.x] = 0;
    local[threadIdx.x & 1] = 0;
    const void* addresses[4] = {out, shared, coefficients, local};
    if (threadIdx.x < 4) out[threadIdx.x] = space_of(addresses[threadIdx.x]);
}

struct Pair {
    float first;
    unsigned char second;
};
struct Settings {
    long long offset;
    int steps[5];
    Pair pairs[3];
};

// Parameters of each width, and a structure by value with an array that is indexed by data.
extern "C" __global__ void parameters(signed char a, unsigned short b, int c, long long d, float e, double f, bool g,
                                      Settings settings, uint4 h, double* out) {
    int i = threadIdx.x;
    double sum = a + b + c + (double)d + e + f + (g ? 1000.0 : 0.0) + settings.offset;
    sum += settings.steps[i % 5] + settings.pairs[i % 3].first * settings.pairs[(i + 1) % 3].second;
    out[i] = sum + h.x + h.y + h.z + h.w;
}

// The special registers, 16 words per thread.
extern "C" __global__ void special_registers(unsigned* out) {
    unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    unsigned* to = out + 16 * (block * blockDim.x * blockDim.y * blockDim.z + thread);
    unsigned lane, warp, lt, le, eq, ge, gt, dynamic;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    asm("mov.u32 %0, %%warpid;" : "=r"(warp));
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(lt));
    asm("mov.u32 %0, %%lanemask_le;" : "=r"(le));
    asm("mov.u32 %0, %%lanemask_eq;" : "=r"(eq));
    asm("mov.u32 %0, %%lanemask_ge;" : "=r"(ge));
    asm("mov.u32 %0, %%lanemask_gt;" : "=r"(gt));
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(dynamic));
    to[0] = threadIdx.x, to[1] = threadIdx.y, to[2] = threadIdx.z;
    to[3] = blockIdx.x, to[4] = blockIdx.y, to[5] = blockIdx.z;
    to[6] = blockDim.x * blockDim.y * blockDim.z, to[7] = gridDim.x * gridDim.y * gridDim.z;
    to[8] = lane, to[9] = warp, to[10] = lt, to[11] = le, to[12] = eq, to[13] = ge, to[14] = gt, to[15] = dynamic;
}

// Launch bounds, which become directives of the kernel.
extern "C" __global__ void __launch_bounds__(128, 4) bounded(int* out) { out[blockIdx.x * 128 + threadIdx.x] = threadIdx.x; }

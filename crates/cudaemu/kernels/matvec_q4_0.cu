// y = A x for a matrix in q4_0 and an f32 vector. A q4_0 block has 32 weights in 18 bytes: an f16 scale d, then 16
// bytes; the low four bits of byte j are weight j, the high four bits weight j + 16, each d * (bits - 8). A row is
// columns / 32 q4_0 blocks; one warp computes one row, and each lane takes every 32nd q4_0 block. There is no bounds check:
// the number of rows must be a multiple of blockDim.x / 32.

#include <cuda_fp16.h>

struct BlockQ4 {
    half d;
    unsigned char quants[16];
};

// 32 values of the vector: value j is d * quants[j]. `d_and_sum` holds the scale d and d * (sum of the quants).
struct BlockQ8 {
    half2 d_and_sum;
    signed char quants[32];
};

__device__ float warp_sum(float value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffff, value, step);
    return value;
}

extern "C" __global__ void matvec_q4_0_f32(const BlockQ4* a, const float* x, float* y, int columns) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32, blocks = columns / 32;
    a += (size_t)row * blocks;
    float sum = 0;
    for (int i = lane; i < blocks; i += 32) {
        const float4* values = (const float4*)(x + 32 * i);
        float part = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float4 low = values[j], high = values[j + 4];
            const unsigned char* quants = a[i].quants + 4 * j;
            part += low.x * ((quants[0] & 15) - 8) + high.x * ((quants[0] >> 4) - 8);
            part += low.y * ((quants[1] & 15) - 8) + high.y * ((quants[1] >> 4) - 8);
            part += low.z * ((quants[2] & 15) - 8) + high.z * ((quants[2] >> 4) - 8);
            part += low.w * ((quants[3] & 15) - 8) + high.w * ((quants[3] >> 4) - 8);
        }
        sum += __half2float(a[i].d) * part;
    }
    sum = warp_sum(sum);
    if (lane == 0) y[row] = sum;
}

// One warp per block of 32 values; columns is a multiple of 32.
extern "C" __global__ void quantize_q8(const float* x, BlockQ8* out, int columns) {
    int block = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (block >= columns / 32) return;
    float value = x[32 * block + lane], largest = fabsf(value);
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
    float d = largest / 127.0f;
    int quant = d == 0.0f ? 0 : __float2int_rn(value / d);
    int total = quant;
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffff, total, step);
    out[block].quants[lane] = (signed char)quant;
    if (lane == 0) out[block].d_and_sum = __floats2half2_rn(d, d * total);
}

// Integer products, four at a time. The block's sum removes the offset of 8: sum((q - 8) v) = sum(q v) - 8 sum(v). The
// quants of q4_0 are only aligned to 2 bytes, so they are loaded as 16-bit integers.
extern "C" __global__ void matvec_q4_0_q8(const BlockQ4* a, const BlockQ8* x, float* y, int columns) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32, blocks = columns / 32;
    a += (size_t)row * blocks;
    float sum = 0;
    for (int i = lane; i < blocks; i += 32) {
        const unsigned short* pairs = (const unsigned short*)a[i].quants;
        const int* values = (const int*)x[i].quants;
        int dot = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            unsigned quants = pairs[2 * j] | (unsigned)pairs[2 * j + 1] << 16;
            dot = __dp4a((int)(quants & 0x0f0f0f0f), values[j], dot);
            dot = __dp4a((int)(quants >> 4 & 0x0f0f0f0f), values[j + 4], dot);
        }
        float2 scale = __half22float2(x[i].d_and_sum);
        sum += __half2float(a[i].d) * (scale.x * dot - 8.0f * scale.y);
    }
    sum = warp_sum(sum);
    if (lane == 0) y[row] = sum;
}

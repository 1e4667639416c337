// Softmax of each row of a matrix of `rows` x `columns`; one block of whole warps, or one warp, per row.
// The values are finite.

#define INFINITE __int_as_float(0x7f800000)

__device__ float warp_max(float value) {
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, step));
    return value;
}
__device__ float warp_sum(float value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffff, value, step);
    return value;
}

// Three passes: largest, sum of exponentials, quotient. A block per row.
extern "C" __global__ void softmax_block(const float* in, float* out, int columns) {
    __shared__ float warps[32];
    int t = threadIdx.x, count = blockDim.x / 32;
    in += (size_t)blockIdx.x * columns;
    out += (size_t)blockIdx.x * columns;
    float largest = -INFINITE;
    for (int i = t; i < columns; i += blockDim.x) largest = fmaxf(largest, in[i]);
    largest = warp_max(largest);
    if (t % 32 == 0) warps[t / 32] = largest;
    __syncthreads();
    largest = warp_max(t % 32 < count ? warps[t % 32] : -INFINITE);
    __syncthreads();
    float sum = 0;
    for (int i = t; i < columns; i += blockDim.x) {
        float value = expf(in[i] - largest);
        out[i] = value;
        sum += value;
    }
    sum = warp_sum(sum);
    if (t % 32 == 0) warps[t / 32] = sum;
    __syncthreads();
    float scale = 1.0f / warp_sum(t % 32 < count ? warps[t % 32] : 0.0f);
    for (int i = t; i < columns; i += blockDim.x) out[i] *= scale;
}

// One pass for largest and sum together, one for the result, with the fast exponential. A warp per row.
extern "C" __global__ void softmax_online(const float* in, float* out, int rows, int columns) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    in += (size_t)row * columns;
    out += (size_t)row * columns;
    float largest = -INFINITE, sum = 0;
    for (int i = lane; i < columns; i += 32) {
        float value = in[i], before = largest;
        largest = fmaxf(largest, value);
        sum = sum * __expf(before - largest) + __expf(value - largest);
    }
    float row_largest = warp_max(largest);
    sum = warp_sum(largest == -INFINITE ? 0.0f : sum * __expf(largest - row_largest));
    for (int i = lane; i < columns; i += 32) out[i] = __fdividef(__expf(in[i] - row_largest), sum);
}

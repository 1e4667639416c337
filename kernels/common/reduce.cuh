// Reductions over a warp and over a block, and rows that a team of threads keeps in registers between two passes.
//
// A team is one warp, or the threads of a block in x (a multiple of 32, at most 1024). All threads of the team must make each
// call, and all receive the same bits as the result.
#pragma once

// ---- warp

template <class T, class Op>
__device__ __forceinline__ T warp_reduce(T x, Op op) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) x = op(x, __shfl_xor_sync(0xffffffff, x, i));
    return x;
}

// ---- block

// `parts` is shared memory for the result of each warp (32 values); with blockDim.y > 1, each team has its own. The caller must
// separate two calls with the same `parts` by a barrier, or alternate between two arrays in consecutive calls. If
// blockDim.x == 32, each warp is a team, and the function uses neither `parts` nor a barrier. `none` is the neutral element:
// op(none, x) == x.
template <class T, class Op>
__device__ __forceinline__ T block_reduce(T x, T none, T *parts, Op op) {
    x = warp_reduce(x, op);
    if (blockDim.x == 32) return x;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) parts[warp] = x;
    __syncthreads();
    return warp_reduce(lane < blockDim.x / 32 ? parts[lane] : none, op);
}

// Sum of float or double.
template <class T>
__device__ __forceinline__ T block_sum(T x, T *parts) {
    return block_reduce(x, T(0), parts, [](T a, T b) { return a + b; });
}

// Maximum; NaN is ignored if there is any number.
__device__ __forceinline__ float block_max(float x, float *parts) {
    return block_reduce(x, -__int_as_float(0x7f800000), parts, [](float a, float b) { return fmaxf(a, b); });
}

// ---- rows in registers

// Each thread of the team holds N f32 values of a row, up to N * team elements in total. With VECTOR, the row is dense, its
// address and length are multiples of 16 bytes, and value 4 * i + j of thread t is element 4 * (t + i * team) + j: 16-byte
// accesses. Otherwise, element k is at byte k * step, and value i of thread t is element t + i * team. In both cases the
// accesses of a warp are coalesced.

template <bool VECTOR>
__device__ __forceinline__ unsigned kept_index(int i, unsigned t, unsigned team) {
    return VECTOR ? 4 * (t + i / 4 * team) + i % 4 : t + i * team;
}

// Loads a row of n elements; values past the end become `fill`.
template <bool VECTOR, int N>
__device__ __forceinline__ void load_kept(const unsigned char *row, unsigned long long step, unsigned n, unsigned t, unsigned team,
                                          float fill, float (&x)[N]) {
    if constexpr (VECTOR) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const unsigned k = kept_index<true>(i, t, team);
            const float4 four = k < n ? *(const float4 *)(row + 4ull * k) : make_float4(fill, fill, fill, fill);
            x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const unsigned k = kept_index<false>(i, t, team);
            x[i] = k < n ? *(const float *)(row + k * step) : fill;
        }
    }
}

// The inverse of load_kept: stores the n elements of the row.
template <bool VECTOR, int N>
__device__ __forceinline__ void store_kept(unsigned char *row, unsigned long long step, unsigned n, unsigned t, unsigned team,
                                           const float (&x)[N]) {
    if constexpr (VECTOR) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const unsigned k = kept_index<true>(i, t, team);
            if (k < n) *(float4 *)(row + 4ull * k) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const unsigned k = kept_index<false>(i, t, team);
            if (k < n) *(float *)(row + k * step) = x[i];
        }
    }
}


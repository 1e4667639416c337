// ALiBi: the slope of each head, for softmax and attention.
#pragma once

// The factor on the mask of query head `h` of `heads`, for max_bias > 0: 2^(-max_bias (h + 1) / steps) for the first `steps`
// heads (the greatest power of two), and the odd powers of half the step for those behind.
__device__ __forceinline__ float alibi_slope(float max_bias, unsigned heads, unsigned h) {
    const unsigned steps = 1u << (31 - __clz(heads));
    const float power = h < steps ? (float)(h + 1) : (float)(2 * (h - steps) + 1) * 0.5f;
    return exp2f(-max_bias * power / (float)steps);
}

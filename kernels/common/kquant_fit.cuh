// Least-squares fits of codes and two-level scales for blocks of 256 (K quants), with the algorithm of
// src/tensor/quant/kquant_fit.rs. Included by quants.cuh. First, each sub-block is fitted separately: from several starting
// scales, codes and scale are improved alternately. Then the scales are rounded to multiples of a common scale, which is
// refitted once to the resulting codes.
//
// Only the separate fits of the sub-blocks are stored between the steps; codes are recomputed from their scale to save
// registers.
#pragma once

// Number of starting scales per sub-block: code ranges from one step below the full range to one step above, in quarter steps.
constexpr int STARTS = 9;

__device__ __forceinline__ float start_range(int start, float top) { return __fadd_rn(top, (start - 4) * 0.25f); }

// Nearest integer, clamped to [low, high]; halves are rounded up.
__device__ __forceinline__ int nearest(float x, int low, int high) {
    return max(low, min(high, __float2int_rd(__fadd_rn(x, 0.5f))));
}

// Packs the codes of a sub-block as bytes of words.
template <int LEN>
__device__ __forceinline__ void pack_bytes(const int (&codes)[LEN], unsigned (&words)[LEN / 4]) {
#pragma unroll
    for (int w = 0; w < LEN / 4; w++) {
        words[w] = codes[4 * w] | codes[4 * w + 1] << 8 | codes[4 * w + 2] << 16 | codes[4 * w + 3] << 24;
    }
}

// Loads the values of sub-block s.
template <int LEN, class Get>
__device__ __forceinline__ void load_sub_block(const Get& x, int s, float (&values)[LEN]) {
#pragma unroll
    for (int l = 0; l < LEN; l++) values[l] = x(s * LEN + l);
}

// ---- affine types: d * scale * q - dmin * min, with no negative factor

// Computes the nearest codes; returns the sum of squared errors.
template <int TOP, int LEN>
__device__ __forceinline__ float affine_codes(const float (&values)[LEN], float scale, float min, int (&codes)[LEN]) {
    float by = inverse(scale), error = 0.0f;
#pragma unroll
    for (int l = 0; l < LEN; l++) {
        float q = mul_add(__fadd_rn(values[l], min), by, 0.5f);
        codes[l] = __float2int_rz(fminf(fmaxf(q, 0.0f), (float)TOP));
        float rest = __fsub_rn(__fsub_rn(__fmul_rn(scale, (float)codes[l]), min), values[l]);
        error = mul_add(rest, rest, error);
    }
    return error;
}

// Sums of the normal equations of x = scale * a - min * b, with integers a and b.
struct Sums {
    int aa = 0, ab = 0, bb = 0;
    double xa = 0.0, xb = 0.0;

    // The products are exact, so that the fused operations give the sums of the CPU.
    __device__ __forceinline__ void add(float x, int a, int b) {
        aa += a * a, ab += a * b, bb += b * b;
        xa = __fma_rn((double)x, (double)a, xa), xb = __fma_rn((double)x, (double)b, xb);
    }

    // Solves for the scale and the minimum of least squared error, with neither negative.
    __device__ __forceinline__ void solve(float& scale, float& min) const {
        double a = aa, m = ab, b = bb;
        double determinant = __dsub_rn(__dmul_rn(a, b), __dmul_rn(m, m));
        if (determinant >= 1.0) {
            double s = __ddiv_rn(__dsub_rn(__dmul_rn(xa, b), __dmul_rn(xb, m)), determinant);
            double t = __ddiv_rn(__dsub_rn(__dmul_rn(xa, m), __dmul_rn(xb, a)), determinant);
            if (s >= 0.0 && t >= 0.0) {
                scale = __double2float_rn(s), min = __double2float_rn(t);
                return;
            }
        }
        // On the boundary, one of the two is 0; then the remaining one has a closed solution.
        double s = aa > 0 ? fmax(__ddiv_rn(xa, a), 0.0) : 0.0, t = bb > 0 ? fmax(__ddiv_rn(-xb, b), 0.0) : 0.0;
        bool scaled = __dmul_rn(s, xa) >= __dmul_rn(-t, xb);
        scale = scaled ? __double2float_rn(s) : 0.0f, min = scaled ? 0.0f : __double2float_rn(t);
    }
};

// Fits scale and minimum of one sub-block.
template <int TOP, int LEN>
__device__ __forceinline__ void fit_affine_alone(const float (&values)[LEN], float& best_scale, float& best_min) {
    float low = 0.0f, high = -3.40282347e38f, least = __int_as_float(0x7f800000);
#pragma unroll
    for (int l = 0; l < LEN; l++) low = fminf(values[l], low), high = fmaxf(values[l], high);
    best_scale = 0.0f, best_min = -low;
    if (high <= low) return;
#pragma unroll 1
    for (int start = 0; start < STARTS; start++) {
        float scale = __fdiv_rn(__fsub_rn(high, low), start_range(start, TOP)), min = -low;
#pragma unroll 1
        for (int pass = 0; pass < 3; pass++) {
            int codes[LEN];
            float error = affine_codes<TOP>(values, scale, min, codes);
            // The starting scale itself is no candidate: it fits the extremes, not the squared error.
            if (pass > 0 && error < least) least = error, best_scale = scale, best_min = min;
            Sums sums;
#pragma unroll
            for (int l = 0; l < LEN; l++) sums.add(values[l], codes[l], 1);
            sums.solve(scale, min);
        }
    }
}

// The fit of a block. `fit` must be called first; then `choose` returns the final values of each sub-block.
template <int LEN, int TOP, int SCALE_TOP>
struct AffineFit {
    static constexpr int SUBS = 256 / LEN;
    float scales[SUBS], mins[SUBS]; // of the separately fitted sub-blocks
    unsigned short d, dmin;

    template <class Get>
    __device__ __forceinline__ void fit(const Get& x) {
        float most_scale = 0.0f, most_min = 0.0f, values[LEN];
#pragma unroll 1
        for (int s = 0; s < SUBS; s++) {
            float scale, min;
            load_sub_block(x, s, values);
            fit_affine_alone<TOP>(values, scale, min);
            most_scale = fmaxf(scale, most_scale), most_min = fmaxf(min, most_min);
            scales[s] = scale, mins[s] = min;
        }
        d = half_of_float(__fdiv_rn(most_scale, (float)SCALE_TOP)), dmin = half_of_float(__fdiv_rn(most_min, (float)SCALE_TOP));
        Sums sums;
#pragma unroll 1
        for (int s = 0; s < SUBS; s++) {
            int codes[LEN], scale, min;
            load_sub_block(x, s, values);
            choose(values, s, scale, min, codes);
#pragma unroll
            for (int l = 0; l < LEN; l++) sums.add(values[l], scale * codes[l], min);
        }
        float common, common_min;
        sums.solve(common, common_min);
        d = half_of_float(common), dmin = half_of_float(common_min);
    }

    // Chooses scale, minimum and codes of sub-block s: of the grid points next to its separate fit, the point of least error.
    __device__ __forceinline__ void choose(const float (&values)[LEN], int s, int& scale, int& min, int (&codes)[LEN]) const {
        float unit = float_of_half(d), unit_min = float_of_half(dmin), least = __int_as_float(0x7f800000);
        int centre = nearest(__fmul_rn(scales[s], inverse(unit)), 0, SCALE_TOP);
        int centre_min = nearest(__fmul_rn(mins[s], inverse(unit_min)), 0, SCALE_TOP);
        scale = min = 0;
#pragma unroll 1
        for (int i = 0; i < 9; i++) {
            int a = centre + i / 3 - 1, b = centre_min + i % 3 - 1;
            if (a < 0 || a > SCALE_TOP || b < 0 || b > SCALE_TOP) continue;
            float error = affine_codes<TOP>(values, __fmul_rn(unit, (float)a), __fmul_rn(unit_min, (float)b), codes);
            if (error < least) least = error, scale = a, min = b;
        }
        affine_codes<TOP>(values, __fmul_rn(unit, (float)scale), __fmul_rn(unit_min, (float)min), codes);
    }
};

// ---- symmetric types: d * scale * (q - ZERO), with signed scales

template <int ZERO>
__device__ __forceinline__ int symmetric_code(float x, float by) {
    float q = __fadd_rn(mul_add(x, by, (float)ZERO), 0.5f);
    return __float2int_rz(fminf(fmaxf(q, 0.0f), 2.0f * ZERO - 1));
}

// Fits the scale of one sub-block. Both signs are tried, because there is one more code below zero than above.
template <int ZERO>
__device__ __forceinline__ float fit_symmetric_alone(const float (&values)[16]) {
    float peak = 0.0f, best = 0.0f, most = 0.0f;
#pragma unroll
    for (int l = 0; l < 16; l++) peak = fmaxf(fabsf(values[l]), peak);
#pragma unroll 1
    for (int start = 0; start < 2 * STARTS; start++) {
        float by = __fmul_rn(start_range(start / 2, ZERO), inverse(peak));
        if (start % 2 == 1) by = -by;
#pragma unroll 1
        for (int pass = 0; pass < 2; pass++) {
            float product = 0.0f, square = 0.0f;
#pragma unroll
            for (int l = 0; l < 16; l++) {
                float a = symmetric_code<ZERO>(values[l], by) - ZERO;
                product = mul_add(values[l], a, product), square = mul_add(a, a, square);
            }
            // The reduction of the sum of squares by the scale product / square.
            float gain = __fmul_rn(__fmul_rn(product, product), inverse(square));
            if (gain > most) most = gain, best = __fdiv_rn(product, square);
            by = inverse(__fmul_rn(product, inverse(square)));
        }
    }
    return best;
}

// The fit of a block. `fit` must be called first; then `choose` returns the final values of each sub-block.
template <int ZERO, int SCALE_ZERO>
struct SymmetricFit {
    float scales[16]; // of the separately fitted sub-blocks
    unsigned short d;

    template <class Get>
    __device__ __forceinline__ void fit(const Get& x) {
        float peak = 0.0f, values[16];
#pragma unroll 1
        for (int s = 0; s < 16; s++) {
            load_sub_block(x, s, values);
            float scale = fit_symmetric_alone<ZERO>(values);
            if (fabsf(scale) > fabsf(peak)) peak = scale;
            scales[s] = scale;
        }
        // Map the largest scale to the lowest code, because there is one more negative code than positive ones.
        d = half_of_float(__fdiv_rn(peak, (float)-SCALE_ZERO));
        double product = 0.0, square = 0.0;
#pragma unroll 1
        for (int s = 0; s < 16; s++) {
            int codes[16];
            load_sub_block(x, s, values);
            int scale = choose(values, s, codes);
#pragma unroll
            for (int l = 0; l < 16; l++) {
                double a = scale * (codes[l] - ZERO);
                product = __fma_rn((double)values[l], a, product), square = __fma_rn(a, a, square);
            }
        }
        if (square > 0.0) d = half_of_float(__double2float_rn(__ddiv_rn(product, square)));
    }

    // Chooses scale (returned) and codes of sub-block s: of the integers next to its separate fit, the scale of least error.
    __device__ __forceinline__ int choose(const float (&values)[16], int s, int (&codes)[16]) const {
        float unit = float_of_half(d), least = __int_as_float(0x7f800000);
        int centre = nearest(__fmul_rn(scales[s], inverse(unit)), -SCALE_ZERO, SCALE_ZERO - 1), scale = 0;
#pragma unroll 1
        for (int a = max(centre - 1, -SCALE_ZERO); a <= min(centre + 1, SCALE_ZERO - 1); a++) {
            float step = __fmul_rn(unit, (float)a), by = inverse(step), error = 0.0f;
#pragma unroll
            for (int l = 0; l < 16; l++) {
                float rest = __fsub_rn(__fmul_rn(step, symmetric_code<ZERO>(values[l], by) - ZERO), values[l]);
                error = mul_add(rest, rest, error);
            }
            if (error < least) least = error, scale = a;
        }
        // Scale 0 also results if the common scale overflowed; then the codes represent 0 too.
        float by = scale == 0 ? 0.0f : inverse(__fmul_rn(unit, (float)scale));
#pragma unroll
        for (int l = 0; l < 16; l++) codes[l] = symmetric_code<ZERO>(values[l], by);
        return scale;
    }
};

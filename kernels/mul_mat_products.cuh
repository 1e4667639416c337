// Several products of the same columns in one grid, for the kernels of few columns: queries, keys and values, each with the addition of a
// vector to its columns; or the two products of a SWIGLU, whose results are not stored. Included by mul_mat_packed.cu and mul_mat_half.cu.
#pragma once
#include "common/math.cuh"
#include "mul_mat_common.cuh"

// Another product of the grid: its first block in x, and its rows.
struct GridProduct {
    u32 first, m;
};

// Where a gated product also writes its result as quantised columns, for the product that follows; null if it does not.
struct QuantizedResult {
    u8 *columns;
    u32 *counters; // zeros, also afterwards: one for each piece of rows of each column of blocks
    u64 stride;    // bytes from one quantised column to the next
};

// As MulMatArgs. With more products, there is one plane, and all weights and results are dense.
struct ProductsArgs {
    const u8 *a, *b;
    u8 *dst;
    const u8 *more_a[2];
    u8 *more_dst[2];
    const float *biases[3]; // added to the columns of the results, by product; null: nothing is added
    QuantizedResult quantized; // of the dense result of a gated product; packed weights only
    u32 k, m, n;
    u32 log2_lanes; // at least 5; packed weights only
    u32 planes, b2;
    u32 r2, r3;
    u64 as[3], bs[3];
    u64 ds[4];
    GridProduct more[2]; // `first` is beyond the grid where there is no such product
    u32 gated;      // whether dst is the SWIGLU of the products of a and of more_a[0]
    u32 strides;    // the lower 4 bits of all strides of a, joined by OR; from bit 4 on, those of b; from bit 8 on, those of dst
};

// What this block computes: a product, the block's number in it, and the vector to add, or null.
struct BlockProduct {
    MulMatArgs args;
    u32 block;
    const float *bias;

    __device__ __forceinline__ explicit BlockProduct(const ProductsArgs &all)
        : args{all.a, all.b, all.dst, all.k, all.m, all.n, all.log2_lanes, all.planes, all.b2, all.r2, all.r3,
               {all.as[0], all.as[1], all.as[2]}, {all.bs[0], all.bs[1], all.bs[2]}, {all.ds[0], all.ds[1], all.ds[2], all.ds[3]}},
          block(blockIdx.x), bias(all.biases[0]) {
        if (block < all.more[0].first) return;
        const bool last = block >= all.more[1].first;
        args.a = last ? all.more_a[1] : all.more_a[0];
        args.dst = last ? all.more_dst[1] : all.more_dst[0];
        bias = last ? all.biases[2] : all.biases[1];
        args.m = last ? all.more[1].m : all.more[0].m;
        args.ds[1] = 4ull * args.m;
        block -= last ? all.more[1].first : all.more[0].first;
    }
};

// Stores an element of a product with its bias, or the SWIGLU of two products: silu(a b) (up b). `pass` is 1 for the second one; `gate`
// keeps the element of the first.
__device__ __forceinline__ void store_product(float *to, float sum, u32 row, const float *bias, bool gated, u32 pass, float &gate) {
    if (!gated) *to = bias == nullptr ? sum : sum + bias[row];
    else if (pass == 0) gate = sum;
    else *to = silu(gate) * sum;
}

// MUL_MAT of F16 and BF16 weights on tensor cores (m16n8k16), compute capability 8.0 or later, for few columns. Columns are
// rounded to the type of the weights, as by ggml's CPU backend; products are exact, and sums are in f32. One module per type of
// a: TYPE is its struct, NAME its part of the entries' names.
//
// Fusion, for aligned elements and one group of columns: see mul_mat_products.cuh.
//
// Variants: mul_mat_half4, _half8: as many columns per block.
// Limits:   as mul_mat.cu. Rows and columns are fast if they are at multiples of 16 bytes.
// Floor:    a is read once per 4 or 8 columns, b once per 16 rows of a.
//
// A block has 16 rows; its warps split k and add up their sums in the end. Lane 4 g + t loads elements 8 t to 8 t + 7 of each 32
// of rows g and g + 8, by 16 bytes. These four registers are a fragment as they are: words 0 and 2 belong to row g of the mma,
// words 1 and 3 to row g + 8. So both rows of the mma are parts of one row of a, and meet different elements of b: columns 0 to
// 3 of the mma have those for words 0 and 2 of four columns of b, columns 4 to 7 those for words 1 and 3. Half of the results
// are of no use; the tensor cores are idle otherwise. Two rows of a in one fragment would cost as many moves between registers
// as there are weights.
#include "common/mma.cuh"
#include "mul_mat_bytes.cuh"
#include "mul_mat_products.cuh"

constexpr u32 HALF_ROWS = 16, HALF_GROUPS = HALF_ROWS / 8; // rows of a block, in groups of eight
constexpr u32 HALF_WARPS = 16;                             // at most, per block
constexpr u32 HALF_PIECE = 32;                             // elements of k that a warp multiplies at a time

// Addresses of a lane's next elements.
template <int N>
struct HalfCursor {
    const u8 *rows[HALF_GROUPS], *columns[N / 4];

    __device__ __forceinline__ void advance(u32 elements) { advance(2ull * elements, 4ull * elements); }

    __device__ __forceinline__ void advance(u64 row_bytes, u64 column_bytes) {
#pragma unroll
        for (u32 r = 0; r < HALF_GROUPS; r++) rows[r] += row_bytes;
#pragma unroll
        for (u32 c = 0; c < N / 4; c++) columns[c] += column_bytes;
    }
};

// Two elements as a word, of which `left` are before the end of the row; the others are zeros.
__device__ __forceinline__ u32 load_some_halves(const u8 *from, u32 left) {
    const u16 *halves = (const u16 *)from;
    return word_of_halves(left > 0 ? halves[0] : 0, left > 1 ? halves[1] : 0);
}

// Adds the products of PIECES times 32 elements. `begin` is the number of a lane's first element, without WHOLE.
template <class T, int N, bool WHOLE, u32 PIECES>
__device__ __forceinline__ void multiply_halves(const HalfCursor<N> &at, u32 begin, u32 k, float (&sums)[HALF_GROUPS][N / 4][4]) {
    const u32 half = threadIdx.x / 16 % 2; // which words this lane's columns meet
    u32 w[PIECES][HALF_GROUPS][4];
    float x[PIECES][N / 4][4];
#pragma unroll
    for (u32 p = 0; p < PIECES; p++) {
#pragma unroll
        for (u32 r = 0; r < HALF_GROUPS; r++) {
            const u8 *from = at.rows[r] + 2 * HALF_PIECE * p;
            if constexpr (WHOLE) {
                load_words<16>(from, w[p][r]);
            } else {
#pragma unroll
                for (u32 i = 0; i < 4; i++) w[p][r][i] = load_some_halves(from + 4 * i, max(k, begin + 2 * i) - begin - 2 * i);
            }
        }
#pragma unroll
        for (u32 c = 0; c < N / 4; c++) {
            const u8 *from = at.columns[c] + 4 * HALF_PIECE * p;
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                if constexpr (WHOLE) {
                    const float2 two = *(const float2 *)(from + 16 * i);
                    x[p][c][2 * i] = two.x, x[p][c][2 * i + 1] = two.y;
                } else {
                    const u32 e = begin + 2 * half + 4 * i;
                    x[p][c][2 * i] = e < k ? F32::load1(from, 4 * i) : 0.0f;
                    x[p][c][2 * i + 1] = e + 1 < k ? F32::load1(from, 4 * i + 1) : 0.0f;
                }
            }
        }
    }
#pragma unroll
    for (u32 p = 0; p < PIECES; p++) {
#pragma unroll
        for (u32 c = 0; c < N / 4; c++) {
            const float(&four)[4] = x[p][c];
            const u32 b[2] = {pair_of_floats(T(), four[0], four[1]), pair_of_floats(T(), four[2], four[3])};
#pragma unroll
            for (u32 r = 0; r < HALF_GROUPS; r++) mma_halves(T(), sums[r][c], w[p][r], b);
        }
    }
}

// Computes the block's rows for up to N columns, and stores them; see store_product. `whole`: rows are at multiples of 16 bytes. All
// threads of the block must call this function.
template <class T, int N>
__device__ __forceinline__ void half_multiply(const Matrices &of, bool whole, u32 block, bool gated, const u8 *up, const float *bias) {
    constexpr u32 PIECES = 16 / N; // as many as registers permit
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    const u32 first = block * HALF_ROWS;
    u32 step = HALF_PIECE * PIECES * warps;
    u64 row_step = 2ull * step, column_step = 4ull * step;
    // Hides how they were computed; otherwise the compiler computes them again in each step.
    asm volatile("" : "+r"(step), "+l"(row_step), "+l"(column_step));
    float gate = 0.0f; // a thread stores one element at most
#pragma unroll 1
    for (u32 pass = 0; pass <= gated; pass++) {
        const u8 *a = pass == 0 ? of.a : up;
        keep(a);
        // Rows and columns beyond the end load the last one again; their results are not stored.
        HalfCursor<N> start;
#pragma unroll
        for (u32 r = 0; r < HALF_GROUPS; r++) start.rows[r] = a + min(first + 8 * r + g, of.m - 1) * of.a1;
#pragma unroll
        for (u32 c = 0; c < N / 4; c++) start.columns[c] = of.b + min(4 * c + g % 4, of.n - 1) * of.b1 + 8 * (g / 4);
        float sums[HALF_GROUPS][N / 4][4] = {};
        u32 begin = 0;
        if (whole) {
            constexpr u32 STEP = HALF_PIECE * PIECES;
            begin = of.k / STEP * STEP;
            HalfCursor<N> at = start;
            at.advance(STEP * warp + 8 * t);
#pragma unroll 1
            for (u32 k = STEP * warp; k < begin; k += step) {
                multiply_halves<T, N, true, PIECES>(at, 0, 0, sums);
                at.advance(row_step, column_step);
            }
        }
#pragma unroll 1
        for (u32 k = begin + HALF_PIECE * warp; k < of.k; k += HALF_PIECE * warps) {
            HalfCursor<N> at = start;
            at.advance(k + 8 * t);
            multiply_halves<T, N, false, 1>(at, k + 8 * t, of.k, sums);
        }
        // The stride between columns makes the stores of a warp free of bank conflicts.
        __shared__ float parts[2 * HALF_WARPS][N][HALF_ROWS + 4];
#pragma unroll
        for (u32 r = 0; r < HALF_GROUPS; r++) {
#pragma unroll
            for (u32 c = 0; c < N / 4; c++) {
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    parts[2 * warp + t / 2][4 * c + 2 * (t % 2) + i][8 * r + g] = t < 2 ? sums[r][c][i] : sums[r][c][2 + i];
                }
            }
        }
        __syncthreads();
        const u32 local = threadIdx.x % HALF_ROWS, row = first + local, c = threadIdx.x / HALF_ROWS;
        if (c < min(of.n, N) && row < of.m) {
            const float *from = &parts[0][c][local];
            float sum = 0.0f;
#pragma unroll 1
            for (u32 w = 0; w < warps; w += 4) { // a block has 4, 8 or 16
#pragma unroll
                for (u32 p = 0; p < 8; p++) sum += from[p * sizeof(parts[0]) / sizeof(float)];
                from += 8 * sizeof(parts[0]) / sizeof(float);
            }
            float *to = (float *)(of.dst + row * of.d0 + c * of.d1);
            keep(to);
            store_product(to, sum, row, bias, gated, pass, gate);
        }
        // The next pass, and the next columns, reuse the shared memory.
        __syncthreads();
    }
}

// Grid: x = groups of 16 rows of each product, y = groups of N columns, z = planes. A block has at least 16 N threads.
template <class T, int N>
__device__ __forceinline__ void half_mat_mul(const ProductsArgs &args) {
    const BlockProduct product(args);
    const u64 gate = args.gated ? (u64)args.more_a[0] : 0, strides = args.strides;
    const Access how = access<T>((u64)product.args.a | gate | strides % 16, (u64)args.b | strides / 16 % 16,
                                 (u64)product.args.dst | strides / 256);
    // Only aligned operands are fused (src/cuda/ops/mul_mat_fused.rs): there is one product then, without a bias.
    if (how == BYTES) {
        for_columns<N>(product.args, [](const Matrices &of) { products_of_bytes(of, HALF_ROWS, N, dot_of_bytes<T>); });
    } else {
        for_columns<N>(product.args, [&](const Matrices &of) {
            half_multiply<T, N>(of, how == ALIGNED, product.block, args.gated, args.more_a[0], product.bias);
        });
    }
}

ENTRY(mul_mat_half4, 512, 1)(ProductsArgs args) { half_mat_mul<TYPE, 4>(args); }
ENTRY(mul_mat_half8, 512, 1)(ProductsArgs args) { half_mat_mul<TYPE, 8>(args); }

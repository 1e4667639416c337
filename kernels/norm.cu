// NORM, RMS_NORM, L2_NORM of rows, and GROUP_NORM of groups of channels, in f32:
//
//     NORM, GROUP_NORM  y = (x - mean) / sqrt(mean((x - mean)^2) + eps)
//     RMS_NORM          y = x / sqrt(mean(x^2) + eps)
//     L2_NORM           y = x / max(sqrt(sum(x^2)), eps)
//
// Fusion, for norms of rows. Before the norm: x = a + b (residual), which is also stored. Epilogue fusion: y is multiplied by
// weights, and a bias is added to the product. Each step is rounded as if it ran alone. The result is also written as
// quantised columns (common/quantize.cuh), for a matrix product that follows.
//
// Variants: norm_kept_N  keeps rows of up to 1024 N elements (768 N for N = 16) in the registers of a warp (several rows per
//                        block) or of a block, N elements per thread, in 16-byte accesses where addresses and strides permit;
//                        all fusions. N = 16 keeps more bytes in flight for many rows; 4 and 8 are for short rows and reduce
//                        the latency of few;
//           norm_stats   computes statistics of pieces of longer rows, and of groups that are not uniformly strided rows;
//           norm_apply   merges the statistics of a row and scales one piece of it.
// Accuracy: the mean is summed in f64. Squares, after subtraction of the mean, are summed in f32 within a piece and f64 across
//           pieces.
// Limits:   dimensions and number of rows below 2^31; any strides and element addresses; y may alias x, a, b or the sum.
// Floor:    norm_kept_N reads and writes each tensor once (broadcast weights are read from the cache after the first time); the
//           pair norm_stats and norm_apply reads x twice.
#include "common/abi.cuh"
#include "common/quantize.cuh"
#include "common/reduce.cuh"

enum Kind : u32 { NORM = 0, RMS_NORM = 1, L2_NORM = 2 };

// Elements in the registers of a thread, for long rows.
constexpr int EACH = 16;

// An operand that is broadcast to the rows of y. Its counts are used only if it `wraps`, that is, if it repeats in a dimension
// with a count other than 1; otherwise the strides suffice.
struct Operand {
    Shape shape;
    u32 wraps;
    u32 padding;

    __device__ __forceinline__ u64 row(u32 i1, u32 i2, u32 i3) const {
        if ((i1 | i2 | i3) == 0) return 0; // decoding has one row
        if (wraps) i1 %= shape.ne[1], i2 %= shape.ne[2], i3 %= shape.ne[3];
        return shape.row(i1, i2, i3);
    }
};

struct NormKeptArgs {
    const u8 *x, *b; // b: residual added to x, or null
    u8 *sum;         // destination of x + b
    const u8 *w;     // weights that multiply the norm, or null
    const u8 *plus;  // bias added to the product, or null
    u8 *y;
    u8 *quantized;   // destination of quantised columns, or null
    Operand xs, bs, ss, ws, ps, ys;
    u32 kind;
    float eps;
    u64 stride; // bytes from one quantised column to the next
    u32 group;  // of their scales: 32 or 256
    u32 vector; // whether 16-byte accesses are possible if the addresses of the first bytes are aligned
};

__device__ __forceinline__ float scale_of(u32 kind, float eps, float squares, float n) {
    return 1.0f / (kind == L2_NORM ? fmaxf(sqrtf(squares), eps) : sqrtf(squares / n + eps));
}

template <int N, bool VECTOR>
__device__ __forceinline__ void kept(const NormKeptArgs &args, u32 i1, u32 i2, u32 i3) {
    // Small N leaves registers for the epilogue operands: load them early, so that their latency is hidden.
    constexpr bool EARLY = N <= 8;
    __shared__ double sums[32];
    __shared__ float squares[32];
    const u32 n = args.ys.shape.ne[0], t = threadIdx.x, team = blockDim.x;
    const auto get = [=](const u8 *first, const Operand &operand, float(&out)[N]) {
        load_kept<VECTOR>(first + operand.row(i1, i2, i3), operand.shape.nb[0], n, t, team, 0.0f, out);
    };
    float x[N], w[N], plus[N];
    get(args.x, args.xs, x);
    if (args.b) {
        get(args.b, args.bs, w);
#pragma unroll
        for (int i = 0; i < N; i++) x[i] += w[i];
        store_kept<VECTOR>(args.sum + args.ss.row(i1, i2, i3), args.ss.shape.nb[0], n, t, team, x);
    }
    if (EARLY && args.w) get(args.w, args.ws, w);
    if (EARLY && args.plus) get(args.plus, args.ps, plus);

    float mean = 0.0f;
    if (args.kind == NORM) {
        double sum = 0.0;
#pragma unroll
        for (int i = 0; i < N; i++) sum += x[i];
        mean = (float)(block_sum(sum, sums) / n);
    }
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] -= mean;
        if (kept_index<VECTOR>(i, t, team) < n) square += x[i] * x[i];
    }
    const float scale = scale_of(args.kind, args.eps, block_sum(square, squares), (float)n);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] *= scale;
    if (args.w) {
        if (!EARLY) get(args.w, args.ws, w);
#pragma unroll
        for (int i = 0; i < N; i++) x[i] *= w[i];
    }
    if (args.plus) {
        if (!EARLY) get(args.plus, args.ps, plus);
        // An intrinsic prevents contraction: the sum is rounded after the product, as by two separate ops.
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = __fadd_rn(x[i], plus[i]);
    }
    store_kept<VECTOR>(args.y + args.ys.row(i1, i2, i3), args.ys.shape.nb[0], n, t, team, x);
}

// One function for all entries, which keeps the PTX small.
__device__ __noinline__ void quantize(const u8 *row, u8 *column, u32 n, u32 group) {
    quantize_row(row, column, n, group, threadIdx.x / 32, blockDim.x / 32);
}

// One row per blockIdx.x and threadIdx.y, N elements per thread. A block has several rows only if each row is handled by one
// warp.
template <int N>
__device__ __forceinline__ void kept(const NormKeptArgs &args) {
    const Shape &ys = args.ys.shape;
    const u32 row = blockIdx.x * blockDim.y + threadIdx.y;
    u32 i1 = row, i2 = 0, i3 = 0;
    if (ys.ne[2] * ys.ne[3] != 1) ys.split(row, i1, i2, i3);
    if (i1 >= ys.ne[1] || i3 >= ys.ne[3]) return;
    const u64 addresses = (u64)args.x | (u64)args.b | (u64)args.sum | (u64)args.w | (u64)args.plus | (u64)args.y;
    if (args.vector && addresses % 16 == 0) kept<N, true>(args, i1, i2, i3);
    else kept<N, false>(args, i1, i2, i3);
    if (args.quantized == nullptr) return;
    // A thread quantises other elements of the row than it holds, so each reads back what the threads of the team have stored.
    if (blockDim.x == 32) __syncwarp();
    else __syncthreads();
    quantize(args.y + ys.row(i1, i2, i3), args.quantized + row * args.stride, ys.ne[0], args.group);
}

extern "C" __global__ void __launch_bounds__(1024) norm_kept_4(NormKeptArgs args) { kept<4>(args); }
extern "C" __global__ void __launch_bounds__(1024) norm_kept_8(NormKeptArgs args) { kept<8>(args); }
// With more threads, there would be too few registers on compute capability 9.0.
extern "C" __global__ void __launch_bounds__(768) norm_kept_16(NormKeptArgs args) { kept<16>(args); }

// ---- long rows, and groups

// Statistics of a piece: the sum of x (0 for norms without a mean), and the sum of the squares of x - mean of the piece.
struct Stats {
    double sum, squares;
};

struct NormLongArgs {
    const u8 *x;
    u8 *y;
    Stats *stats; // statistics of each piece of each part
    Shape xs, ys;
    u32 kind;
    float eps;
    u32 together; // channels per group; 0 if parts are rows
    u32 flat;     // whether the elements of a part have the uniform stride nb[0]
    u32 vector;   // whether 16-byte accesses are possible if the addresses of the first bytes are aligned
    u32 pieces;   // maximum pieces per part; a piece has blockDim.x * EACH elements
};

// A piece of a row or a group.
struct Piece {
    u64 x, y;         // byte offsets of the part
    u64 count, first; // elements of the part; first element of the piece

    __device__ __forceinline__ Piece(const NormLongArgs &args) {
        const u32 part = blockIdx.x / args.pieces;
        first = (u64)(blockIdx.x % args.pieces) * blockDim.x * EACH;
        const u32 *ne = args.xs.ne;
        if (args.together == 0) {
            u32 i1, i2, i3;
            args.xs.split(part, i1, i2, i3);
            count = ne[0];
            x = args.xs.row(i1, i2, i3), y = args.ys.row(i1, i2, i3);
        } else {
            const u32 groups = (ne[2] - 1) / args.together + 1;
            const u32 channel = part % groups * args.together, i3 = part / groups;
            count = (u64)ne[0] * ne[1] * min(args.together, ne[2] - channel);
            x = args.xs.row(0, channel, i3), y = args.ys.row(0, channel, i3);
        }
    }

    __device__ __forceinline__ u32 length() const { return (u32)min(count - first, (u64)blockDim.x * EACH); }
};

// Byte offset of element k within its part.
__device__ __forceinline__ u64 offset(const NormLongArgs &args, const Shape &s, u64 k) {
    if (args.flat) return k * s.nb[0];
    const u64 row = k / s.ne[0], channel = row / s.ne[1];
    return (k - row * s.ne[0]) * s.nb[0] + (row - channel * s.ne[1]) * s.nb[1] + channel * s.nb[2];
}

__device__ __forceinline__ bool wide(const NormLongArgs &args) { return args.vector && aligned(args.x, args.y, 16); }

// Loads the piece; the assignment of elements to registers depends on `wide`.
__device__ __forceinline__ void load(const NormLongArgs &args, const Piece &piece, float (&x)[EACH]) {
    const u32 n = piece.length();
    if (wide(args)) {
        load_kept<true>(args.x + piece.x + 4 * piece.first, 4, n, threadIdx.x, blockDim.x, 0.0f, x);
    } else {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const u32 k = kept_index<false>(i, threadIdx.x, blockDim.x);
            x[i] = k < n ? *(const float *)(args.x + piece.x + offset(args, args.xs, piece.first + k)) : 0.0f;
        }
    }
}

template <bool VECTOR>
__device__ __forceinline__ float sum_of_squares(const float (&x)[EACH], float mean, u32 n) {
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const float left = x[i] - mean;
        if (kept_index<VECTOR>(i, threadIdx.x, blockDim.x) < n) square += left * left;
    }
    return square;
}

extern "C" __global__ void __launch_bounds__(1024) norm_stats(NormLongArgs args) {
    __shared__ double sums[32];
    __shared__ float squares[32];
    const Piece piece(args);
    // The last group may have fewer channels, and therefore fewer pieces.
    if (piece.first >= piece.count) return;
    const u32 n = piece.length();
    float x[EACH];
    load(args, piece, x);
    double sum = 0.0;
    if (args.kind == NORM) {
#pragma unroll
        for (int i = 0; i < EACH; i++) sum += x[i];
        sum = block_sum(sum, sums);
    }
    const float mean = (float)(sum / n);
    float square = wide(args) ? sum_of_squares<true>(x, mean, n) : sum_of_squares<false>(x, mean, n);
    square = block_sum(square, squares);
    if (threadIdx.x == 0) args.stats[blockIdx.x] = {sum, square};
}

extern "C" __global__ void __launch_bounds__(1024) norm_apply(NormLongArgs args) {
    __shared__ double parts[2][32];
    const Piece piece(args);
    if (piece.first >= piece.count) return;
    float x[EACH];
    load(args, piece, x);

    const u64 length = (u64)blockDim.x * EACH;
    const u32 pieces = (u32)((piece.count - 1) / length + 1);
    const Stats *stats = args.stats + blockIdx.x / args.pieces * args.pieces;
    double mean = 0.0, squares = 0.0;
    if (args.kind == NORM) {
        for (u32 i = threadIdx.x; i < pieces; i += blockDim.x) mean += stats[i].sum;
        mean = block_sum(mean, parts[0]) / piece.count;
    }
    for (u32 i = threadIdx.x; i < pieces; i += blockDim.x) {
        const double n = min(length, piece.count - i * length), apart = stats[i].sum / n - mean;
        squares += stats[i].squares + (args.kind == NORM ? n * apart * apart : 0.0);
    }
    squares = block_sum(squares, parts[1]);
    const float shift = (float)mean;
    const float scale = args.kind == L2_NORM ? scale_of(L2_NORM, args.eps, (float)squares, 1.0f)
                                             : scale_of(args.kind, args.eps, (float)(squares / piece.count), 1.0f);
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] = (x[i] - shift) * scale;

    const u32 n = piece.length();
    if (wide(args)) {
        store_kept<true>(args.y + piece.y + 4 * piece.first, 4, n, threadIdx.x, blockDim.x, x);
    } else {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const u32 k = kept_index<false>(i, threadIdx.x, blockDim.x);
            if (k < n) *(float *)(args.y + piece.y + offset(args, args.ys, piece.first + k)) = x[i];
        }
    }
}

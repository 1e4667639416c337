// out[x][y] = in[y][x] for a matrix of `rows` x `columns`, in blocks of 32 x 8 threads that take a tile of 32 x 32 each.

#define TILE 32
#define ROWS 8

// Reads along rows and writes along columns: 32 sectors for each warp's store.
extern "C" __global__ void transpose_naive(const float* in, float* out, int rows, int columns) {
    int x = blockIdx.x * TILE + threadIdx.x;
    for (int k = 0; k < TILE; k += ROWS) {
        int y = blockIdx.y * TILE + threadIdx.y + k;
        if (x < columns && y < rows) out[(size_t)x * rows + y] = in[(size_t)y * columns + x];
    }
}

// PAD = 0 reads shared memory by columns in one bank, 32 times over; PAD = 1 in 32 banks.
#define TRANSPOSE_TILED(NAME, PAD)                                                                                   \
    extern "C" __global__ void NAME(const float* in, float* out, int rows, int columns) {                            \
        __shared__ float tile[TILE][TILE + PAD];                                                                     \
        int x = blockIdx.x * TILE + threadIdx.x;                                                                     \
        for (int k = threadIdx.y; k < TILE; k += ROWS) {                                                             \
            int y = blockIdx.y * TILE + k;                                                                           \
            if (x < columns && y < rows) tile[k][threadIdx.x] = in[(size_t)y * columns + x];                         \
        }                                                                                                            \
        __syncthreads();                                                                                             \
        x = blockIdx.y * TILE + threadIdx.x;                                                                         \
        for (int k = threadIdx.y; k < TILE; k += ROWS) {                                                             \
            int y = blockIdx.x * TILE + k;                                                                           \
            if (x < rows && y < columns) out[(size_t)y * rows + x] = tile[threadIdx.x][k];                           \
        }                                                                                                            \
    }
TRANSPOSE_TILED(transpose_tiled, 0)
TRANSPOSE_TILED(transpose_padded, 1)

// The bank of each element is turned by its row instead of padding.
extern "C" __global__ void transpose_swizzled(const float* in, float* out, int rows, int columns) {
    __shared__ float tile[TILE * TILE];
    int x = blockIdx.x * TILE + threadIdx.x;
    for (int k = threadIdx.y; k < TILE; k += ROWS) {
        int y = blockIdx.y * TILE + k;
        if (x < columns && y < rows) tile[k * TILE + (threadIdx.x ^ k)] = in[(size_t)y * columns + x];
    }
    __syncthreads();
    x = blockIdx.y * TILE + threadIdx.x;
    for (int k = threadIdx.y; k < TILE; k += ROWS) {
        int y = blockIdx.x * TILE + k;
        if (x < rows && y < columns) out[(size_t)y * rows + x] = tile[threadIdx.x * TILE + (k ^ threadIdx.x)];
    }
}

// ldmatrix: moving 8 x 8 matrices of 16-bit elements from shared memory to the registers of a warp. One warp. `in` holds 4 matrices, row by row, 256 halves; lane l passes the address of row l.

__device__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

#define LOAD_MATRIX(NAME, FORM, COUNT, REGISTERS, ADDRESS, ...)                                                       \
    extern "C" __global__ void load_matrix_##NAME(const unsigned short* in, unsigned* out) {                          \
        __shared__ __align__(16) unsigned short cells[256];                                                           \
        for (int k = threadIdx.x; k < 256; k += 32) cells[k] = in[k];                                                 \
        __syncthreads();                                                                                              \
        unsigned r[COUNT];                                                                                            \
        asm volatile("ldmatrix.sync.aligned.m8n8." FORM ".shared.b16 {" REGISTERS "}, [" ADDRESS "];"                 \
                     : __VA_ARGS__                                                                                    \
                     : "r"(shared_address(cells + 8 * threadIdx.x)));                                                 \
        for (int k = 0; k < COUNT; k++) out[threadIdx.x * COUNT + k] = r[k];                                          \
    }
#define R1 "=r"(r[0])
#define R2 R1, "=r"(r[1])
#define R4 R2, "=r"(r[2]), "=r"(r[3])
LOAD_MATRIX(x1, "x1", 1, "%0", "%1", R1)
LOAD_MATRIX(x2, "x2", 2, "%0, %1", "%2", R2)
LOAD_MATRIX(x4, "x4", 4, "%0, %1, %2, %3", "%4", R4)
LOAD_MATRIX(x1_transposed, "x1.trans", 1, "%0", "%1", R1)
LOAD_MATRIX(x2_transposed, "x2.trans", 2, "%0, %1", "%2", R2)
LOAD_MATRIX(x4_transposed, "x4.trans", 4, "%0, %1, %2, %3", "%4", R4)

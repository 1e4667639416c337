// mma.sync in each shape and type. Fragments come straight from memory: lane l's register r of A is a[l * registers + r],
// likewise B, C and D, so that a test can place every element itself.

#define CONCAT_3(A, B, C) A##B##C

#define LOAD(NAME, COUNT)                                                              \
    unsigned NAME##_r[COUNT];                                                          \
    for (int r = 0; r < COUNT; r++) NAME##_r[r] = NAME[threadIdx.x * COUNT + r]
#define STORE(COUNT) \
    for (int r = 0; r < COUNT; r++) d[threadIdx.x * COUNT + r] = d_r[r]

#define MMA(NAME, TYPE, A, B, C, TEXT, ...)                                                                       \
    extern "C" __global__ void mma_##NAME(const unsigned* a, const unsigned* b, const unsigned* c, unsigned* d) { \
        LOAD(a, A);                                                                                               \
        LOAD(b, B);                                                                                               \
        LOAD(c, C);                                                                                               \
        unsigned d_r[C];                                                                                          \
        asm volatile("mma.sync.aligned." TYPE " " TEXT ";" : __VA_ARGS__);                                        \
        STORE(C);                                                                                                 \
    }

#define D2 "=r"(d_r[0]), "=r"(d_r[1])
#define D4 D2, "=r"(d_r[2]), "=r"(d_r[3])
#define A1 "r"(a_r[0])
#define A2 A1, "r"(a_r[1])
#define A4 A2, "r"(a_r[2]), "r"(a_r[3])
#define B1 "r"(b_r[0])
#define B2 B1, "r"(b_r[1])
#define C2 "r"(c_r[0]), "r"(c_r[1])
#define C4 C2, "r"(c_r[2]), "r"(c_r[3])

// Registers of A, B and C: the operand lists that go with them.
#define TEXT_212 "{%0, %1}, {%2, %3}, {%4}, {%5, %6}"
#define TEXT_214 "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10}"
#define TEXT_422 "{%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%8, %9}"
#define TEXT_424 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13}"
#define MMA_212(NAME, TYPE) MMA(NAME, TYPE, 2, 1, 2, TEXT_212, D2 : A2, B1, C2)
#define MMA_214(NAME, TYPE) MMA(NAME, TYPE, 2, 1, 4, TEXT_214, D4 : A2, B1, C4)
#define MMA_422(NAME, TYPE) MMA(NAME, TYPE, 4, 2, 2, TEXT_422, D2 : A4, B2, C2)
#define MMA_424(NAME, TYPE) MMA(NAME, TYPE, 4, 2, 4, TEXT_424, D4 : A4, B2, C4)

MMA_212(m16n8k8_f16_f16, "m16n8k8.row.col.f16.f16.f16.f16")
MMA_214(m16n8k8_f32_f16, "m16n8k8.row.col.f32.f16.f16.f32")

#if __CUDA_ARCH__ >= 800
MMA_422(m16n8k16_f16_f16, "m16n8k16.row.col.f16.f16.f16.f16")
MMA_424(m16n8k16_f32_f16, "m16n8k16.row.col.f32.f16.f16.f32")
MMA_424(m16n8k16_f32_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
MMA_214(m16n8k8_f32_bf16, "m16n8k8.row.col.f32.bf16.bf16.f32")
MMA_214(m16n8k4_f32_tf32, "m16n8k4.row.col.f32.tf32.tf32.f32")
MMA_424(m16n8k8_f32_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
MMA_214(m16n8k16_s32_s8, "m16n8k16.row.col.s32.s8.s8.s32")
MMA_214(m16n8k16_s32_u8_s8, "m16n8k16.row.col.s32.u8.s8.s32")
MMA_424(m16n8k32_s32_s8, "m16n8k32.row.col.s32.s8.s8.s32")
MMA_424(m16n8k32_s32_u8, "m16n8k32.row.col.s32.u8.u8.s32")
#endif

// Instructions that the compiler emits only for inline assembly, which libraries use: hints to the caches, reductions and
// packed atomics, carry chains, bit fields, selects, and what orders dependent launches.

#define INDEX                                          \
    int i = blockIdx.x * blockDim.x + threadIdx.x;     \
    if (i >= n) return
#define OUT(K) out[(size_t)(K) * n + i]

// A copy by loads and stores with every hint; each must copy. `to` has 12 rows of n.
extern "C" __global__ void cache_hints(const unsigned* in, unsigned* out, int n) {
    INDEX;
    unsigned value, a, b, c, d;
    unsigned long long policy;
#define COPY(K, LOAD, STORE)                                                         \
    asm volatile(LOAD " %0, [%1];" : "=r"(value) : "l"(in + i) : "memory");          \
    asm volatile(STORE " [%0], %1;" ::"l"(&OUT(K)), "r"(value) : "memory")
    COPY(0, "ld.global.L1::no_allocate.u32", "st.global.L1::no_allocate.u32");
    COPY(1, "ld.global.nc.L1::no_allocate.L2::128B.u32", "st.global.L1::evict_last.u32");
    COPY(2, "ld.global.L1::evict_first.L2::64B.u32", "st.global.L1::evict_first.b32");
    COPY(3, "ld.global.nc.L1::evict_last.L2::256B.b32", "st.global.L1::evict_unchanged.u32");
    COPY(4, "ld.weak.global.ca.L2::128B.u32", "st.weak.global.cg.u32");
    COPY(5, "ld.relaxed.gpu.global.L1::no_allocate.u32", "st.relaxed.gpu.global.u32");
    COPY(6, "ld.global.nc.u32", "st.global.cs.u32");
    COPY(7, "ld.u32", "st.u32");
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(value) : "l"(in + i), "l"(policy) : "memory");
    asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(&OUT(8)), "r"(value), "l"(policy) : "memory");
    asm volatile("createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 %0, 0.5;" : "=l"(policy));
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(value) : "l"(in + i), "l"(policy));
    OUT(9) = value;
    asm volatile("prefetch.global.L1 [%0];" ::"l"(in + i));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(in + i));
    asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(in + i));
    asm volatile("prefetchu.L1 [%0];" ::"l"(in + i));
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(in + i / 4 * 4));
    OUT(10) = i % 4 == 0 ? a : i % 4 == 1 ? b : i % 4 == 2 ? c : d;
    asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(&OUT(11) - i % 2), "r"(in[i / 2 * 2]), "r"(in[i / 2 * 2 + 1]) : "memory");
}

// Reductions, which discard the old values; cells start as given. One cell of each kind, for all threads.
extern "C" __global__ void reductions(unsigned* words, unsigned long long* wide, float* floats, double* doubles, const int* in) {
    int value = in[blockIdx.x * blockDim.x + threadIdx.x];
#define RED(FORM, AT, KIND, VALUE) asm volatile("red." FORM " [%0], %1;" ::"l"(AT), KIND(VALUE) : "memory")
    RED("global.add.u32", words, "r", value);
    RED("global.add.s32", words + 1, "r", value);
    RED("relaxed.gpu.global.min.s32", words + 2, "r", value);
    RED("global.max.u32", words + 3, "r", value);
    RED("global.and.b32", words + 4, "r", value);
    RED("relaxed.cta.global.or.b32", words + 5, "r", value);
    RED("relaxed.sys.global.xor.b32", words + 6, "r", value);
    RED("global.inc.u32", words + 7, "r", 5);
    RED("global.dec.u32", words + 8, "r", 5);
    RED("add.u32", words + 9, "r", value);
    RED("global.add.u64", wide, "l", (long long)value);
    RED("global.max.s64", wide + 1, "l", (long long)value);
    RED("global.and.b64", wide + 2, "l", (long long)value);
    RED("global.add.f32", floats, "f", (float)value);
    RED("global.add.f64", doubles, "d", (double)value);
}

// Packed atomics: f16x2 (denormals are kept), f16, and a reduction in shared memory. out has the old first cell and the
// block's sum for each thread.
extern "C" __global__ void packed_atomics(unsigned* cells, const unsigned* in, unsigned* out) {
    __shared__ unsigned shared;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (threadIdx.x == 0) shared = 0;
    __syncthreads();
    unsigned address = (unsigned)__cvta_generic_to_shared(&shared), old;
    asm volatile("atom.global.add.noftz.f16x2 %0, [%1], %2;" : "=r"(old) : "l"(cells), "r"(in[i]) : "memory");
    asm volatile("red.global.add.noftz.f16x2 [%0], %1;" ::"l"(cells + 1), "r"(in[i]) : "memory");
    asm volatile("{ .reg .b16 h, o; cvt.u16.u32 h, %1; atom.global.add.noftz.f16 o, [%0], h; }" ::"l"(cells + 2), "r"(in[i]) : "memory");
    asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(in[i]) : "memory");
    __syncthreads();
    out[2 * i] = old;
    out[2 * i + 1] = shared;
}

// 128-bit sum and product by carry chains: out = (a + b, a - b, low half of a * b) of four words each.
extern "C" __global__ void carry_chains(const uint4* a, const uint4* b, uint4* out, int n) {
    INDEX;
    uint4 x = a[i], y = b[i], s;
    asm("add.cc.u32 %0, %4, %8;\n\taddc.cc.u32 %1, %5, %9;\n\taddc.cc.u32 %2, %6, %10;\n\taddc.u32 %3, %7, %11;"
        : "=r"(s.x), "=r"(s.y), "=r"(s.z), "=r"(s.w)
        : "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(y.x), "r"(y.y), "r"(y.z), "r"(y.w));
    OUT(0) = s;
    asm("sub.cc.u32 %0, %4, %8;\n\tsubc.cc.u32 %1, %5, %9;\n\tsubc.cc.u32 %2, %6, %10;\n\tsubc.u32 %3, %7, %11;"
        : "=r"(s.x), "=r"(s.y), "=r"(s.z), "=r"(s.w)
        : "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(y.x), "r"(y.y), "r"(y.z), "r"(y.w));
    OUT(1) = s;
    asm("mul.lo.u32 %0, %2, %4;\n\tmul.hi.u32 %1, %2, %4;\n\tmad.lo.cc.u32 %1, %2, %5, %1;\n\tmadc.hi.u32 %1, %3, 0, %1;\n\tmad.lo.u32 %1, %3, %4, %1;"
        : "=&r"(s.x), "=&r"(s.y)
        : "r"(x.x), "r"(x.y), "r"(y.x), "r"(y.y));
    s.z = s.w = 0;
    OUT(2) = s;
}

extern "C" __global__ void bit_operations(const unsigned* a, const unsigned* b, const unsigned* c, unsigned* out, int n) {
    INDEX;
    unsigned x = a[i], y = b[i], z = c[i], r;
#define BITS_1(K, FORM)                                             \
    asm(FORM " %0, %1;" : "=r"(r) : "r"(x));                        \
    OUT(K) = r
#define BITS_2(K, FORM)                                             \
    asm(FORM " %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));            \
    OUT(K) = r
#define BITS_3(K, FORM)                                             \
    asm(FORM " %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z)); \
    OUT(K) = r
    asm("lop3.b32 %0, %1, %2, %3, 0x96;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
    OUT(0) = r;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
    OUT(1) = r;
    BITS_3(2, "shf.l.wrap.b32");
    BITS_3(3, "shf.r.wrap.b32");
    BITS_3(4, "shf.l.clamp.b32");
    BITS_3(5, "shf.r.clamp.b32");
    BITS_3(6, "prmt.b32");
    BITS_3(7, "prmt.b32.f4e");
    BITS_3(8, "prmt.b32.b4e");
    BITS_3(9, "prmt.b32.rc8");
    BITS_3(10, "prmt.b32.ecl");
    BITS_3(11, "prmt.b32.ecr");
    BITS_3(12, "prmt.b32.rc16");
    BITS_3(13, "bfe.u32");
    BITS_3(14, "bfe.s32");
    asm("bfi.b32 %0, %1, %2, %3, 7;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
    OUT(15) = r;
    BITS_1(16, "bfind.u32");
    BITS_1(17, "bfind.s32");
    BITS_1(18, "bfind.shiftamt.s32");
    BITS_1(19, "cnot.b32");
    BITS_2(20, "szext.wrap.s32");
    BITS_2(21, "szext.clamp.u32");
    BITS_2(22, "bmsk.clamp.b32");
    BITS_2(23, "bmsk.wrap.b32");
    BITS_3(24, "sad.u32");
    BITS_3(25, "mad24.lo.s32");
    BITS_3(26, "mad24.hi.u32");
    BITS_2(27, "mul24.hi.s32");
    BITS_3(28, "dp4a.u32.s32");
    BITS_3(29, "dp4a.s32.u32");
    BITS_3(30, "dp2a.lo.u32.s32");
    BITS_3(31, "dp2a.hi.s32.u32");
    BITS_3(32, "mad.hi.s32");
    BITS_3(33, "mad.hi.sat.s32");
    BITS_2(34, "add.sat.s32");
    BITS_2(35, "sub.sat.s32");
    BITS_3(36, "slct.u32.s32");
    BITS_2(37, "set.lt.u32.s32");
    BITS_2(38, "set.hi.s32.u32");
    BITS_2(39, "shl.b32");
    BITS_2(40, "shr.s32");
    asm("fns.b32 %0, %1, %2, -2;" : "=r"(r) : "r"(x), "r"(y & 31));
    OUT(41) = r;
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
    OUT(42) = r;
    asm("cvt.pack.sat.s16.s32 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
    OUT(43) = r;
    asm("cvt.sat.s8.s32 %0, %1;" : "=r"(r) : "r"(x));
    OUT(44) = r;
    asm("cvt.sat.u16.s32 %0, %1;" : "=r"(r) : "r"(x));
    OUT(45) = r;
    asm("vadd.s32.s32.s32.sat %0, %1.b0, %2.h1;" : "=r"(r) : "r"(x), "r"(y));
    OUT(46) = r;
    asm("vabsdiff.u32.u32.u32.add %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
    OUT(47) = r;
}

extern "C" __global__ void float_forms(const float* a, const float* b, const float* c, float* out, int n) {
    INDEX;
    float x = a[i], y = b[i], z = c[i], r;
    unsigned bits;
#define FLOAT_1(K, FORM)                                             \
    asm(FORM " %0, %1;" : "=f"(r) : "f"(x));                         \
    OUT(K) = r
#define FLOAT_2(K, FORM)                                             \
    asm(FORM " %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));             \
    OUT(K) = r
#define FLOAT_3(K, FORM)                                             \
    asm(FORM " %0, %1, %2, %3;" : "=f"(r) : "f"(x), "f"(y), "f"(z)); \
    OUT(K) = r
    FLOAT_2(0, "add.ftz.f32");
    FLOAT_2(1, "add.rz.ftz.sat.f32");
    FLOAT_2(2, "sub.rp.f32");
    FLOAT_2(3, "mul.ftz.sat.f32");
    FLOAT_3(4, "fma.rn.ftz.f32");
    FLOAT_3(5, "fma.rm.ftz.sat.f32");
    FLOAT_3(6, "mad.rn.f32");
    FLOAT_2(7, "div.rn.ftz.f32");
    FLOAT_2(8, "min.NaN.f32");
    FLOAT_2(9, "max.ftz.NaN.f32");
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    OUT(10) = __uint_as_float(bits);
    FLOAT_2(11, "copysign.f32");
    FLOAT_1(12, "abs.ftz.f32");
    FLOAT_1(13, "neg.ftz.f32");
    FLOAT_1(14, "cvt.rni.f32.f32");
    FLOAT_1(15, "cvt.rpi.ftz.sat.f32.f32");
    FLOAT_1(16, "cvt.sat.f32.f32");
    FLOAT_1(17, "rcp.rn.ftz.f32");
    FLOAT_1(18, "sqrt.rz.ftz.f32");
#if __CUDA_ARCH__ >= 860
    FLOAT_2(19, "min.xorsign.abs.f32");
#endif
    FLOAT_3(20, "slct.f32.f32");
    FLOAT_2(21, "set.leu.f32.f32");
    asm("set.gt.ftz.u32.f32 %0, %1, %2;" : "=r"(bits) : "f"(x), "f"(y));
    OUT(22) = bits;
    asm("{ .reg .pred p; testp.subnormal.f32 p, %1; selp.u32 %0, 1, 0, p; }" : "=r"(bits) : "f"(x));
    OUT(23) = bits;
    asm("{ .reg .pred p; testp.number.f32 p, %1; selp.u32 %0, 1, 0, p; }" : "=r"(bits) : "f"(x));
    OUT(24) = bits;
    asm("{ .reg .pred p, q; setp.num.f32 p, %1, %2; setp.lt.and.ftz.f32 p|q, %1, %2, p; selp.u32 %0, 1, 2, q; }" : "=r"(bits) : "f"(x), "f"(y));
    OUT(25) = bits;
    asm("{ .reg .b32 t; cvt.rn.f16x2.f32 t, %1, %2; mov.b32 %0, t; }" : "=r"(bits) : "f"(x), "f"(y));
    OUT(26) = __uint_as_float(bits);
    asm("cvt.rz.relu.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(x), "f"(y));
    OUT(27) = __uint_as_float(bits);
}

// A word of memory as one number, as two and as four, by mov of vectors.
extern "C" __global__ void vector_moves(const unsigned long long* in, unsigned* out, int n) {
    INDEX;
    unsigned low, high, mixed;
    asm("{ .reg .b16 a, b, c, d; mov.b64 {%0, %1}, %3; mov.b64 {a, b, c, d}, %3; mov.b32 %2, {d, a}; }"
        : "=r"(low), "=r"(high), "=r"(mixed)
        : "l"(in[i]));
    OUT(0) = low, OUT(1) = high, OUT(2) = mixed;
    asm("{ .reg .b32 t; mov.b64 {_, t}, %1; mov.b32 %0, t; }" : "=r"(mixed) : "l"(in[i]));
    OUT(3) = mixed;
}

#if __CUDA_ARCH__ >= 900
// The second of two launches may begin before the first ends, and waits for it here.
extern "C" __global__ void produce_and_release(int* cells, int value) {
    cells[blockIdx.x * blockDim.x + threadIdx.x] = value;
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
extern "C" __global__ void wait_and_consume(const int* cells, int* out) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    out[blockIdx.x * blockDim.x + threadIdx.x] = cells[blockIdx.x * blockDim.x + threadIdx.x] + 1;
}

// Elects one lane of the mask.
extern "C" __global__ void elected(unsigned* out) {
    unsigned chosen, lane;
    asm volatile("{ .reg .pred p; elect.sync %1|p, -1; selp.u32 %0, 1, 0, p; }" : "=r"(chosen), "=r"(lane));
    out[threadIdx.x] = chosen | lane << 8;
}

// Vector reductions and bf16 atomics of target 90.
extern "C" __global__ void vector_atomics(float* cells, const float* in, unsigned* packed) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(cells), "f"(in[i]), "f"(1.0f), "f"(-in[i]), "f"(0.5f) : "memory");
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(cells + 4), "f"(in[i]), "f"(2.0f) : "memory");
    asm volatile("red.global.add.noftz.bf16x2 [%0], %1;" ::"l"(packed), "r"(0x3f803f80) : "memory");
}
#endif

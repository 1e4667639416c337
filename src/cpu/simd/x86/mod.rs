//! GEMM kernels for x86-64: AVX2 with FMA and F16C, AVX-VNNI, AVX-512 with VNNI or BF16.

mod amx;
mod expanded;
mod expansions;
mod float_row_dot;
mod iquants;
mod kquants;
mod legacy;
mod quant_row_dot;
mod row_format;
mod simd_ops;
mod ternary;

/// The row formats, by the names in the table of types.
mod rows {
    pub(super) use super::iquants::*;
    pub(super) use super::kquants::*;
    pub(super) use super::legacy::*;
    pub(super) use super::ternary::*;
}

/// Calls `$then! { [args] NAME FORMAT; ... }` with the expanded types whose rows have a format, which multiplies them in place.
macro_rules! for_each_row_in_place {
    ($then:ident!($($args:tt)*)) => { $then! { [$($args)*]
        IQ1_S IQ1_S; IQ1_M IQ1_M; IQ2_XXS IQ2_XXS; IQ2_XS IQ2_XS; IQ2_S IQ2_S; IQ3_XXS IQ3_XXS; IQ3_S IQ3_S; IQ4_XS IQ4_XS;
        TQ1_0 TQ1_0; TQ2_0 TQ2_0;
    } };
}

#[cfg(test)]
use row_format::EmulatedVnni;
use row_format::{Avx2, Vnni};
use simd_ops::{Avx2Ops, Avx512Ops};

use super::{GemmKernels, MicroKernelFn, RhsPacking, RowDotFn, float_tiles, quant_tiles, row_kernels};
use crate::tensor::DType;
use std::arch::is_x86_feature_detected;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

/// Whether the processor is AMD's.
pub(super) fn is_amd() -> bool {
    static IS: OnceLock<bool> = OnceLock::new();
    *IS.get_or_init(|| {
        let vendor = std::arch::x86_64::__cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
    })
}

/// Whether products of BF16 weights use bf16 dot products, not FMA: 0 if they do not, 1 if they do, otherwise not measured.
static BF16_DOTS: AtomicU8 = AtomicU8::new(u8::MAX);

/// Without a measurement: Zen 4 multiplies bf16 twice as fast as f32, Intel's cores half as fast, which columns of half the bytes
/// do not make up for.
pub(super) fn uses_bf16_dots() -> bool {
    match BF16_DOTS.load(Ordering::Relaxed) {
        0 => false,
        1 => true,
        _ => is_amd(),
    }
}

/// The kernels for BF16 weights by bf16 dot products and by FMA, where the processor has both.
pub(super) fn bf16_candidates() -> Option<[GemmKernels; 2]> {
    let all = available(DType::BF16);
    let named = |wanted| all.iter().find(|(name, _)| *name == wanted).map(|(_, kernels)| *kernels);
    Some([named(AVX512_BF16)?, named(AVX512)?])
}

/// Uses bf16 dot products for BF16 weights, or FMA, in programs that are prepared from now on.
pub(super) fn set_bf16_dots(enabled: bool) {
    BF16_DOTS.store(enabled.into(), Ordering::Relaxed);
}

const AVX512: &str = "AVX-512";
const AVX512_BF16: &str = "AVX512-BF16";

/// Writes back and drops the cache lines of `bytes` from all levels.
pub(super) fn flush_from_caches(bytes: &[u8]) {
    for line in bytes.chunks(64) {
        // SAFETY: SSE2 belongs to the architecture. The instruction may have the address of any readable byte, and changes none.
        unsafe { std::arch::x86_64::_mm_clflush(line.as_ptr()) };
    }
    // SAFETY: as above. The flushes end before the loads that follow.
    unsafe { std::arch::x86_64::_mm_mfence() };
}

/// The kernels of this processor for a type, fastest first.
pub(super) fn available(dtype: DType) -> Vec<(&'static str, GemmKernels)> {
    let base = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    let vnni = base && is_x86_feature_detected!("avxvnni");
    let avx512 = base
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl");
    let has_bf16 = avx512 && is_x86_feature_detected!("avx512bf16");
    let avx512_vnni = avx512 && is_x86_feature_detected!("avx512vnni");
    let (i32_dot, i16_dot) = (RhsPacking::of(dtype, true), RhsPacking::of(dtype, false));
    let mut all = Vec::new();
    // `panels`: panels of one micro-kernel call. `columns`: the most columns of its register tile.
    let mut add = |supported: bool, packing, name, kernels: Option<(RowDotFn, MicroKernelFn)>, panels, columns| {
        if let Some(((dot, micro_kernel), packing)) = kernels.zip(packing).filter(|_| supported) {
            all.push((name, GemmKernels { dtype, packing, panels, columns, dot, micro_kernel }));
        }
    };
    let (floats, bf16) = (float_row_dot::dot_of(dtype), Some(RhsPacking::Bf16));
    let bf16_kernels = float_row_dot::bf16_dot_of(dtype).zip(avx512_bf16::micro_kernel_of(dtype));
    add(avx512_vnni, i32_dot, "AVX512-VNNI", vnni_vl::dot_of(dtype).zip(avx512_quants::micro_kernel_of(dtype)), 2, 6);
    add(vnni, i32_dot, "AVX-VNNI", vnni::dot_of(dtype).zip(vnni_quants::micro_kernel_of(dtype)), 2, 4);
    let avx512_floats = float_row_dot::avx512_dot_of(dtype).zip(avx512_floats::micro_kernel_of(dtype));
    let bf16_dots = uses_bf16_dots();
    let amx_bf16 = float_row_dot::bf16_dot_of(dtype).zip(amx::micro_kernel_of(dtype));
    add(has_bf16 && amx::is_available(), bf16, "AMX-BF16", amx_bf16, 2, 8);
    add(has_bf16 && bf16_dots, bf16, AVX512_BF16, bf16_kernels, 2, 8);
    add(avx512, i32_dot, AVX512, avx512_floats, 2, 8);
    add(has_bf16 && !bf16_dots, bf16, AVX512_BF16, bf16_kernels, 2, 8);
    add(base, i16_dot, "AVX2", avx2::dot_of(dtype).zip(avx2_quants::micro_kernel_of(dtype)), 2, 4);
    add(base, i16_dot, "AVX2", floats.zip(avx2_floats::micro_kernel_of(dtype)), 2, 6);
    #[cfg(test)]
    {
        // Tests on every machine also run the VNNI kernels with emulated instructions, and the kernels in plain Rust.
        add(
            base,
            i32_dot,
            "emulated VNNI",
            emulated_vnni::dot_of(dtype).zip(emulated_quants::micro_kernel_of(dtype)),
            2,
            4,
        );
        add(base, i32_dot, "portable", avx2::dot_of(dtype).zip(super::portable_i32::micro_kernel_of(dtype)), 2, 4);
        add(
            base,
            i16_dot,
            "portable, i16 sums",
            avx2::dot_of(dtype).zip(super::portable_i16::micro_kernel_of(dtype)),
            2,
            4,
        );
        add(
            base,
            i32_dot,
            "portable, signed",
            avx2::dot_of(dtype).zip(super::portable_signed::micro_kernel_of(dtype)),
            1,
            4,
        );
        add(base, i32_dot, "portable", floats.zip(super::portable_floats::micro_kernel_of(dtype)), 2, 4);
        add(true, bf16, "portable, bf16", super::portable_bf16_kernels(dtype), 2, 4);
    }
    all
}

row_kernels!(avx2, Avx2, "avx2,fma,f16c");
row_kernels!(vnni_vl, VnniVl, "avx2,fma,f16c,avx512bw,avx512vnni,avx512vl");
row_kernels!(vnni, Vnni, "avx2,fma,f16c,avxvnni");
#[cfg(test)]
row_kernels!(emulated_vnni, EmulatedVnni, "avx2,fma,f16c");

quant_tiles!(avx2_quants, super::Avx2Ops<super::Avx2>, 2, [4 by 1, 2 by 2, 1 by 2],
    #[target_feature(enable = "avx2,fma,f16c")]);
quant_tiles!(vnni_quants, super::Avx2Ops<super::Vnni>, 2, [4 by 1, 2 by 2, 1 by 2],
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]);
quant_tiles!(avx512_quants, super::Avx512Ops, 2, [6 by 2, 4 by 2, 2 by 2, 1 by 2],
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]);
#[cfg(test)]
quant_tiles!(emulated_quants, super::Avx2Ops<super::EmulatedVnni>, 2, [4 by 1, 2 by 2, 1 by 2],
    #[target_feature(enable = "avx2,fma,f16c")]);
float_tiles!(avx2_floats, super::Avx2Ops<super::Avx2>, [F32: F32, F16: F16, BF16: BF16], 2, [6 by 1, 4 by 1, 2 by 2, 1 by 2],
    #[target_feature(enable = "avx2,fma,f16c")]);
float_tiles!(avx512_floats, super::Avx512Ops, [F32: F32, F16: F16, BF16: BF16], 2, [8 by 2, 4 by 2, 2 by 2, 1 by 2],
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]);
float_tiles!(avx512_bf16, super::Avx512Ops, [BF16: Bf16Pairs], 2, [8 by 2, 4 by 2, 2 by 2, 1 by 2],
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512bf16")]);

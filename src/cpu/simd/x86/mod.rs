//! Kernels for x86-64: AVX2 with FMA and F16C, the same with VNNI, and AVX-512.

mod blocks;
mod floats;
mod format;
mod kquants;
mod lanes;
mod legacy;

/// The formats of rows where they lie, by the names in the table of types.
mod rows {
    pub(super) use super::kquants::*;
    pub(super) use super::legacy::*;
}

#[cfg(test)]
use format::EmulatedVnni;
use format::{Avx2, Vnni};
use lanes::{Narrow, Wide};

use super::{Dot, Kernels, Packing, Tile, code_tiles, float_tiles, row_kernels};
use crate::tensor::DType;
use std::arch::is_x86_feature_detected;
use std::sync::OnceLock;

/// Whether AMD made the processor.
pub(super) fn is_amd() -> bool {
    static IS: OnceLock<bool> = OnceLock::new();
    *IS.get_or_init(|| {
        let vendor = std::arch::x86_64::__cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
    })
}

/// Kernels for a type on this processor, fastest first.
pub(super) fn available(dtype: DType) -> Vec<(&'static str, Kernels)> {
    let base = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    let vnni = base && is_x86_feature_detected!("avxvnni");
    let wide = base
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl");
    let has_bf16 = wide && is_x86_feature_detected!("avx512bf16");
    let wide_vnni = wide && is_x86_feature_detected!("avx512vnni");
    let (exact, halves) = (Packing::of(dtype, true), Packing::of(dtype, false));
    let mut all = Vec::new();
    let mut add = |has: bool, packing, name, set: Option<(Dot, Tile)>, strips, columns| {
        if let Some(((dot, tile), packing)) = set.zip(packing).filter(|_| has) {
            all.push((name, Kernels { dtype, packing, strips, columns, dot, tile }));
        }
    };
    let (floats, bf16) = (floats::dot_of(dtype), Some(Packing::Bf16));
    let bf16_kernels = floats::bf16_dot_of(dtype).zip(wide_bf16::tile_of(dtype));
    add(wide_vnni, exact, "AVX512-VNNI", vnni_vl::dot_of(dtype).zip(wide_codes::tile_of(dtype)), 2, 6);
    add(vnni, exact, "AVX-VNNI", vnni::dot_of(dtype).zip(vnni_codes::tile_of(dtype)), 2, 4);
    // Zen 4 multiplies bf16 twice as fast as f32; cores of Intel half as fast, for which columns of half the bytes do not make up.
    add(has_bf16 && is_amd(), bf16, "AVX512-BF16", bf16_kernels, 2, 8);
    add(wide, exact, "AVX-512", floats::wide_dot_of(dtype).zip(wide_floats::tile_of(dtype)), 2, 8);
    add(base, halves, "AVX2", avx2::dot_of(dtype).zip(avx2_codes::tile_of(dtype)), 2, 4);
    add(base, halves, "AVX2", floats.zip(avx2_floats::tile_of(dtype)), 2, 6);
    #[cfg(test)]
    {
        // The kernels of VNNI without its instruction, and of nothing at all: so every machine tests them.
        add(base, exact, "emulated VNNI", emulated_vnni::dot_of(dtype).zip(emulated_codes::tile_of(dtype)), 2, 4);
        add(base, exact, "portable", avx2::dot_of(dtype).zip(super::portable_codes::tile_of(dtype)), 2, 4);
        add(base, halves, "portable, in pairs", avx2::dot_of(dtype).zip(super::portable_pairs::tile_of(dtype)), 2, 4);
        add(base, exact, "portable, signed", avx2::dot_of(dtype).zip(super::portable_signed::tile_of(dtype)), 1, 4);
        add(base, exact, "portable", floats.zip(super::portable_floats::tile_of(dtype)), 2, 4);
        add(has_bf16 && !is_amd(), bf16, "AVX512-BF16", bf16_kernels, 2, 8);
        add(true, bf16, "portable, bf16", super::portable_bf16_kernels(dtype), 2, 4);
    }
    all
}

row_kernels!(avx2, Avx2, "avx2,fma,f16c");
row_kernels!(vnni_vl, VnniVl, "avx2,fma,f16c,avx512vnni,avx512vl");
row_kernels!(vnni, Vnni, "avx2,fma,f16c,avxvnni");
#[cfg(test)]
row_kernels!(emulated_vnni, EmulatedVnni, "avx2,fma,f16c");

code_tiles!(avx2_codes, super::Narrow<super::Avx2>, 2, [4 by 1, 2 by 2, 1 by 2], #[target_feature(enable = "avx2,fma,f16c")]);
code_tiles!(vnni_codes, super::Narrow<super::Vnni>, 2, [4 by 1, 2 by 2, 1 by 2], #[target_feature(enable = "avx2,fma,f16c,avxvnni")]);
code_tiles!(wide_codes, super::Wide, 2, [6 by 2, 4 by 2, 2 by 2, 1 by 2],
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]);
#[cfg(test)]
code_tiles!(emulated_codes, super::Narrow<super::EmulatedVnni>, 2, [4 by 1, 2 by 2, 1 by 2],
    #[target_feature(enable = "avx2,fma,f16c")]);
float_tiles!(avx2_floats, super::Narrow<super::Avx2>, [F32: F32, F16: F16, BF16: BF16], 2, [6 by 1, 4 by 1, 2 by 2, 1 by 2], #[target_feature(enable = "avx2,fma,f16c")]);
float_tiles!(wide_floats, super::Wide, [F32: F32, F16: F16, BF16: BF16], 2, [8 by 2, 4 by 2, 2 by 2, 1 by 2],
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]);
float_tiles!(wide_bf16, super::Wide, [BF16: Bf16Pairs], 2, [8 by 2, 4 by 2, 2 by 2, 1 by 2],
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512bf16")]);

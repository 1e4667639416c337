//! Kernels for x86-64: AVX2 with FMA and F16C, and the same with VNNI's dot products in two encodings.

mod blocks;
mod floats;
mod format;
mod kquants;
mod legacy;

use super::{Kernels, Packing};
use crate::tensor::DType;
use format::Format;
use std::arch::is_x86_feature_detected;

/// Kernels for a type on this processor, fastest first.
pub(super) fn available(dtype: DType) -> [Option<(&'static str, Kernels)>; 4] {
    let base = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    let vl = base && is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512vl");
    let vex = base && is_x86_feature_detected!("avxvnni");
    let named = |has: bool, name, kernels: fn(DType) -> Option<Kernels>| {
        if has { kernels(dtype).map(|k| (name, k)) } else { None }
    };
    [
        named(vl, "AVX512-VNNI", vnni_vl::kernels),
        named(vex, "AVX-VNNI", vnni::kernels),
        named(base, "AVX2", |dtype| avx2::kernels(dtype).or_else(|| floats::kernels(dtype))),
        named(base, "emulated VNNI", emulated),
    ]
}

/// The kernels of VNNI without its instruction: for tests, which so cover them on every machine.
#[cfg(test)]
fn emulated(dtype: DType) -> Option<Kernels> {
    emulated_vnni::kernels(dtype)
}

#[cfg(not(test))]
fn emulated(_: DType) -> Option<Kernels> {
    None
}

/// The kernels of block types, compiled for one instruction set.
macro_rules! block_kernels {
    ($module:ident, $products:ident, $features:literal) => {
        mod $module {
            use super::format::$products;
            use super::{DType, Format, Kernels, Packing, blocks, kquants, legacy};
            use crate::cpu::simd::{STRIP, Sums};

            /// The kernels for a block type. They need the instruction set.
            pub(super) fn kernels(dtype: DType) -> Option<Kernels> {
                Some(match dtype {
                    DType::Q4_0 => of::<legacy::Q4_0>(),
                    DType::Q4_1 => of::<legacy::Q4_1>(),
                    DType::Q5_0 => of::<legacy::Q5_0>(),
                    DType::Q5_1 => of::<legacy::Q5_1>(),
                    DType::Q8_0 => of::<legacy::Q8_0>(),
                    DType::IQ4_NL => of::<legacy::IQ4_NL>(),
                    DType::MXFP4 => of::<legacy::MXFP4>(),
                    DType::Q2_K => of::<kquants::Q2_K>(),
                    DType::Q3_K => of::<kquants::Q3_K>(),
                    DType::Q4_K => of::<kquants::Q4_K>(),
                    DType::Q5_K => of::<kquants::Q5_K>(),
                    DType::Q6_K => of::<kquants::Q6_K>(),
                    _ => return None,
                })
            }

            fn of<F: Format>() -> Kernels {
                Kernels {
                    dtype: F::DTYPE,
                    packing: Packing::Codes { sub: F::SUB, shared: F::DTYPE.block_len() == 256 },
                    few: 6,
                    strip: blocks::strip_bytes::<F, $products>(),
                    columns: 4,
                    dot: dot::<F>,
                    expand: expand::<F>,
                    tile: tile::<F>,
                }
            }

            /// # Safety
            /// As [`blocks::dot`].
            #[target_feature(enable = $features)]
            unsafe fn dot<F: Format>(rows: &[&[u8]], columns: &[&[u8]], padded: usize, out: &mut [f32]) {
                // SAFETY: as the caller vouches; this function has the instructions.
                unsafe { blocks::dot::<F, $products>(rows, columns, padded, out) }
            }

            /// # Safety
            /// As [`blocks::expand`].
            #[target_feature(enable = $features)]
            unsafe fn expand<F: Format>(rows: &[&[u8]; STRIP], padded: usize, strip: &mut [u8]) {
                // SAFETY: as the caller vouches; this function has the instructions.
                unsafe { blocks::expand::<F, $products>(rows, padded, strip) }
            }

            /// # Safety
            /// As [`blocks::tile`].
            #[target_feature(enable = $features)]
            unsafe fn tile<F: Format>(strip: &[u8], columns: &[&[u8]], padded: usize, out: &mut [Sums]) {
                // SAFETY: as the caller vouches; this function has the instructions.
                unsafe { blocks::tile::<F, $products>(strip, columns, padded, out) }
            }
        }
    };
}

block_kernels!(avx2, Avx2, "avx2,fma,f16c");
block_kernels!(vnni_vl, VnniVl, "avx2,fma,f16c,avx512vnni,avx512vl");
block_kernels!(vnni, Vnni, "avx2,fma,f16c,avxvnni");
#[cfg(test)]
block_kernels!(emulated_vnni, EmulatedVnni, "avx2,fma,f16c");

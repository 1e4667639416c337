//! GEMM kernels for AArch64: baseline NEON, the dot products of `dotprod`, and the matrix products of `i8mm`.

mod dot_instructions;
mod expanded;
mod expansions;
mod float_row_dot;
mod i8mm;
mod kquants;
mod legacy;
mod quant_row_dot;
mod row_format;
mod simd_ops;

/// The row formats, by the names in the table of types.
mod rows {
    pub(super) use super::kquants::*;
    pub(super) use super::legacy::*;
}

/// As that of x86-64: none.
macro_rules! for_each_row_in_place {
    ($then:ident!($($args:tt)*)) => { $then! { [$($args)*] } };
}

pub(super) use dot_instructions::prefetch;
use dot_instructions::{BaseNeon, DotProd};
use simd_ops::NeonOps;

use super::panel_format::PanelFormat;
use super::{
    GemmKernels, MAX_TILE_COLUMNS, MicroKernelFn, RhsPacking, RowDotFn, TileOutput, float_tiles, quant_tiles,
    row_kernels, with_panel_format,
};
use crate::tensor::DType;
use crate::tensor::table::for_each_simd;
use std::arch::is_aarch64_feature_detected;

/// Columns from which on unpacking a panel for `smmla` pays; fewer columns use the dot products.
const MIN_I8MM_COLUMNS: usize = 3;

/// The kernels of this processor for a type, fastest first.
pub(super) fn available(dtype: DType) -> Vec<(&'static str, GemmKernels)> {
    let dotprod = is_aarch64_feature_detected!("dotprod");
    let i8mm = dotprod && is_aarch64_feature_detected!("i8mm");
    let i32_dot = RhsPacking::of(dtype, true);
    let mut all = Vec::new();
    // `panels`: panels of one micro-kernel call. `columns`: the most columns of its register tile.
    let mut add = |supported: bool, packing, name, kernels: Option<(RowDotFn, MicroKernelFn)>, panels, columns| {
        if let Some(((dot, micro_kernel), packing)) = kernels.zip(packing).filter(|_| supported) {
            all.push((name, GemmKernels { dtype, packing, panels, columns, dot, micro_kernel }));
        }
    };
    let floats = float_row_dot::dot_of(dtype);
    add(i8mm, i32_dot, "NEON-I8MM", dotprod_rows::dot_of(dtype).zip(i8mm_micro_kernel_of(dtype)), 1, MAX_TILE_COLUMNS);
    add(
        dotprod,
        i32_dot,
        "NEON-DOTPROD",
        dotprod_rows::dot_of(dtype).zip(dotprod_quants::micro_kernel_of(dtype)),
        1,
        4,
    );
    add(true, i32_dot, "NEON", neon_rows::dot_of(dtype).zip(neon_quants::micro_kernel_of(dtype)), 1, 4);
    add(true, i32_dot, "NEON", floats.zip(neon_floats::micro_kernel_of(dtype)), 1, 5);
    #[cfg(test)]
    {
        let rows = neon_rows::dot_of(dtype);
        add(true, i32_dot, "portable", rows.zip(super::portable_i32::micro_kernel_of(dtype)), 2, 4);
        add(
            true,
            RhsPacking::of(dtype, false),
            "portable, i16 sums",
            rows.zip(super::portable_i16::micro_kernel_of(dtype)),
            2,
            4,
        );
        add(true, i32_dot, "portable, signed", rows.zip(super::portable_signed::micro_kernel_of(dtype)), 1, 4);
        add(true, i32_dot, "portable", floats.zip(super::portable_floats::micro_kernel_of(dtype)), 2, 4);
        add(true, Some(RhsPacking::Bf16), "portable, bf16", super::portable_bf16_kernels(dtype), 2, 4);
    }
    all
}

row_kernels!(neon_rows, BaseNeon, "neon");
row_kernels!(dotprod_rows, DotProd, "neon,dotprod");

quant_tiles!(neon_quants, super::NeonOps<super::BaseNeon>, 1, [4 by 1, 2 by 1, 1 by 1], #[target_feature(enable = "neon")]);
quant_tiles!(dotprod_quants, super::NeonOps<super::DotProd>, 1, [4 by 1, 2 by 1, 1 by 1],
    #[target_feature(enable = "neon,dotprod")]);
float_tiles!(neon_floats, super::NeonOps<super::BaseNeon>, [F32: F32, F16: F16, BF16: BF16], 1,
    [5 by 1, 3 by 1, 2 by 1, 1 by 1], #[target_feature(enable = "neon")]);

/// The micro-kernel of a block type. It needs `dotprod` and `i8mm`.
fn i8mm_micro_kernel_of(dtype: DType) -> Option<MicroKernelFn> {
    let of_format: Option<MicroKernelFn> = for_each_simd!(with_panel_format!(dtype i8mm_micro_kernel));
    // Types whose rows are expanded have no form for `smmla`.
    of_format.or_else(|| dotprod_quants::micro_kernel_of(dtype))
}

/// By `smmla`, or by dot products for fewer than [`MIN_I8MM_COLUMNS`] columns.
///
/// # Safety
/// The processor has `dotprod` and `i8mm`; otherwise as [`super::quant_dot::micro_kernel`].
#[target_feature(enable = "neon,dotprod,i8mm")]
unsafe fn i8mm_micro_kernel<F: PanelFormat>(panels: &[*const u8], columns: &[&[u8]], k: usize, out: TileOutput<'_>) {
    // SAFETY: the caller meets this function's requirements, and this function is compiled with the instructions.
    unsafe {
        match dotprod_quants::micro_kernel_of(F::DTYPE) {
            Some(dot_micro_kernel) if columns.len() < MIN_I8MM_COLUMNS => dot_micro_kernel(panels, columns, k, out),
            _ => i8mm::micro_kernel::<F>(panels[0], columns, k, out),
        }
    }
}

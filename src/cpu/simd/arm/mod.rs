//! Kernels for AArch64: NEON, which every processor has, with the dot products of `dotprod` and the matrix products of
//! `i8mm` where they are there.

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
mod matrix;
mod products;

use lanes::Neon;
use products::{DotProd, Plain};

use super::formats::Format;
use super::{Dot, Kernels, MAX_TILE, Out, Packing, Tile, code_tiles, float_tiles, of_format, row_kernels};
use crate::tensor::DType;
use crate::tensor::table::for_each_simd;
use std::arch::is_aarch64_feature_detected;

/// Columns from which on taking strips apart for matrix products is worth it: fewer meet the strips as they are.
const MANY: usize = 3;

/// Kernels for a type on this processor, fastest first.
pub(super) fn available(dtype: DType) -> Vec<(&'static str, Kernels)> {
    let dotprod = is_aarch64_feature_detected!("dotprod");
    let i8mm = dotprod && is_aarch64_feature_detected!("i8mm");
    let exact = Packing::of(dtype, true);
    let mut all = Vec::new();
    let mut add = |has: bool, packing, name, set: Option<(Dot, Tile)>, strips, columns| {
        if let Some(((dot, tile), packing)) = set.zip(packing).filter(|_| has) {
            all.push((name, Kernels { dtype, packing, strips, columns, dot, tile }));
        }
    };
    let floats = floats::dot_of(dtype);
    add(i8mm, exact, "NEON-I8MM", dotprod_rows::dot_of(dtype).zip(i8mm_tile_of(dtype)), 1, MAX_TILE);
    add(dotprod, exact, "NEON-DOTPROD", dotprod_rows::dot_of(dtype).zip(dotprod_codes::tile_of(dtype)), 1, 4);
    add(true, exact, "NEON", plain_rows::dot_of(dtype).zip(plain_codes::tile_of(dtype)), 1, 4);
    add(true, exact, "NEON", floats.zip(neon_floats::tile_of(dtype)), 1, 5);
    #[cfg(test)]
    {
        let rows = plain_rows::dot_of(dtype);
        add(true, exact, "portable", rows.zip(super::portable_codes::tile_of(dtype)), 2, 4);
        add(
            true,
            Packing::of(dtype, false),
            "portable, in pairs",
            rows.zip(super::portable_pairs::tile_of(dtype)),
            2,
            4,
        );
        add(true, exact, "portable, signed", rows.zip(super::portable_signed::tile_of(dtype)), 1, 4);
        add(true, exact, "portable", floats.zip(super::portable_floats::tile_of(dtype)), 2, 4);
        add(true, Some(Packing::Bf16), "portable, bf16", super::portable_bf16_kernels(dtype), 2, 4);
    }
    all
}

row_kernels!(plain_rows, Plain, "neon");
row_kernels!(dotprod_rows, DotProd, "neon,dotprod");

code_tiles!(plain_codes, super::Neon<super::Plain>, 1, [4 by 1, 2 by 1, 1 by 1], #[target_feature(enable = "neon")]);
code_tiles!(dotprod_codes, super::Neon<super::DotProd>, 1, [4 by 1, 2 by 1, 1 by 1], #[target_feature(enable = "neon,dotprod")]);
float_tiles!(neon_floats, super::Neon<super::Plain>, [F32: F32, F16: F16, BF16: BF16], 1, [5 by 1, 3 by 1, 2 by 1, 1 by 1], #[target_feature(enable = "neon")]);

/// The products of a block type's strips. They need `dotprod` and `i8mm`.
fn i8mm_tile_of(dtype: DType) -> Option<Tile> {
    for_each_simd!(of_format!(dtype i8mm_tile))
}

/// # Safety
/// The processor has `dotprod` and `i8mm`; otherwise as [`super::codes::tile`].
#[target_feature(enable = "neon,dotprod,i8mm")]
unsafe fn i8mm_tile<F: Format>(strips: &[*const u8], columns: &[&[u8]], k: usize, out: Out<'_>) {
    // SAFETY: as the caller vouches; this function has the instructions.
    unsafe {
        match dotprod_codes::tile_of(F::DTYPE) {
            Some(few) if columns.len() < MANY => few(strips, columns, k, out),
            _ => matrix::tile::<F>(strips[0], columns, k, out),
        }
    }
}

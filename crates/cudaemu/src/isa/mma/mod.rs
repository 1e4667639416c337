//! Warp-level matrix products: `mma` (PTX ISA, "Warp Level Matrix Instructions").
//!
//! Integers are summed exactly. Sums of floating-point products are truncated as tensor cores truncate them: [`product`] has the
//! model and its sources. PTX leaves this open, and the model is the least accurate one of the emulated GPUs, so that a bound on
//! errors that holds here holds on each of them. NaN results are 0x7fffffff (`.f16`: 0x7fff).
//!
//! | file | content |
//! |---|---|
//! | `matrix_spec` | element types, and the encoding of a row's constant |
//! | `fragment` | distribution of a matrix over the lanes |
//! | `product` | products of whole matrices |
//! | `dense` | the rows and their handlers |

mod dense;
mod fragment;
mod matrix_spec;
mod product;
#[cfg(test)]
mod tests;

use super::Family;
use crate::exec_context::ExecContext;
use crate::fault::{Fault, FaultKind};

pub(crate) fn family() -> Family {
    Family { title: "Matrix products", rows: dense::rows(), hints: vec![] }
}

/// Reports a matrix instruction that not all lanes of a warp execute together.
pub(crate) fn require_whole_warp(cx: &mut ExecContext<'_>, mask: u32) -> Result<(), Box<Fault>> {
    if mask == u32::MAX {
        return Ok(());
    }
    let lane = (!mask).trailing_zeros() as usize;
    let text = format!(
        "a matrix instruction needs all 32 lanes of the warp; the mask of those that execute it is {mask:#010x}"
    );
    cx.report_kind(FaultKind::InactiveLane(text), lane)
}

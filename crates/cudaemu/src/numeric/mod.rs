//! Scalar arithmetic with PTX's semantics: pure, safe functions that instruction handlers call once per lane.
//!
//! Conventions:
//! - `.f32` and `.f64` are passed as `f32` and `f64` (bit patterns of NaNs survive moves), `.f16` and `.bf16` as their 16 bits
//!   in a `u16`, packed pairs as a `u32` with element 0 in the lower half.
//! - NaN results: `.f32` arithmetic returns 0x7fffffff, `.f16` and `.bf16` 0x7fff; `.f64` quiets and returns the first NaN
//!   operand (in operand order) and generates 0xfff8000000000000. PTX leaves the `.f64` payload open; this is an assumption
//!   about hardware.
//! - `.ftz` flushes subnormal `.f32` inputs and, after rounding, subnormal results to zero of the same sign.
//! - Modes are plain values. In a lane loop, match the mode once outside and pass a constant (such as [`Mode::RN`]) in the hot
//!   arm: everything is inlined, so the loop becomes straight-line code that the compiler can vectorise. For a version with
//!   target features (above all fused multiply-add) write the loop out in the function that has them: a closure passed to a
//!   generic helper is compiled without them.

pub mod approx;
pub mod bits;
pub mod convert;
pub mod double;
pub mod half;
pub mod integer;
mod round;
pub mod single;
mod types;

#[cfg(test)]
mod tests;

pub use types::{Comparison, FloatType, IntRounding, IntType, MinMax, Mode, Rounding, Testp, compare};

//! `cvt` (PTX ISA, "Data Movement and Conversion Instructions"): single values in [`scalar`], packed pairs in
//! [`packed`].

mod packed;
mod scalar;

use super::vector::Host;
use super::{Family, Row};
use crate::numeric::Rounding;
use crate::numeric::convert::FloatCvt;

pub(crate) fn family() -> Family {
    Family { title: "Conversion", rows: rows(Host::detect()), hints: vec![] }
}

pub(crate) fn rows(host: Host) -> Vec<Row> {
    let mut rows = Vec::new();
    scalar::rows(&mut rows, host);
    packed::rows(&mut rows, host);
    rows
}

/// Rounding modifiers. Their index is in the low three bits of a row's constant. A conversion without a modifier is exact, so
/// its rounding does not matter.
const ROUNDINGS: [(&str, Rounding); 6] = [
    ("", Rounding::Rn),
    (".rn", Rounding::Rn),
    (".rz", Rounding::Rz),
    (".rm", Rounding::Rm),
    (".rp", Rounding::Rp),
    (".rna", Rounding::Rna),
];

/// Bits of a row's constant above the rounding index: the other modifiers.
const FTZ: u32 = 1 << 3;
const SAT: u32 = 1 << 4;

/// Decodes the modifiers of a row's constant.
#[inline(always)]
fn modifiers(k: u32) -> FloatCvt {
    FloatCvt {
        // `%` spares the bounds check; the index is always smaller.
        round: ROUNDINGS[(k & 7) as usize % ROUNDINGS.len()].1,
        ftz: k & FTZ != 0,
        sat: k & SAT != 0,
    }
}

//! Known values, and comparison with `rustc_apfloat` or with a bit-by-bit implementation of the PTX ISA's definitions.

mod bits;
mod convert;
mod double;
mod half;
mod integer;
mod single;

use super::Rounding;
use rustc_apfloat::Round;

/// The rounding modes of `.f32` and `.f64` arithmetic, with the oracle's name.
const ROUNDINGS: [(Rounding, Round); 4] = [
    (Rounding::Rn, Round::NearestTiesToEven),
    (Rounding::Rz, Round::TowardZero),
    (Rounding::Rm, Round::TowardNegative),
    (Rounding::Rp, Round::TowardPositive),
];

/// Bit patterns of special `.f32` values: zeros, subnormals, powers, ties, limits of ranges, infinities, NaNs.
const EDGES: [u32; 34] = [
    0x0000_0000,
    0x8000_0000,
    0x0000_0001,
    0x8000_0001,
    0x007f_ffff,
    0x807f_ffff,
    0x0080_0000,
    0x8080_0000,
    0x0080_0001,
    0x0100_0000,
    0x3380_0000,
    0x3380_0001,
    0x3f00_0000,
    0x3f7f_ffff,
    0x3f80_0000,
    0xbf80_0000,
    0x3f80_0001,
    0x3fff_ffff,
    0x4000_0000,
    0x4b00_0001,
    0x4b80_0000,
    0xcb80_0001,
    0x4700_0000,
    0x477f_e000,
    0x477f_efff,
    0x477f_f000,
    0x7e80_0000,
    0x7f00_0001,
    0x7f7f_ffff,
    0xff7f_ffff,
    0x7f80_0000,
    0xff80_0000,
    0x7fc0_0000,
    0xff80_0001,
];

/// Random `.f32` bits, half of them with exponents near that of 1.0, where operations interact.
fn random_f32(rng: &mut fastrand::Rng) -> f32 {
    let bits = rng.u32(..);
    let near = (bits & 0x807f_ffff) | rng.u32(100..155) << 23;
    f32::from_bits(if rng.bool() { near } else { bits })
}

/// All pairs of edges, then `count` random pairs.
fn pairs(seed: u64, count: usize) -> impl Iterator<Item = (f32, f32)> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let edges = EDGES.iter().flat_map(|&a| EDGES.iter().map(move |&b| (f32::from_bits(a), f32::from_bits(b))));
    let random = std::iter::repeat_with(move || (random_f32(&mut rng), random_f32(&mut rng)));
    edges.chain(random.take(count))
}

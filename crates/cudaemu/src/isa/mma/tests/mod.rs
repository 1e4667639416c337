//! Matrix products against the definition of their sums. `layout` implements the fragment layouts a second time, from the manual; `shapes`
//! checks every row, `special` the rules for rounding, overflow and NaN.

mod layout;
mod shapes;
mod special;

use super::matrix_spec::{Accumulator, Element};
use layout::Shape;

/// Shape and types of a row, parsed from its name.
#[derive(Clone, Copy, Debug)]
struct Spec {
    shape: Shape,
    a: Element,
    b: Element,
    d: Accumulator,
    c: Accumulator,
}

const ELEMENTS: [Element; 5] = [Element::F16, Element::Bf16, Element::Tf32, Element::S8, Element::U8];
const ACCUMULATORS: [Accumulator; 3] = [Accumulator::F16, Accumulator::F32, Accumulator::S32];

/// Parses `….m16n8k16.row.col{…}.dtype.atype.btype.ctype{…}`.
fn parse_spec(name: &str) -> Spec {
    let parts: Vec<&str> = name.split('.').collect();
    let extents: Vec<usize> = parts
        .iter()
        .find(|part| part.starts_with('m') && part.contains('k'))
        .map_or(vec![], |part| part.split(['m', 'n', 'k']).filter_map(|number| number.parse().ok()).collect());
    let element = |name: &str| ELEMENTS.into_iter().find(|element| element.name() == name);
    let accumulator = |name: &str| ACCUMULATORS.into_iter().find(|accumulator| accumulator.name() == name);
    let types =
        parts.windows(4).find_map(|w| Some((accumulator(w[0])?, element(w[1])?, element(w[2])?, accumulator(w[3])?)));
    let (d, a, b, c) = types.expect("four types");
    Spec { shape: Shape { m: extents[0], n: extents[1], k: extents[2] }, a, b, d, c }
}

/// The exact value of an element.
fn element_value(element: Element, bits: u64) -> f64 {
    let small = |width: u32, signed: bool| {
        let top = (bits as i64) << (64 - width);
        if signed { (top >> (64 - width)) as f64 } else { (bits & ((1 << width) - 1)) as f64 }
    };
    let minifloat = |exponent_bits: u32, fraction_bits: u32, bias: i32| {
        let fraction = (bits & ((1 << fraction_bits) - 1)) as f64 / f64::from(1 << fraction_bits);
        let exponent = (bits >> fraction_bits & ((1 << exponent_bits) - 1)) as i32;
        let sign = if bits >> (exponent_bits + fraction_bits) & 1 == 1 { -1.0 } else { 1.0 };
        if exponent == 0 {
            sign * fraction * 2f64.powi(1 - bias)
        } else {
            sign * (1.0 + fraction) * 2f64.powi(exponent - bias)
        }
    };
    match element {
        Element::F16 => minifloat(5, 10, 15),
        Element::Bf16 => minifloat(8, 7, 127),
        Element::Tf32 => f64::from(f32::from_bits(bits as u32 & !0x1fff)),
        Element::S8 => small(8, true),
        Element::U8 => small(8, false),
    }
}

/// The exact value of an accumulator.
fn accumulator_value(accumulator: Accumulator, bits: u64) -> f64 {
    match accumulator {
        Accumulator::F16 => element_value(Element::F16, bits),
        Accumulator::F32 => f64::from(f32::from_bits(bits as u32)),
        Accumulator::S32 => f64::from(bits as u32 as i32),
    }
}

/// A finite element of moderate size, so that sums of products are exact in `f64`, and most sums lose bits.
fn random_element(random: &mut fastrand::Rng, element: Element) -> u64 {
    let float = |random: &mut fastrand::Rng, exponent_bits: u32, fraction_bits: u32, bias: u64| {
        let sign = random.u64(0..2) << (exponent_bits + fraction_bits);
        sign | (bias - 3 + random.u64(0..6)) << fraction_bits | random.u64(0..1 << fraction_bits)
    };
    match element {
        Element::F16 => float(random, 5, 10, 15),
        Element::Bf16 => float(random, 8, 7, 127),
        // With bits below the tenth fraction bit, which the instruction ignores.
        Element::Tf32 => float(random, 8, 23, 127),
        _ => random.u64(0..1 << element.bits()),
    }
}

//! Every row of `mma` on random matrices, against sums in integers by the definition of the model in `product`.

use std::collections::HashMap;

use super::super::family;
use super::super::matrix_spec::{Accumulator, Element};
use super::layout;
use super::{Spec, accumulator_value, element_value, parse_spec, random_element};
use crate::isa::harness::Harness;

/// Bits by row and column.
type Matrix = HashMap<(usize, usize), u64>;

/// Row and column of a lane's element.
type Layout = Box<dyn Fn(usize, usize) -> (usize, usize)>;

/// Packs elements of `bits` bits, lowest first, into registers of 32 bits.
fn pack(elements: &[u64], bits: usize) -> Vec<i128> {
    let per = 32 / bits;
    let word = |chunk: &[u64]| chunk.iter().rev().fold(0u128, |word, &element| word << bits | u128::from(element));
    elements.chunks(per).map(|chunk| word(chunk) as i128).collect()
}

/// Width of an accumulator in bits.
fn accumulator_bits(accumulator: Accumulator) -> usize {
    match accumulator {
        Accumulator::F16 => 16,
        _ => 32,
    }
}

/// The bits of D for its value, which is rounded to nearest even if D is f16.
fn result_bits(d: Accumulator, value: f64) -> u64 {
    match d {
        Accumulator::F16 => {
            let exponent = exponent(value, -14).unwrap_or(-14);
            let unit = 2f64.powi(exponent - 10);
            let result = (value / unit).round_ties_even() * unit;
            u64::from(half::f16::from_f64(result).to_bits())
        }
        Accumulator::F32 => u64::from((value as f32).to_bits()),
        Accumulator::S32 => value as i64 as u64 & 0xffff_ffff,
    }
}

/// The exponent of a number, at least `least`; that of zero is `None`.
fn exponent(value: f64, least: i32) -> Option<i32> {
    let greater = |exponent: &i32| 2f64.powi(exponent + 1) > value.abs();
    (value != 0.0).then(|| (least..).find(greater).unwrap_or(i32::MAX))
}

/// The sum of one step of a tensor core, in integers. Terms are values with their exponents.
fn step(terms: &[(f64, Option<i32>)], d: Accumulator) -> f64 {
    let largest = terms.iter().filter_map(|term| term.1).max().unwrap_or(-126).max(-126);
    let unit = 2f64.powi(largest - 24);
    let sum: i128 = terms.iter().map(|(value, _)| (value / unit) as i128).sum();
    // f32 keeps the first 24 bits.
    let excess = if d == Accumulator::F32 { (128 - sum.unsigned_abs().leading_zeros()).saturating_sub(24) } else { 0 };
    let kept = (sum.unsigned_abs() >> excess << excess) as f64 * unit;
    let value = if sum < 0 { -kept } else { kept };
    if d == Accumulator::F16 { accumulator_value(d, result_bits(d, value)) } else { value }
}

/// Random bits of an element of C.
fn random_accumulator(random: &mut fastrand::Rng, c: Accumulator) -> u64 {
    match c {
        Accumulator::F16 => random_element(random, Element::F16),
        Accumulator::F32 => u64::from((random.f32() * 64.0 - 32.0).to_bits()),
        // Also close to the limits, where sums overflow.
        Accumulator::S32 => {
            let offset = random.u32(0..2000);
            u64::from([offset, i32::MAX as u32 - offset, i32::MIN as u32 + offset][random.usize(0..3)])
        }
    }
}

/// A product `A · B + C` to compute.
struct Product {
    spec: Spec,
    a: Matrix,
    b: Matrix,
    c: Matrix,
}

impl Product {
    /// The value of an element of D: 16 bytes of k after another.
    fn sum(&self, row: usize, column: usize) -> f64 {
        let Spec { shape, a, b, c, d } = self.spec;
        let element = |element, matrix: &Matrix, place| element_value(element, matrix[&place]);
        let products = (0..shape.k).map(|k| (element(a, &self.a, (row, k)), element(b, &self.b, (k, column))));
        let start = accumulator_value(c, self.c[&(row, column)]);
        if d == Accumulator::S32 {
            return start + products.map(|(x, y)| x * y).sum::<f64>();
        }
        let [of_a, of_c] = [a == Element::F16, c == Accumulator::F16].map(|f16| if f16 { -14 } else { -126 });
        let terms: Vec<_> =
            products.map(|(x, y)| (x * y, exponent(x, of_a).zip(exponent(y, of_a)).map(|(x, y)| x + y))).collect();
        terms.chunks(128 / a.bits()).fold(start, |sum, chunk| step(&[chunk, &[(sum, exponent(sum, of_c))]].concat(), d))
    }
}

#[test]
fn every_shape_and_type_gives_the_sum_of_the_model() {
    let mut table = Harness::new(family());
    let mut random = fastrand::Rng::with_seed(16);
    for row in family().rows {
        let name = row.name;
        let spec = parse_spec(&name);
        let Spec { shape, a, b, d, c } = spec;
        let counts = counts(spec);
        let mut matrix = |rows: usize, columns: usize, bits: &mut dyn FnMut(&mut fastrand::Rng) -> u64| {
            let places = (0..rows * columns).map(|at| (at / columns, at % columns));
            places.map(|place| (place, bits(&mut random))).collect::<Matrix>()
        };
        let test = Product {
            spec,
            a: matrix(shape.m, shape.k, &mut |random| random_element(random, a)),
            b: matrix(shape.k, shape.n, &mut |random| random_element(random, b)),
            c: matrix(shape.m, shape.n, &mut |random| random_accumulator(random, c)),
        };
        let places: [Layout; 3] = [
            Box::new(move |lane, i| layout::a(shape, a, lane, i)),
            Box::new(move |lane, i| layout::b(shape, b, lane, i)),
            Box::new(layout::c),
        ];
        let inputs: Vec<Vec<i128>> = (0..32)
            .map(|lane| {
                let held = |matrix: &Matrix, count: usize, at: usize, bits: usize| {
                    let elements: Vec<u64> = (0..count).map(|i| matrix[&places[at](lane, i)]).collect();
                    pack(&elements, bits)
                };
                let a = held(&test.a, counts[0], 0, a.bits());
                let b = held(&test.b, counts[1], 1, b.bits());
                [a, b, held(&test.c, counts[2], 2, accumulator_bits(c))].concat()
            })
            .collect();
        let outputs = table.run(&name, &inputs);
        for (lane, output) in outputs.iter().enumerate() {
            let expected: Vec<u64> = (0..counts[2])
                .map(|i| {
                    let (row, column) = places[2](lane, i);
                    result_bits(d, test.sum(row, column))
                })
                .collect();
            let expected: Vec<u128> = pack(&expected, accumulator_bits(d)).into_iter().map(|v| v as u128).collect();
            assert_eq!(output, &expected, "{name}: lane {lane}");
        }
    }
}

/// Number of elements of A, B and C per lane.
fn counts(spec: Spec) -> [usize; 3] {
    let shape = spec.shape;
    [shape.m * shape.k / 32, shape.k * shape.n / 32, shape.m * shape.n / 32]
}

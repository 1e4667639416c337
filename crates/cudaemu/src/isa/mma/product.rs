//! Products of row-major matrices: `c += a · b` with `a` of m × k and `b` of k × n.
//!
//! The floating-point model is that of Ampere and Ada, the least accurate of the tensor cores that the emulator offers. M. Fasi,
//! N. Higham, M. Mikaitis and S. Pranesh found exact products, alignment and truncation ("Numerical behavior of NVIDIA tensor
//! cores", PeerJ Computer Science 7:e330, 2021). Numbers of bits and steps are those of two models that agree with GPUs bit by bit:
//! MMA-Sim (arXiv 2511.10909), and F. Khattak and M. Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004).
//!
//! - 16 bytes of k are summed at once: 8 products of f16 or bf16, 4 of tf32. The next 16 bytes start from the result.
//! - Products are exact. Products and accumulator are aligned to the largest of their exponents, where a product has the sum of
//!   its factors' exponents, and truncated towards zero below 24 fraction bits: one bit more than f32 has.
//! - The sum of the aligned terms is exact. It is truncated towards zero to f32, or rounded to nearest even to f16.
//!
//! Turing has the same bits and steps. Hopper and Blackwell sum 32 bytes at once, with 25 fraction bits.

use super::matrix_spec::{Accumulator, Element, N};
use crate::numeric::half::{f16_to_f32, f64_to_f16};

/// Fraction bits of the aligned terms.
const FRACTION_BITS: u64 = 24;
/// Bytes of k that are summed at once.
const STEP_BYTES: usize = 16;
/// Rows that are summed side by side, so that their chains of additions overlap.
const ROWS: usize = 2;
/// Bits of an `f64` that hold its exponent; alone, they are the value 2^exponent.
const EXPONENT: u64 = 0x7ff << 52;
/// The least exponent of a term, and of a normal number of f32 or bf16.
const LEAST: f64 = f64::from_bits((1023 - 126) << 52); // 2^-126

/// The least exponent of a normal number of f16.
const LEAST_F16: f64 = f64::from_bits((1023 - 14) << 52); // 2^-14

/// Magnitude of a number: 2^exponent, where subnormal numbers have the exponent `least`. Zero has none; that of infinity and NaN
/// is infinite.
#[inline(always)]
fn magnitude(value: f64, least: f64) -> f64 {
    let power = f64::from_bits(value.to_bits() & EXPONENT);
    let power = if power < least { least } else { power };
    if value == 0.0 { 0.0 } else { power }
}

/// Truncates towards zero to f32.
#[inline(always)]
fn truncate_to_f32(sum: f64) -> f64 {
    let normal = f64::from_bits(sum.to_bits() & !((1 << 29) - 1));
    // 2^149 and 2^-149, the least subnormal number.
    let (up, down) = (f64::from_bits((1023 + 149) << 52), f64::from_bits((1023 - 149) << 52));
    let subnormal = (sum * up).trunc() * down;
    let finite = if sum.abs() < LEAST { subnormal } else { normal };
    // 2^128 overflows. The mask above may have cleared the only fraction bits of a NaN.
    let overflow = f64::from_bits((1023 + 128) << 52);
    if finite.abs() < overflow { finite } else { sum * f64::INFINITY }
}

#[inline(always)]
fn round_to_f16(sum: f64) -> f64 {
    f64::from(f16_to_f32(f64_to_f16(sum)))
}

/// Elements as `f64`, and their magnitudes. Written as a loop, because `array::map` of so many elements is not vectorised.
#[inline(always)]
fn widen<const LEN: usize>(elements: &[f32; LEN], least: f64) -> ([f64; LEN], [f64; LEN]) {
    let (mut values, mut sizes) = ([0.0; LEN], [0.0; LEN]);
    for at in 0..LEN {
        values[at] = f64::from(elements[at]);
        sizes[at] = magnitude(values[at], least);
    }
    (values, sizes)
}

/// Floating-point elements (each exact in `f32`); the sums in `c` are values of the accumulator's type before and after.
#[inline(always)]
pub(super) fn floats<const A: usize, const B: usize>(
    a: &[f32; A],
    b: &[f32; B],
    c: &mut [f64],
    k: usize,
    element: Element,
    accumulator: Accumulator,
) {
    let least = if element == Element::F16 { LEAST_F16 } else { LEAST };
    let ((a, size_a), (b, size_b)) = (widen(a, least), widen(b, least));
    let step = (8 * STEP_BYTES / element.bits()).min(k);
    for (pair, sums) in c.as_chunks_mut::<N>().0.as_chunks_mut::<ROWS>().0.iter_mut().enumerate() {
        let row = |row: usize| (ROWS * pair + row) * k;
        for start in (0..k).step_by(step) {
            let terms = start..start + step;
            *sums = add_products(
                sums,
                [0, 1].map(|r| &a[row(r)..][terms.clone()]),
                [0, 1].map(|r| &size_a[row(r)..][terms.clone()]),
                &b.as_chunks::<N>().0[terms.clone()],
                &size_b.as_chunks::<N>().0[terms],
                accumulator,
            );
        }
    }
}

/// The sums of two rows after one step of k.
#[inline(always)]
fn add_products(
    sums: &[[f64; N]; ROWS],
    a: [&[f64]; ROWS],
    size_a: [&[f64]; ROWS],
    b: &[[f64; N]],
    size_b: &[[f64; N]],
    accumulator: Accumulator,
) -> [[f64; N]; ROWS] {
    let least = if accumulator == Accumulator::F16 { LEAST_F16 } else { LEAST };
    let mut largest = [[LEAST; N]; ROWS];
    for row in 0..ROWS {
        for column in 0..N {
            let size = magnitude(sums[row][column], least);
            largest[row][column] = if size > LEAST { size } else { LEAST };
        }
    }
    for (term, size_b) in size_b.iter().enumerate() {
        for row in 0..ROWS {
            for column in 0..N {
                // A comparison ignores the NaN of infinity times zero, which the sum below has, too.
                let size = size_a[row][term] * size_b[column];
                largest[row][column] = if size > largest[row][column] { size } else { largest[row][column] };
            }
        }
    }
    // Terms are summed as integers, in units of the last bit that is kept. If a term is infinite or NaN, so is `largest`, and
    // the terms keep that whatever the scale.
    let mut scale = [[0.0; N]; ROWS];
    let mut total = [[0.0; N]; ROWS];
    for row in 0..ROWS {
        for column in 0..N {
            let inverse = ((2 * 1023 + FRACTION_BITS) << 52).wrapping_sub(largest[row][column].to_bits());
            scale[row][column] = f64::from_bits(inverse);
            total[row][column] = (sums[row][column] * scale[row][column]).trunc();
        }
    }
    for (term, b) in b.iter().enumerate() {
        for row in 0..ROWS {
            for column in 0..N {
                total[row][column] += (a[row][term] * b[column] * scale[row][column]).trunc();
            }
        }
    }
    let unit = f64::from_bits((1023 - FRACTION_BITS) << 52);
    for row in 0..ROWS {
        for column in 0..N {
            let sum = total[row][column] * (largest[row][column] * unit);
            total[row][column] = if accumulator == Accumulator::F16 { round_to_f16(sum) } else { truncate_to_f32(sum) };
        }
    }
    total
}

/// Small integers, summed in `f32`: its 24 bits hold any sum of 64 products of bytes.
#[inline(always)]
pub(super) fn integers<const B: usize>(a: &[f32], b: &[f32; B], c: &mut [f32], k: usize) {
    for (rows, sums) in a.chunks_exact(ROWS * k).zip(c.chunks_exact_mut(ROWS * N)) {
        let (first, second) = rows.split_at(k);
        let [one, two] = &mut sums.as_chunks_mut::<N>().0[..] else { continue };
        for ((&x, &z), y) in first.iter().zip(second).zip(b.as_chunks::<N>().0) {
            for column in 0..N {
                one[column] += x * y[column];
                two[column] += z * y[column];
            }
        }
    }
}

//! Least-squares fits of codes and two-level scales to a block of 256 values, for the K types.
//!
//! Each sub-block is fitted alone first: from several starting scales, codes and scale are improved in turn. Then the
//! sub-block scales are rounded to multiples of a common one, and codes and common scale are improved in turn.

use crate::tensor::blocks::F16Bits;

/// Starting scales tried per sub-block: code ranges from one step short of the full range to one step beyond.
const STARTS: i32 = 4;
/// Iterations that refine the common scale. More iterations hardly reduce the error.
const ROUNDS: usize = 1;

/// The code ranges that determine the starting scales of a sub-block with codes up to `top`.
fn starts(top: f32) -> impl Iterator<Item = f32> {
    (-STARTS..=STARTS).map(move |i| top + i as f32 / STARTS as f32)
}

/// `1 / d`; 0 for 0.
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The integer from `low` to `high` nearest to `x`; halves round up. In this range for every `x`, NaN included.
fn nearest(x: f32, low: i32, high: i32) -> i32 {
    ((x + 0.5).floor() as i32).clamp(low, high)
}

/// A fit of `d * scale * q - dmin * min`, with codes, scales and minima not negative.
pub(super) struct AffineFit<const SUBS: usize, const LEN: usize> {
    pub(super) d: F16Bits,
    pub(super) dmin: F16Bits,
    pub(super) scales: [u8; SUBS],
    pub(super) mins: [u8; SUBS],
    pub(super) codes: [[u8; LEN]; SUBS],
}

impl<const SUBS: usize, const LEN: usize> AffineFit<SUBS, LEN> {
    /// The fit with codes up to `top` and scales and minima up to `scale_top`. `SUBS * LEN` is 256.
    pub(super) fn fit(values: &[f32; 256], top: u8, scale_top: u8) -> Self {
        let values: &[[f32; LEN]; SUBS] = bytemuck::cast_ref(values);
        let alone = values.map(|x| affine_sub_block(&x, top));
        let unit = |max: f32| F16Bits::from_f32(max / f32::from(scale_top));
        let mut fit = AffineFit {
            d: unit(alone.iter().fold(0.0, |max, &(scale, _)| scale.max(max))),
            dmin: unit(alone.iter().fold(0.0, |max, &(_, min)| min.max(max))),
            scales: [0; SUBS],
            mins: [0; SUBS],
            codes: [[0; LEN]; SUBS],
        };
        fit.choose(values, &alone, top, scale_top);
        for _ in 0..ROUNDS {
            fit.refit(values);
            fit.choose(values, &alone, top, scale_top);
        }
        fit
    }

    /// Selects scale, minimum and codes of each sub-block with the least error, among the neighbours of its individual fit.
    fn choose(&mut self, values: &[[f32; LEN]; SUBS], alone: &[(f32, f32); SUBS], top: u8, scale_top: u8) {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        let (id, idmin) = (inverse(d), inverse(dmin));
        for s in 0..SUBS {
            let around = |x: f32| {
                let centre = nearest(x, 0, i32::from(scale_top));
                ((centre - 1).max(0)..=(centre + 1).min(i32::from(scale_top))).map(|v| v as u8)
            };
            let mut least = f32::INFINITY;
            for scale in around(alone[s].0 * id) {
                for min in around(alone[s].1 * idmin) {
                    let (codes, error) = affine_codes(&values[s], d * f32::from(scale), dmin * f32::from(min), top);
                    if error < least {
                        least = error;
                        (self.scales[s], self.mins[s], self.codes[s]) = (scale, min, codes);
                    }
                }
            }
        }
    }

    /// Solves for the common scales `d` and `dmin`, given codes, scales and minima.
    fn refit(&mut self, values: &[[f32; LEN]; SUBS]) {
        let mut sums = Sums::default();
        for s in 0..SUBS {
            for l in 0..LEN {
                sums.add(
                    values[s][l],
                    f32::from(self.scales[s]) * f32::from(self.codes[s][l]),
                    f32::from(self.mins[s]),
                );
            }
        }
        let (d, dmin) = sums.solve();
        (self.d, self.dmin) = (F16Bits::from_f32(d), F16Bits::from_f32(dmin));
    }
}

/// Scale and minimum of one sub-block, neither negative.
fn affine_sub_block<const LEN: usize>(values: &[f32; LEN], top: u8) -> (f32, f32) {
    let low = values.iter().fold(0f32, |min, &x| x.min(min));
    let high = values.iter().fold(f32::MIN, |max, &x| x.max(max));
    let mut best = (0.0, -low);
    if high <= low {
        return best;
    }
    let mut least = f32::INFINITY;
    for range in starts(f32::from(top)) {
        let (mut scale, mut min) = ((high - low) / range, -low);
        let (mut codes, _) = affine_codes(values, scale, min, top);
        for _ in 0..2 {
            let mut sums = Sums::default();
            for l in 0..LEN {
                sums.add(values[l], f32::from(codes[l]), 1.0);
            }
            (scale, min) = sums.solve();
            let error;
            (codes, error) = affine_codes(values, scale, min, top);
            if error < least {
                least = error;
                best = (scale, min);
            }
        }
    }
    best
}

/// The nearest codes, and the remaining sum of squared errors.
fn affine_codes<const LEN: usize>(values: &[f32; LEN], scale: f32, min: f32, top: u8) -> ([u8; LEN], f32) {
    let (inverse, top) = (inverse(scale), f32::from(top));
    let codes = values.map(|x| ((x + min) * inverse + 0.5).clamp(0.0, top) as u8);
    let error = values.iter().zip(&codes).map(|(&x, &q)| (scale * f32::from(q) - min - x).powi(2)).sum();
    (codes, error)
}

/// Sums of the normal equations of `x = scale * a - min * b`.
#[derive(Default)]
struct Sums {
    aa: f64,
    ab: f64,
    bb: f64,
    xa: f64,
    xb: f64,
}

impl Sums {
    fn add(&mut self, x: f32, a: f32, b: f32) {
        let (x, a, b) = (f64::from(x), f64::from(a), f64::from(b));
        self.aa += a * a;
        self.ab += a * b;
        self.bb += b * b;
        self.xa += x * a;
        self.xb += x * b;
    }

    /// Scale and minimum of least squared error, neither negative.
    fn solve(&self) -> (f32, f32) {
        let determinant = self.aa * self.bb - self.ab * self.ab;
        // Sums of whole numbers are exact: a determinant below 1 is 0.
        if determinant >= 1.0 {
            let scale = (self.xa * self.bb - self.xb * self.ab) / determinant;
            let min = (self.xa * self.ab - self.xb * self.aa) / determinant;
            if scale >= 0.0 && min >= 0.0 {
                return (scale as f32, min as f32);
            }
        }
        // On the boundary of the feasible region, scale or minimum is 0, and the remaining parameter has a closed form.
        let scale = if self.aa > 0.0 { (self.xa / self.aa).max(0.0) } else { 0.0 };
        let min = if self.bb > 0.0 { (-self.xb / self.bb).max(0.0) } else { 0.0 };
        if scale * self.xa >= -min * self.xb { (scale as f32, 0.0) } else { (0.0, min as f32) }
    }
}

/// A fit of `d * scale * (q - zero)` with signed scales, sixteen of them.
pub(super) struct SymmetricFit {
    pub(super) d: F16Bits,
    pub(super) scales: [i8; 16],
    pub(super) codes: [[u8; 16]; 16],
}

impl SymmetricFit {
    /// The fit with codes below `2 * zero` and scales of `-scale_zero` to `scale_zero - 1`.
    pub(super) fn fit(values: &[f32; 256], zero: u8, scale_zero: i32) -> Self {
        let values: &[[f32; 16]; 16] = bytemuck::cast_ref(values);
        let alone = values.map(|x| symmetric_sub_block(&x, zero));
        // The scale of largest magnitude gets the lowest number, because there is one more negative number than positive
        // numbers.
        let peak = alone.iter().fold(0f32, |peak, &scale| if scale.abs() > peak.abs() { scale } else { peak });
        let d = F16Bits::from_f32(peak / -scale_zero as f32);
        let mut fit = SymmetricFit { d, scales: [0; 16], codes: [[zero; 16]; 16] };
        fit.choose(values, &alone, zero, scale_zero);
        for _ in 0..ROUNDS {
            fit.refit(values, zero);
            fit.choose(values, &alone, zero, scale_zero);
        }
        fit
    }

    fn choose(&mut self, values: &[[f32; 16]; 16], alone: &[f32; 16], zero: u8, scale_zero: i32) {
        let d = self.d.to_f32();
        for s in 0..16 {
            let centre = nearest(alone[s] * inverse(d), -scale_zero, scale_zero - 1);
            let mut least = f32::INFINITY;
            for scale in (centre - 1).max(-scale_zero)..=(centre + 1).min(scale_zero - 1) {
                let step = d * scale as f32;
                let codes = symmetric_codes(&values[s], inverse(step), zero);
                let error = values[s].iter().zip(&codes).map(|(&x, &q)| (step * centred(q, zero) - x).powi(2)).sum();
                if error < least {
                    least = error;
                    (self.scales[s], self.codes[s]) = (scale as i8, codes);
                }
            }
        }
    }

    fn refit(&mut self, values: &[[f32; 16]; 16], zero: u8) {
        let (mut product, mut square) = (0f64, 0f64);
        for s in 0..16 {
            for l in 0..16 {
                let a = f64::from(f32::from(self.scales[s]) * centred(self.codes[s][l], zero));
                product += f64::from(values[s][l]) * a;
                square += a * a;
            }
        }
        if square > 0.0 {
            self.d = F16Bits::from_f32((product / square) as f32);
        }
    }
}

/// The value of a code, in units of the scale.
fn centred(code: u8, zero: u8) -> f32 {
    f32::from(code) - f32::from(zero)
}

fn symmetric_codes(values: &[f32; 16], inverse: f32, zero: u8) -> [u8; 16] {
    let (zero, top) = (f32::from(zero), f32::from(2 * zero - 1));
    values.map(|x| (x * inverse + zero + 0.5).clamp(0.0, top) as u8)
}

/// The scale of one sub-block, of either sign: there is one more code below zero than above.
fn symmetric_sub_block(values: &[f32; 16], zero: u8) -> f32 {
    let peak = values.iter().fold(0f32, |max, &x| x.abs().max(max));
    let (mut best, mut best_gain) = (0.0, 0.0);
    for range in starts(f32::from(zero)) {
        for start in [range * inverse(peak), -range * inverse(peak)] {
            let mut codes = symmetric_codes(values, start, zero);
            for _ in 0..2 {
                let (mut product, mut square) = (0f32, 0f32);
                for l in 0..16 {
                    let a = centred(codes[l], zero);
                    product += values[l] * a;
                    square += a * a;
                }
                // The reduction of the sum of squares by the fit with scale `product / square`.
                let gain = product * product * inverse(square);
                if gain > best_gain {
                    best_gain = gain;
                    best = product / square;
                }
                codes = symmetric_codes(values, inverse(product * inverse(square)), zero);
            }
        }
    }
    best
}

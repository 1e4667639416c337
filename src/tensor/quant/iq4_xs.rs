//! IQ4_XS: the code table of IQ4_NL with scales of two levels, and a least-squares fit of both.
//!
//! As in `kquant_fit.rs`, each sub-block is fitted alone first, from several starting scales. Then the scales are rounded to
//! multiples of a common one, and codes and common scale are improved in turn.

use super::Codec;
use super::expand::Expand;
use crate::tensor::blocks::{BlockIq4Xs, F16Bits, IQ4_VALUES};

/// Elements of a sub-block.
const LEN: usize = 32;
/// Sub-blocks.
const SUBS: usize = 8;
/// Numbers of the table on which the largest magnitude may lie at the start of a fit: 127 with either sign, and these distances
/// around it.
const STARTS: [f32; 5] = [105.0, 113.0, 120.0, 127.0, 140.0];
/// Magnitudes of scales: -32 to 31.
const SCALE_ZERO: i32 = 32;

/// The thresholds between codes: midpoints of neighbouring values of the table.
const MIDPOINTS: [f32; 15] = {
    let mut midpoints = [0.0; 15];
    let mut i = 0;
    while i < 15 {
        midpoints[i] = (IQ4_VALUES[i] as f32 + IQ4_VALUES[i + 1] as f32) * 0.5;
        i += 1;
    }
    midpoints
};

/// `1 / d`; 0 for 0.
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The nearest codes of values in multiples of `1 / inverse`, and the values of the codes.
fn nearest(values: &[f32; LEN], inverse: f32) -> ([u8; LEN], [f32; LEN]) {
    let (mut codes, mut table) = ([0u8; LEN], [f32::from(IQ4_VALUES[0]); LEN]);
    // A loop over thresholds with one over elements inside becomes vector instructions.
    for (i, &midpoint) in MIDPOINTS.iter().enumerate() {
        let step = f32::from(i16::from(IQ4_VALUES[i + 1]) - i16::from(IQ4_VALUES[i]));
        for l in 0..LEN {
            let above = values[l] * inverse >= midpoint;
            codes[l] += u8::from(above);
            table[l] += if above { step } else { 0.0 };
        }
    }
    (codes, table)
}

/// The sums `x * t` and `t * t` over a sub-block with values `t` of its codes.
fn products(values: &[f32; LEN], table: &[f32; LEN]) -> (f32, f32) {
    values.iter().zip(table).fold((0.0, 0.0), |(product, square), (x, t)| (product + x * t, square + t * t))
}

/// The scale of one sub-block, of either sign.
fn fit_alone(values: &[f32; LEN]) -> f32 {
    let peak = values.iter().fold(0f32, |max, &x| x.abs().max(max));
    let (mut best, mut best_gain) = (0.0, 0.0);
    for start in STARTS {
        for start in [start * inverse(peak), -start * inverse(peak)] {
            let mut start = start;
            for _ in 0..2 {
                let (product, square) = products(values, &nearest(values, start).1);
                let scale = product * inverse(square);
                // The squared error of the best scale for these codes is the sum of squares less this.
                if product * scale > best_gain {
                    (best, best_gain) = (scale, product * scale);
                }
                start = inverse(scale);
            }
        }
    }
    best
}

/// Scale, sub-block scales and codes of a block.
struct Fit {
    d: F16Bits,
    scales: [i8; SUBS],
    codes: [[u8; LEN]; SUBS],
}

impl Fit {
    fn new(values: &[[f32; LEN]; SUBS]) -> Fit {
        let alone = values.map(|x| fit_alone(&x));
        // The scale of largest magnitude gets the lowest number: there is one more negative number than positive ones.
        let peak = alone.iter().fold(0f32, |peak, &scale| if scale.abs() > peak.abs() { scale } else { peak });
        let d = F16Bits::from_f32(peak / -SCALE_ZERO as f32);
        // Code 8 is the value 1, the nearest to 0; the scale is 0.
        let mut fit = Fit { d, scales: [0; SUBS], codes: [[8; LEN]; SUBS] };
        let d = fit.choose(values, &alone);
        fit.d = F16Bits::from_f32(d);
        fit.choose(values, &alone);
        fit
    }

    /// Selects scale and codes of each sub-block with the least error, among the neighbours of its individual fit. Returns the
    /// best common scale for them.
    fn choose(&mut self, values: &[[f32; LEN]; SUBS], alone: &[f32; SUBS]) -> f32 {
        let d = self.d.to_f32();
        let (mut product, mut square) = (0f32, 0f32);
        for s in 0..SUBS {
            let centre = ((alone[s] * inverse(d)).round() as i32).clamp(-SCALE_ZERO, SCALE_ZERO - 1);
            let (mut least, mut sums) = (f32::INFINITY, (0.0, 0.0));
            for scale in (centre - 1).max(-SCALE_ZERO)..=(centre + 1).min(SCALE_ZERO - 1) {
                let step = d * scale as f32;
                let (codes, table) = nearest(&values[s], inverse(step));
                let error = values[s].iter().zip(&table).map(|(&x, &t)| (step * t - x).powi(2)).sum();
                if error < least {
                    least = error;
                    (self.scales[s], self.codes[s]) = (scale as i8, codes);
                    let (product, square) = products(&values[s], &table);
                    sums = (product * scale as f32, square * (scale * scale) as f32);
                }
            }
            (product, square) = (product + sums.0, square + sums.1);
        }
        if square > 0.0 { product / square } else { d }
    }
}

impl Expand<256> for BlockIq4Xs {
    #[inline(always)]
    fn expand(&self, codes: &mut [i8; 256], scales: &mut [f32]) {
        let d = self.d.to_f32();
        let subs = codes.as_chunks_mut::<LEN>().0.iter_mut().zip(scales.as_chunks_mut::<2>().0);
        for (((codes, to), scale), qs) in subs.zip(self.scales()).zip(self.qs.as_chunks::<16>().0) {
            *to = [d * f32::from(scale); 2];
            *codes = std::array::from_fn(|l| IQ4_VALUES[usize::from(qs[l % 16] >> (l / 16 * 4) & 15)]);
        }
    }
}

impl Codec<256> for BlockIq4Xs {
    fn unpack(&self, values: &mut [f32; 256]) {
        self.unpack_expanded(values);
    }

    fn pack(values: &[f32; 256]) -> Self {
        let Fit { d, scales, codes } = Fit::new(bytemuck::cast_ref(values));
        let (scales_h, scales_l) = BlockIq4Xs::pack_scales(&scales);
        let qs = std::array::from_fn(|i| codes[i / 16][i % 16] | codes[i / 16][i % 16 + 16] << 4);
        BlockIq4Xs { d, scales_h, scales_l, qs }
    }
}

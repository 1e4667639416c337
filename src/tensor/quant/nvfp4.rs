//! NVFP4: FP4 codes with a scale of 8 bits per sixteen elements.

use super::Codec;
use super::expand::Expand;
use crate::tensor::blocks::BlockNvfp4;

/// The largest scale below NaN.
const LARGEST_SCALE: u8 = 0x7e;

/// The thresholds between codes of an FP4 magnitude: midpoints of neighbouring values in the first half of the table.
pub(super) const FP4_MIDPOINTS: [f32; 7] = [0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0];

/// The FP4 code nearest to `x` in multiples of the unit that scales `midpoints`; halves towards zero. The code of -0 is not used.
#[inline]
pub(super) fn nearest_fp4(x: f32, midpoints: &[f32; 7]) -> u8 {
    let magnitude = midpoints.iter().map(|&m| u8::from(x.abs() > m)).sum::<u8>();
    if magnitude > 0 && x < 0.0 { magnitude | 8 } else { magnitude }
}

/// The scale nearest to `x`: E4M3 without a sign, rounded half up. Numbers from 256 on get the largest scale, as in ggml.
fn scale_of(x: f32) -> u8 {
    const SMALLEST_NORMAL: f32 = 1.0 / 64.0;
    if x.is_nan() || x <= 0.0 {
        0
    } else if x < SMALLEST_NORMAL {
        // Subnormal: in units of 2^-9. The next number, 8 units, would be the smallest normal one.
        ((x * 512.0 + 0.5) as u8).min(7)
    } else if x >= 256.0 {
        LARGEST_SCALE
    } else {
        // Rounds away the lower 20 of the mantissa's 23 bits, and rebases the exponent from 127 to 7.
        let code = ((x.to_bits() + 0x8_0000) >> 20) - ((127 - 7) << 3);
        (code as u8).min(LARGEST_SCALE)
    }
}

impl Expand<64> for BlockNvfp4 {
    #[inline(always)]
    fn expand(&self, codes: &mut [i8; 64], scales: &mut [f32]) {
        let subs = codes.as_chunks_mut::<16>().0.iter_mut().zip(scales).zip(self.qs.as_chunks::<8>().0).zip(self.d);
        for (((codes, scale), qs), d) in subs {
            *scale = BlockNvfp4::unit_of(d);
            *codes = std::array::from_fn(|l| fp4_value(qs[l % 8] >> (l / 8 * 4) & 15));
        }
    }
}

/// The entry of [`FP4_VALUES`](crate::tensor::blocks::FP4_VALUES), by comparisons, which become vector instructions.
#[inline(always)]
fn fp4_value(code: u8) -> i8 {
    let magnitude = (code & 7) as i8;
    let value = magnitude + i8::from(magnitude > 4) + i8::from(magnitude > 5) + 3 * i8::from(magnitude > 6);
    if code > 7 { -value } else { value }
}

impl Codec<64> for BlockNvfp4 {
    fn unpack(&self, values: &mut [f32; 64]) {
        self.unpack_expanded(values);
    }

    fn pack(values: &[f32; 64]) -> Self {
        let mut block = BlockNvfp4 { d: [0; 4], qs: [0; 32] };
        for (s, values) in values.as_chunks::<16>().0.iter().enumerate() {
            let peak = values.iter().fold(0f32, |max, x| if x.abs() > max { x.abs() } else { max });
            // The largest code is 6, or 12 units of half the scale.
            let scale = scale_of(peak / 6.0);
            block.d[s] = scale;
            let unit = BlockNvfp4::unit_of(scale);
            if unit == 0.0 {
                continue;
            }
            // Products with a unit of four bits are exact, so each comparison is that of the true distances.
            let midpoints = FP4_MIDPOINTS.map(|m| m * unit);
            let codes = values.map(|x| nearest_fp4(x, &midpoints));
            for l in 0..8 {
                block.qs[8 * s + l] = codes[l] | codes[l + 8] << 4;
            }
        }
        block
    }
}

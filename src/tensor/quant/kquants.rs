//! The K types: blocks of 256 elements in sub-blocks of 16 or 32, with quantised sub-block scales. Q8_K has a single scale.

use super::Codec;
use super::kquant_fit::{AffineFit, SymmetricFit};
use crate::tensor::blocks::{BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K, BlockQ8K};
use crate::tensor::blocks::{F16Bits, pack_scales_mins, unpack_scales_mins};

const N: usize = 256;
type Values = [f32; N];

/// Codes, or values, in rows of 32: row `4 * h + c` is shift `c` of half `h`.
type Rows<T> = [[T; 32]; 8];

/// Adds bits `2c` and `2c + 1` of byte `32 * h + l`, shifted by `to`, to the code of row `4 * h + c`, element `l`.
fn add_bit_pairs(codes: &mut Rows<u8>, pairs: &[u8; 64], to: u32) {
    let pairs: &[[u8; 32]; 2] = bytemuck::cast_ref(pairs);
    for row in 0..8 {
        for l in 0..32 {
            codes[row][l] |= (pairs[row / 4][l] >> (2 * (row % 4)) & 3) << to;
        }
    }
}

/// Inverse of [`add_bit_pairs`]: gathers the two bits from `from` on of each code.
fn pack_bit_pairs(codes: &Rows<u8>, from: u32) -> [u8; 64] {
    let mut pairs = [[0; 32]; 2];
    for row in 0..8 {
        for l in 0..32 {
            pairs[row / 4][l] |= (codes[row][l] >> from & 3) << (2 * (row % 4));
        }
    }
    bytemuck::cast(pairs)
}

/// Adds bit `row` of byte `l`, shifted by `to`, to the code of each row.
fn add_bits(codes: &mut Rows<u8>, bits: &[u8; 32], to: u32) {
    for row in 0..8 {
        for l in 0..32 {
            codes[row][l] |= (bits[l] >> row & 1) << to;
        }
    }
}

/// Inverse of [`add_bits`]: gathers bit `from` of each code.
fn pack_bits(codes: &Rows<u8>, from: u32) -> [u8; 32] {
    std::array::from_fn(|l| (0..8).map(|row| (codes[row][l] >> from & 1) << row).sum())
}

/// Nibbles of 128 bytes: those at `32 * p + l` hold row `low[p]` (lo) and row `high[p]` (hi).
struct NibbleRows {
    low: [usize; 4],
    high: [usize; 4],
}

/// Q4_K and Q5_K: neighbouring rows share bytes.
const PAIRED: NibbleRows = NibbleRows { low: [0, 2, 4, 6], high: [1, 3, 5, 7] };
/// Q6_K: rows two apart share bytes.
const CROSSED: NibbleRows = NibbleRows { low: [0, 1, 4, 5], high: [2, 3, 6, 7] };

impl NibbleRows {
    fn unpack(&self, bytes: &[u8; 128]) -> Rows<u8> {
        let bytes: &[[u8; 32]; 4] = bytemuck::cast_ref(bytes);
        let mut codes = [[0; 32]; 8];
        for p in 0..4 {
            codes[self.low[p]] = bytes[p].map(|b| b & 15);
            codes[self.high[p]] = bytes[p].map(|b| b >> 4);
        }
        codes
    }

    fn pack(&self, codes: &Rows<u8>) -> [u8; 128] {
        let rows: [[u8; 32]; 4] =
            std::array::from_fn(|p| std::array::from_fn(|l| codes[self.low[p]][l] & 15 | codes[self.high[p]][l] << 4));
        bytemuck::cast(rows)
    }
}

/// Writes `scale[s] * (q - zero)` for sub-blocks of 16.
fn scale_symmetric(values: &mut Values, codes: &Rows<u8>, scales: [f32; 16], zero: i8) {
    let (values, codes): (&mut [[f32; 16]; 16], &[[u8; 16]; 16]) =
        (bytemuck::cast_mut(values), bytemuck::cast_ref(codes));
    for s in 0..16 {
        values[s] = codes[s].map(|q| scales[s] * f32::from(q as i8 - zero));
    }
}

/// Writes `d * scale * q - dmin * min` for sub-blocks of 32.
fn scale_affine(values: &mut Values, codes: &Rows<u8>, d: F16Bits, dmin: F16Bits, packed: &[u8; 12]) {
    let values: &mut Rows<f32> = bytemuck::cast_mut(values);
    let (d, dmin) = (d.to_f32(), dmin.to_f32());
    let (scales, mins) = unpack_scales_mins(packed);
    for s in 0..8 {
        let (scale, min) = (d * f32::from(scales[s]), dmin * f32::from(mins[s]));
        values[s] = codes[s].map(|q| scale * f32::from(q) - min);
    }
}

impl Codec<N> for BlockQ2K {
    fn unpack(&self, values: &mut Values) {
        let mut codes = [[0; 32]; 8];
        add_bit_pairs(&mut codes, &self.qs, 0);
        let (values, codes): (&mut [[f32; 16]; 16], [[u8; 16]; 16]) =
            (bytemuck::cast_mut(values), bytemuck::cast(codes));
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        for s in 0..16 {
            let (scale, min) = (d * f32::from(self.scales[s] & 15), dmin * f32::from(self.scales[s] >> 4));
            values[s] = codes[s].map(|q| scale * f32::from(q) - min);
        }
    }

    fn pack(values: &Values) -> Self {
        let fit = AffineFit::<16, 16>::fit(values, 3, 15);
        let scales = std::array::from_fn(|s| fit.scales[s] | fit.mins[s] << 4);
        BlockQ2K { scales, qs: pack_bit_pairs(&bytemuck::cast(fit.codes), 0), d: fit.d, dmin: fit.dmin }
    }
}

impl Codec<N> for BlockQ3K {
    fn unpack(&self, values: &mut Values) {
        let mut codes = [[0; 32]; 8];
        add_bit_pairs(&mut codes, &self.qs, 0);
        add_bits(&mut codes, &self.hmask, 2);
        let d = self.d.to_f32();
        scale_symmetric(values, &codes, self.scales().map(|s| d * f32::from(s)), 4);
    }

    fn pack(values: &Values) -> Self {
        let fit = SymmetricFit::fit(values, 4, 32);
        let codes = bytemuck::cast(fit.codes);
        let scales = BlockQ3K::pack_scales(&fit.scales);
        BlockQ3K { hmask: pack_bits(&codes, 2), qs: pack_bit_pairs(&codes, 0), scales, d: fit.d }
    }
}

impl Codec<N> for BlockQ4K {
    fn unpack(&self, values: &mut Values) {
        scale_affine(values, &PAIRED.unpack(&self.qs), self.d, self.dmin, &self.scales);
    }

    fn pack(values: &Values) -> Self {
        let fit = AffineFit::<8, 32>::fit(values, 15, 63);
        let scales = pack_scales_mins(&fit.scales, &fit.mins);
        BlockQ4K { d: fit.d, dmin: fit.dmin, scales, qs: PAIRED.pack(&fit.codes) }
    }
}

impl Codec<N> for BlockQ5K {
    fn unpack(&self, values: &mut Values) {
        let mut codes = PAIRED.unpack(&self.qs);
        add_bits(&mut codes, &self.qh, 4);
        scale_affine(values, &codes, self.d, self.dmin, &self.scales);
    }

    fn pack(values: &Values) -> Self {
        let fit = AffineFit::<8, 32>::fit(values, 31, 63);
        let scales = pack_scales_mins(&fit.scales, &fit.mins);
        BlockQ5K { d: fit.d, dmin: fit.dmin, scales, qh: pack_bits(&fit.codes, 4), qs: PAIRED.pack(&fit.codes) }
    }
}

impl Codec<N> for BlockQ6K {
    fn unpack(&self, values: &mut Values) {
        let mut codes = CROSSED.unpack(&self.ql);
        add_bit_pairs(&mut codes, &self.qh, 4);
        let d = self.d.to_f32();
        scale_symmetric(values, &codes, self.scales.map(|s| d * f32::from(s)), 32);
    }

    fn pack(values: &Values) -> Self {
        let fit = SymmetricFit::fit(values, 32, 128);
        let codes = bytemuck::cast(fit.codes);
        BlockQ6K { ql: CROSSED.pack(&codes), qh: pack_bit_pairs(&codes, 4), scales: fit.scales, d: fit.d }
    }
}

impl Codec<N> for BlockQ8K {
    fn unpack(&self, values: &mut Values) {
        let d = self.scale();
        *values = self.qs.map(|q| f32::from(q) * d);
    }

    /// The value of largest magnitude, the first of equals, gets the code -127; the scale has its sign, negated.
    fn pack(values: &Values) -> Self {
        // Adding 1.5 * 2^23 puts the nearest integer, ties to even, into the low bits.
        const ROUND: f32 = 12_582_912.0;
        let peak = values.iter().fold(0f32, |peak, &x| if x.abs() > peak.abs() { x } else { peak });
        if peak == 0.0 {
            return bytemuck::Zeroable::zeroed();
        }
        let inverse = -127.0 / peak;
        let code = |x: f32| (((x * inverse + ROUND).to_bits() & 0x7f_ffff) as i32 - 0x40_0000).clamp(-127, 127) as i8;
        let qs = values.map(code);
        let sum = |codes: &[i8; 16]| codes.iter().map(|&q| i16::from(q)).sum::<i16>().to_le_bytes();
        let bsums = bytemuck::cast::<_, [[i8; 16]; 16]>(qs).each_ref().map(sum);
        BlockQ8K { d: (1.0 / inverse).to_le_bytes(), qs, bsums }
    }
}

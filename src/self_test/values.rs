//! Values of tensors: seeded ones, their bytes in any type and layout, and the error between two results. Indices are in logical
//! order: dimension 0 is the fastest.

use crate::tensor::quant::{Dequantise, dequantiser, quantiser};
use crate::tensor::{DType, TensorDesc};

/// `n` values, roughly normally distributed with mean 0 and standard deviation 1: sums of twelve uniform ones.
pub fn normal(seed: u64, n: usize) -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| (0..12).map(|_| rng.f32()).sum::<f32>() - 6.0).collect()
}

/// `n` values, uniformly distributed in `lo..hi`.
pub fn uniform(seed: u64, n: usize, lo: f32, hi: f32) -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| lo + (hi - lo) * rng.f32()).collect()
}

/// Writes values to a dense row.
pub type EncodeRow = Box<dyn Fn(&[f32], &mut [u8])>;

/// The conversion of values to dense rows of `dtype`: rounded, quantised, or truncated to I32 or I64. If the type only converts to f32,
/// a row gets random blocks with finite values about as large as those passed; the same ones for the same values. `None` for a type
/// without a conversion.
///
/// Values and bytes describe the same number of elements, as in [`Quantise`](crate::tensor::quant::Quantise).
pub fn row_encoder(dtype: DType) -> Option<EncodeRow> {
    if let Some(quantise) = quantiser(dtype) {
        return Some(Box::new(quantise));
    }
    if let Some(convert) = dequantiser(dtype) {
        return Some(Box::new(move |values, bytes| random_blocks(dtype, convert, values, bytes)));
    }
    match dtype {
        DType::I32 => Some(Box::new(|values, bytes| {
            bytes.as_chunks_mut().0.iter_mut().zip(values).for_each(|(to, &v)| *to = (v as i32).to_le_bytes())
        })),
        DType::I64 => Some(Box::new(|values, bytes| {
            bytes.as_chunks_mut().0.iter_mut().zip(values).for_each(|(to, &v)| *to = (v as i64).to_le_bytes())
        })),
        _ => None,
    }
}

/// Random blocks that are tried for a block of values. Those of the cases are found within some thousands.
const MAX_ATTEMPTS: usize = 1 << 20;

/// Random blocks of a type that only converts to f32, each about as large as its values.
fn random_blocks(dtype: DType, convert: Dequantise, values: &[f32], bytes: &mut [u8]) {
    let mut back = vec![0.0; dtype.block_len()];
    for (values, bytes) in values.chunks_exact(dtype.block_len()).zip(bytes.chunks_exact_mut(dtype.block_bytes())) {
        let peak = |values: &[f32]| values.iter().fold(0f32, |max, x| max.max(x.abs()));
        let wanted = peak(values);
        let mut rng = fastrand::Rng::with_seed(
            values.iter().fold(0u64, |hash, x| hash.wrapping_mul(31).wrapping_add(u64::from(x.to_bits()))),
        );
        bytes.fill(0);
        if wanted == 0.0 {
            continue;
        }
        // Values far beyond the range of the type's scales stay zeros.
        for attempt in 1.. {
            rng.fill(bytes);
            convert(bytes, &mut back);
            // The largest of NaN and a number is the number, so all values are looked at.
            let finite = back.iter().all(|x| x.is_finite());
            if finite && (wanted / 16.0..=4.0 * wanted).contains(&peak(&back)) {
                break;
            }
            if attempt == MAX_ATTEMPTS {
                bytes.fill(0);
                break;
            }
        }
    }
}

/// The bytes of a tensor with these values, by [`row_encoder`]; gaps between its elements are 0x5a. `None` for a type without a conversion,
/// and for another number of values than the tensor has elements.
pub fn encode(desc: &TensorDesc, values: &[f32]) -> Option<Vec<u8>> {
    let (encode, dtype) = (row_encoder(desc.dtype())?, desc.dtype());
    if values.len() != desc.elements() {
        return None;
    }
    let mut bytes = vec![0x5a; desc.extent()];
    let mut blocks = values.chunks_exact(dtype.block_len());
    for_each_block(desc, |at| {
        if let Some(values) = blocks.next() {
            encode(values, &mut bytes[at..at + dtype.block_bytes()]);
        }
    });
    Some(bytes)
}

/// The values of a tensor in logical order, I32 and I64 as numbers. `bytes` starts with its first element. `None` for a type without a
/// conversion, and for fewer bytes than the tensor's extent.
pub fn decode(desc: &TensorDesc, bytes: &[u8]) -> Option<Vec<f64>> {
    let (dtype, mut values) = (desc.dtype(), Vec::with_capacity(desc.elements()));
    let convert = dequantiser(dtype);
    let converts = convert.is_some() || matches!(dtype, DType::I32 | DType::I64);
    if !converts || bytes.len() < desc.extent() {
        return None;
    }
    let mut block = vec![0.0; dtype.block_len()];
    for_each_block(desc, |at| {
        let bytes = &bytes[at..at + dtype.block_bytes()];
        if let Some(convert) = convert {
            convert(bytes, &mut block);
            values.extend(block.iter().map(|&v| f64::from(v)));
        } else if let Ok(bytes) = bytes.try_into() {
            values.push(f64::from(i32::from_le_bytes(bytes)));
        } else if let Ok(bytes) = bytes.try_into() {
            values.push(i64::from_le_bytes(bytes) as f64);
        }
    });
    Some(values)
}

/// Calls `each` with the offset in bytes of each block of a tensor from its first one, in logical order.
pub fn for_each_block(desc: &TensorDesc, mut each: impl FnMut(usize)) {
    let (ne, nb) = (desc.ne(), desc.nb());
    for i3 in 0..ne[3] {
        for i2 in 0..ne[2] {
            for i1 in 0..ne[1] {
                for block in 0..ne[0] / desc.dtype().block_len() {
                    each(block * nb[0] + i1 * nb[1] + i2 * nb[2] + i3 * nb[3]);
                }
            }
        }
    }
}

/// Normalised mean squared error: the sum of squared errors divided by the sum of squared reference values. 0 for equal values,
/// even if all of them are 0. Equal infinities agree; any other infinity or NaN makes the error infinite. Values beyond the shorter
/// list are not compared.
pub fn nmse(got: &[f64], want: &[f64]) -> f64 {
    let (mut error, mut power) = (0.0, 0.0);
    for (&g, &w) in got.iter().zip(want).filter(|(g, w)| g != w || w.is_finite()) {
        error += (g - w) * (g - w);
        power += if w.is_finite() { w * w } else { 0.0 };
    }
    match error {
        0.0 => 0.0,
        _ if error.is_finite() => error / f64::max(power, 1e-30),
        _ => f64::INFINITY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_its_values() {
        assert_eq!(normal(1, 100), normal(1, 100));
        assert_ne!(normal(1, 100), normal(2, 100));
        assert!(uniform(3, 1000, -2.0, 5.0).iter().all(|v| (-2.0..5.0).contains(v)));
        let values = normal(4, 10_000);
        let mean = values.iter().sum::<f32>() / 1e4;
        let variance = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / 1e4;
        assert!(mean.abs() < 0.05 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
    }

    #[test]
    fn values_survive_every_layout_and_type_of_numbers() {
        let ne = [6, 4, 3, 2];
        let values: Vec<f32> = (0..144).map(|k| (k * 7 % 144 - 72) as f32).collect();
        let want: Vec<f64> = values.iter().map(|&v| f64::from(v)).collect();
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::I32, DType::I64] {
            let b = dtype.block_bytes();
            for nb in [[b, 6 * b, 24 * b, 72 * b], [b, 10 * b, 50 * b, 200 * b], [4 * b, b, 24 * b, 72 * b]] {
                let desc = TensorDesc::strided(dtype, ne, nb).unwrap();
                let bytes = encode(&desc, &values).unwrap();
                assert_eq!(decode(&desc, &bytes).unwrap(), want, "{dtype} {nb:?}");
                assert!(encode(&desc, &values[1..]).is_none(), "too few values");
                assert!(decode(&desc, &bytes[1..]).is_none(), "too few bytes");
            }
        }
        let bytes = TensorDesc::contiguous(DType::I8, [4, 1, 1, 1]).unwrap();
        assert!(
            encode(&bytes, &[0.0; 4]).is_none() && decode(&bytes, &[0; 4]).is_none(),
            "a type without a conversion"
        );
    }

    #[test]
    fn nmse_is_relative_to_the_wanted_power() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        for (got, want, error) in [
            ([1.0, 2.0], [1.0, 2.0], 0.0),
            ([0.0, 0.0], [0.0, 0.0], 0.0),
            ([3.0, 5.0], [3.0, 4.0], 0.04),
            ([3.0, -inf], [3.0, -inf], 0.0),
            ([-inf, 5.0], [-inf, 4.0], 0.0625),
            ([3.0, inf], [3.0, -inf], inf),
            ([3.0, inf], [3.0, 4.0], inf),
            ([3.0, 4.0], [3.0, inf], inf),
            ([3.0, nan], [3.0, 4.0], inf),
            ([3.0, nan], [3.0, nan], inf),
        ] {
            assert_eq!(nmse(&got, &want), error, "{got:?} {want:?}");
        }
        assert!(nmse(&[1.0], &[0.0]) > 1e20);
    }
}

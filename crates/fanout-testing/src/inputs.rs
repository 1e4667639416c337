//! Seeded values, and indices of tensors in logical order: dimension 0 fastest.

use fanout::tensor::DType;
use fanout::tensor::quant::{dequantiser, quantiser};

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

/// Writes `values` to a dense row of `dtype`. If the type only converts to f32, its row gets random blocks with finite values about as
/// large as those passed; the same ones for the same values.
///
/// # Panics
/// If the type has no conversion, or the lengths do not fit.
pub fn encode_row(dtype: DType, values: &[f32], bytes: &mut [u8]) {
    if let Some(quantise) = quantiser(dtype) {
        return quantise(values, bytes);
    }
    let convert = dequantiser(dtype).expect("a type with a conversion");
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
        loop {
            rng.fill(bytes);
            convert(bytes, &mut back);
            // The largest of NaN and a number is the number, so all values are looked at.
            let finite = back.iter().all(|x| x.is_finite());
            if finite && (wanted / 16.0..=4.0 * wanted).contains(&peak(&back)) {
                break;
            }
        }
    }
}

/// The logical index of element `i` of a tensor of shape `ne`.
pub fn at(ne: [usize; 4], i: [usize; 4]) -> usize {
    ((i[3] * ne[2] + i[2]) * ne[1] + i[1]) * ne[0] + i[0]
}

/// The element of logical index `k` in a tensor of shape `ne`: the inverse of [`at`].
pub fn index(ne: [usize; 4], k: usize) -> [usize; 4] {
    [k % ne[0], k / ne[0] % ne[1], k / ne[0] / ne[1] % ne[2], k / ne[0] / ne[1] / ne[2]]
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
    fn index_is_the_inverse_of_at() {
        let ne = [2, 3, 4, 5];
        assert!((0..120).all(|k| at(ne, index(ne, k)) == k));
        assert_eq!(index(ne, 7), [1, 0, 1, 0]);
    }
}

//! Seeded values, and indices of tensors in logical order: dimension 0 fastest.

use fanout::self_test::values::row_encoder;
pub use fanout::self_test::values::{normal, uniform};
use fanout::tensor::DType;

/// Writes `values` to a dense row of `dtype`, as [`row_encoder`] does.
///
/// # Panics
/// If the type has no conversion, or the lengths do not fit.
pub fn encode_row(dtype: DType, values: &[f32], bytes: &mut [u8]) {
    assert_eq!(dtype.row_bytes(values.len()), Some(bytes.len()), "a row of {dtype}");
    row_encoder(dtype).expect("a type with a conversion")(values, bytes);
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
    fn index_is_the_inverse_of_at() {
        let ne = [2, 3, 4, 5];
        assert!((0..120).all(|k| at(ne, index(ne, k)) == k));
        assert_eq!(index(ne, 7), [1, 0, 1, 0]);
    }
}

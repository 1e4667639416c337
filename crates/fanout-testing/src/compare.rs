//! Error measures: results against reference values.

use fanout::self_test::values;
use fanout::tensor::DType;

/// Normalised mean squared error, as [`values::nmse`] computes it: an infinity agrees with an equal one, and a NaN with no value.
///
/// # Panics
/// When the lengths differ.
pub fn nmse(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len(), "different numbers of values");
    values::nmse(got, want)
}

/// Asserts that each pair of values differs by at most `relative` of the larger magnitude plus `absolute`. Equal infinities
/// agree, and so do two NaNs. `what` names the comparison in the message.
///
/// # Panics
/// When a pair differs by more, or the lengths differ.
#[track_caller]
pub fn assert_close(got: &[f64], want: &[f64], relative: f64, absolute: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: different numbers of values");
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let same = g == w || (g.is_nan() && w.is_nan());
        // The bound is infinite if a value is: an infinity agrees only with an equal infinity.
        let close = (g - w).abs() <= relative * g.abs().max(w.abs()) + absolute;
        assert!(same || (close && g.is_finite() && w.is_finite()), "{what}: value {i} is {g}, wanted {w}");
    }
}

/// The relative tolerance of an op that is computed in f32 and stored in a float type.
pub fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
        _ => 2e-6,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_values_agree_with_themselves_only() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        assert_close(&[inf, -inf, nan], &[inf, -inf, nan], 0.0, 0.0, "special values");
        for (got, want) in [(inf, -inf), (inf, 1.0), (1.0, -inf), (nan, 0.0), (0.0, nan), (1.0, 1.1)] {
            let differs = std::panic::catch_unwind(|| assert_close(&[got], &[want], 0.01, 0.01, "one value"));
            assert!(differs.is_err(), "{got} {want}");
        }
    }
}

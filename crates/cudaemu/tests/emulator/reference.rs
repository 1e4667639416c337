//! Reference implementation of rounding, for values that a double, or the sum of two doubles, represents exactly.

/// Rounding mode.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Round {
    Near,
    Zero,
    Up,
    Down,
}

/// All modes, in the order in which the kernels call the intrinsics: rn, rz, ru, rd.
pub const ROUNDINGS: [Round; 4] = [Round::Near, Round::Zero, Round::Up, Round::Down];

/// A floating-point format.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// Bits of the significand, with the implicit one.
    bits: i32,
    /// Exponent of the smallest normal value.
    min_exponent: i32,
    /// The largest finite value.
    max_finite: f64,
}

pub const F32: Format = Format { bits: 24, min_exponent: -126, max_finite: f32::MAX as f64 };
pub const F16: Format = Format { bits: 11, min_exponent: -14, max_finite: 65504.0 };
pub const BF16: Format = Format { bits: 8, min_exponent: -126, max_finite: 3.3895313892515355e38 };

/// A value as `high + low`: `low` is at most half a unit in the last place of `high`. For quotients and roots only the sign of
/// `low` is meaningful, which is enough to round them.
#[derive(Clone, Copy, Debug)]
pub struct Exact(pub f64, pub f64);

impl Exact {
    /// The exact sum (Knuth's TwoSum).
    pub fn two_sum(a: f64, b: f64) -> Self {
        let sum = a + b;
        let b_rounded = sum - a;
        Self(sum, (a - (sum - b_rounded)) + (b - b_rounded))
    }

    /// The exact product (TwoProduct with a fused multiply-add).
    pub fn two_product(a: f64, b: f64) -> Self {
        Self(a * b, a.mul_add(b, -(a * b)))
    }

    /// The quotient; `low` has the sign of `a / b - high`.
    pub fn quotient(a: f64, b: f64) -> Self {
        let quotient = a / b;
        Self(quotient, (-quotient).mul_add(b, a) * b.signum())
    }

    /// The square root; `low` has the sign of `√a - high`.
    pub fn root(a: f64) -> Self {
        let root = a.sqrt();
        Self(root, (-root).mul_add(root, a))
    }

    /// The value rounded to a format; infinities, zeros and NaN stay as they are.
    pub fn round(self, format: Format, round: Round) -> f64 {
        let Self(high, low) = self;
        if !high.is_finite() || high == 0.0 {
            return high;
        }
        let mut exponent = (high.abs().to_bits() >> 52) as i32 - 1023;
        // `high` is a power of two and `low` points towards zero: the value belongs to the binade below.
        if high.abs().to_bits() << 12 == 0 && low * high < 0.0 {
            exponent -= 1;
        }
        // Exponent of a unit in the last place; subnormals all have that of the smallest normal value.
        let ulp_exponent = exponent.max(format.min_exponent) - format.bits + 1;
        // The value in units in the last place. Scaled in two steps, because a single factor may exceed the range of a double.
        let scaled = high * 2f64.powi(-ulp_exponent / 2) * 2f64.powi(-ulp_exponent - -ulp_exponent / 2);
        let mut floor = scaled.floor();
        let mut rest = scaled - floor;
        // `high` is a whole number of units and the value lies just below it.
        if rest == 0.0 && low < 0.0 {
            (floor, rest) = (floor - 1.0, 1.0);
        }
        let exact = rest == 0.0 && low == 0.0;
        let up = !exact
            && match round {
                Round::Near if rest == 0.5 && low == 0.0 => floor % 2.0 != 0.0,
                Round::Near => rest > 0.5 || rest == 0.5 && low > 0.0,
                Round::Zero => high < 0.0,
                Round::Up => true,
                Round::Down => false,
            };
        let result = (floor + f64::from(u8::from(up))) * 2f64.powi(ulp_exponent);
        if result.abs() > format.max_finite {
            let infinite = match round {
                Round::Near => true,
                Round::Zero => false,
                Round::Up => high > 0.0,
                Round::Down => high < 0.0,
            };
            return if infinite { f64::INFINITY } else { format.max_finite }.copysign(high);
        }
        result.copysign(high)
    }

    /// The value rounded to a double. Not for results that overflow or are subnormal.
    pub fn round_double(self, round: Round) -> f64 {
        let Self(high, low) = self;
        if !high.is_finite() || low == 0.0 {
            return high;
        }
        match round {
            Round::Near => high,
            Round::Zero if low * high < 0.0 => {
                if high > 0.0 {
                    high.next_down()
                } else {
                    high.next_up()
                }
            }
            Round::Up if low > 0.0 => high.next_up(),
            Round::Down if low < 0.0 => high.next_down(),
            _ => high,
        }
    }
}

/// A value rounded to an integer and clamped to a range; NaN becomes 0.
pub fn round_to_integer(value: f64, round: Round, range: [f64; 2]) -> f64 {
    let rounded = match round {
        Round::Near => value.round_ties_even(),
        Round::Zero => value.trunc(),
        Round::Up => value.ceil(),
        Round::Down => value.floor(),
    };
    if value.is_nan() { 0.0 } else { rounded.clamp(range[0], range[1]) }
}

/// The sum of two floats, rounded to a format. A zero sum is negative if both terms are negative, or if the terms cancel and
/// the mode is [`Round::Down`].
pub fn rounded_sum(a: f64, b: f64, format: Format, round: Round) -> f64 {
    let exact = Exact::two_sum(a, b);
    if exact.0 == 0.0 && (a != 0.0 || a.is_sign_positive() != b.is_sign_positive()) {
        return if round == Round::Down { -0.0 } else { 0.0 };
    }
    exact.round(format, round)
}

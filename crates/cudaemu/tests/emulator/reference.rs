//! Reference implementation of rounding, for values that are exact as a double or a sum of two doubles.

/// Rounding mode.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Round {
    Near,
    Zero,
    Up,
    Down,
}

/// In the order of most intrinsics: rn, rz, ru, rd.
pub const ROUNDINGS: [Round; 4] = [Round::Near, Round::Zero, Round::Up, Round::Down];

/// A format: bits of a significand, the smallest exponent of a normal value, the largest finite value.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    bits: i32,
    least: i32,
    most: f64,
}

pub const F32: Format = Format { bits: 24, least: -126, most: f32::MAX as f64 };
pub const F16: Format = Format { bits: 11, least: -14, most: 65504.0 };
pub const BF16: Format = Format { bits: 8, least: -126, most: 3.3895313892515355e38 };
pub const E4M3: Format = Format { bits: 4, least: -6, most: 448.0 };
pub const E5M2: Format = Format { bits: 3, least: -14, most: 57344.0 };

/// A value as a sum of two doubles. The second is at most half a unit of the first; sometimes only its sign is known.
#[derive(Clone, Copy, Debug)]
pub struct Exact(pub f64, pub f64);

impl Exact {
    pub fn sum(a: f64, b: f64) -> Self {
        let sum = a + b;
        let shadow = sum - a;
        Self(sum, (a - (sum - shadow)) + (b - shadow))
    }

    pub fn product(a: f64, b: f64) -> Self {
        Self(a * b, a.mul_add(b, -(a * b)))
    }

    pub fn quotient(a: f64, b: f64) -> Self {
        let quotient = a / b;
        Self(quotient, (-quotient).mul_add(b, a) * b.signum())
    }

    pub fn root(a: f64) -> Self {
        let root = a.sqrt();
        Self(root, (-root).mul_add(root, a))
    }

    /// The value in a format; infinities and NaN stay.
    pub fn round(self, format: Format, round: Round) -> f64 {
        let Self(high, low) = self;
        if !high.is_finite() || high == 0.0 {
            return high;
        }
        let mut exponent = (high.abs().to_bits() >> 52) as i32 - 1023;
        if high.abs().to_bits() << 12 == 0 && low * high < 0.0 {
            exponent -= 1;
        }
        let place = exponent.max(format.least) - format.bits + 1;
        // In two steps, because a single factor may exceed the range of a double.
        let scaled = high * 2f64.powi(-place / 2) * 2f64.powi(-place - -place / 2);
        let mut floor = scaled.floor();
        let mut rest = scaled - floor;
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
        let result = (floor + f64::from(u8::from(up))) * 2f64.powi(place);
        if result.abs() > format.most {
            let infinite = match round {
                Round::Near => true,
                Round::Zero => false,
                Round::Up => high > 0.0,
                Round::Down => high < 0.0,
            };
            return if infinite { f64::INFINITY } else { format.most }.copysign(high);
        }
        result.copysign(high)
    }

    /// The value as a double; invalid near the limits of the range.
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

/// A value rounded to an integer in a range; values outside are clamped, NaN becomes 0.
pub fn whole(value: f64, round: Round, range: [f64; 2]) -> f64 {
    let rounded = match round {
        Round::Near => value.round_ties_even(),
        Round::Zero => value.trunc(),
        Round::Up => value.ceil(),
        Round::Down => value.floor(),
    };
    if value.is_nan() { 0.0 } else { rounded.clamp(range[0], range[1]) }
}

/// A sum of floats. A zero sum is negative if both terms are, or if terms that cancel are rounded down.
pub fn add(a: f64, b: f64, format: Format, round: Round) -> f64 {
    let exact = Exact::sum(a, b);
    if exact.0 == 0.0 && (a != 0.0 || a.is_sign_positive() != b.is_sign_positive()) {
        return if round == Round::Down { -0.0 } else { 0.0 };
    }
    exact.round(format, round)
}

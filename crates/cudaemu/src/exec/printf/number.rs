//! Number formatting of C's printf.

use super::Flags;

/// The prefix of a signed number: minus, plus, space or nothing.
pub(super) fn sign(negative: bool, flags: Flags) -> String {
    let sign = match (negative, flags.plus, flags.space) {
        (true, ..) => "-",
        (_, true, _) => "+",
        (.., true) => " ",
        _ => "",
    };
    sign.into()
}

/// Digits in the base of the conversion letter, at least `precision` of them. As in C, zero with precision 0 has no digits.
pub(super) fn digits(value: u64, kind: u8, precision: Option<usize>) -> String {
    let precision = precision.unwrap_or(1);
    if value == 0 && precision == 0 {
        return String::new();
    }
    let text = match kind {
        b'o' => format!("{value:o}"),
        b'x' => format!("{value:x}"),
        b'X' => format!("{value:X}"),
        _ => value.to_string(),
    };
    "0".repeat(precision.saturating_sub(text.len())) + &text
}

/// Sign (and `0x`), and digits, for `%f`, `%e`, `%g`, `%a` and their upper-case forms.
pub(super) fn float(value: f64, kind: u8, precision: Option<usize>, flags: Flags) -> (String, String) {
    let mut prefix = sign(value.is_sign_negative(), flags);
    let (magnitude, point) = (value.abs(), flags.alternative);
    let mut body = match kind.to_ascii_lowercase() {
        _ if value.is_nan() => "nan".into(),
        _ if value.is_infinite() => "inf".into(),
        b'f' => fixed(magnitude, precision.unwrap_or(6), point),
        b'e' => scientific(magnitude, precision.unwrap_or(6), point),
        b'g' => general(magnitude, precision.unwrap_or(6).max(1), point),
        _ => {
            prefix += "0x";
            hexadecimal(magnitude, precision, point)
        }
    };
    if kind.is_ascii_uppercase() {
        prefix.make_ascii_uppercase();
        body.make_ascii_uppercase();
    }
    (prefix, body)
}

fn fixed(value: f64, precision: usize, point: bool) -> String {
    let mut text = format!("{value:.precision$}");
    if point && precision == 0 {
        text.push('.');
    }
    text
}

/// Digits (with the point) and exponent of `d.ddde±xx`.
fn split_scientific(value: f64, precision: usize) -> (String, i32) {
    let text = format!("{value:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    (digits.to_string(), exponent.parse().unwrap_or(0))
}

fn scientific(value: f64, precision: usize, point: bool) -> String {
    let (mut digits, exponent) = split_scientific(value, precision);
    if point && precision == 0 {
        digits.push('.');
    }
    digits + &exponent_text(exponent)
}

fn exponent_text(exponent: i32) -> String {
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("e{sign}{:02}", exponent.unsigned_abs())
}

/// The shorter of `%e` and `%f` with this many significant digits, without trailing zeros (unless `#`).
fn general(value: f64, precision: usize, alternative: bool) -> String {
    let (digits, exponent) = split_scientific(value, precision - 1);
    let scientific = exponent < -4 || exponent >= precision as i32;
    let mut text = if scientific {
        digits
    } else {
        // The exponent is in -4..precision, so there are 0 or more digits after the point.
        let behind = (precision as i32 - 1 - exponent).max(0) as usize;
        format!("{value:.behind$}")
    };
    if alternative {
        if !text.contains('.') {
            text.push('.');
        }
    } else if text.contains('.') {
        text.truncate(text.trim_end_matches('0').trim_end_matches('.').len());
    }
    if scientific { text + &exponent_text(exponent) } else { text }
}

/// `h.hhhhp±d` without the `0x`, with as many digits as the value needs if no precision is given. Subnormals start with 0.
fn hexadecimal(value: f64, precision: Option<usize>, point: bool) -> String {
    let (fraction, biased) = (value.to_bits() & ((1 << 52) - 1), (value.to_bits() >> 52) as i32);
    let exponent = match (biased, fraction) {
        (0, 0) => 0,
        (0, _) => -1022,
        _ => biased - 1023,
    };
    let mut mantissa = fraction | u64::from(biased != 0) << 52;
    if let Some(digits) = precision.filter(|&digits| digits < 13) {
        // Round half to even.
        let drop = 52 - 4 * digits as u32;
        let (half, rest) = (1 << (drop - 1), mantissa & ((1 << drop) - 1));
        let odd = mantissa >> drop & 1 != 0;
        mantissa = ((mantissa >> drop) + u64::from(rest > half || rest == half && odd)) << drop;
    }
    let mut digits = format!("{:013x}", mantissa & ((1 << 52) - 1));
    match precision {
        None => digits.truncate(digits.trim_end_matches('0').len()),
        Some(precision) => {
            digits.truncate(precision);
            digits += &"0".repeat(precision - digits.len());
        }
    }
    let dot = if point || !digits.is_empty() { "." } else { "" };
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{}{dot}{digits}p{sign}{}", mantissa >> 52, exponent.unsigned_abs())
}

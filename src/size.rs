//! Sizes in bytes as texts: parsing of `20G`, and the form in messages.

use std::fmt::{self, Display};

use thiserror::Error;

/// Why a text is not a valid size.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ParseSizeError {
    /// The text is no number with a unit.
    #[error("expected a size such as 512M, 8G or 1048576, got {0:?}")]
    Malformed(String),
    /// The size is 2^64 bytes or more.
    #[error("{0:?} is too large: a size is below 16777216T")]
    TooLarge(String),
    /// The size is 0 where there must be some bytes.
    #[error("must be more than 0 bytes")]
    Zero,
}

/// Parses a size in bytes, such as `20G`: digits and an optional K, M, G or T (powers of 1024), each also with B or iB, in
/// upper or lower case.
///
/// # Errors
/// [`ParseSizeError::Malformed`] for any other text, [`ParseSizeError::TooLarge`] for sizes of 2^64 bytes or more.
pub fn parse_bytes(text: &str) -> Result<u64, ParseSizeError> {
    let malformed = || ParseSizeError::Malformed(text.to_owned());
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        _ => return Err(malformed()),
    };
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(malformed());
    }
    // Digits alone: only the range is left to fail.
    let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    bytes.ok_or_else(|| ParseSizeError::TooLarge(text.to_owned()))
}

/// As [`parse_bytes`], for sizes that must not be 0, such as memory limits.
///
/// # Errors
/// As [`parse_bytes`]; [`ParseSizeError::Zero`] for 0.
pub fn parse_nonzero_bytes(text: &str) -> Result<u64, ParseSizeError> {
    match parse_bytes(text)? {
        0 => Err(ParseSizeError::Zero),
        bytes => Ok(bytes),
    }
}

/// A number of bytes in messages: `20 GiB`, `1536 MiB`, or `12.3 GiB` where it is rounded to a tenth.
#[derive(Clone, Copy, Debug)]
pub struct Bytes(pub u64);

impl Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        // The largest unit that divides this number: 1025 MiB compares better with 1 GiB than 1.0 GiB does.
        let exact = (self.0.trailing_zeros() / 10).min(4);
        let count = self.0 >> (10 * exact);
        if self.0 == 0 || count < 10_000 {
            return write!(f, "{count} {}", NAMES[if self.0 == 0 { 0 } else { exact as usize }]);
        }
        let exponent = (self.0.ilog2() / 10).min(4);
        write!(f, "{:.1} {}", self.0 as f64 / (1_u64 << (10 * exponent)) as f64, NAMES[exponent as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_units() {
        let sizes = [0, 1023, 1024, 1536, 10 << 10, (64 << 20) + 1, 1025 << 20, 123 << 30, u64::MAX];
        let texts = ["0 B", "1023 B", "1 KiB", "1536 B", "10 KiB", "64.0 MiB", "1025 MiB", "123 GiB", "16777216.0 TiB"];
        assert_eq!(sizes.map(|size| Bytes(size).to_string()), texts);
    }

    #[test]
    fn units_are_powers_of_1024() {
        for (text, want) in [
            ("0", Some(0)),
            ("1048576", Some(1 << 20)),
            ("20G", Some(20 << 30)),
            ("512m", Some(512 << 20)),
            ("3KiB", Some(3 << 10)),
            ("16777215T", Some(16_777_215 << 40)),
            ("16777216T", None),
            ("99999999999999999999", None),
            ("", None),
            ("G", None),
            ("+1", None),
            ("-1", None),
            ("1.5G", None),
            ("5X", None),
        ] {
            assert_eq!(parse_bytes(text).ok(), want, "{text:?}");
        }
    }

    #[test]
    fn errors_name_what_is_wrong_with_a_size() {
        for (text, want) in [
            ("99999999999G", "\"99999999999G\" is too large: a size is below 16777216T"),
            ("99999999999999999999", "\"99999999999999999999\" is too large: a size is below 16777216T"),
            ("-1", "expected a size such as 512M, 8G or 1048576, got \"-1\""),
            ("0", "must be more than 0 bytes"),
            ("0T", "must be more than 0 bytes"),
        ] {
            assert_eq!(parse_nonzero_bytes(text).unwrap_err().to_string(), want);
        }
        assert_eq!(parse_nonzero_bytes("1"), Ok(1));
    }
}

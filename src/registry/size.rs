//! Sizes in bytes, as people write them.

use thiserror::Error;

/// A text that is no size.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("expected a size such as 512M, 8G or 1048576, got {0:?}")]
pub struct BadSize(String);

/// Reads a size in bytes: digits and an optional K, M, G or T (powers of 1024), as in `20G`.
///
/// # Errors
/// [`BadSize`] for anything else, and for sizes of 2^64 bytes and more.
pub fn parse_bytes(text: &str) -> Result<u64, BadSize> {
    let bad = || BadSize(text.to_owned());
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        _ => return Err(bad()),
    };
    if digits.starts_with('+') {
        return Err(bad());
    }
    let number: u64 = digits.parse().map_err(|_| bad())?;
    number.checked_mul(1 << shift).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_powers_of_1024() {
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
}

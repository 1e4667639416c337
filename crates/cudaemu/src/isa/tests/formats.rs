//! Bit-level description of floating-point formats, and tables of known values (`values/*.txt`).

use std::collections::HashSet;

use crate::isa::{Family, Row};

/// A floating-point format and its PTX type.
#[derive(Clone, Copy)]
pub(super) struct Format {
    pub(super) name: &'static str,
    /// The sign bit.
    pub(super) sign: i128,
    /// Infinity, which is also the exponent mask.
    pub(super) inf: i128,
    pub(super) one: i128,
}

pub(super) const F16: Format = Format { name: "f16", sign: 1 << 15, inf: 0x7c00, one: 0x3c00 };
pub(super) const BF16: Format = Format { name: "bf16", sign: 1 << 15, inf: 0x7f80, one: 0x3f80 };
pub(super) const F32: Format = Format { name: "f32", sign: 1 << 31, inf: 0x7f80_0000, one: 0x3f80_0000 };
pub(super) const F64: Format = Format { name: "f64", sign: 1 << 63, inf: 0x7ff << 52, one: 0x3ff << 52 };

impl Format {
    /// The NaN that arithmetic returns.
    pub(super) fn nan(self) -> i128 {
        if self.name == "f64" { 0xfff8 << 48 } else { self.sign - 1 }
    }

    pub(super) fn is_nan(self, bits: i128) -> bool {
        bits & (self.sign - 1) > self.inf
    }

    /// Applies `.ftz`: subnormals become zeros of the same sign.
    pub(super) fn flush(self, bits: i128) -> i128 {
        if bits & self.inf == 0 { bits & self.sign } else { bits }
    }

    /// Applies `.sat`: clamps to 0.0 to 1.0; NaN becomes 0.
    pub(super) fn sat(self, bits: i128) -> i128 {
        if self.is_nan(bits) || bits & self.sign != 0 { 0 } else { bits.min(self.one) }
    }

    /// A value by name: `1`, `-1`, `2`, `0`, `-0`, `inf`, `nan`, `sub` (smallest subnormal), `big` (largest finite value).
    pub(super) fn value(self, name: &str) -> i128 {
        let (sign, name) = name.strip_prefix('-').map_or((0, name), |rest| (self.sign, rest));
        sign | match name {
            "0" => 0,
            "1" => self.one,
            "2" => self.one + (self.inf & !(self.inf << 1)),
            "sub" => 1,
            "big" => self.inf - 1,
            "inf" => self.inf,
            "nan" => self.nan(),
            _ => panic!("no value is called {name}"),
        }
    }
}

/// A line of a table of known values: opcode, operands and results.
pub(super) struct KnownResult<'a> {
    pub(super) op: &'a str,
    pub(super) inputs: Vec<i128>,
    /// Results of `.rn`, `.rz`, `.rm`, `.rp`.
    pub(super) plain: [i128; 4],
    /// The same with `.ftz`.
    pub(super) ftz: [i128; 4],
}

/// Parses hexadecimal numbers separated by commas.
fn parse_hex(text: &str) -> Vec<i128> {
    text.split(',').map(|word| i128::from_str_radix(word, 16).expect("a hexadecimal number")).collect()
}

/// Parses the results of `.rn`, `.rz`, `.rm` and `.rp`; a single one applies to all roundings.
pub(super) fn parse_results(text: &str) -> [i128; 4] {
    let all = parse_hex(text);
    std::array::from_fn(|at| all[at.min(all.len() - 1)])
}

/// The words of each line of a table, without comments.
pub(super) fn table_lines(text: &str) -> impl Iterator<Item = Vec<&str>> {
    text.lines().filter(|line| !line.starts_with('#')).map(|line| line.split(' ').collect())
}

/// Parses the table of a format's arithmetic.
pub(super) fn parse_known_results(text: &str) -> Vec<KnownResult<'_>> {
    table_lines(text)
        .map(|words| KnownResult {
            op: words[0],
            inputs: parse_hex(words[1]),
            plain: parse_results(words[2]),
            ftz: parse_results(words.get(3).unwrap_or(&words[2])),
        })
        .collect()
}

/// Index of each rounding modifier in a [`Known`] line. No modifier means `.rn`.
pub(super) const ROUNDINGS: [(&str, usize); 5] = [("", 0), (".rn", 0), (".rz", 1), (".rm", 2), (".rp", 3)];

/// The names of the rows.
pub(super) fn row_names(rows: &[Row]) -> HashSet<String> {
    rows.iter().map(|row| row.name.clone()).collect()
}

/// Wraps rows in a family for the harness.
pub(super) fn family_of(rows: Vec<Row>) -> Family {
    Family { title: "", rows, hints: vec![] }
}

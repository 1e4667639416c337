//! `cvt` against known values (`values/cvt.txt`) and values computed by hand.

use super::formats::{BF16, F16, F32, F64, Format, ROUNDINGS, parse_results, row_names, table_lines};
use super::{TYPES, Type, ty};
use crate::isa::convert;
use crate::isa::harness::Harness;
use crate::operands::Class;

const VALUES: &str = include_str!("values/cvt.txt");
const FORMATS: [Format; 4] = [F16, BF16, F32, F64];
const BYTES: [Type; 2] = [ty("u8", 8, false), ty("s8", 8, true)];

fn integer_types() -> impl Iterator<Item = Type> {
    BYTES.into_iter().chain(TYPES)
}

fn format_named(name: &str) -> Format {
    FORMATS.into_iter().find(|format| format.name == name).expect("a format")
}

/// Width of a type in bits.
fn width_of(name: &str) -> u32 {
    integer_types()
        .find(|t| t.name == name)
        .map_or_else(|| 128 - (format_named(name).sign as u128).leading_zeros(), |t| t.bits)
}

/// Checks a conversion in the narrowest registers for its types and, if both types fit, in registers of 32 and of 64 bits.
fn check(table: &mut Harness, name: &str, input: i128, result: i128) {
    let mut words = name.rsplit('.');
    let (source, destination) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let widest = width_of(source).max(width_of(destination));
    table.wide = None;
    let narrow = 16.max(width_of(destination));
    table.check(name, &[(&[input], &[result & ((1 << narrow) - 1)])]);
    for (class, width) in [(Class::B32, 32), (Class::B64, 64)] {
        if widest <= width {
            table.wide = Some(class);
            // Fills the bits above the source in its register with garbage, which the conversion must ignore.
            let garbage = if width_of(source) < width {
                input & ((1 << width_of(source)) - 1) | 0x5a << width_of(source)
            } else {
                input
            };
            table.check(name, &[(&[garbage], &[result])]);
        }
    }
    table.wide = None;
}

#[test]
fn every_conversion_gives_the_expected_bits() {
    let family = convert::family();
    let names = row_names(&family.rows);
    let mut table = Harness::new(family);
    check_integer_to_integer(&mut table);
    check_integer_to_float(&mut table);
    check_float_to_integer(&mut table);
    check_float_to_float(&mut table, &names);
    check_packed_halves(&mut table);
    check_tf32(&mut table);
    table.finish();
}

fn check_integer_to_integer(table: &mut Harness) {
    for from in integer_types() {
        for to in integer_types() {
            for value in
                [from.min(), from.max(), 0, 1, from.wrap(-1), from.wrap(0x1234_5678_9abc_def0), from.wrap(0x80)]
            {
                check(table, &format!("cvt.{}.{}", to.name, from.name), value, to.wrap(value));
                if from.min() < to.min() || from.max() > to.max() {
                    let clamped = value.clamp(to.min(), to.max());
                    check(table, &format!("cvt.sat.{}.{}", to.name, from.name), value, clamped);
                }
            }
        }
    }
}

fn check_integer_to_float(table: &mut Harness) {
    for words in table_lines(VALUES).filter(|words| words[1] == "int") {
        let (to, value) = (format_named(words[0]), words[2].parse::<i128>().expect("an integer"));
        let by_rounding = parse_results(words[3]);
        for from in integer_types().filter(|from| (from.min()..=from.max()).contains(&value)) {
            for (round, at) in &ROUNDINGS[1..] {
                let types = format!("{}.{}", to.name, from.name);
                let (plain, sat) = (by_rounding[*at], if value > 0 { to.one } else { 0 });
                check(table, &format!("cvt{round}.{types}"), value, plain);
                if to.name != "bf16" {
                    check(table, &format!("cvt{round}.sat.{types}"), value, sat);
                }
                if to.name == "f32" {
                    check(table, &format!("cvt{round}.ftz.{types}"), value, plain);
                    check(table, &format!("cvt{round}.ftz.sat.{types}"), value, sat);
                }
            }
        }
    }
}

/// Values, and what `.rni`, `.rzi`, `.rmi` and `.rpi` round them to.
const FRACTIONS: [(f64, [f64; 4]); 18] = [
    (0.0, [0.0; 4]),
    (-0.0, [-0.0; 4]),
    (0.5, [0.0, 0.0, 0.0, 1.0]),
    (1.5, [2.0, 1.0, 1.0, 2.0]),
    (2.5, [2.0, 2.0, 2.0, 3.0]),
    (-0.5, [-0.0, -0.0, -1.0, -0.0]),
    (-1.5, [-2.0, -1.0, -2.0, -1.0]),
    (-2.75, [-3.0, -2.0, -3.0, -2.0]),
    (126.5, [126.0, 126.0, 126.0, 127.0]),
    (127.5, [128.0, 127.0, 127.0, 128.0]),
    (-128.0, [-128.0; 4]),
    (256.0, [256.0; 4]),
    (-40960.0, [-40960.0; 4]),
    (65280.0, [65280.0; 4]),
    (2_147_483_648.0, [2_147_483_648.0; 4]),
    (-9_223_372_036_854_775_808.0, [-9_223_372_036_854_775_808.0; 4]),
    (18_446_744_073_709_551_616.0, [18_446_744_073_709_551_616.0; 4]),
    (f64::NEG_INFINITY, [f64::NEG_INFINITY; 4]),
];

/// The bits of a value; `None` if the format cannot represent it.
fn encode(value: f64, format: Format) -> Option<i128> {
    let single = value as f32;
    let half = half::f16::from_f64(value);
    let bits = match format.name {
        "f64" => i128::from(value.to_bits()),
        "f32" => i128::from(single.to_bits()),
        "bf16" => i128::from(single.to_bits() >> 16),
        _ => i128::from(half.to_bits()),
    };
    let exact = match format.name {
        "f64" => true,
        "f32" => f64::from(single) == value,
        "bf16" => f64::from(single) == value && single.to_bits() & 0xffff == 0,
        _ => f64::from(half) == value,
    };
    exact.then_some(bits)
}

fn check_float_to_integer(table: &mut Harness) {
    for from in FORMATS {
        // (bits of the value, its integer by each rounding (NaN has a separate rule), bits of these integers)
        let mut cases: Vec<(i128, [Option<f64>; 4], [i128; 4])> = Vec::new();
        for (value, rounded) in FRACTIONS {
            let bits = encode(value, from);
            let integral = rounded.map(|v| encode(v, from).unwrap_or_default());
            cases.extend(bits.map(|bits| (bits, rounded.map(Some), integral)));
        }
        cases.push((from.inf, [Some(f64::INFINITY); 4], [from.inf; 4]));
        let quieted = if from.name == "f64" { from.inf | 1 | 1 << 51 } else { from.nan() };
        cases.push((from.inf | 1, [None; 4], [quieted; 4]));
        let one = from.one;
        cases.push((1, [Some(0.0), Some(0.0), Some(0.0), Some(1.0)], [0, 0, 0, one]));
        let minus = from.sign;
        cases.push((minus | 1, [Some(0.0), Some(0.0), Some(-1.0), Some(0.0)], [minus, minus, minus | one, minus]));
        for (value, integers_, integral) in cases {
            for (at, round) in [".rni", ".rzi", ".rmi", ".rpi"].into_iter().enumerate() {
                for ftz in if from.name == "f32" { &["", ".ftz"][..] } else { &[""] } {
                    let flushed = !ftz.is_empty() && from.flush(value) != value;
                    for sat in if from.name == "bf16" { &[""][..] } else { &["", ".sat"] } {
                        for to in integer_types() {
                            let nan = if from.name == "f64" || to.bits == 64 { to.wrap(1 << (to.bits - 1)) } else { 0 };
                            let wanted = integers_[at].map_or(nan, |v| (v as i128).clamp(to.min(), to.max()));
                            let wanted = if flushed { 0 } else { wanted };
                            check(table, &format!("cvt{round}{ftz}{sat}.{}.{}", to.name, from.name), value, wanted);
                        }
                        let wanted = if flushed { from.flush(value) } else { integral[at] };
                        let wanted = if sat.is_empty() { wanted } else { from.sat(wanted) };
                        check(table, &format!("cvt{round}{ftz}{sat}.{}.{}", from.name, from.name), value, wanted);
                    }
                }
            }
        }
    }
}

fn check_float_to_float(table: &mut Harness, names: &std::collections::HashSet<String>) {
    let mut lines: Vec<(Format, Format, i128, [i128; 4])> = table_lines(VALUES)
        .filter(|words| words[1] != "int")
        .map(|words| {
            (format_named(words[0]), format_named(words[1]), parse_results(words[2])[0], parse_results(words[3]))
        })
        .collect();
    for f in FORMATS {
        // Conversions from a type to itself.
        let all = ["0", "-0", "1", "-1", "2", "sub", "-sub", "big", "inf", "-inf", "nan"].map(|name| f.value(name));
        lines.extend(all.map(|value| (f, f, value, [value; 4])));
    }
    // A `.bf16` NaN becomes an `.f32` NaN with the same upper bits; `.f64` keeps the payload and quiets the NaN.
    lines.push((F32, BF16, 0x7fc1, [0x7fc1_0000; 4]));
    lines.push((F64, F32, 0xffa0_0000, [0xfffc << 48; 4]));
    lines.push((F64, F16, 0x7c01, [0x7fff_ffff_e000_0000; 4]));
    for (to, from, value, by_rounding) in lines {
        for (round, at) in ROUNDINGS {
            let plain = by_rounding[at];
            let flushed = if from.name == "f32" && from.flush(value) != value {
                if value & from.sign != 0 { to.sign } else { 0 }
            } else if to.name == "f32" {
                to.flush(plain)
            } else {
                plain
            };
            for (modifiers, result) in
                [("", plain), (".ftz", flushed), (".sat", to.sat(plain)), (".ftz.sat", to.sat(flushed))]
            {
                let name = format!("cvt{round}{modifiers}.{}.{}", to.name, from.name);
                if names.contains(&name) {
                    check(table, &name, value, result);
                }
            }
        }
    }
}

fn check_packed_halves(table: &mut Harness) {
    let one = i128::from(1f32.to_bits());
    for words in table_lines(VALUES).filter(|words| words[1] == "f32" && ["f16", "bf16"].contains(&words[0])) {
        let (to, value, by_rounding) = (format_named(words[0]), parse_results(words[2])[0], parse_results(words[3]));
        let (name, result) = (format!("cvt.rn.{}x2.f32", to.name), by_rounding[0]);
        table.check(&name, &[(&[value, one], &[result << 16 | to.one]), (&[one, value], &[to.one << 16 | result])]);
    }
}

/// A value and its result by `.rna`, whose lower 13 bits are zero.
fn check_tf32(table: &mut Harness) {
    for (value, rna) in [
        (0x3f80_0000, 0x3f80_0000),
        (0x3f80_1000, 0x3f80_2000),
        (0x3f80_3000, 0x3f80_4000),
        (0xbf80_1001, 0xbf80_2000),
        (0x7f7f_ffff, 0x7f80_0000),
        (0x0000_1000, 0x0000_2000),
        (0xff80_0000, 0xff80_0000),
        (0x7fc0_0001, 0x7fff_ffff),
        (0x8000_0000, 0x8000_0000),
    ] {
        table.check("cvt.rna.tf32.f32", &[(&[value], &[rna])]);
    }
}

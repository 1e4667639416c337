//! `cvt` and `cvt.pack` against known values (`values/cvt.txt`) and values computed by hand.

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
    check_fp8(&mut table);
    check_tf32(&mut table);
    check_integer_packing(&mut table);
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
            let finite = if to.is_nan(plain) { to.nan() } else { plain & to.sign | (plain & !to.sign).min(to.inf - 1) };
            for (modifiers, result) in [
                ("", plain),
                (".ftz", flushed),
                (".sat", to.sat(plain)),
                (".ftz.sat", to.sat(flushed)),
                (".relu", to.relu(plain)),
                (".satfinite", finite),
                (".relu.satfinite", to.relu(finite)),
                (".satfinite.relu", to.relu(finite)),
            ] {
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
        for (round, plain) in [(".rn", by_rounding[0]), (".rz", by_rounding[1])] {
            let finite = if to.is_nan(plain) { to.nan() } else { plain & to.sign | (plain & !to.sign).min(to.inf - 1) };
            for (modifiers, result) in [
                ("", plain),
                (".relu", to.relu(plain)),
                (".satfinite", finite),
                (".relu.satfinite", to.relu(finite)),
                (".satfinite.relu", to.relu(finite)),
            ] {
                let name = format!("cvt{round}{modifiers}.{}x2.f32", to.name);
                table.check(
                    &name,
                    &[(&[value, one], &[result << 16 | to.one]), (&[one, value], &[to.one << 16 | result])],
                );
            }
        }
    }
}

/// The 8-bit formats: an `.f32`, the `.f16` of the same value, and the bytes without and with `.relu`.
fn check_fp8(table: &mut Harness) {
    let f = |x: f32| i128::from(x.to_bits());
    for (ty, cases) in [
        (
            "e4m3x2",
            &[
                (1.0, 0x3c00, 0x38, 0x38),
                (-1.5, 0xbe00, 0xbc, 0),
                (448.0, 0x5f00, 0x7e, 0x7e),
                (464.0, 0x5f40, 0x7e, 0x7e),
                (-65504.0, 0xfbff, 0xfe, 0),
                (f32::INFINITY, 0x7c00, 0x7e, 0x7e),
                (f32::NAN, 0x7e00, 0x7f, 0x7f),
                (1.0625, 0x3c40, 0x38, 0x38),
                (1.1875, 0x3cc0, 0x3a, 0x3a),
                (0.001953125, 0x1800, 0x01, 0x01),
                (0.0009765625, 0x1400, 0x00, 0x00),
                (-0.0, 0x8000, 0x80, 0),
            ][..],
        ),
        (
            "e5m2x2",
            &[
                (1.0, 0x3c00, 0x3c, 0x3c),
                (-1.5, 0xbe00, 0xbe, 0),
                (57344.0, 0x7b00, 0x7b, 0x7b),
                (65504.0, 0x7bff, 0x7b, 0x7b),
                (f32::NEG_INFINITY, 0xfc00, 0xfb, 0),
                (f32::NAN, 0x7e00, 0x7f, 0x7f),
                (1.125, 0x3c80, 0x3c, 0x3c),
                (1.375, 0x3d80, 0x3e, 0x3e),
                (f32::from_bits(111 << 23), 0x0100, 0x01, 0x01),
                (f32::from_bits(110 << 23), 0x0080, 0x00, 0x00),
            ],
        ),
    ] {
        for &(single, half, plain, relu) in cases {
            for (modifiers, byte) in [(".satfinite", plain), (".satfinite.relu", relu), (".relu.satfinite", relu)] {
                let one = if ty == "e4m3x2" { 0x38 } else { 0x3c };
                let name = format!("cvt.rn{modifiers}.{ty}.f32");
                table.check(
                    &name,
                    &[(&[f(single), f(1.0)], &[byte << 8 | one]), (&[f(1.0), f(single)], &[one << 8 | byte])],
                );
                let name = format!("cvt.rn{modifiers}.{ty}.f16x2");
                table.check(
                    &name,
                    &[(&[half << 16 | 0x3c00], &[byte << 8 | one]), (&[0x3c00 << 16 | half], &[one << 8 | byte])],
                );
            }
        }
    }
    for (ty, pair, plain, relu) in [
        ("e4m3x2", 0x38c4, 0x3c00_c200, 0x3c00_0000),
        ("e4m3x2", 0x7eff, 0x5f00_7fff, 0x5f00_7fff),
        ("e4m3x2", 0x0180, 0x1800_8000, 0x1800_0000),
        ("e5m2x2", 0x3cc2, 0x3c00_c200, 0x3c00_0000),
        ("e5m2x2", 0x7bfc, 0x7b00_fc00, 0x7b00_0000),
        ("e5m2x2", 0x7e01, 0x7fff_0100, 0x7fff_0100),
    ] {
        table.check(&format!("cvt.rn.f16x2.{ty}"), &[(&[pair], &[plain])]);
        table.check(&format!("cvt.rn.relu.f16x2.{ty}"), &[(&[pair], &[relu])]);
    }
}

/// A value and its results by `.rna`, `.rn`, `.rz`; the lower 13 bits of a result are zero.
fn check_tf32(table: &mut Harness) {
    let relu = |bits: i128| F32.relu(bits);
    for (value, [rna, rn, rz]) in [
        (0x3f80_0000, [0x3f80_0000; 3]),
        (0x3f80_1000, [0x3f80_2000, 0x3f80_0000, 0x3f80_0000]),
        (0x3f80_3000, [0x3f80_4000, 0x3f80_4000, 0x3f80_2000]),
        (0xbf80_1001, [0xbf80_2000, 0xbf80_2000, 0xbf80_0000]),
        (0x7f7f_ffff, [0x7f80_0000, 0x7f80_0000, 0x7f7f_e000]),
        (0x0000_1000, [0x0000_2000, 0, 0]),
        (0xff80_0000, [0xff80_0000; 3]),
        (0x7fc0_0001, [0x7fff_ffff; 3]),
        (0x8000_0000, [0x8000_0000; 3]),
    ] {
        table.check("cvt.rna.tf32.f32", &[(&[value], &[rna])]);
        let finite = if F32.is_nan(rna) { rna } else { rna & F32.sign | (rna & !F32.sign).min(0x7f7f_e000) };
        table.check("cvt.rna.satfinite.tf32.f32", &[(&[value], &[finite])]);
        table.check("cvt.rn.tf32.f32", &[(&[value], &[rn])]);
        table.check("cvt.rz.tf32.f32", &[(&[value], &[rz])]);
        table.check("cvt.rn.relu.tf32.f32", &[(&[value], &[relu(rn)])]);
        table.check("cvt.rz.relu.tf32.f32", &[(&[value], &[relu(rz)])]);
    }
}

/// `cvt.pack`: saturates two integers and packs them beside the upper bits of the third operand.
fn check_integer_packing(table: &mut Harness) {
    table.check("cvt.pack.sat.u16.s32", &[(&[70000, -1], &[0xffff_0000]), (&[1, 2], &[0x0001_0002])]);
    table.check("cvt.pack.sat.s16.s32", &[(&[70000, -70000], &[0x7fff_8000]), (&[-1, 2], &[0xffff_0002])]);
    let c = 0x1122_3344;
    table.check("cvt.pack.sat.u8.s32.b32", &[(&[300, -1, c], &[0x3344_ff00]), (&[1, 2, c], &[0x3344_0102])]);
    table.check("cvt.pack.sat.s8.s32.b32", &[(&[300, -300, c], &[0x3344_7f80]), (&[-1, 2, c], &[0x3344_ff02])]);
    table.check("cvt.pack.sat.u4.s32.b32", &[(&[16, -1, c], &[0x2233_44f0]), (&[1, 2, c], &[0x2233_4412])]);
    table.check("cvt.pack.sat.s4.s32.b32", &[(&[8, -9, c], &[0x2233_4478]), (&[-1, 2, c], &[0x2233_44f2])]);
    table.check("cvt.pack.sat.u2.s32.b32", &[(&[4, -1, c], &[0x1223_344c]), (&[1, 2, c], &[0x1223_3446])]);
    table.check("cvt.pack.sat.s2.s32.b32", &[(&[2, -3, c], &[0x1223_3446]), (&[-1, 0, c], &[0x1223_344c])]);
}

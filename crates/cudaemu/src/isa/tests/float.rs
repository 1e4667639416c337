//! `.f32` and `.f64` arithmetic against known values (`values/f32.txt`, `values/f64.txt`), and the approximations.

use super::formats::{F32, F64, Format, ROUNDINGS, parse_known_results, row_names};
use crate::isa::harness::Harness;
use crate::isa::{approx, float};

#[test]
fn every_arithmetic_row_gives_the_known_bits() {
    let family = float::family();
    let names = row_names(&family.rows);
    let mut table = Harness::new(family);
    for (format, text) in [(F32, include_str!("values/f32.txt")), (F64, include_str!("values/f64.txt"))] {
        for line in parse_known_results(text) {
            let ops = if line.op == "fma" { &["fma", "mad"][..] } else { &[line.op] };
            for op in ops {
                for (round, at) in ROUNDINGS {
                    for (modifiers, result) in [
                        ("", line.plain[at]),
                        (".ftz", line.ftz[at]),
                        (".sat", format.sat(line.plain[at])),
                        (".ftz.sat", format.sat(line.ftz[at])),
                    ] {
                        let name = format!("{op}{round}{modifiers}.{}", format.name);
                        if names.contains(&name) {
                            table.check(&name, &[(&line.inputs, &[result])]);
                        }
                    }
                }
            }
        }
    }
    check_min_max(&mut table, F32);
    check_min_max(&mut table, F64);
    check_signs_and_classes(&mut table, F32);
    check_signs_and_classes(&mut table, F64);
    table.finish();
}

/// Two operands, and the results of `min` and `max`: plain, with `.NaN`, with `.xorsign.abs`, with both. For `*` see
/// [`min_max_cases`].
pub(super) const MIN_MAX: [(&str, &str, [&str; 8]); 16] = [
    ("1", "2", ["1", "2", "1", "2", "1", "2", "1", "2"]),
    ("-1", "-2", ["-2", "-1", "-2", "-1", "1", "2", "1", "2"]),
    ("-1", "2", ["-1", "2", "-1", "2", "-1", "-2", "-1", "-2"]),
    ("2", "-1", ["-1", "2", "-1", "2", "-1", "-2", "-1", "-2"]),
    ("0", "-0", ["-0", "0", "-0", "0", "-0", "-0", "-0", "-0"]),
    ("-0", "0", ["-0", "0", "-0", "0", "-0", "-0", "-0", "-0"]),
    ("-0", "-0", ["-0", "-0", "-0", "-0", "0", "0", "0", "0"]),
    ("inf", "big", ["big", "inf", "big", "inf", "big", "inf", "big", "inf"]),
    ("-inf", "1", ["-inf", "1", "-inf", "1", "-1", "-inf", "-1", "-inf"]),
    ("sub", "1", ["sub", "1", "sub", "1", "sub", "1", "sub", "1"]),
    ("-sub", "0", ["-sub", "0", "-sub", "0", "-0", "-sub", "-0", "-sub"]),
    ("-sub", "1", ["-sub", "1", "-sub", "1", "-sub", "-1", "-sub", "-1"]),
    ("nan", "1", ["1", "1", "nan", "nan", "*", "*", "nan", "nan"]),
    ("2", "nan", ["2", "2", "nan", "nan", "*", "*", "nan", "nan"]),
    ("nan", "-inf", ["-inf", "-inf", "nan", "nan", "*", "*", "nan", "nan"]),
    ("nan", "nan", ["nan", "nan", "nan", "nan", "nan", "nan", "nan", "nan"]),
];

/// The cases of a line of [`MIN_MAX`]: opcode without type, operands, result. `*`: with `.xorsign.abs` and one NaN, the result
/// has the magnitude of the other operand and the XOR of both signs.
pub(super) fn min_max_cases(
    format: Format,
    line: &(&str, &str, [&str; 8]),
    ftz: bool,
) -> Vec<(String, [i128; 2], i128)> {
    let mut all = Vec::new();
    for (at, result) in line.2.iter().enumerate() {
        let operands = [format.value(line.0), format.value(line.1)];
        let result = match *result {
            "*" => {
                let (number, nan) = if format.is_nan(operands[0]) { (1, 0) } else { (0, 1) };
                operands[number] & (format.sign - 1) | (operands[number] ^ operands[nan]) & format.sign
            }
            name => format.value(name),
        };
        // Between two zeros, including flushed ones, the signs alone decide.
        let (flush, result) = if ftz { (".ftz", format.flush(result)) } else { ("", result) };
        let op = ["min", "max"][at % 2];
        let modifiers = ["", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs"][at / 2];
        all.push((format!("{op}{flush}{modifiers}"), operands, result));
    }
    all
}

fn check_min_max(table: &mut Harness, format: Format) {
    for line in &MIN_MAX {
        for ftz in [false, true] {
            for (name, operands, result) in min_max_cases(format, line, ftz) {
                if format.name == "f32" || !name.contains('.') {
                    table.check(&format!("{name}.{}", format.name), &[(&operands, &[result])]);
                }
            }
        }
    }
}

fn check_signs_and_classes(table: &mut Harness, format: Format) {
    let v = |name: &str| format.value(name);
    for name in ["0", "1", "sub", "big", "inf", "nan"] {
        let (plus, minus) = (v(name) & !format.sign, v(name) | format.sign);
        let ty = format.name;
        table.check(&format!("abs.{ty}"), &[(&[plus], &[plus]), (&[minus], &[plus])]);
        table.check(&format!("neg.{ty}"), &[(&[plus], &[minus]), (&[minus], &[plus])]);
        let name = format!("copysign.{ty}");
        table.check(&name, &[(&[v("1"), minus], &[plus]), (&[v("-0"), plus], &[minus]), (&[v("-1"), minus], &[minus])]);
        if ty == "f32" {
            let (flushed, negative) = (format.flush(plus), format.flush(minus));
            table.check("abs.ftz.f32", &[(&[plus], &[flushed]), (&[minus], &[flushed])]);
            table.check("neg.ftz.f32", &[(&[plus], &[negative]), (&[minus], &[flushed])]);
        }
    }
    for (test, holds) in [
        ("finite", ["0", "-1", "sub", "-sub", "big"].as_slice()),
        ("infinite", &["inf", "-inf"]),
        ("number", &["0", "-1", "sub", "-sub", "big", "inf", "-inf"]),
        ("notanumber", &["nan", "-nan"]),
        ("normal", &["0", "-1", "big"]),
        ("subnormal", &["sub", "-sub"]),
    ] {
        for value in ["0", "-1", "sub", "-sub", "big", "inf", "-inf", "nan", "-nan"] {
            let expected = i128::from(holds.contains(&value));
            table.check(&format!("testp.{test}.{}", format.name), &[(&[v(value)], &[expected])]);
        }
    }
}

/// Opcode, operands, and the results without and with `.ftz`.
const APPROX: [(&str, &[f32], f32, f32); 67] = {
    const INF: f32 = f32::INFINITY;
    const NAN: f32 = f32::NAN;
    // These are 2^-140, 2^-127, 2^126 and 2^127.
    const SUB: f32 = f32::from_bits(1 << 9);
    const SUB127: f32 = f32::from_bits(1 << 22);
    const P126: f32 = f32::from_bits(253 << 23);
    const P127: f32 = f32::from_bits(254 << 23);
    [
        ("ex2.approx", &[0.0], 1.0, 1.0),
        ("ex2.approx", &[-0.0], 1.0, 1.0),
        ("ex2.approx", &[3.0], 8.0, 8.0),
        ("ex2.approx", &[0.5], std::f32::consts::SQRT_2, std::f32::consts::SQRT_2),
        ("ex2.approx", &[-140.0], SUB, 0.0),
        ("ex2.approx", &[SUB], 1.0, 1.0),
        ("ex2.approx", &[128.0], INF, INF),
        ("ex2.approx", &[-INF], 0.0, 0.0),
        ("ex2.approx", &[INF], INF, INF),
        ("ex2.approx", &[NAN], NAN, NAN),
        ("lg2.approx", &[8.0], 3.0, 3.0),
        ("lg2.approx", &[1.0], 0.0, 0.0),
        ("lg2.approx", &[10.0], std::f32::consts::LOG2_10, std::f32::consts::LOG2_10),
        ("lg2.approx", &[SUB], -140.0, -INF),
        ("lg2.approx", &[0.0], -INF, -INF),
        ("lg2.approx", &[-0.0], -INF, -INF),
        ("lg2.approx", &[-1.0], NAN, NAN),
        ("lg2.approx", &[INF], INF, INF),
        ("lg2.approx", &[NAN], NAN, NAN),
        ("sin.approx", &[0.0], 0.0, 0.0),
        ("sin.approx", &[-0.0], -0.0, -0.0),
        ("sin.approx", &[1.0], 0.841_470_96, 0.841_470_96),
        ("sin.approx", &[-1.0], -0.841_470_96, -0.841_470_96),
        ("sin.approx", &[-SUB], -SUB, -0.0),
        ("sin.approx", &[INF], NAN, NAN),
        ("sin.approx", &[NAN], NAN, NAN),
        ("cos.approx", &[0.0], 1.0, 1.0),
        ("cos.approx", &[2.0], -0.416_146_84, -0.416_146_84),
        ("cos.approx", &[SUB], 1.0, 1.0),
        ("cos.approx", &[-INF], NAN, NAN),
        ("tanh.approx", &[0.5], 0.462_117_16, 0.462_117_16),
        ("tanh.approx", &[-0.0], -0.0, -0.0),
        ("tanh.approx", &[-SUB], -SUB, -SUB),
        ("tanh.approx", &[-INF], -1.0, -1.0),
        ("tanh.approx", &[NAN], NAN, NAN),
        ("rcp.approx", &[4.0], 0.25, 0.25),
        ("rcp.approx", &[-3.0], -0.333_333_34, -0.333_333_34),
        ("rcp.approx", &[0.0], INF, INF),
        ("rcp.approx", &[-0.0], -INF, -INF),
        ("rcp.approx", &[-INF], -0.0, -0.0),
        ("rcp.approx", &[P127], SUB127, 0.0),
        ("rcp.approx", &[SUB127], P127, INF),
        ("rcp.approx", &[NAN], NAN, NAN),
        ("sqrt.approx", &[4.0], 2.0, 2.0),
        ("sqrt.approx", &[2.0], std::f32::consts::SQRT_2, std::f32::consts::SQRT_2),
        ("sqrt.approx", &[SUB], 8.470_329_5e-22, 0.0),
        ("sqrt.approx", &[-SUB], NAN, -0.0),
        ("sqrt.approx", &[-0.0], -0.0, -0.0),
        ("sqrt.approx", &[INF], INF, INF),
        ("rsqrt.approx", &[4.0], 0.5, 0.5),
        ("rsqrt.approx", &[3.0], 0.577_350_26, 0.577_350_26),
        ("rsqrt.approx", &[SUB], 1.180_591_6e21, INF),
        ("rsqrt.approx", &[-0.0], -INF, -INF),
        ("rsqrt.approx", &[-1.0], NAN, NAN),
        ("rsqrt.approx", &[INF], 0.0, 0.0),
        ("div.approx", &[1.0, 4.0], 0.25, 0.25),
        ("div.approx", &[1.0, 1.5 * P126], 0.0, 0.0),
        ("div.approx", &[-1.0, P127], -0.0, -0.0),
        ("div.approx", &[INF, P127], NAN, NAN),
        ("div.approx", &[0.0, 0.0], NAN, NAN),
        ("div.approx", &[SUB, 2.0], f32::from_bits(1 << 8), 0.0),
        ("div.full", &[1.0, 3.0], 0.333_333_34, 0.333_333_34),
        ("div.full", &[-1.0, P127], -SUB127, -0.0),
        ("div.full", &[1.0, 0.0], INF, INF),
        ("div.full", &[1.0, -SUB], -INF, -INF),
        ("div.full", &[SUB, SUB], 1.0, NAN),
        ("div.full", &[NAN, 1.0], NAN, NAN),
    ]
};

#[test]
fn approximations_give_the_known_bits() {
    let family = approx::family();
    let names = row_names(&family.rows);
    let mut table = Harness::new(family);
    let bits = |x: f32| if x.is_nan() { 0x7fff_ffff } else { i128::from(x.to_bits()) };
    for (op, operands, plain, ftz) in APPROX {
        let operands: Vec<i128> = operands.iter().map(|x| i128::from(x.to_bits())).collect();
        table.check(&format!("{op}.f32"), &[(&operands, &[bits(plain)])]);
        let name = format!("{op}.ftz.f32");
        if names.contains(&name) {
            table.check(&name, &[(&operands, &[bits(ftz)])]);
        }
    }
    let inf = F64.inf;
    let minus = F64.sign;
    // 2^-1030 is subnormal and has a reciprocal; 1/3 keeps 20 fraction bits; the lower word of a source is ignored.
    table
        .check("rcp.approx.ftz.f64", &[(&[0x4000 << 48], &[0x3fe0 << 48]), (&[0], &[inf]), (&[minus | inf], &[minus])]);
    table.check("rcp.approx.ftz.f64", &[(&[1 << 44], &[inf]), (&[0x4008 << 48], &[0x3fd5_5555 << 32])]);
    table.check("rcp.approx.ftz.f64", &[(&[0x4000_0000_ffff_ffff], &[0x3fe0 << 48]), (&[0x7fe8 << 48], &[0])]);
    table.check("rsqrt.approx.ftz.f64", &[(&[0x4010 << 48], &[0x3fe0 << 48]), (&[1 << 44], &[inf])]);
    table.check("rsqrt.approx.ftz.f64", &[(&[minus], &[minus | inf]), (&[0xbff0 << 48], &[F64.nan()]), (&[inf], &[0])]);
    table.check("rsqrt.approx.f64", &[(&[0x4010 << 48], &[0x3fe0 << 48]), (&[1 << 44], &[(1023 + 515) << 52])]);
    table.check("rsqrt.approx.f64", &[(&[minus], &[minus | inf]), (&[0xbff0 << 48], &[F64.nan()]), (&[inf], &[0])]);
    table.finish();
}

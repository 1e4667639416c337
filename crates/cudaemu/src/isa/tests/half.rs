//! `.f16` and `.bf16` arithmetic, scalar and packed, against known values (`values/f16.txt`, `values/bf16.txt`).

use super::float::{MIN_MAX, min_max_cases};
use super::formats::{BF16, F16, Format, parse_known_results, row_names};
use crate::isa::half;
use crate::isa::harness::Harness;

/// Checks an opcode (given without its type) on scalar elements and on packed pairs. `other` holds the operands and the result
/// of the second element of the pairs, which are checked in both orders.
fn check_scalar_and_packed(
    table: &mut Harness,
    format: Format,
    name: &str,
    inputs: &[i128],
    result: i128,
    other: (&[i128], i128),
) {
    table.check(&format!("{name}.{}", format.name), &[(inputs, &[result])]);
    let pack = |low: &[i128], high: &[i128]| -> Vec<i128> { low.iter().zip(high).map(|(l, h)| h << 16 | l).collect() };
    let packed = format!("{name}.{}x2", format.name);
    table.check(
        &packed,
        &[(&pack(inputs, other.0), &[other.1 << 16 | result]), (&pack(other.0, inputs), &[result << 16 | other.1])],
    );
}

#[test]
fn scalar_and_packed_rows_give_the_known_bits() {
    let family = half::family();
    let names = row_names(&family.rows);
    let mut table = Harness::new(family);
    for (format, text) in [(F16, include_str!("values/f16.txt")), (BF16, include_str!("values/bf16.txt"))] {
        let v = |name: &str| format.value(name);
        for line in parse_known_results(text) {
            // The second element of a pair computes 2 + 1, 2 - -1, 2 * 1 or 1 * 2 + 1: above 1, so that `.sat` changes it.
            let three = v("2") + (v("2") - v("1")) / 2;
            let (operands, other) = match line.op {
                "add" => (vec![v("2"), v("1")], three),
                "sub" => (vec![v("2"), v("-1")], three),
                "mul" => (vec![v("2"), v("1")], v("2")),
                _ => (vec![v("1"), v("2"), v("1")], three),
            };
            let (plain, ftz) = (line.plain[0], line.ftz[0]);
            for (modifiers, result, other) in [
                ("", plain, other),
                (".ftz", ftz, other),
                (".sat", format.sat(plain), v("1")),
                (".ftz.sat", format.sat(ftz), v("1")),
                (".relu", format.relu(plain), other),
                (".ftz.relu", format.relu(ftz), other),
            ] {
                for round in ["", ".rn"] {
                    let name = format!("{}{round}{modifiers}", line.op);
                    if names.contains(&format!("{name}.{}", format.name)) {
                        check_scalar_and_packed(&mut table, format, &name, &line.inputs, result, (&operands, other));
                    }
                }
            }
        }
        for line in &MIN_MAX {
            for ftz in if format.name == "f16" { &[false, true][..] } else { &[false] } {
                for (name, operands, result) in min_max_cases(format, line, *ftz) {
                    check_scalar_and_packed(&mut table, format, &name, &operands, result, (&[v("1"), v("1")], v("1")));
                }
            }
        }
        for name in ["0", "1", "sub", "big", "inf", "nan"] {
            let (plus, minus) = (v(name), v(name) | format.sign);
            let one: (&[i128], i128) = (&[v("-1")], v("1"));
            check_scalar_and_packed(&mut table, format, "abs", &[minus], plus, one);
            check_scalar_and_packed(&mut table, format, "abs", &[plus], plus, one);
            check_scalar_and_packed(&mut table, format, "neg", &[minus], plus, one);
            check_scalar_and_packed(&mut table, format, "neg", &[plus], minus, one);
            if format.name == "f16" {
                check_scalar_and_packed(&mut table, format, "abs.ftz", &[minus], format.flush(plus), one);
                check_scalar_and_packed(&mut table, format, "neg.ftz", &[plus], format.flush(minus), one);
            }
        }
        for (x, tanh) in [("0", "0"), ("-0", "-0"), ("sub", "sub"), ("inf", "1"), ("-inf", "-1"), ("nan", "nan")] {
            check_scalar_and_packed(&mut table, format, "tanh.approx", &[v(x)], v(tanh), (&[v("inf")], v("1")));
        }
        let ex2 = if format.name == "f16" { "ex2.approx" } else { "ex2.approx.ftz" };
        for (x, power) in [
            ("0", "1"),
            ("-0", "1"),
            ("1", "2"),
            ("sub", "1"),
            ("inf", "inf"),
            ("-inf", "0"),
            ("nan", "nan"),
            ("big", "inf"),
        ] {
            check_scalar_and_packed(&mut table, format, ex2, &[v(x)], v(power), (&[v("1")], v("2")));
        }
    }
    // tanh(1) = 0.76159…; 2^-24 is the smallest .f16, 2^-130 a subnormal .bf16, which is flushed; 2^0.5 = 1.41421….
    check_scalar_and_packed(&mut table, F16, "tanh.approx", &[0x3c00], 0x3a18, (&[0], 0));
    check_scalar_and_packed(&mut table, BF16, "tanh.approx", &[0x3f80], 0x3f43, (&[0], 0));
    check_scalar_and_packed(&mut table, F16, "ex2.approx", &[0xce00], 0x0001, (&[0x3800], 0x3da8));
    check_scalar_and_packed(&mut table, BF16, "ex2.approx.ftz", &[0xc302], 0, (&[0x3f00], 0x3fb5));
    table.finish();
}

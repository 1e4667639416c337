//! `.f16` and `.bf16` arithmetic, scalar and packed, against known values (`values/f16.txt`, `values/bf16.txt`).

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
            // The second element of a pair computes 2 + 1, 2 - -1, 2 * 1 or 1 * 2 + 1.
            let three = v("2") + (v("2") - v("1")) / 2;
            let (operands, other) = match line.op {
                "add" => (vec![v("2"), v("1")], three),
                "sub" => (vec![v("2"), v("-1")], three),
                "mul" => (vec![v("2"), v("1")], v("2")),
                _ => (vec![v("1"), v("2"), v("1")], three),
            };
            for round in ["", ".rn"] {
                let name = format!("{}{round}", line.op);
                if names.contains(&format!("{name}.{}", format.name)) {
                    check_scalar_and_packed(&mut table, format, &name, &line.inputs, line.plain[0], (&operands, other));
                }
            }
        }
    }
    table.finish();
}

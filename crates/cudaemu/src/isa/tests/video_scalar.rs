//! Scalar video instructions: selectors of register parts on known values, and every row against unbounded arithmetic.

use super::{Type, ty};
use crate::isa::harness::{ABSENT, Harness};
use crate::isa::video_scalar;

const U32: Type = ty("u32", 32, false);
const S32: Type = ty("s32", 32, true);

#[test]
fn selectors_pick_and_replace_parts_of_registers() {
    let mut table = Harness::new(video_scalar::family());
    // `parts` are the selectors of d, a and b: 0 is the whole register, 1 to 4 are bytes, 5 and 6 half-words.
    let mut check = |name: &str, parts: [i128; 3], inputs: [i128; 3], result: i128| {
        let parts = parts[0] | parts[1] << 4 | parts[2] << 8;
        let [a, b, c] = inputs;
        table.check(name, &[(&[parts, a, b, c], &[result])]);
    };
    let (x, y, z) = (0x8901_7ff0, 0xfffe_0203, 0x1122_3344);
    check("vadd.s32.s32.s32.sat", [0, 1, 6], [x, y, ABSENT], -16 - 2);
    check("vadd.u32.u32.u32", [0, 4, 2], [x, y, ABSENT], 0x89 + 2);
    check("vadd.s32.s32.u32", [0, 4, 2], [x, y, ABSENT], -0x77 + 2);
    check("vadd.u32.u32.u32", [2, 1, 5], [x, y, z], 0x1122_f344);
    check("vadd.u32.u32.u32.sat", [2, 1, 6], [x, y, z], 0x1122_ff44);
    check("vsub.s32.u32.u32.sat", [6, 5, 6], [x, y, z], 0x8000_3344);
    check("vabsdiff.u32.u32.u32.add", [0, 2, 1], [x, y, z], 0x1122_3344 + 0x7c);
    check("vmax.s32.s32.s32", [0, 5, 6], [x, y, ABSENT], 0x7ff0);
    check("vmin.u32.s32.s32.sat", [0, 5, 6], [x, y, ABSENT], 0);
    check("vshl.u32.u32.u32.clamp", [0, 1, 0], [x, 40, ABSENT], 0);
    check("vshl.u32.u32.u32.wrap", [0, 1, 0], [x, 40, ABSENT], 0xf000);
    check("vshr.s32.s32.u32.clamp", [0, 4, 0], [x, 3, ABSENT], -15);
    check("vset.u32.s32.gt", [0, 6, 6], [x, y, ABSENT], 1);
}

#[test]
fn every_row_agrees_with_unbounded_arithmetic() {
    let mut table = Harness::new(video_scalar::family());
    let values = [0, 1, 5, 31, 32, 33, 0x7fff_ffff, 0x8000_0000, 0x8000_0001, 0xffff_fff0, 0xffff_ffff];
    let inputs: Vec<Vec<i128>> =
        values.iter().flat_map(|&a| values.map(|b| vec![a, b, (a * 3 + b) & 0xffff_ffff])).collect();
    for row in video_scalar::family().rows {
        let parts: Vec<&str> = row.name.split('.').collect();
        let types: Vec<Type> =
            parts.iter().filter(|p| p.ends_with("32")).map(|p| if *p == "u32" { U32 } else { S32 }).collect();
        let has = |part: &str| parts.contains(&part);
        let d = if types.len() == 3 { types[0] } else { U32 };
        let [at, bt] = [types[types.len() - 2], types[types.len() - 1]];
        let second = ["add", "min", "max"].into_iter().find(|second| has(second));
        let rest: Vec<i128> = if second.is_some() { vec![] } else { vec![ABSENT] };
        let given: Vec<Vec<i128>> = inputs
            .iter()
            .map(
                |input| if rest.is_empty() { [&[0], &input[..]].concat() } else { [&[0], &input[..2], &rest].concat() },
            )
            .collect();
        let got = table.run(&row.name, &given);
        for (input, got) in inputs.iter().zip(got) {
            let (a, b, c) = (at.wrap(input[0]), bt.wrap(input[1]), d.wrap(input[2]));
            let amount = if has("clamp") { b.min(32) } else { b & 31 };
            let value = match parts[0] {
                "vadd" => a + b,
                "vsub" => a - b,
                "vabsdiff" => (a - b).abs(),
                "vmin" => a.min(b),
                "vmax" => a.max(b),
                "vshl" => a << amount,
                "vshr" => a >> amount,
                _ => i128::from(
                    has("eq") && a == b
                        || has("ne") && a != b
                        || has("lt") && a < b
                        || has("le") && a <= b
                        || has("gt") && a > b
                        || has("ge") && a >= b,
                ),
            };
            let value = if has("sat") { value.clamp(d.min(), d.max()) } else { d.wrap(value) };
            let value = match second {
                Some("add") => value + c,
                Some("min") => value.min(c),
                Some(_) => value.max(c),
                None => value,
            };
            assert_eq!(got, [U32.wrap(value) as u128], "{} of {input:x?}", row.name);
        }
    }
    table.finish();
}

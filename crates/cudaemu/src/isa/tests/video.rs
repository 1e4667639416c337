//! SIMD video instructions: known values, and every row against unbounded arithmetic.

use super::ty;
use crate::isa::harness::Harness;
use crate::isa::video;

#[test]
fn simd_video_rows_give_known_values() {
    let mut table = Harness::new(video::family());
    table.check("vabsdiff4.u32.u32.u32", &[(&[0x01ff_0580, 0x0300_0581, 9], &[0x02ff_0001])]);
    table.check("vabsdiff4.u32.u32.u32.add", &[(&[0x01ff_0580, 0x0300_0581, 9], &[9 + 2 + 255 + 1])]);
    table.check("vabsdiff4.u32.s32.s32", &[(&[0x017f_0580, 0x0380_0581, 9], &[0x02ff_0001])]);
    table.check("vabsdiff2.u32.u32.u32.add", &[(&[0xffff_0001, 0x0001_0003, 1], &[1 + 0xfffe + 2])]);
    table.check("vadd4.u32.u32.u32.sat", &[(&[0xf010_ff01, 0x20f0_0101, 0], &[0xffff_ff02])]);
    table.check("vadd4.s32.s32.s32.sat", &[(&[0x7f80_ff01, 0x01ff_01ff, 0], &[0x7f80_0000])]);
    table.check("vsub4.u32.u32.u32.sat", &[(&[0x0110_ff01, 0x0201_0101, 0], &[0x000f_fe00])]);
    table.check("vavrg4.u32.u32.u32", &[(&[0x0102_fffe, 0x0203_ffff, 0], &[0x0203_ffff])]);
    table.check("vavrg2.s32.s32.s32", &[(&[0xffff_0001, 0xfffe_0002, 0], &[0xfffe_0002])]);
    table.check("vset4.u32.u32.eq", &[(&[0x0102_0304, 0x0100_0300, 0], &[0x0100_0100])]);
    table.check("vset2.s32.s32.lt.add", &[(&[0xffff_0001, 0x0000_0000, 5], &[6])]);
}

#[test]
fn every_row_agrees_with_unbounded_arithmetic() {
    let mut table = Harness::new(video::family());
    let mut random = fastrand::Rng::with_seed(4);
    let edge = [0, 0xffff_ffff, 0x8080_8080, 0x7f7f_7f7f, 0x8000_7fff, 0x0001_0100];
    let mut inputs: Vec<Vec<i128>> = edge.iter().flat_map(|&a| edge.map(|b| vec![a, b, 77])).collect();
    inputs.extend((0..32).map(|_| (0..3).map(|_| i128::from(random.u32(..))).collect()));
    for row in video::family().rows {
        let parts: Vec<&str> = row.name.split('.').collect();
        let (op, count) = parts[0].split_at(parts[0].len() - 1);
        let bits = if count == "4" { 8 } else { 16 };
        let types: Vec<bool> =
            parts[1..].iter().take_while(|p| p.ends_with("32")).map(|p| p.starts_with('s')).collect();
        let operation = if op == "vset" { parts[3] } else { op };
        let last = parts[parts.len() - 1];
        let signs = &types[types.len() - 2..];
        let d = ty("", bits, types[0] && types.len() == 3);
        let got = table.run(&row.name, &inputs);
        for (input, got) in inputs.iter().zip(got) {
            let elements =
                |word: i128, signed| (0..32 / bits).map(move |i| ty("", bits, signed).wrap(word >> (i * bits)));
            let mut expected = if last == "add" { input[2] } else { 0 };
            for (i, (a, b)) in elements(input[0], signs[0]).zip(elements(input[1], signs[1])).enumerate() {
                let value = expected_element(operation, a, b);
                if last == "add" {
                    expected += value;
                } else {
                    let value = if last == "sat" { value.clamp(d.min(), d.max()) } else { value };
                    expected |= ty("", bits, false).wrap(value) << (i as u32 * bits);
                }
            }
            assert_eq!(got, [ty("", 32, false).wrap(expected) as u128], "{} of {input:x?}", row.name);
        }
    }
    table.finish();
}

/// The expected value of an element before clamping or wrapping.
fn expected_element(operation: &str, a: i128, b: i128) -> i128 {
    match operation {
        "vadd" => a + b,
        "vsub" => a - b,
        // Rounds to nearest, halves away from zero.
        "vavrg" if a + b < 0 => -((1 - a - b) / 2),
        "vavrg" => (a + b + 1) / 2,
        "vabsdiff" => (a - b).abs(),
        "vmin" => a.min(b),
        "vmax" => a.max(b),
        "eq" => i128::from(a == b),
        "ne" => i128::from(a != b),
        "lt" => i128::from(a < b),
        "le" => i128::from(a <= b),
        "gt" => i128::from(a > b),
        _ => i128::from(a >= b),
    }
}

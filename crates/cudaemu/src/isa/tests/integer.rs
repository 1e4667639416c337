//! Integer arithmetic against unbounded arithmetic and values computed by hand.

use super::{TYPES, Type, ty};
use crate::isa::harness::Harness;
use crate::isa::{dot, integer};

/// Checks a row against `f`, which is computed in unbounded arithmetic and wrapped to the type `result`.
fn check_against(table: &mut Harness, name: &str, result: Type, inputs: &[Vec<i128>], f: impl Fn(&[i128]) -> i128) {
    let expected: Vec<[i128; 1]> = inputs.iter().map(|input| [result.wrap(f(input))]).collect();
    let cases: Vec<(&[i128], &[i128])> = inputs.iter().zip(&expected).map(|(i, e)| (&i[..], &e[..])).collect();
    table.check(name, &cases);
}

#[test]
fn arithmetic_wraps_modulo_the_width() {
    let mut table = Harness::new(integer::family());
    for t in TYPES {
        let (pairs, triples) = (t.pairs(), t.triples());
        let ones: Vec<Vec<i128>> = t.edges().into_iter().map(|v| vec![v]).collect();
        let mut row = |op: &str, inputs: &[Vec<i128>], f: &dyn Fn(&[i128]) -> i128| {
            check_against(&mut table, &format!("{op}.{}", t.name), t, inputs, f);
        };
        row("add", &pairs, &|v| v[0] + v[1]);
        row("sub", &pairs, &|v| v[0] - v[1]);
        row("mul.lo", &pairs, &|v| v[0].wrapping_mul(v[1]));
        row("mul.hi", &pairs, &|v| product_high(t, v[0], v[1]));
        row("mad.lo", &triples, &|v| v[0].wrapping_mul(v[1]).wrapping_add(v[2]));
        row("mad.hi", &triples, &|v| product_high(t, v[0], v[1]) + v[2]);
        row("min", &pairs, &|v| v[0].min(v[1]));
        row("max", &pairs, &|v| v[0].max(v[1]));
        // GPUs return all ones for a divisor of zero.
        row("div", &pairs, &|v| if v[1] == 0 { -1 } else { v[0] / v[1] });
        row("rem", &pairs, &|v| if v[1] == 0 { -1 } else { v[0] % v[1] });
        if t.signed {
            row("abs", &ones, &|v| v[0].abs());
            row("neg", &ones, &|v| -v[0]);
        }
        if t.bits < 64 {
            let wide = ty("", 2 * t.bits, t.signed);
            let triples: Vec<Vec<i128>> =
                wide.edges().iter().flat_map(|&c| pairs.iter().step_by(7).map(move |v| vec![v[0], v[1], c])).collect();
            check_against(&mut table, &format!("mul.wide.{}", t.name), wide, &pairs, |v| v[0] * v[1]);
            check_against(&mut table, &format!("mad.wide.{}", t.name), wide, &triples, |v| v[0] * v[1] + v[2]);
        }
    }
    table.finish();
}

/// Upper half of the product; exact, because 64-bit values are multiplied in two steps.
fn product_high(t: Type, a: i128, b: i128) -> i128 {
    let (low, rest) = (b & 0xffff_ffff, b >> 32);
    if t.bits == 64 { (a * rest + ((a * low) >> 32)) >> 32 } else { (a * b) >> t.bits }
}

#[test]
fn dot_products_take_the_signs_that_the_opcode_names() {
    let mut table = Harness::new(dot::family());
    // a = (1, -2, 3, -128) or (1, 254, 3, 128); b = (-1, 2, 127, -3) or (255, 2, 127, 253), from the lowest byte.
    let (a, b) = (0x8003_fe01, 0xfd7f_02ff);
    table.check("dp4a.s32.s32", &[(&[a, b, 10], &[10 - 1 - 4 + 381 + 384])]);
    table.check("dp4a.s32.u32", &[(&[a, b, -5], &[-5 + 255 - 4 + 381 - 128 * 253])]);
    table.check("dp4a.u32.s32", &[(&[a, b, 10], &[10 - 1 + 508 + 381 - 384])]);
    table.check("dp4a.u32.u32", &[(&[a, b, 10], &[10 + 255 + 508 + 381 + 128 * 253]), (&[1, 1, 0xffff_ffff], &[0])]);
    // a = (-511, -32765) or (65025, 32771) as half-words.
    table.check("dp2a.lo.s32.s32", &[(&[a, b, 1], &[1 + 511 - 2 * 32765])]);
    table.check("dp2a.lo.s32.u32", &[(&[a, b, 1], &[1 - 511 * 255 - 2 * 32765])]);
    table.check("dp2a.lo.u32.s32", &[(&[a, b, 1], &[1 - 65025 + 2 * 32771])]);
    table.check("dp2a.lo.u32.u32", &[(&[a, b, 1], &[1 + 65025 * 255 + 2 * 32771])]);
    table.check("dp2a.hi.s32.s32", &[(&[a, b, 1], &[1 - 511 * 127 + 3 * 32765])]);
    table.check("dp2a.hi.s32.u32", &[(&[a, b, 1], &[1 - 511 * 127 - 253 * 32765])]);
    table.check("dp2a.hi.u32.s32", &[(&[a, b, 1], &[1 + 65025 * 127 - 3 * 32771])]);
    table.check("dp2a.hi.u32.u32", &[(&[a, b, -1], &[-1 + 65025 * 127 + 253 * 32771])]);
    table.finish();
}

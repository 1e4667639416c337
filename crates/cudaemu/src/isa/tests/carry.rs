//! Extended-precision arithmetic against unbounded arithmetic.

use super::{TYPES, Type};
use crate::isa::carry;
use crate::isa::harness::Harness;

#[test]
fn the_carry_flag_is_the_bit_beyond_the_width() {
    let mut table = Harness::new(carry::family());
    for t in TYPES.into_iter().filter(|t| t.bits >= 32) {
        for (op, sources) in [("add", 2), ("sub", 2), ("mad.lo", 3), ("mad.hi", 3)] {
            for (reads, writes) in [(false, true), (true, false), (true, true)] {
                check_row(&mut table, t, op, sources, reads, writes);
            }
        }
    }
    table.finish();
}

/// Checks a row with operands `a`, `b` and, for products, `c`; `reads` and `writes` are its uses of the carry flag.
fn check_row(table: &mut Harness, t: Type, op: &str, sources: usize, reads: bool, writes: bool) {
    let (base, part) = op.split_once('.').map_or((op, String::new()), |(base, part)| (base, format!(".{part}")));
    let (c, cc) = (if reads { "c" } else { "" }, if writes { ".cc" } else { "" });
    let name = format!("{base}{c}{part}{cc}.{}", t.name);
    let unsigned = |v: i128| v & ((1 << t.bits) - 1);
    let mut cases: Vec<(Vec<i128>, Vec<i128>)> = Vec::new();
    for (at, input) in t.triples().iter().enumerate() {
        let mut input = input[..sources].to_vec();
        let flag = if reads { at as i128 & 1 } else { 0 };
        // For signed types too, the flag is the carry (or borrow) of the unsigned operation.
        let (a, b) = (input[0], input[1]);
        let result = match op {
            "add" => unsigned(a) + unsigned(b) + flag,
            "sub" => unsigned(a) - unsigned(b) - flag,
            "mad.lo" => unsigned(a.wrapping_mul(b)) + unsigned(input[2]) + flag,
            _ => unsigned(product_high(t, a, b)) + unsigned(input[2]) + flag,
        };
        if reads {
            input.push(flag);
        }
        let mut output = vec![result];
        if writes {
            output.push(result >> t.bits & 1);
        }
        cases.push((input, output));
    }
    let cases: Vec<(&[i128], &[i128])> = cases.iter().map(|(i, o)| (&i[..], &o[..])).collect();
    table.check(&name, &cases);
}

/// Upper half of the product, exact in `i128`: a 64-bit factor is split into 32-bit pieces.
fn product_high(t: Type, a: i128, b: i128) -> i128 {
    let (low, rest) = (b & 0xffff_ffff, b >> 32);
    if t.bits == 64 { (a * rest + ((a * low) >> 32)) >> 32 } else { (a * b) >> 32 }
}

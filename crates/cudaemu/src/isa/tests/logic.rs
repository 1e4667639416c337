//! Logic and shifts on values computed by hand.

use crate::isa::harness::Harness;
use crate::isa::logic;

#[test]
fn every_logic_and_shift_row_gives_known_values() {
    let mut table = Harness::new(logic::family());
    for (ty, mask) in [("b16", 0xffff), ("b32", 0xffff_ffff), ("b64", u64::MAX)] {
        let (a, b) = (0x1234_5678_9abc_f00f & mask, 0x0ff0_3c3c_aa55_cccc & mask);
        let [a, b] = [a, b].map(i128::from);
        table.check(&format!("and.{ty}"), &[(&[a, b], &[0x0230_1438_8a14_c00c])]);
        table.check(&format!("or.{ty}"), &[(&[a, b], &[0x1ff4_7e7c_bafd_fccf])]);
        table.check(&format!("xor.{ty}"), &[(&[a, b], &[0x1dc4_6a44_30e9_3cc3])]);
        table.check(&format!("not.{ty}"), &[(&[a], &[!0x1234_5678_9abc_f00f]), (&[0], &[-1])]);
    }
    table.check("and.pred", &[(&[0, 0], &[0]), (&[0, 1], &[0]), (&[1, 0], &[0]), (&[1, 1], &[1])]);
    table.check("or.pred", &[(&[0, 0], &[0]), (&[0, 1], &[1]), (&[1, 0], &[1]), (&[1, 1], &[1])]);
    table.check("xor.pred", &[(&[0, 0], &[0]), (&[0, 1], &[1]), (&[1, 0], &[1]), (&[1, 1], &[0])]);
    table.check("not.pred", &[(&[0], &[1]), (&[1], &[0])]);
    check_lop3(&mut table);
    check_shifts(&mut table);
    table.finish();
}

fn check_lop3(table: &mut Harness) {
    // The manual's method to compute a truth table: apply the function to these three values.
    let (a, b, c) = (0xf0_i128, 0xcc_i128, 0xaa_i128);
    // These three operands select the table's entries in order: the low byte is the table, the other bits are its entry 0.
    for lut in 0..256 {
        let high = if lut & 1 == 0 { 0 } else { 0xffff_ff00 };
        table.check("lop3.b32", &[(&[a, b, c, lut], &[high | lut])]);
    }
    let (x, y, z) = (0x1234_5678, 0xff00_ff0f, 0x0f0f_3c5a);
    for (lut, result) in [
        (a & b & c, x & y & z),
        (a | b | c, x | y | z),
        (a & b & !c & 0xff, x & y & !z),
        ((a & b) | c, (x & y) | z),
        (a ^ b ^ c, x ^ y ^ z),
        ((a & b) | (a & c) | (b & c), (x & y) | (x & z) | (y & z)),
        (0, 0),
        (0xff, -1),
        (a, x),
        (b, y),
        (c, z),
    ] {
        table.check("lop3.b32", &[(&[x, y, z, lut], &[result])]);
    }
    // Each of the eight table entries alone.
    for entry in 0..8_i128 {
        let bit = |at: i128| if entry >> at & 1 == 1 { -1 } else { 0 };
        table.check("lop3.b32", &[(&[bit(2), bit(1), bit(0), 1 << entry], &[-1])]);
        table.check("lop3.b32", &[(&[bit(2), bit(1), bit(0), 0xff ^ 1 << entry], &[0])]);
    }
}

fn check_shifts(table: &mut Harness) {
    for (bits, x) in [(16, 0x8421_i128), (32, 0x8421_c639), (64, 0x8421_c639_1234_5679)] {
        let signed = x - (1 << bits);
        for amount in [0, 1, 4, bits - 1, bits, bits + 1, 255, 256, 0xffff_ffff_i128] {
            let n = amount.min(bits);
            table.check(&format!("shl.b{bits}"), &[(&[x, amount], &[x << (n / 2) << (n - n / 2)])]);
            table.check(&format!("shr.b{bits}"), &[(&[x, amount], &[x >> n])]);
            table.check(&format!("shr.u{bits}"), &[(&[x, amount], &[x >> n])]);
            table
                .check(&format!("shr.s{bits}"), &[(&[x, amount], &[signed >> n]), (&[x >> 1, amount], &[x >> 1 >> n])]);
        }
    }
    // {b, a} = 0x89abcdef_01234567
    let (a, b) = (0x0123_4567, 0x89ab_cdef);
    table.check(
        "shf.l.clamp.b32",
        &[
            (&[a, b, 0], &[b]),
            (&[a, b, 8], &[0xabcd_ef01]),
            (&[a, b, 32], &[a]),
            (&[a, b, 33], &[a]),
            (&[a, b, -1], &[a]),
        ],
    );
    table.check(
        "shf.l.wrap.b32",
        &[(&[a, b, 0], &[b]), (&[a, b, 8], &[0xabcd_ef01]), (&[a, b, 32], &[b]), (&[a, b, 40], &[0xabcd_ef01])],
    );
    table.check(
        "shf.r.clamp.b32",
        &[
            (&[a, b, 0], &[a]),
            (&[a, b, 8], &[0xef01_2345]),
            (&[a, b, 32], &[b]),
            (&[a, b, 40], &[b]),
            (&[a, b, -1], &[b]),
        ],
    );
    table.check(
        "shf.r.wrap.b32",
        &[(&[a, b, 0], &[a]), (&[a, b, 8], &[0xef01_2345]), (&[a, b, 32], &[a]), (&[a, b, -4], &[0x9abc_def0])],
    );
}

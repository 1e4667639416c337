//! Bit counting, bit fields and permutations on values computed by hand.

use crate::isa::bits;
use crate::isa::harness::Harness;

#[test]
fn every_bit_row_gives_known_values() {
    let mut table = bits_table();
    table.check("popc.b32", &[(&[0], &[0]), (&[-1], &[32]), (&[0x8000_0001], &[2]), (&[0x1234_5678], &[13])]);
    table.check("popc.b64", &[(&[0], &[0]), (&[-1], &[64]), (&[0x8000_0000_0000_0001], &[2])]);
    table.check("clz.b32", &[(&[0], &[32]), (&[-1], &[0]), (&[1], &[31]), (&[0x00ff_0000], &[8])]);
    table.check("clz.b64", &[(&[0], &[64]), (&[-1], &[0]), (&[1], &[63]), (&[0xff_0000_0000], &[24])]);
    table.check("brev.b32", &[(&[1], &[0x8000_0000]), (&[0x1234_5678], &[0x1e6a_2c48]), (&[-1], &[-1])]);
    table.check("brev.b64", &[(&[1], &[1 << 63]), (&[0x1234_5678], &[0x1e6a_2c48 << 32])]);
    let none = 0xffff_ffff;
    table.check("bfind.u32", &[(&[0], &[none]), (&[1], &[0]), (&[-1], &[31]), (&[0x1_0000], &[16])]);
    table.check("bfind.s32", &[(&[0], &[none]), (&[-1], &[none]), (&[1], &[0]), (&[-2], &[0]), (&[-0x1_0001], &[16])]);
    table.check("bfind.u64", &[(&[0], &[none]), (&[1], &[0]), (&[-1], &[63]), (&[1 << 40], &[40])]);
    table.check("bfind.s64", &[(&[0], &[none]), (&[-1], &[none]), (&[-2], &[0]), (&[-(1 << 40)], &[39])]);
    table.check("bfind.shiftamt.u32", &[(&[0], &[none]), (&[1], &[31]), (&[-1], &[0]), (&[0x1_0000], &[15])]);
    table.check("bfind.shiftamt.s32", &[(&[0], &[none]), (&[-1], &[none]), (&[-2], &[31]), (&[1 << 30], &[1])]);
    table.check("bfind.shiftamt.u64", &[(&[0], &[none]), (&[1], &[63]), (&[-1], &[0]), (&[1 << 40], &[23])]);
    table.check("bfind.shiftamt.s64", &[(&[0], &[none]), (&[-1], &[none]), (&[-2], &[63]), (&[1 << 40], &[23])]);
    check_bit_fields(&mut table);
    check_permutations(&mut table);
    table.finish();
}

fn bits_table() -> Harness {
    Harness::new(bits::family())
}

fn check_bit_fields(table: &mut Harness) {
    let x = 0x89ab_cdef;
    table.check(
        "bfe.u32",
        &[
            (&[x, 8, 8], &[0xcd]),
            (&[x, 0, 32], &[x]),
            (&[x, 28, 8], &[0x8]),
            (&[x, 4, 0], &[0]),
            (&[x, 32, 4], &[0]),
            (&[x, 0x104, 0x104], &[0xe]),
        ],
    );
    table.check(
        "bfe.s32",
        &[
            (&[x, 8, 8], &[-0x33]),
            (&[x, 20, 4], &[-6]),
            (&[x, 4, 4], &[-2]),
            (&[0x7000_0000, 24, 4], &[0]),
            (&[x, 28, 8], &[-8]),
            (&[x, 4, 0], &[0]),
            (&[x, 40, 4], &[-1]),
            (&[0x7fff_ffff, 40, 4], &[0]),
        ],
    );
    let y = 0x0123_4567_89ab_cdef;
    table.check(
        "bfe.u64",
        &[(&[y, 8, 8], &[0xcd]), (&[y, 32, 32], &[0x0123_4567]), (&[y, 60, 9], &[0]), (&[y, 56, 64], &[1])],
    );
    table.check(
        "bfe.s64",
        &[(&[y, 8, 8], &[-0x33]), (&[y, 32, 4], &[7]), (&[-1, 70, 3], &[-1]), (&[y, 12, 20], &[0x89abc - 0x10_0000])],
    );
    table.check(
        "bfi.b32",
        &[
            (&[0xff, 0, 8, 8], &[0xff00]),
            (&[0, -1, 4, 8], &[0xffff_f00f]),
            (&[-1, 0, 28, 8], &[0xf000_0000]),
            (&[-1, 0x1234, 3, 0], &[0x1234]),
            (&[-1, 0x1234, 32, 4], &[0x1234]),
            (&[0x5555, 0, 0, 32], &[0x5555]),
        ],
    );
    table.check(
        "bfi.b64",
        &[(&[0xff, 0, 40, 8], &[0xff << 40]), (&[0, -1, 0, 64], &[0]), (&[-1, 0, 60, 9], &[0xf << 60])],
    );
}

fn check_permutations(table: &mut Harness) {
    let (a, b) = (0x8362_4100, 0xc7a6_e584);
    table.check(
        "prmt.b32",
        &[
            (&[a, b, 0x3210], &[a]),
            (&[a, b, 0x7654], &[b]),
            (&[a, b, 0x0123], &[0x0041_6283]),
            (&[a, b, 0xba98], &[0xff00_0000]), // signs of a's bytes
            (&[a, b, 0xfedc], &[0xffff_ffff]),
            (&[a, b, 0xffff_1054], &[0x4100_e584]),
        ],
    );
}

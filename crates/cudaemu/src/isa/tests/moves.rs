//! `mov`: moves, packing and unpacking, on values computed by hand.

use crate::isa::harness::Harness;
use crate::isa::moves;

#[test]
fn moves_keep_all_bits_and_packing_is_lowest_first() {
    let mut table = Harness::new(moves::family());
    let x = 0xfedc_ba98_7654_3210_0123_4567_89ab_cdef_u128 as i128;
    for ty in ["b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"] {
        // The low word 0x7fa0_0001 is a signalling NaN as `.f32`: a move must keep all bits.
        table.check(&format!("mov.{ty}"), &[(&[x], &[x]), (&[0], &[0]), (&[0x7fa0_0001], &[0x7fa0_0001])]);
    }
    table.check("mov.f64", &[(&[0x7ff4_0000_0000_0001], &[0x7ff4_0000_0000_0001])]);
    table.check("mov.pred", &[(&[0], &[0]), (&[1], &[1])]);

    table.check("mov.b32.pack2.b16", &[(&[0x1234, 0xabcd], &[0xabcd_1234])]);
    table.check("mov.b32.unpack2.b16", &[(&[0xabcd_1234], &[0x1234, 0xabcd])]);
    table.check("mov.b64.pack2.b32", &[(&[0x1234_5678, 0x9abc_def0], &[0x9abc_def0_1234_5678])]);
    table.check("mov.b64.unpack2.b32", &[(&[0x9abc_def0_1234_5678], &[0x1234_5678, 0x9abc_def0])]);
    table.check("mov.b64.pack4.b16", &[(&[1, 0xffff, 3, 0x8004], &[0x8004_0003_ffff_0001])]);
    table.check("mov.b64.unpack4.b16", &[(&[0x8004_0003_ffff_0001], &[1, 0xffff, 3, 0x8004])]);
    table.finish();
}

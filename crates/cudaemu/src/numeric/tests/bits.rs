//! Bit fields and permutations against the definitions of the PTX ISA, bit by bit.

use super::super::bits;

/// `bfe` as PTX defines it: one bit of the result at a time.
fn bfe(a: u64, pos: u32, len: u32, width: u32, signed: bool) -> u64 {
    let (pos, len, top) = (pos & 0xff, len & 0xff, width - 1);
    let bit = |i: u32| a >> i & 1;
    let fill = if !signed || len == 0 { 0 } else { bit((pos + len - 1).min(top)) };
    (0..width).map(|i| (if i < len && pos + i <= top { bit(pos + i) } else { fill }) << i).sum()
}

/// `bfi`, one bit at a time.
fn bfi(a: u64, b: u64, pos: u32, len: u32, width: u32) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    let bit = |i: u32| if i >= pos && i - pos < len { a >> (i - pos) & 1 } else { b >> i & 1 };
    (0..width).map(|i| bit(i) << i).sum()
}

#[test]
fn bit_fields_agree_with_the_definition_bit_by_bit() {
    let mut rng = fastrand::Rng::with_seed(1);
    let amounts = [0, 1, 5, 16, 31, 32, 33, 63, 64, 65, 200, 255, 256, 260, u32::MAX];
    for pos in amounts {
        for len in amounts {
            for _ in 0..8 {
                let (a, b) = (rng.u64(..), rng.u64(..));
                let (low, low_b) = (a as u32, b as u32);
                let narrow = u64::from(low);
                assert_eq!(u64::from(bits::bfe_u32(low, pos, len)), bfe(narrow, pos, len, 32, false), "{pos} {len}");
                assert_eq!(u64::from(bits::bfe_s32(low, pos, len)), bfe(narrow, pos, len, 32, true), "{pos} {len}");
                assert_eq!(bits::bfe_u64(a, pos, len), bfe(a, pos, len, 64, false), "{pos} {len}");
                assert_eq!(bits::bfe_s64(a, pos, len), bfe(a, pos, len, 64, true), "{pos} {len}");
                let want = bfi(narrow, low_b.into(), pos, len, 32);
                assert_eq!(u64::from(bits::bfi_b32(low, low_b, pos, len)), want, "{pos} {len}");
                assert_eq!(bits::bfi_b64(a, b, pos, len), bfi(a, b, pos, len, 64), "{pos} {len}");
            }
        }
    }
}

#[test]
fn bfind_finds_the_highest_significant_bit() {
    for (a, position, shift) in [(0, u32::MAX, u32::MAX), (1, 0, 31), (0x8000_0000, 31, 0), (0x00ff_0000, 23, 8)] {
        assert_eq!((bits::bfind_u32(a, false), bits::bfind_u32(a, true)), (position, shift), "{a:#x}");
    }
    for (a, position, shift) in [(0, u32::MAX, u32::MAX), (-1, u32::MAX, u32::MAX), (-2, 0, 31), (i32::MIN, 30, 1)] {
        assert_eq!((bits::bfind_s32(a, false), bits::bfind_s32(a, true)), (position, shift), "{a:#x}");
    }
    assert_eq!((bits::bfind_u64(1 << 40, false), bits::bfind_u64(1 << 40, true)), (40, 23));
    assert_eq!((bits::bfind_s64(!(1 << 40), false), bits::bfind_s64(-1, true)), (40, u32::MAX));
}

#[test]
fn prmt_selects_bytes() {
    let (a, b) = (0x8302_8100, 0x0706_8504);
    for (c, want) in [(0x3210, a), (0x7654, b), (0x0537, 0x0085_8307), (0x9ba8, 0xffff_0000)] {
        assert_eq!(bits::prmt(a, b, c), want, "{c:#x}");
    }
}

#[test]
fn funnel_shifts_wrap_or_clamp_the_amount() {
    let (a, b) = (0x8765_4321, 0x0fed_cba9);
    for (amount, wrap, left, right) in [
        (0, true, b, a),
        (4, true, 0xfedc_ba98, 0x9876_5432),
        (36, true, 0xfedc_ba98, 0x9876_5432),
        (32, true, b, a),
        (32, false, a, b),
        (100, false, a, b),
        (31, false, 0xc3b2_a190, 0x1fdb_9753),
    ] {
        assert_eq!(bits::shf_l(a, b, amount, wrap), left, "left {amount} {wrap}");
        assert_eq!(bits::shf_r(a, b, amount, wrap), right, "right {amount} {wrap}");
    }
}

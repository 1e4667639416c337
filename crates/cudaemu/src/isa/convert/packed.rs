//! `cvt` of packed pairs, `cvt` to `.tf32`, and `cvt.pack`.

use super::super::vector::{Host, LaneOp};
use super::super::{Category, Operand, Row, Value, row};
use super::{CLAMPS, RELU, SATFINITE, modifiers, rounding};
use crate::bytecode::{Action, ComputeFn};
use crate::numeric::Rounding;
use crate::numeric::convert::{FloatCvt, PackType, cvt_bf16x2_f32, cvt_f16x2_f32, cvt_pack, cvt_tf32_f32};
use crate::numeric::fp8::{Fp8, cvt_f16x2_fp8x2, cvt_fp8x2_f16x2, cvt_fp8x2_f32};

pub(super) fn rows(rows: &mut Vec<Row>, host: Host) {
    halves(rows, host);
    bytes(rows);
    tf32(rows);
    pack(rows);
}

/// `.rn` without other modifiers, the common case in inner loops.
struct Nearest<const BF16: bool>;

impl<const BF16: bool> LaneOp for Nearest<BF16> {
    type A = f32;
    type D = u32;
    const N: usize = 2;
    #[inline(always)]
    fn lane(a: f32, b: f32, _: f32) -> u32 {
        if BF16 { cvt_bf16x2_f32(a, b, FloatCvt::RN) } else { cvt_f16x2_f32(a, b, FloatCvt::RN) }
    }
}

fn push(rows: &mut Vec<Row>, name: String, operands: &[Operand], k: u32, action: ComputeFn) {
    rows.push(row(name, operands, Category::Convert, k, Action::Compute(action)));
}

/// `.f16x2` and `.bf16x2` from two `.f32`.
fn halves(rows: &mut Vec<Row>, host: Host) {
    let operands = [Operand::Out(Value::B32), Operand::In(Value::F32), Operand::In(Value::F32)];
    for round in [".rn", ".rz"] {
        for (clamp, flags) in CLAMPS {
            let k = rounding(round) | flags;
            let plain = round == ".rn" && flags == 0;
            let f16 = if plain {
                host.map::<Nearest<false>>()
            } else {
                Action::Compute(|r, a, m| {
                    let cvt = modifiers(a.k);
                    r.map2(a, m, |x, y| cvt_f16x2_f32(x, y, cvt));
                })
            };
            rows.push(row(format!("cvt{round}{clamp}.f16x2.f32"), &operands, Category::Convert, k, f16));
            let bf16 = if plain {
                host.map::<Nearest<true>>()
            } else {
                Action::Compute(|r, a, m| {
                    let cvt = modifiers(a.k);
                    r.map2(a, m, |x, y| cvt_bf16x2_f32(x, y, cvt));
                })
            };
            rows.push(row(format!("cvt{round}{clamp}.bf16x2.f32"), &operands, Category::Convert, k, bf16));
        }
    }
}

/// The 8-bit formats, which are always packed in pairs.
fn bytes(rows: &mut Vec<Row>) {
    macro_rules! formats {
        ($($name:literal $format:ident),*) => { $(
            for (clamp, k) in CLAMPS.into_iter().filter(|(_, k)| k & SATFINITE != 0) {
                let (b16, b32) = (Operand::Out(Value::B16), Operand::In(Value::B32));
                let singles = [b16, Operand::In(Value::F32), Operand::In(Value::F32)];
                push(rows, format!("cvt.rn{clamp}.{}.f32", $name), &singles, k, |r, a, m| {
                    let relu = a.k & RELU != 0;
                    r.map2(a, m, |x, y| cvt_fp8x2_f32(Fp8::$format, x, y, relu));
                });
                push(rows, format!("cvt.rn{clamp}.{}.f16x2", $name), &[b16, b32], k, |r, a, m| {
                    let relu = a.k & RELU != 0;
                    r.map1(a, m, |x| cvt_fp8x2_f16x2(Fp8::$format, x, relu));
                });
            }
            for (relu, k) in [("", 0), (".relu", RELU)] {
                let operands = [Operand::Out(Value::B32), Operand::In(Value::B16)];
                push(rows, format!("cvt.rn{relu}.f16x2.{}", $name), &operands, k, |r, a, m| {
                    let relu = a.k & RELU != 0;
                    r.map1(a, m, |x| cvt_f16x2_fp8x2(Fp8::$format, x, relu));
                });
            }
        )* };
    }
    formats!("e4m3x2" E4m3, "e5m2x2" E5m2);
}

fn tf32(rows: &mut Vec<Row>) {
    let operands = [Operand::Out(Value::B32), Operand::In(Value::F32)];
    push(rows, "cvt.rna.tf32.f32".into(), &operands, 0, |r, a, m| {
        r.map1(a, m, |x| cvt_tf32_f32(x, Rounding::Rna, false, false));
    });
    push(rows, "cvt.rna.satfinite.tf32.f32".into(), &operands, 0, |r, a, m| {
        r.map1(a, m, |x| cvt_tf32_f32(x, Rounding::Rna, false, true));
    });
    for round in [".rn", ".rz"] {
        for (relu, flag) in [("", 0), (".relu", RELU)] {
            push(rows, format!("cvt{round}{relu}.tf32.f32"), &operands, rounding(round) | flag, |r, a, m| {
                let cvt = modifiers(a.k);
                r.map1(a, m, |x| cvt_tf32_f32(x, cvt.round, cvt.relu, false));
            });
        }
    }
}

/// Element types of `cvt.pack`, by their index in the row's constant.
const ELEMENTS: [(&str, PackType); 8] = [
    ("u16", PackType { bits: 16, signed: false }),
    ("s16", PackType { bits: 16, signed: true }),
    ("u8", PackType { bits: 8, signed: false }),
    ("s8", PackType { bits: 8, signed: true }),
    ("u4", PackType { bits: 4, signed: false }),
    ("s4", PackType { bits: 4, signed: true }),
    ("u2", PackType { bits: 2, signed: false }),
    ("s2", PackType { bits: 2, signed: true }),
];

fn pack(rows: &mut Vec<Row>) {
    let b32 = Operand::In(Value::B32);
    for (index, (name, element)) in ELEMENTS.iter().enumerate() {
        let k = index as u32;
        if element.bits == 16 {
            push(rows, format!("cvt.pack.sat.{name}.s32"), &[Operand::Out(Value::B32), b32, b32], k, |r, a, m| {
                let to = ELEMENTS[a.k as usize % ELEMENTS.len()].1;
                r.map2(a, m, |x, y| cvt_pack(x, y, 0, to));
            });
        } else {
            let operands = [Operand::Out(Value::B32), b32, b32, b32];
            push(rows, format!("cvt.pack.sat.{name}.s32.b32"), &operands, k, |r, a, m| {
                let to = ELEMENTS[a.k as usize % ELEMENTS.len()].1;
                r.map3(a, m, |x, y, z| cvt_pack(x, y, z, to));
            });
        }
    }
}

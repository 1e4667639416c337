//! `cvt` of packed pairs, and `cvt` to `.tf32`.

use super::super::vector::{Host, LaneOp};
use super::super::{Category, Operand, Row, Value, row};
use crate::bytecode::Action;
use crate::numeric::convert::cvt_tf32_f32;
use crate::numeric::half::{f32_to_bf16, f32_to_f16};

struct Pair<const BF16: bool>;

impl<const BF16: bool> LaneOp for Pair<BF16> {
    type A = f32;
    type D = u32;
    const N: usize = 2;
    #[inline(always)]
    fn lane(a: f32, b: f32, _: f32) -> u32 {
        let [high, low] = if BF16 { [a, b].map(f32_to_bf16) } else { [a, b].map(f32_to_f16) };
        u32::from(high) << 16 | u32::from(low)
    }
}

pub(super) fn rows(rows: &mut Vec<Row>, host: Host) {
    let operands = [Operand::Out(Value::B32), Operand::In(Value::F32), Operand::In(Value::F32)];
    rows.push(row("cvt.rn.f16x2.f32", &operands, Category::Convert, 0, host.map::<Pair<false>>()));
    rows.push(row("cvt.rn.bf16x2.f32", &operands, Category::Convert, 0, host.map::<Pair<true>>()));
    let tf32 = Action::Compute(|r, a, m| r.map1(a, m, cvt_tf32_f32));
    rows.push(row("cvt.rna.tf32.f32", &operands[..2], Category::Convert, 0, tf32));
}

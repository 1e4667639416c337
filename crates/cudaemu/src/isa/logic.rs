//! Logic and shifts (PTX ISA, "Logic and Shift Instructions").

use super::{Category, Family, Operand, Row, Value, lanes, row, uniform};
use crate::bytecode::Action;
use crate::exec_context::{LANES, Lane, Lanes, Registers};
use crate::numeric::bits;
use crate::numeric::integer::Integer as _;
use crate::operands::Args;

pub(crate) fn family() -> Family {
    let mut rows = Vec::new();
    let r = &mut rows;
    bitwise(r);
    lop3(r);
    shifts(r);
    Family { title: "Logic and shifts", rows, hints: vec![] }
}

fn bitwise(rows: &mut Vec<Row>) {
    map_each!(rows, Integer, "and", [b16 b32 b64], (2) |x, y| x & y);
    map_each!(rows, Integer, "or", [b16 b32 b64], (2) |x, y| x | y);
    map_each!(rows, Integer, "xor", [b16 b32 b64], (2) |x, y| x ^ y);
    map_each!(rows, Integer, "not", [b16 b32 b64], (1) |x| !x);

    let binary = [Operand::Out(Value::Pred), Operand::InPred, Operand::InPred];
    let mut pred = |name: &str, operands: &[Operand], action: fn(&mut Registers, &Args, u32)| {
        rows.push(row(name, operands, Category::Predicate, 0, Action::Compute(action)));
    };
    pred("and.pred", &binary, |r, a, m| r.set_pred(a.s[0], r.pred(a.s[1]) & r.pred(a.s[2]), m));
    pred("or.pred", &binary, |r, a, m| r.set_pred(a.s[0], r.pred(a.s[1]) | r.pred(a.s[2]), m));
    pred("xor.pred", &binary, |r, a, m| r.set_pred(a.s[0], r.pred(a.s[1]) ^ r.pred(a.s[2]), m));
    pred("not.pred", &binary[..2], |r, a, m| r.set_pred(a.s[0], !r.pred(a.s[1]), m));
}

/// `lop3`: the truth table is the immediate `imm[0]`.
fn lop3(rows: &mut Vec<Row>) {
    let value = Operand::In(Value::B32);
    let operands = [Operand::Out(Value::B32), value, value, value, Operand::Imm];
    let action = kernel!(|r, a, m| {
        let result = lop3_result(r, a);
        r.set(a.s[0], &result, m);
    });
    rows.push(row("lop3.b32", &operands, Category::Integer, 0, Action::Compute(action)));
}

#[inline(always)]
fn lop3_result(r: &Registers, a: &Args) -> Lanes<u32> {
    let (x, y, z) = (r.get::<u32>(a.s[1]), r.get::<u32>(a.s[2]), r.get::<u32>(a.s[3]));
    // Evaluates the truth table as a tree of selections: by `z` between neighbouring entries, then by `y`, then by `x`. The
    // selections by `z` are between constants, so each selection costs two operations per lane.
    let entry = |index: u32| 0u32.wrapping_sub(a.imm[0] as u32 >> index & 1);
    let by_z: [(u32, u32); 4] = std::array::from_fn(|i| {
        let zero = entry(2 * i as u32);
        (zero, zero ^ entry(2 * i as u32 + 1))
    });
    let choose = |selector: u32, one: u32, zero: u32| zero ^ selector & (zero ^ one);
    let mut result = [0; LANES];
    for lane in 0..LANES {
        let leaf = |i: usize| by_z[i].0 ^ z[lane] & by_z[i].1;
        result[lane] = choose(x[lane], choose(y[lane], leaf(3), leaf(2)), choose(y[lane], leaf(1), leaf(0)));
    }
    result
}

/// Shift amounts are `.u32` for all types; an amount above the width counts as the width.
macro_rules! shift {
    ($rows:ident, $op:ident, [$($name:literal $t:ident),*]) => { $(
        let operands = [Operand::Out(value!($t)), Operand::In(value!($t)), Operand::In(Value::B32)];
        let action = kernel!(|r, a, m| shift(r, a, m, |x: lane_type!($t), n| x.$op(n)));
        $rows.push(row($name, &operands, Category::Integer, 0, Action::Compute(action)));
    )* };
}

fn shifts(rows: &mut Vec<Row>) {
    shift!(rows, shl, ["shl.b16" b16, "shl.b32" b32, "shl.b64" b64]);
    shift!(rows, shr, ["shr.b16" b16, "shr.b32" b32, "shr.b64" b64]);
    shift!(rows, shr, ["shr.u16" u16, "shr.u32" u32, "shr.u64" u64]);
    shift!(rows, shr, ["shr.s16" s16, "shr.s32" s32, "shr.s64" s64]);
    map!(rows, Integer, "shf.l.clamp.b32", b32, b32, u32 => b32, |x, y, n| bits::shf_l(x, y, n, false));
    map!(rows, Integer, "shf.l.wrap.b32", b32, b32, u32 => b32, |x, y, n| bits::shf_l(x, y, n, true));
    map!(rows, Integer, "shf.r.clamp.b32", b32, b32, u32 => b32, |x, y, n| bits::shf_r(x, y, n, false));
    map!(rows, Integer, "shf.r.wrap.b32", b32, b32, u32 => b32, |x, y, n| bits::shf_r(x, y, n, true));
}

/// Some processors have no vector shift by a different amount per lane, so the usual case of one amount for all lanes (an
/// immediate) has its own loop.
#[inline(always)]
fn shift<T: Lane>(r: &mut Registers, a: &Args, mask: u32, f: impl Fn(T, u32) -> T) {
    let (x, n) = (r.get::<T>(a.s[1]), r.get::<u32>(a.s[2]));
    let result: Lanes<T> = match uniform(&n) {
        Some(n) => lanes(|lane| f(x[lane], n)),
        None => lanes(|lane| f(x[lane], n[lane])),
    };
    r.set(a.s[0], &result, mask);
}

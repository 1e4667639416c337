//! Comparison and selection (PTX ISA, "Comparison and Selection Instructions"): `setp` of integers and bits, `selp`. Also
//! the Boolean operators of `setp`, which the floating-point rows use too.

use super::{Category, Family, Operand, Row, Value, lanes, row};
use crate::bytecode::{Action, ComputeFn};
use crate::exec_context::{Lane, Lanes, Registers};
use crate::operands::Args;

/// Boolean operators that combine the comparison with a predicate. Their index is in the two low bits of the row's constant;
/// the comparison uses the other bits.
pub(crate) const OPERATORS: [&str; 4] = ["", ".and", ".or", ".xor"];

/// First bit of the row's constant that the comparison itself uses; see [`setp_rows`].
pub(crate) const COMPARISON_SHIFT: u32 = 2;

/// The rows of `setp` for one comparison and type: without and with each Boolean operator. `suffix` follows the operator in the
/// opcode, as in `.ftz.f32`. The action computes a mask from `s[2]` and `s[3]` and calls [`setp`] last.
pub(crate) fn setp_rows(op: &str, suffix: &str, source: Value, k: u32, action: ComputeFn) -> Vec<Row> {
    let pair = Operand::OutPair(Value::Pred, Value::Pred);
    let operands = [pair, Operand::In(source), Operand::In(source), Operand::InPred];
    let make = |(index, operator): (usize, &&str)| {
        let operands = if index == 0 { &operands[..3] } else { &operands };
        let name = format!("setp.{op}{operator}{suffix}");
        row(name, operands, Category::Predicate, k << COMPARISON_SHIFT | index as u32, Action::Compute(action))
    };
    OPERATORS.iter().enumerate().map(make).collect()
}

/// Last step of a `setp`: `p = test op c`, `q = !test op c`. Operands: `s[0] = p`, `s[1] = q`, `s[4] = c`.
#[inline(always)]
pub(crate) fn setp(r: &mut Registers, a: &Args, mask: u32, test: u32) {
    let (p, q) = (combine(r, a, 4, test), combine(r, a, 4, !test));
    r.set_pred(a.s[0], p, mask);
    r.set_pred(a.s[1], q, mask);
}

/// `test op c`: combines a comparison's mask with the predicate in `s[c]`, if the row has an operator.
#[inline(always)]
pub(crate) fn combine(r: &Registers, a: &Args, c: usize, test: u32) -> u32 {
    match a.k & 3 {
        0 => test,
        1 => test & r.pred(a.s[c]),
        2 => test | r.pred(a.s[c]),
        _ => test ^ r.pred(a.s[c]),
    }
}

pub(crate) fn family() -> Family {
    let mut rows = Vec::new();
    comparisons(&mut rows);
    selections(&mut rows);
    Family { title: "Comparison and selection", rows, hints: vec![] }
}

macro_rules! compare {
    ($rows:ident, [$($t:ident)*], [$($op:literal $test:tt),*]) => {
        compare!(@types $rows, [$($t)*], [$($op $test),*]);
    };
    (@types $rows:ident, [$($t:ident)*], $ops:tt) => { $(compare!(@ops $rows, $t, $ops);)* };
    (@ops $rows:ident, $t:ident, [$($op:literal $test:tt),*]) => { $(
        let suffix = concat!(".", stringify!($t));
        let action = kernel!(|r, a, m| {
            let test = r.test2::<lane_type!($t)>(a.s[2], a.s[3], |x, y| x $test y);
            setp(r, a, m, test);
        });
        $rows.extend(setp_rows($op, suffix, value!($t), 0, action));
    )* };
}

fn comparisons(rows: &mut Vec<Row>) {
    compare!(rows, [b16 b32 b64 u16 u32 u64 s16 s32 s64], ["eq" ==, "ne" !=]);
    compare!(rows, [u16 u32 u64 s16 s32 s64], ["lt" <, "le" <=, "gt" >, "ge" >=]);
    compare!(rows, [u16 u32 u64], ["lo" <, "ls" <=, "hi" >, "hs" >=]);
}

macro_rules! select {
    ($rows:ident, [$($t:ident)*]) => { $(
        let value = value!($t);
        let operands = [Operand::Out(value), Operand::In(value), Operand::In(value), Operand::InPred];
        let action = kernel!(|r, a, m| {
            let c = r.pred(a.s[3]);
            select::<lane_type!($t)>(r, a, m, c);
        });
        $rows.push(row(concat!("selp.", stringify!($t)), &operands, Category::Integer, 0, Action::Compute(action)));
    )* };
}

fn selections(rows: &mut Vec<Row>) {
    select!(rows, [b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64]);
}

/// `d = c ? a : b`
#[inline(always)]
fn select<T: Lane>(r: &mut Registers, a: &Args, mask: u32, c: u32) {
    let (x, y) = (r.get::<T>(a.s[1]), r.get::<T>(a.s[2]));
    let result: Lanes<T> = lanes(|lane| if c & (1 << lane) != 0 { x[lane] } else { y[lane] });
    r.set(a.s[0], &result, mask);
}

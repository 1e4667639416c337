//! Comparison and selection (PTX ISA, "Comparison and Selection Instructions"): `set` and `setp` of integers and bits, `selp`,
//! `slct`. Also the Boolean operators of `set` and `setp`, which the floating-point rows use too.

use super::{Category, Family, Operand, Row, Value, lanes, row};
use crate::bytecode::{Action, ComputeFn};
use crate::exec_context::{LANES, Lane, Lanes, Registers};
use crate::numeric::single;
use crate::operands::Args;

/// Boolean operators that combine the comparison with a predicate. Their index is in the two low bits of the row's constant;
/// the comparison uses the other bits.
pub(crate) const OPERATORS: [&str; 4] = ["", ".and", ".or", ".xor"];

/// Bit of the constant of a `set` row: the results are 1.0 and 0.0 instead of all ones and zero.
const FLOAT: u32 = 1 << 2;

/// First bit of the row's constant that the comparison itself uses; see [`setp_rows`] and [`set_rows`].
pub(crate) const COMPARISON_SHIFT: u32 = 3;

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

/// The rows of `set` for one comparison and source type, with results of `.u32`, `.s32` and `.f32`. `ftz` is `.ftz` or empty,
/// `source` the source type in the opcode. The action computes a mask from `s[1]` and `s[2]` and calls [`set`] last.
pub(crate) fn set_rows(op: &str, ftz: &str, source: (&str, Value), k: u32, action: ComputeFn) -> Vec<Row> {
    let mut rows = Vec::new();
    for (index, operator) in OPERATORS.iter().enumerate() {
        for (result, value, float) in [("u32", Value::B32, 0), ("s32", Value::B32, 0), ("f32", Value::F32, FLOAT)] {
            let operands = [Operand::Out(value), Operand::In(source.1), Operand::In(source.1), Operand::InPred];
            let operands = if index == 0 { &operands[..3] } else { &operands };
            let name = format!("set.{op}{operator}{ftz}.{result}.{}", source.0);
            let k = k << COMPARISON_SHIFT | float | index as u32;
            rows.push(row(name, operands, Category::Integer, k, Action::Compute(action)));
        }
    }
    rows
}

/// Last step of a `set`: all ones (or 1.0) where `test op c` is true. Operands: `s[0] = d`, `s[3] = c`.
#[inline(always)]
pub(crate) fn set(r: &mut Registers, a: &Args, mask: u32, test: u32) {
    let test = combine(r, a, 3, test);
    let yes = if a.k & FLOAT != 0 { 1f32.to_bits() } else { u32::MAX };
    let result: Lanes<u32> = lanes(|lane| if test >> lane & 1 != 0 { yes } else { 0 });
    r.set(a.s[0], &result, mask);
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
        let action = kernel!(|r, a, m| {
            let test = r.test2::<lane_type!($t)>(a.s[1], a.s[2], |x, y| x $test y);
            set(r, a, m, test);
        });
        $rows.extend(set_rows($op, "", (stringify!($t), value!($t)), 0, action));
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

        let operands = [Operand::Out(value), Operand::In(value), Operand::In(value), Operand::In(Value::B32)];
        let action = kernel!(|r, a, m| {
            let c = mask(r.get::<i32>(a.s[3]), |c| c >= 0);
            select::<lane_type!($t)>(r, a, m, c);
        });
        let name = concat!("slct.", stringify!($t), ".s32");
        $rows.push(row(name, &operands, Category::Integer, 0, Action::Compute(action)));

        // Minus zero selects the first source, and so does a negative subnormal that `.ftz` flushes. NaN selects the second.
        let operands = [Operand::Out(value), Operand::In(value), Operand::In(value), Operand::In(Value::F32)];
        let action = kernel!(|r, a, m| {
            let c = mask(r.get::<f32>(a.s[3]), |c| c >= 0.0);
            select::<lane_type!($t)>(r, a, m, c);
        });
        let name = concat!("slct.", stringify!($t), ".f32");
        $rows.push(row(name, &operands, Category::Integer, 0, Action::Compute(action)));
        let action = kernel!(|r, a, m| {
            let c = mask(r.get::<f32>(a.s[3]), |c| single::flush(c) >= 0.0);
            select::<lane_type!($t)>(r, a, m, c);
        });
        let name = concat!("slct.ftz.", stringify!($t), ".f32");
        $rows.push(row(name, &operands, Category::Integer, 0, Action::Compute(action)));
    )* };
}

fn selections(rows: &mut Vec<Row>) {
    select!(rows, [b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64]);
}

#[inline(always)]
fn mask<T: Lane>(values: Lanes<T>, f: impl Fn(T) -> bool) -> u32 {
    (0..LANES).fold(0, |bits, lane| bits | u32::from(f(values[lane])) << lane)
}

/// `d = c ? a : b`
#[inline(always)]
fn select<T: Lane>(r: &mut Registers, a: &Args, mask: u32, c: u32) {
    let (x, y) = (r.get::<T>(a.s[1]), r.get::<T>(a.s[2]));
    let result: Lanes<T> = lanes(|lane| if c & (1 << lane) != 0 { x[lane] } else { y[lane] });
    r.set(a.s[0], &result, mask);
}

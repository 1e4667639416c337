//! Moves between registers, packing and unpacking (PTX ISA, `mov`).
//!
//! The decoder writes `mov.b64 d, {a, b}` as `mov.b64.pack2.b32` and `mov.b64 {a, b}, d` as `mov.b64.unpack2.b32`.

use super::{Category, Decode, Family, Operand, Row, Value, row};
use crate::bytecode::{Action, ComputeFn};
use crate::exec_context::{LANES, Lanes, Registers};
use crate::operands::Args;

pub(crate) fn family() -> Family {
    let mut rows = Vec::new();
    for (ty, value) in [
        ("pred", Value::Pred),
        ("b16", Value::B16),
        ("u16", Value::B16),
        ("s16", Value::B16),
        ("b32", Value::B32),
        ("u32", Value::B32),
        ("s32", Value::B32),
        ("f32", Value::F32),
        ("b64", Value::B64),
        ("u64", Value::B64),
        ("s64", Value::B64),
        ("f64", Value::F64),
    ] {
        let source = if value == Value::Pred { Operand::InPred } else { Operand::In(value) };
        let (name, operands) = (format!("mov.{ty}"), vec![Operand::Out(value), source]);
        rows.push(Row { name, operands, decode: Decode::Move(value), k: 0, category: Category::Move });
    }
    pack(
        &mut rows,
        "b32",
        Value::B32,
        2,
        "b16",
        Value::B16,
        [kernel!(|r, a, m| pack_b32(r, a, m)), kernel!(|r, a, m| unpack_b32(r, a, m))],
    );
    pack(
        &mut rows,
        "b64",
        Value::B64,
        2,
        "b32",
        Value::B32,
        [kernel!(|r, a, m| pack_b64(r, a, m)), kernel!(|r, a, m| unpack_b64(r, a, m))],
    );
    pack(&mut rows, "b64", Value::B64, 4, "b16", Value::B16, [pack4_b64, unpack4_b64]);
    Family { title: "Moves", rows, hints: vec![] }
}

/// The action of a `mov` with bound operands: `s[0] = s[1]`.
pub(crate) fn copy(value: Value) -> Action {
    Action::Compute(match value {
        Value::Pred => |r, a, m| r.set_pred(a.s[0], r.pred(a.s[1]), m),
        Value::B16 => kernel!(|r, a, m| r.map1(a, m, |x: u16| x)),
        Value::B32 | Value::F32 => kernel!(|r, a, m| r.map1(a, m, |x: u32| x)),
        Value::B64 | Value::F64 => kernel!(|r, a, m| r.map1(a, m, |x: u64| x)),
    })
}

/// Adds the two rows for a whole and its parts: packing and unpacking.
fn pack(rows: &mut Vec<Row>, ty: &str, whole: Value, n: u8, part_ty: &str, part: Value, actions: [ComputeFn; 2]) {
    let [pack, unpack] = actions.map(Action::Compute);
    let operands = [Operand::Out(whole), Operand::InVector(n, part)];
    rows.push(row(format!("mov.{ty}.pack{n}.{part_ty}"), &operands, Category::Move, 0, pack));
    let operands = [Operand::OutVector(n, part), Operand::In(whole)];
    rows.push(row(format!("mov.{ty}.unpack{n}.{part_ty}"), &operands, Category::Move, 0, unpack));
}

#[inline(always)]
fn pack_b32(r: &mut Registers, a: &Args, mask: u32) {
    r.map2(a, mask, |low: u16, high: u16| u32::from(low) | u32::from(high) << 16);
}

#[inline(always)]
fn unpack_b32(r: &mut Registers, a: &Args, mask: u32) {
    let x = r.get::<u32>(a.s[2]);
    let (mut low, mut high) = ([0; LANES], [0; LANES]);
    for lane in 0..LANES {
        (low[lane], high[lane]) = (x[lane] as u16, (x[lane] >> 16) as u16);
    }
    r.set(a.s[0], &low, mask);
    r.set(a.s[1], &high, mask);
}

#[inline(always)]
fn pack_b64(r: &mut Registers, a: &Args, mask: u32) {
    r.map2(a, mask, |low: u32, high: u32| u64::from(low) | u64::from(high) << 32);
}

#[inline(always)]
fn unpack_b64(r: &mut Registers, a: &Args, mask: u32) {
    let x = r.get::<u64>(a.s[2]);
    let (mut low, mut high) = ([0; LANES], [0; LANES]);
    for lane in 0..LANES {
        (low[lane], high[lane]) = (x[lane] as u32, (x[lane] >> 32) as u32);
    }
    r.set(a.s[0], &low, mask);
    r.set(a.s[1], &high, mask);
}

fn pack4_b64(r: &mut Registers, a: &Args, mask: u32) {
    let parts: [Lanes<u16>; 4] = std::array::from_fn(|part| r.get(a.s[1 + part]));
    let whole = std::array::from_fn(|lane| (0..4).fold(0, |x, part| x | u64::from(parts[part][lane]) << (16 * part)));
    r.set(a.s[0], &whole, mask);
}

fn unpack4_b64(r: &mut Registers, a: &Args, mask: u32) {
    let x = r.get::<u64>(a.s[4]);
    for part in 0..4 {
        r.set(a.s[part], &x.map(|x| (x >> (16 * part)) as u16), mask);
    }
}

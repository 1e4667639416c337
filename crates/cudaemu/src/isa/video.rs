//! SIMD video instructions: two half-words or four bytes at once (PTX ISA, "SIMD Video Instructions"), without lane selectors
//! and masks, as nvcc's SIMD intrinsics use them.

use super::{Category, Family, Operand, Row, Value, row};
use crate::bytecode::Action;
use crate::exec_context::{Lanes, Registers};
use crate::operands::Args;

/// An operation on two elements, widened to `i32`.
type Op = fn(i32, i32) -> i32;

const OPS: [(&str, Op); 6] = [
    ("vadd", |a, b| a + b),
    ("vsub", |a, b| a - b),
    // Rounds halves away from zero.
    ("vavrg", |a, b| (a + b + i32::from(a + b >= 0)) >> 1),
    ("vabsdiff", |a, b| (a - b).abs()),
    ("vmin", i32::min),
    ("vmax", i32::max),
];

const COMPARISONS: [(&str, Op); 6] = [
    ("eq", |a, b| i32::from(a == b)),
    ("ne", |a, b| i32::from(a != b)),
    ("lt", |a, b| i32::from(a < b)),
    ("le", |a, b| i32::from(a <= b)),
    ("gt", |a, b| i32::from(a > b)),
    ("ge", |a, b| i32::from(a >= b)),
];

/// The row's constant: in the low four bits an index into [`OPS`], continued in [`COMPARISONS`]; then these bits.
const D_SIGNED: u32 = 1 << 4;
const A_SIGNED: u32 = 1 << 5;
const B_SIGNED: u32 = 1 << 6;
const SAT: u32 = 1 << 7;
const ADD: u32 = 1 << 8;
const BYTES: u32 = 1 << 9;

pub(crate) fn family() -> Family {
    let mut rows = Vec::new();
    for (elements, bytes) in [("2", 0), ("4", BYTES)] {
        for (at, b) in [("u32.u32", 0), ("u32.s32", B_SIGNED), ("s32.u32", A_SIGNED), ("s32.s32", A_SIGNED | B_SIGNED)]
        {
            for (dt, d) in [("u32", 0), ("s32", D_SIGNED)] {
                for (index, (op, _)) in OPS.iter().enumerate() {
                    for (modifier, m) in [("", 0), (".sat", SAT), (".add", ADD)] {
                        let name = format!("{op}{elements}.{dt}.{at}{modifier}");
                        rows.push(video(name, index as u32 | bytes | b | d | m));
                    }
                }
            }
            for (index, (comparison, _)) in COMPARISONS.iter().enumerate() {
                for (modifier, m) in [("", 0), (".add", ADD)] {
                    let name = format!("vset{elements}.{at}.{comparison}{modifier}");
                    rows.push(video(name, (OPS.len() + index) as u32 | bytes | b | m));
                }
            }
        }
    }
    Family { title: "SIMD video", rows, hints: vec![] }
}

fn video(name: String, k: u32) -> Row {
    let source = Operand::In(Value::B32);
    row(name, &[Operand::Out(Value::B32), source, source, source], Category::Integer, k, Action::Compute(simd))
}

fn simd(r: &mut Registers, a: &Args, mask: u32) {
    let index = (a.k & 15) as usize;
    let op = OPS.iter().chain(&COMPARISONS).nth(index).map_or(OPS[0].1, |entry| entry.1);
    let [x, y, z]: [Lanes<u32>; 3] = std::array::from_fn(|i| r.get(a.s[1 + i]));
    let result: Lanes<u32> = std::array::from_fn(|lane| elementwise(a.k, op, x[lane], y[lane], z[lane]));
    r.set(a.s[0], &result, mask);
}

fn elementwise(k: u32, op: Op, x: u32, y: u32, z: u32) -> u32 {
    let bits = if k & BYTES != 0 { 8 } else { 16 };
    let element = |word: u32, at: u32, signed: bool| {
        let top = word << (32 - bits - at);
        if signed { top as i32 >> (32 - bits) } else { (top >> (32 - bits)) as i32 }
    };
    let (low, high) = if k & D_SIGNED != 0 { (-1 << (bits - 1), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) };
    let mut result = if k & ADD != 0 { z } else { 0 };
    for at in (0..32).step_by(bits as usize) {
        let value = op(element(x, at, k & A_SIGNED != 0), element(y, at, k & B_SIGNED != 0));
        if k & ADD != 0 {
            result = result.wrapping_add(value as u32);
        } else {
            let value = if k & SAT != 0 { value.clamp(low, high) } else { value };
            result |= (value as u32 & ((1 << bits) - 1)) << at;
        }
    }
    result
}

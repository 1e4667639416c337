//! Scalar video instructions: one operation on bytes, half-words or words that are parts of registers (PTX ISA, "Scalar Video
//! Instructions"). `vmad` is not supported.

use super::{Category, Family, Operand, Row, Value, row};
use crate::bytecode::Action;
use crate::exec_context::{Lanes, Registers};
use crate::operands::Args;

/// An operation on two operands of up to 33 bits, which may be shifted left by 32.
type Op = fn(i128, i128) -> i128;

const OPS: [(&str, Op); 15] = [
    ("vadd", |a, b| a + b),
    ("vsub", |a, b| a - b),
    ("vabsdiff", |a, b| (a - b).abs()),
    ("vmin", i128::min),
    ("vmax", i128::max),
    ("vshl.clamp", |a, n| a << n.min(32)),
    ("vshl.wrap", |a, n| a << (n & 31)),
    ("vshr.clamp", |a, n| a >> n.min(32)),
    ("vshr.wrap", |a, n| a >> (n & 31)),
    ("vset.eq", |a, b| i128::from(a == b)),
    ("vset.ne", |a, b| i128::from(a != b)),
    ("vset.lt", |a, b| i128::from(a < b)),
    ("vset.le", |a, b| i128::from(a <= b)),
    ("vset.gt", |a, b| i128::from(a > b)),
    ("vset.ge", |a, b| i128::from(a >= b)),
];

/// The row's constant: index into [`OPS`] in the low four bits, then these bits; from bit 8, the operation with the third
/// source.
const D_SIGNED: u32 = 1 << 4;
const A_SIGNED: u32 = 1 << 5;
const B_SIGNED: u32 = 1 << 6;
const SAT: u32 = 1 << 7;
const SECOND: [&str; 4] = ["", ".add", ".min", ".max"];

pub(crate) fn family() -> Family {
    let mut rows = Vec::new();
    for (index, (op, _)) in OPS.iter().enumerate() {
        let (op, mode) = op.split_once('.').unwrap_or((op, ""));
        for (second, after) in SECOND.iter().enumerate() {
            let k = index as u32 | (second as u32) << 8;
            if op == "vset" {
                for (a, b, k) in types().map(|(a, b, signs)| (a, b, k | signs)) {
                    rows.push(video(format!("vset.{a}.{b}.{mode}{after}"), k));
                }
                continue;
            }
            let shift = op == "vshl" || op == "vshr";
            for (d, d_sign) in [("u32", 0), ("s32", D_SIGNED)] {
                for (a, b, signs) in types().filter(|types| !shift || types.1 == "u32") {
                    for (sat, s) in [("", 0), (".sat", SAT)] {
                        let mode = if shift { format!(".{mode}") } else { String::new() };
                        rows.push(video(format!("{op}.{d}.{a}.{b}{sat}{mode}{after}"), k | d_sign | signs | s));
                    }
                }
            }
        }
    }
    Family { title: "Scalar video", rows, hints: vec![] }
}

/// Types of the two sources, with their bits of the row's constant.
fn types() -> impl Iterator<Item = (&'static str, &'static str, u32)> {
    let (u, s) = ("u32", "s32");
    [(u, u, 0), (u, s, B_SIGNED), (s, u, A_SIGNED), (s, s, A_SIGNED | B_SIGNED)].into_iter()
}

fn video(name: String, k: u32) -> Row {
    let value = Value::B32;
    let third = if k >> 8 == 0 { Operand::OptIn(value) } else { Operand::In(value) };
    let operands = [Operand::OutPart(value), Operand::InPart(value), Operand::InPart(value), third];
    row(name, &operands, Category::Integer, k, Action::Compute(compute))
}

/// First bit and width of a part, by its number in [`Operand::InPart`].
fn part(number: i64) -> (u32, u32) {
    match number & 15 {
        n @ 1..=4 => (8 * (n as u32 - 1), 8),
        n @ 5..=6 => (16 * (n as u32 - 5), 16),
        _ => (0, 32),
    }
}

fn select(word: u32, part: (u32, u32), signed: bool) -> i128 {
    let (at, width) = part;
    let top = word << (32 - width - at);
    if signed { i128::from(top as i32 >> (32 - width)) } else { i128::from(top >> (32 - width)) }
}

fn compute(r: &mut Registers, a: &Args, mask: u32) {
    let op = OPS.get((a.k & 15) as usize).map_or(OPS[0].1, |entry| entry.1);
    let [d_part, a_part, b_part] = [0, 4, 8].map(|shift| part(a.imm[0] >> shift));
    let signed = |bit: u32| a.k & bit != 0;
    let (x, y) = (r.get::<u32>(a.s[1]), r.get::<u32>(a.s[2]));
    let z: Lanes<u32> = if a.s[3].is_none() { [0; 32] } else { r.get(a.s[3]) };
    let result: Lanes<u32> = std::array::from_fn(|lane| {
        let value = op(select(x[lane], a_part, signed(A_SIGNED)), select(y[lane], b_part, signed(B_SIGNED)));
        let (at, width) = d_part;
        let value = match (signed(SAT), signed(D_SIGNED)) {
            (false, _) => value,
            (true, true) => value.clamp(-1 << (width - 1), (1 << (width - 1)) - 1),
            (true, false) => value.clamp(0, (1 << width) - 1),
        };
        let as_type = |word: u32| select(word, (0, 32), signed(D_SIGNED));
        match a.k >> 8 {
            1 => (value as u32).wrapping_add(z[lane]),
            2 => as_type(value as u32).min(as_type(z[lane])) as u32,
            3 => as_type(value as u32).max(as_type(z[lane])) as u32,
            _ => {
                let field = (((1u64 << width) - 1) << at) as u32;
                z[lane] & !field | (value as u32) << at & field
            }
        }
    });
    r.set(a.s[0], &result, mask);
}

//! `mma.m8n8k4` of `.f16`: four products at once, one per quad pair. A quad pair consists of the lanes whose numbers agree in
//! bits 2 and 3 (PTX ISA, "Matrix Fragments for mma.m8n8k4 with .f16 floating point type").

use super::matrix_spec::{Accumulator, Element, MatrixSpec};
use super::{product, require_whole_warp};
use crate::bytecode::Action;
use crate::exec_context::{ExecContext, LANES, Lanes};
use crate::fault::Fault;
use crate::isa::{Category, Operand, Row, Value, row};
use crate::numeric::half::{f16_to_f32, f64_to_f16};
use crate::operands::Args;

/// Bits of [`MatrixSpec::option`].
const A_BY_COLUMNS: u32 = 1;
const B_BY_ROWS: u32 = 2;

pub(super) fn rows() -> Vec<Row> {
    use Accumulator::{F16, F32};
    let mut rows = Vec::new();
    for (a, a_option) in [("row", 0), ("col", A_BY_COLUMNS)] {
        for (b, b_option) in [("col", 0), ("row", B_BY_ROWS)] {
            for (d, c) in [(F16, F16), (F32, F32), (F32, F16)] {
                let (element, option) = (Element::F16, a_option | b_option);
                let kind = MatrixSpec { a: element, b: element, d, c, m: 8, n: 8, k: 4, flag: false, option };
                let registers = |accumulator: Accumulator| 8 / accumulator.packed() as u8;
                let operands = [
                    Operand::OutVector(registers(d), d.value()),
                    Operand::InVector(2, Value::B32),
                    Operand::InVector(2, Value::B32),
                    Operand::InVector(registers(c), c.value()),
                ];
                let name = format!("mma.sync.aligned.m8n8k4.{a}.{b}.{}.f16.f16.{}", d.name(), c.name());
                rows.push(row(name, &operands, Category::Matrix, kind.pack(), Action::Access(volta)));
            }
        }
    }
    rows
}

/// Index of the lane in its half of the quad pair, plus 4 in the upper half.
fn outer(lane: usize) -> usize {
    lane % 4 + lane / 16 * 4
}

/// Row and column of a lane's `i`-th element of C or D.
fn result_place(lane: usize, i: usize, accumulator: Accumulator) -> (usize, usize) {
    match accumulator {
        Accumulator::F16 => (outer(lane), i),
        _ => ((lane & 1) + (i & 2) + lane / 16 * 4, (i & 4) + (lane & 2) + (i & 1)),
    }
}

fn volta(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    require_whole_warp(cx, mask)?;
    let kind = MatrixSpec::unpack(args.k);
    let (targets, sources) = args.all.split_at((8 / kind.d.packed()).min(args.all.len()));
    let words: Vec<Lanes<u32>> = sources.iter().map(|&slot| cx.regs.get(slot)).collect();
    let (a, b, c) = (0, 2, 4);
    let half = |register: usize, lane: usize, at: usize| {
        f16_to_f32((words[register + at / 2][lane] >> (16 * (at % 2))) as u16)
    };
    let mut results: Vec<Lanes<u32>> = targets.iter().map(|_| [0; LANES]).collect();
    for pair in 0..4 {
        let members = || (0..LANES).filter(move |lane| lane / 4 % 4 == pair);
        let (mut left, mut right, mut sums) = ([0.0; 32], [0.0; 32], [0.0; 64]);
        for lane in members() {
            for i in 0..4 {
                let (row, column) =
                    if kind.option & A_BY_COLUMNS == 0 { (outer(lane), i) } else { (i + lane / 16 * 4, lane % 4) };
                left[row * 4 + column] = half(a, lane, i);
                let (row, column) =
                    if kind.option & B_BY_ROWS == 0 { (i, outer(lane)) } else { (lane % 4, i + lane / 16 * 4) };
                right[row * 8 + column] = half(b, lane, i);
            }
            for i in 0..8 {
                let (row, column) = result_place(lane, i, kind.c);
                sums[row * 8 + column] = f64::from(match kind.c {
                    Accumulator::F16 => half(c, lane, i),
                    _ => f32::from_bits(words[c + i][lane]),
                });
            }
        }
        product::floats(&left, &right, &mut sums, 8, 4);
        for lane in members() {
            for i in 0..8 {
                let (row, column) = result_place(lane, i, kind.d);
                let sum = sums[row * 8 + column];
                if kind.d == Accumulator::F16 {
                    results[i / 2][lane] |= u32::from(f64_to_f16(sum)) << (16 * (i % 2));
                } else {
                    let value = sum as f32;
                    results[i][lane] = if value.is_nan() { 0x7fff_ffff } else { value.to_bits() };
                }
            }
        }
    }
    for (&slot, result) in targets.iter().zip(&results) {
        cx.regs.set(slot, result, mask);
    }
    Ok(())
}

//! `ldmatrix`, `stmatrix`, `movmatrix`: moves of 8 × 8 matrices of 16-bit elements between shared memory and fragments.
//!
//! In a fragment lane `4 · row + pair` holds the elements `2 · pair` and `2 · pair + 1` of a row in one register. In memory
//! lane `8 · matrix + row` holds the address of a row's 16 bytes.

use super::mma::require_whole_warp;
use super::{Category, Family, Operand, Value, row};
use crate::bytecode::Action;
use crate::exec_context::{ExecContext, LANES, Lanes, StateSpace};
use crate::fault::Fault;
use crate::operands::{Args, Slot};

/// Bits of a row's constant, in addition to the number of matrices.
const TRANSPOSED: u32 = 8;
const SHARED: u32 = 16;

/// An 8 × 8 matrix of 16-bit elements.
type Matrix = [[u16; 8]; 8];

pub(crate) fn family() -> Family {
    let mut rows = Vec::new();
    for count in [1u8, 2, 4] {
        for (trans, t) in [("", 0), (".trans", TRANSPOSED)] {
            for (space, s) in [("", 0), (".shared", SHARED), (".shared::cta", SHARED)] {
                let k = u32::from(count) | t | s;
                // The manual writes the shape first, widespread libraries write it last, and assemblers accept both.
                for form in [format!("m8n8.x{count}{trans}"), format!("x{count}{trans}.m8n8")] {
                    let name = format!("ldmatrix.sync.aligned.{form}{space}.b16");
                    let operands = [Operand::OutVector(count, Value::B32), Operand::Address];
                    rows.push(row(name, &operands, Category::Matrix, k, Action::Access(load)));
                    let name = format!("stmatrix.sync.aligned.{form}{space}.b16");
                    let operands = [Operand::Address, Operand::InVector(count, Value::B32)];
                    rows.push(row(name, &operands, Category::Matrix, k, Action::Access(store)));
                }
            }
        }
    }
    let operands = [Operand::Out(Value::B32), Operand::In(Value::B32)];
    let name = "movmatrix.sync.aligned.m8n8.trans.b16";
    rows.push(row(name, &operands, Category::Matrix, 0, Action::Access(transpose)));
    Family { title: "Matrix moves", rows, hints: vec![] }
}

fn transposed(matrix: Matrix) -> Matrix {
    std::array::from_fn(|row| std::array::from_fn(|column| matrix[column][row]))
}

fn to_fragment(matrix: &Matrix) -> Lanes<u32> {
    std::array::from_fn(|lane| {
        let (row, column) = (&matrix[lane / 4], lane % 4 * 2);
        u32::from(row[column]) | u32::from(row[column + 1]) << 16
    })
}

fn from_fragment(words: &Lanes<u32>) -> Matrix {
    std::array::from_fn(|row| std::array::from_fn(|column| (words[row * 4 + column / 2] >> (column % 2 * 16)) as u16))
}

fn window(args: &Args) -> StateSpace {
    if args.k & SHARED != 0 { StateSpace::Shared } else { StateSpace::Generic }
}

/// The lanes whose addresses are used: eight per matrix.
fn addressing(count: usize) -> u32 {
    u32::MAX >> (LANES - 8 * count)
}

fn load(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    require_whole_warp(cx, mask)?;
    let count = (args.k & 7) as usize;
    let at = cx.addresses(args);
    let rows: Lanes<[u8; 16]> = cx.load(window(args), &at, addressing(count))?;
    for (index, &slot) in args.s[..count].iter().enumerate() {
        let element = |row: usize, column: usize| {
            let bytes = &rows[8 * index + row];
            u16::from_le_bytes([bytes[2 * column], bytes[2 * column + 1]])
        };
        let matrix: Matrix = std::array::from_fn(|row| std::array::from_fn(|column| element(row, column)));
        let matrix = if args.k & TRANSPOSED != 0 { transposed(matrix) } else { matrix };
        cx.regs.set(slot, &to_fragment(&matrix), mask);
    }
    Ok(())
}

fn store(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    require_whole_warp(cx, mask)?;
    let count = (args.k & 7) as usize;
    let at = cx.addresses(args);
    let mut rows = [[0; 16]; LANES];
    for (index, &slot) in args.s[..count].iter().enumerate() {
        let matrix = from_fragment(&cx.regs.get(slot));
        let matrix = if args.k & TRANSPOSED != 0 { transposed(matrix) } else { matrix };
        for (bytes, row) in rows[8 * index..].iter_mut().zip(&matrix) {
            for (pair, element) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(row) {
                *pair = element.to_le_bytes();
            }
        }
    }
    cx.store(window(args), &at, &rows, addressing(count))
}

fn transpose(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    require_whole_warp(cx, mask)?;
    let [d, a]: [Slot; 2] = [args.s[0], args.s[1]];
    let result = to_fragment(&transposed(from_fragment(&cx.regs.get(a))));
    cx.regs.set(d, &result, mask);
    Ok(())
}

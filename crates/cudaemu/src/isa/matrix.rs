//! `ldmatrix`: loads 8 × 8 matrices of 16-bit elements from shared memory into fragments.
//!
//! In a fragment lane `4 · row + pair` holds the elements `2 · pair` and `2 · pair + 1` of a row in one register. In memory
//! lane `8 · matrix + row` holds the address of a row's 16 bytes.

use super::mma::require_whole_warp;
use super::{Category, Family, Operand, Value, row};
use crate::bytecode::Action;
use crate::exec_context::{ExecContext, LANES, Lanes, StateSpace};
use crate::fault::Fault;
use crate::operands::Args;

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
                let name = format!("ldmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16");
                let operands = [Operand::OutVector(count, Value::B32), Operand::Address];
                rows.push(row(name, &operands, Category::Matrix, k, Action::Access(load)));
            }
        }
    }
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

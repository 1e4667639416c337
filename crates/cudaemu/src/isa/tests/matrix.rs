//! Moves of matrices between shared memory and fragments, element by element.

use crate::bytecode::Action;
use crate::exec_context::fixture::Fixture;
use crate::exec_context::{Registers, StateSpace, window};
use crate::fault::{Fault, FaultKind};
use crate::isa::{Decode, Row, matrix};
use crate::operands::{Args, Base, Class, RegisterCounts, Slot};

/// Registers 0 to 3 are the fragments, 4 holds shared addresses; B64 register 0 holds generic addresses.
struct Bench {
    rig: Fixture,
}

/// Address of lane `lane`'s row; the rows are scattered, 16 bytes each.
fn row_of(lane: usize) -> u64 {
    (lane * 7 % 32 * 16) as u64
}

/// A 16-bit element of a matrix in memory.
fn element(matrix: usize, row: usize, column: usize) -> u16 {
    (matrix << 8 | row << 4 | column) as u16
}

fn narrow(index: usize) -> Slot {
    Slot::new(Class::B32, index).unwrap_or_default()
}

impl Bench {
    fn new() -> Self {
        let mut regs = Registers::new(&RegisterCounts { b32: 5, b64: 1, ..RegisterCounts::default() });
        let addresses: [u64; 32] = std::array::from_fn(row_of);
        regs.set(narrow(4), &addresses.map(|at| at as u32), u32::MAX);
        let wide = Slot::new(Class::B64, 0).unwrap_or_default();
        regs.set(wide, &addresses.map(|at| at + window::SHARED), u32::MAX);
        let (mut rig, ()) = Fixture::new(4096, 1, |_| ());
        rig.regs = regs;
        Self { rig }
    }

    fn sync(&mut self) {
        self.rig.shared.warp_sync(0, u32::MAX, u32::MAX);
    }

    fn run(&mut self, row: &Row, count: usize, mask: u32) -> Result<(), Box<Fault>> {
        let generic = !row.name.contains(".shared");
        let base =
            if generic { Base::Wide(Slot::new(Class::B64, 0).unwrap_or_default()) } else { Base::Narrow(narrow(4)) };
        let mut args = Args { k: row.k, base, ..Args::default() };
        for (index, slot) in args.s.iter_mut().enumerate().take(count) {
            *slot = narrow(index);
        }
        let Decode::Plain(Action::Access(access)) = row.decode else { unreachable!() };
        access(&mut self.rig.context(0, 1), &args, mask)
    }
}

/// Elements of a lane's register by the manual's definition.
fn fragment(matrix: usize, lane: usize, transposed: bool) -> u32 {
    let (group, thread) = (lane / 4, lane % 4);
    let at = |column: usize| match transposed {
        false => element(matrix, group, column),
        true => element(matrix, column, group),
    };
    u32::from(at(2 * thread)) | u32::from(at(2 * thread + 1)) << 16
}

fn bytes_of(matrix: usize, row: usize) -> [u8; 16] {
    std::array::from_fn(|at| element(matrix, row, at / 2).to_le_bytes()[at % 2])
}

#[test]
fn every_row_moves_every_element_to_its_place() {
    for row in matrix::family().rows {
        let count = ["x1", "x2", "x4"].into_iter().find(|x| row.name.split('.').any(|part| part == *x));
        let count: usize = count.and_then(|x| x[1..].parse().ok()).unwrap_or(1);
        let transposed = row.name.contains(".trans");
        let mut bench = Bench::new();
        let at = std::array::from_fn(row_of);
        if row.name.starts_with("ldmatrix") {
            // Initialises only the rows that the instruction reads, so that a read of any other row is reported.
            let rows = std::array::from_fn(|lane| bytes_of(lane / 8, lane % 8));
            let lanes = u32::MAX >> (32 - 8 * count);
            bench.rig.context(0, 1).store(StateSpace::Shared, &at, &rows, lanes).unwrap();
            bench.sync();
        } else {
            for matrix in 0..4 {
                let values: [u32; 32] = std::array::from_fn(|lane| fragment(matrix, lane, transposed));
                bench.rig.regs.set(narrow(matrix), &values, u32::MAX);
            }
        }
        if row.name.starts_with("movmatrix") {
            let values: [u32; 32] = std::array::from_fn(|lane| fragment(2, lane, false));
            bench.rig.regs.set(narrow(1), &values, u32::MAX);
            bench.run(&row, 2, u32::MAX).unwrap();
            let expected: [u32; 32] = std::array::from_fn(|lane| fragment(2, lane, true));
            assert_eq!(bench.rig.regs.get::<u32>(narrow(0)), expected, "{}", row.name);
            continue;
        }
        bench.run(&row, count, u32::MAX).unwrap_or_else(|fault| panic!("{}: {}", row.name, fault.kind));
        if row.name.starts_with("ldmatrix") {
            for matrix in 0..count {
                let expected: [u32; 32] = std::array::from_fn(|lane| fragment(matrix, lane, transposed));
                assert_eq!(bench.rig.regs.get::<u32>(narrow(matrix)), expected, "{}, matrix {matrix}", row.name);
            }
        } else {
            bench.sync();
            let lanes = u32::MAX >> (32 - 8 * count);
            let rows: [[u8; 16]; 32] = bench.rig.context(0, 1).load(StateSpace::Shared, &at, lanes).unwrap();
            for (lane, row_bytes) in rows.iter().enumerate().take(8 * count) {
                assert_eq!(*row_bytes, bytes_of(lane / 8, lane % 8), "{}, row {lane}", row.name);
            }
        }
    }
}

#[test]
fn lanes_that_are_missing_are_reported() {
    for row in matrix::family().rows {
        let fault = Bench::new().run(&row, 2, 0x7fff_ffff).unwrap_err();
        assert!(matches!(fault.kind, FaultKind::InactiveLane(_)), "{}: {}", row.name, fault.kind);
        assert_eq!(fault.lane, 31, "{}", row.name);
    }
}

#[test]
fn rows_that_are_not_aligned_to_16_bytes_are_reported() {
    let mut bench = Bench::new();
    bench.rig.regs.set(narrow(4), &[8u32; 32], u32::MAX);
    let row = matrix::family().rows.into_iter().find(|row| row.name == "ldmatrix.sync.aligned.m8n8.x1.shared.b16");
    let fault = bench.run(&row.unwrap(), 1, u32::MAX).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Misaligned);
}

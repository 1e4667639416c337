//! `ldmatrix`: moves of matrices from shared memory to fragments, compared element by element.

use crate::bytecode::Action;
use crate::exec_context::fixture::Fixture;
use crate::exec_context::{MemoryCounts, Registers, StateSpace, window};
use crate::fault::{Fault, FaultKind};
use crate::isa::{Decode, Row, matrix};
use crate::operands::{Args, Base, Class, RegisterCounts, Slot};

/// A warp with 4 KiB of shared memory. B32 registers 0 to 3 are the fragments, register 4 holds each lane's shared address; B64
/// register 0 holds the same addresses as generic ones.
struct WarpFixture {
    fixture: Fixture,
}

/// Shared address of the row of 16 bytes that lane `lane` names; the order is scattered on purpose.
fn row_address(lane: usize) -> u64 {
    (lane * 7 % 32 * 16) as u64
}

/// The 16-bit element at a position of a matrix in memory; all elements differ.
fn element(matrix: usize, row: usize, column: usize) -> u16 {
    (matrix << 8 | row << 4 | column) as u16
}

fn b32_slot(index: usize) -> Slot {
    Slot::new(Class::B32, index).unwrap_or_default()
}

impl WarpFixture {
    fn new() -> Self {
        let mut regs = Registers::new(&RegisterCounts { b32: 5, b64: 1, ..RegisterCounts::default() });
        let addresses: [u64; 32] = std::array::from_fn(row_address);
        regs.set(b32_slot(4), &addresses.map(|at| at as u32), u32::MAX);
        let wide = Slot::new(Class::B64, 0).unwrap_or_default();
        regs.set(wide, &addresses.map(|at| at + window::SHARED), u32::MAX);
        let (mut fixture, ()) = Fixture::new(4096, 1, |_| ());
        fixture.regs = regs;
        Self { fixture }
    }

    fn sync(&mut self) {
        self.fixture.shared.warp_sync(0, u32::MAX, u32::MAX);
    }

    fn run(&mut self, instruction: &Row, count: usize, mask: u32) -> Result<(), Box<Fault>> {
        let generic = !instruction.name.contains(".shared");
        let base =
            if generic { Base::Wide(Slot::new(Class::B64, 0).unwrap_or_default()) } else { Base::Narrow(b32_slot(4)) };
        let mut args = Args { k: instruction.k, base, ..Args::default() };
        for (index, slot) in args.s.iter_mut().enumerate().take(count) {
            *slot = b32_slot(index);
        }
        let Decode::Plain(Action::Access(access)) = instruction.decode else { unreachable!() };
        access(&mut self.fixture.context(0, 1), &args, mask)
    }
}

/// A lane's register of a fragment, by the manual's definition.
fn fragment(matrix: usize, lane: usize, transposed: bool) -> u32 {
    let (group, thread) = (lane / 4, lane % 4);
    let at = |column: usize| match transposed {
        false => element(matrix, group, column),
        true => element(matrix, column, group),
    };
    u32::from(at(2 * thread)) | u32::from(at(2 * thread + 1)) << 16
}

fn bytes_of_row(matrix: usize, row: usize) -> [u8; 16] {
    std::array::from_fn(|at| element(matrix, row, at / 2).to_le_bytes()[at % 2])
}

#[test]
fn every_instruction_moves_every_element_to_its_place() {
    for instruction in matrix::family().rows {
        let count = ["x1", "x2", "x4"].into_iter().find(|x| instruction.name.split('.').any(|part| part == *x));
        let count: usize = count.and_then(|x| x[1..].parse().ok()).unwrap_or(1);
        let transposed = instruction.name.contains(".trans");
        let mut warp = WarpFixture::new();
        // Initialises only the rows that the instruction reads, so that a read of any other row is reported.
        let at = std::array::from_fn(row_address);
        let rows = std::array::from_fn(|lane| bytes_of_row(lane / 8, lane % 8));
        let lanes = u32::MAX >> (32 - 8 * count);
        warp.fixture.context(0, 1).store(StateSpace::Shared, &at, &rows, lanes).unwrap();
        warp.sync();
        warp.fixture.counts = MemoryCounts::default();
        warp.run(&instruction, count, u32::MAX).unwrap_or_else(|fault| panic!("{}: {}", instruction.name, fault.kind));
        let counts = &warp.fixture.counts;
        assert_eq!((counts.shared_passes, counts.bank_conflicts), (count as u64, 0), "{}", instruction.name);
        for matrix in 0..count {
            let expected: [u32; 32] = std::array::from_fn(|lane| fragment(matrix, lane, transposed));
            let got = warp.fixture.regs.get::<u32>(b32_slot(matrix));
            assert_eq!(got, expected, "{}, matrix {matrix}", instruction.name);
        }
    }
}

#[test]
fn lanes_that_are_missing_are_reported() {
    for instruction in matrix::family().rows {
        let fault = WarpFixture::new().run(&instruction, 2, 0x7fff_ffff).unwrap_err();
        assert!(matches!(fault.kind, FaultKind::InactiveLane(_)), "{}: {}", instruction.name, fault.kind);
        assert_eq!(fault.lane, 31, "{}", instruction.name);
    }
}

#[test]
fn rows_that_are_not_aligned_to_16_bytes_are_reported() {
    let mut warp = WarpFixture::new();
    warp.fixture.regs.set(b32_slot(4), &[8u32; 32], u32::MAX);
    let instruction =
        matrix::family().rows.into_iter().find(|row| row.name == "ldmatrix.sync.aligned.m8n8.x1.shared.b16");
    let fault = warp.run(&instruction.unwrap(), 1, u32::MAX).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Misaligned);
}

//! Known values for every row of the instruction table, one file per family.

mod bits;
mod compare;
mod compare_float;
mod convert;
mod float;
mod formats;
mod half;
mod integer;
mod logic;
mod matrix;
mod moves;
mod vector;

use super::harness::Harness;
use super::{Category, Family, Operand, Value, row};
use crate::bytecode::Action;

/// An integer type of PTX, for tests of whole groups of rows against unbounded arithmetic.
#[derive(Clone, Copy)]
pub(super) struct Type {
    pub(super) name: &'static str,
    pub(super) bits: u32,
    pub(super) signed: bool,
}

const fn ty(name: &'static str, bits: u32, signed: bool) -> Type {
    Type { name, bits, signed }
}

/// The types of integer arithmetic.
pub(super) const TYPES: [Type; 6] = [
    ty("u16", 16, false),
    ty("s16", 16, true),
    ty("u32", 32, false),
    ty("s32", 32, true),
    ty("u64", 64, false),
    ty("s64", 64, true),
];

impl Type {
    pub(super) fn min(self) -> i128 {
        if self.signed { -1 << (self.bits - 1) } else { 0 }
    }

    pub(super) fn max(self) -> i128 {
        self.min() + (1 << self.bits) - 1
    }

    /// The value of the type with the same low bits.
    pub(super) fn wrap(self, value: i128) -> i128 {
        let unsigned = value & ((1 << self.bits) - 1);
        if unsigned > self.max() { unsigned - (1 << self.bits) } else { unsigned }
    }

    /// Values at the limits of the type, and a few in between.
    pub(super) fn edges(self) -> Vec<i128> {
        let middle = 1 << (self.bits / 2);
        let mut values = vec![0, 1, 2, 3, 7, 100, middle - 1, middle, middle + 1, 0x55, self.max() - 1, self.max()];
        if self.signed {
            values.extend([-1, -2, -3, -7, -100, -middle, self.min(), self.min() + 1]);
        }
        let mut random = fastrand::Rng::with_seed(u64::from(self.bits));
        values.extend((0..6).map(|_| self.wrap(i128::from(random.u64(..)))));
        values
    }

    /// All pairs of [`Type::edges`].
    pub(super) fn pairs(self) -> Vec<Vec<i128>> {
        let values = self.edges();
        values.iter().flat_map(|&a| values.iter().map(move |&b| vec![a, b])).collect()
    }

    /// All pairs, each combined with a few third values.
    pub(super) fn triples(self) -> Vec<Vec<i128>> {
        let third = [0, 1, self.max(), self.min(), 12345 & self.max()];
        let pairs = self.pairs();
        let triple = |(at, pair): (usize, &Vec<i128>)| vec![pair[0], pair[1], third[at % third.len()]];
        pairs.iter().enumerate().map(triple).collect()
    }
}

/// Test of the harness: it detects a handler that ignores the mask.
#[test]
#[should_panic(expected = "masked off")]
fn a_handler_that_writes_inactive_lanes_fails() {
    let copy = Action::Compute(|r, a, _| r.map1(a, u32::MAX, |x: u32| x));
    let rows = vec![row("copy", &[Operand::Out(Value::B32), Operand::In(Value::B32)], Category::Move, 0, copy)];
    Harness::new(Family { title: "", rows, hints: vec![] }).check("copy", &[(&[1], &[1])]);
}

/// Test of the harness: it detects a handler that writes a destination before it has read all sources.
#[test]
#[should_panic(expected = "InPlace")]
fn a_handler_that_writes_before_reading_all_sources_fails() {
    let split = Action::Compute(|r, a, m| {
        let low = r.get::<u32>(a.s[2]).map(|x| x & 0xffff);
        r.set(a.s[0], &low, m);
        let high = r.get::<u32>(a.s[2]).map(|x| x >> 16);
        r.set(a.s[1], &high, m);
    });
    let operands = [Operand::Out(Value::B32), Operand::Out(Value::B32), Operand::In(Value::B32)];
    let rows = vec![row("split", &operands, Category::Move, 0, split)];
    Harness::new(Family { title: "", rows, hints: vec![] }).check("split", &[(&[0x2_0001], &[1, 2])]);
}

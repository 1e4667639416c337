//! `setp` of floating-point values (PTX ISA, "Comparison and Selection Instructions").

use std::marker::PhantomData;

use super::compare::{COMPARISON_SHIFT, setp, setp_rows};
use super::vector::{Host, Kernel};
use super::{Family, Row, Value};
use crate::exec_context::{LANES, Lane, Lanes, Registers};
use crate::numeric::{Comparison, compare, single};
use crate::operands::Args;

pub(crate) fn family() -> Family {
    Family { title: "Floating-point comparison", rows: rows(Host::detect()), hints: vec![] }
}

/// Comparison operators. Their index is the comparison's part of the row's constant.
const COMPARISONS: [(&str, Comparison); 14] = [
    ("eq", Comparison::Eq),
    ("ne", Comparison::Ne),
    ("lt", Comparison::Lt),
    ("le", Comparison::Le),
    ("gt", Comparison::Gt),
    ("ge", Comparison::Ge),
    ("equ", Comparison::Equ),
    ("neu", Comparison::Neu),
    ("ltu", Comparison::Ltu),
    ("leu", Comparison::Leu),
    ("gtu", Comparison::Gtu),
    ("geu", Comparison::Geu),
    ("num", Comparison::Num),
    ("nan", Comparison::Nan),
];

pub(crate) fn rows(host: Host) -> Vec<Row> {
    let mut rows = Vec::new();
    comparisons::<Single<false>>(&mut rows, host);
    comparisons::<Single<true>>(&mut rows, host);
    comparisons::<Double>(&mut rows, host);
    rows
}

/// A source type of comparisons.
trait Source {
    /// Type of the values.
    type T: Lane + PartialOrd;
    /// The type in opcodes, with `.ftz`.
    const NAME: &'static str;
    const VALUE: Value;
    fn read(bits: Self::T) -> Self::T;
}

struct Single<const FTZ: bool>;

impl<const FTZ: bool> Source for Single<FTZ> {
    type T = f32;
    const NAME: &'static str = if FTZ { ".ftz.f32" } else { ".f32" };
    const VALUE: Value = Value::F32;
    #[inline(always)]
    fn read(bits: f32) -> f32 {
        if FTZ { single::flush(bits) } else { bits }
    }
}

struct Double;

impl Source for Double {
    type T = f64;
    const NAME: &'static str = ".f64";
    const VALUE: Value = Value::F64;
    #[inline(always)]
    fn read(bits: f64) -> f64 {
        bits
    }
}

/// Lanes in which the comparison is true.
#[inline(always)]
fn test<S: Source>(op: usize, a: &Lanes<S::T>, b: &Lanes<S::T>) -> u32 {
    // One loop per comparison, so that the loops contain no branch.
    match op {
        0 => holds::<S, 0>(a, b),
        1 => holds::<S, 1>(a, b),
        2 => holds::<S, 2>(a, b),
        3 => holds::<S, 3>(a, b),
        4 => holds::<S, 4>(a, b),
        5 => holds::<S, 5>(a, b),
        6 => holds::<S, 6>(a, b),
        7 => holds::<S, 7>(a, b),
        8 => holds::<S, 8>(a, b),
        9 => holds::<S, 9>(a, b),
        10 => holds::<S, 10>(a, b),
        11 => holds::<S, 11>(a, b),
        12 => holds::<S, 12>(a, b),
        _ => holds::<S, 13>(a, b),
    }
}

#[inline(always)]
fn holds<S: Source, const OP: usize>(a: &Lanes<S::T>, b: &Lanes<S::T>) -> u32 {
    // First one word per lane, then a reduction to a mask: the compiler does not vectorise a single loop.
    let mut bits = [0; LANES];
    for lane in 0..LANES {
        bits[lane] = u32::from(compare(COMPARISONS[OP].1, S::read(a[lane]), S::read(b[lane]))) << lane;
    }
    bits.into_iter().fold(0, |all, bit| all | bit)
}

struct Setp<S>(PhantomData<S>);

impl<S: Source> Kernel for Setp<S> {
    #[inline(always)]
    fn run(r: &mut Registers, a: &Args, mask: u32) {
        let op = (a.k >> COMPARISON_SHIFT) as usize & 15;
        let test = test::<S>(op, &r.get(a.s[2]), &r.get(a.s[3]));
        setp(r, a, mask, test);
    }
}

fn comparisons<S: Source>(rows: &mut Vec<Row>, host: Host) {
    for (index, (op, _)) in COMPARISONS.iter().enumerate() {
        rows.extend(setp_rows(op, S::NAME, S::VALUE, index as u32, host.compute::<Setp<S>>()));
    }
}

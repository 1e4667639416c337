//! `setp` and `set` of floating-point values, scalar and packed (PTX ISA, "Comparison and Selection Instructions" and "Half
//! Precision Comparison Instructions"), and the forms of `set` that return a half-precision 1.0 for integer sources.

use std::marker::PhantomData;

use super::compare::{COMPARISON_SHIFT, OPERATORS, combine, set, set_rows, setp, setp_rows};
use super::vector::{Host, Kernel};
use super::{Category, Family, Operand, Row, Value, lanes, row};
use crate::bytecode::{Action, ComputeFn};
use crate::exec_context::{LANES, Lane, Lanes, Registers};
use crate::numeric::half::{Bf16, F16, Half, flush};
use crate::numeric::{Comparison, compare, single};
use crate::operands::{Args, Slot};

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
    scalars::<Single<false>>(&mut rows, host);
    scalars::<Single<true>>(&mut rows, host);
    scalars::<Double>(&mut rows, host);
    scalars::<Halves<F16, false>>(&mut rows, host);
    scalars::<Halves<F16, true>>(&mut rows, host);
    scalars::<Halves<Bf16, false>>(&mut rows, host);
    pairs::<Halves<F16, false>>(&mut rows);
    pairs::<Halves<F16, true>>(&mut rows);
    pairs::<Halves<Bf16, false>>(&mut rows);
    integers(&mut rows);
    rows
}

/// A source type of comparisons.
trait Source {
    /// Type of the register lanes; for packed pairs, of one element.
    type Bits: Lane;
    /// Type of the compared values.
    type T: PartialOrd + Copy;
    const NAME: &'static str;
    const VALUE: Value;
    const FTZ: &'static str;
    /// Result types of `set`, each with its value for "true".
    const RESULTS: &'static [Result16];
    fn read(bits: Self::Bits) -> Self::T;
}

/// A 16-bit result type of `set`, and its value for "true".
type Result16 = (&'static str, u16);

const F16_ONE: Result16 = ("f16", F16::ONE);
const BF16_ONE: Result16 = ("bf16", Bf16::ONE);
const INTEGERS: [Result16; 2] = [("u16", 0xffff), ("s16", 0xffff)];

struct Single<const FTZ: bool>;

impl<const FTZ: bool> Source for Single<FTZ> {
    type Bits = f32;
    type T = f32;
    const NAME: &'static str = "f32";
    const VALUE: Value = Value::F32;
    const FTZ: &'static str = if FTZ { ".ftz" } else { "" };
    const RESULTS: &'static [Result16] = if FTZ { &[F16_ONE] } else { &[F16_ONE, BF16_ONE] };
    #[inline(always)]
    fn read(bits: f32) -> f32 {
        if FTZ { single::flush(bits) } else { bits }
    }
}

struct Double;

impl Source for Double {
    type Bits = f64;
    type T = f64;
    const NAME: &'static str = "f64";
    const VALUE: Value = Value::F64;
    const FTZ: &'static str = "";
    const RESULTS: &'static [Result16] = &[F16_ONE, BF16_ONE];
    #[inline(always)]
    fn read(bits: f64) -> f64 {
        bits
    }
}

struct Halves<H, const FTZ: bool>(PhantomData<H>);

impl<H: Half + Named, const FTZ: bool> Source for Halves<H, FTZ> {
    type Bits = u16;
    type T = f32;
    const NAME: &'static str = H::NAME;
    const VALUE: Value = Value::B16;
    const FTZ: &'static str = if FTZ { ".ftz" } else { "" };
    const RESULTS: &'static [Result16] = if FTZ { H::RESULTS_FTZ } else { H::RESULTS };
    #[inline(always)]
    fn read(bits: u16) -> f32 {
        H::to_f32(if FTZ { flush::<H>(bits) } else { bits })
    }
}

/// Names of a half-precision type in opcodes.
trait Named {
    const NAME: &'static str;
    const RESULTS: &'static [Result16];
    const RESULTS_FTZ: &'static [Result16];
}

impl Named for F16 {
    const NAME: &'static str = "f16";
    const RESULTS: &'static [Result16] = &[F16_ONE, BF16_ONE, INTEGERS[0], INTEGERS[1]];
    const RESULTS_FTZ: &'static [Result16] = &[F16_ONE, INTEGERS[0], INTEGERS[1]];
}

impl Named for Bf16 {
    const NAME: &'static str = "bf16";
    const RESULTS: &'static [Result16] = &[BF16_ONE, INTEGERS[0], INTEGERS[1]];
    const RESULTS_FTZ: &'static [Result16] = &[];
}

/// The comparison of a row.
#[inline(always)]
fn comparison(a: &Args) -> usize {
    (a.k >> COMPARISON_SHIFT) as usize & 15
}

/// Lanes in which the comparison is true.
#[inline(always)]
fn test<S: Source>(op: usize, a: &Lanes<S::Bits>, b: &Lanes<S::Bits>) -> u32 {
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
fn holds<S: Source, const OP: usize>(a: &Lanes<S::Bits>, b: &Lanes<S::Bits>) -> u32 {
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
        let test = test::<S>(comparison(a), &r.get(a.s[2]), &r.get(a.s[3]));
        setp(r, a, mask, test);
    }
}

fn compared<S: Source>(r: &Registers, a: &Args) -> u32 {
    test::<S>(comparison(a), &r.get(a.s[1]), &r.get(a.s[2]))
}

/// First bit of a `set` row's constant that holds a 16-bit value for "true".
const TRUE: u32 = 16;

/// Last step of a `set` with a 16-bit result.
fn set16(r: &mut Registers, a: &Args, mask: u32, test: u32) {
    let test = combine(r, a, 3, test);
    let yes = (a.k >> TRUE) as u16;
    let result: Lanes<u16> = lanes(|lane| if test >> lane & 1 != 0 { yes } else { 0 });
    r.set(a.s[0], &result, mask);
}

/// The rows of `set` for one comparison, result and source, without and with each Boolean operator.
fn set_as(
    op: (usize, &str),
    ftz: &str,
    result: (&str, Value, u16),
    source: (&str, Value),
    action: ComputeFn,
) -> Vec<Row> {
    let make = |(index, operator): (usize, &&str)| {
        let operands = [Operand::Out(result.1), Operand::In(source.1), Operand::In(source.1), Operand::InPred];
        let operands = if index == 0 { &operands[..3] } else { &operands };
        let name = format!("set.{}{operator}{ftz}.{}.{}", op.1, result.0, source.0);
        let k = u32::from(result.2) << TRUE | (op.0 as u32) << COMPARISON_SHIFT | index as u32;
        row(name, operands, Category::Integer, k, Action::Compute(action))
    };
    OPERATORS.iter().enumerate().map(make).collect()
}

fn scalars<S: Source>(rows: &mut Vec<Row>, host: Host) {
    for (index, (op, _)) in COMPARISONS.iter().enumerate() {
        let suffix = format!("{}.{}", S::FTZ, S::NAME);
        rows.extend(setp_rows(op, &suffix, S::VALUE, index as u32, host.compute::<Setp<S>>()));
        let sets = set_rows(op, S::FTZ, (S::NAME, S::VALUE), index as u32, |r, a, m| {
            let test = compared::<S>(r, a);
            set(r, a, m, test);
        });
        // Half-precision sources have no `.f32` result.
        let float = |row: &Row| row.operands[0] == Operand::Out(Value::F32);
        rows.extend(sets.into_iter().filter(|row| S::VALUE != Value::B16 || !float(row)));
        for (name, yes) in S::RESULTS {
            let result = (*name, Value::B16, *yes);
            rows.extend(set_as((index, op), S::FTZ, result, (S::NAME, S::VALUE), |r, a, m| {
                let test = compared::<S>(r, a);
                set16(r, a, m, test);
            }));
        }
    }
}

/// Compares packed elements: lanes in which the comparison is true for the lower and for the upper element.
#[inline(always)]
fn test_pairs<S: Source<Bits = u16>>(r: &Registers, a: &Args, first: Slot, second: Slot) -> (u32, u32) {
    let (x, y): (Lanes<u32>, Lanes<u32>) = (r.get(first), r.get(second));
    let mut halves = [[0; LANES]; 4];
    for lane in 0..LANES {
        halves[0][lane] = x[lane] as u16;
        halves[1][lane] = y[lane] as u16;
        halves[2][lane] = (x[lane] >> 16) as u16;
        halves[3][lane] = (y[lane] >> 16) as u16;
    }
    let op = comparison(a);
    (test::<S>(op, &halves[0], &halves[1]), test::<S>(op, &halves[2], &halves[3]))
}

/// `p` is for the lower elements, `q` for the upper ones; both are combined with the predicate.
fn setp_pairs<S: Source<Bits = u16>>(r: &mut Registers, a: &Args, mask: u32) {
    let (low, high) = test_pairs::<S>(r, a, a.s[2], a.s[3]);
    let (p, q) = (combine(r, a, 4, low), combine(r, a, 4, high));
    r.set_pred(a.s[0], p, mask);
    r.set_pred(a.s[1], q, mask);
}

fn set_pairs<S: Source<Bits = u16>>(r: &mut Registers, a: &Args, mask: u32) {
    let (low, high) = test_pairs::<S>(r, a, a.s[1], a.s[2]);
    let (low, high) = (combine(r, a, 3, low), combine(r, a, 3, high));
    let yes = a.k >> TRUE;
    let element = |bits: u32, lane: usize| if bits >> lane & 1 != 0 { yes } else { 0 };
    let result: Lanes<u32> = lanes(|lane| element(high, lane) << 16 | element(low, lane));
    r.set(a.s[0], &result, mask);
}

fn pairs<S: Source<Bits = u16>>(rows: &mut Vec<Row>) {
    let packed = format!("{}x2", S::NAME);
    let one = S::RESULTS[0].1;
    for (index, (op, _)) in COMPARISONS.iter().enumerate() {
        let suffix = format!("{}.{packed}", S::FTZ);
        rows.extend(setp_rows(op, &suffix, Value::B32, index as u32, setp_pairs::<S>));
        for (name, yes) in [(&*packed, one), ("u32", 0xffff), ("s32", 0xffff)] {
            let result = (name, Value::B32, yes);
            rows.extend(set_as((index, op), S::FTZ, result, (&packed, Value::B32), set_pairs::<S>));
        }
    }
}

macro_rules! integers {
    ($rows:ident, [$($t:ident)*], $ops:tt) => { $(integers!(@ops $rows, $t, $ops);)* };
    (@ops $rows:ident, $t:ident, [$($op:literal $test:tt),*]) => { $(
        for (name, yes) in [F16_ONE, BF16_ONE] {
            let source = (stringify!($t), value!($t));
            $rows.extend(set_as((0, $op), "", (name, Value::B16, yes), source, |r, a, m| {
                let test = r.test2::<lane_type!($t)>(a.s[1], a.s[2], |x, y| x $test y);
                set16(r, a, m, test);
            }));
        }
    )* };
}

fn integers(rows: &mut Vec<Row>) {
    integers!(rows, [b16 b32 b64 u16 u32 u64 s16 s32 s64], ["eq" ==, "ne" !=]);
    integers!(rows, [u16 u32 u64 s16 s32 s64], ["lt" <, "le" <=, "gt" >, "ge" >=]);
    integers!(rows, [u16 u32 u64], ["lo" <, "ls" <=, "hi" >, "hs" >=]);
}

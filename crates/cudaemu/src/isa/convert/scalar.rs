//! `cvt` of single values. Sources may be narrower than their registers and destinations wider: integers are then
//! sign-extended, floats zero-extended.

use std::marker::PhantomData;

use super::super::vector::{Host, Kernel};
use super::super::{Category, Operand, Row, Value, row};
use super::{FTZ, ROUNDINGS, SAT, modifiers};
use crate::bytecode::Action;
use crate::exec_context::{LANES, Lane, Lanes, Registers};
use crate::numeric::convert::{FloatCvt, float_to_float, float_to_int, float_to_integral, int_to_float, int_to_int};
use crate::numeric::{FloatType, IntRounding, IntType, Rounding};
use crate::operands::{Args, Class, Slot};

/// A type of `cvt`.
trait Scalar {
    /// Lane type of a register with the type's width (for 8-bit types: of the narrowest register).
    type Bits: Lane;
    const NAME: &'static str;
    const VALUE: Value;
    const CLASS: Class;
    fn narrow(bits: u64) -> Self::Bits;
    fn widen(bits: Self::Bits) -> u64;
    /// The value extended to a 64-bit register.
    fn extend(bits: u64) -> u64;
}

trait Integer: Scalar {
    const TYPE: IntType;
}

trait Float: Scalar {
    const TYPE: FloatType;
}

macro_rules! types {
    ($($kind:ident $name:ident $text:literal $bits:ident $class:ident;)*) => { $(
        struct $name;
        impl Scalar for $name {
            type Bits = $bits;
            const NAME: &'static str = $text;
            const VALUE: Value = Value::$class;
            const CLASS: Class = Class::$class;
            #[inline(always)]
            fn narrow(bits: u64) -> $bits {
                bits as $bits
            }
            #[inline(always)]
            fn widen(bits: $bits) -> u64 {
                u64::from(bits)
            }
            #[inline(always)]
            fn extend(bits: u64) -> u64 {
                types!(@extend $kind $name bits)
            }
        }
        types!(@kind $kind $name);
    )* };
    (@extend Integer $name:ident $bits:ident) => { IntType::$name.extend($bits) };
    (@extend Float $name:ident $bits:ident) => { $bits };
    (@kind Integer $name:ident) => {
        impl Integer for $name {
            const TYPE: IntType = IntType::$name;
        }
    };
    (@kind Float $name:ident) => {
        impl Float for $name {
            const TYPE: FloatType = FloatType::$name;
        }
    };
}

types! {
    Integer U8 "u8" u16 B16;
    Integer S8 "s8" u16 B16;
    Integer U16 "u16" u16 B16;
    Integer S16 "s16" u16 B16;
    Integer U32 "u32" u32 B32;
    Integer S32 "s32" u32 B32;
    Integer U64 "u64" u64 B64;
    Integer S64 "s64" u64 B64;
    Float F16 "f16" u16 B16;
    Float Bf16 "bf16" u16 B16;
    Float F32 "f32" u32 B32;
    Float F64 "f64" u64 B64;
}

/// A conversion between two types.
trait Conversion {
    type Mode: Copy + PartialEq;
    /// The modes that are common in inner loops: each gets a loop compiled for it.
    const FAST: [Self::Mode; 2];
    fn mode(k: u32) -> Self::Mode;
    /// Converts source bits to destination bits; bits above the types' widths are arbitrary.
    fn apply(bits: u64, mode: Self::Mode) -> u64;
}

struct Convert<S, D, C>(PhantomData<(S, D, C)>);

impl<S: Scalar, D: Scalar, C: Conversion> Kernel for Convert<S, D, C> {
    #[inline(always)]
    fn run(r: &mut Registers, args: &Args, mask: u32) {
        let a = read::<S>(r, args.s[1]);
        let mode = C::mode(args.k);
        let d = if mode == C::FAST[0] {
            lanes::<S, D, C>(&a, C::FAST[0])
        } else if mode == C::FAST[1] {
            lanes::<S, D, C>(&a, C::FAST[1])
        } else {
            lanes::<S, D, C>(&a, mode)
        };
        write::<D>(r, args.s[0], &d, mask);
    }
}

#[inline(always)]
fn lanes<S: Scalar, D: Scalar, C: Conversion>(a: &Lanes<S::Bits>, mode: C::Mode) -> Lanes<D::Bits> {
    let mut d = [D::Bits::default(); LANES];
    for lane in 0..LANES {
        d[lane] = D::narrow(C::apply(S::widen(a[lane]), mode));
    }
    d
}

#[inline(always)]
fn read<S: Scalar>(r: &Registers, slot: Slot) -> Lanes<S::Bits> {
    if slot.class() == S::CLASS { r.get(slot) } else { r.get_any(slot).map(S::narrow) }
}

#[inline(always)]
fn write<D: Scalar>(r: &mut Registers, slot: Slot, values: &Lanes<D::Bits>, mask: u32) {
    if slot.class() == D::CLASS {
        r.set(slot, values, mask);
    } else {
        r.set_any(slot, &values.map(|value| D::extend(D::widen(value))), mask);
    }
}

struct IntToInt<S, D>(PhantomData<(S, D)>);

impl<S: Integer, D: Integer> Conversion for IntToInt<S, D> {
    type Mode = bool;
    const FAST: [bool; 2] = [false, true];
    #[inline(always)]
    fn mode(k: u32) -> bool {
        k & SAT != 0
    }
    #[inline(always)]
    fn apply(bits: u64, sat: bool) -> u64 {
        int_to_int(bits, S::TYPE, D::TYPE, sat)
    }
}

struct IntToFloat<S, D>(PhantomData<(S, D)>);

impl<S: Integer, D: Float> Conversion for IntToFloat<S, D> {
    type Mode = (Rounding, bool);
    const FAST: [(Rounding, bool); 2] = [(Rounding::Rn, false), (Rounding::Rn, true)];
    #[inline(always)]
    fn mode(k: u32) -> (Rounding, bool) {
        // Integers convert to no subnormals, so `.ftz` has no effect.
        (modifiers(k).round, k & SAT != 0)
    }
    #[inline(always)]
    fn apply(bits: u64, (round, sat): (Rounding, bool)) -> u64 {
        int_to_float(bits, S::TYPE, D::TYPE, round, sat)
    }
}

struct FloatToInt<S, D>(PhantomData<(S, D)>);

impl<S: Float, D: Integer> Conversion for FloatToInt<S, D> {
    type Mode = (IntRounding, bool);
    const FAST: [(IntRounding, bool); 2] = [(IntRounding::Rni, false), (IntRounding::Rzi, false)];
    #[inline(always)]
    fn mode(k: u32) -> (IntRounding, bool) {
        // Saturates with and without `.sat`.
        (INT_ROUNDINGS[(k & 3) as usize].1, k & FTZ != 0)
    }
    #[inline(always)]
    fn apply(bits: u64, (round, ftz): (IntRounding, bool)) -> u64 {
        float_to_int(bits, S::TYPE, D::TYPE, round, ftz)
    }
}

struct FloatToFloat<S, D>(PhantomData<(S, D)>);

impl<S: Float, D: Float> Conversion for FloatToFloat<S, D> {
    type Mode = FloatCvt;
    const FAST: [FloatCvt; 2] = [FloatCvt::RN, FloatCvt { ftz: true, ..FloatCvt::RN }];
    #[inline(always)]
    fn mode(k: u32) -> FloatCvt {
        modifiers(k)
    }
    #[inline(always)]
    fn apply(bits: u64, cvt: FloatCvt) -> u64 {
        float_to_float(bits, S::TYPE, D::TYPE, cvt)
    }
}

/// Rounds to an integral value of the same type.
struct ToIntegral<T>(PhantomData<T>);

impl<T: Float> Conversion for ToIntegral<T> {
    type Mode = (IntRounding, bool, bool);
    const FAST: [(IntRounding, bool, bool); 2] = [(IntRounding::Rni, false, false), (IntRounding::Rzi, false, false)];
    #[inline(always)]
    fn mode(k: u32) -> (IntRounding, bool, bool) {
        (INT_ROUNDINGS[(k & 3) as usize].1, k & FTZ != 0, k & SAT != 0)
    }
    #[inline(always)]
    fn apply(bits: u64, (round, ftz, sat): (IntRounding, bool, bool)) -> u64 {
        float_to_integral(bits, T::TYPE, round, ftz, sat)
    }
}

/// Integer roundings; the index is in the low bits of a row's constant.
const INT_ROUNDINGS: [(&str, IntRounding); 4] =
    [(".rni", IntRounding::Rni), (".rzi", IntRounding::Rzi), (".rmi", IntRounding::Rmi), (".rpi", IntRounding::Rpi)];

/// Calls a function for each pair of types.
macro_rules! pairs {
    ($f:ident($rows:ident, $host:ident): [$($s:ident)*] to $d:tt) => { $(pairs!(@one $f $rows $host $s $d);)* };
    (@one $f:ident $rows:ident $host:ident $s:ident [$($d:ident)*]) => { $($f::<$s, $d>($rows, $host);)* };
}

pub(super) fn rows(rows: &mut Vec<Row>, host: Host) {
    pairs!(ints(rows, host): [U8 S8 U16 S16 U32 S32 U64 S64] to [U8 S8 U16 S16 U32 S32 U64 S64]);
    pairs!(ints_to_floats(rows, host): [U8 S8 U16 S16 U32 S32 U64 S64] to [F16 Bf16 F32 F64]);
    pairs!(floats_to_ints(rows, host): [F16 Bf16 F32 F64] to [U8 S8 U16 S16 U32 S32 U64 S64]);
    pairs!(floats(rows, host): [F16 Bf16 F32 F64] to [F16 Bf16 F32 F64]);
    integral::<F16>(rows, host);
    integral::<Bf16>(rows, host);
    integral::<F32>(rows, host);
    integral::<F64>(rows, host);
}

fn push<S: Scalar, D: Scalar>(rows: &mut Vec<Row>, modifiers: &str, k: u32, action: &Action) {
    let name = format!("cvt{modifiers}.{}.{}", D::NAME, S::NAME);
    let operands = [Operand::OutWide(D::VALUE), Operand::InWide(S::VALUE)];
    rows.push(row(name, &operands, Category::Convert, k, action.clone()));
}

fn ints<S: Integer, D: Integer>(rows: &mut Vec<Row>, host: Host) {
    let action = Action::Compute(host.compute::<Convert<S, D, IntToInt<S, D>>>());
    push::<S, D>(rows, "", 0, &action);
    // `.sat` only exists for destinations that cannot hold all values of the source.
    if S::TYPE.min() < D::TYPE.min() || S::TYPE.max() > D::TYPE.max() {
        push::<S, D>(rows, ".sat", SAT, &action);
    }
}

/// The allowed combinations of `{.ftz}{.sat}` and their bits.
fn clamps(ftz: bool, sat: bool) -> Vec<(&'static str, u32)> {
    let mut all = vec![("", 0)];
    if ftz {
        all.push((".ftz", FTZ));
    }
    if sat {
        all.push((".sat", SAT));
    }
    if ftz && sat {
        all.push((".ftz.sat", FTZ | SAT));
    }
    all
}

fn ints_to_floats<S: Integer, D: Float>(rows: &mut Vec<Row>, host: Host) {
    let action = Action::Compute(host.compute::<Convert<S, D, IntToFloat<S, D>>>());
    for (index, (round, _)) in ROUNDINGS.iter().enumerate().take(5).skip(1) {
        for (clamp, k) in clamps(D::TYPE == FloatType::F32, D::TYPE != FloatType::Bf16) {
            push::<S, D>(rows, &format!("{round}{clamp}"), k | index as u32, &action);
        }
    }
}

fn floats_to_ints<S: Float, D: Integer>(rows: &mut Vec<Row>, host: Host) {
    let action = Action::Compute(host.compute::<Convert<S, D, FloatToInt<S, D>>>());
    for (index, (round, _)) in INT_ROUNDINGS.iter().enumerate() {
        for (clamp, k) in clamps(S::TYPE == FloatType::F32, S::TYPE != FloatType::Bf16) {
            push::<S, D>(rows, &format!("{round}{clamp}"), k | index as u32, &action);
        }
    }
}

fn integral<T: Float>(rows: &mut Vec<Row>, host: Host) {
    let action = Action::Compute(host.compute::<Convert<T, T, ToIntegral<T>>>());
    for (index, (round, _)) in INT_ROUNDINGS.iter().enumerate() {
        for (clamp, k) in clamps(T::TYPE == FloatType::F32, T::TYPE != FloatType::Bf16) {
            push::<T, T>(rows, &format!("{round}{clamp}"), k | index as u32, &action);
        }
    }
}

fn floats<S: Float, D: Float>(rows: &mut Vec<Row>, host: Host) {
    use FloatType::{Bf16, F16, F32, F64};
    let action = Action::Compute(host.compute::<Convert<S, D, FloatToFloat<S, D>>>());
    let (from, to) = (S::TYPE, D::TYPE);
    let exact = from == to || matches!((from, to), (F16 | Bf16, F32 | F64) | (F32, F64));
    // Between `.bf16` and wider types a rounding modifier is allowed although nothing is rounded.
    let rounded = !exact || (from == Bf16 && to != Bf16);
    let clamps = clamps(from == F32 || to == F32, from != Bf16 && to != Bf16);
    for (index, (round, _)) in ROUNDINGS.iter().enumerate().take(5) {
        if if index == 0 { exact } else { rounded } {
            for (clamp, k) in &clamps {
                push::<S, D>(rows, &format!("{round}{clamp}"), k | index as u32, &action);
            }
        }
    }
}

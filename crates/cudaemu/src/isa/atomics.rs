//! `atom` and `red`: atomic read-modify-write (PTX ISA, "Parallel Synchronization and Communication Instructions").
//!
//! Every atomic is visible to all threads immediately, so memory semantics and scopes have no effect.

use super::memory::{CACHE_POLICY, ORDERING_HINTS, encode, window};
use super::{Category, Family, Operand, Row, Value, row};
use crate::bytecode::{AccessFn, Action};
use crate::exec_context::{Addresses, ExecContext, Lane, Lanes, StateSpace, window as generic};
use crate::fault::Fault;
use crate::numeric::half::{self, Bf16, F16, Half};
use crate::numeric::{HalfMode, MinMax, Mode, Rounding, double, single};
use crate::operands::{Args, Slot};

/// Bit of a row's constant: `red`, which has no destination.
const RED: u32 = 8;

/// State spaces of scalar atomics. Vector atomics ([`vectors`]) only access global memory.
const SPACES: [(&str, StateSpace); 5] = [
    ("", StateSpace::Generic),
    (".global", StateSpace::Global),
    (".shared", StateSpace::Shared),
    (".shared::cta", StateSpace::Shared),
    (".shared::cluster", StateSpace::Shared),
];

/// A type with atomic updates in memory.
trait Word: Lane {
    /// Replaces each lane's word by `change(lane, old)` and returns the old values.
    fn update(
        cx: &mut ExecContext<'_>,
        window: StateSpace,
        at: &Addresses,
        mask: u32,
        change: impl Fn(usize, Self) -> Self,
    ) -> Result<Lanes<Self>, Box<Fault>>;
}

macro_rules! word {
    ($($ty:ty),+) => { $(
        impl Word for $ty {
            fn update(
                cx: &mut ExecContext<'_>,
                window: StateSpace,
                at: &Addresses,
                mask: u32,
                change: impl Fn(usize, Self) -> Self,
            ) -> Result<Lanes<Self>, Box<Fault>> {
                let mut bytes = |lane: usize, old| change(lane, Self::from_le_bytes(old)).to_le_bytes();
                Ok(cx.update(window, at, mask, &mut bytes)?.map(Self::from_le_bytes))
            }
        }
    )+ };
}

word!(u16, u32, i32, u64, i64, u128, f32, f64);

/// The source operands: the slots after the destination, if there is one.
fn sources(args: &Args) -> (Slot, &[Slot]) {
    let slots = if args.all.is_empty() { &args.s[..] } else { &args.all };
    if args.k & RED != 0 { (Slot::NONE, slots) } else { (slots[0], &slots[1..]) }
}

/// `old → change(old, b)`; the result is the old value.
fn modify<T: Word>(
    cx: &mut ExecContext<'_>,
    args: &Args,
    mask: u32,
    change: impl Fn(T, T) -> T,
) -> Result<(), Box<Fault>> {
    let at = cx.addresses(args);
    let (target, from) = sources(args);
    let b = cx.regs.get::<T>(from[0]);
    let old = T::update(cx, window(args), &at, mask, |lane, old| change(old, b[lane]))?;
    cx.regs.set(target, &old, mask);
    Ok(())
}

/// `old → c` if `old` equals `b`; the result is the old value.
fn compare_and_swap<T: Word + PartialEq>(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    let at = cx.addresses(args);
    let (target, from) = sources(args);
    let (b, c) = (cx.regs.get::<T>(from[0]), cx.regs.get::<T>(from[1]));
    let old = T::update(cx, window(args), &at, mask, |lane, old| if old == b[lane] { c[lane] } else { old })?;
    cx.regs.set(target, &old, mask);
    Ok(())
}

/// Whether an address is in shared memory, whose f32 adder keeps subnormals; the adder of global memory flushes them.
fn keeps_subnormals(window: StateSpace, address: u64) -> bool {
    match window {
        StateSpace::Shared => true,
        StateSpace::Generic => address.wrapping_sub(generic::SHARED) < generic::BYTES,
        _ => false,
    }
}

fn add_f32(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    let at = cx.addresses(args);
    let (target, from) = sources(args);
    let (b, window) = (cx.regs.get::<f32>(from[0]), window(args));
    let add = |lane: usize, old| {
        let mode = if keeps_subnormals(window, at[lane]) { Mode::RN } else { Mode::RN_FTZ };
        single::add(old, b[lane], mode)
    };
    let old = f32::update(cx, window, &at, mask, add)?;
    cx.regs.set(target, &old, mask);
    Ok(())
}

/// `inc`: counts from 0 to the bound and wraps to 0.
fn increment(old: u32, bound: u32) -> u32 {
    if old >= bound { 0 } else { old + 1 }
}

/// `dec`: counts from the bound down to 0 and wraps to the bound.
fn decrement(old: u32, bound: u32) -> u32 {
    if old == 0 || old > bound { bound } else { old - 1 }
}

/// An operation on two `.f16` or `.bf16` values, as bits.
type HalfOp = fn(u16, u16) -> u16;

fn half_add<H: Half>(a: u16, b: u16) -> u16 {
    half::add::<H>(a, b, HalfMode::PLAIN)
}

fn half_min<H: Half>(a: u16, b: u16) -> u16 {
    half::min::<H>(a, b, MinMax::PLAIN)
}

fn half_max<H: Half>(a: u16, b: u16) -> u16 {
    half::max::<H>(a, b, MinMax::PLAIN)
}

/// Applies an operation to both halves of a pair.
fn pair(a: u32, b: u32, op: HalfOp) -> u32 {
    u32::from(op(a as u16, b as u16)) | u32::from(op((a >> 16) as u16, (b >> 16) as u16)) << 16
}

/// Scalar operations: opcode, type, handler, and whether `red` has the operation too.
fn scalars() -> Vec<(&'static str, Value, AccessFn, bool)> {
    use Value::{B16, B32, B64, B128, F32, F64};
    let mut list: Vec<(&'static str, Value, AccessFn, bool)> = vec![
        ("exch.b32", B32, |cx, a, m| modify(cx, a, m, |_, b: u32| b), false),
        ("exch.b64", B64, |cx, a, m| modify(cx, a, m, |_, b: u64| b), false),
        ("exch.b128", B128, |cx, a, m| modify(cx, a, m, |_, b: u128| b), false),
        ("cas.b16", B16, compare_and_swap::<u16>, false),
        ("cas.b32", B32, compare_and_swap::<u32>, false),
        ("cas.b64", B64, compare_and_swap::<u64>, false),
        ("cas.b128", B128, compare_and_swap::<u128>, false),
        ("inc.u32", B32, |cx, a, m| modify(cx, a, m, increment), true),
        ("dec.u32", B32, |cx, a, m| modify(cx, a, m, decrement), true),
        ("add.f32", F32, add_f32, true),
        ("add.f64", F64, |cx, a, m| modify(cx, a, m, |x, y| double::add(x, y, Rounding::Rn)), true),
        ("add.noftz.f16", B16, |cx, a, m| modify(cx, a, m, half_add::<F16>), true),
        ("add.noftz.bf16", B16, |cx, a, m| modify(cx, a, m, half_add::<Bf16>), true),
        ("add.noftz.f16x2", B32, |cx, a, m| modify(cx, a, m, |x, y| pair(x, y, half_add::<F16>)), true),
        ("add.noftz.bf16x2", B32, |cx, a, m| modify(cx, a, m, |x, y| pair(x, y, half_add::<Bf16>)), true),
    ];
    macro_rules! integers {
        ($($name:literal, $value:expr, $ty:ty, $f:expr;)+) => {
            $( list.push(($name, $value, |cx, a, m| modify::<$ty>(cx, a, m, $f), true)); )+
        };
    }
    integers! {
        "add.u32", B32, u32, u32::wrapping_add;
        "add.s32", B32, u32, u32::wrapping_add;
        "add.u64", B64, u64, u64::wrapping_add;
        "min.u32", B32, u32, u32::min;
        "min.s32", B32, i32, i32::min;
        "min.u64", B64, u64, u64::min;
        "min.s64", B64, i64, i64::min;
        "max.u32", B32, u32, u32::max;
        "max.s32", B32, i32, i32::max;
        "max.u64", B64, u64, u64::max;
        "max.s64", B64, i64, i64::max;
        "and.b32", B32, u32, |x, y| x & y;
        "and.b64", B64, u64, |x, y| x & y;
        "or.b32", B32, u32, |x, y| x | y;
        "or.b64", B64, u64, |x, y| x | y;
        "xor.b32", B32, u32, |x, y| x ^ y;
        "xor.b64", B64, u64, |x, y| x ^ y;
    }
    list
}

/// `.v2`, `.v4` and `.v8`: one operation per element. `N` bytes in elements of `E` bytes.
fn vector<const N: usize, const E: usize>(
    cx: &mut ExecContext<'_>,
    args: &Args,
    mask: u32,
    change: impl Fn(u32, u32) -> u32,
) -> Result<(), Box<Fault>> {
    let at = cx.addresses(args);
    let count = N / E;
    let slots = if args.all.is_empty() { &args.s[..] } else { &args.all };
    let (targets, from) = if args.k & RED != 0 { (&[][..], slots) } else { slots.split_at(count) };
    let b: [Lanes<u64>; 8] =
        std::array::from_fn(|index| if index < count { cx.regs.get_any(from[index]) } else { [0; 32] });
    let read = |bytes: &[u8]| bytes.iter().rev().fold(0, |value, &byte| value << 8 | u32::from(byte));
    let mut update = |lane: usize, old: [u8; N]| {
        let mut new = old;
        for (index, element) in new.chunks_exact_mut(E).enumerate() {
            let value = change(read(element), b[index][lane] as u32);
            element.copy_from_slice(&value.to_le_bytes()[..E]);
        }
        new
    };
    let old = cx.update::<N>(window(args), &at, mask, &mut update)?;
    for (index, &slot) in targets.iter().enumerate() {
        let values = old.map(|bytes| u64::from(read(&bytes[index * E..(index + 1) * E])));
        cx.regs.set_any(slot, &values, mask);
    }
    Ok(())
}

/// An operation on a 16-bit value in a wider integer.
fn single_half(op: HalfOp) -> impl Fn(u32, u32) -> u32 {
    move |a, b| u32::from(op(a as u16, b as u16))
}

/// The f32 adder of global memory, on bits: flushes subnormals.
fn add_f32_bits(a: u32, b: u32) -> u32 {
    single::add(f32::from_bits(a), f32::from_bits(b), Mode::RN_FTZ).to_bits()
}

/// A vector operation: opcode, suffix, type name, element type, count, handler.
type VectorOp = (&'static str, &'static str, &'static str, Value, u8, AccessFn);

fn vectors() -> Vec<VectorOp> {
    let mut list: Vec<VectorOp> = vec![
        ("add", "", "f32", Value::F32, 2, |cx, a, m| vector::<8, 4>(cx, a, m, add_f32_bits)),
        ("add", "", "f32", Value::F32, 4, |cx, a, m| vector::<16, 4>(cx, a, m, add_f32_bits)),
    ];
    macro_rules! halves {
        ($($name:literal, $op:ident, $ty:ty, $one:literal, $two:literal;)+) => { $(
            list.push(($name, ".noftz", $one, Value::B16, 2, |cx, a, m| vector::<4, 2>(cx, a, m, single_half($op::<$ty>))));
            list.push(($name, ".noftz", $one, Value::B16, 4, |cx, a, m| vector::<8, 2>(cx, a, m, single_half($op::<$ty>))));
            list.push(($name, ".noftz", $one, Value::B16, 8, |cx, a, m| vector::<16, 2>(cx, a, m, single_half($op::<$ty>))));
            list.push(($name, ".noftz", $two, Value::B32, 2, |cx, a, m| vector::<8, 4>(cx, a, m, |x, y| pair(x, y, $op::<$ty>))));
            list.push(($name, ".noftz", $two, Value::B32, 4, |cx, a, m| vector::<16, 4>(cx, a, m, |x, y| pair(x, y, $op::<$ty>))));
        )+ };
    }
    halves! {
        "add", half_add, F16, "f16", "f16x2";
        "min", half_min, F16, "f16", "f16x2";
        "max", half_max, F16, "f16", "f16x2";
        "add", half_add, Bf16, "bf16", "bf16x2";
        "min", half_min, Bf16, "bf16", "bf16x2";
        "max", half_max, Bf16, "bf16", "bf16x2";
    }
    list
}

pub(crate) fn family() -> Family {
    let mut rows = Vec::new();
    for (space, window) in SPACES {
        let k = encode(window);
        for (name, value, action, reduces) in scalars() {
            let mut operands = vec![Operand::Out(value), Operand::Address, Operand::In(value)];
            if name.starts_with("cas") {
                operands.push(Operand::In(value));
            } else if window != StateSpace::Shared {
                operands.push(CACHE_POLICY);
            }
            let action = Action::Access(action);
            if reduces {
                rows.push(row(format!("red{space}.{name}"), &operands[1..], Category::Atomic, k | RED, action.clone()));
            }
            rows.push(row(format!("atom{space}.{name}"), &operands, Category::Atomic, k, action));
        }
    }
    for (space, window) in &SPACES[..2] {
        for (op, rest, ty, value, count, action) in vectors() {
            // The vector size stands before or after the operation or the type; the manual has examples of all three.
            for name in [
                format!("{space}.{op}{rest}.v{count}.{ty}"),
                format!("{space}.v{count}.{op}{rest}.{ty}"),
                format!("{space}.v{count}.{ty}.{op}{rest}"),
            ] {
                vector_rows(&name, value, count, encode(*window), action, &mut rows);
            }
        }
    }
    Family { title: "Atomics", rows, hints: vec![("atom", &ORDERING_HINTS), ("red", &ORDERING_HINTS)] }
}

fn vector_rows(name: &str, value: Value, count: u8, k: u32, action: AccessFn, rows: &mut Vec<Row>) {
    let operands = [Operand::OutVector(count, value), Operand::Address, Operand::InVector(count, value), CACHE_POLICY];
    let action = Action::Access(action);
    rows.push(row(format!("red{name}"), &operands[1..], Category::Atomic, k | RED, action.clone()));
    rows.push(row(format!("atom{name}"), &operands, Category::Atomic, k, action));
}

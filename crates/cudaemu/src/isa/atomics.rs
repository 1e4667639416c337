//! `atom` and `red`: atomic read-modify-write (PTX ISA, "Parallel Synchronization and Communication Instructions").
//!
//! Every atomic is visible to all threads immediately, so memory semantics and scopes have no effect.

use super::memory::{CACHE_POLICY, ORDERING_HINTS, encode, window};
use super::{Category, Family, Operand, Value, row};
use crate::bytecode::{AccessFn, Action};
use crate::exec_context::{Addresses, ExecContext, Lane, Lanes, StateSpace, window as generic};
use crate::fault::Fault;
use crate::numeric::{Mode, Rounding, double, single};
use crate::operands::{Args, Slot};

/// Bit of a row's constant: `red`, which has no destination.
const RED: u32 = 8;

/// State spaces.
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

word!(u32, i32, u64, i64, f32, f64);

/// The source operands: the slots after the destination, if there is one.
fn sources(args: &Args) -> (Slot, &[Slot]) {
    let slots = &args.s[..];
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

/// Operations: opcode, type, handler, and whether `red` has the operation too.
fn operations() -> Vec<(&'static str, Value, AccessFn, bool)> {
    use Value::{B32, B64, F32, F64};
    let mut list: Vec<(&'static str, Value, AccessFn, bool)> = vec![
        ("exch.b32", B32, |cx, a, m| modify(cx, a, m, |_, b: u32| b), false),
        ("exch.b64", B64, |cx, a, m| modify(cx, a, m, |_, b: u64| b), false),
        ("cas.b32", B32, compare_and_swap::<u32>, false),
        ("cas.b64", B64, compare_and_swap::<u64>, false),
        ("inc.u32", B32, |cx, a, m| modify(cx, a, m, increment), true),
        ("dec.u32", B32, |cx, a, m| modify(cx, a, m, decrement), true),
        ("add.f32", F32, add_f32, true),
        ("add.f64", F64, |cx, a, m| modify(cx, a, m, |x, y| double::add(x, y, Rounding::Rn)), true),
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

pub(crate) fn family() -> Family {
    let mut rows = Vec::new();
    for (space, window) in SPACES {
        let k = encode(window);
        for (name, value, action, reduces) in operations() {
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
    Family { title: "Atomics", rows, hints: vec![("atom", &ORDERING_HINTS), ("red", &ORDERING_HINTS)] }
}

//! Extended-precision arithmetic: additions, subtractions and products that read or write the carry flag (PTX ISA,
//! "Extended-Precision Integer Arithmetic Instructions"). The flag is one bit per thread; a subtraction stores its borrow in
//! it.

use super::{Category, Family, Operand, Value, lanes, row};
use crate::bytecode::Action;
use crate::exec_context::{LANES, Lane, Lanes, Registers};
use crate::numeric::integer::{Integer as _, add_carry_u32, add_carry_u64, sub_borrow_u32, sub_borrow_u64};
use crate::operands::Args;

/// Bits of a row's constant: whether it reads and whether it writes the flag.
const READS: u32 = 1;
const WRITES: u32 = 2;

pub(crate) fn family() -> Family {
    let mut rows = Vec::new();
    let mut add = |name: String, value: Value, sources: usize, k: u32, action: Action| {
        let operands = [Operand::Out(value), Operand::In(value), Operand::In(value), Operand::In(value)];
        rows.push(row(name, &operands[..=sources], Category::Integer, k, action));
    };
    for (carry, cc, k) in [("", ".cc", WRITES), ("c", "", READS), ("c", ".cc", READS | WRITES)] {
        // Signed types too use the carry of the unsigned sum.
        for (ty, signed) in [("u32", false), ("s32", true)] {
            let value = Value::B32;
            add(format!("add{carry}{cc}.{ty}"), value, 2, k, Action::Compute(|r, a, m| sum(r, a, m, add_carry_u32)));
            add(format!("sub{carry}{cc}.{ty}"), value, 2, k, Action::Compute(|r, a, m| sum(r, a, m, sub_borrow_u32)));
            let high: fn(&mut Registers, &Args, u32) = if signed {
                |r, a, m| product(r, a, m, |x: u32, y| (x as i32).mul_hi(y as i32) as u32, add_carry_u32)
            } else {
                |r, a, m| product(r, a, m, |x: u32, y| x.mul_hi(y), add_carry_u32)
            };
            add(format!("mad{carry}.hi{cc}.{ty}"), value, 3, k, Action::Compute(high));
            let low: fn(&mut Registers, &Args, u32) = |r, a, m| product(r, a, m, u32::wrapping_mul, add_carry_u32);
            add(format!("mad{carry}.lo{cc}.{ty}"), value, 3, k, Action::Compute(low));
        }
        for (ty, signed) in [("u64", false), ("s64", true)] {
            let value = Value::B64;
            add(format!("add{carry}{cc}.{ty}"), value, 2, k, Action::Compute(|r, a, m| sum(r, a, m, add_carry_u64)));
            add(format!("sub{carry}{cc}.{ty}"), value, 2, k, Action::Compute(|r, a, m| sum(r, a, m, sub_borrow_u64)));
            let high: fn(&mut Registers, &Args, u32) = if signed {
                |r, a, m| product(r, a, m, |x: u64, y| (x as i64).mul_hi(y as i64) as u64, add_carry_u64)
            } else {
                |r, a, m| product(r, a, m, |x: u64, y| x.mul_hi(y), add_carry_u64)
            };
            add(format!("mad{carry}.hi{cc}.{ty}"), value, 3, k, Action::Compute(high));
            let low: fn(&mut Registers, &Args, u32) = |r, a, m| product(r, a, m, u64::wrapping_mul, add_carry_u64);
            add(format!("mad{carry}.lo{cc}.{ty}"), value, 3, k, Action::Compute(low));
        }
    }
    Family { title: "Extended-precision integer arithmetic", rows, hints: vec![] }
}

/// `d = f(x, y, flag)` in all lanes; reads and writes the flag as the row's constant specifies.
#[inline(always)]
fn with_flag<T: Lane>(
    r: &mut Registers,
    a: &Args,
    mask: u32,
    x: &Lanes<T>,
    y: &Lanes<T>,
    f: impl Fn(T, T, bool) -> (T, bool),
) {
    let flags = if a.k & READS != 0 { r.carry() } else { 0 };
    let (mut results, mut out) = ([T::default(); LANES], 0);
    for lane in 0..LANES {
        let (result, flag) = f(x[lane], y[lane], flags >> lane & 1 != 0);
        results[lane] = result;
        out |= u32::from(flag) << lane;
    }
    r.set(a.s[0], &results, mask);
    if a.k & WRITES != 0 {
        r.set_carry(out, mask);
    }
}

#[inline(always)]
fn sum<T: Lane>(r: &mut Registers, a: &Args, mask: u32, f: impl Fn(T, T, bool) -> (T, bool)) {
    let (x, y) = (r.get(a.s[1]), r.get(a.s[2]));
    with_flag(r, a, mask, &x, &y, f);
}

#[inline(always)]
fn product<T: Lane>(
    r: &mut Registers,
    a: &Args,
    mask: u32,
    multiply: impl Fn(T, T) -> T,
    f: impl Fn(T, T, bool) -> (T, bool),
) {
    let (x, y) = (r.get::<T>(a.s[1]), r.get::<T>(a.s[2]));
    let products = lanes(|lane| multiply(x[lane], y[lane]));
    let z = r.get(a.s[3]);
    with_flag(r, a, mask, &products, &z, f);
}

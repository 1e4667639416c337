//! Integer arithmetic (PTX ISA, "Integer Arithmetic Instructions").

use super::{Family, Row};
use crate::numeric::integer::{self as int, Integer as _};

pub(crate) fn family() -> Family {
    let mut rows = Vec::new();
    sums(&mut rows);
    products(&mut rows);
    extremes(&mut rows);
    Family { title: "Integer arithmetic", rows, hints: vec![] }
}

fn sums(rows: &mut Vec<Row>) {
    map_each!(rows, Integer, "add", [u16 s16 u32 s32 u64 s64], (2) |x, y| x.wrapping_add(y));
    map_each!(rows, Integer, "sub", [u16 s16 u32 s32 u64 s64], (2) |x, y| x.wrapping_sub(y));
    map!(rows, Integer, "add.sat.s32", s32, s32 => s32, |x, y| x.saturating_add(y));
    map!(rows, Integer, "sub.sat.s32", s32, s32 => s32, |x, y| x.saturating_sub(y));
    for ty in ["u16x2", "s16x2"] {
        map!(rows, Integer, format!("add.{ty}"), b32, b32 => b32, |x, y| halves(x, y, u16::wrapping_add));
    }
    map_each!(rows, Integer, "sad", [u16 s16 u32 s32 u64 s64], (3) |x, y, z| x.sad(y, z));
    map_each!(rows, Integer, "abs", [s16 s32 s64], (1) |x| x.wrapping_abs());
    map_each!(rows, Integer, "neg", [s16 s32 s64], (1) |x| x.wrapping_neg());
    map_each!(rows, Integer, "div", [u16 s16 u32 s32 u64 s64], (2) |x, y| x.div(y));
    map_each!(rows, Integer, "rem", [u16 s16 u32 s32 u64 s64], (2) |x, y| x.rem(y));
}

fn products(rows: &mut Vec<Row>) {
    map_each!(rows, Integer, "mul.lo", [u16 s16 u32 s32 u64 s64], (2) |x, y| x.wrapping_mul(y));
    map_each!(rows, Integer, "mul.hi", [u16 s16 u32 s32 u64 s64], (2) |x, y| x.mul_hi(y));
    map!(rows, Integer, "mul.wide.u16", u16, u16 => u32, |x, y| u32::from(x) * u32::from(y));
    map!(rows, Integer, "mul.wide.s16", s16, s16 => s32, |x, y| i32::from(x) * i32::from(y));
    map!(rows, Integer, "mul.wide.u32", u32, u32 => u64, |x, y| u64::from(x) * u64::from(y));
    map!(rows, Integer, "mul.wide.s32", s32, s32 => s64, |x, y| i64::from(x) * i64::from(y));

    map_each!(rows, Integer, "mad.lo", [u16 s16 u32 s32 u64 s64], (3) |x, y, z| x.wrapping_mul(y).wrapping_add(z));
    map_each!(rows, Integer, "mad.hi", [u16 s16 u32 s32 u64 s64], (3) |x, y, z| x.mul_hi(y).wrapping_add(z));
    map!(rows, Integer, "mad.hi.sat.s32", s32, s32, s32 => s32, int::mad_hi_sat_s32);
    map!(rows, Integer, "mad.wide.u16", u16, u16, u32 => u32, |x, y, z| (u32::from(x) * u32::from(y)).wrapping_add(z));
    map!(rows, Integer, "mad.wide.s16", s16, s16, s32 => s32, |x, y, z| (i32::from(x) * i32::from(y)).wrapping_add(z));
    map!(rows, Integer, "mad.wide.u32", u32, u32, u64 => u64, |x, y, z| (u64::from(x) * u64::from(y)).wrapping_add(z));
    map!(rows, Integer, "mad.wide.s32", s32, s32, s64 => s64, |x, y, z| (i64::from(x) * i64::from(y)).wrapping_add(z));

    map!(rows, Integer, "mul24.lo.u32", u32, u32 => u32, int::mul24_lo_u32);
    map!(rows, Integer, "mul24.hi.u32", u32, u32 => u32, int::mul24_hi_u32);
    map!(rows, Integer, "mul24.lo.s32", s32, s32 => s32, int::mul24_lo_s32);
    map!(rows, Integer, "mul24.hi.s32", s32, s32 => s32, int::mul24_hi_s32);
    map!(rows, Integer, "mad24.lo.u32", u32, u32, u32 => u32, |x, y, z| int::mul24_lo_u32(x, y).wrapping_add(z));
    map!(rows, Integer, "mad24.hi.u32", u32, u32, u32 => u32, |x, y, z| int::mul24_hi_u32(x, y).wrapping_add(z));
    map!(rows, Integer, "mad24.lo.s32", s32, s32, s32 => s32, |x, y, z| int::mul24_lo_s32(x, y).wrapping_add(z));
    map!(rows, Integer, "mad24.hi.s32", s32, s32, s32 => s32, |x, y, z| int::mul24_hi_s32(x, y).wrapping_add(z));
    map!(rows, Integer, "mad24.hi.sat.s32", s32, s32, s32 => s32, int::mad24_hi_sat_s32);
}

fn extremes(rows: &mut Vec<Row>) {
    map_each!(rows, Integer, "min", [u16 s16 u32 s32 u64 s64], (2) |x, y| x.min(y));
    map_each!(rows, Integer, "max", [u16 s16 u32 s32 u64 s64], (2) |x, y| x.max(y));
    // The manual writes `.relu` before the type, CUDA's headers after it.
    for name in ["relu.s32", "s32.relu"] {
        map!(rows, Integer, format!("min.{name}"), s32, s32 => s32, |x, y| x.min(y).max(0));
        map!(rows, Integer, format!("max.{name}"), s32, s32 => s32, |x, y| x.max(y).max(0));
    }
    for name in ["relu.s16x2", "s16x2.relu"] {
        let (min, max) = (format!("min.{name}"), format!("max.{name}"));
        map!(rows, Integer, min, b32, b32 => b32, |x, y| signed_halves(x, y, |x, y| x.min(y).max(0)));
        map!(rows, Integer, max, b32, b32 => b32, |x, y| signed_halves(x, y, |x, y| x.max(y).max(0)));
    }
    map!(rows, Integer, "min.u16x2", b32, b32 => b32, |x, y| halves(x, y, u16::min));
    map!(rows, Integer, "max.u16x2", b32, b32 => b32, |x, y| halves(x, y, u16::max));
    map!(rows, Integer, "min.s16x2", b32, b32 => b32, |x, y| signed_halves(x, y, i16::min));
    map!(rows, Integer, "max.s16x2", b32, b32 => b32, |x, y| signed_halves(x, y, i16::max));
}

#[inline(always)]
fn halves(x: u32, y: u32, f: impl Fn(u16, u16) -> u16) -> u32 {
    u32::from(f(x as u16, y as u16)) | u32::from(f((x >> 16) as u16, (y >> 16) as u16)) << 16
}

#[inline(always)]
fn signed_halves(x: u32, y: u32, f: impl Fn(i16, i16) -> i16) -> u32 {
    halves(x, y, |x, y| f(x as i16, y as i16) as u16)
}

//! Integer arithmetic (PTX ISA, "Integer Arithmetic Instructions").

use super::{Family, Row};
use crate::numeric::integer::Integer as _;

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
    map!(rows, Integer, "mad.wide.u16", u16, u16, u32 => u32, |x, y, z| (u32::from(x) * u32::from(y)).wrapping_add(z));
    map!(rows, Integer, "mad.wide.s16", s16, s16, s32 => s32, |x, y, z| (i32::from(x) * i32::from(y)).wrapping_add(z));
    map!(rows, Integer, "mad.wide.u32", u32, u32, u64 => u64, |x, y, z| (u64::from(x) * u64::from(y)).wrapping_add(z));
    map!(rows, Integer, "mad.wide.s32", s32, s32, s64 => s64, |x, y, z| (i64::from(x) * i64::from(y)).wrapping_add(z));
}

fn extremes(rows: &mut Vec<Row>) {
    map_each!(rows, Integer, "min", [u16 s16 u32 s32 u64 s64], (2) |x, y| x.min(y));
    map_each!(rows, Integer, "max", [u16 s16 u32 s32 u64 s64], (2) |x, y| x.max(y));
}

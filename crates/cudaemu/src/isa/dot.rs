//! Dot products of bytes and half-words with accumulation (PTX ISA, `dp4a`, `dp2a`).

use super::Family;
use crate::numeric::integer::{dp2a, dp4a};

pub(crate) fn family() -> Family {
    let mut rows = Vec::new();
    map!(rows, Integer, "dp4a.u32.u32", b32, b32, b32 => b32, |x, y, z| dp4a(x, y, z, false, false));
    map!(rows, Integer, "dp4a.u32.s32", b32, b32, b32 => b32, |x, y, z| dp4a(x, y, z, false, true));
    map!(rows, Integer, "dp4a.s32.u32", b32, b32, b32 => b32, |x, y, z| dp4a(x, y, z, true, false));
    map!(rows, Integer, "dp4a.s32.s32", b32, b32, b32 => b32, |x, y, z| dp4a(x, y, z, true, true));
    map!(rows, Integer, "dp2a.lo.u32.u32", b32, b32, b32 => b32, |x, y, z| dp2a(x, y, z, false, false, false));
    map!(rows, Integer, "dp2a.lo.u32.s32", b32, b32, b32 => b32, |x, y, z| dp2a(x, y, z, false, true, false));
    map!(rows, Integer, "dp2a.lo.s32.u32", b32, b32, b32 => b32, |x, y, z| dp2a(x, y, z, true, false, false));
    map!(rows, Integer, "dp2a.lo.s32.s32", b32, b32, b32 => b32, |x, y, z| dp2a(x, y, z, true, true, false));
    map!(rows, Integer, "dp2a.hi.u32.u32", b32, b32, b32 => b32, |x, y, z| dp2a(x, y, z, false, false, true));
    map!(rows, Integer, "dp2a.hi.u32.s32", b32, b32, b32 => b32, |x, y, z| dp2a(x, y, z, false, true, true));
    map!(rows, Integer, "dp2a.hi.s32.u32", b32, b32, b32 => b32, |x, y, z| dp2a(x, y, z, true, false, true));
    map!(rows, Integer, "dp2a.hi.s32.s32", b32, b32, b32 => b32, |x, y, z| dp2a(x, y, z, true, true, true));
    Family { title: "Dot products", rows, hints: vec![] }
}

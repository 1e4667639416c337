//! `.approx` and `.full` forms of `.f32` and `.f64` functions (PTX ISA, "Floating-Point Instructions"): the exact value,
//! rounded.

use super::{Family, Row};
use crate::numeric::{Rounding, approx, double};

pub(crate) fn family() -> Family {
    let mut rows = Vec::new();
    unary(&mut rows);
    map!(rows, Float, "tanh.approx.f32", f32 => f32, approx::tanh);
    map!(rows, Float, "div.approx.f32", f32, f32 => f32, |x, y| approx::div_approx(x, y, false));
    map!(rows, Float, "div.approx.ftz.f32", f32, f32 => f32, |x, y| approx::div_approx(x, y, true));
    map!(rows, Float, "div.full.f32", f32, f32 => f32, |x, y| approx::div_full(x, y, false));
    map!(rows, Float, "div.full.ftz.f32", f32, f32 => f32, |x, y| approx::div_full(x, y, true));
    map!(rows, Double, "rcp.approx.ftz.f64", f64 => f64, approx::rcp_f64);
    map!(rows, Double, "rsqrt.approx.ftz.f64", f64 => f64, approx::rsqrt_f64);
    // This form has full precision and keeps subnormals, because real GPUs compute it in software.
    map!(rows, Double, "rsqrt.approx.f64", f64 => f64, |x| double::rcp(double::sqrt(x, Rounding::Rn), Rounding::Rn));
    Family { title: "Approximate floating-point functions", rows, hints: vec![] }
}

macro_rules! unary {
    ($rows:ident, [$($name:ident)*]) => { $(
        map!($rows, Float, concat!(stringify!($name), ".approx.f32"), f32 => f32, |x| approx::$name(x, false));
        map!($rows, Float, concat!(stringify!($name), ".approx.ftz.f32"), f32 => f32, |x| approx::$name(x, true));
    )* };
}

fn unary(rows: &mut Vec<Row>) {
    unary!(rows, [ex2 lg2 sin cos rcp sqrt rsqrt]);
}

//! `.f32` and `.f64` arithmetic (PTX ISA, "Floating-Point Instructions"), except the approximate forms.

use std::marker::PhantomData;

use super::vector::{Host, Kernel, LaneOp};
use super::{Category, Family, Operand, Row, Value, row};
use crate::bytecode::Action;
use crate::exec_context::{LANES, Lane, Lanes, Registers};
use crate::numeric::{MinMax, Mode, Rounding, Testp, double, single};
use crate::operands::Args;

pub(crate) fn family() -> Family {
    Family { title: "Floating-point arithmetic", rows: rows(Host::detect()), hints: vec![] }
}

pub(crate) fn rows(host: Host) -> Vec<Row> {
    let mut rows = Vec::new();
    rounded(&mut rows, host);
    extremes(&mut rows, host);
    signs(&mut rows);
    rows
}

/// An operation with a rounded result.
trait Rounded {
    type T: Lane;
    const VALUE: Value;
    const N: usize;
    fn apply(a: Self::T, b: Self::T, c: Self::T, mode: Mode) -> Self::T;
}

macro_rules! rounded {
    ($($name:ident, $t:ident, $value:ident, $n:literal, |$a:ident, $b:ident, $c:ident, $mode:ident| $e:expr;)*) => { $(
        struct $name;
        impl Rounded for $name {
            type T = $t;
            const VALUE: Value = Value::$value;
            const N: usize = $n;
            #[inline(always)]
            fn apply($a: $t, $b: $t, $c: $t, $mode: Mode) -> $t {
                $e
            }
        }
    )* };
}

rounded! {
    Add, f32, F32, 2, |a, b, _c, mode| single::add(a, b, mode);
    Sub, f32, F32, 2, |a, b, _c, mode| single::sub(a, b, mode);
    Mul, f32, F32, 2, |a, b, _c, mode| single::mul(a, b, mode);
    Fma, f32, F32, 3, |a, b, c, mode| single::fma(a, b, c, mode);
    Div, f32, F32, 2, |a, b, _c, mode| single::div(a, b, mode);
    Rcp, f32, F32, 1, |a, _b, _c, mode| single::rcp(a, mode);
    Sqrt, f32, F32, 1, |a, _b, _c, mode| single::sqrt(a, mode);
    AddDouble, f64, F64, 2, |a, b, _c, mode| double::add(a, b, mode.round);
    SubDouble, f64, F64, 2, |a, b, _c, mode| double::sub(a, b, mode.round);
    MulDouble, f64, F64, 2, |a, b, _c, mode| double::mul(a, b, mode.round);
    FmaDouble, f64, F64, 3, |a, b, c, mode| double::fma(a, b, c, mode.round);
    DivDouble, f64, F64, 2, |a, b, _c, mode| double::div(a, b, mode.round);
    RcpDouble, f64, F64, 1, |a, _b, _c, mode| double::rcp(a, mode.round);
    SqrtDouble, f64, F64, 1, |a, _b, _c, mode| double::sqrt(a, mode.round);
}

/// Rounds to nearest even, with `.ftz` and `.sat` as compile-time constants: the common case in inner loops.
struct Nearest<O, const FTZ: bool, const SAT: bool>(PhantomData<O>);

impl<O: Rounded, const FTZ: bool, const SAT: bool> LaneOp for Nearest<O, FTZ, SAT> {
    type A = O::T;
    type D = O::T;
    const N: usize = O::N;
    #[inline(always)]
    fn lane(a: O::T, b: O::T, c: O::T) -> O::T {
        O::apply(a, b, c, Mode { round: Rounding::Rn, ftz: FTZ, sat: SAT })
    }
}

/// Uses the modifiers in the row's constant.
struct Directed<O>(PhantomData<O>);

impl<O: Rounded> Kernel for Directed<O> {
    #[inline(always)]
    fn run(r: &mut Registers, args: &Args, mask: u32) {
        let round = ROUNDINGS[(args.k >> 2) as usize % ROUNDINGS.len()].1;
        let mode = Mode { round, ftz: args.k & 1 != 0, sat: args.k & 2 != 0 };
        let a: Lanes<O::T> = r.get(args.s[1]);
        let b: Lanes<O::T> = if O::N > 1 { r.get(args.s[2]) } else { a };
        let c: Lanes<O::T> = if O::N > 2 { r.get(args.s[3]) } else { a };
        let mut d = [O::T::default(); LANES];
        for lane in 0..LANES {
            d[lane] = O::apply(a[lane], b[lane], c[lane], mode);
        }
        r.set(args.s[0], &d, mask);
    }
}

/// Rounding modifiers. The first is the default of `add`, `sub` and `mul`; other operations need an explicit modifier.
const ROUNDINGS: [(&str, Rounding); 5] =
    [("", Rounding::Rn), (".rn", Rounding::Rn), (".rz", Rounding::Rz), (".rm", Rounding::Rm), (".rp", Rounding::Rp)];

/// The modifiers that an opcode accepts.
#[derive(Clone, Copy)]
struct AcceptedModifiers {
    default: bool,
    sat: bool,
}

fn rounded(rows: &mut Vec<Row>, host: Host) {
    let sums = AcceptedModifiers { default: true, sat: true };
    let fused = AcceptedModifiers { default: false, sat: true };
    let quotients = AcceptedModifiers { default: false, sat: false };
    singles::<Add>(rows, host, "add", sums);
    singles::<Sub>(rows, host, "sub", sums);
    singles::<Mul>(rows, host, "mul", sums);
    singles::<Fma>(rows, host, "fma", fused);
    singles::<Fma>(rows, host, "mad", fused);
    singles::<Div>(rows, host, "div", quotients);
    singles::<Rcp>(rows, host, "rcp", quotients);
    singles::<Sqrt>(rows, host, "sqrt", quotients);
    doubles::<AddDouble>(rows, host, "add", sums);
    doubles::<SubDouble>(rows, host, "sub", sums);
    doubles::<MulDouble>(rows, host, "mul", sums);
    doubles::<FmaDouble>(rows, host, "fma", fused);
    doubles::<FmaDouble>(rows, host, "mad", fused);
    doubles::<DivDouble>(rows, host, "div", quotients);
    doubles::<RcpDouble>(rows, host, "rcp", quotients);
    doubles::<SqrtDouble>(rows, host, "sqrt", quotients);
}

fn singles<O: Rounded>(rows: &mut Vec<Row>, host: Host, op: &str, takes: AcceptedModifiers) {
    for (index, (text, round)) in ROUNDINGS.into_iter().enumerate().skip(usize::from(!takes.default)) {
        for ftz in [false, true] {
            for sat in if takes.sat { &[false, true][..] } else { &[false] } {
                let action = match (round, ftz, sat) {
                    (Rounding::Rn, false, false) => host.map::<Nearest<O, false, false>>(),
                    (Rounding::Rn, false, true) => host.map::<Nearest<O, false, true>>(),
                    (Rounding::Rn, true, false) => host.map::<Nearest<O, true, false>>(),
                    (Rounding::Rn, true, true) => host.map::<Nearest<O, true, true>>(),
                    _ => Action::Compute(host.compute::<Directed<O>>()),
                };
                let name = format!("{op}{text}{}{}.f32", if ftz { ".ftz" } else { "" }, if *sat { ".sat" } else { "" });
                let k = (index as u32) << 2 | u32::from(*sat) << 1 | u32::from(ftz);
                rows.push(row(name, &operands(O::VALUE, O::N), Category::Float, k, action));
            }
        }
    }
}

fn doubles<O: Rounded>(rows: &mut Vec<Row>, host: Host, op: &str, takes: AcceptedModifiers) {
    for (index, (text, round)) in ROUNDINGS.into_iter().enumerate().skip(usize::from(!takes.default)) {
        let action = match round {
            Rounding::Rn => host.map::<Nearest<O, false, false>>(),
            _ => Action::Compute(host.compute::<Directed<O>>()),
        };
        let operands = operands(O::VALUE, O::N);
        rows.push(row(format!("{op}{text}.f64"), &operands, Category::Double, (index as u32) << 2, action));
    }
}

/// A destination and `sources` sources of the same type.
pub(super) fn operands(value: Value, sources: usize) -> Vec<Operand> {
    let mut operands = vec![Operand::In(value); sources + 1];
    operands[0] = Operand::Out(value);
    operands
}

struct Extreme<const MAX: bool, const FTZ: bool, const NAN: bool, const XORSIGN: bool>;

impl<const MAX: bool, const FTZ: bool, const NAN: bool, const XORSIGN: bool> LaneOp
    for Extreme<MAX, FTZ, NAN, XORSIGN>
{
    type A = f32;
    type D = f32;
    const N: usize = 2;
    #[inline(always)]
    fn lane(a: f32, b: f32, _: f32) -> f32 {
        let mode = MinMax { nan: NAN, xorsign_abs: XORSIGN, ftz: FTZ };
        if MAX { single::max(a, b, mode) } else { single::min(a, b, mode) }
    }
}

fn extremes(rows: &mut Vec<Row>, host: Host) {
    fn both<const FTZ: bool, const NAN: bool, const XORSIGN: bool>(rows: &mut Vec<Row>, host: Host, modifiers: &str) {
        let operands = operands(Value::F32, 2);
        let min = host.map::<Extreme<false, FTZ, NAN, XORSIGN>>();
        rows.push(row(format!("min{modifiers}.f32"), &operands, Category::Float, 0, min));
        let max = host.map::<Extreme<true, FTZ, NAN, XORSIGN>>();
        rows.push(row(format!("max{modifiers}.f32"), &operands, Category::Float, 0, max));
    }
    both::<false, false, false>(rows, host, "");
    both::<true, false, false>(rows, host, ".ftz");
    both::<false, true, false>(rows, host, ".NaN");
    both::<true, true, false>(rows, host, ".ftz.NaN");
    both::<false, false, true>(rows, host, ".xorsign.abs");
    both::<true, false, true>(rows, host, ".ftz.xorsign.abs");
    both::<false, true, true>(rows, host, ".NaN.xorsign.abs");
    both::<true, true, true>(rows, host, ".ftz.NaN.xorsign.abs");
    map!(rows, Double, "min.f64", f64, f64 => f64, double::min);
    map!(rows, Double, "max.f64", f64, f64 => f64, double::max);
}

const TESTS: [(&str, Testp); 6] = [
    ("finite", Testp::Finite),
    ("infinite", Testp::Infinite),
    ("number", Testp::Number),
    ("notanumber", Testp::NotANumber),
    ("normal", Testp::Normal),
    ("subnormal", Testp::Subnormal),
];

fn signs(rows: &mut Vec<Row>) {
    map!(rows, Float, "abs.f32", f32 => f32, |x| single::abs(x, false));
    map!(rows, Float, "abs.ftz.f32", f32 => f32, |x| single::abs(x, true));
    map!(rows, Float, "neg.f32", f32 => f32, |x| single::neg(x, false));
    map!(rows, Float, "neg.ftz.f32", f32 => f32, |x| single::neg(x, true));
    map!(rows, Float, "copysign.f32", f32, f32 => f32, single::copysign);
    map!(rows, Double, "abs.f64", f64 => f64, double::abs);
    map!(rows, Double, "neg.f64", f64 => f64, double::neg);
    map!(rows, Double, "copysign.f64", f64, f64 => f64, double::copysign);
    for (index, (text, _)) in TESTS.iter().enumerate() {
        for (suffix, value, category, action) in [
            ("f32", Value::F32, Category::Float, Action::Compute(|r, a, m| testp::<f32>(r, a, m, single::testp))),
            ("f64", Value::F64, Category::Double, Action::Compute(|r, a, m| testp::<f64>(r, a, m, double::testp))),
        ] {
            let operands = [Operand::Out(Value::Pred), Operand::In(value)];
            rows.push(row(format!("testp.{text}.{suffix}"), &operands, category, index as u32, action));
        }
    }
}

fn testp<T: Lane>(r: &mut Registers, args: &Args, mask: u32, holds: fn(Testp, T) -> bool) {
    let test = TESTS[args.k as usize % TESTS.len()].1;
    let a: Lanes<T> = r.get(args.s[1]);
    let bits = (0..LANES).fold(0, |bits, lane| bits | u32::from(holds(test, a[lane])) << lane);
    r.set_pred(args.s[0], bits, mask);
}

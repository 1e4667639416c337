//! `.f16` and `.bf16` arithmetic, scalar and packed (PTX ISA, "Half Precision Floating-Point Instructions").

use std::marker::PhantomData;

use super::float::operands;
use super::vector::{Host, LaneOp};
use super::{Category, Family, Row, Value, row};
use crate::numeric::half::{self, Bf16, F16, Half};

pub(crate) fn family() -> Family {
    Family { title: "Half-precision arithmetic", rows: rows(Host::detect()), hints: vec![] }
}

/// An operation on one element.
trait HalfOp {
    /// Number of operands.
    const N: usize;
    fn apply<H: Half>(a: u16, b: u16, c: u16) -> u16;
}

macro_rules! half_ops {
    ($($name:ident, $n:literal, |$a:ident, $b:ident, $c:ident| $e:expr;)*) => { $(
        struct $name;
        impl HalfOp for $name {
            const N: usize = $n;
            #[inline(always)]
            fn apply<H: Half>($a: u16, $b: u16, $c: u16) -> u16 {
                $e
            }
        }
    )* };
}

half_ops! {
    Add, 2, |a, b, _c| half::add::<H>(a, b);
    Sub, 2, |a, b, _c| half::add::<H>(a, b ^ 0x8000);
    Mul, 2, |a, b, _c| half::mul::<H>(a, b);
    Fma, 3, |a, b, c| H::multiply_add(a, b, c);
}

struct Scalar<H, O>(PhantomData<(H, O)>);
struct Packed<H, O>(PhantomData<(H, O)>);

impl<H: Half, O: HalfOp> LaneOp for Scalar<H, O> {
    type A = u16;
    type D = u16;
    const N: usize = O::N;
    #[inline(always)]
    fn lane(a: u16, b: u16, c: u16) -> u16 {
        O::apply::<H>(a, b, c)
    }
}

impl<H: Half, O: HalfOp> LaneOp for Packed<H, O> {
    type A = u32;
    type D = u32;
    const N: usize = O::N;
    #[inline(always)]
    fn lane(a: u32, b: u32, c: u32) -> u32 {
        let low = O::apply::<H>(a as u16, b as u16, c as u16);
        let high = O::apply::<H>((a >> 16) as u16, (b >> 16) as u16, (c >> 16) as u16);
        u32::from(high) << 16 | u32::from(low)
    }
}

/// Adds an opcode (given without its type) on scalar and packed elements.
fn push<H: Half, O: HalfOp>(rows: &mut Vec<Row>, host: Host, name: &str, ty: &str) {
    let (scalar, packed) = (host.map::<Scalar<H, O>>(), host.map::<Packed<H, O>>());
    rows.push(row(format!("{name}.{ty}"), &operands(Value::B16, O::N), Category::Half, 0, scalar));
    rows.push(row(format!("{name}.{ty}x2"), &operands(Value::B32, O::N), Category::Half, 0, packed));
}

fn all<H: Half>(rows: &mut Vec<Row>, host: Host, ty: &str) {
    // `.rn` is the default rounding.
    for round in ["", ".rn"] {
        push::<H, Add>(rows, host, &format!("add{round}"), ty);
        push::<H, Sub>(rows, host, &format!("sub{round}"), ty);
        push::<H, Mul>(rows, host, &format!("mul{round}"), ty);
    }
    push::<H, Fma>(rows, host, "fma.rn", ty);
}

pub(crate) fn rows(host: Host) -> Vec<Row> {
    let mut rows = Vec::new();
    all::<F16>(&mut rows, host, "f16");
    all::<Bf16>(&mut rows, host, "bf16");
    rows
}

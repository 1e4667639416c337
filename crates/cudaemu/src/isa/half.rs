//! `.f16` and `.bf16` arithmetic, scalar and packed (PTX ISA, "Half Precision Floating-Point Instructions").

use std::marker::PhantomData;

use super::float::operands;
use super::vector::{Host, LaneOp};
use super::{Category, Family, Row, Value, row};
use crate::numeric::half::{self, Bf16, F16, Half};
use crate::numeric::{HalfMode, MinMax};

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
    ($($name:ident<$($flag:ident),*>, $n:literal, |$a:ident, $b:ident, $c:ident| $e:expr;)*) => { $(
        struct $name<$(const $flag: bool),*>;
        impl<$(const $flag: bool),*> HalfOp for $name<$($flag),*> {
            const N: usize = $n;
            #[inline(always)]
            fn apply<H: Half>($a: u16, $b: u16, $c: u16) -> u16 {
                $e
            }
        }
    )* };
}

half_ops! {
    Add<FTZ, SAT>, 2, |a, b, _c| half::add::<H>(a, b, HalfMode { ftz: FTZ, sat: SAT, relu: false });
    Sub<FTZ, SAT>, 2, |a, b, _c| half::sub::<H>(a, b, HalfMode { ftz: FTZ, sat: SAT, relu: false });
    Mul<FTZ, SAT>, 2, |a, b, _c| half::mul::<H>(a, b, HalfMode { ftz: FTZ, sat: SAT, relu: false });
    Fma<FTZ, SAT, RELU>, 3, |a, b, c| half::fma::<H>(a, b, c, HalfMode { ftz: FTZ, sat: SAT, relu: RELU });
    Neg<FTZ>, 1, |a, _b, _c| half::neg::<H>(a, FTZ);
    Abs<FTZ>, 1, |a, _b, _c| half::abs::<H>(a, FTZ);
    Min<FTZ, NAN, XORSIGN>, 2, |a, b, _c| half::min::<H>(a, b, MinMax { ftz: FTZ, nan: NAN, xorsign_abs: XORSIGN });
    Max<FTZ, NAN, XORSIGN>, 2, |a, b, _c| half::max::<H>(a, b, MinMax { ftz: FTZ, nan: NAN, xorsign_abs: XORSIGN });
    Tanh<>, 1, |a, _b, _c| half::tanh::<H>(a);
    Ex2<FTZ>, 1, |a, _b, _c| half::ex2::<H>(a, FTZ);
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

/// Adds the rows of one type.
struct Rows<'a, H> {
    rows: &'a mut Vec<Row>,
    host: Host,
    ty: &'static str,
    format: PhantomData<H>,
}

impl<H: Half> Rows<'_, H> {
    /// Adds an opcode (given without its type) on scalar and packed elements.
    fn push<O: HalfOp>(&mut self, name: &str) {
        let (scalar, packed) = (self.host.map::<Scalar<H, O>>(), self.host.map::<Packed<H, O>>());
        let ty = self.ty;
        self.rows.push(row(format!("{name}.{ty}"), &operands(Value::B16, O::N), Category::Half, 0, scalar));
        self.rows.push(row(format!("{name}.{ty}x2"), &operands(Value::B32, O::N), Category::Half, 0, packed));
    }

    /// Sums and products; `.rn` is the default rounding.
    fn sums<const FTZ: bool, const SAT: bool>(&mut self, modifiers: &str) {
        for round in ["", ".rn"] {
            self.push::<Add<FTZ, SAT>>(&format!("add{round}{modifiers}"));
            self.push::<Sub<FTZ, SAT>>(&format!("sub{round}{modifiers}"));
            self.push::<Mul<FTZ, SAT>>(&format!("mul{round}{modifiers}"));
        }
    }

    fn min_max<const FTZ: bool>(&mut self, ftz: &str) {
        self.push::<Min<FTZ, false, false>>(&format!("min{ftz}"));
        self.push::<Min<FTZ, true, false>>(&format!("min{ftz}.NaN"));
        self.push::<Min<FTZ, false, true>>(&format!("min{ftz}.xorsign.abs"));
        self.push::<Min<FTZ, true, true>>(&format!("min{ftz}.NaN.xorsign.abs"));
        self.push::<Max<FTZ, false, false>>(&format!("max{ftz}"));
        self.push::<Max<FTZ, true, false>>(&format!("max{ftz}.NaN"));
        self.push::<Max<FTZ, false, true>>(&format!("max{ftz}.xorsign.abs"));
        self.push::<Max<FTZ, true, true>>(&format!("max{ftz}.NaN.xorsign.abs"));
    }

    /// Operations that both f16 and bf16 have.
    fn common(&mut self) {
        self.sums::<false, false>("");
        self.push::<Fma<false, false, false>>("fma.rn");
        self.push::<Fma<false, false, true>>("fma.rn.relu");
        self.push::<Neg<false>>("neg");
        self.push::<Abs<false>>("abs");
        self.min_max::<false>("");
        self.push::<Tanh>("tanh.approx");
    }
}

pub(crate) fn rows(host: Host) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut f16 = Rows::<F16> { rows: &mut rows, host, ty: "f16", format: PhantomData };
    f16.common();
    f16.sums::<true, false>(".ftz");
    f16.sums::<false, true>(".sat");
    f16.sums::<true, true>(".ftz.sat");
    f16.push::<Fma<true, false, false>>("fma.rn.ftz");
    f16.push::<Fma<false, true, false>>("fma.rn.sat");
    f16.push::<Fma<true, true, false>>("fma.rn.ftz.sat");
    f16.push::<Fma<true, false, true>>("fma.rn.ftz.relu");
    f16.push::<Neg<true>>("neg.ftz");
    f16.push::<Abs<true>>("abs.ftz");
    f16.min_max::<true>(".ftz");
    f16.push::<Ex2<false>>("ex2.approx");
    let mut bf16 = Rows::<Bf16> { rows: &mut rows, host, ty: "bf16", format: PhantomData };
    bf16.common();
    bf16.push::<Ex2<true>>("ex2.approx.ftz");
    rows
}

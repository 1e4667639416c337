//! Lane loops that are compiled twice: for any processor, and for those with AVX2 and FMA. Which one a row gets is decided
//! once, when the table is built. Both give the same bits: fused multiply-add is exact in either, only its speed differs.

use std::marker::PhantomData;

use crate::bytecode::{AccessFn, Action, ComputeFn};
use crate::exec_context::{ExecContext, LANES, Lane, Lanes, Registers};
use crate::fault::Fault;
use crate::operands::Args;

/// The work of a row on registers.
pub(crate) trait Kernel {
    /// As [`Compute`]. To be `#[inline(always)]`, loops written out: what is not inlined, such as a large closure given to a
    /// helper, is compiled for any processor.
    fn run(r: &mut Registers, a: &Args, mask: u32);
}

/// The work of a row that is more than registers; otherwise as [`Kernel`].
pub(crate) trait Work {
    /// As [`Access`]. To be `#[inline(always)]`.
    fn run(cx: &mut ExecContext<'_>, a: &Args, mask: u32) -> Result<(), Box<Fault>>;
}

/// What this processor can do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Host {
    /// Whether it has AVX2 and FMA. Only [`Host::detect`] makes this true.
    wide: bool,
}

impl Host {
    /// Asks the processor.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        let wide = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        #[cfg(not(target_arch = "x86_64"))]
        let wide = false;
        Self { wide }
    }

    /// Takes the loops for any processor.
    #[cfg(test)]
    pub(crate) fn portable() -> Self {
        Self { wide: false }
    }

    /// The fastest compilation of a kernel.
    pub(crate) fn compute<K: Kernel>(self) -> ComputeFn {
        let wide: Option<ComputeFn> = wide::<K>(self);
        wide.unwrap_or(K::run)
    }

    /// The same of work that may fail.
    pub(crate) fn access<W: Work>(self) -> AccessFn {
        let wide: Option<AccessFn> = wide_access::<W>(self);
        wide.unwrap_or(W::run)
    }

    /// The same of a function of lanes.
    pub(crate) fn map<O: LaneOp>(self) -> Action {
        Action::Compute(self.compute::<Map<O>>())
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "calls a function with target features")]
fn wide<K: Kernel>(host: Host) -> Option<ComputeFn> {
    #[target_feature(enable = "avx2,fma")]
    fn run<K: Kernel>(r: &mut Registers, a: &Args, mask: u32) {
        K::run(r, a, mask);
    }
    fn call<K: Kernel>(r: &mut Registers, a: &Args, mask: u32) {
        // SAFETY: `run` is a safe function but for its target features. `call` is named only below, where it leaves this
        // function if the host is wide, which `Host::detect` alone says, after the processor has said it has both.
        unsafe { run::<K>(r, a, mask) }
    }
    host.wide.then_some(call::<K>)
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "calls a function with target features")]
fn wide_access<W: Work>(host: Host) -> Option<AccessFn> {
    #[target_feature(enable = "avx2,fma")]
    fn run<W: Work>(cx: &mut ExecContext<'_>, a: &Args, mask: u32) -> Result<(), Box<Fault>> {
        W::run(cx, a, mask)
    }
    fn call<W: Work>(cx: &mut ExecContext<'_>, a: &Args, mask: u32) -> Result<(), Box<Fault>> {
        // SAFETY: as in `wide`: this function is reached only where the processor has both features.
        unsafe { run::<W>(cx, a, mask) }
    }
    host.wide.then_some(call::<W>)
}

#[cfg(not(target_arch = "x86_64"))]
fn wide_access<W: Work>(_: Host) -> Option<AccessFn> {
    None
}

#[cfg(not(target_arch = "x86_64"))]
fn wide<K: Kernel>(_: Host) -> Option<ComputeFn> {
    None
}

/// A function of one to three values of a type.
pub(crate) trait LaneOp {
    /// Type of the sources.
    type A: Lane;
    /// Type of the result.
    type D: Lane;
    /// Number of sources; the rest are the type's default.
    const N: usize;
    /// To be `#[inline(always)]`.
    fn lane(a: Self::A, b: Self::A, c: Self::A) -> Self::D;
}

/// `d = f(a, b, c)`: operands `s[0] = d`, `s[1] = a`, …
struct Map<O>(PhantomData<O>);

impl<O: LaneOp> Kernel for Map<O> {
    #[inline(always)]
    fn run(r: &mut Registers, args: &Args, mask: u32) {
        let a: Lanes<O::A> = r.get(args.s[1]);
        let b: Lanes<O::A> = if O::N > 1 { r.get(args.s[2]) } else { [O::A::default(); LANES] };
        let c: Lanes<O::A> = if O::N > 2 { r.get(args.s[3]) } else { [O::A::default(); LANES] };
        let mut d = [O::D::default(); LANES];
        for lane in 0..LANES {
            d[lane] = O::lane(a[lane], b[lane], c[lane]);
        }
        r.set(args.s[0], &d, mask);
    }
}

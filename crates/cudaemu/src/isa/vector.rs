//! Function multiversioning of lane loops: each loop is compiled once for any processor and once for processors with AVX2 and
//! FMA. The version of a row is chosen once, when the table is built. Both versions give the same bits: fused multiply-add is
//! exact in either, only its speed differs.

use std::marker::PhantomData;

use crate::bytecode::{AccessFn, Action, ComputeFn};
use crate::exec_context::{ExecContext, LANES, Lane, Lanes, Registers};
use crate::fault::Fault;
use crate::operands::Args;

/// A row's handler on registers.
pub(crate) trait Kernel {
    /// The handler, of type [`ComputeFn`]. Must be `#[inline(always)]` with its loops written out: a function that is not
    /// inlined, such as a large closure passed to a helper, is compiled for any processor.
    fn run(r: &mut Registers, a: &Args, mask: u32);
}

/// A row's handler on the whole context; otherwise as [`Kernel`].
pub(crate) trait Work {
    /// The handler, of type [`AccessFn`]. Must be `#[inline(always)]`.
    fn run(cx: &mut ExecContext<'_>, a: &Args, mask: u32) -> Result<(), Box<Fault>>;
}

/// Features of the host processor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Host {
    /// Whether the processor has AVX2 and FMA. Only [`Host::detect`] sets it to true.
    wide: bool,
}

impl Host {
    /// Detects the processor's features.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        let wide = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        #[cfg(not(target_arch = "x86_64"))]
        let wide = false;
        Self { wide }
    }

    /// Selects the portable versions.
    #[cfg(test)]
    pub(crate) fn portable() -> Self {
        Self { wide: false }
    }

    /// The best version of a kernel.
    pub(crate) fn compute<K: Kernel>(self) -> ComputeFn {
        let wide: Option<ComputeFn> = wide::<K>(self);
        wide.unwrap_or(K::run)
    }

    /// The best version of a handler that may fail.
    pub(crate) fn access<W: Work>(self) -> AccessFn {
        let wide: Option<AccessFn> = wide_access::<W>(self);
        wide.unwrap_or(W::run)
    }

    /// The best version of a function of lanes.
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
        // SAFETY: `run` is safe except for its target features. `call` is only returned if the host is wide, which only
        // `Host::detect` sets, after it has detected both features.
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
        // SAFETY: as in `wide`: this function is only reachable if the processor has both features.
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
    /// Number of sources; the others get the type's default.
    const N: usize;
    /// Must be `#[inline(always)]`.
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

//! Function multiversioning: loops that the compiler vectorises, compiled once for each vector width and chosen at run time.
//!
//! Without multiversioning, all code but hand-written kernels would use the architecture's baseline vectors: four floats on
//! x86-64. The results do not depend on the choice: no operation is contracted or reordered.

/// A multiversioned loop. `run` and all functions that its loop calls must be `#[inline(always)]`, or closures made inside it:
/// code that is not inlined into the caller with wide vectors is compiled without them.
pub(crate) trait Multiversion {
    /// Result of the loop.
    type Out;

    /// The loop. `L` gives the closures in it a different type for each width, so that each closure has a single caller and is
    /// inlined there.
    fn run<L: SimdLevel>(self) -> Self::Out;
}

/// `multiversion! { fn name<'a>(x: &'a mut [f32], ..) { .. } }`: a multiversioned function, whose body is the loop. The lifetime is
/// that of all slices; numbers (`const N: usize`) may follow it.
macro_rules! multiversion {
    ($(#[$doc:meta])* $vis:vis fn $name:ident<$a:lifetime $(, const $n:ident: usize)*>(
        $($arg:ident: $type:ty),+ $(,)?
    ) $(-> $out:ty)? $body:block) => {
        $(#[$doc])*
        #[inline]
        #[allow(clippy::needless_lifetimes)] // the struct needs it
        $vis fn $name<$a $(, const $n: usize)*>($($arg: $type),+) $(-> $out)? {
            struct Loop<$a $(, const $n: usize)*> {
                $($arg: $type),+
            }
            impl<$a $(, const $n: usize)*> $crate::cpu::simd::Multiversion for Loop<$a $(, $n)*> {
                type Out = multiversion!(@out $($out)?);

                #[inline(always)]
                fn run<L: $crate::cpu::simd::SimdLevel>(self) -> Self::Out {
                    let Loop { $($arg),+ } = self;
                    $body
                }
            }
            $crate::cpu::simd::run_widest(Loop::<$($n),*> { $($arg),+ })
        }
    };
    (@out) => { () };
    (@out $out:ty) => { $out };
}
pub(crate) use multiversion;

/// A vector width.
pub(crate) trait SimdLevel {}

struct Portable;
impl SimdLevel for Portable {}

/// Runs a loop on the widest vectors of the processor.
#[inline]
pub(crate) fn run_widest<W: Multiversion>(task: W) -> W::Out {
    #[cfg(target_arch = "x86_64")]
    {
        if x86::has_avx512() {
            // SAFETY: the processor has the features.
            return unsafe { x86::avx512(task) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { x86::avx2(task) };
        }
    }
    task.run::<Portable>()
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Multiversion, SimdLevel};

    struct Avx2;
    struct Avx512;
    impl SimdLevel for Avx2 {}
    impl SimdLevel for Avx512 {}

    pub(super) fn has_avx512() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512bw")
    }

    /// # Safety
    /// The processor has the features.
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw")]
    pub(super) unsafe fn avx512<W: Multiversion>(task: W) -> W::Out {
        task.run::<Avx512>()
    }

    /// # Safety
    /// The processor has the feature.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2<W: Multiversion>(task: W) -> W::Out {
        task.run::<Avx2>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A polynomial, a comparison and a running sum: contraction or another order would change the results.
    #[derive(Clone, Copy)]
    struct Sample<'a>(&'a [f32]);

    impl Multiversion for Sample<'_> {
        type Out = (Vec<u32>, u64);

        #[inline(always)]
        fn run<L: SimdLevel>(self) -> Self::Out {
            let mut total = 0.0;
            let values = self.0.iter().map(|&x| {
                let y = (x * 0.3 + 0.7) * x - x * 1e-3;
                total += f64::from(y);
                (if y < 0.5 { y * y + x } else { y / (1.0 + x) }).to_bits()
            });
            (values.collect(), f64::to_bits(total))
        }
    }

    #[test]
    fn all_vector_widths_give_the_same_bits() {
        let mut rng = fastrand::Rng::with_seed(1);
        let values: Vec<f32> = (0..1003).map(|_| rng.f32() * 8.0 - 4.0).collect();
        let want = Sample(&values).run::<Portable>();
        assert_eq!(run_widest(Sample(&values)), want);
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") {
                // SAFETY: the processor has the feature.
                assert_eq!(unsafe { x86::avx2(Sample(&values)) }, want);
            }
            if x86::has_avx512() {
                // SAFETY: the processor has the features.
                assert_eq!(unsafe { x86::avx512(Sample(&values)) }, want);
            }
        }
    }
}

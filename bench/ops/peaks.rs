//! Peak arithmetic throughput of the vector units: loops that contain only multiply-add or dot-product instructions. A *round*
//! of a loop updates each of its accumulators once.
//!
//! Each loop has `CHAINS` independent accumulators in registers, more than the product of the instruction's latency and
//! throughput, so that latency never limits the rate. `black_box` gets the accumulators by value after the loop: a reference
//! would force them into memory.
#![allow(unsafe_code)] // calls of functions with target features, and an empty asm!: see the SAFETY comments below

use fanout_bench::cases::Kind;

/// A loop function. The processor must support the loop's instructions.
type Loop = unsafe fn(rounds: u64);

/// A peak loop of one instruction.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub struct Peak {
    /// Name of the instruction, for the report.
    pub name: &'static str,
    pub kind: Kind,
    /// Multiplications and additions per round.
    pub ops: u64,
    run: Loop,
}

impl Peak {
    /// Runs `rounds` rounds.
    pub fn run(&self, rounds: u64) {
        // SAFETY: only `available` creates peaks, and it creates a peak only after it has detected the peak's instructions.
        unsafe { (self.run)(rounds) }
    }
}

/// The loops that this processor can run; none on an architecture without hand-written loops.
#[cfg(not(target_arch = "x86_64"))]
pub fn available() -> Vec<Peak> {
    Vec::new()
}

#[cfg(target_arch = "x86_64")]
pub use x86::available;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Kind, Loop, Peak};
    use std::arch::asm;
    use std::arch::is_x86_feature_detected as has;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// Accumulators per loop. FMA needs 8 (two per cycle, latency of four cycles) and VNNI needs 10 (latency of five cycles);
    /// AVX2 has 16 registers in total.
    const CHAINS: usize = 12;

    pub fn available() -> Vec<Peak> {
        // Each element of an accumulator takes part in a multiplication and an addition.
        let ops_per_round = |vector_bytes: u64, element_bytes: u64| CHAINS as u64 * vector_bytes / element_bytes * 2;
        let (avx2, avx512f) = (has!("avx2") && has!("fma"), has!("avx512f"));
        let (avx512vnni, avx512vnni_vl) = (has!("avx512vnni") && avx512f, has!("avx512vnni") && has!("avx512vl"));
        let all: [(bool, &'static str, Kind, u64, Loop); 7] = [
            (avx2, "f32 FMA ymm", Kind::F32, ops_per_round(32, 4), fma_ymm),
            (avx512f, "f32 FMA zmm", Kind::F32, ops_per_round(64, 4), fma_zmm),
            (has!("avx512bf16") && avx512f, "bf16 dot zmm", Kind::Bf16, ops_per_round(64, 2), bf16_zmm),
            (avx2, "int8 maddubs ymm", Kind::Int8, ops_per_round(32, 1), maddubs_ymm),
            (has!("avxvnni"), "int8 AVX-VNNI ymm", Kind::Int8, ops_per_round(32, 1), vnni_vex_ymm),
            (avx512vnni_vl, "int8 AVX512-VNNI ymm", Kind::Int8, ops_per_round(32, 1), vnni_ymm),
            (avx512vnni, "int8 AVX512-VNNI zmm", Kind::Int8, ops_per_round(64, 1), vnni_zmm),
        ];
        let present = all.into_iter().filter(|(supported, ..)| *supported);
        present.map(|(_, name, kind, ops, run)| Peak { name, kind, ops, run }).collect()
    }

    /// Defines a function with the target features `$features` that repeats `$step` on each accumulator.
    macro_rules! peak {
        ($name:ident, $features:literal, $zero:expr, $operand:expr, |$sum:ident, $a:pat_param, $b:pat_param| $step:expr) => {
            #[target_feature(enable = $features)]
            fn $name(rounds: u64) {
                let ($a, $b) = (black_box($operand), black_box($operand));
                let mut sums = [$zero; CHAINS];
                for _ in 0..rounds {
                    for sum in &mut sums {
                        let $sum = *sum;
                        *sum = $step;
                    }
                }
                black_box(sums);
            }
        };
    }

    // The factor 0.5 makes the FMA sums converge to 1, so that they stay finite and are neither zero nor subnormal.
    peak!(fma_ymm, "avx2,fma", _mm256_setzero_ps(), _mm256_set1_ps(0.5), |s, a, b| _mm256_fmadd_ps(s, a, b));
    peak!(fma_zmm, "avx512f", _mm512_setzero_ps(), _mm512_set1_ps(0.5), |s, a, b| _mm512_fmadd_ps(s, a, b));
    peak!(
        bf16_zmm,
        "avx512f,avx512bf16",
        _mm512_setzero_ps(),
        _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5), _mm512_set1_ps(0.5)),
        |s, a, b| _mm512_dpbf16_ps(s, a, b)
    );
    // Without VNNI, an 8-bit dot product takes three instructions. The compiler would hoist two of them out of the loop,
    // because their operands do not change.
    peak!(maddubs_ymm, "avx2", _mm256_setzero_si256(), _mm256_set1_epi8(1), |s, mut a, b| {
        // SAFETY: the asm block contains no instruction; it only prevents the compiler from assuming that `a` is
        // loop-invariant.
        unsafe { asm!("/* {0} */", inout(ymm_reg) a, options(nomem, nostack, preserves_flags)) };
        _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), b))
    });
    peak!(vnni_vex_ymm, "avxvnni", _mm256_setzero_si256(), _mm256_set1_epi8(1), |s, a, b| {
        _mm256_dpbusd_avx_epi32(s, a, b)
    });
    peak!(vnni_ymm, "avx512vnni,avx512vl", _mm256_setzero_si256(), _mm256_set1_epi8(1), |s, a, b| {
        _mm256_dpbusd_epi32(s, a, b)
    });
    peak!(vnni_zmm, "avx512f,avx512vnni", _mm512_setzero_si512(), _mm512_set1_epi8(1), |s, a, b| {
        _mm512_dpbusd_epi32(s, a, b)
    });
}

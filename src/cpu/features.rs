//! Feature list of a CPU device: threads, arithmetic, instruction sets.

use super::calibration::Calibration;
use super::{CpuDevice, MathMode, instruction_set};
use crate::device::Feature;

/// Filters a list of instruction set names by the detection macro `$detect`.
macro_rules! detected {
    ($detect:ident: $($name:tt)+) => {
        [$(($name, $detect!($name))),+].into_iter().filter_map(|(name, has)| has.then_some(name)).collect()
    };
}

/// The instruction sets that kernels use and the processor supports, in Rust's spelling.
fn instruction_sets() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected;
        detected!(is_x86_feature_detected:
            "avx2" "fma" "f16c" "avxvnni" "avx512f" "avx512bw" "avx512dq" "avx512vl" "avx512vnni" "avx512bf16")
    }
    #[cfg(target_arch = "aarch64")]
    {
        use std::arch::is_aarch64_feature_detected;
        detected!(is_aarch64_feature_detected: "neon" "dotprod" "i8mm")
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        Vec::new()
    }
}

/// The features that `device` reports: threads, math mode, and instruction sets.
pub(super) fn features(device: &CpuDevice) -> Vec<Feature> {
    let mut features = vec![Feature::new("threads", device.pool().workers())];
    match device.math_mode {
        MathMode::Exact => features.push(Feature::new("path", "exact")),
        MathMode::Fast => {
            features.extend([Feature::new("path", "fast"), Feature::new("products", instruction_set())]);
            if let Some(calibration) = Calibration::made() {
                features.push(Feature::new("prefetch", calibration.text()));
                features.push(Feature::new("huge_pages", calibration.huge_pages));
                features.extend(calibration.bf16_dots.map(|wins| Feature::new("bf16_dots", wins)));
            }
        }
    }
    let instructions = instruction_sets();
    if !instructions.is_empty() {
        features.push(Feature::new("instructions", instructions.join(" ")));
    }
    features
}

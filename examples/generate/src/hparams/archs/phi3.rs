//! Phi 3 and 4: a llama with fused matrices ([`crate::fused`]), whose rotation may leave channels of a head as they are, and has LongRoPE's
//! factors.

use super::{ArchSpec, RopeFactors};
use fanout::ops::rope::RopeMode;

pub(super) const SPEC: ArchSpec = ArchSpec {
    name: "phi3",
    models: "Phi 3, Phi 4",
    rope_mode: RopeMode::Neox,
    partial_rope: true,
    rope_factors: RopeFactors::LongShort,
    // The window is not used, as in llama.cpp.
    keys: &["attention.sliding_window"],
    ..ArchSpec::LLAMA
};

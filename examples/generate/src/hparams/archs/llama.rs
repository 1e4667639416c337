//! Llama 1 to 3, Mistral, Mixtral, and models of the same architecture.

use super::{ArchSpec, ExpertUse, RopeFactors};

/// Biases that llama.cpp accepts in llamas.
pub(super) const BIASES: &[&str] = &["attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"];

pub(super) const SPEC: ArchSpec =
    ArchSpec { rope_factors: RopeFactors::One, experts: ExpertUse::IfCounted, biases: BIASES, ..ArchSpec::LLAMA };

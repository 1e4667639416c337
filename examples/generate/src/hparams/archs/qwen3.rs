//! Qwen 3, dense and with a mixture of experts: queries and keys are normalised, head by head.

use super::{ArchSpec, ExpertUse};
use fanout::ops::rope::RopeMode;

pub(super) const DENSE: ArchSpec =
    ArchSpec { name: "qwen3", models: "Qwen 3", rope_mode: RopeMode::Neox, head_norms: true, ..ArchSpec::LLAMA };

pub(super) const MIXTURE: ArchSpec =
    ArchSpec { name: "qwen3moe", models: "Qwen 3 with experts", experts: ExpertUse::Always, ..DENSE };

//! SmolLM3: a llama in which every fourth block rotates neither queries nor keys.

use super::{ArchSpec, Positions, Variant};

pub(super) const SPEC: ArchSpec = ArchSpec {
    name: "smollm3",
    models: "SmolLM3",
    variant: |_, _| Ok(Variant { positions: Positions::UnrotatedEvery(4), ..Variant::LLAMA }),
    ..ArchSpec::LLAMA
};

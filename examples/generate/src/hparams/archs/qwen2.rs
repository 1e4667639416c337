//! Qwen 2 and 2.5: biases on queries, keys and values.

use super::ArchSpec;
use fanout::ops::rope::RopeMode;

pub(super) const SPEC: ArchSpec = ArchSpec {
    name: "qwen2",
    models: "Qwen 2, Qwen 2.5",
    rope_mode: RopeMode::Neox,
    output_bias: true,
    ..ArchSpec::LLAMA
};

//! Ministral 3 and Devstral 2: a llama whose scores of attention grow with the position, and which has its own bounds of YaRN.

use super::{ArchSpec, ExpertUse, RopeFactors, Temperature, Variant, llama};

pub(super) const SPEC: ArchSpec = ArchSpec {
    name: "mistral3",
    models: "Ministral 3, Devstral 2",
    rope_factors: RopeFactors::One,
    experts: ExpertUse::IfCounted,
    biases: llama::BIASES,
    keys: &["attention.temperature_scale"],
    variant: |keys, hparams| {
        let scale = keys.metadata.float(&keys.name("attention.temperature_scale"))?.filter(|&scale| scale != 0.0);
        let step = hparams.rope.n_ctx_orig as f32;
        Ok(Variant { temperature: scale.map(|scale| Temperature { scale, step }), ..Variant::LLAMA })
    },
    ..ArchSpec::LLAMA
};

//! Granite (dense): a llama with factors on embeddings, residuals, scores and logits, which the file has.

use super::{ArchSpec, Positions, RopeFactors, Variant, llama};
use crate::hparams::Keys;
use fanout::gguf::KeyError;

pub(super) const SPEC: ArchSpec = ArchSpec {
    name: "granite",
    models: "Granite 3 and 4 without experts",
    rope_factors: RopeFactors::One,
    biases: llama::BIASES,
    keys: &["attention.scale", "embedding_scale", "logit_scale", "residual_scale", "rope.scaling.finetuned"],
    variant: |keys, _| variant(keys),
    ..ArchSpec::LLAMA
};

fn variant(keys: &Keys<'_>) -> Result<Variant, KeyError> {
    // A missing key and 0 mean no factor.
    let factor = |key: &str| match keys.metadata.float(&keys.name(key))? {
        None | Some(0.0) => Ok(None),
        Some(_) => keys.positive(key, None).map(Some),
    };
    let rotated = keys.metadata.flag(&keys.name("rope.scaling.finetuned"))?.unwrap_or(true);
    Ok(Variant {
        embedding_scale: factor("embedding_scale")?.unwrap_or(1.0),
        residual_scale: factor("residual_scale")?.unwrap_or(1.0),
        attention_scale: factor("attention.scale")?,
        logit_scale: keys.positive("logit_scale", None)?.recip(),
        positions: if rotated { Positions::Rotated } else { Positions::UnrotatedEvery(1) },
        ..Variant::LLAMA
    })
}

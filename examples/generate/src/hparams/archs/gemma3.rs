//! Gemma 3, text only: five of six blocks see a sliding window, and rotate by another base. Embeddings are scaled, results of attention and
//! of the feed-forward network are normalised, and the gate is a GELU.

use super::{ArchSpec, Positions, Variant};
use crate::hparams::{HParams, Keys};
use fanout::gguf::KeyError;
use fanout::ops::glu::GluKind;
use fanout::ops::rope::{Rope, RopeMode};

pub(super) const SPEC: ArchSpec = ArchSpec {
    name: "gemma3",
    models: "Gemma 3, text only",
    rope_mode: RopeMode::Neox,
    head_norms: true,
    result_norms: true,
    keys: &["attention.sliding_window", "rope.freq_base_swa", "final_logit_softcapping", "hidden_activation"],
    variant,
    ..ArchSpec::LLAMA
};

/// Every n-th block sees all positions, unless the file says otherwise.
const PATTERN: u32 = 6;
/// The model of this many blocks divides scores by the root of width by heads, in place of a head's length.
const BLOCKS_OF_27B: usize = 62;

fn variant(keys: &Keys<'_>, hparams: &HParams) -> Result<Variant, KeyError> {
    // llama.cpp scales no angles in windows.
    let base = keys.positive("rope.freq_base_swa", Some(10000.0))?;
    let local = Rope { freq_base: base, freq_scale: 1.0, ..hparams.rope };
    let of_27b = ((hparams.width / hparams.heads) as f32).sqrt().recip();
    Ok(Variant {
        embedding_scale: (hparams.width as f32).sqrt(),
        attention_scale: (hparams.layers == BLOCKS_OF_27B).then_some(of_27b),
        logit_cap: keys.metadata.float(&keys.name("final_logit_softcapping"))?.filter(|&cap| cap != 0.0),
        gate: GluKind::Geglu,
        positions: Positions::windows(keys, hparams.layers, PATTERN, local)?,
        ..Variant::LLAMA
    })
}

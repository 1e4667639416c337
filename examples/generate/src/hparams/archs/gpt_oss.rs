//! gpt-oss: every second block sees a sliding window, each head has an attention sink, and the experts have biases and a gate of their own.

use super::{ArchSpec, ExpertUse, Positions, Variant};
use fanout::ops::glu::GluKind;
use fanout::ops::rope::{Rope, RopeMode};

pub(super) const SPEC: ArchSpec = ArchSpec {
    name: "gpt-oss",
    models: "gpt-oss",
    rope_mode: RopeMode::Neox,
    sinks: true,
    ffn_norm: "post_attention_norm.weight",
    experts: ExpertUse::Always,
    biases: &["attn_output.bias", "ffn_gate_inp.bias", "ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias"],
    keys: &["attention.sliding_window", "rope.freq_base_swa"],
    variant: |keys, hparams| {
        let base = keys.positive("rope.freq_base_swa", Some(hparams.rope.freq_base))?;
        let local = Rope { freq_base: base, ..hparams.rope };
        Ok(Variant {
            gate: GluKind::SwigluOai { alpha: 1.702, limit: 7.0 },
            positions: Positions::windows(keys, hparams.layers, PATTERN, local)?,
            ..Variant::LLAMA
        })
    },
    ..ArchSpec::LLAMA
};

/// Every n-th block sees all positions, unless the file says otherwise.
const PATTERN: u32 = 2;

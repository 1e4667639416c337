//! The tensors of each architecture by name, and what becomes of the other tensors of a file: the few that cannot change the logits
//! are ignored, and all others are refused, because the file describes a model that this program would run wrongly. llama.cpp
//! refuses the same files, and the ignored names too, except `cls.output.weight`.

use crate::hparams::{Arch, HParams};
use fanout::gguf::Gguf;
use std::fmt;
use thiserror::Error;

/// Most tensors that an error names.
const MAX_NAMED: usize = 4;
/// Most characters of a name in a message. A name may be as long as the file.
const MAX_NAME_CHARS: usize = 64;

/// The part of the model that a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelPart {
    /// The token embedding.
    Embedding,
    /// A transformer block, by its number.
    Block(usize),
    /// The output weights and their norm.
    Output,
    /// A tensor that all blocks use.
    EveryBlock,
}

/// Tensors of the blocks of all architectures, without the prefix of a block.
const BLOCK_TENSORS: &[&str] = &[
    "attn_norm.weight",
    "attn_q.weight",
    "attn_q.bias",
    "attn_k.weight",
    "attn_k.bias",
    "attn_v.weight",
    "attn_v.bias",
    "attn_output.weight",
];
const HEAD_NORMS: &[&str] = &["attn_q_norm.weight", "attn_k_norm.weight"];
const RESULT_NORMS: &[&str] = &["post_attention_norm.weight", "post_ffw_norm.weight"];
const SINKS: &[&str] = &["attn_sinks.weight"];
const DENSE: &[&str] = &["ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"];
const MIXTURE: &[&str] = &["ffn_gate_inp.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"];

/// Tensors that cannot change the logits, without the prefix of a block. Older files have the frequencies of the rotary embedding,
/// which follow from `rope.freq_base`; models that rank texts have a head of their own.
const IGNORED_TENSORS: &[(&str, &[Arch])] =
    &[("attn_rot_embd", &Arch::ALL), ("attn_rot_embd.weight", &Arch::ALL), ("cls.output.weight", &[Arch::Qwen3])];

impl ModelPart {
    /// The part that a tensor of this name belongs to; `None` if the model does not use it.
    pub fn of(name: &str, hparams: &HParams) -> Option<ModelPart> {
        let spec = hparams.arch.spec();
        match split_block(name) {
            (Some(block), rest) => {
                let known = [
                    (BLOCK_TENSORS, true),
                    (spec.biases, true),
                    (&[spec.ffn_norm], true),
                    (HEAD_NORMS, spec.head_norms),
                    (RESULT_NORMS, spec.result_norms),
                    (SINKS, spec.sinks),
                    (DENSE, hparams.experts.is_none()),
                    (MIXTURE, hparams.experts.is_some()),
                ];
                let known = known.iter().any(|&(names, used)| used && names.contains(&rest));
                (known && block < hparams.layers).then_some(ModelPart::Block(block))
            }
            (None, "token_embd.weight") => Some(ModelPart::Embedding),
            (None, "output_norm.weight" | "output.weight") => Some(ModelPart::Output),
            (None, "output.bias") => spec.output_bias.then_some(ModelPart::Output),
            (None, name) => {
                let factors = [0, usize::MAX].map(|context| hparams.rope_factors_name(context));
                factors.contains(&Some(name)).then_some(ModelPart::EveryBlock)
            }
        }
    }
}

/// The number of the block in a tensor's name, if it has one, and the rest of the name.
fn split_block(name: &str) -> (Option<usize>, &str) {
    let block = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    match block.and_then(|(number, rest)| Some((number.parse().ok()?, rest))) {
        Some((number, rest)) => (Some(number), rest),
        None => (None, name),
    }
}

/// A file has tensors that this program does not know in its architecture.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub struct UnknownTensors {
    arch: Arch,
    layers: usize,
    names: Vec<String>,
}

impl fmt::Display for UnknownTensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let UnknownTensors { arch, layers, names } = self;
        let named = names.iter().take(MAX_NAMED).map(|name| {
            let shown: String = name.chars().take(MAX_NAME_CHARS).collect();
            match split_block(name) {
                (Some(block), _) if block < *layers => format!("{shown:?} of block {block}"),
                (Some(block), _) => format!("{shown:?} of block {block}, where {arch}.block_count is {layers}"),
                (None, _) => format!("{shown:?}"),
            }
        });
        let named: Vec<String> = named.collect();
        write!(f, "the file has tensors that this program does not know in the architecture {arch}, ")?;
        write!(f, "and text without them would be wrong: {}", named.join(", "))?;
        match names.len().saturating_sub(MAX_NAMED) {
            0 => Ok(()),
            more => write!(f, ", and {more} more"),
        }
    }
}

/// Checks that the model uses every tensor of its file, except those that cannot change the logits. Logs these once, at level info.
///
/// # Errors
/// [`UnknownTensors`] names the others.
pub fn check(gguf: &Gguf<'_>, hparams: &HParams) -> Result<(), UnknownTensors> {
    let ignored = ignored(gguf.tensors.iter().map(|tensor| &*tensor.name), hparams)?;
    if !ignored.is_empty() {
        log::info!("ignored tensors, which cannot change the text: {}", ignored.join(", "));
    }
    Ok(())
}

/// The names of ignored tensors of a file.
fn ignored<'a>(names: impl Iterator<Item = &'a str>, hparams: &HParams) -> Result<Vec<&'a str>, UnknownTensors> {
    let (arch, layers) = (hparams.arch, hparams.layers);
    let unused = names.filter(|name| ModelPart::of(name, hparams).is_none());
    let (ignored, unknown): (Vec<&str>, Vec<&str>) = unused.partition(|name| {
        let (block, rest) = split_block(name);
        let known = IGNORED_TENSORS.iter().any(|(known, archs)| *known == rest && archs.contains(&arch));
        known && block.is_none_or(|block| block < layers)
    });
    if unknown.is_empty() {
        return Ok(ignored);
    }
    Err(UnknownTensors { arch, layers, names: unknown.into_iter().map(str::to_owned).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tests::toy::{ARCHS, ToyModel};

    #[test]
    fn every_tensor_of_each_architecture_is_known() {
        for arch in ARCHS {
            let toy = ToyModel::new(arch);
            assert_eq!(ignored(toy.tensors.keys().map(String::as_str), &toy.hparams), Ok(vec![]), "{arch}");
        }
    }

    #[test]
    fn unknown_tensors_are_named_with_their_block() {
        let cases: &[(Arch, &[&str], &str)] = &[
            (
                Arch::Llama,
                &["blk.2.attn_sinks.weight"],
                "architecture llama, and text without them would be wrong: \"blk.2.attn_sinks.weight\" of block 2",
            ),
            (Arch::SmolLm3, &["blk.0.post_ffw_norm.weight"], "\"blk.0.post_ffw_norm.weight\" of block 0"),
            (Arch::Llama, &["blk.0.attn_qkv.weight"], "\"blk.0.attn_qkv.weight\" of block 0"),
            (Arch::Llama, &["blk.1.attn_q.scale"], "\"blk.1.attn_q.scale\" of block 1"),
            (Arch::Llama, &["blk.1.attn_q_norm.weight"], "\"blk.1.attn_q_norm.weight\" of block 1"),
            (Arch::Llama, &["blk.0.ffn_gate.0.weight"], "\"blk.0.ffn_gate.0.weight\" of block 0"),
            (Arch::Llama, &["blk.3.attn_q.weight"], "\"blk.3.attn_q.weight\" of block 3, where llama.block_count is 3"),
            (Arch::Llama, &["blk.3.attn_rot_embd"], "of block 3, where llama.block_count is 3"),
            (Arch::Llama, &["output.bias"], "would be wrong: \"output.bias\""),
            (Arch::Llama, &["cls.output.weight"], "would be wrong: \"cls.output.weight\""),
            (Arch::Llama, &["rope_factors_long.weight"], "would be wrong: \"rope_factors_long.weight\""),
            (Arch::Phi3, &["rope_freqs.weight"], "would be wrong: \"rope_freqs.weight\""),
            (Arch::GptOss, &["blk.0.ffn_norm.weight"], "\"blk.0.ffn_norm.weight\" of block 0"),
            (
                Arch::Qwen2,
                &["rope_freqs.weight"],
                "architecture qwen2, and text without them would be wrong: \"rope_freqs.weight\"",
            ),
            (Arch::Qwen2, &["blk.0.attn_output.bias"], "\"blk.0.attn_output.bias\" of block 0"),
            (Arch::Qwen3, &["blk.0.ffn_up.bias"], "\"blk.0.ffn_up.bias\" of block 0"),
            (Arch::Qwen3Moe, &["blk.0.ffn_up.weight"], "\"blk.0.ffn_up.weight\" of block 0"),
            (Arch::Qwen3Moe, &["blk.x.ffn_up.weight", "blk.1", "a\n"], "\"blk.x.ffn_up.weight\", \"blk.1\", \"a\\n\""),
            (Arch::Qwen3, &["a", "b", "c", "d", "e", "f"], "\"a\", \"b\", \"c\", \"d\", and 2 more"),
        ];
        for &(arch, names, expected) in cases {
            let toy = ToyModel::new(arch);
            let all = toy.tensors.keys().map(String::as_str).chain(names.iter().copied());
            let error = ignored(all, &toy.hparams).unwrap_err().to_string();
            assert!(error.ends_with(expected), "{error}\n{expected}");
        }
        let long = "x".repeat(1000);
        let hparams = ToyModel::new(Arch::Llama).hparams;
        assert!(ignored([&*long].into_iter(), &hparams).unwrap_err().to_string().len() < 300);
    }

    #[test]
    fn tensors_that_cannot_change_the_logits_are_ignored() {
        let cases: &[(Arch, &str)] = &[
            (Arch::Llama, "blk.2.attn_rot_embd"),
            (Arch::Qwen2, "blk.0.attn_rot_embd.weight"),
            (Arch::Qwen3, "cls.output.weight"),
        ];
        for &(arch, name) in cases {
            let hparams = ToyModel::new(arch).hparams;
            assert_eq!(ignored(["output.weight", name].into_iter(), &hparams), Ok(vec![name]));
            assert_eq!(ModelPart::of(name, &hparams), None);
        }
    }
}

//! What each architecture has beyond a llama: a file each. An [`ArchSpec`] is fixed in an architecture; a [`Variant`] has the parameters of
//! the graph in which the models differ.

mod gemma3;
mod gpt_oss;
mod granite;
mod llama;
mod mistral3;
mod phi3;
mod qwen2;
mod qwen3;
mod smollm3;

use super::{Arch, HParams, Keys};
use fanout::gguf::{KeyError, Value};
use fanout::ops::glu::GluKind;
use fanout::ops::rope::{Rope, RopeMode};
use std::num::NonZeroU32;

/// An architecture: its name, and what is the same in all of its models.
#[derive(Debug)]
pub struct ArchSpec {
    /// The name in `general.architecture`, which is also the prefix of the architecture's keys.
    pub name: &'static str,
    /// Models of the architecture.
    pub models: &'static str,
    /// Which channels the rotary embedding pairs. Llama and its relatives pair neighbours, because llama.cpp's converter reorders the
    /// rows of their query and key weights; all other architectures pair the two halves of a head.
    pub rope_mode: RopeMode,
    /// Whether only some channels of a head may be rotated.
    pub partial_rope: bool,
    /// Frequency factors of the rotation.
    pub rope_factors: RopeFactors,
    /// Whether queries and keys are normalised, head by head.
    pub head_norms: bool,
    /// Whether the results of attention and of the feed-forward network are normalised.
    pub result_norms: bool,
    /// Whether each head has a sink: a score without a value, which takes its share of the attention.
    pub sinks: bool,
    /// The norm before the feed-forward network.
    pub ffn_norm: &'static str,
    /// Mixtures of experts.
    pub experts: ExpertUse,
    /// Biases that tensors of a block may have, beside those of queries, keys and values.
    pub biases: &'static [&'static str],
    /// Whether the output matrix may have a bias.
    pub output_bias: bool,
    /// Keys that change the logits, beyond those of a llama.
    pub(super) keys: &'static [&'static str],
    /// Reads the variant of a model whose other hyperparameters are known.
    pub(super) variant: fn(&Keys<'_>, &HParams) -> Result<Variant, KeyError>,
}

/// The tensors with frequency factors that a model may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeFactors {
    /// None.
    None,
    /// One for all contexts.
    One,
    /// LongRoPE: one for contexts beyond the original one, and one for others.
    LongShort,
}

/// Whether the models of an architecture are mixtures of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertUse {
    /// None is.
    Never,
    /// Those that count experts, each as wide as `feed_forward_length`.
    IfCounted,
    /// All are.
    Always,
}

impl ArchSpec {
    const LLAMA: ArchSpec = ArchSpec {
        name: "llama",
        models: "Llama 1 to 3, Mistral, Mixtral, SmolLM2 and others",
        rope_mode: RopeMode::Normal,
        partial_rope: false,
        rope_factors: RopeFactors::None,
        head_norms: false,
        result_norms: false,
        sinks: false,
        ffn_norm: "ffn_norm.weight",
        experts: ExpertUse::Never,
        biases: &[],
        output_bias: false,
        keys: &[],
        variant: |_, _| Ok(Variant::LLAMA),
    };
}

impl Arch {
    /// What is the same in all models of the architecture.
    pub fn spec(self) -> &'static ArchSpec {
        match self {
            Arch::Llama => &llama::SPEC,
            Arch::Mistral3 => &mistral3::SPEC,
            Arch::Qwen2 => &qwen2::SPEC,
            Arch::Qwen3 => &qwen3::DENSE,
            Arch::Qwen3Moe => &qwen3::MIXTURE,
            Arch::Gemma3 => &gemma3::SPEC,
            Arch::GptOss => &gpt_oss::SPEC,
            Arch::Granite => &granite::SPEC,
            Arch::Phi3 => &phi3::SPEC,
            Arch::SmolLm3 => &smollm3::SPEC,
        }
    }
}

/// What a model computes beyond, or other than, a llama.
#[derive(Clone, Debug, PartialEq)]
pub struct Variant {
    /// Factor on the embeddings.
    pub embedding_scale: f32,
    /// Factor on the results of attention and of the feed-forward network, before they are added to the residual.
    pub residual_scale: f32,
    /// Factor on the scores of attention; `None`: one over the square root of a head's length.
    pub attention_scale: Option<f32>,
    /// A factor on the scores of attention that grows with the position.
    pub temperature: Option<Temperature>,
    /// Factor on the logits.
    pub logit_scale: f32,
    /// Logits x become `cap * tanh(x / cap)`.
    pub logit_cap: Option<f32>,
    /// The activation of the feed-forward network's gate.
    pub gate: GluKind,
    /// Which positions the blocks see, and how.
    pub positions: Positions,
}

/// Attention is sharper at late positions: scores are multiplied by `1 + scale * ln(1 + floor(position / step))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temperature {
    /// Factor on the logarithm.
    pub scale: f32,
    /// Positions with the same factor.
    pub step: f32,
}

/// How the blocks treat positions.
#[derive(Clone, Debug, PartialEq)]
pub enum Positions {
    /// All blocks rotate queries and keys.
    Rotated,
    /// All but each n-th block rotate them; `Some(1)`: no block does.
    UnrotatedEvery(usize),
    /// Some blocks see a sliding window only.
    Windows {
        /// Positions of the window, the token's own included.
        width: NonZeroU32,
        /// By block: whether it has the window.
        local: Vec<bool>,
        /// The rotation in these blocks.
        rope: Rope,
    },
}

impl Variant {
    /// A llama's.
    pub const LLAMA: Variant = Variant {
        embedding_scale: 1.0,
        residual_scale: 1.0,
        attention_scale: None,
        temperature: None,
        logit_scale: 1.0,
        logit_cap: None,
        gate: GluKind::Swiglu,
        positions: Positions::Rotated,
    };
}

impl Positions {
    /// The windows of a file, with this rotation. Without `attention.sliding_window_pattern`, each block but every `every`-th has the
    /// window.
    fn windows(keys: &Keys<'_>, layers: usize, every: u32, rope: Rope) -> Result<Positions, KeyError> {
        let width = keys.metadata.int(&keys.name("attention.sliding_window"))?.and_then(NonZeroU32::new);
        let Some(width) = width else { return Ok(Positions::Rotated) };
        let key = "attention.sliding_window_pattern";
        let local = match keys.metadata.get(&keys.name(key)) {
            Some(Value::Array(flags)) => {
                let flags: Vec<bool> = flags.values().map(|flag| matches!(flag, Value::Bool(true))).collect();
                if flags.len() < layers {
                    return Err(keys.unfit(key, format!("a flag for each of {layers} blocks"), flags.len()));
                }
                flags
            }
            _ => {
                let every = keys.metadata.int(&keys.name(key))?.unwrap_or(every) as usize;
                (1..=layers).map(|number| every == 0 || !number.is_multiple_of(every)).collect()
            }
        };
        Ok(Positions::Windows { width, local, rope })
    }
}

impl HParams {
    /// The rotation of a block's queries and keys, if it has one.
    pub fn block_rope(&self, block: usize) -> Option<Rope> {
        match &self.variant.positions {
            Positions::UnrotatedEvery(n) if (block + 1).is_multiple_of(*n) => None,
            Positions::Windows { local, rope, .. } if local.get(block) == Some(&true) => Some(*rope),
            _ => Some(self.rope),
        }
    }

    /// The sliding window of a block's attention, if it has one.
    pub fn block_window(&self, block: usize) -> Option<NonZeroU32> {
        match &self.variant.positions {
            Positions::Windows { width, local, .. } if local.get(block) == Some(&true) => Some(*width),
            _ => None,
        }
    }

    /// Factor on the scores of attention.
    pub fn attention_scale(&self) -> f32 {
        self.variant.attention_scale.unwrap_or_else(|| (self.head_width as f32).sqrt().recip())
    }

    /// The tensor with the frequency factors of the rotation, in a context of this many tokens.
    pub fn rope_factors_name(&self, context: usize) -> Option<&'static str> {
        match self.rope_factors {
            RopeFactors::None => None,
            RopeFactors::One => Some("rope_freqs.weight"),
            RopeFactors::LongShort if context > self.rope.n_ctx_orig as usize => Some("rope_factors_long.weight"),
            RopeFactors::LongShort => Some("rope_factors_short.weight"),
        }
    }
}

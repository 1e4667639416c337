//! What each key of an architecture does in this program: a decision for every key that llama.cpp's loader reads for the
//! architectures that this program runs, and for every key by which a model of another architecture computes something else with
//! the same tensors.
//!
//! A key that is not implemented and changes the logits is refused, because text that is almost right is worse than an error.
//! The keys of one architecture alone are in its file, `archs/`. Parts of a model that have tensors of their own need no row: their tensors are refused ([`crate::tensor_names`]).
//! llama.cpp writes all of its parameters into a file that it saves, with their defaults, so those defaults are accepted.

use super::{Arch, unfit};
use Effect::{Ignored, Only, Read};
use Neutral::{Flag, Number, Text};
use fanout::gguf::{KeyError, Metadata, Value};
use std::fmt;

/// What a key does.
enum Effect {
    /// [`super::HParams::read`] reads and validates the key.
    Read,
    /// The key cannot change the logits.
    Ignored,
    /// Not implemented: a value other than these, or an array with another value, would change the logits.
    Only(&'static [Neutral]),
}

/// A value with which a key changes nothing.
enum Neutral {
    Number(f64),
    Flag(bool),
    Text(&'static str),
}

impl Neutral {
    fn is(&self, value: &Value<'_>) -> bool {
        match (self, value) {
            (Number(neutral), Value::Int(n)) => *neutral == *n as f64,
            (Number(neutral), Value::Float(x)) => neutral == x,
            (Flag(neutral), Value::Bool(flag)) => neutral == flag,
            (Text(neutral), Value::Text(text)) => neutral == text,
            _ => false,
        }
    }
}

impl fmt::Display for Neutral {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Number(number) => number.fmt(f),
            Flag(flag) => flag.fmt(f),
            Text(text) => text.fmt(f),
        }
    }
}

const ZERO: Effect = Only(&[Number(0.0)]);
/// For counts that begin at 1, and for factors; llama.cpp's default of both is 0.
const AT_MOST_ONE: Effect = Only(&[Number(0.0), Number(1.0)]);
const FALSE: Effect = Only(&[Flag(false)]);

/// Keys without the prefix of the architecture.
const KEYS: &[(&str, Effect)] = &[
    ("block_count", Read),
    ("context_length", Read),
    ("embedding_length", Read),
    ("feed_forward_length", Read),
    ("vocab_size", Read),
    ("attention.head_count", Read),
    ("attention.head_count_kv", Read),
    ("attention.key_length", Read),
    ("attention.value_length", Read),
    ("attention.layer_norm_rms_epsilon", Read),
    ("rope.dimension_count", Read),
    ("rope.freq_base", Read),
    ("rope.scale_linear", Read),
    ("rope.scaling.attn_factor", Read),
    ("rope.scaling.factor", Read),
    ("rope.scaling.type", Read),
    ("expert_count", Read),
    ("expert_feed_forward_length", Read),
    ("expert_used_count", Read),
    // Attention.
    ("attention.causal", Only(&[Flag(true)])),
    ("attention.clamp_kqv", ZERO),
    ("attention.max_alibi_bias", ZERO),
    ("attention.scale", ZERO), // 0: one over the square root of a head's length
    ("attention.output_scale", AT_MOST_ONE),
    ("attention.value_scale", AT_MOST_ONE),
    ("attention.temperature_length", ZERO),
    ("attention.temperature_scale", ZERO),
    ("attention.relative_buckets_count", ZERO),
    ("attention.shared_kv_layers", ZERO),
    ("attention.sliding_window", ZERO),
    // These describe the blocks with a sliding window.
    ("attention.sliding_window_pattern", Ignored),
    ("attention.key_length_swa", Ignored),
    ("attention.value_length_swa", Ignored),
    ("rope.dimension_count_swa", Ignored),
    ("rope.freq_base_swa", Ignored),
    // 50 is llama.cpp's default, which it writes for models without the cap, too; likewise 30 below.
    ("attn_logit_softcapping", Only(&[Number(0.0), Number(50.0)])),
    // Rotary embedding: which blocks have it, and scaling.
    ("attention.rope_pattern", Only(&[Number(1.0), Flag(true)])),
    ("rope.scaling.alpha", AT_MOST_ONE),
    ("rope.scaling.finetuned", Ignored),
    ("rope.scaling.original_context_length", Read),
    ("rope.scaling.yarn_attn_factor", Ignored),
    ("rope.scaling.yarn_beta_fast", Read),
    ("rope.scaling.yarn_beta_slow", Read),
    ("rope.scaling.yarn_ext_factor", Ignored),
    ("rope.scaling.yarn_log_multiplier", Read),
    // Positions of images. All numbers of a token of text are its position.
    ("rope.dimension_sections", Ignored),
    // Factors, caps, activations and repetitions on the way from the embedding to the logits.
    ("embedding_scale", AT_MOST_ONE),
    ("residual_scale", AT_MOST_ONE),
    ("logit_scale", AT_MOST_ONE),
    ("final_logit_softcapping", Only(&[Number(0.0), Number(30.0)])),
    ("activation.situ_beta", Ignored), // of an activation that `situ_linear_beta` switches on
    ("activation.situ_linear_beta", ZERO),
    ("hidden_activation", Only(&[Text("silu"), Text("swish")])),
    ("hrm.h_cycles", ZERO),
    ("use_parallel_residual", FALSE),
    ("swin_norm", FALSE),
    ("num_loops", AT_MOST_ONE),
    ("rescale_every_n_layers", ZERO),
    ("swiglu_clamp_exp", ZERO),
    ("swiglu_clamp_shexp", ZERO),
    // Mixtures of experts: a softmax over all experts, whose largest are always normalised (`expert_weights_norm` says so in other
    // architectures), in every block.
    ("expert_gating_func", AT_MOST_ONE), // 1 is softmax
    ("expert_group_count", AT_MOST_ONE),
    ("expert_group_used_count", AT_MOST_ONE),
    ("expert_shared_count", ZERO),
    ("expert_shared_feed_forward_length", ZERO),
    ("expert_weights_norm", Ignored),
    ("expert_weights_scale", AT_MOST_ONE),
    ("interleave_moe_layer_step", AT_MOST_ONE),
    ("leading_dense_block_count", ZERO),
    ("moe_every_n_layers", AT_MOST_ONE),
    ("router_logit_softcapping", Only(&[Number(0.0), Number(30.0)])),
    // Blocks that predict further tokens, which are not among the blocks that compute the logits.
    ("nextn_predict_layers", ZERO),
    // Embeddings and rankings of texts, and norms and parts that these architectures do not have.
    ("attention.indexer.kpool_select_tail", Ignored),
    ("attention.group_norm_epsilon", Ignored),
    ("attention.group_norm_groups", Ignored),
    ("attention.layer_norm_epsilon", Ignored),
    ("classifier.output_labels", Ignored),
    ("classifier.pooling_type", Ignored),
    ("decoder_start_token_id", Ignored),
    ("deepstack_mapping", Ignored),
    ("embedding_length_out", Ignored),
    ("expert_group_scale", Ignored),
    ("kda.gate_lower_bound", Ignored),
    ("pooling_type", Ignored),
    ("tensor_data_layout", Ignored),
    ("token_shift_count", Ignored),
];

/// Refuses the first key of the architecture that changes the logits and is not implemented. Returns the keys that the table lacks
/// and that switch something on: all that are neither 0, false nor an array of those.
pub(super) fn check<'a>(arch: Arch, metadata: &Metadata<'a>) -> Result<Vec<&'a str>, KeyError> {
    let mut unknown = Vec::new();
    for (key, value) in metadata.iter() {
        let Some(name) = key.strip_prefix(arch.name()).and_then(|rest| rest.strip_prefix('.')) else { continue };
        if arch.spec().keys.contains(&name) {
            continue;
        }
        match KEYS.iter().find(|(known, _)| *known == name).map(|(_, effect)| effect) {
            Some(Read | Ignored) => {}
            Some(Only(neutral)) => {
                if let Some(other) = first_other(neutral, value) {
                    let values: Vec<String> = neutral.iter().map(ToString::to_string).collect();
                    let expected = format!("{}: other values are not implemented", values.join(" or "));
                    return Err(unfit(key, expected, other));
                }
            }
            None if first_other(&[Number(0.0), Flag(false)], value).is_none() => {}
            None => unknown.push(*key),
        }
    }
    Ok(unknown)
}

/// The value, or the first value of an array, that is none of the neutral ones.
fn first_other<'a>(neutral: &[Neutral], value: &Value<'a>) -> Option<Value<'a>> {
    let is_other = |value: &Value<'a>| !neutral.iter().any(|neutral| neutral.is(value));
    match value {
        Value::Array(array) => array.values().find(is_other),
        value => Some(value.clone()).filter(is_other),
    }
}

//! Hyperparameters of a model, read and validated from the metadata of its GGUF file. `keys.rs` refuses what is not implemented.

mod archs;
mod keys;

pub use archs::{ArchSpec, ExpertUse, Positions, RopeFactors, Temperature, Variant};

use std::fmt;

use fanout::ops::rope::Rope;

use fanout::gguf::{KeyError, Metadata, Value, required};

/// A model architecture that this program runs. `archs/` has a file for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the files in archs/ say what they are")]
pub enum Arch {
    Llama,
    Mistral3,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Gemma3,
    GptOss,
    Granite,
    Phi3,
    SmolLm3,
}

impl Arch {
    /// Every architecture.
    pub const ALL: [Arch; 10] = [
        Arch::Llama,
        Arch::Mistral3,
        Arch::Qwen2,
        Arch::Qwen3,
        Arch::Qwen3Moe,
        Arch::Gemma3,
        Arch::GptOss,
        Arch::Granite,
        Arch::Phi3,
        Arch::SmolLm3,
    ];

    /// The name in `general.architecture`, which is also the prefix of the architecture's keys.
    pub fn name(self) -> &'static str {
        self.spec().name
    }

    fn read(metadata: &Metadata<'_>) -> Result<Arch, KeyError> {
        const KEY: &str = "general.architecture";
        let name = required(KEY, metadata.text(KEY)?)?;
        Arch::ALL.into_iter().find(|arch| arch.name() == name).ok_or_else(|| {
            let supported = Arch::ALL.map(Arch::name).join(", ");
            unfit(KEY, format!("one of {supported}, the architectures this program runs"), format_args!("{name:?}"))
        })
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The hyperparameters of a model. All counts are above 0.
#[derive(Clone, Debug, PartialEq)]
pub struct HParams {
    /// Architecture.
    pub arch: Arch,
    /// Transformer blocks.
    pub layers: usize,
    /// Channels of a token's hidden state (`embedding_length`).
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; `heads` is a multiple of it (grouped-query attention).
    pub kv_heads: usize,
    /// Channels of a head: queries, keys and values alike.
    pub head_width: usize,
    /// Hidden channels of the feed-forward network; unused in a mixture of experts.
    pub ff: usize,
    /// The mixture of experts, if the model has one.
    pub experts: Option<Experts>,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Context length of the training, in tokens.
    pub context: usize,
    /// Added to the mean square in RMS_NORM.
    pub rms_epsilon: f32,
    /// Rotary position embedding of queries and keys, without the frequency factors.
    pub rope: Rope,
    /// The tensors with frequency factors.
    pub rope_factors: RopeFactors,
    /// What the architecture computes beyond a llama.
    pub variant: Variant,
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Experts of a block.
    pub count: usize,
    /// Experts that are evaluated for each token; at most `count`.
    pub used: usize,
    /// Hidden channels of one expert.
    pub ff: usize,
}

impl HParams {
    /// Reads and validates the hyperparameters. Logs a warning for each key that may be wrong.
    ///
    /// # Errors
    /// [`KeyError`] for an unsupported architecture, a missing key, a key that contradicts another, and a feature that this
    /// program does not implement.
    pub fn read(metadata: &Metadata<'_>) -> Result<HParams, KeyError> {
        let (hparams, warnings) = read_with_warnings(metadata)?;
        warnings.iter().for_each(|warning| log::warn!("{warning}"));
        Ok(hparams)
    }

    /// Channels of all key heads (equally of all value heads) of a token in one block.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_width
    }
}

/// As [`HParams::read`], with the warnings.
fn read_with_warnings(metadata: &Metadata<'_>) -> Result<(HParams, Vec<String>), KeyError> {
    let arch = Arch::read(metadata)?;
    let unknown = keys::check(arch, metadata)?;
    let keys = Keys { arch, metadata };
    let layers = keys.count("block_count")?;
    let width = keys.count("embedding_length")?;
    let heads = keys.block_count("attention.head_count", layers)?;
    let kv_heads = keys.optional_block_count("attention.head_count_kv", layers)?.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        let expected = format!("a divisor of {}, {heads}", keys.name("attention.head_count"));
        return Err(keys.unfit("attention.head_count_kv", expected, kv_heads));
    }
    let head_width = keys.head_width(width, heads)?;
    let context = keys.count("context_length")?;
    let (vocab, vocab_warning) = keys.vocab()?;
    let mut hparams = HParams {
        arch,
        layers,
        width,
        heads,
        kv_heads,
        head_width,
        ff: keys.block_count("feed_forward_length", layers)?,
        experts: keys.experts(layers)?,
        vocab,
        context,
        rms_epsilon: keys.positive("attention.layer_norm_rms_epsilon", None)?,
        rope: keys.rope(head_width, context)?,
        rope_factors: keys.rope_factors()?,
        variant: Variant::LLAMA,
    };
    hparams.variant = (arch.spec().variant)(&keys, &hparams)?;
    let mut warnings = Vec::from_iter(vocab_warning);
    if !unknown.is_empty() {
        warnings.push(format!(
            "this program does not know these keys of the file, and ignores them: {}",
            unknown.join(", ")
        ));
    }
    Ok((hparams, warnings))
}

/// Reads the keys of one architecture, which all have its name as prefix.
struct Keys<'a> {
    arch: Arch,
    metadata: &'a Metadata<'a>,
}

impl Keys<'_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    fn unfit(&self, key: &str, expected: impl Into<String>, found: impl fmt::Display) -> KeyError {
        unfit(&self.name(key), expected, found)
    }

    fn optional_count(&self, key: &str) -> Result<Option<usize>, KeyError> {
        match self.metadata.int(&self.name(key))? {
            Some(0) => Err(self.unfit(key, "a number above 0", 0)),
            count => Ok(count.map(|n| n as usize)),
        }
    }

    fn count(&self, key: &str) -> Result<usize, KeyError> {
        required(&self.name(key), self.optional_count(key)?)
    }

    /// A number that all blocks share: a number, or an array with the same number for each block.
    fn optional_block_count(&self, key: &str, layers: usize) -> Result<Option<usize>, KeyError> {
        let name = self.name(key);
        if !matches!(self.metadata.get(&name), Some(Value::Array(_))) {
            return self.optional_count(key);
        }
        let counts = required(&name, self.metadata.ints(&name)?)?;
        if counts.len() != layers {
            return Err(self.unfit(key, format!("a number for each of {layers} blocks"), counts.len()));
        }
        let first = counts.first().copied().unwrap_or_default();
        if let Some(block) = counts.iter().position(|&count| count != first) {
            let found = format!("{first} in block 0 and {} in block {block}", counts[block]);
            return Err(self.unfit(key, "the same number in all blocks: others are not supported", found));
        }
        if first == 0 { Err(self.unfit(key, "a number above 0", 0)) } else { Ok(Some(first as usize)) }
    }

    fn block_count(&self, key: &str, layers: usize) -> Result<usize, KeyError> {
        required(&self.name(key), self.optional_block_count(key, layers)?)
    }

    /// A number above 0, or `default` if the file lacks the key.
    fn positive(&self, key: &str, default: Option<f32>) -> Result<f32, KeyError> {
        let name = self.name(key);
        let value = required(&name, self.metadata.float(&name)?.or(default))?;
        if value > 0.0 { Ok(value) } else { Err(self.unfit(key, "a number above 0", value)) }
    }

    fn head_width(&self, width: usize, heads: usize) -> Result<usize, KeyError> {
        let (key, value) = ("attention.key_length", "attention.value_length");
        let head_width = match self.optional_count(key)? {
            Some(length) => length,
            None if width.is_multiple_of(heads) => width / heads,
            None => {
                let expected = format!("a divisor of {}, {width}", self.name("embedding_length"));
                return Err(self.unfit("attention.head_count", expected, heads));
            }
        };
        // A file that has only the key length gets the default value length, `width / heads`, as in llama.cpp.
        let values = self.optional_count(value)?.unwrap_or(if self.has(key) { width / heads } else { head_width });
        if values != head_width {
            let expected = format!("{head_width}, the length of a key: others are not supported");
            return Err(self.unfit(value, expected, values));
        }
        Ok(head_width)
    }

    fn has(&self, key: &str) -> bool {
        self.metadata.get(&self.name(key)).is_some()
    }

    fn experts(&self, layers: usize) -> Result<Option<Experts>, KeyError> {
        let (key, uses) = ("expert_count", self.arch.spec().experts);
        let count = match self.metadata.int(&self.name(key))?.unwrap_or(0) as usize {
            0 if uses != ExpertUse::Always => return Ok(None),
            0 => self.count(key)?,
            count if uses == ExpertUse::Never => return Err(self.unfit(key, "no experts in this architecture", count)),
            count => count,
        };
        let used = self.block_count("expert_used_count", layers)?;
        if used > count {
            return Err(self.unfit("expert_used_count", format!("at most the {count} experts"), used));
        }
        let wide = self.block_count("feed_forward_length", layers)?;
        let ff = match self.optional_block_count("expert_feed_forward_length", layers)? {
            Some(ff) if uses == ExpertUse::Always => ff,
            None if uses == ExpertUse::Always => (wide / used).max(1),
            _ => wide,
        };
        Ok(Some(Experts { count, used, ff }))
    }

    /// The vocabulary size: the length of the token list, and `vocab_size` only without a list. A warning if they differ:
    /// llama.cpp runs such a file by the list, too.
    fn vocab(&self) -> Result<(usize, Option<String>), KeyError> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        let key = self.name("vocab_size");
        let tokens = match self.metadata.get(TOKENS) {
            Some(Value::Array(tokens)) if !tokens.is_empty() => tokens.len(),
            Some(other) => return Err(unfit(TOKENS, "an array of tokens", other)),
            None => return Ok((required(TOKENS, self.optional_count("vocab_size")?)?, None)),
        };
        let warning = self.metadata.int(&key)?.filter(|&size| size as usize != tokens);
        let warning = warning
            .map(|size| format!("{key} is {size}, but the file has {tokens} tokens: the model is run with {tokens}"));
        Ok((tokens, warning))
    }

    fn rope(&self, head_width: usize, context: usize) -> Result<Rope, KeyError> {
        let (key, spec) = ("rope.dimension_count", self.arch.spec());
        let dims = self.optional_count(key)?.unwrap_or(head_width);
        let fits = if spec.partial_rope { dims <= head_width } else { dims == head_width };
        if !fits || !dims.is_multiple_of(2) {
            let expected = format!("an even number and the length of a head, {head_width}: all channels are rotated");
            return Err(self.unfit(key, expected, dims));
        }
        let kind = self.rope_scaling()?;
        let factor = match kind {
            "none" => 1.0,
            // Older files have `rope.scale_linear` instead of `rope.scaling.factor`.
            _ if self.has("rope.scaling.factor") => self.scaling("rope.scaling.factor")?,
            _ => self.scaling("rope.scale_linear")?,
        };
        let original = self.optional_count("rope.scaling.original_context_length")?.unwrap_or(context);
        let rope = Rope {
            n_ctx_orig: i32::try_from(original).unwrap_or(i32::MAX),
            freq_base: self.positive("rope.freq_base", Some(10000.0))?,
            freq_scale: 1.0 / factor,
            attn_factor: self.positive("rope.scaling.attn_factor", Some(1.0))?,
            ..Rope::new(spec.rope_mode, dims as u32)
        };
        if kind != "yarn" {
            return Ok(rope);
        }
        // The file's numbers count in the architectures of which llama.cpp reads them.
        let number = |key: &str, default: f32| match self.arch {
            Arch::Mistral3 => Ok(self.metadata.float(&self.name(key))?.unwrap_or(default)),
            _ => Ok(default),
        };
        let log_multiplier = number("rope.scaling.yarn_log_multiplier", 0.0)?;
        // The op multiplies by `1 + 0.1 ln(factor)`, which llama.cpp cancels for factors below 1, and where the file has a multiplier.
        let magnitude = |multiplier: f32| if factor <= 1.0 { 1.0 } else { 1.0 + 0.1 * multiplier * factor.ln() };
        let wanted = if log_multiplier == 0.0 { magnitude(1.0) } else { magnitude(1.0) / magnitude(log_multiplier) };
        Ok(Rope {
            ext_factor: 1.0,
            attn_factor: rope.attn_factor * (wanted / (1.0 + 0.1 * factor.ln())),
            beta_fast: number("rope.scaling.yarn_beta_fast", 32.0)?,
            beta_slow: number("rope.scaling.yarn_beta_slow", 1.0)?,
            ..rope
        })
    }

    fn rope_scaling(&self) -> Result<&str, KeyError> {
        let key = "rope.scaling.type";
        match self.metadata.text(&self.name(key))?.unwrap_or("linear") {
            kind @ ("none" | "linear" | "yarn" | "longrope") => Ok(kind),
            other => Err(self.unfit(key, "none, linear, yarn or longrope", format_args!("{other:?}"))),
        }
    }

    fn rope_factors(&self) -> Result<RopeFactors, KeyError> {
        let long = self.rope_scaling()? == "longrope";
        Ok(match self.arch.spec().rope_factors {
            RopeFactors::One if long => RopeFactors::LongShort,
            factors => factors,
        })
    }

    /// The factor that positions are divided by (linear RoPE scaling). A missing key and 0 mean no scaling.
    fn scaling(&self, key: &str) -> Result<f32, KeyError> {
        match self.metadata.float(&self.name(key))? {
            None | Some(0.0) => Ok(1.0),
            Some(_) => self.positive(key, None),
        }
    }
}

fn unfit(key: &str, expected: impl Into<String>, found: impl fmt::Display) -> KeyError {
    KeyError::WrongType { key: key.to_owned(), expected: expected.into(), found: found.to_string() }
}

#[cfg(test)]
mod tests;

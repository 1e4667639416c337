//! Hyperparameters of a model, read and validated from the metadata of its GGUF file.

use std::fmt;

use fanout::ops::rope::{Rope, RopeMode};

use fanout::gguf::{KeyError, Metadata, required};

/// A model architecture that this program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    /// Llama 1 to 3, and models of the same architecture.
    Llama,
    /// Qwen 2 and 2.5: biases on queries, keys and values.
    Qwen2,
    /// Qwen 3: queries and keys are normalised, head by head.
    Qwen3,
    /// Qwen 3 with a mixture of experts.
    Qwen3Moe,
}

impl Arch {
    /// Every architecture.
    pub const ALL: [Arch; 4] = [Arch::Llama, Arch::Qwen2, Arch::Qwen3, Arch::Qwen3Moe];

    /// The name in `general.architecture`, which is also the prefix of the architecture's keys.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Llama => "llama",
            Arch::Qwen2 => "qwen2",
            Arch::Qwen3 => "qwen3",
            Arch::Qwen3Moe => "qwen3moe",
        }
    }

    /// Which channels the rotary embedding pairs. Llama pairs neighbours, because llama.cpp's converter reorders the rows of
    /// its query and key weights; all other architectures pair the two halves of a head.
    pub fn rope_mode(self) -> RopeMode {
        match self {
            Arch::Llama => RopeMode::Normal,
            Arch::Qwen2 | Arch::Qwen3 | Arch::Qwen3Moe => RopeMode::Neox,
        }
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
    /// Rotary position embedding of queries and keys, without the frequency factors: those are the tensor `rope_freqs.weight`.
    pub rope: Rope,
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
    /// Reads and validates the hyperparameters.
    ///
    /// # Errors
    /// [`KeyError`] for an unsupported architecture, a missing key, a key that contradicts another, and a feature that this
    /// program does not implement.
    pub fn read(metadata: &Metadata<'_>) -> Result<HParams, KeyError> {
        let arch = Arch::read(metadata)?;
        let keys = Keys { arch, metadata };
        let width = keys.count("embedding_length")?;
        let heads = keys.count("attention.head_count")?;
        let kv_heads = keys.optional_count("attention.head_count_kv")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of {}, {heads}", keys.name("attention.head_count"));
            return Err(keys.unfit("attention.head_count_kv", expected, kv_heads));
        }
        let head_width = keys.head_width(width, heads)?;
        let context = keys.count("context_length")?;
        Ok(HParams {
            arch,
            layers: keys.count("block_count")?,
            width,
            heads,
            kv_heads,
            head_width,
            ff: keys.count("feed_forward_length")?,
            experts: keys.experts()?,
            vocab: keys.vocab()?,
            context,
            rms_epsilon: keys.positive("attention.layer_norm_rms_epsilon", None)?,
            rope: keys.rope(head_width, context)?,
        })
    }

    /// Channels of all key heads (equally of all value heads) of a token in one block.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_width
    }
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

    fn experts(&self) -> Result<Option<Experts>, KeyError> {
        if self.arch != Arch::Qwen3Moe {
            return match self.metadata.int(&self.name("expert_count"))? {
                None | Some(0) => Ok(None),
                Some(count) => {
                    let expected = format!("no experts: they are supported in {} alone", Arch::Qwen3Moe);
                    Err(self.unfit("expert_count", expected, count))
                }
            };
        }
        let count = self.count("expert_count")?;
        let used = self.count("expert_used_count")?;
        if used > count {
            return Err(self.unfit("expert_used_count", format!("at most the {count} experts"), used));
        }
        let ff = match self.optional_count("expert_feed_forward_length")? {
            Some(ff) => ff,
            None => (self.count("feed_forward_length")? / used).max(1),
        };
        Ok(Some(Experts { count, used, ff }))
    }

    /// The vocabulary size: the length of the token list. If the file also has `vocab_size`, both must agree.
    fn vocab(&self) -> Result<usize, KeyError> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        let size = self.optional_count("vocab_size")?;
        match (self.metadata.get(TOKENS), size) {
            (Some(fanout::gguf::Value::Array(tokens)), Some(size)) if tokens.len() != size => {
                Err(self.unfit("vocab_size", format!("{}, the length of {TOKENS}", tokens.len()), size))
            }
            (Some(fanout::gguf::Value::Array(tokens)), _) if !tokens.is_empty() => Ok(tokens.len()),
            (Some(other), _) => Err(unfit(TOKENS, "an array of tokens", other)),
            (None, size) => required(TOKENS, size),
        }
    }

    fn rope(&self, head_width: usize, context: usize) -> Result<Rope, KeyError> {
        let key = "rope.dimension_count";
        let dims = self.optional_count(key)?.unwrap_or(head_width);
        if dims != head_width || !dims.is_multiple_of(2) {
            let expected = format!("an even number and the length of a head, {head_width}: all channels are rotated");
            return Err(self.unfit(key, expected, dims));
        }
        let kind = self.metadata.text(&self.name("rope.scaling.type"))?.unwrap_or("linear");
        let factor = match kind {
            "none" => 1.0,
            // Older files have `rope.scale_linear` instead of `rope.scaling.factor`.
            "linear" if self.has("rope.scaling.factor") => self.scaling("rope.scaling.factor")?,
            "linear" => self.scaling("rope.scale_linear")?,
            other => {
                let expected = "none or linear: YaRN, LongRoPE and others are not supported";
                return Err(self.unfit("rope.scaling.type", expected, format_args!("{other:?}")));
            }
        };
        Ok(Rope {
            backward: false,
            n_ctx_orig: i32::try_from(context).unwrap_or(i32::MAX),
            freq_base: self.positive("rope.freq_base", Some(10000.0))?,
            freq_scale: 1.0 / factor,
            attn_factor: self.positive("rope.scaling.attn_factor", Some(1.0))?,
            ..Rope::new(self.arch.rope_mode(), dims as u32)
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
mod tests {
    use super::*;
    use fanout::gguf::{Gguf, Writer};

    fn sample(arch: Arch) -> Writer {
        let key = |key: &str| format!("{arch}.{key}");
        Writer::new()
            .text("general.architecture", arch.name())
            .int(&key("block_count"), 2)
            .int(&key("embedding_length"), 256)
            .int(&key("attention.head_count"), 8)
            .int(&key("feed_forward_length"), 512)
            .int(&key("context_length"), 4096)
            .float(&key("attention.layer_norm_rms_epsilon"), 1e-5)
            .texts("tokenizer.ggml.tokens", &["a", "b", "c"])
    }

    fn read(file: &Writer) -> Result<HParams, KeyError> {
        HParams::read(&Gguf::parse(&file.to_bytes().unwrap()).unwrap().metadata)
    }

    #[test]
    fn missing_optional_keys_have_defaults() {
        for arch in [Arch::Llama, Arch::Qwen2, Arch::Qwen3] {
            let hparams = read(&sample(arch)).unwrap();
            let rope = Rope { n_ctx_orig: 4096, ..Rope::new(arch.rope_mode(), 32) };
            let expected = HParams {
                arch,
                layers: 2,
                width: 256,
                heads: 8,
                kv_heads: 8,
                head_width: 32,
                ff: 512,
                experts: None,
                vocab: 3,
                context: 4096,
                rms_epsilon: 1e-5,
                rope,
            };
            assert_eq!(hparams, expected);
        }
        assert_eq!(Arch::Llama.rope_mode(), RopeMode::Normal);
        assert_eq!(Arch::Qwen3Moe.rope_mode(), RopeMode::Neox);
    }

    #[test]
    fn optional_keys_override_the_defaults() {
        let file = sample(Arch::Qwen3Moe)
            .int("qwen3moe.attention.head_count_kv", 2)
            .int("qwen3moe.attention.key_length", 64)
            .int("qwen3moe.attention.value_length", 64)
            .int("qwen3moe.rope.dimension_count", 64)
            .float("qwen3moe.rope.freq_base", 1e6)
            .text("qwen3moe.rope.scaling.type", "linear")
            .float("qwen3moe.rope.scaling.factor", 4.0)
            .int("qwen3moe.expert_count", 8)
            .int("qwen3moe.expert_used_count", 2)
            .int("qwen3moe.vocab_size", 3);
        let hparams = read(&file).unwrap();
        assert_eq!((hparams.kv_heads, hparams.head_width, hparams.kv_width()), (2, 64, 128));
        assert_eq!(hparams.experts, Some(Experts { count: 8, used: 2, ff: 256 }));
        assert_eq!((hparams.rope.n_dims, hparams.rope.freq_base, hparams.rope.freq_scale), (64, 1e6, 0.25));
        let hparams = read(&file.clone().int("qwen3moe.expert_feed_forward_length", 768)).unwrap();
        assert_eq!(hparams.experts, Some(Experts { count: 8, used: 2, ff: 768 }));
        let hparams = read(&file.text("qwen3moe.rope.scaling.type", "none")).unwrap();
        assert_eq!(hparams.rope.freq_scale, 1.0);
        let hparams = read(&sample(Arch::Llama).float("llama.rope.scale_linear", 2.0)).unwrap();
        assert_eq!(hparams.rope.freq_scale, 0.5);
    }

    #[test]
    fn each_missing_key_is_named() {
        for key in ["block_count", "embedding_length", "attention.head_count", "feed_forward_length", "context_length"]
            .into_iter()
            .chain(["attention.layer_norm_rms_epsilon"])
        {
            let key = format!("llama.{key}");
            assert_eq!(read(&sample(Arch::Llama).without(&key).unwrap()), Err(KeyError::Missing { key }));
        }
        for key in ["general.architecture", "tokenizer.ggml.tokens"] {
            assert_eq!(
                read(&sample(Arch::Llama).without(key).unwrap()),
                Err(KeyError::Missing { key: key.to_owned() })
            );
        }
        let key = "qwen3moe.expert_count".to_owned();
        assert_eq!(read(&sample(Arch::Qwen3Moe)), Err(KeyError::Missing { key }));
    }

    #[test]
    fn each_contradiction_is_named() {
        let llama = || sample(Arch::Llama);
        let moe = || sample(Arch::Qwen3Moe).int("qwen3moe.expert_count", 4);
        let cases = [
            (
                llama().text("general.architecture", "mamba"),
                "general.architecture: expected one of llama, qwen2, qwen3, qwen3moe, the architectures this program runs, \
                 found \"mamba\"",
            ),
            (llama().int("llama.block_count", 0), "llama.block_count: expected a number above 0, found 0"),
            (
                llama().int("llama.attention.head_count_kv", 3),
                "expected a divisor of llama.attention.head_count, 8, found 3",
            ),
            (
                llama().ints("llama.attention.head_count", &[8, 4]),
                "llama.attention.head_count: expected a whole number",
            ),
            (
                llama().int("llama.attention.head_count", 7),
                "expected a divisor of llama.embedding_length, 256, found 7",
            ),
            (llama().int("llama.attention.key_length", 64), "llama.attention.value_length: expected 64, the length"),
            (llama().int("llama.rope.dimension_count", 16), "llama.rope.dimension_count: expected an even number and"),
            (llama().text("llama.rope.scaling.type", "yarn"), "rope.scaling.type: expected none or linear: YaRN, Long"),
            (
                llama().float("llama.rope.scaling.factor", -1.0),
                "rope.scaling.factor: expected a number above 0, found -1",
            ),
            (
                llama().float("llama.rope.freq_base", f32::NAN),
                "llama.rope.freq_base: expected a finite number, found NaN",
            ),
            (llama().int("llama.vocab_size", 4), "expected 3, the length of tokenizer.ggml.tokens, found 4"),
            (
                llama().text("tokenizer.ggml.tokens", "x"),
                "tokenizer.ggml.tokens: expected an array of tokens, found \"x\"",
            ),
            (
                llama().int("llama.expert_count", 8),
                "expected no experts: they are supported in qwen3moe alone, found 8",
            ),
            (moe().int("qwen3moe.expert_used_count", 5), "expert_used_count: expected at most the 4 experts, found 5"),
        ];
        for (file, expected) in cases {
            let error = read(&file).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}\n{expected}");
        }
    }
}

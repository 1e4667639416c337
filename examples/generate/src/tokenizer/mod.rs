//! The tokenizer of a model file, built from its metadata. Token ids are the same as llama.cpp's, also where other tokenizers of the
//! same model have others: `scripts/interop.sh vocabularies` compares them.
//!
//! Special tokens are cut out of a text first (`special.rs`). What is left is encoded by one of two kinds of vocabulary, which share
//! the merging (`merge.rs`). `llama` is SentencePiece: pieces have scores, and text without a matching piece falls back to byte
//! tokens (`spm.rs`). `gpt2` and `gemma4` are BPE: regexes split the text (`pre_tokenizer.rs`), then a list of merges applies (`bpe.rs`).

mod bpe;
mod bytes;
mod decode;
mod end_tokens;
mod merge;
mod pre_tokenizer;
mod special;
mod spm;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::HashMap;

use bpe::Bpe;
use end_tokens::EndTokens;
use fanout::gguf::{KeyError, Metadata, required};
use pre_tokenizer::PreTokenizer;
use special::{Fragment, SpecialTexts};
use spm::Spm;
use thiserror::Error;

pub use decode::DecodeStream;

/// Metadata keys of the tokenizer.
mod key {
    pub(super) const MODEL: &str = "tokenizer.ggml.model";
    pub(super) const PRE: &str = "tokenizer.ggml.pre";
    pub(super) const TOKENS: &str = "tokenizer.ggml.tokens";
    pub(super) const SCORES: &str = "tokenizer.ggml.scores";
    pub(super) const TYPES: &str = "tokenizer.ggml.token_type";
    pub(super) const MERGES: &str = "tokenizer.ggml.merges";
    pub(super) const BOS: &str = "tokenizer.ggml.bos_token_id";
    pub(super) const EOS: &str = "tokenizer.ggml.eos_token_id";
    pub(super) const EOT: &str = "tokenizer.ggml.eot_token_id";
    pub(super) const EOM: &str = "tokenizer.ggml.eom_token_id";
    pub(super) const FIM_PRE: &str = "tokenizer.ggml.fim_pre_token_id";
    pub(super) const FIM_SUF: &str = "tokenizer.ggml.fim_suf_token_id";
    pub(super) const FIM_MID: &str = "tokenizer.ggml.fim_mid_token_id";
    pub(super) const FIM_PAD: &str = "tokenizer.ggml.fim_pad_token_id";
    pub(super) const FIM_REP: &str = "tokenizer.ggml.fim_rep_token_id";
    pub(super) const FIM_SEP: &str = "tokenizer.ggml.fim_sep_token_id";
    pub(super) const UNK: &str = "tokenizer.ggml.unknown_token_id";
    pub(super) const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
    pub(super) const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
    pub(super) const ADD_SPACE: &str = "tokenizer.ggml.add_space_prefix";
    pub(super) const MODEL_NAME: &str = "general.name";
}

/// The tokenizer of a file cannot be built, or cannot encode a text.
#[derive(Debug, Error)]
pub enum TokenizerError {
    /// A key is missing or has an invalid value.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A regex that splits text exceeds its limit of backtracking.
    #[error("the tokenizer cannot split the text: {0}")]
    Regex(#[from] fancy_regex::Error),
}

/// The kind of a token, from `tokenizer.ggml.token_type`, or from its text (`end_tokens.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokenKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenKind {
    /// Whether the token's text is matched in the input before any other splitting.
    fn is_special(self) -> bool {
        matches!(self, TokenKind::Unknown | TokenKind::Control | TokenKind::UserDefined)
    }
}

/// The vocabulary of the file.
struct Vocab<'a> {
    texts: Vec<Cow<'a, str>>,
    kinds: Vec<TokenKind>,
    /// Ids by text. If several tokens have the same text, the last id wins.
    ids: HashMap<Cow<'a, str>, u32>,
}

impl<'a> Vocab<'a> {
    fn read(metadata: &Metadata<'a>) -> Result<Vocab<'a>, KeyError> {
        let texts = required(key::TOKENS, metadata.texts(key::TOKENS)?)?;
        // llama.cpp's name for a token without a text.
        let text = |(id, text): (usize, &'a str)| {
            if text.is_empty() { Cow::Owned(format!("[EMPTY_{id}]")) } else { Cow::Borrowed(text) }
        };
        let texts: Vec<Cow<'a, str>> = texts.into_iter().enumerate().map(text).collect();
        let kind = |(id, &number): (usize, &u32)| match number {
            1 => Ok(TokenKind::Normal),
            2 => Ok(TokenKind::Unknown),
            3 => Ok(TokenKind::Control),
            4 => Ok(TokenKind::UserDefined),
            5 => Ok(TokenKind::Unused),
            6 => Ok(TokenKind::Byte),
            other => Err(bad_value(key::TYPES, "types from 1 to 6", format!("{other} for token {id}"))),
        };
        let kinds = match metadata.ints(key::TYPES)? {
            Some(numbers) => numbers.iter().enumerate().map(kind).collect::<Result<_, _>>()?,
            None => vec![TokenKind::Normal; texts.len()],
        };
        if kinds.len() != texts.len() {
            return Err(bad_value(key::TYPES, format!("one type for each of {} tokens", texts.len()), kinds.len()));
        }
        let ids = texts.iter().cloned().zip(0..).collect();
        Ok(Vocab { texts, kinds, ids })
    }

    /// The token id in a key, checked to be within the vocabulary.
    fn id(&self, metadata: &Metadata<'_>, key: &str) -> Result<Option<u32>, KeyError> {
        match metadata.int(key)? {
            Some(id) if id as usize >= self.texts.len() => {
                Err(bad_value(key, format!("the id of a token, below {}", self.texts.len()), id))
            }
            id => Ok(id),
        }
    }

    /// Gives the token of this text another kind, and returns its id.
    fn set_kind(&mut self, text: &str, kind: TokenKind) -> Option<u32> {
        let id = *self.ids.get(text)?;
        *self.kinds.get_mut(id as usize)? = kind;
        Some(id)
    }
}

/// The encoder of one kind of vocabulary, without special tokens.
enum Encoder {
    Bpe(Box<Bpe>),
    Spm(Spm),
}

/// The texts of the tokens that a chat template may print.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Begin-of-text token; empty without one.
    pub bos: String,
    /// End-of-text token; empty without one.
    pub eos: String,
}

/// Encodes text as tokens, and decodes tokens as bytes.
pub struct Tokenizer {
    encoder: Encoder,
    special_texts: SpecialTexts,
    /// By id: the bytes that a token prints.
    prints: Vec<Box<[u8]>>,
    /// Begin-of-text token, added before every text.
    first: Option<u32>,
    /// End-of-text token, added after every text.
    last: Option<u32>,
    /// Tokens that end the generation.
    ends: Vec<u32>,
    special: SpecialTokens,
}

impl Tokenizer {
    /// Builds the tokenizer of a file.
    ///
    /// # Errors
    /// [`TokenizerError`] for an unsupported kind of vocabulary, and for keys that are missing or contradict each other.
    pub fn read(metadata: &Metadata<'_>) -> Result<Tokenizer, TokenizerError> {
        let mut vocab = Vocab::read(metadata)?;
        let ends = EndTokens::find(metadata, &mut vocab)?;
        let known = |id: u32| Some(id).filter(|&id| (id as usize) < vocab.texts.len());
        let (encoder, prints, [bos, eos], add_bos) = match required(key::MODEL, metadata.text(key::MODEL)?)? {
            "llama" => {
                let prints = spm::prints(&vocab)?;
                (Encoder::Spm(Spm::read(metadata, &vocab)?), prints, [Some(spm::BOS), Some(spm::EOS)], true)
            }
            "gpt2" | "gemma4" => {
                let pre = PreTokenizer::read(metadata)?;
                let encoder = Encoder::Bpe(Box::new(Bpe::read(metadata, &vocab, pre)?));
                (encoder, bpe::prints(&vocab, pre), [pre.default_bos, pre.default_eos], pre.add_bos)
            }
            other => {
                let expected = "llama, gpt2 or gemma4, the vocabularies this program knows";
                return Err(bad_value(key::MODEL, expected, format_args!("{other:?}")).into());
            }
        };
        let text = |key: &str| metadata.text(key).map(Option::unwrap_or_default);
        let special_texts = SpecialTexts::new(&vocab, text(key::MODEL_NAME)?, text(key::PRE)?);
        let named = [vocab.id(metadata, key::BOS)?, vocab.id(metadata, key::EOS)?];
        let [bos, eos] = [named[0].or(bos.and_then(known)), named[1].or(eos.and_then(known))];
        let added = |flag: &str, default: bool, key: &str, id: Option<u32>| -> Result<Option<u32>, KeyError> {
            let add = metadata.flag(flag)?.unwrap_or(default);
            if add { required(key, id).map(Some) } else { Ok(None) }
        };
        let first = added(key::ADD_BOS, add_bos, key::BOS, bos)?;
        let last = added(key::ADD_EOS, false, key::EOS, eos)?;
        // llama.cpp's default of BPE is id 11, a comma in most of these vocabularies: it is added where a flag says so, but ends no
        // reply and is no text of a template.
        let [bos, eos] = if matches!(encoder, Encoder::Bpe(_)) { named } else { [bos, eos] };
        let named = [eos, vocab.id(metadata, key::EOT)?, vocab.id(metadata, key::EOM)?];
        let ends = ends.with_named(named.into_iter().flatten());
        let text = |id: Option<u32>| id.map_or("", |id| &vocab.texts[id as usize]).to_owned();
        let special = SpecialTokens { bos: text(bos), eos: text(eos) };
        Ok(Tokenizer { encoder, special_texts, prints, first, last, ends, special })
    }

    /// Size of the vocabulary.
    pub fn vocab(&self) -> usize {
        self.prints.len()
    }

    /// Encodes a text. Special tokens in the text are recognised; begin-of-text and end-of-text tokens are added as the file
    /// specifies.
    ///
    /// # Errors
    /// [`TokenizerError::Regex`] if the splitting regex exceeds its backtracking limit on the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let ids = self.encode_plain(text)?;
        Ok(self.first.into_iter().chain(ids).chain(self.last).collect())
    }

    /// Encodes a text that a chat template has rendered: special tokens in the text are recognised, and a begin-of-text token is
    /// added only if the file specifies one and the template has not printed it.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let ids = self.encode_plain(text)?;
        let first = self.first.filter(|first| ids.first() != Some(first));
        Ok(first.into_iter().chain(ids).collect())
    }

    /// Encodes a text, and adds nothing.
    fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let mut tokens = Vec::new();
        for fragment in self.special_texts.partition(text) {
            match (fragment, &self.encoder) {
                (Fragment::Token(id), _) => tokens.push(id),
                (Fragment::Text(text), Encoder::Bpe(bpe)) => bpe.encode(text, &mut tokens)?,
                (Fragment::Text(text), Encoder::Spm(spm)) => spm.encode(text, &mut tokens),
            }
        }
        Ok(tokens)
    }

    /// The texts of the tokens that a chat template may print.
    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.special
    }

    /// The bytes of a token, possibly only a part of a UTF-8 character; empty for control tokens and ids outside the
    /// vocabulary.
    pub fn bytes(&self, token: u32) -> &[u8] {
        self.prints.get(token as usize).map_or(&[], |bytes| bytes)
    }

    /// Whether this token ends the generation.
    pub fn is_end(&self, token: u32) -> bool {
        self.ends.contains(&token)
    }
}

fn bad_value(key: &str, expected: impl Into<String>, found: impl ToString) -> KeyError {
    KeyError::WrongType { key: key.to_owned(), expected: expected.into(), found: found.to_string() }
}

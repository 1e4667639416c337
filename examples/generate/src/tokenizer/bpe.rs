//! Byte-level BPE, as introduced by GPT-2: a regex splits the text, each byte is mapped to a printable character, and a list of
//! merges gives the order in which neighbouring tokens are joined.

use std::collections::HashMap;

use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{SplitDelimiterBehavior, Tokenizer};

use super::{TokenKind, TokenizerError, TokenizerParts, Vocab, bad_value, key};
use fanout::gguf::{KeyError, Metadata, required};

/// How text is split before the merges apply.
struct PreTokenizer {
    /// Names in `tokenizer.ggml.pre`.
    names: &'static [&'static str],
    /// Each match becomes a word of its own; merges never cross words.
    regex: &'static str,
    /// Whether a word that is in the vocabulary becomes one token, even if the merges do not produce it.
    whole_words: bool,
    /// Whether a begin-of-text token is added if the file lacks `add_bos_token`.
    add_bos: bool,
}

const SPLITTERS: [PreTokenizer; 3] = [
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3"],
        regex: r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        whole_words: true,
        add_bos: true,
    },
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen"],
        regex: r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        whole_words: false,
        add_bos: false,
    },
    PreTokenizer {
        names: &["gpt-2"],
        regex: r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        whole_words: false,
        add_bos: false,
    },
];

impl PreTokenizer {
    fn read(metadata: &Metadata<'_>) -> Result<&'static PreTokenizer, KeyError> {
        let name = required(key::PRE, metadata.text(key::PRE)?)?;
        SPLITTERS.iter().find(|splitter| splitter.names.contains(&name)).ok_or_else(|| {
            let names: Vec<_> = SPLITTERS.iter().flat_map(|splitter| splitter.names).copied().collect();
            let expected = format!("one of {}, the pre-tokenizers this program supports", names.join(", "));
            bad_value(key::PRE, expected, format_args!("{name:?}"))
        })
    }
}

pub(super) fn read(metadata: &Metadata<'_>, vocab: &Vocab<'_>) -> Result<TokenizerParts, TokenizerError> {
    let splitter = PreTokenizer::read(metadata)?;
    let merges = merges(metadata, vocab)?;
    let bpe = BPE::builder().vocab_and_merges(vocab.owned(), merges).ignore_merges(splitter.whole_words).build()?;
    let regex = SplitPattern::Regex(splitter.regex.to_owned());
    let split = Split::new(regex, SplitDelimiterBehavior::Isolated, false)?;
    let steps: Vec<PreTokenizerWrapper> = vec![split.into(), ByteLevel::new(false, false, false).into()];
    let mut inner = Tokenizer::new(bpe);
    inner.with_pre_tokenizer(Some(Sequence::new(steps)));
    Ok(TokenizerParts { inner, pieces: pieces(vocab), add_bos: splitter.add_bos, bos: None, eos: None })
}

/// The file's merges: pairs of tokens that concatenate to a third token.
fn merges(metadata: &Metadata<'_>, vocab: &Vocab<'_>) -> Result<Vec<(String, String)>, KeyError> {
    let merge = |(rank, text): (usize, &str)| {
        let unlike = || {
            let expected = "two tokens with a space between them, which make a third";
            bad_value(key::MERGES, expected, format!("{text:?} at {rank}"))
        };
        // Tokens are not empty, so a space at the very start belongs to the left token and is not the separator.
        let first = text.chars().next().map_or(0, char::len_utf8);
        let (left, right) = text.split_at(text[first..].find(' ').ok_or_else(unlike)? + first);
        let right = &right[1..];
        let known = |token: &str| vocab.ids.contains_key(token);
        if known(left) && known(right) && known(&[left, right].concat()) {
            Ok((left.to_owned(), right.to_owned()))
        } else {
            Err(unlike())
        }
    };
    required(key::MERGES, metadata.texts(key::MERGES)?)?.into_iter().enumerate().map(merge).collect()
}

/// GPT-2's mapping of characters to bytes: printable Latin-1 characters map to themselves, and the characters from U+0100 on
/// map to the remaining bytes in order.
fn bytes_of_characters() -> HashMap<char, u8> {
    let is_itself = |b: &u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let themselves = (0..=255).filter(is_itself).map(|b| (char::from(b), b));
    let others = (0..=255).filter(|b| !is_itself(b));
    themselves.chain(('\u{100}'..).zip(others)).collect()
}

fn pieces(vocab: &Vocab<'_>) -> Vec<Box<[u8]>> {
    let bytes = bytes_of_characters();
    let piece = |(&text, kind): (&&str, &TokenKind)| {
        let mut piece = Vec::with_capacity(text.len());
        match kind {
            TokenKind::Unknown | TokenKind::Control | TokenKind::Unused => {}
            TokenKind::UserDefined => piece.extend(text.as_bytes()),
            TokenKind::Normal | TokenKind::Byte => {
                for c in text.chars() {
                    match bytes.get(&c) {
                        Some(&byte) => piece.push(byte),
                        None => piece.extend(c.encode_utf8(&mut [0; 4]).as_bytes()),
                    }
                }
            }
        }
        piece.into_boxed_slice()
    };
    vocab.texts.iter().zip(&vocab.kinds).map(piece).collect()
}

//! BPE, as introduced by GPT-2: regexes split the text into words, each byte is mapped to a printable character, and a list of
//! merges gives the order in which neighbouring tokens are joined. Some vocabularies have the text itself in place of mapped bytes.

use super::bytes::{byte_of, bytes_of_characters, characters_of_bytes};
use super::merge::merge;
use super::pre_tokenizer::{PreTokenizer, Splitter, WholeWords};
use super::spm::SPACE;
use super::{TokenKind, TokenizerError, Vocab, bad_value, key};
use fanout::gguf::{KeyError, Metadata, required};
use std::collections::HashMap;

/// Encodes text without special tokens.
pub(super) struct Bpe {
    splitter: Splitter,
    ids: HashMap<Box<str>, u32>,
    /// By the text of a merge, with its space: its place in the list. Words have no spaces.
    merges: HashMap<Box<str>, u32>,
    characters: [char; 256],
}

impl Bpe {
    pub(super) fn read(
        metadata: &Metadata<'_>,
        vocab: &Vocab<'_>,
        pre: &'static PreTokenizer,
    ) -> Result<Bpe, TokenizerError> {
        let merges = match metadata.texts(key::MERGES)? {
            None if pre.needs_no_merges => Vec::new(),
            merges => required(key::MERGES, merges)?,
        };
        Ok(Bpe {
            splitter: Splitter::new(pre)?,
            ids: vocab.ids.iter().map(|(text, &id)| (text.as_ref().into(), id)).collect(),
            merges: ranks(&merges)?,
            characters: characters_of_bytes(),
        })
    }

    /// Appends the tokens of a text.
    ///
    /// # Errors
    /// A regex exceeds its limit of backtracking.
    pub(super) fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let pre = self.splitter.pre;
        let spaced;
        let text = if pre.escapes_spaces {
            spaced = text.replace(' ', SPACE);
            &spaced
        } else {
            text
        };
        let mut mapped = String::new();
        for word in self.splitter.split(text)? {
            if pre.maps_bytes {
                mapped.clear();
                mapped.extend(word.bytes().map(|byte| self.characters[usize::from(byte)]));
                self.encode_word(&mapped, tokens);
            } else {
                self.encode_word(word, tokens);
            }
        }
        Ok(())
    }

    fn encode_word(&self, word: &str, tokens: &mut Vec<u32>) {
        let whole = match self.splitter.pre.whole_words {
            WholeWords::Never => false,
            WholeWords::Always => true,
            WholeWords::LineBreaks => word.bytes().all(|byte| byte == b'\n'),
        };
        if let Some(&id) = self.ids.get(word).filter(|_| whole) {
            tokens.push(id);
            return;
        }
        let mut pair = String::new();
        let symbols = merge(word, |left, right| {
            pair.clear();
            pair.extend([left, " ", right]);
            self.merges.get(&*pair).copied()
        });
        for symbol in symbols {
            match self.ids.get(symbol) {
                Some(&id) => tokens.push(id),
                // A byte without a token is left out, as llama.cpp does.
                None => tokens.extend(symbol.bytes().filter_map(|byte| self.byte(byte))),
            }
        }
    }

    /// The token of a byte of a symbol that is not in the vocabulary.
    fn byte(&self, byte: u8) -> Option<u32> {
        if !self.splitter.pre.maps_bytes {
            return self.ids.get(&*format!("<0x{byte:02X}>")).copied();
        }
        let ascii = [byte];
        self.ids.get(std::str::from_utf8(&ascii).ok()?).copied()
    }
}

/// The place of each merge in the file's list.
fn ranks(merges: &[&str]) -> Result<HashMap<Box<str>, u32>, KeyError> {
    let mut ranks = HashMap::with_capacity(merges.len());
    for (rank, &text) in merges.iter().enumerate() {
        // The left token is not empty, so a space at the very start belongs to it.
        let first = text.chars().next().map_or(0, char::len_utf8);
        if text[first..].find(' ').is_none_or(|space| first + space + 1 == text.len()) {
            let expected = "two tokens with a space between them";
            return Err(bad_value(key::MERGES, expected, format!("{text:?} at {rank}")));
        }
        // The first of two equal merges counts.
        ranks.entry(text.into()).or_insert(rank as u32);
    }
    Ok(ranks)
}

/// The bytes that each token prints.
pub(super) fn prints(vocab: &Vocab<'_>, pre: &PreTokenizer) -> Vec<Box<[u8]>> {
    let bytes = bytes_of_characters();
    let print = |(text, kind): (&std::borrow::Cow<'_, str>, &TokenKind)| {
        let mut print = Vec::with_capacity(text.len());
        match kind {
            TokenKind::Unknown | TokenKind::Control | TokenKind::Unused => {}
            TokenKind::UserDefined => print.extend(text.as_bytes()),
            TokenKind::Byte if !pre.maps_bytes && byte_of(text).is_some() => print.extend(byte_of(text)),
            TokenKind::Normal | TokenKind::Byte if pre.escapes_spaces => print.extend(text.replace(SPACE, " ").bytes()),
            TokenKind::Normal | TokenKind::Byte => {
                for c in text.chars() {
                    match bytes.get(&c) {
                        Some(&byte) => print.push(byte),
                        None => print.extend(c.encode_utf8(&mut [0; 4]).as_bytes()),
                    }
                }
            }
        }
        print.into_boxed_slice()
    };
    vocab.texts.iter().zip(&vocab.kinds).map(print).collect()
}

//! SentencePiece vocabularies: pieces with scores. Among all pairs of neighbours that form a piece, the pair with the highest-scored
//! piece is merged first.

use super::bytes::byte_of;
use super::merge::merge;
use super::{TokenKind, TokenizerError, Vocab, bad_value, key};
use fanout::gguf::{Metadata, required};
use std::collections::HashMap;

/// The character that represents a space in pieces.
pub(super) const SPACE: &str = "\u{2581}";
/// Default ids of special tokens, for older files that lack the keys.
pub(super) const BOS: u32 = 1;
pub(super) const EOS: u32 = 2;
const UNK: u32 = 0;

/// Encodes text without special tokens.
pub(super) struct Spm {
    /// By the text of a piece: its id, and its place among the scores, the highest first. Equal scores have the same place.
    pieces: HashMap<Box<str>, (u32, u32)>,
    /// The token of each byte, for characters that are no piece.
    bytes: Vec<u32>,
    add_space: bool,
}

impl Spm {
    pub(super) fn read(metadata: &Metadata<'_>, vocab: &Vocab<'_>) -> Result<Spm, TokenizerError> {
        let scores = required(key::SCORES, metadata.floats(key::SCORES)?)?;
        if scores.len() != vocab.texts.len() {
            let expected = format!("one score for each of {} tokens", vocab.texts.len());
            return Err(bad_value(key::SCORES, expected, scores.len()).into());
        }
        let mut descending = scores.clone();
        descending.sort_unstable_by(|a, b| b.total_cmp(a));
        let place = |id: u32| descending.partition_point(|&score| score > scores[id as usize]) as u32;
        let pieces: HashMap<Box<str>, (u32, u32)> =
            vocab.ids.iter().map(|(text, &id)| (text.as_ref().into(), (id, place(id)))).collect();
        let unk = vocab.id(metadata, key::UNK)?.unwrap_or(UNK);
        let byte = |byte: u8| pieces.get(&*format!("<0x{byte:02X}>")).map_or(unk, |&(id, _)| id);
        let bytes = (0..=255).map(byte).collect();
        Ok(Spm { pieces, bytes, add_space: metadata.flag(key::ADD_SPACE)?.unwrap_or(true) })
    }

    /// Appends the tokens of a text that is not empty.
    pub(super) fn encode(&self, text: &str, tokens: &mut Vec<u32>) {
        let text = text.replace(' ', SPACE);
        let text = if self.add_space { [SPACE, &text].concat() } else { text };
        // Neighbours, so both are one part of the text: only its length is needed.
        let mut pair = String::new();
        let pieces = merge(&text, |left, right| {
            pair.clear();
            pair.extend([left, right]);
            self.pieces.get(&*pair).map(|&(_, place)| place)
        });
        for piece in pieces {
            match self.pieces.get(piece) {
                Some(&(id, _)) => tokens.push(id),
                None => tokens.extend(piece.bytes().map(|byte| self.bytes[usize::from(byte)])),
            }
        }
    }
}

/// The bytes that each token prints.
pub(super) fn prints(vocab: &Vocab<'_>) -> Result<Vec<Box<[u8]>>, TokenizerError> {
    let print = |(id, (text, kind)): (usize, (&std::borrow::Cow<'_, str>, &TokenKind))| match kind {
        TokenKind::Normal => Ok(text.replace(SPACE, " ").into_bytes().into_boxed_slice()),
        TokenKind::UserDefined => Ok(text.as_bytes().into()),
        TokenKind::Unknown | TokenKind::Control | TokenKind::Unused => Ok(Box::default()),
        TokenKind::Byte => {
            let unlike = || bad_value(key::TOKENS, "<0x00> to <0xFF> as bytes", format!("{text:?} for token {id}"));
            Ok([byte_of(text).ok_or_else(unlike)?].into())
        }
    };
    vocab.texts.iter().zip(&vocab.kinds).enumerate().map(print).collect()
}

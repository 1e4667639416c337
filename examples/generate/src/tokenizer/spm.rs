//! SentencePiece vocabularies: pieces with scores, encoded as BPE.
//!
//! Among all pairs of neighbours that form a piece, SentencePiece first merges the pair with the highest-scored piece. The
//! equivalent list of BPE merges has every split of each piece into two other pieces, sorted by the scores of the resulting
//! pieces.

use tokenizers::Tokenizer;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Replace, Sequence};

use super::{TokenKind, TokenizerError, TokenizerParts, Vocab, bad_value, key};
use fanout::gguf::{Metadata, required};

/// The character that represents a space in pieces.
const SPACE: &str = "\u{2581}";
/// Default ids of special tokens, for older files that lack the keys.
const UNK: u32 = 0;
const BOS: u32 = 1;
const EOS: u32 = 2;

pub(super) fn read(metadata: &Metadata<'_>, vocab: &Vocab<'_>) -> Result<TokenizerParts, TokenizerError> {
    let scores = required(key::SCORES, metadata.floats(key::SCORES)?)?;
    if scores.len() != vocab.texts.len() {
        let expected = format!("one score for each of {} tokens", vocab.texts.len());
        return Err(bad_value(key::SCORES, expected, scores.len()).into());
    }
    let mut builder =
        BPE::builder().vocab_and_merges(vocab.owned(), merges(vocab, &scores)).byte_fallback(true).fuse_unk(false);
    let unk = vocab.id(metadata, key::UNK)?.unwrap_or(UNK);
    if let Some(&text) = vocab.texts.get(unk as usize) {
        builder = builder.unk_token(text.to_owned());
    }
    let mut inner = Tokenizer::new(builder.build()?);
    let mut normalizers = Vec::<NormalizerWrapper>::new();
    if metadata.flag(key::ADD_SPACE)?.unwrap_or(true) {
        normalizers.push(Prepend::new(SPACE.to_owned()).into());
    }
    normalizers.push(Replace::new(" ", SPACE)?.into());
    inner.with_normalizer(Some(Sequence::new(normalizers)))?;
    let known = |id: u32| Some(id).filter(|&id| (id as usize) < vocab.texts.len());
    Ok(TokenizerParts { inner, pieces: pieces(vocab)?, add_bos: true, bos: known(BOS), eos: known(EOS) })
}

/// Every split of a piece into two pieces, in descending order of the piece's score.
fn merges(vocab: &Vocab<'_>, scores: &[f32]) -> Vec<(String, String)> {
    let mut merges = Vec::new();
    for (&text, &id) in &vocab.ids {
        let cuts = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
        for (left, right) in cuts {
            if vocab.ids.contains_key(left) && vocab.ids.contains_key(right) {
                merges.push((id, left, right));
            }
        }
    }
    // Break ties by id and length: the hash map iterates in random order, and the merges must not depend on it.
    merges.sort_unstable_by(|a, b| {
        let score = |id: u32| scores[id as usize];
        score(b.0).total_cmp(&score(a.0)).then(a.0.cmp(&b.0)).then(a.1.len().cmp(&b.1.len()))
    });
    merges.into_iter().map(|(_, left, right)| (left.to_owned(), right.to_owned())).collect()
}

fn pieces(vocab: &Vocab<'_>) -> Result<Vec<Box<[u8]>>, TokenizerError> {
    let piece = |(id, (&text, kind)): (usize, (&&str, &TokenKind))| match kind {
        TokenKind::Normal => Ok(text.replace(SPACE, " ").into_bytes().into_boxed_slice()),
        TokenKind::UserDefined => Ok(text.as_bytes().into()),
        TokenKind::Unknown | TokenKind::Control | TokenKind::Unused => Ok(Box::default()),
        TokenKind::Byte => {
            let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
            let byte = digits.filter(|digits| digits.len() == 2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
            let unlike = || bad_value(key::TOKENS, "<0x00> to <0xFF> as bytes", format!("{text:?} for token {id}"));
            Ok([byte.ok_or_else(unlike)?].into())
        }
    };
    vocab.texts.iter().zip(&vocab.kinds).enumerate().map(piece).collect()
}

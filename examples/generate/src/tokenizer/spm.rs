//! SentencePiece's vocabularies: pieces with scores.
//!
//! The pair of neighbours that makes the piece with the highest score is merged first. That is BPE whose merges are all
//! ways to put a piece together from two others, in the order of the pieces' scores.

use tokenizers::Tokenizer;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Replace, Sequence};

use super::{TokenKind, TokenizerError, TokenizerParts, Vocab, bad_value, key};
use fanout::gguf::{Metadata, required};

/// Stands for a space in pieces.
const SPACE: &str = "\u{2581}";
/// Ids that files of old leave out.
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

/// Each way to make a piece from two, the best piece first.
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
    // The ids and lengths make one order of those that have the same score.
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

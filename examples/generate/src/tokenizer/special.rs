//! Special tokens within a text, as llama.cpp finds them: the longest token first, in the whole text, whatever is to its left.

use super::Vocab;

/// A token whose text is recognised before any other splitting.
struct SpecialToken {
    text: Box<str>,
    id: u32,
    /// Whether whitespace before the token belongs to it.
    strip_left: bool,
    /// Whether whitespace after the token belongs to it.
    strip_right: bool,
}

/// The special tokens of a vocabulary, longest first.
pub(super) struct SpecialTexts(Vec<SpecialToken>);

/// A part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fragment<'t> {
    Text(&'t str),
    Token(u32),
}

impl SpecialTexts {
    /// The special tokens by their kinds. No key says which of them take whitespace: llama.cpp knows some models by
    /// `general.name` and the pre-tokenizer.
    pub(super) fn new(vocab: &Vocab<'_>, model_name: &str, pre: &str) -> SpecialTexts {
        let name = model_name.to_lowercase();
        let has = |text: &str, parts: &[&str]| parts.iter().any(|part| text.contains(part));
        let masks = has(pre, &["jina-v2-de", "jina-v2-es", "jina-v2-code"]);
        let phi3 = !masks && has(&name, &["phi-3", "phi3"]);
        let special = vocab.texts.iter().zip(&vocab.kinds).zip(0..).filter(|((_, kind), _)| kind.is_special());
        let mut tokens: Vec<SpecialToken> = special
            .map(|((text, _), id)| SpecialToken {
                text: (&**text).into(),
                id,
                strip_left: masks && &**text == "<mask>",
                strip_right: phi3 && !["<unk>", "<s>", "<|endoftext|>"].contains(&&**text),
            })
            .collect();
        tokens.sort_by_key(|token| std::cmp::Reverse(token.text.len()));
        SpecialTexts(tokens)
    }

    /// Cuts a text at its special tokens. No fragment is empty, and no two texts are neighbours.
    pub(super) fn partition<'t>(&self, text: &'t str) -> Vec<Fragment<'t>> {
        let mut fragments = if text.is_empty() { Vec::new() } else { vec![Fragment::Text(text)] };
        for token in self.0.iter().filter(|token| text.contains(&*token.text)) {
            let mut parts = Vec::with_capacity(fragments.len() + 2);
            for fragment in fragments {
                match fragment {
                    Fragment::Text(text) => token.cut(text, &mut parts),
                    Fragment::Token(_) => parts.push(fragment),
                }
            }
            fragments = parts;
        }
        fragments
    }
}

impl SpecialToken {
    fn cut<'t>(&self, mut rest: &'t str, parts: &mut Vec<Fragment<'t>>) {
        // The whitespace of isspace.
        let is_space = |c: char| matches!(c, ' ' | '\t'..='\r');
        let text = |text: &'t str| Some(text).filter(|text| !text.is_empty()).map(Fragment::Text);
        while let Some((before, after)) = rest.split_once(&*self.text) {
            parts.extend(text(if self.strip_left { before.trim_end_matches(is_space) } else { before }));
            parts.push(Fragment::Token(self.id));
            rest = if self.strip_right { after.trim_start_matches(is_space) } else { after };
        }
        parts.extend(text(rest));
    }
}

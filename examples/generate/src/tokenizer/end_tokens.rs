//! Tokens that end a reply, as llama.cpp finds them. Files name one or two of them in keys (`eos_token_id`, `eot_token_id`), give
//! some the type "user defined" or "normal" although they are control tokens, and do not mention others. So a list of texts
//! decides, whatever the type. All tokenizers share the list: a model may have been trained from one of another family.

use super::{TokenKind, Vocab, key};
use fanout::gguf::{KeyError, Metadata};

/// Texts of tokens that end a turn or a text.
const END_TEXTS: [&str; 22] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<eos>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
];

/// Tokens of fill-in-the-middle that end a text: padding, and what separates repositories and files. Each has a key and texts. Without
/// the key, the first of the texts that the vocabulary has is the token; llama.cpp takes any one of them.
const FILL_IN_ENDS: [(&str, &[&str]); 3] = [
    (key::FIM_PAD, &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"]),
    (key::FIM_REP, &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"]),
    (key::FIM_SEP, &["<|file_sep|>"]),
];

/// Tokens of fill-in-the-middle that mark the parts of a prompt: they are not printed, either.
const FILL_IN_MARKS: [(&str, &[&str]); 3] = [
    (
        key::FIM_PRE,
        &[
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<｜fim▁begin｜>",
            "<PRE>",
            "▁<PRE>",
            "<|code_prefix|>",
            "<|prefix|>",
        ],
    ),
    (
        key::FIM_SUF,
        &[
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<｜fim▁hole｜>",
            "<SUF>",
            "▁<SUF>",
            "<|code_suffix|>",
            "<|suffix|>",
        ],
    ),
    (
        key::FIM_MID,
        &[
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<｜fim▁end｜>",
            "<MID>",
            "▁<MID>",
            "<|code_middle|>",
            "<|middle|>",
        ],
    ),
];

/// Marks within a reply of gpt-oss, which programs that read the reply need.
const PRINTED_TEXTS: [&str; 4] = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// The tokens that end a reply.
pub(super) struct EndTokens {
    ids: Vec<u32>,
    /// A token that does not end a reply, although its text or a key says so.
    removed: Vec<u32>,
}

impl EndTokens {
    /// Finds the tokens by text, and makes them control tokens: they are recognised in a prompt and not printed.
    pub(super) fn find(metadata: &Metadata<'_>, vocab: &mut Vocab<'_>) -> Result<EndTokens, KeyError> {
        let mut ends = EndTokens { ids: Vec::new(), removed: Vec::new() };
        for text in END_TEXTS {
            ends.ids.extend(vocab.set_kind(text, TokenKind::Control));
        }
        for (key, texts) in FILL_IN_ENDS {
            let named = vocab.id(metadata, key)?;
            ends.ids.extend(named.or_else(|| texts.iter().find_map(|text| vocab.set_kind(text, TokenKind::Control))));
        }
        for (key, texts) in FILL_IN_MARKS {
            if vocab.id(metadata, key)?.is_none() {
                texts.iter().find_map(|text| vocab.set_kind(text, TokenKind::Control));
            }
        }
        for text in PRINTED_TEXTS {
            vocab.set_kind(text, TokenKind::UserDefined);
        }
        let has = |text: &str| vocab.ids.contains_key(text);
        // With these tokens, `<|end|>` ends a message of several in a reply; it is printed, to keep them apart.
        let several = (has("<|call|>") || has("<|calls|>")) && (has("<|return|>") || has("<|flush|>"));
        // With this token, `</s>` is ordinary text: a tag of HTML.
        let tag = has("<|tool_response>");
        if several {
            ends.removed.extend(vocab.set_kind("<|end|>", TokenKind::UserDefined));
        }
        if tag {
            ends.removed.extend(vocab.set_kind("</s>", TokenKind::Normal));
        }
        Ok(ends)
    }

    /// All of them, with those that keys name.
    pub(super) fn with_named(self, named: impl IntoIterator<Item = u32>) -> Vec<u32> {
        let EndTokens { mut ids, removed } = self;
        ids.extend(named);
        ids.retain(|id| !removed.contains(id));
        ids
    }
}

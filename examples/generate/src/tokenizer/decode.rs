//! Streaming decoder: turns tokens into text and holds back incomplete UTF-8 characters.

use super::Tokenizer;

/// Decodes a stream of tokens. If a token ends inside a character, the bytes of that character are held back until it is
/// complete.
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The held-back start of a character, at most three bytes.
    waiting: Vec<u8>,
}

impl<'a> DecodeStream<'a> {
    /// A decoder at the start of a text.
    pub fn new(tokenizer: &'a Tokenizer) -> DecodeStream<'a> {
        DecodeStream { tokenizer, waiting: Vec::new() }
    }

    /// Adds a token and returns the text that is now complete. Invalid UTF-8 becomes U+FFFD.
    pub fn push(&mut self, token: u32) -> String {
        self.waiting.extend(self.tokenizer.bytes(token));
        let mut text = String::new();
        let mut whole = 0;
        for chunk in self.waiting.utf8_chunks() {
            text.push_str(chunk.valid());
            whole += chunk.valid().len();
            let invalid = chunk.invalid();
            if is_start(invalid) && whole + invalid.len() == self.waiting.len() {
                break;
            }
            if !invalid.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
            whole += invalid.len();
        }
        self.waiting.drain(..whole);
        text
    }

    /// Ends the text: U+FFFD if an incomplete character is left, else nothing.
    pub fn finish(self) -> &'static str {
        if self.waiting.is_empty() { "" } else { "\u{fffd}" }
    }
}

/// Whether the bytes are the incomplete start of a character.
fn is_start(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|e| e.error_len().is_none())
}

//! Tokens as text, one after another.

use super::Tokenizer;

/// Turns tokens into text as they come. A token may end amid a character: its bytes wait for the next.
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The start of a character, at most three bytes.
    waiting: Vec<u8>,
}

impl<'a> DecodeStream<'a> {
    /// At the start of a text.
    pub fn new(tokenizer: &'a Tokenizer) -> DecodeStream<'a> {
        DecodeStream { tokenizer, waiting: Vec::new() }
    }

    /// The text that is whole with this token; bytes that are no UTF-8 become U+FFFD.
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

    /// What is left at the end of the text: U+FFFD for half a character.
    pub fn finish(self) -> &'static str {
        if self.waiting.is_empty() { "" } else { "\u{fffd}" }
    }
}

/// Whether more bytes can make a character of these, which end where the text does.
fn is_start(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|e| e.error_len().is_none())
}

//! Errors of the parser, with line and quotation.

/// Maximum length of a quotation, in bytes.
const QUOTE: usize = 160;

/// A text that is not PTX, or not in the supported subset.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("PTX line {line}: {message}\n    {quote}")]
pub struct Error {
    /// Line, from 1.
    pub line: u32,
    /// Expected and actual input.
    pub message: String,
    /// The line without surrounding white space; for a very long line, the part around the error.
    pub quote: String,
}

impl Error {
    /// An error at byte `at` of `text`, in line `line`.
    pub(super) fn new(text: &str, at: usize, line: u32, message: impl Into<String>) -> Self {
        let at = text.floor_char_boundary(at);
        let (before, after) = text.split_at(at);
        let start = before.rfind('\n').map_or(0, |i| i + 1).max(text.floor_char_boundary(at.saturating_sub(QUOTE)));
        let end =
            after.find('\n').map_or(text.len(), |i| at + i).min(text.ceil_char_boundary(at.saturating_add(QUOTE)));
        let quote = text.get(start..end).unwrap_or_default().trim().to_owned();
        Self { line, message: message.into(), quote }
    }
}

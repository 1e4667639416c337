//! What is wrong with a PTX text, and where.

/// Longest part of a line that is quoted, in bytes.
const QUOTE: usize = 160;

/// A text that is not PTX, or not the PTX that is supported.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("PTX line {line}: {message}\n    {quote}")]
pub struct Error {
    /// Line, from 1.
    pub line: u32,
    /// What was expected, and what stands there.
    pub message: String,
    /// The line as written, without the blanks around it; of a very long line, the part where the error is.
    pub quote: String,
}

impl Error {
    /// An error at byte `at` of `text`, which lies in line `line`.
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

//! Errors of the decoder: why a module cannot be loaded.

use std::fmt;

/// A module that cannot be loaded: the reason and its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// Line of the PTX text, from 1; 0 if the error concerns the module as a whole.
    pub line: u32,
    /// Expected and actual input.
    pub message: String,
    /// Text of the line.
    pub quote: String,
}

impl Error {
    /// An error at a line. [`Error::quoting`] adds the text of the line when the error leaves the decoder.
    pub(super) fn new(line: u32, message: impl Into<String>) -> Self {
        Self { line, message: message.into(), quote: String::new() }
    }

    /// Adds the text of the line.
    pub(super) fn quoting(mut self, lines: &[impl AsRef<str>]) -> Self {
        let line = (self.line as usize).checked_sub(1).and_then(|index| lines.get(index));
        self.quote = line.map(|line| line.as_ref().trim().to_string()).unwrap_or_default();
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line == 0 {
            return write!(f, "PTX module: {}", self.message);
        }
        write!(f, "PTX line {}: {}", self.line, self.message)?;
        if self.quote.is_empty() { Ok(()) } else { write!(f, "\n    {}", self.quote) }
    }
}

impl std::error::Error for Error {}

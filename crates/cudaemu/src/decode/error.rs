//! Why a module is refused.

use std::fmt;

/// A module that cannot be loaded: what is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// Line of the PTX text, from 1; 0 where the fault is the module's as a whole.
    pub line: u32,
    /// What was expected and what came.
    pub message: String,
    /// The line's text.
    pub quote: String,
}

impl Error {
    /// An error of a line; the decoder adds the quotation once it is on its way out.
    pub(super) fn new(line: u32, message: impl Into<String>) -> Self {
        Self { line, message: message.into(), quote: String::new() }
    }

    /// The same with its line quoted.
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

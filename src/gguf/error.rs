//! Errors of GGUF files.

use std::fmt;
use std::str::Utf8Error;

use crate::tensor::{DType, DescError};
use thiserror::Error;

/// A file is not a valid GGUF file.
#[derive(Debug, Error)]
#[error("byte {offset}, {what}: {fault}")]
pub struct GgufError {
    /// Offset of the fault, in bytes from the start of the file.
    pub offset: usize,
    /// The invalid part of the file, for example `tensor "output.weight"`.
    pub what: String,
    /// The fault.
    pub fault: GgufFault,
}

impl GgufError {
    /// Whether the bytes end before the part does, so that more bytes of the file may help.
    pub(super) fn ends_early(&self) -> bool {
        matches!(self.fault, GgufFault::Truncated { .. } | GgufFault::ImpossibleCount { .. })
    }
}

/// Limit on the characters of a text of the file in an error message. The text may be as long as the file.
const MAX_SHOWN_CHARS: usize = 60;

/// Formats a text of the file for messages: quoted, and cut to its first characters.
#[derive(Clone, Copy)]
pub(super) struct Shortened<'a>(pub(super) &'a str);

impl Shortened<'_> {
    /// The shown part, and whether the text was cut.
    fn start(&self) -> (&str, bool) {
        match self.0.char_indices().nth(MAX_SHOWN_CHARS) {
            Some((end, _)) => (self.0.get(..end).unwrap_or_default(), true),
            None => (self.0, false),
        }
    }

    /// The shown part without quotes.
    pub(super) fn to_text(self) -> String {
        let (start, cut) = self.start();
        format!("{start}{}", if cut { "…" } else { "" })
    }
}

impl fmt::Display for Shortened<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (start, cut) = self.start();
        write!(f, "{start:?}{}", if cut { "…" } else { "" })
    }
}

/// A named part of the file: `tensor "output.weight"`. Formatted only if an error occurs.
#[derive(Clone, Copy)]
pub(super) struct NamedPart<'a>(pub(super) &'static str, pub(super) &'a str);

impl fmt::Display for NamedPart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.0, Shortened(self.1))
    }
}

/// A numbered part of the file: `name of tensor 7`.
#[derive(Clone, Copy)]
pub(super) struct NumberedPart(pub(super) &'static str, pub(super) usize);

impl fmt::Display for NumberedPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.0, self.1)
    }
}

/// The fault of a part of the file, with the expected and the found value.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GgufFault {
    /// The file ends before the part does.
    #[error(
        "needs {needed} bytes where the file has {left} left: it is truncated or damaged; download or copy it again"
    )]
    Truncated {
        /// Size of the part in bytes.
        needed: u64,
        /// Bytes before the end of the file.
        left: usize,
    },
    /// More items than the rest of the file can hold.
    #[error(
        "{count} items where the rest of the file holds at most {limit}: it is truncated or damaged; download or copy it again"
    )]
    ImpossibleCount {
        /// The number in the file.
        count: u64,
        /// The largest number for which the file has enough bytes.
        limit: u64,
    },
    /// More items than the limit, which no model reaches.
    #[error("{count} items, and no model has more than {limit}: the file is damaged; download or copy it again")]
    TooMany {
        /// The number in the file.
        count: usize,
        /// The limit.
        limit: usize,
    },
    /// A text is not UTF-8.
    #[error("expected UTF-8: {0}")]
    Utf8(Utf8Error),
    /// The file does not begin with "GGUF".
    #[error("expected the four bytes \"GGUF\", found {0:02x?}: this is no GGUF file; give a model in this format")]
    Magic([u8; 4]),
    /// An unsupported version of the format.
    #[error("expected version 2 or 3, found {0}; convert the model again, or use a newer release of this program")]
    Version(u32),
    /// A big-endian file.
    #[error("the file is big-endian; convert it to little-endian")]
    BigEndian,
    /// An undefined number of a metadata type.
    #[error("expected a metadata type, 0 to 12, found {0}")]
    ValueType(u32),
    /// An array of arrays.
    #[error("an array holds arrays; expected numbers, booleans or strings")]
    Nested,
    /// A boolean that is neither 0 nor 1.
    #[error("expected a boolean, 0 or 1, found {0}")]
    Bool(u8),
    /// A tensor name or metadata key that occurs twice.
    #[error("{0:?} occurs twice")]
    Duplicate(String),
    /// An alignment that is not a power of two.
    #[error("expected a power of two as alignment, found {0}")]
    Alignment(String),
    /// A number of dimensions outside 1 to 4.
    #[error("expected 1 to 4 dimensions, found {0}")]
    Dimensions(u32),
    /// A tensor without elements.
    #[error("expected at least one element in dimension {0}, found none")]
    Empty(u32),
    /// An unknown number of an element type.
    #[error("expected a tensor type, found {0}, which is removed or unknown")]
    TensorType(u32),
    /// An invalid shape.
    #[error(transparent)]
    Shape(#[from] DescError),
    /// Misaligned tensor data.
    #[error("data at {offset}, expected a multiple of the alignment {alignment}")]
    Misaligned {
        /// Offset in bytes from the start of all tensor data.
        offset: u64,
        /// The alignment of the file in bytes.
        alignment: usize,
    },
    /// Tensor data that reach past the end of the file.
    #[error(
        "{dtype} {ne:?} takes {bytes} bytes from byte {start}, but the file ends at {end}: it is truncated or damaged; \
         download or copy it again"
    )]
    OutOfFile {
        /// Element type.
        dtype: DType,
        /// Element counts, fastest dimension first.
        ne: [usize; 4],
        /// Size of the data in bytes.
        bytes: usize,
        /// Offset of the data in the file.
        start: u64,
        /// Length of the file in bytes.
        end: usize,
    },
    /// One file of a model that is split into several.
    #[error("this is part {part} of {parts} of a split model; join them first: llama-gguf-split --merge PART-1 OUT")]
    Split {
        /// Number of the file, from 1.
        part: u64,
        /// Number of files.
        parts: u64,
    },
}

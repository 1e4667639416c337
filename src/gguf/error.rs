//! What can be wrong with a GGUF file.

use std::fmt;
use std::str::Utf8Error;

use crate::tensor::{DType, DescError};
use thiserror::Error;

/// A file that is no GGUF file, or a broken one.
#[derive(Debug, Error)]
#[error("byte {offset}, {what}: {fault}")]
pub struct GgufError {
    /// Where, in bytes from the start of the file.
    pub offset: usize,
    /// Which part of the file.
    pub what: String,
    /// What is wrong with it.
    pub fault: Fault,
}

impl GgufError {
    /// Whether the file, or what was there of it, ends before the part does.
    pub(super) fn ends_early(&self) -> bool {
        matches!(self.fault, Fault::Truncated { .. } | Fault::Count { .. })
    }
}

/// Characters of a text of the file that go into other texts: it may be as long as the file.
const MOST_SHOWN: usize = 60;

/// A text of the file as other texts show it: its beginning.
#[derive(Clone, Copy)]
pub(super) struct Shown<'a>(pub(super) &'a str);

impl Shown<'_> {
    /// What is shown of it; whether that is less than all.
    fn start(&self) -> (&str, bool) {
        match self.0.char_indices().nth(MOST_SHOWN) {
            Some((end, _)) => (self.0.get(..end).unwrap_or_default(), true),
            None => (self.0, false),
        }
    }

    /// What is shown of it, by itself.
    pub(super) fn to_text(self) -> String {
        let (start, cut) = self.start();
        format!("{start}{}", if cut { "…" } else { "" })
    }
}

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (start, cut) = self.start();
        write!(f, "{start:?}{}", if cut { "…" } else { "" })
    }
}

/// A part of the file that has a name: `tensor "output.weight"`. Made into a text when something is wrong with it.
#[derive(Clone, Copy)]
pub(super) struct Named<'a>(pub(super) &'static str, pub(super) &'a str);

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.0, Shown(self.1))
    }
}

/// A part of the file that has a number: `name of tensor 7`.
#[derive(Clone, Copy)]
pub(super) struct Nth(pub(super) &'static str, pub(super) usize);

impl fmt::Display for Nth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.0, self.1)
    }
}

/// What is wrong with a part of the file, and what was expected.
#[derive(Debug, Error)]
pub enum Fault {
    /// The file ends before the part does.
    #[error("needs {needed} bytes where the file has {left} left: it is truncated or damaged")]
    Truncated {
        /// Bytes of the part.
        needed: u64,
        /// Bytes up to the end of the file.
        left: usize,
    },
    /// More items than the rest of the file can hold.
    #[error("{count} items where the rest of the file holds {most} at most: it is truncated or damaged")]
    Count {
        /// How many the file says.
        count: u64,
        /// How many there can be.
        most: u64,
    },
    /// More items than any model has.
    #[error("{count} items, and no model has more than {limit}: the file is damaged")]
    TooMany {
        /// How many the file says.
        count: usize,
        /// How many are taken.
        limit: usize,
    },
    /// Text in another encoding.
    #[error("expected UTF-8: {0}")]
    Utf8(Utf8Error),
    /// Some other kind of file.
    #[error("expected the four bytes \"GGUF\", found {0:02x?}: this is no GGUF file")]
    Magic([u8; 4]),
    /// A version with another layout.
    #[error("expected version 2 or 3, found {0}")]
    Version(u32),
    /// Made for machines of the other byte order.
    #[error("the file is big-endian; convert it to little-endian")]
    BigEndian,
    /// A number of no metadata type.
    #[error("expected a metadata type, 0 to 12, found {0}")]
    ValueType(u32),
    /// An array of arrays.
    #[error("an array holds arrays; expected numbers, booleans or strings")]
    Nested,
    /// A boolean that is neither.
    #[error("expected a boolean, 0 or 1, found {0}")]
    Bool(u8),
    /// A name or key that is there already.
    #[error("{0:?} is there twice")]
    Twice(String),
    /// Alignment that is none.
    #[error("expected a power of two as alignment, found {0}")]
    Alignment(String),
    /// Too many dimensions, or none.
    #[error("expected 1 to 4 dimensions, found {0}")]
    Dimensions(u32),
    /// A tensor with no elements.
    #[error("expected at least one element in dimension {0}, found none")]
    Empty(u32),
    /// A number of no element type.
    #[error("expected a tensor type, found {0}, which is removed or unknown")]
    TensorType(u32),
    /// A shape that no tensor has.
    #[error(transparent)]
    Shape(#[from] DescError),
    /// Data at an odd place.
    #[error("data at {offset}, expected a multiple of the alignment {alignment}")]
    Misaligned {
        /// From the start of the tensor data.
        offset: u64,
        /// The file's.
        alignment: usize,
    },
    /// Data beyond the end of the file.
    #[error(
        "{dtype} {ne:?} takes {bytes} bytes from byte {start}, but the file ends at {end}: it is truncated or damaged"
    )]
    Outside {
        /// Element type.
        dtype: DType,
        /// Shape.
        ne: [usize; 4],
        /// Bytes of the data.
        bytes: usize,
        /// Where it begins in the file.
        start: u64,
        /// Length of the file.
        end: usize,
    },
    /// One of several files that make a model.
    #[error("this is part {part} of {parts} of a split model; join them first: llama-gguf-split --merge PART-1 OUT")]
    Split {
        /// Counted from 1.
        part: u64,
        /// How many there are.
        parts: u64,
    },
}

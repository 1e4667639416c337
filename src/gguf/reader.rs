//! A bounds-checked cursor over the bytes of a file. Errors have the offset of the failed read.

use super::GgufError;
use super::error::GgufFault;
use std::fmt;

/// The name of a part of the file, for errors; formatted only if an error occurs.
pub(super) trait PartName: fmt::Display + Copy {}

impl<T: fmt::Display + Copy> PartName for T {}

/// Reads little-endian values from a file, front to back.
#[derive(Clone, Debug)]
pub(super) struct Reader<'a> {
    file: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    /// A cursor at a byte of the file.
    pub(super) fn new(file: &'a [u8], at: usize) -> Reader<'a> {
        Reader { file, offset: at }
    }

    /// The offset of the next read.
    pub(super) fn offset(&self) -> usize {
        self.offset
    }

    /// The number of bytes after the cursor.
    pub(super) fn remaining(&self) -> usize {
        self.file.len().saturating_sub(self.offset)
    }

    /// An error at the current offset.
    pub(super) fn error(&self, what: impl PartName, fault: GgufFault) -> GgufError {
        GgufError { offset: self.offset, what: what.to_string(), fault }
    }

    /// The next `n` bytes.
    pub(super) fn bytes(&mut self, what: impl PartName, n: u64) -> Result<&'a [u8], GgufError> {
        let truncated = || self.error(what, GgufFault::Truncated { needed: n, left: self.remaining() });
        let length = usize::try_from(n).map_err(|_| truncated())?;
        let end = self.offset.checked_add(length).ok_or_else(truncated)?;
        let bytes = self.file.get(self.offset..end).ok_or_else(truncated)?;
        self.offset = end;
        Ok(bytes)
    }

    /// The next `N` bytes, by value.
    pub(super) fn array<const N: usize>(&mut self, what: impl PartName) -> Result<[u8; N], GgufError> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(what, N as u64)?);
        Ok(array)
    }

    /// A 32-bit number.
    pub(super) fn u32(&mut self, what: impl PartName) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    /// A 64-bit number.
    pub(super) fn u64(&mut self, what: impl PartName) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A text: its length in bytes as a 64-bit number, then UTF-8.
    pub(super) fn text(&mut self, what: impl PartName) -> Result<&'a str, GgufError> {
        let length = self.u64(what)?;
        let start = self.clone();
        let bytes = self.bytes(what, length)?;
        std::str::from_utf8(bytes).map_err(|e| start.error(what, GgufFault::Utf8(e)))
    }

    /// A 64-bit number of items of at least `smallest` bytes each. A number that the rest of the file cannot hold is an error,
    /// so that no memory is allocated for it.
    pub(super) fn count(&mut self, what: impl PartName, smallest: u64) -> Result<usize, GgufError> {
        let start = self.clone();
        let count = self.u64(what)?;
        let limit = self.remaining() as u64 / smallest;
        if count > limit {
            return Err(start.error(what, GgufFault::ImpossibleCount { count, limit }));
        }
        // Fits: at most the file's length, which is a `usize`.
        Ok(count as usize)
    }
}

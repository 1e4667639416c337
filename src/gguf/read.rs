//! A cursor over the bytes of a file: each read is checked, and a failure knows where it happened.

use super::GgufError;
use super::error::Fault;
use std::fmt;

/// Names a part of the file, for errors.
pub(super) trait What: fmt::Display + Copy {}

impl<T: fmt::Display + Copy> What for T {}

/// Reads little-endian values from a file, front to back.
#[derive(Clone, Debug)]
pub(super) struct Reader<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// From byte `at` of the file.
    pub(super) fn new(file: &'a [u8], at: usize) -> Reader<'a> {
        Reader { file, at }
    }

    /// Where the next read begins.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// Bytes that are left.
    pub(super) fn left(&self) -> usize {
        self.file.len().saturating_sub(self.at)
    }

    /// An error at the next read.
    pub(super) fn error(&self, what: impl What, fault: Fault) -> GgufError {
        GgufError { offset: self.at, what: what.to_string(), fault }
    }

    /// The next `n` bytes.
    pub(super) fn bytes(&mut self, what: impl What, n: u64) -> Result<&'a [u8], GgufError> {
        let truncated = || self.error(what, Fault::Truncated { needed: n, left: self.left() });
        let length = usize::try_from(n).map_err(|_| truncated())?;
        let end = self.at.checked_add(length).ok_or_else(truncated)?;
        let bytes = self.file.get(self.at..end).ok_or_else(truncated)?;
        self.at = end;
        Ok(bytes)
    }

    /// The next `N` bytes, by value.
    pub(super) fn array<const N: usize>(&mut self, what: impl What) -> Result<[u8; N], GgufError> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(what, N as u64)?);
        Ok(array)
    }

    /// Four bytes, a number.
    pub(super) fn u32(&mut self, what: impl What) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    /// Eight bytes, a number.
    pub(super) fn u64(&mut self, what: impl What) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A length in eight bytes, then so many bytes of UTF-8.
    pub(super) fn text(&mut self, what: impl What) -> Result<&'a str, GgufError> {
        let length = self.u64(what)?;
        let start = self.clone();
        let bytes = self.bytes(what, length)?;
        std::str::from_utf8(bytes).map_err(|e| start.error(what, Fault::Utf8(e)))
    }

    /// How many items follow, where one takes `smallest` bytes at least: no count that the file cannot hold is believed,
    /// so that nothing is allocated for it.
    pub(super) fn count(&mut self, what: impl What, smallest: u64) -> Result<usize, GgufError> {
        let start = self.clone();
        let count = self.u64(what)?;
        let most = self.left() as u64 / smallest;
        if count > most {
            return Err(start.error(what, Fault::Count { count, most }));
        }
        // At most the file's length, which is a usize.
        Ok(count as usize)
    }
}

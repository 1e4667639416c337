//! Reader and writer of packed little-endian fields. Each error names its field.

use thiserror::Error;

use super::command::{BodySize, Limits};

/// Bytes that are not a valid message of the protocol. From a decoder or a size check: the peer sent invalid bytes.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// The bytes end within a field.
    #[error("{what}: expected {need} bytes, {have} are left")]
    Truncated {
        /// Name of the field.
        what: &'static str,
        /// Length of the field in bytes.
        need: u64,
        /// Remaining bytes.
        have: u64,
    },
    /// Bytes are left after the last field.
    #[error("{what}: {extra} bytes after the last field")]
    Trailing {
        /// Name of the message.
        what: &'static str,
        /// Number of these bytes.
        extra: u64,
    },
    /// A number that is no command of the protocol or of the extensions.
    #[error("unknown command {0}, expected 0 to 22")]
    UnknownCommand(u8),
    /// The length of the body in a header is not possible for the command.
    #[error("{command}: expected a body of {expected}, the header says {have} bytes")]
    BodySize {
        /// Name of the command in the header.
        command: &'static str,
        /// Lengths that the protocol allows.
        expected: BodySize,
        /// Length in the header.
        have: u64,
    },
    /// A count or size that the protocol allows, but that exceeds a limit of the receiver.
    #[error("{what}: {have} is over the limit of {limit}")]
    TooLarge {
        /// Name of the field, or of the command whose body it is.
        what: &'static str,
        /// The count or size.
        have: u64,
        /// Limit of the receiver.
        limit: u64,
    },
    /// An invalid value of a field.
    #[error("{what}: expected {expected}, got {have}")]
    BadValue {
        /// Name of the field.
        what: &'static str,
        /// Valid values.
        expected: &'static str,
        /// Received value.
        have: u64,
    },
    /// The caller expected a response to a command that has none: a bug of the caller, not of the peer.
    #[error("{0} has no response")]
    NoResponse(&'static str),
}

/// Reads fields from the front of a byte slice. The parameter `what` is the name of the field in errors.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
    /// Limits for the counts of a graph; without limits in messages that have no graph.
    pub(super) limits: Limits,
}

impl<'a> Reader<'a> {
    /// Creates a reader at the start of `bytes`.
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Reader::with_limits(bytes, Limits::new(u32::MAX, u32::MAX, u64::MAX))
    }

    /// Creates a reader of a message that may have a graph.
    pub(super) const fn with_limits(bytes: &'a [u8], limits: Limits) -> Self {
        Reader { rest: bytes, limits }
    }

    /// Number of unread bytes.
    pub(crate) const fn remaining(&self) -> usize {
        self.rest.len()
    }

    /// Reads the next `len` bytes.
    #[inline]
    pub(crate) fn bytes(&mut self, what: &'static str, len: usize) -> Result<&'a [u8], WireError> {
        let Some((head, rest)) = self.rest.split_at_checked(len) else {
            return Err(self.truncated(what, len as u64));
        };
        self.rest = rest;
        Ok(head)
    }

    /// Reads the next `N` bytes.
    #[inline]
    pub(crate) fn array<const N: usize>(&mut self, what: &'static str) -> Result<&'a [u8; N], WireError> {
        let Some((head, rest)) = self.rest.split_first_chunk() else {
            return Err(self.truncated(what, N as u64));
        };
        self.rest = rest;
        Ok(head)
    }

    /// Borrows the next `count` records of `N` bytes each. Allocates nothing, because `count` is an unchecked claim of the
    /// peer.
    pub(crate) fn arrays<const N: usize>(
        &mut self,
        what: &'static str,
        count: u32,
    ) -> Result<&'a [[u8; N]], WireError> {
        Ok(self.repeated(what, count, N)?.as_chunks().0)
    }

    /// As [`Reader::arrays`], for records of `len` bytes.
    pub(crate) fn repeated(&mut self, what: &'static str, count: u32, len: usize) -> Result<&'a [u8], WireError> {
        let need = u64::from(count).saturating_mul(len as u64);
        let len = usize::try_from(need).map_err(|_| self.truncated(what, need))?;
        self.bytes(what, len)
    }

    /// Reads all remaining bytes: the last field of a message, of any length.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    /// Ends the decoding of the message `what`.
    ///
    /// # Errors
    /// [`WireError::Trailing`] if unread bytes remain.
    pub(crate) fn finish(self, what: &'static str) -> Result<(), WireError> {
        match self.rest.len() {
            0 => Ok(()),
            extra => Err(WireError::Trailing { what, extra: extra as u64 }),
        }
    }

    #[cold]
    fn truncated(&self, what: &'static str, need: u64) -> WireError {
        WireError::Truncated { what, need, have: self.rest.len() as u64 }
    }
}

/// A field of a message, or a whole body, with its decoder and encoder. `what` names the field in errors; a struct of fields names
/// these instead.
pub(super) trait Field<'a>: Sized {
    fn read(r: &mut Reader<'a>, what: &'static str) -> Result<Self, WireError>;

    fn write(&self, out: &mut Vec<u8>);
}

macro_rules! integers {
    ($($ty:ident)*) => {
        impl Reader<'_> {
            $(
                /// Reads the next little-endian integer of this type.
                #[inline]
                pub(crate) fn $ty(&mut self, what: &'static str) -> Result<$ty, WireError> {
                    self.array(what).map(|bytes| $ty::from_le_bytes(*bytes))
                }
            )*
        }

        $(impl Field<'_> for $ty {
            fn read(r: &mut Reader<'_>, what: &'static str) -> Result<Self, WireError> {
                r.$ty(what)
            }

            fn write(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        })*
    };
}

integers! { u8 u32 u64 i32 }

/// A flag or result of one byte. Values other than 0 and 1 are errors: no peer sends them, so they reveal a wrong layout.
impl Field<'_> for bool {
    fn read(r: &mut Reader<'_>, what: &'static str) -> Result<Self, WireError> {
        match r.u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            have => Err(WireError::BadValue { what, expected: "0 or 1", have: have.into() }),
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
}

impl<const N: usize> Field<'_> for [u8; N] {
    fn read(r: &mut Reader<'_>, what: &'static str) -> Result<Self, WireError> {
        r.array(what).copied()
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }
}

/// The last field of a message, which some versions do not send.
impl<'a, T: Field<'a>> Field<'a> for Option<T> {
    fn read(r: &mut Reader<'a>, what: &'static str) -> Result<Self, WireError> {
        if r.remaining() == 0 { Ok(None) } else { T::read(r, what).map(Some) }
    }

    fn write(&self, out: &mut Vec<u8>) {
        self.iter().for_each(|field| field.write(out));
    }
}

/// The last field of a message: all remaining bytes.
impl<'a> Field<'a> for &'a [u8] {
    fn read(r: &mut Reader<'a>, _: &'static str) -> Result<Self, WireError> {
        Ok(r.rest())
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }
}

/// A count as u32, and that many arrays.
impl<'a, const N: usize> Field<'a> for &'a [[u8; N]] {
    fn read(r: &mut Reader<'a>, what: &'static str) -> Result<Self, WireError> {
        let count = r.u32(what)?;
        r.arrays(what, count)
    }

    fn write(&self, out: &mut Vec<u8>) {
        (self.len() as u32).write(out); // a list in memory is shorter than 2^32
        out.extend_from_slice(self.as_flattened());
    }
}

/// A count as u32, and that many elements.
impl<'a, T: Field<'a>> Field<'a> for Vec<T> {
    fn read(r: &mut Reader<'a>, what: &'static str) -> Result<Self, WireError> {
        let count = r.u32(what)?;
        // `collect` reserves no memory for `count`, which is the peer's claim, because the first error may end the iterator.
        (0..count).map(|_| T::read(r, what)).collect()
    }

    fn write(&self, out: &mut Vec<u8>) {
        (self.len() as u32).write(out); // a list in memory is shorter than 2^32
        self.iter().for_each(|element| element.write(out));
    }
}

/// A text: its length in bytes as u32, then UTF-8.
impl<'a> Field<'a> for &'a str {
    fn read(r: &mut Reader<'a>, what: &'static str) -> Result<Self, WireError> {
        let len = r.u32(what)?;
        let bytes = r.bytes(what, usize::try_from(len).unwrap_or(usize::MAX))?;
        str::from_utf8(bytes).map_err(|e| WireError::BadValue {
            what,
            expected: "UTF-8",
            have: bytes.get(e.valid_up_to()).map_or(0, |&byte| byte.into()),
        })
    }

    /// A text of 4 GiB or more would be truncated; no caller has one.
    fn write(&self, out: &mut Vec<u8>) {
        let text = &self[..self.floor_char_boundary(u32::MAX as usize)];
        (text.len() as u32).write(out);
        out.extend_from_slice(text.as_bytes());
    }
}

impl Field<'_> for String {
    fn read(r: &mut Reader<'_>, what: &'static str) -> Result<Self, WireError> {
        <&str>::read(r, what).map(str::to_owned)
    }

    fn write(&self, out: &mut Vec<u8>) {
        self.as_str().write(out);
    }
}

/// A name and its value.
impl Field<'_> for (String, String) {
    fn read(r: &mut Reader<'_>, _: &'static str) -> Result<Self, WireError> {
        Ok((Field::read(r, "name")?, Field::read(r, "value")?))
    }

    fn write(&self, out: &mut Vec<u8>) {
        self.0.write(out);
        self.1.write(out);
    }
}

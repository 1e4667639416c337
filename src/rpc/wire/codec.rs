//! Reading and writing packed little-endian fields; every error names its field.

use thiserror::Error;

use super::command::{BodySize, Command};

/// Bytes that are not a message of the protocol. From a decoder or a size check it is the peer's fault.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// The bytes end before this field does.
    #[error("{what}: expected {need} bytes, {have} are left")]
    Truncated {
        /// The field.
        what: &'static str,
        /// Bytes the field takes.
        need: u64,
        /// Bytes there are.
        have: u64,
    },
    /// Bytes are left after the last field.
    #[error("{what}: {extra} bytes after the last field")]
    Trailing {
        /// The message.
        what: &'static str,
        /// How many.
        extra: u64,
    },
    /// A command number that protocol 7.0 does not have.
    #[error("unknown command {0}, expected 0 to 17")]
    UnknownCommand(u8),
    /// A header promises a body of a length that its command cannot have.
    #[error("{command}: expected a body of {expected}, the header says {have} bytes")]
    BodySize {
        /// The command.
        command: Command,
        /// What the protocol allows.
        expected: BodySize,
        /// What the header says.
        have: u64,
    },
    /// A legal count or size that is over a limit of ours.
    #[error("{what}: {have} is over the limit of {limit}")]
    TooLarge {
        /// The field, or the command whose body it is.
        what: &'static str,
        /// The count or size.
        have: u64,
        /// The most that is accepted.
        limit: u64,
    },
    /// A value that this field cannot have.
    #[error("{what}: expected {expected}, got {have}")]
    BadValue {
        /// The field.
        what: &'static str,
        /// What would have been right.
        expected: &'static str,
        /// What came.
        have: u64,
    },
    /// A response was asked for from a command that has none: the caller's fault.
    #[error("{0} has no response")]
    NoResponse(Command),
}

/// Reads fields off the front of a byte slice. `what` is the field's name in errors.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// A reader at the start of `bytes`.
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Reader { rest: bytes }
    }

    /// Bytes not yet read.
    pub(crate) const fn left(&self) -> usize {
        self.rest.len()
    }

    /// The next `len` bytes.
    #[inline]
    pub(crate) fn bytes(&mut self, what: &'static str, len: usize) -> Result<&'a [u8], WireError> {
        let Some((head, rest)) = self.rest.split_at_checked(len) else {
            return Err(self.truncated(what, len as u64));
        };
        self.rest = rest;
        Ok(head)
    }

    /// The next `N` bytes.
    #[inline]
    pub(crate) fn array<const N: usize>(&mut self, what: &'static str) -> Result<&'a [u8; N], WireError> {
        let Some((head, rest)) = self.rest.split_first_chunk() else {
            return Err(self.truncated(what, N as u64));
        };
        self.rest = rest;
        Ok(head)
    }

    /// The next `count` records of `N` bytes each, borrowed: `count` is the peer's and costs nothing by itself.
    pub(crate) fn arrays<const N: usize>(
        &mut self,
        what: &'static str,
        count: u32,
    ) -> Result<&'a [[u8; N]], WireError> {
        let need = u64::from(count).saturating_mul(N as u64);
        let len = usize::try_from(need).map_err(|_| self.truncated(what, need))?;
        Ok(self.bytes(what, len)?.as_chunks().0)
    }

    /// Everything that is left, as a last field of any length.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    /// Ends the message `what`.
    ///
    /// # Errors
    /// [`WireError::Trailing`] if a byte is left.
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

/// A field of a fixed size, in both directions.
pub(super) trait Field: Sized {
    /// Bytes on the wire.
    const SIZE: u64;

    fn read(r: &mut Reader<'_>, what: &'static str) -> Result<Self, WireError>;

    fn write(&self, out: &mut Vec<u8>);
}

macro_rules! integers {
    ($($ty:ident)*) => {
        impl Reader<'_> {
            $(
                /// The next little-endian integer of this type.
                #[inline]
                pub(crate) fn $ty(&mut self, what: &'static str) -> Result<$ty, WireError> {
                    self.array(what).map(|bytes| $ty::from_le_bytes(*bytes))
                }
            )*
        }

        $(impl Field for $ty {
            const SIZE: u64 = size_of::<$ty>() as u64;

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

/// A flag or result of one byte. Other values are refused: nobody sends them, so they mean a misread layout.
impl Field for bool {
    const SIZE: u64 = 1;

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

impl<const N: usize> Field for [u8; N] {
    const SIZE: u64 = N as u64;

    fn read(r: &mut Reader<'_>, what: &'static str) -> Result<Self, WireError> {
        r.array(what).copied()
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }
}

//! What went wrong on a device, as the wire says it.

use super::super::codec::{Reader, WireError};
use super::{text, write_text};

/// A failure with its reason. Memory that is used up and nodes that a device does not run keep their kind: a client may act on
/// them. Of anything else the text is all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What a program can tell.
    pub kind: FaultKind,
    /// For people.
    pub text: String,
}

/// What a program can tell of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultKind {
    /// Nothing.
    Other,
    /// The account's or the device's memory is used up.
    OutOfMemory {
        /// Bytes asked for.
        asked: u64,
        /// Bytes left.
        left: u64,
        /// The limit.
        limit: u64,
    },
    /// The device does not run this op, by its number on the wire, as it is.
    Unsupported(u32),
    /// Data that this op does not allow.
    Data(u32),
}

impl Fault {
    /// A failure that only people understand.
    pub fn new(text: impl Into<String>) -> Fault {
        Fault { kind: FaultKind::Other, text: text.into() }
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Fault, WireError> {
        let kind = r.u32("kind")?;
        let kind = match kind {
            0 => FaultKind::Other,
            1 => FaultKind::OutOfMemory { asked: r.u64("asked")?, left: r.u64("left")?, limit: r.u64("limit")? },
            2 => FaultKind::Unsupported(r.u32("op")?),
            3 => FaultKind::Data(r.u32("op")?),
            have => return Err(WireError::BadValue { what: "kind", expected: "0 to 3", have: have.into() }),
        };
        Ok(Fault { kind, text: text(r, "reason")?.to_owned() })
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let mut number = |n: u32| out.extend_from_slice(&n.to_le_bytes());
        match self.kind {
            FaultKind::Other => number(0),
            FaultKind::OutOfMemory { asked, left, limit } => {
                number(1);
                [asked, left, limit].iter().for_each(|n| out.extend_from_slice(&n.to_le_bytes()));
            }
            FaultKind::Unsupported(op) => {
                number(2);
                number(op);
            }
            FaultKind::Data(op) => {
                number(3);
                number(op);
            }
        }
        write_text(&self.text, out);
    }
}

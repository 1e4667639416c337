//! Errors of devices on the wire.

use super::super::codec::{Field, Reader, WireError};

/// An error of a device, which a server reports to its client. A client can handle exhausted memory and unsupported nodes, so
/// these keep their kind; all other errors are only a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFault {
    /// Kind, for programs.
    pub kind: DeviceFaultKind,
    /// Message, for users.
    pub text: String,
}

/// Kind of a device error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceFaultKind {
    /// An error without further data.
    Other,
    /// The memory of the device, or of the session's budget, is exhausted.
    OutOfMemory {
        /// Requested bytes.
        requested: u64,
        /// Available bytes.
        available: u64,
        /// Limit in bytes.
        limit: u64,
    },
    /// The device does not support a node of this op, given by its number on the wire.
    Unsupported(u32),
    /// The data of a source is invalid for this op, given by its number on the wire; for example an index out of range.
    Data(u32),
}

impl DeviceFault {
    /// An error of kind [`DeviceFaultKind::Other`].
    pub fn new(text: impl Into<String>) -> DeviceFault {
        DeviceFault { kind: DeviceFaultKind::Other, text: text.into() }
    }
}

impl Field<'_> for DeviceFault {
    fn read(r: &mut Reader<'_>, what: &'static str) -> Result<Self, WireError> {
        let kind = match r.u32("kind")? {
            0 => DeviceFaultKind::Other,
            1 => DeviceFaultKind::OutOfMemory {
                requested: r.u64("requested")?,
                available: r.u64("available")?,
                limit: r.u64("limit")?,
            },
            2 => DeviceFaultKind::Unsupported(r.u32("op")?),
            3 => DeviceFaultKind::Data(r.u32("op")?),
            have => return Err(WireError::BadValue { what: "kind", expected: "0 to 3", have: have.into() }),
        };
        Ok(DeviceFault { kind, text: Field::read(r, what)? })
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self.kind {
            DeviceFaultKind::Other => 0_u32.write(out),
            DeviceFaultKind::OutOfMemory { requested, available, limit } => {
                1_u32.write(out);
                [requested, available, limit].iter().for_each(|n| n.write(out));
            }
            DeviceFaultKind::Unsupported(op) => [2, op].iter().for_each(|n| n.write(out)),
            DeviceFaultKind::Data(op) => [3, op].iter().for_each(|n| n.write(out)),
        }
        self.text.write(out);
    }
}

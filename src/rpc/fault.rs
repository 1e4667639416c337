//! Conversion of device errors to and from the protocol's `Fault`, in which a server reports them to its clients.

use super::wire::ext::{Fault, FaultKind};
use crate::device::{DeviceError, Unsupported};
use crate::ops::OpCode;

/// Size limit of the text of a fault, in bytes. A reason may contain text of a third party of any length, and clients reject
/// notifications above their own limit.
const MAX_REASON_BYTES: usize = 4096;

impl From<&DeviceError> for Fault {
    fn from(error: &DeviceError) -> Fault {
        let (kind, mut text) = match error {
            &DeviceError::OutOfMemory { asked, left, limit } => {
                (FaultKind::OutOfMemory { asked, left, limit }, String::new())
            }
            DeviceError::Unsupported(Unsupported { op, reason }) => {
                (FaultKind::Unsupported(op.to_wire()), reason.clone())
            }
            DeviceError::Data { op, reason } => (FaultKind::Data(op.to_wire()), reason.clone()),
            DeviceError::Remote { reason, .. } => (FaultKind::Other, reason.clone()),
            other => (FaultKind::Other, other.to_string()),
        };
        text.truncate(text.floor_char_boundary(MAX_REASON_BYTES));
        Fault { kind, text }
    }
}

/// Converts a fault to the error of the device with this name. An op code that this process does not have becomes a text.
pub(super) fn device_error(fault: Fault, device: &str) -> DeviceError {
    let Fault { kind, text: reason } = fault;
    match kind {
        FaultKind::OutOfMemory { asked, left, limit } => DeviceError::OutOfMemory { asked, left, limit },
        FaultKind::Unsupported(op) if let Some(op) = OpCode::from_wire(op) => Unsupported { op, reason }.into(),
        FaultKind::Data(op) if let Some(op) = OpCode::from_wire(op) => DeviceError::Data { op, reason },
        _ => DeviceError::Remote { device: device.to_owned(), reason },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_reason_is_truncated_at_a_character_boundary() {
        let remote = |reason: String| DeviceError::Remote { device: "here".to_owned(), reason };
        let text = |error: &DeviceError| Fault::from(error).text;
        assert_eq!(text(&remote("too hot".to_owned())), "too hot");
        let long = text(&remote(format!("x{}", "é".repeat(40_000))));
        assert_eq!((long.len(), long.chars().count()), (MAX_REASON_BYTES - 1, MAX_REASON_BYTES / 2));
    }
}

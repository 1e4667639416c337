//! Conversion of device errors to and from the protocol's [`DeviceFault`], in which a server reports them to its clients.

use super::wire::ext::{DeviceFault, DeviceFaultKind};
use crate::device::{DeviceError, Unsupported};
use crate::ops::OpCode;

/// Maximum length of the text of a fault, in bytes. A reason may contain text of a third party of any length, and clients
/// reject notifications above their own limit.
const MAX_REASON_BYTES: usize = 4096;

impl From<&DeviceError> for DeviceFault {
    fn from(error: &DeviceError) -> DeviceFault {
        let (kind, mut text) = match error {
            &DeviceError::OutOfMemory { requested, available, limit } => {
                (DeviceFaultKind::OutOfMemory { requested, available, limit }, String::new())
            }
            DeviceError::Unsupported(Unsupported { op, reason }) => {
                (DeviceFaultKind::Unsupported(op.to_wire()), reason.clone())
            }
            DeviceError::Data { op, reason } => (DeviceFaultKind::Data(op.to_wire()), reason.clone()),
            DeviceError::Remote { reason, .. } => (DeviceFaultKind::Other, reason.clone()),
            other => (DeviceFaultKind::Other, other.to_string()),
        };
        text.truncate(text.floor_char_boundary(MAX_REASON_BYTES));
        DeviceFault { kind, text }
    }
}

/// Converts a fault to the error of the device with this name. An op code that this process does not have becomes a text.
pub(super) fn device_error(fault: DeviceFault, device: &str) -> DeviceError {
    let DeviceFault { kind, text: reason } = fault;
    match kind {
        DeviceFaultKind::OutOfMemory { requested, available, limit } => {
            DeviceError::OutOfMemory { requested, available, limit }
        }
        DeviceFaultKind::Unsupported(op) if let Some(op) = OpCode::from_extension_wire(op) => {
            Unsupported { op, reason }.into()
        }
        DeviceFaultKind::Data(op) if let Some(op) = OpCode::from_extension_wire(op) => DeviceError::Data { op, reason },
        _ => DeviceError::Remote { device: device.to_owned(), reason },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_reason_is_truncated_at_a_character_boundary() {
        let remote = |reason: String| DeviceError::Remote { device: "here".to_owned(), reason };
        let text = |error: &DeviceError| DeviceFault::from(error).text;
        assert_eq!(text(&remote("too hot".to_owned())), "too hot");
        let long = text(&remote(format!("x{}", "é".repeat(40_000))));
        assert_eq!((long.len(), long.chars().count()), (MAX_REASON_BYTES - 1, MAX_REASON_BYTES / 2));
    }
}

//! Failures of devices, as one end tells the other.

use super::wire::ext::{Fault, FaultKind};
use crate::device::{DeviceError, Unsupported};
use crate::ops::OpCode;

impl From<&DeviceError> for Fault {
    fn from(error: &DeviceError) -> Fault {
        let (kind, text) = match error {
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
        Fault { kind, text }
    }
}

/// What a failure behind a server is here, on a device of this name. An op that this end does not know is told by its text.
pub(super) fn error(fault: Fault, device: &str) -> DeviceError {
    let Fault { kind, text: reason } = fault;
    match kind {
        FaultKind::OutOfMemory { asked, left, limit } => DeviceError::OutOfMemory { asked, left, limit },
        FaultKind::Unsupported(op) if let Some(op) = OpCode::from_wire(op) => Unsupported { op, reason }.into(),
        FaultKind::Data(op) if let Some(op) = OpCode::from_wire(op) => DeviceError::Data { op, reason },
        _ => DeviceError::Remote { device: device.to_owned(), reason },
    }
}

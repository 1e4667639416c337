//! Uploads of bytes from the client's connection to a device.

use super::failure::SessionError;
use crate::device::{Queue, Region, UploadError};
use crate::rpc::server::client_connection::ClientConnection;
use crate::rpc::transport::TransportError;
use crate::tensor::TensorDesc;

impl From<UploadError<TransportError>> for SessionError {
    fn from(e: UploadError<TransportError>) -> SessionError {
        match e {
            UploadError::Source(e) => e.into(),
            UploadError::Device(e) => e.into(),
        }
    }
}

/// Uploads the next bytes of a message to `region`, which they fill. `on_received` is called with each chunk after it has
/// arrived. `tensor`: the layout, if the region is a whole tensor.
///
/// # Errors
/// Of the connection ([`UploadError::Source`]) or of the device.
pub(in crate::rpc::server) fn upload_from_client(
    connection: &mut ClientConnection,
    queue: &mut dyn Queue,
    region: Region,
    tensor: Option<&TensorDesc>,
    mut on_received: impl FnMut(&[u8]),
) -> Result<(), UploadError<TransportError>> {
    queue.upload_from(region, tensor, |chunk| {
        connection.read_exact(chunk)?;
        on_received(chunk);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{CpuDevice, MathMode};
    use crate::device::{Device, MemoryBudget};

    /// More than one chunk, so that the device could call the source again after it has failed.
    const BYTES: u64 = 3 << 20;

    #[test]
    fn source_error_is_returned_and_the_queue_stays_usable() {
        let device = CpuDevice::new("CPU", 1, MathMode::Exact, 2 * BYTES).unwrap();
        let budget = MemoryBudget::new(2 * BYTES);
        let mut queue = device.queue(&budget).unwrap();
        let region = device.alloc(BYTES, &budget).unwrap().whole();
        let mut left = BYTES / 2;
        let mut failures = 0;
        let done = queue.upload_from(region.clone(), None, |chunk| {
            left = left.checked_sub(chunk.len() as u64).ok_or_else(|| {
                failures += 1;
                failures
            })?;
            Ok(())
        });
        assert_eq!(done, Err(UploadError::Source(1)));
        assert_eq!(failures, 1, "a source is not called again after it has failed");
        let done = queue.upload_from(region.clone(), None, |chunk| {
            chunk.fill(7);
            Ok::<(), &str>(())
        });
        assert_eq!(done, Ok(()));
        assert_eq!(queue.download(region).unwrap().wait(None).unwrap(), [7; BYTES as usize]);
    }
}

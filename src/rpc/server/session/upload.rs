//! Uploads whose bytes come from the client's connection.

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

/// Uploads the next bytes of a message, as many as the region has; `received` sees each piece once it is there.
pub(in crate::rpc::server) fn receive(
    connection: &mut ClientConnection,
    queue: &mut dyn Queue,
    region: Region,
    tensor: Option<&TensorDesc>,
    mut received: impl FnMut(&[u8]),
) -> Result<(), UploadError<TransportError>> {
    queue.upload_from(region, tensor, |piece| {
        connection.read_exact(piece)?;
        received(piece);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{CpuDevice, Path};
    use crate::device::{Account, Device};

    /// More than one piece, so that the device could call a source again that has failed.
    const BYTES: u64 = 3 << 20;

    #[test]
    fn a_failed_source_is_returned_as_it_is_and_the_queue_goes_on() {
        let device = CpuDevice::new("CPU", 1, Path::Exact, 2 * BYTES).unwrap();
        let account = Account::new(2 * BYTES);
        let mut queue = device.queue(&account).unwrap();
        let region = device.alloc(BYTES, &account).unwrap().whole();
        let mut left = BYTES / 2;
        let mut failures = 0;
        let done = queue.upload_from(region.clone(), None, |piece| {
            left = left.checked_sub(piece.len() as u64).ok_or_else(|| {
                failures += 1;
                failures
            })?;
            Ok(())
        });
        assert_eq!(done, Err(UploadError::Source(1)));
        assert_eq!(failures, 1, "a source is not called again after it has failed");
        let done = queue.upload_from(region.clone(), None, |piece| {
            piece.fill(7);
            Ok::<(), &str>(())
        });
        assert_eq!(done, Ok(()));
        assert_eq!(queue.download(region).unwrap().wait(None).unwrap(), [7; BYTES as usize]);
    }
}

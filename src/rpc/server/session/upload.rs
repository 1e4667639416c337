//! Uploads whose bytes come from the client's connection or from the tensor cache.

use super::failure::SessionError;
use crate::device::{DeviceError, Queue, Region, UploadError};
use crate::rpc::server::client_connection::ClientConnection;
use crate::rpc::server::tensor_cache::{Cache, CacheReader};
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

/// Uploads what was found in the tensor cache. False when the file is not what was once written: it is dropped from the cache,
/// and the region holds anything.
///
/// # Errors
/// Those of the queue.
pub(in crate::rpc::server) fn load_cached(
    cache: &Cache,
    hash: u64,
    mut hit: CacheReader,
    queue: &mut dyn Queue,
    region: Region,
    tensor: Option<&TensorDesc>,
) -> Result<bool, DeviceError> {
    let read = match queue.upload_from(region, tensor, |piece| hit.read(piece)) {
        Ok(()) => hit.verify(),
        Err(UploadError::Source(e)) => Err(e),
        Err(UploadError::Device(e)) => return Err(e),
    };
    if let Err(e) = read {
        cache.drop_file(hash, &e);
        return Ok(false);
    }
    Ok(true)
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

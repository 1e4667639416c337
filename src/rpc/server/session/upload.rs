//! Uploads whose bytes come from the client's connection or from the tensor cache.

use super::failure::SessionError;
use crate::device::{DeviceError, Queue, Region};
use crate::rpc::server::client_connection::{Connection, TransportError};
use crate::rpc::server::fallible_upload::{UploadError, upload};
use crate::rpc::server::tensor_cache::{Cache, CacheReader};
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
    connection: &mut Connection,
    queue: &mut dyn Queue,
    region: Region,
    tensor: Option<&TensorDesc>,
    mut received: impl FnMut(&[u8]),
) -> Result<(), UploadError<TransportError>> {
    upload(queue, region, tensor, |piece| {
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
    let read = match upload(queue, region, tensor, |piece| hit.read(piece)) {
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

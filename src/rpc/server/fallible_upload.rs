//! Uploads whose source may fail with an error of its own.
//!
//! The only place that uses [`Source::Writer`]: a device's upload returns a device's error, so the source's own error is kept
//! here, typed, and takes precedence.

use std::io::ErrorKind;

use crate::device::{DeviceError, Queue, Region, Source};
use crate::tensor::TensorDesc;

/// Why an upload ended early.
pub(super) enum UploadError<E> {
    /// The source has no more bytes. The queue is unharmed, and the region holds anything.
    Source(E),
    /// The queue failed.
    Device(DeviceError),
}

/// Uploads the bytes that `source` writes piece by piece. It is not called again after it has failed.
pub(super) fn upload<E>(
    queue: &mut dyn Queue,
    region: Region,
    tensor: Option<&TensorDesc>,
    mut source: impl FnMut(&mut [u8]) -> Result<(), E>,
) -> Result<(), UploadError<E>> {
    let mut failed = None;
    let mut fill = |piece: &mut [u8]| {
        if failed.is_none() {
            failed = source(piece).err();
        }
        // The device learns only that there are no more bytes.
        if failed.is_none() { Ok(()) } else { Err(ErrorKind::Other.into()) }
    };
    let done = queue.upload(region, tensor, Source::Writer(&mut fill));
    match failed {
        Some(e) => Err(UploadError::Source(e)),
        None => done.map_err(UploadError::Device),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{CpuDevice, Path};
    use crate::device::{Account, Device};

    /// More than one piece, so that the device asks a source again that has failed.
    const BYTES: u64 = 3 << 20;

    #[test]
    fn a_failed_source_is_returned_as_it_is_and_the_queue_goes_on() {
        let device = CpuDevice::new("CPU", 1, Path::Exact, 2 * BYTES).unwrap();
        let account = Account::new(2 * BYTES);
        let mut queue = device.queue(&account).unwrap();
        let region = device.alloc(BYTES, &account).unwrap().whole();
        let mut left = BYTES / 2;
        let mut failures = 0;
        let done = upload(&mut *queue, region.clone(), None, |piece| {
            left = left.checked_sub(piece.len() as u64).ok_or_else(|| {
                failures += 1;
                ("cut off", failures)
            })?;
            Ok(())
        });
        assert!(matches!(done, Err(UploadError::Source(("cut off", 1)))));
        assert_eq!(failures, 1, "it is not asked again");
        let done = upload::<()>(&mut *queue, region.clone(), None, |piece| {
            piece.fill(7);
            Ok(())
        });
        assert!(done.is_ok());
        assert_eq!(queue.download(region).unwrap().wait(None).unwrap(), [7; BYTES as usize]);
    }
}

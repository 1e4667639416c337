//! Host-staged copies between devices that cannot access each other's memory (a staging copy on the host): download to the host
//! and upload, chunk by chunk, pipelined.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::device::{DeviceError, Queue, Region, TRANSFER_CHUNK_BYTES, UploadSource};

/// Maximum number of chunks in flight, which limits the host memory of a copy.
const MAX_IN_FLIGHT: usize = 8;

/// Copies `src` on the device of queue `from` to `dst` on the device of queue `to`. The regions have the same size. The copy
/// runs after the earlier work of `from` and before the later work of `to`. Returns when all bytes have been read from the
/// source.
///
/// # Errors
/// Errors of the queues; a chunk that is not downloaded within `timeout`.
pub(in crate::rpc::server) fn copy(
    (from, src): (&mut dyn Queue, &Region),
    (to, dst): (&mut dyn Queue, &Region),
    timeout: Duration,
) -> Result<(), DeviceError> {
    let mut in_flight = VecDeque::with_capacity(MAX_IN_FLIGHT);
    let mut next = 0;
    loop {
        while in_flight.len() < MAX_IN_FLIGHT && next < src.bytes() {
            let bytes = TRANSFER_CHUNK_BYTES.min(src.bytes() - next);
            in_flight.push_back((from.download(src.subregion(next, bytes)?)?, dst.subregion(next, bytes)?));
            next += bytes;
        }
        let Some((download, target)) = in_flight.pop_front() else { return Ok(()) };
        let bytes = download.wait(Some(Instant::now() + timeout))?;
        to.upload(target, None, UploadSource::Borrowed(&bytes))?;
    }
}

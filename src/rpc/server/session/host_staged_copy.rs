//! Host-staged copies between devices that cannot access each other's memory (a staging copy on the host): download to the host
//! and upload, chunk by chunk, pipelined.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::device::{DeviceError, Queue, Region, TRANSFER_CHUNK_BYTES, UploadSource};
use crate::rpc::server::host_memory::SessionMemory;

/// Maximum number of chunks in flight, which limits the host memory of a copy.
const MAX_IN_FLIGHT: usize = 8;

/// Copies `src` on the device of queue `from` to `dst` on the device of queue `to`. The regions have the same size. The copy
/// runs after the earlier work of `from` and before the later work of `to`. Returns when all bytes have been read from the
/// source. The chunks are charged to `memory`; as many are in flight as it has room for.
///
/// # Errors
/// Errors of the queues; no host memory for one chunk; a chunk that is not downloaded within `timeout`.
pub(in crate::rpc::server) fn copy(
    (from, src): (&mut dyn Queue, &Region),
    (to, dst): (&mut dyn Queue, &Region),
    memory: &Arc<SessionMemory>,
    timeout: Duration,
) -> Result<(), DeviceError> {
    let (first, all) = (TRANSFER_CHUNK_BYTES.min(src.bytes()), TRANSFER_CHUNK_BYTES * MAX_IN_FLIGHT as u64);
    let mut charge = memory.wait(first)?;
    let _ = charge.grow(all.min(src.bytes()) - first);
    let max_in_flight = charge.bytes().div_ceil(TRANSFER_CHUNK_BYTES) as usize;
    let mut in_flight = VecDeque::with_capacity(max_in_flight);
    let mut next = 0;
    loop {
        while in_flight.len() < max_in_flight && next < src.bytes() {
            let bytes = TRANSFER_CHUNK_BYTES.min(src.bytes() - next);
            in_flight.push_back((from.download(src.subregion(next, bytes)?)?, dst.subregion(next, bytes)?));
            next += bytes;
        }
        let Some((download, target)) = in_flight.pop_front() else { return Ok(()) };
        let bytes = download.wait(Some(Instant::now() + timeout))?;
        to.upload(target, None, UploadSource::Borrowed(&bytes))?;
    }
}

//! Copies between devices that cannot read each other's memory: staged in host memory, piece by piece.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::device::{DeviceError, PIECE, Queue, Region, Source};

/// Pieces in flight at a time, which bounds the host memory of a copy.
const MAX_IN_FLIGHT: usize = 8;

/// Copies `src` of the one queue's device to `dst` of the other's, regions of equal size: after the first's work so far,
/// before the second's work to come. Returns when all bytes have left the source, none of which may take longer than
/// `timeout`.
///
/// # Errors
/// Those of the queues.
pub(in crate::rpc::server) fn copy(
    (from, src): (&mut dyn Queue, &Region),
    (to, dst): (&mut dyn Queue, &Region),
    timeout: Duration,
) -> Result<(), DeviceError> {
    let mut in_flight = VecDeque::with_capacity(MAX_IN_FLIGHT);
    let mut next = 0;
    loop {
        while in_flight.len() < MAX_IN_FLIGHT && next < src.bytes() {
            let bytes = PIECE.min(src.bytes() - next);
            in_flight.push_back((from.download(src.part(next, bytes)?)?, dst.part(next, bytes)?));
            next += bytes;
        }
        let Some((ticket, place)) = in_flight.pop_front() else { return Ok(()) };
        let bytes = ticket.wait(Some(Instant::now() + timeout))?;
        to.upload(place, None, Source::Borrowed(&bytes))?;
    }
}

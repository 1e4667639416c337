//! Copies between devices that cannot read each other's memory: through this server's, piece by piece.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::device::{DeviceError, PIECE, Queue, Region, Source};

/// Pieces on their way at once, which is what a copy holds of the server's memory.
const FLYING: usize = 8;

/// Copies `src` of the one queue's device to `dst` of the other's, regions of equal size: after the first's work so far,
/// before the second's work to come. Returns when all bytes have left the source, none of which may take longer than
/// `patience`.
///
/// # Errors
/// Those of the queues.
pub(super) fn copy(
    (from, src): (&mut dyn Queue, &Region),
    (to, dst): (&mut dyn Queue, &Region),
    patience: Duration,
) -> Result<(), DeviceError> {
    let mut flying = VecDeque::with_capacity(FLYING);
    let mut next = 0;
    loop {
        while flying.len() < FLYING && next < src.bytes() {
            let bytes = PIECE.min(src.bytes() - next);
            flying.push_back((from.download(src.part(next, bytes)?)?, dst.part(next, bytes)?));
            next += bytes;
        }
        let Some((ticket, place)) = flying.pop_front() else { return Ok(()) };
        let bytes = ticket.wait(Some(Instant::now() + patience))?;
        to.upload(place, None, Source::Borrowed(&bytes))?;
    }
}

//! Prefault: while the session waits for the next request, touches the pages of the region that is likely to be uploaded next.
//!
//! llama.cpp's client uploads the weights of a buffer in the order of their addresses, and hashes each weight before it sends
//! it, which takes longer than sending. Meanwhile the system can clear the pages, so that the upload does not pay for page
//! faults.

use crate::device::{DeviceError, Queue, Region};

/// Minimum size of an upload that counts as a weight, in bytes. Another weight is likely to follow.
pub(super) const MIN_UPLOAD_BYTES: u64 = 1 << 20;

/// Bytes that are prefaulted after a large upload.
const PREFAULT_AHEAD_BYTES: u64 = 64 << 20;

/// Bytes of one step, after which the session checks for a request: a request may wait for one step.
const PREFAULT_STEP_BYTES: u64 = 1 << 20;

/// Predicts the next upload, and prefaults its region.
#[derive(Default)]
pub(super) struct Prefault {
    /// Device, and the region after the last large upload, until the session prefaults it.
    pub(super) pending: Option<(u32, Region)>,
    /// Id of the buffer that was prefaulted last, and the offset up to which it is prefaulted.
    prefaulted: Option<(u64, u64)>,
}

impl Prefault {
    /// Records an upload of a weight to `region` of a device: the bytes after it become the pending region.
    pub(super) fn record_upload(&mut self, device: u32, region: &Region) -> Result<(), DeviceError> {
        let (buffer, end) = (region.buffer(), region.offset() + region.bytes());
        self.pending = Some((device, buffer.region(end, PREFAULT_AHEAD_BYTES.min(buffer.bytes() - end))?));
        Ok(())
    }

    /// Prefaults `region`, except for the part that was prefaulted before, until `readable` reports the next request.
    pub(super) fn prefault_until(&mut self, region: &Region, queue: &mut dyn Queue, readable: impl Fn() -> bool) {
        let (buffer, start, end) = (region.buffer().id(), region.offset(), region.offset() + region.bytes());
        let prefaulted = self.prefaulted.filter(|&(id, _)| id == buffer).map_or(0, |(_, until)| until);
        let mut at = start.max(prefaulted);
        while at < end && !readable() {
            let Ok(part) = region.subregion(at - start, PREFAULT_STEP_BYTES.min(end - at)) else { return };
            at += part.bytes();
            if let Some(memory) = queue.prefault() {
                memory.prefault(&part);
            }
        }
        self.prefaulted = Some((buffer, at));
    }
}

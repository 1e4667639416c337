//! Prefault: clears the pages of the region that is likely to be uploaded next, while the session waits for the next request.
//!
//! llama.cpp's client hashes a weight before it sends it, which takes longer than sending it, and uploads the weights of a buffer in
//! the order of their addresses. The system can clear pages meanwhile.

use crate::device::{DeviceError, Queue, Region};

/// Uploads of at least so many bytes are weights, which are likely to be followed by another one.
const LARGE: u64 = 1 << 20;

/// Bytes behind a large upload that are prefaulted, and in which steps: a request may have to wait for one step.
const FAR: u64 = 64 << 20;
const STEP: u64 = 1 << 20;

/// The region to prefault next.
#[derive(Default)]
pub(super) struct Prefault {
    /// The device, and what lies behind the last large upload.
    next: Option<(u32, Region)>,
    /// Up to which offset a buffer is prefaulted, with the buffer's number.
    ready: Option<(u64, u64)>,
}

impl Prefault {
    /// A region of a device is being uploaded.
    pub(super) fn uploaded(&mut self, device: u32, region: &Region) -> Result<(), DeviceError> {
        if region.bytes() >= LARGE {
            let (buffer, end) = (region.buffer(), region.offset() + region.bytes());
            self.next = Some((device, buffer.region(end, FAR.min(buffer.bytes() - end))?));
        }
        Ok(())
    }

    /// The region to prefault, once for each upload.
    pub(super) fn next(&mut self) -> Option<(u32, Region)> {
        self.next.take()
    }

    /// Prefaults the region, without what was prefaulted before, until the next request has arrived.
    pub(super) fn run(&mut self, region: &Region, queue: &mut dyn Queue, readable: impl Fn() -> bool) {
        let (buffer, start, end) = (region.buffer().id(), region.offset(), region.offset() + region.bytes());
        let ready = self.ready.filter(|&(of, _)| of == buffer).map_or(0, |(_, until)| until);
        let mut at = start.max(ready);
        while at < end && !readable() {
            let Ok(part) = region.part(at - start, STEP.min(end - at)) else { return };
            at += part.bytes();
            if let Some(memory) = queue.prefault() {
                memory.prefault(&part);
            }
        }
        self.ready = Some((buffer, at));
    }
}

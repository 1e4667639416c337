//! Memory made ready for what is likely to be uploaded next, in the time until it comes.
//!
//! llama.cpp's client hashes a weight before it sends it, longer than sending it takes, and uploads the weights of a buffer in
//! the order in which they lie there. Meanwhile the system can clear the pages of the next ones.

use crate::device::{DeviceError, Queue, Region};

/// Uploads of so many bytes are weights, of which another one is likely to come.
const LARGE: u64 = 1 << 20;

/// How far behind a large upload memory is made ready, and in which steps: one of them may be in a message's way.
const FAR: u64 = 64 << 20;
const STEP: u64 = 1 << 20;

/// What a session foresees.
#[derive(Default)]
pub(super) struct Foresight {
    /// The device, and what lies behind the last large upload.
    next: Option<(u32, Region)>,
    /// Up to where it was seen to, by the buffer's number.
    ready: Option<(u64, u64)>,
}

impl Foresight {
    /// A region of a device is being uploaded.
    pub(super) fn uploaded(&mut self, device: u32, region: &Region) -> Result<(), DeviceError> {
        if region.bytes() >= LARGE {
            let (buffer, end) = (region.buffer(), region.offset() + region.bytes());
            self.next = Some((device, buffer.region(end, FAR.min(buffer.bytes() - end))?));
        }
        Ok(())
    }

    /// What may be made ready, once for each upload.
    pub(super) fn next(&mut self) -> Option<(u32, Region)> {
        self.next.take()
    }

    /// Makes it ready until a message `is_due`, but for what was before.
    pub(super) fn prepare(&mut self, region: &Region, queue: &mut dyn Queue, is_due: impl Fn() -> bool) {
        let (buffer, start, end) = (region.buffer().id(), region.offset(), region.offset() + region.bytes());
        let ready = self.ready.filter(|&(of, _)| of == buffer).map_or(0, |(_, until)| until);
        let mut at = start.max(ready);
        while at < end && !is_due() {
            let Ok(part) = region.part(at - start, STEP.min(end - at)) else { return };
            at += part.bytes();
            if let Some(memory) = queue.prefault() {
                memory.prefault(&part);
            }
        }
        self.ready = Some((buffer, at));
    }
}

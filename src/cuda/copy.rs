//! Copies between host and device, within a device, and between devices.
//!
//! Host copies are staged through pinned memory, so that they run asynchronously; the host blocks only if a queue's share of that
//! memory is in use. Device-to-device copies are peer copies where the hardware allows them, and host-staged copies elsewhere.
#![allow(unsafe_code)]

use super::context::{DeviceContext, TransferBlock};
use super::driver_api;
use super::events::{Event, Stream};
use super::memory::DeviceMemory;
use crate::device::DeviceError;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a segment: the largest single copy between host and device for which a queue needs pinned memory.
pub(super) const SEGMENT: usize = 512 << 10;

/// Bytes of the segment that small uploads share. A queue keeps it until its next point.
pub(super) const SHARED_SEGMENT: usize = 4 << 10;

/// Pinned memory that the copies of a queue may hold, in bytes: the host fills one segment while the copies out of others run.
pub(super) const QUEUE_UPLOAD_BYTES: u64 = 4 * SEGMENT as u64;

/// A block that is being filled with the bytes of uploads.
pub(super) struct UploadSegment {
    block: TransferBlock,
    bytes: usize,
    used: usize,
}

impl UploadSegment {
    pub(super) fn new(block: TransferBlock, bytes: usize) -> UploadSegment {
        UploadSegment { block, bytes, used: 0 }
    }

    /// Whether later uploads share the segment.
    pub(super) fn is_shared(&self) -> bool {
        self.bytes <= SHARED_SEGMENT
    }

    /// Whether `bytes` more bytes fit.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.used + bytes <= self.bytes
    }

    /// Calls `fill` to write the next `bytes` bytes of the segment.
    pub(super) fn fill(
        &mut self,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let piece = self.block.block.slice_mut(self.used, bytes);
        fill(piece.ok_or(DeviceError::Misuse("an upload beyond its staging memory"))?)
    }

    /// Submits the copy of the bytes that `fill` has written to byte `offset` of `dst`, whose context is current. The caller retains
    /// the segment until the copy is done.
    pub(super) fn submit(
        &mut self,
        stream: &Stream,
        (dst, offset): (&DeviceMemory, u64),
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let piece = self.block.block.slice_mut(self.used, bytes);
        let piece = piece.ok_or(DeviceError::Misuse("an upload beyond its staging memory"))?;
        let address = dst.address_of(offset, bytes as u64)?;
        // SAFETY: the source lies in pinned memory that is retained and not rewritten until the copy is done. The destination lies in
        // its allocation, which the queue retains until then.
        unsafe { driver_api::cuMemcpyHtoDAsync_v2(address, piece.as_ptr().cast(), bytes, stream.raw()) }
            .map_err(|e| dst.context().driver_error("cuMemcpyHtoDAsync", e))?;
        // Align the next piece to a cache line.
        self.used += bytes.next_multiple_of(64);
        Ok(())
    }
}

/// Submits a copy of pinned bytes to byte `offset` of `dst` without staging. The caller keeps the bytes as they are until the copy
/// is done.
pub(super) fn upload_pinned(stream: &Stream, dst: &DeviceMemory, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
    let address = dst.address_of(offset, bytes.len() as u64)?;
    // SAFETY: the source lives until the copy is done: the one caller waits for it. The destination lies in its allocation.
    unsafe { driver_api::cuMemcpyHtoDAsync_v2(address, bytes.as_ptr().cast(), bytes.len(), stream.raw()) }
        .map_err(|e| dst.context().driver_error("cuMemcpyHtoDAsync", e))
}

/// Submits a copy from byte `offset` of `src` to the range `to` of a block of pinned memory. The caller retains the block until the
/// copy is done, also if this call fails, and does not read the range before.
pub(super) fn download(
    stream: &Stream,
    (src, offset): (&DeviceMemory, u64),
    block: &mut TransferBlock,
    to: Range<usize>,
) -> Result<(), DeviceError> {
    let address = src.address_of(offset, to.len() as u64)?;
    let piece = block.block.slice_mut(to.start, to.len());
    let piece = piece.ok_or(DeviceError::Misuse("a download beyond its block"))?;
    // SAFETY: the source lies in its allocation. The destination is pinned memory that the caller retains.
    unsafe { driver_api::cuMemcpyDtoHAsync_v2(piece.as_mut_ptr().cast(), address, piece.len(), stream.raw()) }
        .map_err(|e| src.context().driver_error("cuMemcpyDtoHAsync", e))
}

/// Submits a copy within one device. The ranges must not overlap.
pub(super) fn copy_within_device(
    stream: &Stream,
    (src, from): (&DeviceMemory, u64),
    (dst, to): (&DeviceMemory, u64),
    bytes: u64,
) -> Result<(), DeviceError> {
    let (context, from, to) = (dst.context(), src.address_of(from, bytes)?, dst.address_of(to, bytes)?);
    // SAFETY: both ranges lie in their allocations, which the queue retains until the copy is done.
    unsafe { driver_api::cuMemcpyDtoDAsync_v2(to, from, bytes as usize, stream.raw()) }
        .map_err(|e| context.driver_error("cuMemcpyDtoDAsync", e))
}

/// Submits a peer copy between two devices with peer access, to a stream of the destination device.
pub(super) fn copy_peer(
    stream: &Stream,
    (src, from): (&DeviceMemory, u64),
    (dst, to): (&DeviceMemory, u64),
    bytes: u64,
) -> Result<(), DeviceError> {
    let (context, other) = (dst.context(), src.context());
    let (from, to) = (src.address_of(from, bytes)?, dst.address_of(to, bytes)?);
    // SAFETY: as in `copy_within_device`; both contexts are alive, because the allocations hold references to them.
    unsafe {
        driver_api::cuMemcpyPeerAsync(
            to,
            context.primary().cuda().raw(),
            from,
            other.primary().cuda().raw(),
            bytes as usize,
            stream.raw(),
        )
    }
    .map_err(|e| context.driver_error("cuMemcpyPeerAsync", e))
}

/// What the copies between two devices through the host use, until they are done: two blocks of pinned memory in turn (double
/// buffering), so that the copy into one overlaps the copy out of the other.
struct StagedCopy {
    slots: Vec<StagingSlot>,
    /// Recorded after the earlier work of the destination's stream.
    _before: Event,
}

struct StagingSlot {
    block: TransferBlock,
    /// Event on the source device, after the copy into the block.
    filled: Event,
    /// Event on the destination device, after the copy out of the block. Recorded if `used`.
    emptied: Event,
    used: bool,
}

/// Submits a copy from another device through the blocks, which starts after all earlier work of `stream`, a stream of the
/// destination device. `from_stream` is one of the source device. Only events order the copies; the host does not wait. Returns
/// what must be retained until the copy is done, also if it fails.
pub(super) fn copy_through_host(
    (from_stream, stream): (&Stream, &Stream),
    (src, from): (&DeviceMemory, u64),
    (dst, to): (&DeviceMemory, u64),
    bytes: u64,
    blocks: Vec<TransferBlock>,
) -> (Box<dyn std::any::Any + Send>, Result<(), DeviceError>) {
    let mut staged = None;
    let done = submit_through_host(&mut staged, (from_stream, stream), (src, from), (dst, to), bytes, blocks);
    (Box::new(staged), done)
}

fn submit_through_host(
    staged: &mut Option<StagedCopy>,
    (from_stream, stream): (&Stream, &Stream),
    (src, from): (&DeviceMemory, u64),
    (dst, to): (&DeviceMemory, u64),
    bytes: u64,
    blocks: Vec<TransferBlock>,
) -> Result<(), DeviceError> {
    let (context, source): (&Arc<DeviceContext>, _) = (dst.context(), src.context());
    let before = context.acquire_event()?;
    before.record(stream)?;
    from_stream.wait_event(&before)?;
    let slot = |block| {
        let (filled, emptied) = (Event::new(source.primary())?, Event::new(context.primary())?);
        Ok::<_, DeviceError>(StagingSlot { block, filled, emptied, used: false })
    };
    let slots = blocks.into_iter().map(slot).collect::<Result<Vec<_>, _>>()?;
    let staged = staged.insert(StagedCopy { slots, _before: before });
    let count = staged.slots.len().max(1);
    for (piece, at) in (0..bytes).step_by(SEGMENT).enumerate() {
        let n = (bytes - at).min(SEGMENT as u64);
        let slot = staged.slots.get_mut(piece % count).ok_or(DeviceError::Misuse("a copy without staging memory"))?;
        let (from, to) = (src.address_of(from + at, n)?, dst.address_of(to + at, n)?);
        source.bind()?;
        if slot.used {
            from_stream.wait_event(&slot.emptied)?;
        }
        let host = slot.block.block.slice_mut(0, n as usize);
        let host = host.ok_or(DeviceError::Misuse("a piece beyond its block"))?;
        // SAFETY: the source range lies in its allocation, which the queue retains. The block is rewritten only after the copy out
        // of it (`emptied`), and the host never accesses it.
        unsafe { driver_api::cuMemcpyDtoHAsync_v2(host.as_mut_ptr().cast(), from, host.len(), from_stream.raw()) }
            .map_err(|e| source.driver_error("cuMemcpyDtoHAsync", e))?;
        slot.filled.record(from_stream)?;
        context.bind()?;
        stream.wait_event(&slot.filled)?;
        // SAFETY: as above for the opposite direction: this copy runs after `filled`.
        unsafe { driver_api::cuMemcpyHtoDAsync_v2(to, host.as_ptr().cast(), host.len(), stream.raw()) }
            .map_err(|e| context.driver_error("cuMemcpyHtoDAsync", e))?;
        slot.emptied.record(stream)?;
        slot.used = true;
    }
    Ok(())
}

//! Copies between host and device, within a device, and between devices.
//!
//! Host copies are staged through pinned memory, so that they run asynchronously; the host blocks only if the staging ring is
//! full. Device-to-device copies are peer copies where the hardware allows them, and host-staged copies elsewhere.
#![allow(unsafe_code)]

use super::context::DeviceContext;
use super::events::{Event, EventTimeline, Stream};
use super::memory::{DeviceMemory, PinnedBuffer};
use crate::device::{DeviceError, MemoryBudget, Region, Reservation, UploadSource};
use cudarc::driver::{result, sys};
use std::ops::Range;
use std::sync::Arc;

/// Segments of a queue's staging ring: the host fills one while the copies out of the others run.
const SEGMENTS: usize = 4;

/// Bytes of a segment: the largest single copy to the device.
pub(super) const SEGMENT: usize = 512 << 10;

/// What an upload and a staged download wait for, as a failed deadline names it.
const STAGING_SPACE: &str = "space in the staging ring for an upload";
const STAGED_BYTES: &str = "the bytes of a staged download";

/// Where a staged transfer is submitted: the stream of a queue, and the queue's events, by which an abort ends the waits.
#[derive(Clone, Copy)]
pub(super) struct TransferStream<'a> {
    pub(super) stream: &'a Stream,
    pub(super) events: &'a EventTimeline,
}

impl TransferStream<'_> {
    /// Blocks until an event of the stream is reached or the queue is aborted.
    fn wait(&self, context: &DeviceContext, event: &Event, awaited: &'static str) -> Result<(), DeviceError> {
        event.wait(context, awaited, || self.events.check_aborted())
    }
}

/// Staging ring of a queue: pinned memory from which uploads are copied to the device. Downloads go through it if there is no
/// pinned memory for them.
pub(super) struct StagingRing {
    block: PinnedBuffer,
    /// Index of the segment that is being filled.
    current: usize,
    /// Filled bytes of that segment.
    used: usize,
    /// For each other segment, the event behind the last copy out of it.
    busy: [Option<Event>; SEGMENTS],
    _reservation: Reservation,
}

impl StagingRing {
    /// Allocates the ring; its bytes are charged to `budget`.
    pub(super) fn new(context: &DeviceContext, budget: &Arc<MemoryBudget>) -> Result<StagingRing, DeviceError> {
        let bytes = SEGMENTS * SEGMENT;
        let _reservation = budget.reserve(bytes as u64)?;
        Ok(StagingRing {
            block: PinnedBuffer::new(context, bytes)?,
            current: 0,
            used: 0,
            busy: Default::default(),
            _reservation,
        })
    }

    /// Calls `fill` to write `bytes` bytes (at most [`SEGMENT`]) into the ring and submits their copy to byte `offset` of
    /// `dst`.
    pub(super) fn upload<E: From<DeviceError>>(
        &mut self,
        to: TransferStream<'_>,
        dst: &DeviceMemory,
        offset: u64,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let context = dst.context();
        self.ensure_space(context, to, bytes)?;
        let at = self.current * SEGMENT + self.used;
        let piece =
            self.block.slice_mut(at, bytes).ok_or(DeviceError::Misuse("an upload beyond its staging memory"))?;
        fill(piece)?;
        let address = dst.address_of(offset, bytes as u64)?;
        // SAFETY: the source lies in pinned memory that is not rewritten before the event in `busy` is reached. The destination
        // lies in its allocation, which the queue retains until the copy is done.
        unsafe { result::memcpy_htod_async(address, piece, to.stream.raw()) }
            .map_err(|e| context.driver_error("cuMemcpyHtoDAsync", e))?;
        // Align the next piece to a cache line.
        self.used += bytes.next_multiple_of(64);
        Ok(())
    }

    /// Downloads `bytes` bytes from byte `offset` of `src` in pieces, and blocks until they have arrived. All earlier work of
    /// the stream must be done, so that no copy uses the ring. After an error the queue must not use the ring any more.
    pub(super) fn download(
        &mut self,
        from: TransferStream<'_>,
        (src, offset): (&DeviceMemory, u64),
        bytes: u64,
    ) -> Result<Vec<u8>, DeviceError> {
        let (context, len) = (src.context(), usize::try_from(bytes).unwrap_or(usize::MAX));
        let mut out = Vec::new();
        while out.len() < len {
            let piece = self.block.slice_mut(0, (len - out.len()).min(SEGMENTS * SEGMENT));
            let piece = piece.ok_or(DeviceError::Misuse("a download beyond its staging memory"))?;
            let address = src.address_of(offset + out.len() as u64, piece.len() as u64)?;
            let end = context.acquire_event()?;
            // SAFETY: the source lies in its allocation, which the queue retains. The destination is pinned memory that lives
            // until the stream's work is done and is not accessed before `end`; after a failed wait it is not accessed at all.
            unsafe { result::memcpy_dtoh_async(piece, address, from.stream.raw()) }
                .map_err(|e| context.driver_error("cuMemcpyDtoHAsync", e))?;
            end.record(context, from.stream)?;
            from.wait(context, &end, STAGED_BYTES)?;
            context.recycle_event(end);
            out.extend_from_slice(piece);
        }
        Ok(out)
    }

    /// Ensures that the current segment has `bytes` free bytes: moves on to the next segment if necessary, and blocks while
    /// copies out of that segment still run.
    fn ensure_space(
        &mut self,
        context: &DeviceContext,
        to: TransferStream<'_>,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        if self.used + bytes <= SEGMENT {
            return Ok(());
        }
        let end = context.acquire_event()?;
        end.record(context, to.stream)?;
        self.busy[self.current] = Some(end);
        self.current = (self.current + 1) % SEGMENTS;
        self.used = 0;
        if let Some(end) = self.busy[self.current].take() {
            to.wait(context, &end, STAGING_SPACE)?;
            context.recycle_event(end);
        }
        Ok(())
    }
}

/// Uploads a region in segments of the staging ring.
pub(super) fn upload_in_segments(
    stream: TransferStream<'_>,
    staging: &mut StagingRing,
    memory: &DeviceMemory,
    dst: &Region,
    mut src: UploadSource<'_>,
) -> Result<(), DeviceError> {
    let mut at = 0;
    while at < dst.bytes() {
        let n = (dst.bytes() - at).min(SEGMENT as u64);
        staging.upload(stream, memory, dst.offset() + at, n as usize, |piece| match &mut src {
            UploadSource::Borrowed(bytes) => {
                let (next, rest) = bytes.split_at(piece.len());
                piece.copy_from_slice(next);
                *bytes = rest;
                Ok(())
            }
            UploadSource::Writer(fill) => {
                fill(piece)?;
                // The writer may have read the bytes from another GPU, which made that GPU's context current.
                memory.context().bind()
            }
        })?;
        at += n;
    }
    Ok(())
}

/// Copies pinned bytes to byte `offset` of `dst` without staging, in stream order, and blocks until the copy is done, because
/// the bytes are only borrowed.
pub(super) fn upload_pinned(
    to: TransferStream<'_>,
    dst: &DeviceMemory,
    offset: u64,
    bytes: &[u8],
) -> Result<(), DeviceError> {
    let (context, address) = (dst.context(), dst.address_of(offset, bytes.len() as u64)?);
    // Earlier work may wait for a point that is never reached. Wait for it before the copy is submitted: if this times out, no
    // copy is pending that would read the bytes after their borrow has ended.
    let before = context.acquire_event()?;
    before.record(context, to.stream)?;
    to.wait(context, &before, STAGING_SPACE)?;
    context.recycle_event(before);
    // SAFETY: the source stays borrowed until `synchronize` returns; the destination lies in its allocation.
    unsafe { result::memcpy_htod_async(address, bytes, to.stream.raw()) }
        .map_err(|e| context.driver_error("cuMemcpyHtoDAsync", e))?;
    to.stream.synchronize(context)
}

/// Destination of downloads: a pinned block, which returns to its device's pool on drop.
#[derive(Debug)]
pub(super) struct DownloadBuffer {
    context: Arc<DeviceContext>,
    block: Option<PinnedBuffer>,
    _reservation: Reservation,
}

impl DownloadBuffer {
    /// Acquires a block of at least `bytes` bytes, for which `reservation` was made.
    pub(super) fn new(
        context: &Arc<DeviceContext>,
        bytes: usize,
        reservation: Reservation,
    ) -> Result<DownloadBuffer, DeviceError> {
        let block = Some(context.acquire_pinned(bytes)?);
        Ok(DownloadBuffer { context: Arc::clone(context), block, _reservation: reservation })
    }

    /// Submits a copy from byte `offset` of `src` to the range `to` of the block. Ranges of different copies must not overlap.
    /// The caller retains the buffer until the stream's work is done, even if this call fails.
    pub(super) fn copy_from_device(
        &mut self,
        stream: &Stream,
        (src, offset): (&DeviceMemory, u64),
        to: Range<usize>,
    ) -> Result<(), DeviceError> {
        let address = src.address_of(offset, to.len() as u64)?;
        let piece = self.block.as_mut().and_then(|block| block.slice_mut(to.start, to.len()));
        let piece = piece.ok_or(DeviceError::Misuse("a download beyond its block"))?;
        // SAFETY: the source lies in its allocation. The destination is pinned memory that the caller retains until the copy is
        // done and that is not read before.
        unsafe { result::memcpy_dtoh_async(piece, address, stream.raw()) }
            .map_err(|e| self.context.driver_error("cuMemcpyDtoHAsync", e))
    }

    /// Reads a range. The caller guarantees that the copies into it are done.
    pub(super) fn bytes(&self, range: Range<usize>) -> Result<Vec<u8>, DeviceError> {
        let block = self.block.as_ref().and_then(|block| block.slice(range.end)?.get(range));
        Ok(block.ok_or(DeviceError::Misuse("a download beyond its block"))?.to_vec())
    }
}

impl Drop for DownloadBuffer {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.context.recycle_pinned(block);
        }
    }
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
    unsafe { result::memcpy_dtod_async(to, from, bytes as usize, stream.raw()) }
        .map_err(|e| context.driver_error("cuMemcpyDtoDAsync", e))
}

/// Enables peer access in both directions between two devices. Returns whether peer copies are possible.
pub(super) fn enable_peer_access(context: &DeviceContext, other: &DeviceContext) -> Result<bool, DeviceError> {
    let [here, there] =
        [context, other].map(|c| i32::try_from(c.gpu.ordinal).ok().and_then(|n| result::device::get(n).ok()));
    let (Some(here), Some(there)) = (here, there) else { return Ok(false) };
    for (a, b) in [(here, there), (there, here)] {
        let mut can = 0;
        // SAFETY: both handles were returned by the driver; the function writes one int.
        let queried = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, a, b) }.result();
        queried.map_err(|e| context.driver_error("cuDeviceCanAccessPeer", e))?;
        if can == 0 {
            return Ok(false);
        }
    }
    for (from, to) in [(context, other), (other, context)] {
        from.bind()?;
        // SAFETY: the context of `from` is current; the context of `to` is borrowed, so it is alive.
        match unsafe { sys::cuCtxEnablePeerAccess(to.cuda_context().cu_ctx(), 0) }.result() {
            Ok(()) => {}
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {}
            // The devices have no link, or the limit of peer connections is reached.
            Err(e) => {
                log::info!(
                    "no peer copies between {} and {}; staging through host memory instead: {}",
                    from.name,
                    to.name,
                    super::driver::describe(e)
                );
                context.bind()?;
                return Ok(false);
            }
        }
    }
    context.bind()?;
    Ok(true)
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
        result::memcpy_peer_async(
            context.cuda_context().cu_ctx(),
            to,
            other.cuda_context().cu_ctx(),
            from,
            bytes as usize,
            stream.raw(),
        )
    }
    .map_err(|e| context.driver_error("cuMemcpyPeerAsync", e))
}

/// Host-staged copy: the path between two devices without peer access. Uses two pinned staging slots in turn (double
/// buffering), so that the copy into one overlaps the copy out of the other. Only events order the copies; the host never
/// waits.
pub(super) struct HostStagedCopy {
    /// Stream of the source device, for the copies into the slots.
    stream: Stream,
    source: Arc<DeviceContext>,
    slots: [StagingSlot; 2],
    next: usize,
    _reservation: Reservation,
}

struct StagingSlot {
    block: PinnedBuffer,
    /// Event on the source device, behind the copy into the block.
    filled: Event,
    /// Event on the destination device, behind the copy out of the block. Valid if `used`.
    emptied: Event,
    used: bool,
}

impl HostStagedCopy {
    /// Allocates the path from `source` to `context`; its blocks are charged to `budget`.
    pub(super) fn new(
        context: &DeviceContext,
        source: &Arc<DeviceContext>,
        budget: &Arc<MemoryBudget>,
    ) -> Result<HostStagedCopy, DeviceError> {
        let _reservation = budget.reserve(2 * SEGMENT as u64)?;
        let slot = || {
            let (block, filled, emptied) =
                (PinnedBuffer::new(source, SEGMENT)?, Event::new(source)?, Event::new(context)?);
            Ok::<_, DeviceError>(StagingSlot { block, filled, emptied, used: false })
        };
        let (slots, stream) = ([slot()?, slot()?], Stream::new(source)?);
        context.bind()?;
        Ok(HostStagedCopy { stream, source: Arc::clone(source), slots, next: 0, _reservation })
    }

    /// Submits a copy that starts after all earlier work of `stream`, which is a stream of the destination device.
    pub(super) fn copy(
        &mut self,
        stream: &Stream,
        (src, from): (&DeviceMemory, u64),
        (dst, to): (&DeviceMemory, u64),
        bytes: u64,
    ) -> Result<(), DeviceError> {
        let (context, source) = (dst.context(), &*self.source);
        let before = context.acquire_event()?;
        before.record(context, stream)?;
        self.stream.wait_event(source, &before)?;
        context.recycle_event(before);
        let mut at = 0;
        while at < bytes {
            let n = (bytes - at).min(SEGMENT as u64);
            self.next = 1 - self.next;
            let slot = &mut self.slots[self.next];
            let (from, to) = (src.address_of(from + at, n)?, dst.address_of(to + at, n)?);
            source.bind()?;
            if slot.used {
                self.stream.wait_event(source, &slot.emptied)?;
            }
            let host = slot.block.slice_mut(0, n as usize).ok_or(DeviceError::Misuse("a piece beyond its block"))?;
            // SAFETY: the source range lies in its allocation, which the queue retains. The block is rewritten only after the
            // copy out of it (`emptied`), and the host never accesses it.
            unsafe { result::memcpy_dtoh_async(host, from, self.stream.raw()) }
                .map_err(|e| source.driver_error("cuMemcpyDtoHAsync", e))?;
            slot.filled.record(source, &self.stream)?;
            context.bind()?;
            stream.wait_event(context, &slot.filled)?;
            // SAFETY: as above for the opposite direction: this copy runs after `filled`.
            unsafe { result::memcpy_htod_async(to, host, stream.raw()) }
                .map_err(|e| context.driver_error("cuMemcpyHtoDAsync", e))?;
            slot.emptied.record(context, stream)?;
            slot.used = true;
            at += n;
        }
        Ok(())
    }
}

//! Copies and memsets: checks their address ranges and determines when they execute.
//!
//! Pinned, registered and managed memory is registered with the driver, and its copies execute in stream order. Other host
//! memory is pageable: a copy to the device takes a staging copy of the bytes at the call, and a copy to the host returns only
//! when it is done.

use super::graph::CopyRequest;
use super::memory::is_host_memory;
use super::{Driver, StateGuard};
use crate::engine::{CopyEndpoint, Memcpy, Memset, StreamOp};
use crate::error::{Error, Result};
use crate::handle::{ContextId, StreamId};
use crate::mem::HostMemory;

/// When a call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallMode {
    /// After completion; the copy uses the legacy default stream.
    Sync,
    /// After submission to this stream.
    Async(StreamId),
}

/// One side of a copy as the program passed it.
#[derive(Clone, Copy, Debug)]
pub enum CopyPointer {
    /// A host pointer.
    Host(HostMemory),
    /// A device pointer.
    Device(u64),
    /// A pointer of either kind; the address determines which.
    Unified(HostMemory),
}

/// Distances in bytes between the starts of rows and of slices.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pitch {
    /// From row to row.
    pub row: u64,
    /// From slice to slice.
    pub slice: u64,
}

/// Extent of a copy.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Bytes per row.
    pub width: u64,
    /// Rows per slice.
    pub height: u64,
    /// Number of slices.
    pub depth: u64,
}

impl Extent {
    /// A single row.
    pub fn row(width: u64) -> Self {
        Self { width, height: 1, depth: 1 }
    }

    pub(super) fn is_empty(self) -> bool {
        self.width == 0 || self.height == 0 || self.depth == 0
    }

    /// Bytes from the first to the last accessed byte; `None` on overflow or if rows overlap.
    pub(super) fn span(self, pitch: Pitch) -> Option<u64> {
        if (self.height > 1 && pitch.row < self.width)
            || (self.depth > 1 && pitch.slice < pitch.row.checked_mul(self.height)?)
        {
            return None;
        }
        let rows = pitch.row.checked_mul(self.height - 1)?;
        pitch.slice.checked_mul(self.depth - 1)?.checked_add(rows)?.checked_add(self.width)
    }
}

impl Driver {
    /// The stream of a call.
    fn stream_of(&self, state: &mut StateGuard<'_>, when: CallMode) -> Result<StreamId> {
        match when {
            CallMode::Sync => state.resolve_stream(StreamId::default()),
            CallMode::Async(stream) => state.resolve_stream(stream),
        }
    }

    /// Checks and submits any copy. An empty copy completes at once.
    pub fn copy(
        &self,
        to: CopyPointer,
        to_pitch: Pitch,
        from: CopyPointer,
        from_pitch: Pitch,
        extent: Extent,
        when: CallMode,
    ) -> Result<()> {
        let mut state = self.lock();
        let stream = self.stream_of(&mut state, when)?;
        if extent.is_empty() {
            return Ok(());
        }
        if when == CallMode::Sync {
            state.check_unsafe_call()?;
        }
        if state.captures.is_capturing(stream)? {
            return self.capture_copy(state, CopyRequest { to, to_pitch, from, from_pitch, extent }, stream);
        }
        let span = |pitch| extent.span(pitch).ok_or(Error::InvalidValue);
        let (to_span, from_span) = (span(to_pitch)?, span(from_pitch)?);
        let to = self.resolve_endpoint(to, to_pitch, to_span)?;
        let mut from = self.resolve_endpoint(from, from_pitch, from_span)?;
        if let CopyEndpoint::Host { memory, .. } = &from {
            // Staging copy: the program may change the bytes as soon as the call returns.
            let mut bytes = Vec::with_capacity((extent.width * extent.height * extent.depth) as usize);
            for slice in 0..extent.depth {
                for row in 0..extent.height {
                    bytes.extend(memory.read(slice * from_pitch.slice + row * from_pitch.row, extent.width as usize));
                }
            }
            from = CopyEndpoint::Staged(bytes.into());
        }
        // As in CUDA, a copy between device memories returns before it is done, even for a synchronous call.
        let wait = matches!(to, CopyEndpoint::Host { .. })
            || (when == CallMode::Sync && !(self.on_device(&to) && self.on_device(&from)));
        let work = StreamOp::Memcpy(Box::new(Memcpy {
            from,
            to,
            width: extent.width,
            height: extent.height,
            depth: extent.depth,
            corrupt: false,
        }));
        match wait {
            true => self.submit_and_wait(state, stream, work),
            false => self.submit(state, stream, work),
        }
    }

    /// The engine's form of one side. If the address lies in an allocation, all bytes must lie in the same one.
    pub(super) fn resolve_endpoint(&self, end: CopyPointer, pitch: Pitch, span: u64) -> Result<CopyEndpoint> {
        let (address, memory, must_be_known) = match end {
            CopyPointer::Device(address) => (address, None, true),
            CopyPointer::Host(memory) | CopyPointer::Unified(memory) => (memory.address(), Some(memory), false),
        };
        if address == 0 {
            return Err(Error::InvalidValue);
        }
        let Pitch { row: pitch, slice } = pitch;
        match self.space().find(address) {
            Some(allocation) => {
                if matches!(end, CopyPointer::Host(_))
                    && !is_host_memory(&allocation)
                    && allocation.kind() != crate::mem::AllocationKind::Managed
                {
                    return Err(Error::InvalidValue);
                }
                self.within(address, span)?;
                Ok(CopyEndpoint::Known { address, pitch, slice })
            }
            None => match memory {
                Some(memory) if !must_be_known => Ok(CopyEndpoint::Host { memory, pitch, slice }),
                _ => Err(Error::InvalidValue),
            },
        }
    }

    fn is_device(&self, address: u64) -> bool {
        self.space().find(address).is_some_and(|allocation| {
            use crate::mem::AllocationKind::{Constant, Device, Mapped};
            matches!(allocation.kind(), Device | Constant | Mapped)
        })
    }

    fn on_device(&self, side: &CopyEndpoint) -> bool {
        matches!(side, CopyEndpoint::Known { address, .. } if self.is_device(*address))
    }

    /// Fails unless the range lies in a single allocation.
    fn within(&self, address: u64, bytes: u64) -> Result<()> {
        self.space().snapshot().find(address, bytes).map(drop).map_err(|_| Error::InvalidValue)
    }

    /// `cuMemcpyPeer`: only checks that the contexts exist; unified addresses determine the devices.
    pub fn copy_peer(&self, to: (u64, ContextId), from: (u64, ContextId), bytes: u64, when: CallMode) -> Result<()> {
        let state = self.lock();
        for (_, context) in [to, from] {
            state.context_or_current(context)?;
        }
        drop(state);
        self.copy(
            CopyPointer::Device(to.0),
            Pitch::default(),
            CopyPointer::Device(from.0),
            Pitch::default(),
            Extent::row(bytes),
            when,
        )
    }

    /// Checks and submits any memset: `height` rows of `width` elements of `bytes` bytes.
    pub fn memset(&self, fill: Memset, when: CallMode) -> Result<()> {
        let mut state = self.lock();
        let stream = self.stream_of(&mut state, when)?;
        if fill.width == 0 || fill.height == 0 {
            return Ok(());
        }
        if when == CallMode::Sync {
            state.check_unsafe_call()?;
        }
        self.check_memset(&fill)?;
        // As in CUDA, a memset of device memory returns before it is done, even for a synchronous call.
        let wait = when == CallMode::Sync && !self.is_device(fill.address);
        match wait {
            true => self.submit_and_wait(state, stream, StreamOp::Memset(fill)),
            false => self.submit(state, stream, StreamOp::Memset(fill)),
        }
    }

    /// Fails if a memset is misaligned or not inside a single allocation.
    pub(super) fn check_memset(&self, fill: &Memset) -> Result<()> {
        let bytes = u64::from(fill.bytes);
        let width = fill.width.checked_mul(bytes).ok_or(Error::InvalidValue)?;
        let extent = Extent { width, height: fill.height, depth: 1 };
        let span = extent.span(Pitch { row: fill.pitch, slice: 0 }).ok_or(Error::InvalidValue)?;
        if !fill.address.is_multiple_of(bytes) || (fill.height > 1 && !fill.pitch.is_multiple_of(bytes)) {
            return Err(Error::InvalidValue);
        }
        self.within(fill.address, span)
    }

    /// `cuStreamWriteValue` and `cuStreamWaitValue` on 4 or 8 aligned bytes of device memory.
    pub fn value_work(&self, stream: StreamId, address: u64, bytes: u32, work: StreamOp) -> Result<()> {
        self.value_batch(stream, vec![(address, bytes, work)])
    }

    /// `cuStreamBatchMemOp`: operations in order, each with its address and size in bytes.
    pub fn value_batch(&self, stream: StreamId, works: Vec<(u64, u32, StreamOp)>) -> Result<()> {
        let mut state = self.lock();
        let stream = state.resolve_stream(stream)?;
        let mut batch = Vec::new();
        for (address, bytes, work) in works {
            if !matches!(work, StreamOp::Wait) {
                if !address.is_multiple_of(u64::from(bytes)) {
                    return Err(Error::InvalidValue);
                }
                self.within(address, u64::from(bytes))?;
            }
            batch.push(work);
        }
        self.submit(state, stream, StreamOp::Batch(batch))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_reaches_from_the_first_to_the_last_byte() {
        let extent = |width, height, depth| Extent { width, height, depth };
        let pitch = |row, slice| Pitch { row, slice };
        for (extent, pitch, span) in [
            (extent(10, 1, 1), pitch(0, 0), Some(10)),
            (extent(10, 3, 1), pitch(16, 0), Some(42)),
            (extent(10, 3, 2), pitch(16, 64), Some(106)),
            (extent(10, 3, 1), pitch(8, 0), None),
            (extent(10, 3, 2), pitch(16, 40), None),
            (extent(u64::MAX, 2, 1), pitch(u64::MAX, 0), None),
        ] {
            assert_eq!(extent.span(pitch), span, "{extent:?} {pitch:?}");
        }
    }
}

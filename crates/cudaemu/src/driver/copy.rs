//! Copies and memsets: what they may touch, and when they happen.
//!
//! Pinned, registered and managed memory is known to the driver, and its copies run when their turn comes. Other host memory is
//! pageable: bytes to the device are taken when the call is made, and calls that bring bytes to the host return after the copy.

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
    /// When it is done; it runs in the legacy default stream.
    Sync,
    /// When it is submitted to this stream.
    Async(StreamId),
}

/// One side of a copy, as the call names it.
#[derive(Clone, Copy, Debug)]
pub enum CopyPointer {
    /// A host pointer.
    Host(HostMemory),
    /// A device pointer.
    Device(u64),
    /// Any pointer: the address says what it is.
    Unified(HostMemory),
}

/// Bytes from row to row and from slice to slice.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pitch {
    /// Row to row.
    pub row: u64,
    /// Slice to slice.
    pub slice: u64,
}

/// Bytes of a row, rows, slices.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Bytes of a row.
    pub width: u64,
    /// Rows.
    pub height: u64,
    /// Slices.
    pub depth: u64,
}

impl Extent {
    /// A row.
    pub fn row(width: u64) -> Self {
        Self { width, height: 1, depth: 1 }
    }

    pub(super) fn is_empty(self) -> bool {
        self.width == 0 || self.height == 0 || self.depth == 0
    }

    /// Bytes from the first to the last one that is touched; `None` where that is no number, or rows overlap.
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
    /// The stream that a call works in.
    fn stream_of(&self, state: &mut StateGuard<'_>, when: CallMode) -> Result<StreamId> {
        match when {
            CallMode::Sync => state.resolve_stream(StreamId::default()),
            CallMode::Async(stream) => state.resolve_stream(stream),
        }
    }

    /// Any copy. Empty ones are done at once.
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
            // The bytes are taken now: the program may change them as soon as the call returns.
            let mut bytes = Vec::with_capacity((extent.width * extent.height * extent.depth) as usize);
            for slice in 0..extent.depth {
                for row in 0..extent.height {
                    bytes.extend(memory.read(slice * from_pitch.slice + row * from_pitch.row, extent.width as usize));
                }
            }
            from = CopyEndpoint::Staged(bytes.into());
        }
        // Between device memory even the call named synchronous returns before it is done.
        let wait = matches!(to, CopyEndpoint::Host { .. })
            || (when == CallMode::Sync && !(self.on_device(&to) && self.on_device(&from)));
        let work = StreamOp::Memcpy(Box::new(Memcpy {
            from,
            to,
            width: extent.width,
            height: extent.height,
            depth: extent.depth,
        }));
        match wait {
            true => self.submit_and_wait(state, stream, work),
            false => self.submit(state, stream, work),
        }
    }

    /// What an end is, with all its bytes inside of one allocation if the driver knows it.
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

    /// All bytes from an address on are memory that the driver knows.
    fn within(&self, address: u64, bytes: u64) -> Result<()> {
        self.space().snapshot().find(address, bytes).map(drop).map_err(|_| Error::InvalidValue)
    }

    /// `cuMemcpyPeer`: the contexts are only looked up; unified addresses say where the memory is.
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

    /// Any memset: `height` rows of `width` elements of `bytes` bytes.
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
        // Whatever the call is named: a memset of device memory returns before it is done.
        let wait = when == CallMode::Sync && !self.is_device(fill.address);
        match wait {
            true => self.submit_and_wait(state, stream, StreamOp::Memset(fill)),
            false => self.submit(state, stream, StreamOp::Memset(fill)),
        }
    }

    /// Fails for a memset that is not aligned, or whose bytes are not all of one allocation.
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

    /// `cuStreamWriteValue` and `cuStreamWaitValue`: 4 or 8 bytes of device memory, aligned.
    pub fn value_work(&self, stream: StreamId, address: u64, bytes: u32, work: StreamOp) -> Result<()> {
        self.value_batch(stream, vec![(address, bytes, work)])
    }

    /// `cuStreamBatchMemOp`: operations in order, each with its address and bytes.
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
    fn spans() {
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

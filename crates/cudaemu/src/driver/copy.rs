//! Copies and memsets: checks their address ranges and determines when they execute.
//!
//! Pinned and managed memory is registered with the driver, and its copies execute in stream order. Other host
//! memory is pageable: a copy to the device takes a staging copy of the bytes at the call, and a copy to the host returns only
//! when it is done.

use super::memory::is_host_memory;
use super::{Driver, StateGuard};
use crate::engine::{CopyEndpoint, Memcpy, Memset, StreamOp};
use crate::error::{Error, Result};
use crate::handle::{ContextId, StreamId};
use crate::mem::{AllocationKind, HostMemory};

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
    pub fn copy(&self, to: CopyPointer, from: CopyPointer, bytes: u64, when: CallMode) -> Result<()> {
        let mut state = self.lock();
        let stream = self.stream_of(&mut state, when)?;
        if bytes == 0 {
            return Ok(());
        }
        let to = self.resolve_endpoint(to, bytes)?;
        let mut from = self.resolve_endpoint(from, bytes)?;
        if let CopyEndpoint::Host(memory) = &from {
            // Staging copy: the program may change the bytes as soon as the call returns.
            from = CopyEndpoint::Staged(memory.read(bytes as usize).into());
        }
        // As in CUDA, a copy between device memories returns before it is done, even for a synchronous call.
        let wait = matches!(to, CopyEndpoint::Host(_))
            || (when == CallMode::Sync && !(self.on_device(&to) && self.on_device(&from)));
        let work = StreamOp::Memcpy(Box::new(Memcpy { from, to, bytes, corrupt: false }));
        match wait {
            true => self.submit_and_wait(state, stream, work),
            false => self.submit(state, stream, work),
        }
    }

    /// The engine's form of one side. If the address lies in an allocation, all bytes must lie in the same one.
    fn resolve_endpoint(&self, end: CopyPointer, bytes: u64) -> Result<CopyEndpoint> {
        let address = match end {
            CopyPointer::Device(address) => address,
            CopyPointer::Host(memory) => memory.address(),
        };
        if address == 0 {
            return Err(Error::InvalidValue);
        }
        match (self.space().find(address), end) {
            (Some(allocation), CopyPointer::Host(_))
                if !is_host_memory(&allocation) && allocation.kind() != AllocationKind::Managed =>
            {
                Err(Error::InvalidValue)
            }
            (Some(_), _) => {
                self.within(address, bytes)?;
                Ok(CopyEndpoint::Known(address))
            }
            (None, CopyPointer::Host(memory)) => Ok(CopyEndpoint::Host(memory)),
            (None, CopyPointer::Device(_)) => Err(Error::InvalidValue),
        }
    }

    fn is_device(&self, address: u64) -> bool {
        self.space().find(address).is_some_and(|allocation| {
            use AllocationKind::{Constant, Device};
            matches!(allocation.kind(), Device | Constant)
        })
    }

    fn on_device(&self, side: &CopyEndpoint) -> bool {
        matches!(side, CopyEndpoint::Known(address) if self.is_device(*address))
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
        self.copy(CopyPointer::Device(to.0), CopyPointer::Device(from.0), bytes, when)
    }

    /// Checks and submits any memset.
    pub fn memset(&self, fill: Memset, when: CallMode) -> Result<()> {
        let mut state = self.lock();
        let stream = self.stream_of(&mut state, when)?;
        if fill.count == 0 {
            return Ok(());
        }
        let bytes = fill.count.checked_mul(fill.bytes.into()).ok_or(Error::InvalidValue)?;
        if !fill.address.is_multiple_of(fill.bytes.into()) {
            return Err(Error::InvalidValue);
        }
        self.within(fill.address, bytes)?;
        // As in CUDA, a memset of device memory returns before it is done, even for a synchronous call.
        let wait = when == CallMode::Sync && !self.is_device(fill.address);
        match wait {
            true => self.submit_and_wait(state, stream, StreamOp::Memset(fill)),
            false => self.submit(state, stream, StreamOp::Memset(fill)),
        }
    }

    /// `cuStreamWriteValue32` and `cuStreamWaitValue32` on 4 aligned bytes of device memory.
    pub fn value_work(&self, stream: StreamId, address: u64, work: StreamOp) -> Result<()> {
        let mut state = self.lock();
        let stream = state.resolve_stream(stream)?;
        if !address.is_multiple_of(4) {
            return Err(Error::InvalidValue);
        }
        self.within(address, 4)?;
        self.submit(state, stream, work)
    }
}

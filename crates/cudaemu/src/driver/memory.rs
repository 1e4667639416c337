//! Memory: records the owner and origin of each allocation, and how it may be freed.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Driver, DriverState, StateGuard};
use crate::engine::StreamOp;
use crate::error::{Error, Result};
use crate::handle::{ContextId, PoolId, StreamId};
use crate::mem::{self, Allocation, AllocationKind};

/// The call that made an allocation, which determines the call that may free it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocationOrigin {
    /// `cuMemAlloc`, `cuMemAllocManaged`
    Plain,
    /// `cuMemAllocAsync` and similar calls.
    Pool(PoolId),
    /// `cuMemHostAlloc`
    Host,
    /// A variable of a module.
    Global,
}

/// Owner and origin of an allocation.
#[derive(Clone, Debug)]
pub struct AllocationRecord {
    /// The context that was current.
    pub context: ContextId,
    /// The call that made it.
    pub origin: AllocationOrigin,
    /// Size in bytes.
    pub bytes: u64,
    /// `cuMemFreeAsync` is queued and has not executed yet.
    pub free_pending: bool,
}

/// All allocations by address.
#[derive(Debug, Default)]
pub struct Ledger {
    owners: BTreeMap<u64, AllocationRecord>,
}

impl Ledger {
    /// The allocation that starts at this address.
    pub fn get(&self, address: u64) -> Option<&AllocationRecord> {
        self.owners.get(&address)
    }

    /// Records an allocation.
    pub fn add(&mut self, allocation: &Allocation, context: ContextId, how: AllocationOrigin) {
        let bytes = allocation.bytes();
        self.owners.insert(allocation.base(), AllocationRecord { context, origin: how, bytes, free_pending: false });
    }

    /// Removes an allocation; returns whether it was recorded.
    pub fn remove(&mut self, address: u64) -> bool {
        self.owners.remove(&address).is_some()
    }

    /// A report of all memory that the program has not freed; `None` if there is none.
    pub fn leak_summary(&self) -> Option<String> {
        let mine =
            || self.owners.values().filter(|owner| owner.origin != AllocationOrigin::Global && !owner.free_pending);
        let bytes: u64 = mine().map(|owner| owner.bytes).sum();
        (bytes > 0).then(|| format!("{bytes} bytes of memory in {} allocations", mine().count()))
    }

    /// Bytes of all allocations from a pool.
    pub fn pool_bytes(&self, pool: PoolId) -> u64 {
        self.owners.values().filter(|owner| owner.origin == AllocationOrigin::Pool(pool)).map(|owner| owner.bytes).sum()
    }
}

/// The error code for a failed allocation.
pub fn memory_error(error: &mem::Error) -> Error {
    match error {
        mem::Error::OutOfMemory { .. } | mem::Error::AddressSpace { .. } => Error::OutOfMemory,
        mem::Error::Device { .. } => Error::InvalidDevice,
        mem::Error::NotAllocated { .. } | mem::Error::Invalid(_) => Error::InvalidValue,
    }
}

/// Kind of memory to allocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Device memory.
    Device,
    /// Managed memory, which the host may access too.
    Managed,
    /// Pinned host memory.
    Host,
}

/// Valid flags of `cuMemHostAlloc`: portable, mapped, write-combined.
pub const HOST_FLAGS: u32 = 7;

impl Driver {
    /// `cuMemAlloc` and similar calls; returns the address.
    pub fn allocate(&self, bytes: u64, kind: MemoryKind, origin: &'static str) -> Result<u64> {
        let state = self.lock();
        let (context, device) = state.current_device()?;
        if bytes == 0 {
            return Err(Error::InvalidValue);
        }
        let state = self.synchronize_allocation(state, context)?;
        let device = device as u32;
        let make = || match kind {
            MemoryKind::Device => self.space().alloc(device, bytes, origin),
            MemoryKind::Managed => self.space().alloc_managed(device, bytes, origin),
            MemoryKind::Host => self.space().alloc_host(device, bytes, origin),
        };
        let (mut state, made) = self.alloc_with_retry(state, make);
        let allocation = made.map_err(|error| memory_error(&error))?;
        let how = match kind {
            MemoryKind::Host => AllocationOrigin::Host,
            MemoryKind::Device | MemoryKind::Managed => AllocationOrigin::Plain,
        };
        state.memory.add(&allocation, context, how);
        Ok(allocation.base())
    }

    /// Allocates; if memory is exhausted, waits for queued stream-ordered frees and tries again.
    pub(super) fn alloc_with_retry<'a>(
        &'a self,
        state: StateGuard<'a>,
        make: impl Fn() -> std::result::Result<Arc<Allocation>, mem::Error>,
    ) -> (StateGuard<'a>, std::result::Result<Arc<Allocation>, mem::Error>) {
        match make() {
            Err(mem::Error::OutOfMemory { .. }) if state.memory.owners.values().any(|owner| owner.free_pending) => {
                let ends = state.streams.all_tails();
                let state = self.run_until_reached(state, &ends);
                (state, make())
            }
            made => (state, made),
        }
    }

    /// `cuMemFree` and `cuMemFreeHost`: `fits` returns whether the call may free memory of this origin. Waits for the context's
    /// operations first, as CUDA does, except for pool memory.
    pub fn free(&self, address: u64, fits: fn(AllocationOrigin) -> bool) -> Result<()> {
        let mut state = self.lock();
        state.current()?;
        let owner = state.memory.get(address).filter(|owner| fits(owner.origin) && !owner.free_pending);
        let &AllocationRecord { context, origin, .. } = owner.ok_or(Error::InvalidValue)?;
        if !matches!(origin, AllocationOrigin::Pool(_)) {
            state = self.synchronize_context(state, context).0;
            state.note_synchronous_allocation();
        }
        // Another thread may have freed the memory while the lock was released.
        if state.memory.get(address).is_none_or(|owner| owner.free_pending) {
            return Err(Error::InvalidValue);
        }
        state.memory.remove(address);
        self.space().free(address).map(drop).map_err(|error| memory_error(&error))
    }

    /// `cuMemFreeAsync`
    pub fn free_async(&self, address: u64, stream: StreamId) -> Result<()> {
        let mut state = self.lock();
        let stream = state.resolve_stream(stream)?;
        let owner = state.memory.owners.get_mut(&address).ok_or(Error::InvalidValue)?;
        if !matches!(owner.origin, AllocationOrigin::Pool(_) | AllocationOrigin::Plain) || owner.free_pending {
            return Err(Error::InvalidValue);
        }
        owner.free_pending = true;
        self.submit(state, stream, StreamOp::Free(address))
    }

    /// The allocation that contains an address, even if a stream-ordered free is queued.
    pub fn find(&self, address: u64) -> Result<Arc<Allocation>> {
        self.space().find(address).ok_or(Error::InvalidValue)
    }
}

impl DriverState {
    /// Frees all memory of a context. Returns a report of what the program had not freed.
    pub(super) fn drop_memory(&mut self, driver: &Driver, context: ContextId) -> Option<String> {
        let gone: Vec<u64> =
            self.memory.owners.iter().filter(|(_, owner)| owner.context == context).map(|(&at, _)| at).collect();
        let (mut bytes, mut places) = (0, BTreeMap::<&'static str, usize>::new());
        for address in gone {
            let Some(owner) = self.memory.owners.remove(&address) else { continue };
            let Ok(allocation) = driver.space().free(address) else { continue };
            if owner.origin != AllocationOrigin::Global && !owner.free_pending {
                bytes += owner.bytes;
                *places.entry(allocation.origin()).or_default() += 1;
            }
        }
        let text: Vec<String> = places.iter().map(|(origin, count)| format!("{count} from {origin}")).collect();
        (!text.is_empty()).then(|| format!("{bytes} bytes of memory ({})", text.join(", ")))
    }
}

/// Whether an allocation is host memory.
pub fn is_host_memory(allocation: &Allocation) -> bool {
    allocation.kind() == AllocationKind::PinnedHost
}

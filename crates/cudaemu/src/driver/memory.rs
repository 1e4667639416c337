//! Memory: records the owner and origin of each allocation, and how it may be freed.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Driver, DriverState, StateGuard};
use crate::engine::StreamOp;
use crate::error::{Error, Result};
use crate::handle::{ContextId, Handle, PoolId, StreamId};
use crate::mem::{self, Allocation, AllocationKind};

/// The call that made an allocation, which determines the call that may free it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocationOrigin {
    /// `cuMemAlloc`, `cuMemAllocPitch`, `cuMemAllocManaged`
    Plain,
    /// `cuMemAllocAsync` and similar calls.
    Pool(PoolId),
    /// `cuMemAllocHost` and `cuMemHostAlloc`, with the flags.
    Host(u32),
    /// `cuMemHostRegister`, with the flags.
    Registered(u32),
    /// A variable of a module.
    Global,
    /// An allocation node of a graph; the graph's launches determine whether it is in use.
    Graph,
}

/// Owner and origin of an allocation.
#[derive(Clone, Debug)]
pub struct AllocationRecord {
    /// The context that was current.
    pub context: ContextId,
    /// The call that made it.
    pub origin: AllocationOrigin,
    /// Unique number: `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub id: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// `cuMemFreeAsync` is queued and has not executed yet.
    pub free_pending: bool,
}

/// All allocations by address, except mappings of the virtual memory API.
#[derive(Debug, Default)]
pub struct Ledger {
    owners: BTreeMap<u64, AllocationRecord>,
    made: u64,
}

impl Ledger {
    /// The allocation that starts at this address.
    pub fn get(&self, address: u64) -> Option<&AllocationRecord> {
        self.owners.get(&address)
    }

    /// Records an allocation.
    pub fn add(&mut self, allocation: &Allocation, context: ContextId, how: AllocationOrigin) {
        self.made += 1;
        let owner =
            AllocationRecord { context, origin: how, id: self.made, bytes: allocation.bytes(), free_pending: false };
        self.owners.insert(allocation.base(), owner);
    }

    /// Removes an allocation; returns whether it was recorded.
    pub fn remove(&mut self, address: u64) -> bool {
        self.owners.remove(&address).is_some()
    }

    /// A report of all memory that the program has not freed; `None` if there is none.
    pub fn leak_summary(&self) -> Option<String> {
        let mine = || {
            self.owners.values().filter(|owner| {
                !matches!(owner.origin, AllocationOrigin::Global | AllocationOrigin::Graph) && !owner.free_pending
            })
        };
        let bytes: u64 = mine().map(|owner| owner.bytes).sum();
        (bytes > 0).then(|| format!("{bytes} bytes of memory in {} allocations", mine().count()))
    }

    /// Whether a context has registered host memory.
    pub fn registered_by(&self, context: ContextId) -> bool {
        self.owners
            .values()
            .any(|owner| owner.context == context && matches!(owner.origin, AllocationOrigin::Registered(_)))
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
    /// Pinned host memory, with the flags.
    Host(u32),
}

/// Valid flags of `cuMemHostAlloc`: portable, mapped, write-combined.
pub const HOST_FLAGS: u32 = 7;
/// Valid flags of `cuMemHostRegister`: portable, mapped, I/O memory, read-only.
pub const REGISTER_FLAGS: u32 = 15;

impl Driver {
    /// `cuMemAlloc` and similar calls; returns the address.
    pub fn allocate(&self, bytes: u64, kind: MemoryKind, origin: &'static str) -> Result<u64> {
        let mut state = self.lock();
        let (context, device) = state.current_device()?;
        state.check_unsafe_call()?;
        if bytes == 0 {
            return Err(Error::InvalidValue);
        }
        let state = self.synchronize_allocation(state, context)?;
        let device = device as u32;
        let make = || match kind {
            MemoryKind::Device => self.space().alloc(device, bytes, origin),
            MemoryKind::Managed => self.space().alloc_managed(device, bytes, origin),
            MemoryKind::Host(_) => self.space().alloc_host(device, bytes, origin),
        };
        let (mut state, made) = self.alloc_with_retry(state, make);
        let allocation = made.map_err(|error| memory_error(&error))?;
        let how = match kind {
            MemoryKind::Host(flags) => AllocationOrigin::Host(flags),
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

    /// `cuMemFree`, `cuMemFreeHost`, `cuMemHostUnregister`: `fits` returns whether the call may free memory of this origin; if
    /// not, it fails with `wrong`. Waits for the context's operations first, as CUDA does, except for pool memory.
    pub fn free(&self, address: u64, fits: fn(AllocationOrigin) -> bool, wrong: Error) -> Result<()> {
        let mut state = self.lock();
        state.current()?;
        state.check_unsafe_call()?;
        if let Some(last) = state.graphs.free_from_host(address) {
            let context = state.current()?;
            let (mut state, result) = self.synchronize_context(state, context);
            state.note_synchronous_allocation();
            if last {
                state.memory.remove(address);
                self.space().free(address).map_err(|error| memory_error(&error))?;
            }
            return result;
        }
        let owner = state.memory.get(address).filter(|owner| fits(owner.origin) && !owner.free_pending).ok_or(wrong)?;
        let (context, how) = (owner.context, owner.origin);
        let mut state = match how {
            AllocationOrigin::Pool(_) => state,
            // All contexts may use registered memory, and the program may reuse it freely afterwards.
            AllocationOrigin::Registered(_) => {
                let ends = state.streams.all_tails();
                let state = self.run_until_reached(state, &ends);
                self.wait_quiescent(state, |_| true)
            }
            _ => self.synchronize_context(state, context).0,
        };
        if !matches!(how, AllocationOrigin::Pool(_)) {
            state.note_synchronous_allocation();
        }
        // Another thread may have freed the memory while the lock was released.
        if state.memory.get(address).is_none_or(|owner| owner.free_pending) {
            return Err(wrong);
        }
        state.memory.remove(address);
        self.space().free(address).map_err(|error| memory_error(&error))?;
        drop(state);
        Ok(())
    }

    /// `cuMemFreeAsync`
    pub fn free_async(&self, address: u64, stream: StreamId) -> Result<()> {
        let mut state = self.lock();
        let stream = state.resolve_stream(stream)?;
        if state.captures.is_capturing(stream)? {
            return state.capture(stream, StreamOp::Free(address));
        }
        if let Some(last) = state.graphs.free_from_host(address) {
            return self.submit(state, stream, if last { StreamOp::Free(address) } else { StreamOp::Wait });
        }
        let owner = state.memory.owners.get_mut(&address).ok_or(Error::InvalidValue)?;
        if !matches!(owner.origin, AllocationOrigin::Pool(_) | AllocationOrigin::Plain) || owner.free_pending {
            return Err(Error::InvalidValue);
        }
        owner.free_pending = true;
        self.submit(state, stream, StreamOp::Free(address))
    }

    /// Registers host memory of the program.
    pub fn register(
        &self,
        bytes: u64,
        flags: u32,
        make: impl FnOnce(u32) -> std::result::Result<Arc<Allocation>, mem::Error>,
    ) -> Result<()> {
        let state = self.lock();
        let (context, device) = state.current_device()?;
        if bytes == 0 || flags & !REGISTER_FLAGS != 0 {
            return Err(Error::InvalidValue);
        }
        let mut state = self.synchronize_allocation(state, context)?;
        let allocation = make(device as u32).map_err(|error| match error {
            // The range overlaps memory that is already registered.
            mem::Error::Invalid(_) => Error::HostMemoryAlreadyRegistered,
            other => memory_error(&other),
        })?;
        state.memory.add(&allocation, context, AllocationOrigin::Registered(flags));
        Ok(())
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
            if !matches!(owner.origin, AllocationOrigin::Global | AllocationOrigin::Graph) && !owner.free_pending {
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
    matches!(allocation.kind(), AllocationKind::PinnedHost | AllocationKind::RegisteredHost)
}

/// Value of `cuPointerGetAttribute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PointerValue {
    /// 4 bytes.
    Int(u32),
    /// 8 bytes.
    Long(u64),
    /// 1 byte.
    Bool(bool),
}

impl Driver {
    /// `cuPointerGetAttribute`
    pub fn pointer_attribute(&self, attribute: u32, address: u64) -> Result<PointerValue> {
        use PointerValue::{Bool, Int, Long};
        let state = self.lock();
        let allocation = match self.find(address) {
            Ok(allocation) => allocation,
            // 13: `CU_POINTER_ATTRIBUTE_MAPPED`, false for an unknown address instead of an error.
            Err(_) if attribute == 13 => return Ok(Bool(false)),
            Err(error) => return Err(error),
        };
        let owner = state.memory.get(allocation.base());
        let managed = allocation.kind() == AllocationKind::Managed;
        Ok(match attribute {
            1 => Long(Handle::raw(owner.ok_or(Error::InvalidValue)?.context)),
            2 => Int(if is_host_memory(&allocation) { 1 } else { 2 }),
            3 => Long(address),
            4 if is_host_memory(&allocation) || managed => Long(address),
            5 | 4 => return Err(Error::InvalidValue),
            6 => Int(0),
            7 => Long(owner.map_or(allocation.base(), |owner| owner.id)),
            8 => Int(u32::from(managed)),
            9 => Int(allocation.device()),
            10 => Int(0),
            11 => Long(allocation.base()),
            12 => Long(allocation.bytes()),
            13 => Bool(true),
            14 => Long(0),
            15 => Bool(false),
            16 => Int(3),
            17 => match owner.map(|owner| owner.origin) {
                Some(AllocationOrigin::Pool(pool)) => Long(Handle::raw(pool)),
                _ => Long(0),
            },
            18 => Long(allocation.bytes()),
            19 => Long(allocation.base()),
            20 => Long(owner.map_or(allocation.base(), |owner| owner.id)),
            21 => Bool(false),
            _ => return Err(Error::InvalidValue),
        })
    }
}

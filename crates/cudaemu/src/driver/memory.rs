//! Memory: who allocated what, and how it goes back.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Driver, Guard, State};
use crate::engine::Work;
use crate::error::{Error, Result};
use crate::handle::{ContextId, Handle, PoolId, StreamId};
use crate::mem::{self, Allocation, AllocationKind};

/// How memory came to be, which decides how it may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// `cuMemAlloc`, `cuMemAllocPitch`, `cuMemAllocManaged`
    Plain,
    /// `cuMemAllocAsync` and its kin.
    Pool(PoolId),
    /// `cuMemAllocHost`, `cuMemHostAlloc`, with the flags.
    Host(u32),
    /// `cuMemHostRegister`, with the flags.
    Registered(u32),
    /// A variable of a module.
    Global,
    /// A node of a graph: in use or not, as launches of the graph say.
    Graph,
}

/// An allocation's owner.
#[derive(Clone, Debug)]
pub struct Owner {
    /// The context it was made in.
    pub context: ContextId,
    /// How it was made.
    pub how: How,
    /// Its number: `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub id: u64,
    /// Its bytes.
    pub bytes: u64,
    /// It was given back in stream order, and the stream is not there yet.
    pub leaving: bool,
}

/// All allocations but those that programs map themselves, by address.
#[derive(Debug, Default)]
pub struct Ledger {
    owners: BTreeMap<u64, Owner>,
    made: u64,
}

impl Ledger {
    /// The allocation that starts here.
    pub fn get(&self, address: u64) -> Option<&Owner> {
        self.owners.get(&address)
    }

    /// Notes an allocation.
    pub fn add(&mut self, allocation: &Allocation, context: ContextId, how: How) {
        self.made += 1;
        let owner = Owner { context, how, id: self.made, bytes: allocation.bytes(), leaving: false };
        self.owners.insert(allocation.base(), owner);
    }

    /// It is gone; whether it was still there.
    pub fn forget(&mut self, address: u64) -> bool {
        self.owners.remove(&address).is_some()
    }

    /// What the program has not given back.
    pub fn left(&self) -> Option<String> {
        let mine =
            || self.owners.values().filter(|owner| !matches!(owner.how, How::Global | How::Graph) && !owner.leaving);
        let bytes: u64 = mine().map(|owner| owner.bytes).sum();
        (bytes > 0).then(|| format!("{bytes} bytes of memory in {} allocations", mine().count()))
    }

    /// Whether a context has registered memory of the program.
    pub fn registered_by(&self, context: ContextId) -> bool {
        self.owners.values().any(|owner| owner.context == context && matches!(owner.how, How::Registered(_)))
    }

    /// Bytes that a pool's allocations hold.
    pub fn pool_bytes(&self, pool: PoolId) -> u64 {
        self.owners.values().filter(|owner| owner.how == How::Pool(pool)).map(|owner| owner.bytes).sum()
    }
}

/// The code for memory that could not be had.
pub fn refused(error: &mem::Error) -> Error {
    match error {
        mem::Error::OutOfMemory { .. } | mem::Error::AddressSpace { .. } => Error::OutOfMemory,
        mem::Error::Device { .. } => Error::InvalidDevice,
        mem::Error::NotAllocated { .. } | mem::Error::Invalid(_) => Error::InvalidValue,
    }
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Memory of the device.
    Device,
    /// Memory that the host may touch too.
    Managed,
    /// Pinned memory of the host.
    Host(u32),
}

/// Flags of `cuMemHostAlloc`: portable, mapped, write-combined.
pub const HOST_FLAGS: u32 = 7;
/// Flags of `cuMemHostRegister`: portable, mapped, I/O memory, read-only.
pub const REGISTER_FLAGS: u32 = 15;

impl Driver {
    /// `cuMemAlloc` and its kin; the address.
    pub fn allocate(&self, bytes: u64, kind: Kind, origin: &'static str) -> Result<u64> {
        let mut state = self.lock();
        let (context, device) = state.current_device()?;
        state.unsafe_call()?;
        if bytes == 0 {
            return Err(Error::InvalidValue);
        }
        let device = device as u32;
        let make = || match kind {
            Kind::Device => self.space().alloc(device, bytes, origin),
            Kind::Managed => self.space().alloc_managed(device, bytes, origin),
            Kind::Host(_) => self.space().alloc_host(device, bytes, origin),
        };
        let (mut state, made) = self.retry(state, make);
        let allocation = made.map_err(|error| refused(&error))?;
        let how = match kind {
            Kind::Host(flags) => How::Host(flags),
            Kind::Device | Kind::Managed => How::Plain,
        };
        state.memory.add(&allocation, context, how);
        Ok(allocation.base())
    }

    /// Memory that was given back in stream order is waited for before there is none.
    pub(super) fn retry<'a>(
        &'a self,
        state: Guard<'a>,
        make: impl Fn() -> std::result::Result<Arc<Allocation>, mem::Error>,
    ) -> (Guard<'a>, std::result::Result<Arc<Allocation>, mem::Error>) {
        match make() {
            Err(mem::Error::OutOfMemory { .. }) if state.memory.owners.values().any(|owner| owner.leaving) => {
                let ends = state.streams.ends_of_all();
                let state = self.run_to(state, &ends);
                (state, make())
            }
            made => (state, made),
        }
    }

    /// `cuMemFree`, `cuMemFreeHost`, `cuMemHostUnregister`: `fits` says whether the call is for memory of this kind; the
    /// error is the call's answer if it is not. Waits for the context's work, as the driver does, but not for pools' memory.
    pub fn free(&self, address: u64, fits: fn(How) -> bool, wrong: Error) -> Result<()> {
        let mut state = self.lock();
        state.current()?;
        state.unsafe_call()?;
        if let Some(last) = state.graphs.free_by_program(address) {
            let context = state.current()?;
            let (mut state, result) = self.synchronize_context(state, context);
            if last {
                state.memory.forget(address);
                self.space().free(address).map_err(|error| refused(&error))?;
            }
            return result;
        }
        let owner = state.memory.get(address).filter(|owner| fits(owner.how) && !owner.leaving).ok_or(wrong)?;
        let (context, how) = (owner.context, owner.how);
        let mut state = match how {
            How::Pool(_) => state,
            // All contexts may use it, and afterwards the program may do with it what it likes.
            How::Registered(_) => {
                let ends = state.streams.ends_of_all();
                let state = self.run_to(state, &ends);
                self.until_still(state, |_| true)
            }
            _ => self.synchronize_context(state, context).0,
        };
        // Another thread may have been faster while work ran.
        if state.memory.get(address).is_none_or(|owner| owner.leaving) {
            return Err(wrong);
        }
        state.memory.forget(address);
        self.space().free(address).map_err(|error| refused(&error))?;
        drop(state);
        Ok(())
    }

    /// `cuMemFreeAsync`
    pub fn free_async(&self, address: u64, stream: StreamId) -> Result<()> {
        let mut state = self.lock();
        let stream = state.stream(stream)?;
        if state.captures.records(stream)? {
            return state.capture(stream, Work::Free(address));
        }
        if let Some(last) = state.graphs.free_by_program(address) {
            return self.submit(state, stream, if last { Work::Free(address) } else { Work::Wait });
        }
        let owner = state.memory.owners.get_mut(&address).ok_or(Error::InvalidValue)?;
        if !matches!(owner.how, How::Pool(_) | How::Plain) || owner.leaving {
            return Err(Error::InvalidValue);
        }
        owner.leaving = true;
        self.submit(state, stream, Work::Free(address))
    }

    /// Notes memory of the program that is now known to the driver.
    pub fn register(
        &self,
        bytes: u64,
        flags: u32,
        make: impl FnOnce(u32) -> std::result::Result<Arc<Allocation>, mem::Error>,
    ) -> Result<()> {
        let mut state = self.lock();
        let (context, device) = state.current_device()?;
        if bytes == 0 || flags & !REGISTER_FLAGS != 0 {
            return Err(Error::InvalidValue);
        }
        let allocation = make(device as u32).map_err(|error| match error {
            // Overlap with memory that is known already.
            mem::Error::Invalid(_) => Error::HostMemoryAlreadyRegistered,
            other => refused(&other),
        })?;
        state.memory.add(&allocation, context, How::Registered(flags));
        Ok(())
    }

    /// The allocation that holds an address, live or leaving.
    pub fn find(&self, address: u64) -> Result<Arc<Allocation>> {
        self.space().find(address).ok_or(Error::InvalidValue)
    }
}

impl State {
    /// Takes back all memory of a context, and says what of it the program had left.
    pub(super) fn drop_memory(&mut self, driver: &Driver, context: ContextId) -> Option<String> {
        let gone: Vec<u64> =
            self.memory.owners.iter().filter(|(_, owner)| owner.context == context).map(|(&at, _)| at).collect();
        let (mut bytes, mut places) = (0, BTreeMap::<&'static str, usize>::new());
        for address in gone {
            let Some(owner) = self.memory.owners.remove(&address) else { continue };
            let Ok(allocation) = driver.space().free(address) else { continue };
            if !matches!(owner.how, How::Global | How::Graph) && !owner.leaving {
                bytes += owner.bytes;
                *places.entry(allocation.origin()).or_default() += 1;
            }
        }
        let text: Vec<String> = places.iter().map(|(origin, count)| format!("{count} from {origin}")).collect();
        (!text.is_empty()).then(|| format!("{bytes} bytes of memory ({})", text.join(", ")))
    }
}

/// Whether an allocation is memory of the host.
pub fn on_host(allocation: &Allocation) -> bool {
    matches!(allocation.kind(), AllocationKind::PinnedHost | AllocationKind::RegisteredHost)
}

/// One value of `cuPointerGetAttribute`.
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
            // MAPPED asks exactly this.
            Err(_) if attribute == 13 => return Ok(Bool(false)),
            Err(error) => return Err(error),
        };
        let owner = state.memory.get(allocation.base());
        let managed = allocation.kind() == AllocationKind::Managed;
        Ok(match attribute {
            1 => Long(Handle::raw(owner.ok_or(Error::InvalidValue)?.context)),
            2 => Int(if on_host(&allocation) { 1 } else { 2 }),
            3 => Long(address),
            4 if on_host(&allocation) || managed => Long(address),
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
            17 => match owner.map(|owner| owner.how) {
                Some(How::Pool(pool)) => Long(Handle::raw(pool)),
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

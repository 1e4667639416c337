//! Address space: allocating, freeing and finding all memory of the process.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::backing::Reservation;
use super::physical::MemoryUsage;
use super::{Allocation, AllocationKind, Error, MemorySnapshot, PhysicalMemory};

/// Size of the reservation of device addresses if the system grants it; `LEAST_ADDRESSES` is the minimum to start with.
const ADDRESSES: usize = 8 << 40;
const LEAST_ADDRESSES: usize = 64 << 30;

/// Unused addresses between allocations: a wrong index hits this guard range instead of a neighbour.
const GUARD: u64 = 1 << 20;

/// Alignment of an allocation, exactly as strict as a real driver's: the address is a multiple of it, but not of twice it.
const ALIGNMENT: u64 = 512;

/// Maximum number of freed allocations that are remembered.
const GRAVES: usize = 1 << 16;

/// A freed allocation, remembered for fault reports.
#[derive(Clone, Debug)]
pub(super) struct FreedAllocation {
    pub(super) bytes: u64,
    pub(super) text: String,
}

/// Freed allocations by address.
#[derive(Debug, Default)]
pub(super) struct FreedAllocations {
    by_base: BTreeMap<u64, FreedAllocation>,
    oldest_first: VecDeque<u64>,
}

impl FreedAllocations {
    fn bury(&mut self, allocation: &Allocation) {
        let grave = FreedAllocation { bytes: allocation.bytes, text: allocation.describe() };
        if self.by_base.insert(allocation.base, grave).is_none() {
            self.oldest_first.push_back(allocation.base);
        }
        if self.oldest_first.len() > GRAVES
            && let Some(base) = self.oldest_first.pop_front()
        {
            self.by_base.remove(&base);
        }
    }

    /// Forgets freed allocations in a range that is reused.
    fn clear(&mut self, start: u64, end: u64) {
        let mut gone: Vec<u64> = self.by_base.range(start..end).map(|(&base, _)| base).collect();
        gone.extend(self.by_base.range(..start).next_back().filter(|(b, g)| *b + g.bytes > start).map(|(&b, _)| b));
        for base in &gone {
            self.by_base.remove(base);
        }
    }

    /// The freed allocation that contained an address.
    pub(super) fn at(&self, address: u64) -> Option<(u64, &FreedAllocation)> {
        let (&base, grave) = self.by_base.range(..=address).next_back()?;
        (address - base < grave.bytes).then_some((base, grave))
    }
}

/// State guarded by the lock.
#[derive(Debug)]
pub(super) struct AddressSpaceState {
    pub(super) live: BTreeMap<u64, Arc<Allocation>>,
    /// Used ranges of the reservation (start → end).
    taken: BTreeMap<u64, u64>,
    /// Where the search for free addresses continues.
    cursor: u64,
    /// The cached snapshot. Every change of `live` must clear it.
    snapshot: Option<Arc<MemorySnapshot>>,
}

/// All memory of the process.
#[derive(Debug)]
pub struct AddressSpace {
    state: Mutex<AddressSpaceState>,
    graves: Arc<Mutex<FreedAllocations>>,
    usage: Vec<Arc<MemoryUsage>>,
    addresses: Reservation,
}

impl AddressSpace {
    /// An address space for one device per limit (bytes each; at most 64 devices).
    pub fn new(limits: &[u64]) -> Result<Self, Error> {
        if limits.len() > 64 {
            return Err(Error::Invalid(format!("{} devices requested; at most 64 are possible", limits.len())));
        }
        let addresses = Reservation::new(ADDRESSES, LEAST_ADDRESSES)?;
        let cursor = addresses.range().start;
        let usage = |&limit: &u64| Arc::new(MemoryUsage { used: AtomicU64::new(0), limit });
        Ok(Self {
            state: Mutex::new(AddressSpaceState {
                live: BTreeMap::new(),
                taken: BTreeMap::new(),
                cursor,
                snapshot: None,
            }),
            graves: Arc::default(),
            usage: limits.iter().map(usage).collect(),
            addresses,
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, AddressSpaceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn graves(&self) -> MutexGuard<'_, FreedAllocations> {
        self.graves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn usage(&self, device: u32) -> Result<&Arc<MemoryUsage>, Error> {
        self.usage.get(device as usize).ok_or(Error::Device { device, count: self.usage.len() })
    }

    /// Finds free addresses for `bytes` at an odd multiple of [`ALIGNMENT`]. Keeps guards before and after.
    fn take_addresses(&self, state: &mut AddressSpaceState, bytes: u64) -> Result<u64, Error> {
        let range = self.addresses.range();
        let none = || Error::AddressSpace { what: "address range", bytes, reason: "all are in use".into() };
        let mut from = state.cursor;
        let mut wrapped = false;
        loop {
            let start = (from + GUARD).next_multiple_of(2 * ALIGNMENT) + ALIGNMENT;
            let end = start.checked_add(bytes).and_then(|end| end.checked_add(GUARD)).ok_or_else(none)?;
            if end > range.end {
                if wrapped {
                    return Err(none());
                }
                (from, wrapped) = (range.start, true);
                continue;
            }
            // The used range that ends last among all that start before `end`; they do not overlap, so it is the one that
            // starts last.
            match state.taken.range(..end).next_back() {
                Some((_, &taken_end)) if taken_end > start - GUARD => from = taken_end,
                _ => {
                    state.taken.insert(start, start + bytes);
                    state.cursor = start + bytes;
                    self.graves().clear(start, start + bytes);
                    return Ok(start);
                }
            }
        }
    }

    /// Adds an allocation to the live ones.
    fn insert_live(
        &self,
        state: &mut AddressSpaceState,
        base: u64,
        physical: Arc<PhysicalMemory>,
        kind: AllocationKind,
        origin: &'static str,
    ) -> Arc<Allocation> {
        let allocation = Arc::new(Allocation {
            base,
            bytes: physical.bytes(),
            physical,
            kind,
            origin,
            freed: AtomicBool::new(false),
        });
        state.live.insert(base, allocation.clone());
        state.snapshot = None;
        allocation
    }

    /// Adds host memory at its host address.
    fn insert_host(
        &self,
        base: u64,
        physical: Arc<PhysicalMemory>,
        kind: AllocationKind,
        origin: &'static str,
    ) -> Result<Arc<Allocation>, Error> {
        let end = base + physical.bytes();
        let mut state = self.lock();
        if let Some((_, other)) = state.live.range(..end).next_back()
            && other.end() > base
        {
            return Err(Error::Invalid(format!("{origin}: {base:#x} overlaps {}", other.describe())));
        }
        self.graves().clear(base, end);
        Ok(self.insert_live(&mut state, base, physical, kind, origin))
    }

    fn alloc_on(
        &self,
        device: u32,
        bytes: u64,
        kind: AllocationKind,
        origin: &'static str,
    ) -> Result<Arc<Allocation>, Error> {
        let physical = Arc::new(PhysicalMemory::device_memory(device, bytes, self.usage(device)?)?);
        let mut state = self.lock();
        let base = self.take_addresses(&mut state, bytes)?;
        Ok(self.insert_live(&mut state, base, physical, kind, origin))
    }

    /// Allocates memory of a device.
    pub fn alloc(&self, device: u32, bytes: u64, origin: &'static str) -> Result<Arc<Allocation>, Error> {
        self.alloc_on(device, bytes, AllocationKind::Device, origin)
    }

    /// Allocates memory of a device that kernels can read but not write.
    pub fn alloc_constant(&self, device: u32, bytes: u64, origin: &'static str) -> Result<Arc<Allocation>, Error> {
        self.alloc_on(device, bytes, AllocationKind::Constant, origin)
    }

    /// Allocates memory of a device that the host can access at the same address. Its bytes count as written, because the
    /// emulator cannot see the host's writes.
    pub fn alloc_managed(&self, device: u32, bytes: u64, origin: &'static str) -> Result<Arc<Allocation>, Error> {
        self.usage(device)?;
        let physical = Arc::new(PhysicalMemory::pinned(bytes, device)?);
        self.insert_host(physical.host_address(), physical, AllocationKind::Managed, origin)
    }

    /// Allocates host memory that all devices can access at its host address.
    pub fn alloc_host(&self, device: u32, bytes: u64, origin: &'static str) -> Result<Arc<Allocation>, Error> {
        let physical = Arc::new(PhysicalMemory::pinned(bytes, device)?);
        self.insert_host(physical.host_address(), physical, AllocationKind::PinnedHost, origin)
    }

    /// Frees the allocation that starts at `address`.
    pub fn free(&self, address: u64) -> Result<Arc<Allocation>, Error> {
        let mut state = self.lock();
        let Some(allocation) = state.live.remove(&address) else {
            drop(state);
            let near = self.snapshot().explain_miss(address, 1).to_string();
            return Err(Error::NotAllocated { address, near });
        };
        state.snapshot = None;
        state.taken.remove(&address);
        allocation.freed.store(true, Relaxed);
        allocation.physical.release_usage();
        self.graves().bury(&allocation);
        Ok(allocation)
    }

    /// The live allocation that contains an address.
    pub fn find(&self, address: u64) -> Option<Arc<Allocation>> {
        let state = self.lock();
        let (_, allocation) = state.live.range(..=address).next_back()?;
        (address < allocation.end()).then(|| allocation.clone())
    }

    /// The live allocations, for a launch or a copy. Cached until an allocation changes.
    pub fn snapshot(&self) -> Arc<MemorySnapshot> {
        let mut state = self.lock();
        if let Some(view) = &state.snapshot {
            return view.clone();
        }
        let view = Arc::new(MemorySnapshot::new(state.live.values().cloned().collect(), self.graves.clone()));
        state.snapshot = Some(view.clone());
        view
    }

    /// Used bytes of a device; 0 if there is no such device.
    pub fn used(&self, device: u32) -> u64 {
        self.usage(device).map_or(0, |usage| usage.used.load(Relaxed))
    }

    /// Bytes of a device's memory.
    pub fn limit(&self, device: u32) -> u64 {
        self.usage(device).map_or(0, |usage| usage.limit)
    }
}

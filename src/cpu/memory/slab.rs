//! Slab allocator: buffers and scratch of up to [`MAX_SLOT_BYTES`] share mappings.
//!
//! A mapping for each buffer would let one client make the process reach Linux's limit on mappings (65,530 by default), where
//! the next start of a thread aborts the process. Here a *slab* is one mapping of [`SLAB_BYTES`], divided into *slots* of one
//! size: a power of two from a page to [`MAX_SLOT_BYTES`]. Larger memory has a mapping of its own. Both kinds hold a
//! reservation of [`process_mappings`], so the number of mappings is bounded whatever clients allocate.
//!
//! # What a client can take from others
//! A client may fill slabs and then free all but one slot of each, in one size after the other. So each client has a count of
//! the mappings that its memory may keep, at most a quarter of the limit:
//! - Its first [`MAX_SHARED_SLOTS`] buffers use slabs of the [`Group::Shared`], which many small clients fill together. Each
//!   slot counts as a mapping, because the slot may be the last one of its slab.
//! - Its further buffers use slabs of its own, each counted once. No other client can keep them, and free slots that others
//!   leave in their slabs cannot spread this client's buffers over many.
//! - Scratch has slabs of the [`Group::Scratch`], each slot counted as in the first case. Buffers never use these slabs: they
//!   would keep the mappings that are left to scratch.
//!
//! # What a client can keep resident
//! Slots are at least a page, and the pages of a freed slot are returned to the system at once. So the resident memory of slots
//! is at most what the budgets are charged ([`charged_bytes`]), however slots are spread over slabs; slabs without live slots
//! hold no pages. Slots below a page would break this: 64 charged bytes would keep a page. Huge pages would too, hence the
//! advice against them.
//!
//! A free slot is always zero: its pages have not been written, or the system has dropped them, or they were overwritten.

use super::super::system::{available_memory, total_memory};
use crate::device::{Budget, DeviceError, MemoryBudget, Reservation, process_mappings};
use crate::poison::lock;
use memmap2::MmapMut;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, LazyLock, Mutex};

/// Bytes of a slab: 65,536 buffers of a page take 128 mappings, and a slab of the largest slots still has eight.
const SLAB_BYTES: usize = 2 << 20;

/// Size of the largest slot in bytes. Rounding to a power of two wastes up to half of a slot, which matters for large buffers;
/// 4096 mappings of more than this size are at least 1 GiB of charged memory.
const MAX_SLOT_BYTES: usize = 256 << 10;

/// A client with fewer mappings allocates slots of shared slabs, so that a thousand clients with a few small buffers each do
/// not need a thousand slabs.
const MAX_SHARED_SLOTS: u64 = 16;

/// Page size where the system does not report it: the largest that Linux uses on the supported architectures.
const MAX_PAGE_BYTES: usize = 64 << 10;

/// The allocator of the process's CPU devices.
static SLABS: LazyLock<Arc<SlabAllocator>> = LazyLock::new(|| SlabAllocator::new(process_mappings()));

/// Part of the mappings that buffers leave to scratch: a queue that finds none for its program fails, and llama.cpp's process
/// ends then, while a buffer that is refused is an ordinary reply.
const SCRATCH_SHARE: u64 = 8;

/// What memory is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Purpose {
    Buffer,
    /// Scratch of a queue.
    Scratch,
}

/// What memory of `bytes` bytes costs: the size of its slot, or its own size if it has a mapping of its own. The rest of the
/// mapping's last page is not charged, so that a buffer as large as a limit fits the limit. All mappings together leave less
/// than 4096 pages uncharged.
pub(crate) fn charged_bytes(bytes: u64) -> u64 {
    let page = page_bytes() as u64;
    match bytes {
        0 => 0,
        _ if bytes <= MAX_SLOT_BYTES as u64 => bytes.next_power_of_two().max(page),
        _ => bytes,
    }
}

/// The system's page size in bytes.
fn page_bytes() -> usize {
    static PAGE: LazyLock<usize> = LazyLock::new(|| {
        /// Key of the page size in the auxiliary vector, which is pairs of words: a key and its value.
        const AT_PAGESZ: usize = 6;
        let vector = std::fs::read("/proc/self/auxv").unwrap_or_default();
        let (words, _) = vector.as_chunks::<{ size_of::<usize>() }>();
        let mut pairs =
            words.chunks_exact(2).map(|pair| (usize::from_ne_bytes(pair[0]), usize::from_ne_bytes(pair[1])));
        let size = pairs.find_map(|(key, value)| (key == AT_PAGESZ).then_some(value));
        size.filter(|size| size.is_power_of_two() && *size <= MAX_SLOT_BYTES).unwrap_or(MAX_PAGE_BYTES)
    });
    *PAGE
}

/// The users of a slab.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Group {
    /// Buffers of all clients.
    Shared,
    /// Scratch of all clients.
    Scratch,
    /// Buffers of one client. The number is the address of its budget, which the slab's reservation keeps alive.
    Client(usize),
}

/// The reservations of a mapping that is no slab, of the process and of the client.
pub(super) type MappingPermits = (Reservation, Option<Reservation>);

/// Slabs by their users and the size of their slots.
pub(super) struct SlabAllocator {
    mappings: Arc<Budget>,
    /// The mappings for buffers: all but the last eighth.
    for_buffers: Arc<Budget>,
    state: Mutex<SizeClasses>,
}

#[derive(Default)]
struct SizeClasses {
    /// Users and slot size in bytes → slabs that have live slots. No class is empty.
    classes: BTreeMap<(Group, usize), SizeClass>,
    /// A slab without live slots, so that one buffer that is allocated and freed in a loop does not map and unmap a slab.
    spare: Option<Arc<Slab>>,
}

#[derive(Default)]
struct SizeClass {
    slabs: BTreeMap<usize, SlabSlots>,
    /// Addresses of the slabs that have free slots. The lowest is used first, so that high slabs become free.
    with_room: BTreeSet<usize>,
}

struct SlabSlots {
    slab: Arc<Slab>,
    /// Offsets of the free slots in bytes.
    free: Vec<usize>,
    /// The reservation of the client that uses the slab alone.
    _share: Option<Reservation>,
}

/// A mapping of [`SLAB_BYTES`].
struct Slab {
    map: MmapMut,
    start: NonNull<u8>,
    _permit: Reservation,
}

// SAFETY: a slab's bytes are plain memory at a fixed address. Each slot is accessed only by the owner of its `Slot`, under the
// rules of the parent module; `map` is only used for advice and to unmap.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

impl Slab {
    fn address(&self) -> usize {
        self.start.addr().get()
    }
}

/// A slot of a slab, zeroed at first and page-aligned; free again when dropped.
pub(super) struct Slot {
    allocator: Arc<SlabAllocator>,
    slab: Arc<Slab>,
    /// Offset in the slab.
    offset: usize,
    group: Group,
    /// Size in bytes.
    bytes: usize,
    /// Unless the slab is counted.
    _share: Option<Reservation>,
}

impl SlabAllocator {
    pub(super) fn new(mappings: &Arc<Budget>) -> Arc<SlabAllocator> {
        let for_buffers = Budget::within(mappings, mappings.limit() - mappings.limit() / SCRATCH_SHARE);
        Arc::new(SlabAllocator { mappings: Arc::clone(mappings), for_buffers, state: Mutex::default() })
    }

    /// The allocator of the process's CPU devices.
    pub(super) fn of_process() -> &'static Arc<SlabAllocator> {
        &SLABS
    }

    /// A slot for `bytes` bytes; `None` if memory of that size has a mapping of its own.
    pub(super) fn slot(
        self: &Arc<Self>,
        bytes: usize,
        purpose: Purpose,
        budget: &Arc<MemoryBudget>,
    ) -> Result<Option<Slot>, DeviceError> {
        if bytes == 0 || bytes > MAX_SLOT_BYTES {
            return Ok(None);
        }
        let bytes = bytes.next_power_of_two().max(page_bytes());
        let group = Group::of(purpose, budget);
        let counts_slabs = matches!(group, Group::Client(_));
        let share = if counts_slabs { None } else { reserve_share(budget)? };
        let mut state = lock(&self.state);
        let SizeClasses { classes, spare } = &mut *state;
        let room = classes.get(&(group, bytes)).and_then(|class| class.with_room.first().copied());
        let address = match room {
            Some(address) => address,
            None => {
                let slab_share = if counts_slabs { reserve_share(budget)? } else { None };
                let slab = match spare.take() {
                    Some(slab) => slab,
                    None => self.map_slab(purpose)?,
                };
                let address = slab.address();
                let free = (0..SLAB_BYTES).step_by(bytes).rev().collect();
                let class = classes.entry((group, bytes)).or_default();
                class.slabs.insert(address, SlabSlots { slab, free, _share: slab_share });
                class.with_room.insert(address);
                address
            }
        };
        let bug = || DeviceError::Bug("a slab that is listed with room has no free slot".to_owned());
        let class = classes.get_mut(&(group, bytes)).ok_or_else(bug)?;
        let slots = class.slabs.get_mut(&address).ok_or_else(bug)?;
        let offset = slots.free.pop().ok_or_else(bug)?;
        if slots.free.is_empty() {
            class.with_room.remove(&address);
        }
        let (allocator, slab) = (Arc::clone(self), Arc::clone(&slots.slab));
        Ok(Some(Slot { allocator, slab, offset, group, bytes, _share: share }))
    }

    /// A mapping for memory that no slot holds, with its permits.
    pub(super) fn map_alone(
        &self,
        bytes: usize,
        purpose: Purpose,
        budget: &Arc<MemoryBudget>,
    ) -> Result<(MmapMut, MappingPermits), DeviceError> {
        let client = reserve_share(budget)?;
        let (map, process) = self.map(bytes, purpose)?;
        Ok((map, (process, client)))
    }

    fn map(&self, bytes: usize, purpose: Purpose) -> Result<(MmapMut, Reservation), DeviceError> {
        let budget = if purpose == Purpose::Scratch { &self.mappings } else { &self.for_buffers };
        let permit = budget.reserve(1).map_err(|_| {
            let (used, limit) = (self.mappings.used(), self.mappings.limit());
            let kept = limit - self.for_buffers.limit();
            let reason = format!("CPU devices use {used} mappings, and the limit of a process is {limit}");
            exhausted(format!("{reason}, of which {kept} are kept for scratch"))
        })?;
        let map = MmapMut::map_anon(bytes).map_err(|_| DeviceError::OutOfMemory {
            requested: bytes as u64,
            available: available_memory().unwrap_or(0),
            limit: total_memory().unwrap_or(0),
        })?;
        Ok((map, permit))
    }

    fn map_slab(&self, purpose: Purpose) -> Result<Arc<Slab>, DeviceError> {
        let (mut map, permit) = self.map(SLAB_BYTES, purpose)?;
        // With a huge page, the first access to one slot would make the whole slab resident. Kernels without huge pages refuse
        // the advice and need none.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::NoHugePage);
        let start = NonNull::from(&mut map[..]).cast();
        Ok(Arc::new(Slab { map, start, _permit: permit }))
    }

    /// Marks a zeroed slot as free, and unmaps its slab if no slot of it is live, unless the slab becomes the spare one.
    fn free(&self, slot: &Slot) {
        let Slot { slab, offset, group, bytes, .. } = slot;
        let mut state = lock(&self.state);
        let SizeClasses { classes, spare } = &mut *state;
        let Some(class) = classes.get_mut(&(*group, *bytes)) else { return };
        let address = slab.address();
        let Some(slots) = class.slabs.get_mut(&address) else { return };
        slots.free.push(*offset);
        class.with_room.insert(address);
        if slots.free.len() * *bytes == SLAB_BYTES {
            class.with_room.remove(&address);
            let unused = class.slabs.remove(&address).map(|slots| slots.slab);
            if class.slabs.is_empty() {
                classes.remove(&(*group, *bytes));
            }
            // A slab of scratch is no spare one: a buffer would get a mapping that is left to scratch.
            if spare.is_none() && *group != Group::Scratch {
                *spare = unused;
            }
            // Otherwise the slab is unmapped when the caller drops its reference, after the lock is released.
        }
    }
}

/// Counts one mapping of the client of `budget` until the reservation is dropped. `None`: `budget` is no client's, and only the
/// limit of the process holds for it.
fn reserve_share(budget: &MemoryBudget) -> Result<Option<Reservation>, DeviceError> {
    let Some(mappings) = budget.mappings() else { return Ok(None) };
    mappings.reserve(1).map(Some).map_err(|refusal| {
        exhausted(format!("the client uses its {} mappings, a quarter of the process's", refusal.limit))
    })
}

fn exhausted(reason: String) -> DeviceError {
    DeviceError::Exhausted { resource: "memory mappings", reason }
}

impl Group {
    /// The group of a new slot.
    fn of(purpose: Purpose, budget: &Arc<MemoryBudget>) -> Group {
        match (purpose, budget.mappings()) {
            (Purpose::Scratch, _) => Group::Scratch,
            (Purpose::Buffer, Some(client)) if client.used() >= MAX_SHARED_SLOTS => {
                Group::Client(Arc::as_ptr(client).addr())
            }
            (Purpose::Buffer, _) => Group::Shared,
        }
    }
}

impl Slot {
    pub(super) fn start(&self) -> NonNull<u8> {
        // SAFETY: a slot lies inside its slab.
        unsafe { self.slab.start.add(self.offset) }
    }

    /// As [`HostMemory::populate`](super::HostMemory::populate), for a range inside the slot.
    #[cfg(target_os = "linux")]
    pub(super) fn populate(&self, range: Range<usize>) {
        // Linux before 5.14 does not support this advice; the next write then takes the page faults.
        let _ = self.slab.map.advise_range(memmap2::Advice::PopulateWrite, self.offset + range.start, range.len());
    }

    /// Returns the slot's pages to the system, which makes them read as zero; where the system has no such call, writes zeros.
    fn clear(&self) {
        #[cfg(target_os = "linux")]
        {
            let advice = memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: the pages become zero, which is a valid value of plain bytes. Offset and size of a slot are multiples of
            // the page size, so no other slot is touched; this one is no longer accessed, because its owner drops it.
            if unsafe { self.slab.map.unchecked_advise_range(advice, self.offset, self.bytes) }.is_ok() {
                return;
            }
        }
        // SAFETY: in bounds of the slab; this slot is no longer accessed, because its owner drops it.
        unsafe { std::ptr::write_bytes(self.start().as_ptr(), 0, self.bytes) };
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.clear();
        self.allocator.free(self);
    }
}

//! Memory of the CPU device: pages, scratch, and the tensor views that kernels use.
//!
//! Kernels access tensors through [`View`]s: raw pointers behind checked indices, never `&mut` beside `&` on the same bytes.
//! Every `SAFETY` comment here and in `view` relies on four rules:
//! 1. a [`View`]'s extent lies inside its [`HostMemory`], which outlives it; every access is checked against `ne`;
//! 2. `graph::validate` has made a node's destination disjoint from its sources, or identical to one of them for ops that read
//!    what they overwrite before they write it, on the same thread;
//! 3. a kernel writes each part of its destination on one thread only (the chunks of
//!    [`KernelContext`](super::pool::KernelContext) are disjoint), and nodes are separated by barriers;
//! 4. a node's destination lies in writable memory: `CpuProgram::check_bindings` refuses others before the program runs.
//!
//! A source that its op updates ([`OpFamily::updates`](crate::ops::OpFamily::updates)) follows the rules of a destination.
//!
//! Memory up to 256 KiB comes from slabs (`slab`); larger memory is a mapping of its own. Both reserve their mappings
//! in the budgets of the process and of the client.
//!
//! Not here: repacked weights and the lock over their layout, which are in `layout`. Start with `view.rs`.
#![allow(unsafe_code)] // one of the modules that lib.rs and tests/layout list

#[cfg(test)]
pub(super) mod accesses;
mod huge_pages;
mod populated;
mod slab;
#[cfg(test)]
mod tests;
mod view;

pub(crate) use huge_pages::choose_page_size;
pub(crate) use populated::BLOCK;
pub(crate) use slab::charged_bytes;
pub(crate) use view::View;

use crate::device::{DeviceError, HostBuffer, MemoryBudget, ReadOnlyMapping};
use crossbeam::utils::CachePadded;
use memmap2::MmapMut;
use populated::PopulatedBlocks;
use slab::{MappingPermits, Purpose, SlabAllocator, Slot};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Host memory of a buffer or of scratch; unmapped or returned to its owner when dropped.
pub(crate) struct HostMemory {
    start: NonNull<u8>,
    bytes: usize,
    owner: Owner,
    /// The prefaulted blocks of large memory with a mapping of its own.
    populated: Option<PopulatedBlocks>,
}

enum Owner {
    /// No bytes.
    Empty,
    /// Slot of a slab, zeroed at first, page-aligned.
    Slot(Slot),
    /// Anonymous mapping, zeroed at first, page-aligned.
    Mapped { map: MmapMut, _permits: MappingPermits },
    /// Imported memory, which no other code can reach any more. It may begin anywhere.
    Imported { _memory: HostBuffer },
    /// Mapping whose pages the processor does not let this process write. It may begin anywhere.
    ReadOnly { _memory: ReadOnlyMapping },
}

// SAFETY: the memory is plain bytes owned by `owner`, at a fixed address. The rules at the top of this file say which thread
// may access which part at which time.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Zeroed memory of a buffer. The system allocates a page at the first access to it. The caller has reserved
    /// [`charged_bytes`] in `budget`, whose client the memory's mappings count for.
    ///
    /// # Errors
    /// [`DeviceError::Exhausted`] at a limit of mappings, [`DeviceError::OutOfMemory`] if the system refuses the mapping.
    pub(crate) fn zeroed(bytes: usize, budget: &Arc<MemoryBudget>) -> Result<HostMemory, DeviceError> {
        HostMemory::zeroed_in(SlabAllocator::of_process(), bytes, (Purpose::Buffer, budget))
    }

    /// Zeroed memory for the scratch of a queue: as [`HostMemory::zeroed`], but it may take the mappings that buffers leave.
    pub(crate) fn scratch(bytes: usize, budget: &Arc<MemoryBudget>) -> Result<HostMemory, DeviceError> {
        HostMemory::zeroed_in(SlabAllocator::of_process(), bytes, (Purpose::Scratch, budget))
    }

    fn zeroed_in(
        slabs: &Arc<SlabAllocator>,
        bytes: usize,
        (purpose, budget): (Purpose, &Arc<MemoryBudget>),
    ) -> Result<HostMemory, DeviceError> {
        if bytes == 0 {
            let start = NonNull::<CachePadded<u8>>::dangling().cast();
            return Ok(HostMemory { start, bytes, owner: Owner::Empty, populated: None });
        }
        if let Some(slot) = slabs.slot(bytes, purpose, budget)? {
            return Ok(HostMemory { start: slot.start(), bytes, owner: Owner::Slot(slot), populated: None });
        }
        let (mut map, permits) = slabs.map_alone(bytes, purpose, budget)?;
        huge_pages::advise(&map);
        let start = NonNull::from(&mut map[..]).cast();
        let populated = PopulatedBlocks::new(bytes);
        Ok(HostMemory { start, bytes, owner: Owner::Mapped { map, _permits: permits }, populated })
    }

    /// Uses the memory of an imported host buffer.
    pub(crate) fn from_host_buffer(mut memory: HostBuffer) -> HostMemory {
        let (start, bytes) = (NonNull::from(&mut memory[..]).cast(), memory.len());
        HostMemory { start, bytes, owner: Owner::Imported { _memory: memory }, populated: None }
    }

    /// Uses the memory of a read-only mapping.
    pub(crate) fn from_read_only(memory: ReadOnlyMapping) -> HostMemory {
        let (start, bytes) = (NonNull::from(&memory[..]).cast(), memory.len());
        HostMemory { start, bytes, owner: Owner::ReadOnly { _memory: memory }, populated: None }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// For tests that ask the system which pages exist.
    #[cfg(test)]
    pub(crate) fn address(&self) -> usize {
        self.start.addr().get()
    }

    /// Whether a write to the memory would kill the process. All functions that write refuse such memory.
    pub(crate) fn is_read_only(&self) -> bool {
        matches!(self.owner, Owner::ReadOnly { .. })
    }

    /// Prefault: has the system allocate the pages of a range now, so that the next write to them takes no page faults.
    /// Changes no byte. Does nothing for ranges outside, and where the system has no such call.
    pub(crate) fn populate(&self, range: Range<usize>) {
        self.record_populated(&range);
        #[cfg(target_os = "linux")]
        if self.checked_ptr(range.start, range.len()).is_some() {
            match &self.owner {
                Owner::Slot(slot) => slot.populate(range),
                // Linux before 5.14 does not support this advice; the next write then takes the page faults.
                Owner::Mapped { map, .. } => {
                    _ = map.advise_range(memmap2::Advice::PopulateWrite, range.start, range.len());
                }
                Owner::Empty | Owner::Imported { .. } | Owner::ReadOnly { .. } => {}
            }
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (range, &self.owner);
    }

    /// Prefaults the blocks of [`BLOCK`] bytes that a range touches and whose pages were neither prefaulted nor written as a whole.
    /// Does nothing for memory below 16 MiB, for slots and for imported memory. Ends early once `abort` is set.
    pub(crate) fn populate_new_blocks(&self, range: Range<usize>, abort: &AtomicBool) {
        let Some(populated) = &self.populated else { return };
        let range = range.start..range.end.min(self.bytes);
        while let Some(block) = populated.first_missing(&range)
            && !abort.load(Ordering::Relaxed)
        {
            let start = block * BLOCK;
            self.populate(start..self.bytes.min(start + BLOCK));
        }
    }

    /// Records that the pages of a range exist.
    fn record_populated(&self, range: &Range<usize>) {
        if let Some(populated) = &self.populated {
            populated.insert(range, self.bytes);
        }
    }

    /// Copies bytes in; false if the range lies outside or is read-only.
    #[must_use]
    pub(crate) fn write(&self, offset: usize, src: &[u8]) -> bool {
        let Some(dst) = self.writable_ptr(offset, src.len()) else { return false };
        // SAFETY: `writable_ptr` has checked the bounds. `src` is a Rust slice, which never lies in device memory that a queue
        // writes. The queue runs no node meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst, src.len()) };
        self.record_populated(&(offset..offset + src.len()));
        true
    }

    /// Appends the bytes of a range to `out`; false if the range lies outside.
    #[must_use]
    pub(crate) fn append_to(&self, out: &mut Vec<u8>, range: Range<usize>) -> bool {
        let Some(src) = self.checked_ptr(range.start, range.len()) else { return false };
        out.reserve(range.len());
        // SAFETY: `checked_ptr` has checked the source, and the capacity after the length covers the destination. All bytes up
        // to the new length are written before `set_len`.
        unsafe {
            std::ptr::copy_nonoverlapping(src, out.as_mut_ptr().add(out.len()), range.len());
            out.set_len(out.len() + range.len());
        }
        true
    }

    /// The bytes of a range that no thread writes while the result lives: panels, whose layout lock the caller holds. `None` if
    /// it lies outside.
    pub(crate) fn shared_bytes(&self, range: Range<usize>) -> Option<&[u8]> {
        let start = self.checked_ptr(range.start, range.len())?;
        // SAFETY: in bounds and initialised. Only a thread with the exclusive lock of `super::layout` writes panels, and the
        // caller holds that lock.
        Some(unsafe { std::slice::from_raw_parts(start, range.len()) })
    }

    /// Sets bytes; false if the range lies outside or is read-only.
    #[must_use]
    pub(crate) fn fill(&self, offset: usize, bytes: usize, value: u8) -> bool {
        let Some(dst) = self.writable_ptr(offset, bytes) else { return false };
        // SAFETY: `writable_ptr` has checked the bounds; the queue runs no node meanwhile.
        unsafe { std::ptr::write_bytes(dst, value, bytes) };
        self.record_populated(&(offset..offset + bytes));
        true
    }

    /// Copies between two memories or inside one, overlap allowed; false if either range lies outside, or the
    /// destination is read-only.
    #[must_use]
    pub(crate) fn copy_from(&self, to: usize, src: &HostMemory, from: usize, bytes: usize) -> bool {
        let (Some(dst), Some(src)) = (self.writable_ptr(to, bytes), src.checked_ptr(from, bytes)) else { return false };
        // SAFETY: both ranges are in bounds; `copy` allows overlap.
        unsafe { std::ptr::copy(src, dst, bytes) };
        true
    }

    /// Rewrites a range in place: calls `fill` with pieces of at most `piece` bytes. The caller has waited for all work that
    /// touches the range, or excludes it by a lock.
    pub(crate) fn rewrite_in_pieces(
        &self,
        offset: usize,
        bytes: usize,
        piece: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let outside = DeviceError::Misuse("a region reaches past the end of its memory, or is read-only");
        let start = self.writable_ptr(offset, bytes).ok_or(outside)?;
        let mut done = 0;
        while done < bytes {
            let n = piece.min(bytes - done);
            // SAFETY: in bounds by `writable_ptr`, and no other thread touches the range: either all queued work that does has
            // finished, and its only submitter is the caller, or the caller holds the lock of `super::layout` exclusively.
            fill(unsafe { std::slice::from_raw_parts_mut(start.add(done), n) })?;
            done += n;
        }
        Ok(())
    }

    fn writable_ptr(&self, offset: usize, bytes: usize) -> Option<*mut u8> {
        self.checked_ptr(offset, bytes).filter(|_| !self.is_read_only())
    }

    fn checked_ptr(&self, offset: usize, bytes: usize) -> Option<*mut u8> {
        match offset.checked_add(bytes) {
            // SAFETY: offset ≤ end ≤ bytes: inside the allocation or one past its end.
            Some(end) if end <= self.bytes => Some(unsafe { self.start.as_ptr().add(offset) }),
            _ => None,
        }
    }
}

/// Scratch memory of one node, shared by its workers: written in one phase, read in the next.
#[derive(Clone, Copy)]
pub(crate) struct SharedScratch<'a> {
    memory: &'a HostMemory,
}

impl<'a> SharedScratch<'a> {
    pub(crate) fn new(memory: &'a HostMemory) -> SharedScratch<'a> {
        SharedScratch { memory }
    }

    /// Copies values to a byte offset. In one phase each byte is written by one worker only.
    ///
    /// # Panics
    /// If the values do not fit: the kernel requested less scratch than it uses.
    pub(crate) fn write<T: bytemuck::NoUninit>(&self, offset: usize, values: &[T]) {
        assert!(
            self.memory.write(offset, bytemuck::cast_slice(values)),
            "{} values at byte {offset} do not fit the shared scratch",
            values.len()
        );
    }

    /// Values that an earlier phase wrote at a byte offset, which is a multiple of their alignment.
    ///
    /// # Panics
    /// If the range is outside or misaligned.
    pub(crate) fn read<T: bytemuck::AnyBitPattern>(&self, offset: usize, n: usize) -> &'a [T] {
        let p = self.memory.checked_ptr(offset, n * size_of::<T>()).expect("shared scratch holds the requested range");
        // SAFETY: in bounds; written in an earlier phase, which ended with a barrier, and not written in this phase.
        bytemuck::cast_slice(unsafe { std::slice::from_raw_parts(p, n * size_of::<T>()) })
    }
}

/// Scratch memory with one part for each worker.
pub(crate) struct LocalScratch<'a> {
    memory: &'a HostMemory,
    floats: usize,
}

impl<'a> LocalScratch<'a> {
    /// `workers` parts of `floats` f32 each, from the start of `memory`.
    pub(crate) fn new(memory: &'a HostMemory, floats: usize) -> LocalScratch<'a> {
        LocalScratch { memory, floats }
    }

    /// Bytes that the parts of `workers` workers take; `None` on overflow.
    pub(crate) fn bytes(workers: usize, floats: usize) -> Option<usize> {
        // Each part starts on its own cache line.
        floats.checked_next_multiple_of(16)?.checked_mul(4)?.checked_mul(workers)
    }

    /// The part of one worker.
    ///
    /// # Safety
    /// While the returned slice lives, no other call requests the same worker's part.
    pub(crate) unsafe fn for_worker(&self, worker: usize) -> &'a mut [f32] {
        let stride = self.floats.next_multiple_of(16) * 4;
        let p = self
            .memory
            .checked_ptr(worker * stride, self.floats * 4)
            .expect("scratch memory has a part for every worker");
        // SAFETY: in bounds; aligned, because the start is page-aligned and the stride a multiple of 64; exclusive by the
        // caller's promise.
        unsafe { std::slice::from_raw_parts_mut(p.cast::<f32>(), self.floats) }
    }
}

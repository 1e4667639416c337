//! Memory of the CPU device, and how kernels see tensors in it.
//!
//! Kernels see tensors through [`View`]s: raw pointers behind checked indices, never `&mut` beside `&` on the same
//! bytes. The discipline that keeps threads apart, on which every `SAFETY` comment here and in `view` leans:
//! 1. a [`View`]'s extent lies inside its [`HostMemory`], which outlives it; every access is checked against `ne`;
//! 2. `graph::validate` has made a node's destination disjoint from its sources, or exactly on one of them for ops that
//!    read what they overwrite before they write it, on the same thread;
//! 3. a kernel writes each part of its destination on one thread only (the chunks of [`Work`](super::pool::Work) are
//!    disjoint), and nodes are separated by barriers.
#![allow(unsafe_code)] // one of the modules that lib.rs and tests/layout list

mod view;

pub(crate) use view::View;

use crate::device::{DeviceError, HostBuffer};
use crossbeam::utils::CachePadded;
use memmap2::MmapMut;
use std::ops::Range;
use std::ptr::NonNull;

/// Pages of the device's own, given back to the system when dropped.
pub(crate) struct HostMemory {
    start: NonNull<u8>,
    bytes: usize,
    owner: Owner,
}

enum Owner {
    /// There are no bytes.
    Nobody,
    /// Zeroed at first, from the start of a page on.
    Pages(MmapMut),
    /// Brought by someone else, who cannot reach them any more. They begin anywhere.
    Brought { _memory: HostBuffer },
}

// SAFETY: the memory is plain bytes owned by `owner`, at a fixed address; who may touch which part when is the
// discipline at the top of this file.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Zeroed memory. Pages are taken from the system when first touched.
    pub(crate) fn zeroed(bytes: usize) -> std::io::Result<HostMemory> {
        if bytes == 0 {
            return Ok(HostMemory {
                start: NonNull::<CachePadded<u8>>::dangling().cast(),
                bytes,
                owner: Owner::Nobody,
            });
        }
        let mut map = MmapMut::map_anon(bytes)?;
        // No advice on large pages: decoding gains 3% by them, but a system that has none at hand clears them so slowly that a
        // model loads in twice the time.
        let start = NonNull::new(map.as_mut_ptr()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(HostMemory { start, bytes, owner: Owner::Pages(map) })
    }

    /// The memory of a buffer of the host.
    pub(crate) fn over(mut memory: HostBuffer) -> HostMemory {
        let (start, bytes) = (NonNull::from(&mut memory[..]).cast(), memory.len());
        HostMemory { start, bytes, owner: Owner::Brought { _memory: memory } }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Has the system give the pages of a range now, as far as it lies inside and the system can: who writes it next does
    /// not wait for them. Changes no byte.
    pub(crate) fn populate(&self, range: Range<usize>) {
        #[cfg(target_os = "linux")]
        if let Owner::Pages(map) = &self.owner
            && self.part(range.start, range.len()).is_some()
        {
            // Linux before 5.14 does not know it; whoever writes next takes what pages are missing.
            let _ = map.advise_range(memmap2::Advice::PopulateWrite, range.start, range.len());
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (range, &self.owner);
    }

    /// Copies bytes in; false when they do not fit.
    #[must_use]
    pub(crate) fn write(&self, offset: usize, src: &[u8]) -> bool {
        let Some(dst) = self.part(offset, src.len()) else { return false };
        // SAFETY: `part` has checked the bounds; `src` is a Rust slice, which never lies in device memory that a queue
        // writes; the queue runs no node meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst, src.len()) };
        true
    }

    /// Copies bytes out; `None` when they lie outside.
    pub(crate) fn read(&self, offset: usize, bytes: usize) -> Option<Vec<u8>> {
        let src = self.part(offset, bytes)?;
        let mut out = Vec::with_capacity(bytes);
        // SAFETY: `part` has checked the source, the capacity the destination; all `bytes` of it are written before
        // the length says so.
        unsafe {
            std::ptr::copy_nonoverlapping(src, out.as_mut_ptr(), bytes);
            out.set_len(bytes);
        }
        Some(out)
    }

    /// Sets bytes; false when they lie outside.
    #[must_use]
    pub(crate) fn fill(&self, offset: usize, bytes: usize, value: u8) -> bool {
        let Some(dst) = self.part(offset, bytes) else { return false };
        // SAFETY: bounds checked by `part`; the queue runs no node meanwhile.
        unsafe { std::ptr::write_bytes(dst, value, bytes) };
        true
    }

    /// Copies between two memories or within one, overlap allowed; false when either part lies outside.
    #[must_use]
    pub(crate) fn copy_from(&self, to: usize, src: &HostMemory, from: usize, bytes: usize) -> bool {
        let (Some(dst), Some(src)) = (self.part(to, bytes), src.part(from, bytes)) else { return false };
        // SAFETY: both parts are in bounds; `copy` allows overlap.
        unsafe { std::ptr::copy(src, dst, bytes) };
        true
    }

    /// Lets `fill` rewrite a part of the memory in place, in pieces of at most `piece` bytes. The caller has waited for
    /// all work that touches the part, or keeps it off.
    pub(crate) fn stream(
        &self,
        offset: usize,
        bytes: usize,
        piece: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let outside = DeviceError::Misuse("a region reaches past the end of its memory");
        let start = self.part(offset, bytes).ok_or(outside)?;
        let mut done = 0;
        while done < bytes {
            let n = piece.min(bytes - done);
            // SAFETY: in bounds by `part`, and nobody else touches the part: all queued work that does has finished, and
            // its only submitter is the caller, who is here; or the caller holds the lock of `super::layout` alone.
            fill(unsafe { std::slice::from_raw_parts_mut(start.add(done), n) })?;
            done += n;
        }
        Ok(())
    }

    fn part(&self, offset: usize, bytes: usize) -> Option<*mut u8> {
        match offset.checked_add(bytes) {
            // SAFETY: offset ≤ end ≤ bytes: inside the allocation or one past its end.
            Some(end) if end <= self.bytes => Some(unsafe { self.start.as_ptr().add(offset) }),
            _ => None,
        }
    }
}

/// Scratch memory of one node, shared by its workers: written in one phase, read in the next.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'a> {
    memory: &'a HostMemory,
}

impl<'a> Shared<'a> {
    pub(crate) fn new(memory: &'a HostMemory) -> Shared<'a> {
        Shared { memory }
    }

    /// Copies values to a byte offset. Each byte by one worker of a phase only.
    ///
    /// # Panics
    /// When they do not fit: the kernel asked for less than it uses.
    pub(crate) fn write<T: bytemuck::NoUninit>(&self, offset: usize, values: &[T]) {
        assert!(
            self.memory.write(offset, bytemuck::cast_slice(values)),
            "shared scratch holds {offset} + {}",
            values.len()
        );
    }

    /// Values that an earlier phase wrote at a byte offset, a multiple of their alignment.
    ///
    /// # Panics
    /// When the range is outside or misaligned.
    pub(crate) fn read<T: bytemuck::AnyBitPattern>(&self, offset: usize, n: usize) -> &'a [T] {
        let p = self.memory.part(offset, n * size_of::<T>()).expect("shared scratch holds what was asked for");
        // SAFETY: in bounds; written in an earlier phase, which a barrier has ended, and not in this one.
        bytemuck::cast_slice(unsafe { std::slice::from_raw_parts(p, n * size_of::<T>()) })
    }
}

/// Scratch memory split into one part per worker.
pub(crate) struct Locals<'a> {
    memory: &'a HostMemory,
    floats: usize,
}

impl<'a> Locals<'a> {
    /// `workers` parts of `floats` f32 each, from the start of `memory`.
    pub(crate) fn new(memory: &'a HostMemory, floats: usize) -> Locals<'a> {
        Locals { memory, floats }
    }

    /// Bytes of memory that so many parts take.
    pub(crate) fn bytes(workers: usize, floats: usize) -> Option<usize> {
        // Parts start on separate cache lines.
        floats.checked_next_multiple_of(16)?.checked_mul(4)?.checked_mul(workers)
    }

    /// The part of one worker.
    ///
    /// # Safety
    /// While the returned slice lives, nobody else asks for the same worker's part.
    pub(crate) unsafe fn of(&self, worker: usize) -> &'a mut [f32] {
        let stride = self.floats.next_multiple_of(16) * 4;
        let p = self.memory.part(worker * stride, self.floats * 4).expect("scratch for every worker");
        // SAFETY: in bounds, page-aligned plus a multiple of 64, and the caller promises that it is the only one.
        unsafe { std::slice::from_raw_parts_mut(p.cast::<f32>(), self.floats) }
    }
}

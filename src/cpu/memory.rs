//! Memory of the CPU device, and how kernels see tensors in it.
//!
//! Kernels see tensors through [`View`]s: raw pointers behind checked indices, never `&mut` beside `&` on the same
//! bytes. The discipline that keeps threads apart, on which every `SAFETY` comment below leans:
//! 1. a [`View`]'s extent lies inside its [`HostMemory`], which outlives it; every access is checked against `ne`;
//! 2. `graph::validate` has made a node's destination disjoint from its sources, or exactly on one of them for ops that
//!    read what they overwrite before they write it, on the same thread;
//! 3. a kernel writes each part of its destination on one thread only (the chunks of [`super::pool::Work`] are
//!    disjoint), and nodes are separated by barriers.
#![allow(unsafe_code)] // one of the modules that DESIGN names

use super::simd::vec::Rows;
use super::strip::{STRIP, unpack_row};
use crate::tensor::quant::{dequantiser, quantiser};
use crate::tensor::{DType, TensorDesc};
use crossbeam::utils::CachePadded;
use memmap2::MmapMut;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

/// Zeroed pages, given back to the system when dropped.
pub(crate) struct HostMemory {
    start: NonNull<u8>,
    bytes: usize,
    map: Option<MmapMut>,
}

// SAFETY: the memory is plain bytes owned by the map, at a fixed address; who may touch which part when is the
// discipline at the top of this file.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Zeroed memory. Pages are taken from the system when first touched.
    pub(crate) fn zeroed(bytes: usize) -> std::io::Result<HostMemory> {
        if bytes == 0 {
            return Ok(HostMemory { start: NonNull::<CachePadded<u8>>::dangling().cast(), bytes, map: None });
        }
        let mut map = MmapMut::map_anon(bytes)?;
        // No advice on large pages: decoding gains 3% by them, but a system that has none at hand clears them so slowly that a
        // model loads in twice the time.
        let start = NonNull::new(map.as_mut_ptr()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(HostMemory { start, bytes, map: Some(map) })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Has the system give the pages of a range now, as far as it lies inside and the system can: who writes it next does
    /// not wait for them. Changes no byte.
    pub(crate) fn populate(&self, range: Range<usize>) {
        #[cfg(target_os = "linux")]
        if let Some(map) = &self.map
            && self.part(range.start, range.len()).is_some()
        {
            // Linux before 5.14 does not know it; whoever writes next takes what pages are missing.
            let _ = map.advise_range(memmap2::Advice::PopulateWrite, range.start, range.len());
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (range, &self.map);
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
        fill: &mut dyn FnMut(&mut [u8]) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        let start = self.part(offset, bytes).ok_or(std::io::ErrorKind::InvalidInput)?;
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

/// A tensor as a kernel sees it: indices are checked, bytes are not borrowed.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    start: *mut u8,
    desc: &'a TensorDesc,
    /// Whether rows lie interleaved, sixteen to a strip.
    strips: bool,
    _memory: PhantomData<&'a HostMemory>,
}

impl<'a> View<'a> {
    /// A tensor at an offset of a memory; `None` when it does not lie inside.
    pub(crate) fn new(memory: &'a HostMemory, offset: usize, desc: &'a TensorDesc) -> Option<View<'a>> {
        Some(View { start: memory.part(offset, desc.extent())?, desc, strips: false, _memory: PhantomData })
    }

    /// The same tensor, whose rows lie in strips: it is packed, and `ne[1]` is a multiple of [`STRIP`].
    pub(crate) fn in_strips(self) -> View<'a> {
        View { strips: true, ..self }
    }

    /// Whether the rows lie in strips. Then [`View::strip`] and [`View::load_row`] alone read them, and nobody writes.
    pub(crate) fn packed(&self) -> bool {
        self.strips
    }

    /// The same memory from the same first byte on, described otherwise. `desc` must list the very bytes that this view
    /// describes, or fewer: that is what overlap was checked for.
    ///
    /// # Panics
    /// When it reaches beyond this view's extent: a bug in a kernel.
    pub(crate) fn described<'b>(&self, desc: &'b TensorDesc) -> View<'b>
    where
        'a: 'b,
    {
        assert!(desc.extent() <= self.desc.extent(), "{desc:?} inside {:?}", self.desc);
        View { start: self.start, desc, strips: self.strips, _memory: PhantomData }
    }

    /// Its type, shape and strides.
    pub(crate) fn desc(&self) -> &'a TensorDesc {
        self.desc
    }

    /// Elements per dimension.
    pub(crate) fn ne(&self) -> [usize; 4] {
        self.desc.ne()
    }

    /// Address of element `i`, where `n` elements from it on along dimension 0 exist.
    ///
    /// # Panics
    /// When they do not, or do not start and end on whole blocks, or lie in strips: a bug in a kernel.
    fn at(&self, i: [usize; 4], n: usize) -> *mut u8 {
        assert!(!self.strips, "rows of their own");
        self.place(i, n)
    }

    fn place(&self, i: [usize; 4], n: usize) -> *mut u8 {
        let (ne, nb, block) = (self.desc.ne(), self.desc.nb(), self.desc.dtype().block_len());
        assert!(
            n > 0 && i[0] <= ne[0] && n <= ne[0] - i[0] && i[1] < ne[1] && i[2] < ne[2] && i[3] < ne[3],
            "element {i:?} + {n} of {ne:?}"
        );
        assert!(i[0].is_multiple_of(block) && n.is_multiple_of(block), "element {i:?} + {n} in blocks of {block}");
        // SAFETY: each index is below its count, so the offset is below the extent, which lies inside the memory.
        unsafe { self.start.add(i[0] / block * nb[0] + i[1] * nb[1] + i[2] * nb[2] + i[3] * nb[3]) }
    }

    fn dense(&self) -> bool {
        self.desc.rows_dense()
    }

    /// Reads `out.len()` elements from `i` on along dimension 0, converted to f32. Whole blocks only.
    ///
    /// # Panics
    /// As [`View::at`], or when the type has no conversion: a bug in a kernel, which `select` should have refused.
    pub(crate) fn load(&self, i: [usize; 4], out: &mut [f32]) {
        if out.is_empty() {
            return;
        }
        let (dtype, p) = (self.desc.dtype(), self.at(i, out.len()));
        if self.dense() {
            if dtype == DType::F32 {
                // SAFETY: `at` has checked `out.len()` elements of 4 bytes; `out` is a slice of the kernel's own.
                unsafe { copy_row(p, out.as_mut_ptr().cast::<u8>(), out.len() * 4) };
                return;
            }
            let bytes = out.len() / dtype.block_len() * dtype.block_bytes();
            let convert = dequantiser(dtype).expect("a type that select has accepted");
            // SAFETY: `at` has checked these blocks; no thread writes them while this call reads (discipline 2 and 3).
            convert(unsafe { std::slice::from_raw_parts(p, bytes) }, out);
        } else {
            let (step, block, size) = (self.desc.nb()[0], dtype.block_len(), dtype.block_bytes());
            let convert = dequantiser(dtype).expect("a type that select has accepted");
            let mut packed = [0; GATHER];
            let most = GATHER / size;
            for (k, out) in out.chunks_mut(most * block).enumerate() {
                let blocks = out.len() / block;
                // SAFETY: these blocks of the checked range start `k * most` strides further on; `packed` holds `most`.
                unsafe { move_blocks(p.add(k * most * step), step, packed.as_mut_ptr(), size, size, blocks) };
                convert(&packed[..blocks * size], out);
            }
        }
    }

    /// As many elements as `buffer` has, from `i` on along dimension 0, as f32: where they lie if they are such, else
    /// converted into `buffer`. A kernel that works in place is done with them before it writes there, and hands them to
    /// no function that writes there.
    ///
    /// # Panics
    /// As [`View::load`].
    pub(crate) fn fetch<'b>(&self, i: [usize; 4], buffer: &'b mut [f32]) -> &'b [f32]
    where
        'a: 'b,
    {
        if self.desc.dtype() == DType::F32 && self.dense() && !buffer.is_empty() {
            let p = self.at(i, buffer.len()).cast::<f32>();
            if p.is_aligned() {
                // SAFETY: `at` has checked the elements, which lie dense and aligned and live for 'a; no other thread
                // writes them while this one reads (discipline 2 and 3), and this one does so afterwards.
                return unsafe { std::slice::from_raw_parts(p, buffer.len()) };
            }
        }
        self.load(i, buffer);
        buffer
    }

    /// Writes f32 values from `i` on along dimension 0, converted to the tensor's type. Whole blocks only.
    ///
    /// # Panics
    /// As [`View::load`].
    pub(crate) fn store(&self, i: [usize; 4], values: &[f32]) {
        if values.is_empty() {
            return;
        }
        let (dtype, p) = (self.desc.dtype(), self.at(i, values.len()));
        if self.dense() && dtype == DType::F32 {
            // SAFETY: `at` has checked the room; `values` is the kernel's own slice.
            unsafe { copy_row(values.as_ptr().cast::<u8>(), p, values.len() * 4) };
            return;
        }
        let convert = quantiser(dtype).expect("a type that select has accepted");
        if self.dense() {
            let bytes = values.len() / dtype.block_len() * dtype.block_bytes();
            // SAFETY: `at` has checked these blocks, and this thread alone touches them (discipline 2 and 3).
            convert(values, unsafe { std::slice::from_raw_parts_mut(p, bytes) });
        } else {
            let (step, block, size) = (self.desc.nb()[0], dtype.block_len(), dtype.block_bytes());
            let mut packed = [0; GATHER];
            let most = GATHER / size;
            for (k, values) in values.chunks(most * block).enumerate() {
                let blocks = values.len() / block;
                convert(values, &mut packed[..blocks * size]);
                // SAFETY: these blocks of the checked range start `k * most` strides further on; this thread alone
                // touches them.
                unsafe { move_blocks(packed.as_ptr(), size, p.add(k * most * step), step, size, blocks) };
            }
        }
    }

    /// One element of an I32 or I64 tensor: an index, a position.
    ///
    /// # Panics
    /// For other types, and as [`View::at`].
    pub(crate) fn index(&self, i: [usize; 4]) -> i64 {
        let p = self.at(i, 1);
        match self.desc.dtype() {
            // SAFETY: `at` has checked the element; it may lie at any address.
            DType::I32 => i64::from(unsafe { p.cast::<i32>().read_unaligned() }),
            // SAFETY: as above.
            DType::I64 => unsafe { p.cast::<i64>().read_unaligned() },
            other => unreachable!("an index of type {other}"),
        }
    }

    /// Sets one element of an I32 tensor.
    ///
    /// # Panics
    /// For other types, and as [`View::at`].
    pub(crate) fn set_i32(&self, i: [usize; 4], value: i32) {
        assert_eq!(self.desc.dtype(), DType::I32, "an I32 destination");
        // SAFETY: `at` has checked the element; this thread alone touches it.
        unsafe { self.at(i, 1).cast::<i32>().write_unaligned(value) };
    }

    /// Copies `n` elements of the same type from `from` of `src` to `i` here, along dimension 0 of both.
    ///
    /// # Panics
    /// When the types differ, and as [`View::at`].
    pub(crate) fn copy(&self, i: [usize; 4], src: &View<'_>, from: [usize; 4], n: usize) {
        let dtype = self.desc.dtype();
        assert_eq!(dtype, src.desc.dtype(), "types of a raw copy");
        if n == 0 {
            return;
        }
        let (to, from) = (self.at(i, n), src.at(from, n));
        let (blocks, size) = (n / dtype.block_len(), dtype.block_bytes());
        if self.dense() && src.dense() {
            // SAFETY: both ranges are checked; `copy` allows them to be the same.
            unsafe { std::ptr::copy(from, to, blocks * size) };
        } else {
            let (d, s) = (self.desc.nb()[0], src.desc.nb()[0]);
            // SAFETY: block k of either checked range lies k strides further on.
            unsafe { move_blocks(from, s, to, d, size, blocks) };
        }
    }

    /// Reads `out.len()` elements of a dense row from `i` on as they are. `T` stands for one block.
    ///
    /// # Panics
    /// When blocks have another size than `T`, when rows are not dense, and as [`View::at`].
    pub(crate) fn load_raw<T: bytemuck::AnyBitPattern>(&self, i: [usize; 4], out: &mut [T]) {
        assert!(
            self.dense() && size_of::<T>() == self.desc.dtype().block_bytes(),
            "dense rows of {} bytes",
            size_of::<T>()
        );
        if !out.is_empty() {
            let p = self.at(i, out.len() * self.desc.dtype().block_len());
            // SAFETY: `at` has checked as many blocks as `out` has, of equal size; any bytes make a `T`.
            unsafe { std::ptr::copy_nonoverlapping(p, out.as_mut_ptr().cast::<u8>(), size_of_val(out)) };
        }
    }

    /// Writes elements of a dense row from `i` on as they are; the inverse of [`View::load_raw`].
    ///
    /// # Panics
    /// As [`View::load_raw`].
    pub(crate) fn store_raw<T: bytemuck::NoUninit>(&self, i: [usize; 4], values: &[T]) {
        assert!(
            self.dense() && size_of::<T>() == self.desc.dtype().block_bytes(),
            "dense rows of {} bytes",
            size_of::<T>()
        );
        if !values.is_empty() {
            let p = self.at(i, values.len() * self.desc.dtype().block_len());
            // SAFETY: `at` has checked as many blocks as `values` has, of equal size; this thread alone touches them.
            unsafe { std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), p, size_of_val(values)) };
        }
    }

    /// `count` rows of F32 or F16 from row `i` on, where they lie; `None` for other types. Only for sources of ops that never
    /// work in place.
    ///
    /// # Panics
    /// When the rows are not dense, when there are none, and as [`View::at`].
    pub(crate) fn rows(&self, i: [usize; 3], count: usize) -> Option<Rows<'a>> {
        assert!(self.dense() && count > 0, "dense rows");
        let half = match self.desc.dtype() {
            DType::F32 => false,
            DType::F16 => true,
            _ => return None,
        };
        let (start, width) = (self.at([0, i[0], i[1], i[2]], self.desc.ne()[0]), self.desc.ne()[0]);
        self.at([0, i[0] + count - 1, i[1], i[2]], width);
        // SAFETY: the first and the last row are checked, and all lie between, a stride apart; the memory lives for 'a, and
        // no thread writes a source of this node before the barrier that ends it (discipline 2).
        Some(unsafe { Rows::new(start, self.desc.nb()[1], count, width, half) })
    }

    /// The bytes of a dense row. Only for sources of ops that never work in place.
    ///
    /// # Panics
    /// When the rows are not dense, and as [`View::at`].
    pub(crate) fn row(&self, i: [usize; 3]) -> &'a [u8] {
        assert!(self.dense(), "dense rows");
        let p = self.at([0, i[0], i[1], i[2]], self.desc.ne()[0]);
        // SAFETY: the row is checked and dense; the memory lives for 'a, and no thread writes a source of this node
        // before the barrier that ends it (discipline 2).
        unsafe { std::slice::from_raw_parts(p, self.desc.row_bytes()) }
    }

    /// The bytes of as many dense rows as `out` has, from `i` on, as [`View::row`] gives one.
    ///
    /// # Panics
    /// As [`View::row`], for any of them.
    pub(crate) fn row_slices(&self, i: [usize; 3], out: &mut [&'a [u8]]) {
        let Some(last) = out.len().checked_sub(1) else { return };
        assert!(self.dense() && last < self.desc.ne()[1] - i[0], "dense rows {i:?} + {last}");
        let (first, bytes, step) =
            (self.at([0, i[0], i[1], i[2]], self.desc.ne()[0]), self.desc.row_bytes(), self.desc.nb()[1]);
        for (r, out) in out.iter_mut().enumerate() {
            // SAFETY: `at` has checked the first row, the assertion the last one; otherwise as in `row`.
            *out = unsafe { std::slice::from_raw_parts(first.add(r * step), bytes) };
        }
    }

    /// The strip of rows `i[0]` to `i[0] + 15` of a tensor whose rows lie in strips: the bytes of sixteen rows.
    ///
    /// # Panics
    /// When they do not, when `i[0]` is no multiple of 16, and as [`View::at`].
    pub(crate) fn strip(&self, i: [usize; 3]) -> &'a [u8] {
        assert!(self.strips && i[0].is_multiple_of(STRIP), "a strip from row {} on", i[0]);
        let p = self.place([0, i[0], i[1], i[2]], self.desc.ne()[0]);
        // SAFETY: the tensor is packed and `ne[1]` is a multiple of 16: sixteen rows from `i[0]` on exist and follow each
        // other. No thread writes a tensor in strips; who would convert it waits for the program's end.
        unsafe { std::slice::from_raw_parts(p, STRIP * self.desc.row_bytes()) }
    }

    /// Copies the bytes of a dense row out, from a strip or from where they lie.
    ///
    /// # Panics
    /// When `out` has another length, and as [`View::row`].
    pub(crate) fn load_row(&self, i: [usize; 3], out: &mut [u8]) {
        if self.strips {
            let first = i[0] / STRIP * STRIP;
            unpack_row(self.desc.dtype(), self.strip([first, i[1], i[2]]), i[0] - first, out);
        } else {
            out.copy_from_slice(self.row(i));
        }
    }
}

/// Bytes of strided blocks that are packed before they are converted (the largest block has 292).
const GATHER: usize = 1024;

/// Copies `count` blocks of `size` bytes, `s` and `d` bytes apart.
///
/// # Safety
/// All blocks lie inside memory that this thread may read and write. Source and destination are the same blocks or
/// share no byte.
unsafe fn move_blocks(from: *const u8, s: usize, to: *mut u8, d: usize, size: usize, count: usize) {
    /// A size that the compiler knows makes each copy one load and one store.
    unsafe fn sized<const N: usize>(from: *const u8, s: usize, to: *mut u8, d: usize, count: usize) {
        for k in 0..count {
            // SAFETY: as the caller promises; arrays of bytes lie at any address.
            unsafe { to.add(k * d).cast::<[u8; N]>().write(from.add(k * s).cast::<[u8; N]>().read()) };
        }
    }
    // SAFETY: the caller's promise is the same for each of these.
    unsafe {
        match size {
            1 => sized::<1>(from, s, to, d, count),
            2 => sized::<2>(from, s, to, d, count),
            4 => sized::<4>(from, s, to, d, count),
            8 => sized::<8>(from, s, to, d, count),
            _ => {
                for k in 0..count {
                    std::ptr::copy(from.add(k * s), to.add(k * d), size);
                }
            }
        }
    }
}

/// Copies bytes in pieces for which no memcpy takes `rep movsb`: on Zen that runs at 2 GB/s, a twentieth, when source and
/// destination lie alike within their pages, which rows of 4096 bytes and scratch at the start of a page do.
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`].
unsafe fn copy_row(from: *const u8, to: *mut u8, bytes: usize) {
    const PIECE: usize = 2048;
    let mut done = 0;
    while done < bytes {
        let n = PIECE.min(bytes - done);
        // SAFETY: inside the ranges that the caller vouches for.
        unsafe { std::ptr::copy_nonoverlapping(from.add(done), to.add(done), n) };
        done += n;
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

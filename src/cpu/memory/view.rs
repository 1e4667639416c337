//! Tensor views: checked element access for kernels.

use super::HostMemory;
use crate::cpu::panel::{PANEL_ROWS, unpack_row};
use crate::cpu::simd::attention_gemm::FloatRows;
use crate::tensor::quant::{dequantiser, quantiser};
use crate::tensor::{DType, TensorDesc};
use std::marker::PhantomData;

/// View of a tensor for kernels: indices are checked, bytes are not borrowed.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    start: *mut u8,
    desc: &'a TensorDesc,
    /// Whether the rows are packed into panels of sixteen.
    panels: bool,
    _memory: PhantomData<&'a HostMemory>,
}

impl<'a> View<'a> {
    /// A tensor at an offset of a memory; `None` if it does not lie inside.
    pub(crate) fn new(memory: &'a HostMemory, offset: usize, desc: &'a TensorDesc) -> Option<View<'a>> {
        Some(View { start: memory.checked_ptr(offset, desc.extent())?, desc, panels: false, _memory: PhantomData })
    }

    /// The same tensor, packed into panels. It is contiguous, and `ne[1]` is a multiple of [`PANEL_ROWS`].
    pub(crate) fn with_panels(self) -> View<'a> {
        View { panels: true, ..self }
    }

    /// Whether the rows are packed into panels. Then only [`View::panel`] and [`View::load_row`] may read them, and no kernel
    /// writes them.
    pub(crate) fn is_packed(&self) -> bool {
        self.panels
    }

    /// The same memory from the same first byte on, with another description. `desc` must cover exactly the bytes of this
    /// view, or fewer: the overlap of operands was checked for these bytes.
    ///
    /// # Panics
    /// If it reaches beyond this view's extent: a bug in a kernel.
    pub(crate) fn with_desc<'b>(&self, desc: &'b TensorDesc) -> View<'b>
    where
        'a: 'b,
    {
        assert!(desc.extent() <= self.desc.extent(), "{desc:?} inside {:?}", self.desc);
        View { start: self.start, desc, panels: self.panels, _memory: PhantomData }
    }

    /// A part of the same memory, from byte `offset` on.
    ///
    /// # Panics
    /// If it reaches beyond this view's extent: a bug in a kernel.
    pub(crate) fn part<'b>(&self, offset: usize, desc: &'b TensorDesc) -> View<'b>
    where
        'a: 'b,
    {
        let end = offset.checked_add(desc.extent());
        assert!(!self.panels && end.is_some_and(|end| end <= self.desc.extent()), "{desc:?} inside {:?}", self.desc);
        // SAFETY: the offset is at most the extent, which lies inside the memory.
        View { start: unsafe { self.start.add(offset) }, desc, panels: false, _memory: PhantomData }
    }

    /// Whether both views begin at the same byte. If they are operands of a node that may work in place, they then are the
    /// same elements.
    pub(crate) fn starts_with(&self, other: &View<'_>) -> bool {
        std::ptr::eq(self.start, other.start)
    }

    /// Type, shape and strides.
    pub(crate) fn desc(&self) -> &'a TensorDesc {
        self.desc
    }

    /// Elements per dimension.
    pub(crate) fn ne(&self) -> [usize; 4] {
        self.desc.ne()
    }

    /// Address of element `i`, checked: `n` elements from it on along dimension 0 exist.
    ///
    /// # Panics
    /// If they do not exist, do not start and end at whole blocks, or are packed into panels: a bug in a kernel.
    fn element_ptr(&self, i: [usize; 4], n: usize) -> *mut u8 {
        assert!(!self.panels, "rows are packed into panels");
        self.element_ptr_unchecked_layout(i, n)
    }

    /// As [`View::element_ptr`], also for rows packed into panels.
    fn element_ptr_unchecked_layout(&self, i: [usize; 4], n: usize) -> *mut u8 {
        let (ne, nb, block) = (self.desc.ne(), self.desc.nb(), self.desc.dtype().block_len());
        assert!(
            n > 0 && i[0] <= ne[0] && n <= ne[0] - i[0] && i[1] < ne[1] && i[2] < ne[2] && i[3] < ne[3],
            "element {i:?} + {n} of {ne:?}"
        );
        assert!((i[0] | n) & (block - 1) == 0, "element {i:?} + {n} in blocks of {block}");
        #[cfg(test)]
        super::accesses::count(n);
        let first = self.desc.dtype().blocks(i[0]);
        // SAFETY: each index is below its count, so the offset is below the extent, which lies inside the memory.
        unsafe { self.start.add(first * nb[0] + i[1] * nb[1] + i[2] * nb[2] + i[3] * nb[3]) }
    }

    fn rows_dense(&self) -> bool {
        self.desc.rows_dense()
    }

    /// Reads `out.len()` elements from `i` on along dimension 0, converted to f32. Whole blocks only.
    ///
    /// # Panics
    /// As [`View::element_ptr`], or if the type has no conversion: a bug in a kernel, which `select` should have refused.
    pub(crate) fn load(&self, i: [usize; 4], out: &mut [f32]) {
        if out.is_empty() {
            return;
        }
        let (dtype, p) = (self.desc.dtype(), self.element_ptr(i, out.len()));
        if self.rows_dense() {
            if dtype == DType::F32 {
                // SAFETY: `element_ptr` has checked `out.len()` elements of 4 bytes; `out` is the kernel's own slice.
                unsafe { copy_row(p, out.as_mut_ptr().cast::<u8>(), out.len() * 4) };
                return;
            }
            let bytes = dtype.blocks(out.len()) * dtype.block_bytes();
            let convert = dequantiser(dtype).expect("a type that select has accepted");
            // SAFETY: `element_ptr` has checked these blocks; no thread writes them during this call (rules 2 and 3).
            convert(unsafe { std::slice::from_raw_parts(p, bytes) }, out);
        } else {
            // SAFETY: `element_ptr` has checked as many blocks, a stride apart, as `out` has space for.
            unsafe { gather(dtype, p, self.desc.nb()[0], out) };
        }
    }

    /// As [`View::load`], with elements that are `every` apart along dimension 0; for types without blocks.
    ///
    /// # Panics
    /// As [`View::load`], and for block types.
    pub(crate) fn load_every(&self, i: [usize; 4], every: usize, out: &mut [f32]) {
        let Some(last) = out.len().checked_sub(1) else { return };
        let dtype = self.desc.dtype();
        assert!(dtype.block_len() == 1, "elements of {dtype} have no stride");
        if every == 1 {
            return self.load(i, out);
        }
        let p = self.element_ptr(i, last.checked_mul(every).map_or(usize::MAX, |span| span.saturating_add(1)));
        // SAFETY: `element_ptr` has checked the range from the first to the last of these elements.
        unsafe { gather(dtype, p, every * self.desc.nb()[0], out) };
    }

    /// `buffer.len()` elements from `i` on along dimension 0 as f32: a slice of the tensor if it is dense and aligned F32,
    /// otherwise converted into `buffer`. A kernel that works in place must finish with the slice before it writes there, and
    /// must not pass it to a function that writes there.
    ///
    /// # Panics
    /// As [`View::load`].
    pub(crate) fn fetch<'b>(&self, i: [usize; 4], buffer: &'b mut [f32]) -> &'b [f32]
    where
        'a: 'b,
    {
        if self.desc.dtype() == DType::F32 && self.rows_dense() && !buffer.is_empty() {
            let p = self.element_ptr(i, buffer.len()).cast::<f32>();
            if p.is_aligned() {
                // SAFETY: `element_ptr` has checked the elements, which are dense and aligned and live for 'a. No other thread
                // writes them while this thread reads (rules 2 and 3), and this thread writes only afterwards.
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
        let (dtype, p) = (self.desc.dtype(), self.element_ptr(i, values.len()));
        if self.rows_dense() && dtype == DType::F32 {
            // SAFETY: `element_ptr` has checked the range; `values` is the kernel's own slice.
            unsafe { copy_row(values.as_ptr().cast::<u8>(), p, values.len() * 4) };
            return;
        }
        let convert = quantiser(dtype).expect("a type that select has accepted");
        if self.rows_dense() {
            let bytes = dtype.blocks(values.len()) * dtype.block_bytes();
            // SAFETY: `element_ptr` has checked these blocks, which are writable (rule 4), and only this thread touches
            // them (rules 2 and 3).
            convert(values, unsafe { std::slice::from_raw_parts_mut(p, bytes) });
        } else {
            // SAFETY: `element_ptr` has checked as many blocks, a stride apart, as there are values for; only this thread
            // touches them.
            unsafe { scatter(dtype, values, p, self.desc.nb()[0]) };
        }
    }

    /// As [`View::store`], to elements that are `every` apart along dimension 0; for types without blocks.
    ///
    /// # Panics
    /// As [`View::store`], and for block types.
    pub(crate) fn store_every(&self, i: [usize; 4], every: usize, values: &[f32]) {
        let Some(last) = values.len().checked_sub(1) else { return };
        let dtype = self.desc.dtype();
        assert!(dtype.block_len() == 1, "elements of {dtype} have no stride");
        if every == 1 {
            return self.store(i, values);
        }
        let p = self.element_ptr(i, last.checked_mul(every).map_or(usize::MAX, |span| span.saturating_add(1)));
        // SAFETY: `element_ptr` has checked the range from the first to the last of these elements; only this thread touches
        // them.
        unsafe { scatter(dtype, values, p, every * self.desc.nb()[0]) };
    }

    /// One element of an I32 or I64 tensor: an index, a position.
    ///
    /// # Panics
    /// For other types, and as [`View::element_ptr`].
    pub(crate) fn index(&self, i: [usize; 4]) -> i64 {
        let mut one = [0];
        self.indices(i, &mut one);
        one[0]
    }

    /// `out.len()` elements of an I32 or I64 tensor from `i` on along dimension 0.
    ///
    /// # Panics
    /// For other types, and as [`View::element_ptr`].
    pub(crate) fn indices(&self, i: [usize; 4], out: &mut [i64]) {
        if out.is_empty() {
            return;
        }
        let (p, step) = (self.element_ptr(i, out.len()), self.desc.nb()[0]);
        for (k, out) in out.iter_mut().enumerate() {
            *out = match self.desc.dtype() {
                // SAFETY: `element_ptr` has checked all elements, a stride apart; the reads are unaligned.
                DType::I32 => i64::from(unsafe { p.add(k * step).cast::<i32>().read_unaligned() }),
                // SAFETY: as above.
                DType::I64 => unsafe { p.add(k * step).cast::<i64>().read_unaligned() },
                other => unreachable!("an index of type {other}"),
            };
        }
    }

    /// Scatter: writes each of `values` to its row of a tensor with one element per row, in order. `T` stands for an element.
    ///
    /// # Panics
    /// If elements have another size than `T`, and as [`View::element_ptr`].
    pub(crate) fn scatter<T: bytemuck::NoUninit>(&self, [i2, i3]: [usize; 2], rows: &[usize], values: &[T]) {
        assert!(self.desc.ne()[0] == 1 && size_of::<T>() == self.desc.dtype().block_bytes(), "one element per row");
        let Some(&last) = rows.iter().max() else { return };
        self.element_ptr([0, last, i2, i3], 1);
        let (first, step) = (self.element_ptr([0, 0, i2, i3], 1), self.desc.nb()[1]);
        for (&row, &value) in rows.iter().zip(values) {
            // SAFETY: the last row is checked, and no other row lies after it; only this thread touches these elements; the
            // write is unaligned.
            unsafe { first.add(row * step).cast::<T>().write_unaligned(value) };
        }
    }

    /// Sets one element of an I32 tensor.
    ///
    /// # Panics
    /// For other types, and as [`View::element_ptr`].
    pub(crate) fn set_i32(&self, i: [usize; 4], value: i32) {
        assert_eq!(self.desc.dtype(), DType::I32, "an I32 destination");
        // SAFETY: `element_ptr` has checked the element; only this thread touches it.
        unsafe { self.element_ptr(i, 1).cast::<i32>().write_unaligned(value) };
    }

    /// Copies `n` elements of the same type from `from` of `src` to `i` of this tensor, along dimension 0 of both.
    ///
    /// # Panics
    /// If the types differ, and as [`View::element_ptr`].
    pub(crate) fn copy(&self, i: [usize; 4], src: &View<'_>, from: [usize; 4], n: usize) {
        let dtype = self.desc.dtype();
        assert_eq!(dtype, src.desc.dtype(), "types of a raw copy");
        if n == 0 {
            return;
        }
        let (to, from) = (self.element_ptr(i, n), src.element_ptr(from, n));
        let (blocks, size) = (dtype.blocks(n), dtype.block_bytes());
        if self.rows_dense() && src.rows_dense() {
            // SAFETY: both ranges are checked; `copy` allows them to be identical.
            unsafe { std::ptr::copy(from, to, blocks * size) };
        } else {
            let (d, s) = (self.desc.nb()[0], src.desc.nb()[0]);
            // SAFETY: block k of either checked range lies k strides further.
            unsafe { move_blocks(from, s, to, d, size, blocks) };
        }
    }

    /// Reads `out.len()` blocks of a dense row from element `i` on without conversion. `T` stands for one block.
    ///
    /// # Panics
    /// If blocks have another size than `T`, if rows are not dense, and as [`View::element_ptr`].
    pub(crate) fn load_raw<T: bytemuck::AnyBitPattern>(&self, i: [usize; 4], out: &mut [T]) {
        assert!(
            self.rows_dense() && size_of::<T>() == self.desc.dtype().block_bytes(),
            "dense rows of {} bytes",
            size_of::<T>()
        );
        if !out.is_empty() {
            let p = self.element_ptr(i, out.len() * self.desc.dtype().block_len());
            // SAFETY: `element_ptr` has checked as many blocks as `out` has, of equal size; any bytes are a valid `T`.
            unsafe { std::ptr::copy_nonoverlapping(p, out.as_mut_ptr().cast::<u8>(), size_of_val(out)) };
        }
    }

    /// Writes blocks of a dense row from element `i` on without conversion; the inverse of [`View::load_raw`].
    ///
    /// # Panics
    /// As [`View::load_raw`].
    pub(crate) fn store_raw<T: bytemuck::NoUninit>(&self, i: [usize; 4], values: &[T]) {
        assert!(
            self.rows_dense() && size_of::<T>() == self.desc.dtype().block_bytes(),
            "dense rows of {} bytes",
            size_of::<T>()
        );
        if !values.is_empty() {
            let p = self.element_ptr(i, values.len() * self.desc.dtype().block_len());
            // SAFETY: `element_ptr` has checked as many blocks as `values` has, of equal size; only this thread touches them.
            unsafe { std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), p, size_of_val(values)) };
        }
    }

    /// `count` rows of F32 or F16 from row `i` on, in place; `None` for other types. Only for sources of ops that never work
    /// in place.
    ///
    /// # Panics
    /// If the rows are not dense, if `count` is 0, and as [`View::element_ptr`].
    pub(crate) fn rows(&self, i: [usize; 3], count: usize) -> Option<FloatRows<'a>> {
        assert!(self.rows_dense() && count > 0, "dense rows");
        let half = match self.desc.dtype() {
            DType::F32 => false,
            DType::F16 => true,
            _ => return None,
        };
        let (start, width) = (self.element_ptr([0, i[0], i[1], i[2]], self.desc.ne()[0]), self.desc.ne()[0]);
        self.element_ptr([0, i[0] + count - 1, i[1], i[2]], width);
        // SAFETY: the first and the last row are checked, and the others lie between them, a stride apart. The memory lives
        // for 'a, and no thread writes a source of this node before the barrier that ends it (rule 2).
        Some(unsafe { FloatRows::new(start, self.desc.nb()[1], count, width, half) })
    }

    /// The bytes of a dense row. Only for sources of ops that never work in place.
    ///
    /// # Panics
    /// If the rows are not dense, and as [`View::element_ptr`].
    pub(crate) fn row(&self, i: [usize; 3]) -> &'a [u8] {
        assert!(self.rows_dense(), "dense rows");
        let p = self.element_ptr([0, i[0], i[1], i[2]], self.desc.ne()[0]);
        // SAFETY: the row is checked and dense. The memory lives for 'a, and no thread writes a source of this node before the
        // barrier that ends it (rule 2).
        unsafe { std::slice::from_raw_parts(p, self.desc.row_bytes()) }
    }

    /// The bytes of `out.len()` dense rows from row `i` on, each as [`View::row`].
    ///
    /// # Panics
    /// As [`View::row`], for any of the rows.
    pub(crate) fn row_slices(&self, i: [usize; 3], out: &mut [&'a [u8]]) {
        let Some(last) = out.len().checked_sub(1) else { return };
        assert!(self.rows_dense() && last < self.desc.ne()[1] - i[0], "dense rows {i:?} + {last}");
        let (first, bytes, step) =
            (self.element_ptr([0, i[0], i[1], i[2]], self.desc.ne()[0]), self.desc.row_bytes(), self.desc.nb()[1]);
        for (r, out) in out.iter_mut().enumerate() {
            // SAFETY: `element_ptr` has checked the first row, the assertion the last row; otherwise as in `row`.
            *out = unsafe { std::slice::from_raw_parts(first.add(r * step), bytes) };
        }
    }

    /// The panel of rows `i[0]` to `i[0] + 15` of a packed tensor: as many bytes as sixteen rows.
    ///
    /// # Panics
    /// If the tensor is not packed, if `i[0]` is no multiple of 16, and as [`View::element_ptr`].
    pub(crate) fn panel(&self, i: [usize; 3]) -> &'a [u8] {
        assert!(self.panels && i[0].is_multiple_of(PANEL_ROWS), "a panel from row {} on", i[0]);
        let p = self.element_ptr_unchecked_layout([0, i[0], i[1], i[2]], self.desc.ne()[0]);
        // SAFETY: the tensor is packed and `ne[1]` is a multiple of 16, so sixteen contiguous rows from `i[0]` on exist. No
        // thread writes a packed tensor: a conversion waits for the layout lock, which the program holds until it ends.
        unsafe { std::slice::from_raw_parts(p, PANEL_ROWS * self.desc.row_bytes()) }
    }

    /// Copies the bytes of a row to `out`, from a panel or from the dense row.
    ///
    /// # Panics
    /// If `out` has another length, and as [`View::row`].
    pub(crate) fn load_row(&self, i: [usize; 3], out: &mut [u8]) {
        if self.panels {
            let first = i[0] / PANEL_ROWS * PANEL_ROWS;
            unpack_row(self.desc.dtype(), self.panel([first, i[1], i[2]]), i[0] - first, out);
        } else {
            out.copy_from_slice(self.row(i));
        }
    }
}

/// Size of the buffer in which strided blocks are gathered for conversion, in bytes (the largest block has 292).
const GATHER_BYTES: usize = 1024;

/// Reads blocks of `dtype` that are `step` bytes apart from `p` on, converted to f32, until `out` is full.
///
/// # Safety
/// All these blocks lie inside memory that this thread may read.
unsafe fn gather(dtype: DType, p: *const u8, step: usize, out: &mut [f32]) {
    if dtype == DType::F32 {
        for (k, out) in out.iter_mut().enumerate() {
            // SAFETY: as the caller promises; the read is unaligned.
            *out = unsafe { p.add(k * step).cast::<f32>().read_unaligned() };
        }
        return;
    }
    let (block, size) = (dtype.block_len(), dtype.block_bytes());
    let convert = dequantiser(dtype).expect("a type that select has accepted");
    let mut packed = [0; GATHER_BYTES];
    let most = GATHER_BYTES / size;
    for (k, out) in out.chunks_mut(most * block).enumerate() {
        let blocks = out.len() / block;
        // SAFETY: these blocks start `k * most` strides further; `packed` has space for `most`.
        unsafe { move_blocks(p.add(k * most * step), step, packed.as_mut_ptr(), size, size, blocks) };
        convert(&packed[..blocks * size], out);
    }
}

/// Writes f32 values, converted to blocks of `dtype` that are `step` bytes apart from `p` on.
///
/// # Safety
/// All these blocks lie inside memory that this thread alone may write.
unsafe fn scatter(dtype: DType, values: &[f32], p: *mut u8, step: usize) {
    if dtype == DType::F32 {
        for (k, &value) in values.iter().enumerate() {
            // SAFETY: as the caller promises; the write is unaligned.
            unsafe { p.add(k * step).cast::<f32>().write_unaligned(value) };
        }
        return;
    }
    let (block, size) = (dtype.block_len(), dtype.block_bytes());
    let convert = quantiser(dtype).expect("a type that select has accepted");
    let mut packed = [0; GATHER_BYTES];
    let most = GATHER_BYTES / size;
    for (k, values) in values.chunks(most * block).enumerate() {
        let blocks = values.len() / block;
        convert(values, &mut packed[..blocks * size]);
        // SAFETY: these blocks start `k * most` strides further.
        unsafe { move_blocks(packed.as_ptr(), size, p.add(k * most * step), step, size, blocks) };
    }
}

/// Copies `count` blocks of `size` bytes; `s` and `d` are the strides of source and destination in bytes.
///
/// # Safety
/// All blocks lie inside memory that this thread may read and write. Source and destination are the same blocks or share no
/// byte.
unsafe fn move_blocks(from: *const u8, s: usize, to: *mut u8, d: usize, size: usize, count: usize) {
    /// With a size known at compile time each copy is one load and one store.
    unsafe fn copy_blocks_of<const N: usize>(from: *const u8, s: usize, to: *mut u8, d: usize, count: usize) {
        for k in 0..count {
            // SAFETY: as the caller promises; byte arrays have no alignment.
            unsafe { to.add(k * d).cast::<[u8; N]>().write(from.add(k * s).cast::<[u8; N]>().read()) };
        }
    }
    // SAFETY: the caller's promise holds for each of these.
    unsafe {
        match size {
            1 => copy_blocks_of::<1>(from, s, to, d, count),
            2 => copy_blocks_of::<2>(from, s, to, d, count),
            4 => copy_blocks_of::<4>(from, s, to, d, count),
            8 => copy_blocks_of::<8>(from, s, to, d, count),
            _ => {
                for k in 0..count {
                    std::ptr::copy(from.add(k * s), to.add(k * d), size);
                }
            }
        }
    }
}

/// Copies bytes in pieces too small for a memcpy by `rep movsb`. On Zen `rep movsb` runs at 2 GB/s, a twentieth of the usual
/// rate, if source and destination have the same offset in their pages, as rows of 4096 bytes and page-aligned scratch have.
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`].
unsafe fn copy_row(from: *const u8, to: *mut u8, bytes: usize) {
    const MEMCPY_BYTES: usize = 2048;
    let mut done = 0;
    while done < bytes {
        let n = MEMCPY_BYTES.min(bytes - done);
        // SAFETY: the part is within the ranges that the caller passes.
        unsafe { std::ptr::copy_nonoverlapping(from.add(done), to.add(done), n) };
        done += n;
    }
}

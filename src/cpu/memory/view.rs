//! Tensors as kernels see them.

use super::HostMemory;
use crate::cpu::simd::vec::Rows;
use crate::cpu::strip::{STRIP, unpack_row};
use crate::tensor::quant::{dequantiser, quantiser};
use crate::tensor::{DType, TensorDesc};
use std::marker::PhantomData;

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
        assert!((i[0] | n) & (block - 1) == 0, "element {i:?} + {n} in blocks of {block}");
        let first = self.desc.dtype().blocks(i[0]);
        // SAFETY: each index is below its count, so the offset is below the extent, which lies inside the memory.
        unsafe { self.start.add(first * nb[0] + i[1] * nb[1] + i[2] * nb[2] + i[3] * nb[3]) }
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
            let bytes = dtype.blocks(out.len()) * dtype.block_bytes();
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
            let bytes = dtype.blocks(values.len()) * dtype.block_bytes();
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
        let mut one = [0];
        self.indices(i, &mut one);
        one[0]
    }

    /// As many elements of an I32 or I64 tensor as `out` has, from `i` on along dimension 0.
    ///
    /// # Panics
    /// For other types, and as [`View::at`].
    pub(crate) fn indices(&self, i: [usize; 4], out: &mut [i64]) {
        if out.is_empty() {
            return;
        }
        let (p, step) = (self.at(i, out.len()), self.desc.nb()[0]);
        for (k, out) in out.iter_mut().enumerate() {
            *out = match self.desc.dtype() {
                // SAFETY: `at` has checked all of them, a stride apart; they may lie at any address.
                DType::I32 => i64::from(unsafe { p.add(k * step).cast::<i32>().read_unaligned() }),
                // SAFETY: as above.
                DType::I64 => unsafe { p.add(k * step).cast::<i64>().read_unaligned() },
                other => unreachable!("an index of type {other}"),
            };
        }
    }

    /// Writes each of `values` into its row of a tensor of one element a row, in order. `T` stands for an element.
    ///
    /// # Panics
    /// When elements have another size than `T`, and as [`View::at`].
    pub(crate) fn scatter<T: bytemuck::NoUninit>(&self, [i2, i3]: [usize; 2], rows: &[usize], values: &[T]) {
        assert!(self.desc.ne()[0] == 1 && size_of::<T>() == self.desc.dtype().block_bytes(), "one element a row");
        let Some(&last) = rows.iter().max() else { return };
        self.at([0, last, i2, i3], 1);
        let (first, step) = (self.at([0, 0, i2, i3], 1), self.desc.nb()[1]);
        for (&row, &value) in rows.iter().zip(values) {
            // SAFETY: no row lies behind the last, which is checked; this thread alone touches these elements, at any address.
            unsafe { first.add(row * step).cast::<T>().write_unaligned(value) };
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
        let (blocks, size) = (dtype.blocks(n), dtype.block_bytes());
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

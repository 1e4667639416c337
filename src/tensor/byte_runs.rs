//! Slices of tensors as two-dimensional ranges of bytes, for uploads and loads of parts of a weight.

use super::desc::{DIMS, TensorDesc};
use std::ops::Range;
use thiserror::Error;

/// A two-dimensional range of bytes of a tensor: `count` runs of `run_bytes` bytes each. The first run starts at `offset`, and
/// each further one `stride` bytes after the start of the run before. The runs do not overlap, and all offsets fit into 64
/// bits; both hold by construction. A range without runs, or with runs of 0 bytes, is empty.
///
/// [`ByteRuns::of_slice`] gives the range of a slice: a range of rows is one run, the same blocks of each row are one run per
/// row. The bytes of the runs, one run after the other, are the slice as a contiguous tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ByteRuns {
    offset: u64,
    run_bytes: u64,
    stride: u64,
    count: u64,
}

/// Numbers that are no range of bytes, or a range or slice that the tensor does not have.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ByteRunsError {
    /// The stride is below the length of a run.
    #[error("runs of {run_bytes} bytes at a stride of {stride} bytes overlap")]
    Overlap {
        /// Length of a run in bytes.
        run_bytes: u64,
        /// Distance between the starts of two runs, in bytes.
        stride: u64,
    },
    /// The end of the last run exceeds 64 bits.
    #[error(
        "{count} runs of {run_bytes} bytes from byte {offset}, at a stride of {stride} bytes, end beyond 2^64 bytes"
    )]
    TooLarge {
        /// Offset of the first run in bytes.
        offset: u64,
        /// Length of a run in bytes.
        run_bytes: u64,
        /// Distance between the starts of two runs, in bytes.
        stride: u64,
        /// Number of runs.
        count: u64,
    },
    /// The last run ends after the end of the tensor.
    #[error("the runs end at byte {end} of a tensor of {bytes} bytes")]
    OutOfBounds {
        /// End of the last run in bytes.
        end: u64,
        /// Length of the tensor in bytes.
        bytes: u64,
    },
    /// More bytes were requested than the runs have.
    #[error("all bytes of the runs are read already")]
    Exhausted,
    /// The tensor has gaps or is permuted.
    #[error("slices are taken of contiguous tensors only")]
    NotContiguous,
    /// Elements that are not in the tensor, or a part of a block.
    #[error(
        "elements {start} to {end} of dimension {dim} are no slice: the dimension has {ne} elements in blocks of {block}"
    )]
    NoSuchSlice {
        /// The dimension, 0 to 3.
        dim: usize,
        /// First element.
        start: usize,
        /// End of the elements.
        end: usize,
        /// Elements of the dimension.
        ne: usize,
        /// Elements of a block; 1 in the dimensions 1 to 3.
        block: usize,
    },
    /// The slice cuts three or more dimensions.
    #[error(
        "the slice is no two-dimensional range of bytes: take one slice per index of the slowest dimension that it cuts"
    )]
    NotTwoDimensional,
}

impl ByteRuns {
    /// A range of `count` runs of `run_bytes` bytes, the first at `offset`, at a stride of `stride` bytes. The stride is at
    /// least `run_bytes`, also of a single run.
    ///
    /// # Errors
    /// [`ByteRunsError::Overlap`], [`ByteRunsError::TooLarge`].
    pub fn new(offset: u64, run_bytes: u64, stride: u64, count: u64) -> Result<ByteRuns, ByteRunsError> {
        if stride < run_bytes {
            return Err(ByteRunsError::Overlap { run_bytes, stride });
        }
        // At least the end of the last run, and so at least the sum of the runs.
        let end = stride.checked_mul(count).and_then(|bytes| bytes.checked_add(offset));
        match end {
            Some(_) => Ok(ByteRuns { offset, run_bytes, stride, count }),
            None => Err(ByteRunsError::TooLarge { offset, run_bytes, stride, count }),
        }
    }

    /// All bytes of a tensor of `bytes` bytes: one run.
    pub const fn whole(bytes: u64) -> ByteRuns {
        ByteRuns { offset: 0, run_bytes: bytes, stride: bytes, count: if bytes == 0 { 0 } else { 1 } }
    }

    /// The range of a slice of a contiguous tensor: of each dimension, fastest first, the elements in a range. In dimension 0
    /// the range consists of whole blocks of the type.
    ///
    /// A slice that cuts one dimension is always such a range; so are rows and blocks of one matrix. The tensor of the slice
    /// has the same type, and as `ne` the lengths of the ranges.
    ///
    /// # Errors
    /// [`ByteRunsError::NotContiguous`], [`ByteRunsError::NoSuchSlice`]; [`ByteRunsError::NotTwoDimensional`], for example for
    /// some rows and some blocks of several matrices.
    pub fn of_slice(tensor: &TensorDesc, slice: &[Range<usize>; DIMS]) -> Result<ByteRuns, ByteRunsError> {
        if !tensor.is_contiguous() {
            return Err(ByteRunsError::NotContiguous);
        }
        let (ne, dtype) = (tensor.ne(), tensor.dtype());
        let block = |dim| if dim == 0 { dtype.block_len() } else { 1 };
        for (dim, (&Range { start, end }, ne)) in slice.iter().zip(ne).enumerate() {
            let block = block(dim);
            if start > end || end > ne || !start.is_multiple_of(block) || !end.is_multiple_of(block) {
                return Err(ByteRunsError::NoSuchSlice { dim, start, end, ne, block });
            }
        }
        if slice.iter().any(Range::is_empty) {
            return Ok(ByteRuns::whole(0));
        }
        // One run, and a loop over runs from the first dimension that the run cannot cover. Neither exceeds the extent of the
        // tensor, which is not empty here, so nothing overflows.
        let (mut offset, mut run_bytes, mut stride, mut count) = (0, dtype.block_bytes(), None, 1);
        let mut dim_stride = dtype.block_bytes();
        for (dim, (&Range { start, end }, ne)) in slice.iter().zip(ne).enumerate() {
            let len = (end - start) / block(dim);
            offset += start / block(dim) * dim_stride;
            match stride {
                _ if len == 1 => {}
                None if run_bytes == dim_stride => run_bytes *= len,
                None => (stride, count) = (Some(dim_stride), len),
                Some(stride) if stride * count == dim_stride => count *= len,
                Some(_) => return Err(ByteRunsError::NotTwoDimensional),
            }
            dim_stride *= ne / block(dim);
        }
        let [offset, run_bytes, stride, count] =
            [offset, run_bytes, stride.unwrap_or(run_bytes), count].map(|bytes| bytes as u64);
        ByteRuns::new(offset, run_bytes, stride, count)
    }

    /// Offset of the first run in bytes.
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Length of each run in bytes.
    pub const fn run_bytes(&self) -> u64 {
        self.run_bytes
    }

    /// Distance between the starts of two runs, in bytes.
    pub const fn stride(&self) -> u64 {
        self.stride
    }

    /// Number of runs.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Whether the range has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.bytes() == 0
    }

    /// Bytes of all runs together.
    pub const fn bytes(&self) -> u64 {
        self.run_bytes * self.count // no overflow: at most `stride * count`
    }

    /// End of the last run in bytes; 0 for an empty range.
    pub const fn end(&self) -> u64 {
        // No overflow: `new` has computed `offset + stride * count`.
        if self.is_empty() { 0 } else { self.offset + self.stride * (self.count - 1) + self.run_bytes }
    }

    /// Checks that all runs lie in a tensor of `bytes` bytes.
    ///
    /// # Errors
    /// [`ByteRunsError::OutOfBounds`].
    pub fn check_bounds(&self, bytes: u64) -> Result<(), ByteRunsError> {
        let end = self.end();
        if end <= bytes { Ok(()) } else { Err(ByteRunsError::OutOfBounds { end, bytes }) }
    }

    /// The ranges of the runs, in order and not empty. Runs without gaps between them are one range.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let mut cursor = RunCursor::new(self);
        std::iter::from_fn(move || cursor.take(u64::MAX))
    }

    /// The bytes of the runs in `tensor`, the bytes of a whole tensor: a slice per range of [`ByteRuns::ranges`].
    ///
    /// # Errors
    /// [`ByteRunsError::OutOfBounds`].
    pub fn slices<'a>(&self, tensor: &'a [u8]) -> Result<impl Iterator<Item = &'a [u8]> + use<'a>, ByteRunsError> {
        self.check_bounds(tensor.len() as u64)?;
        // In bounds, so none is left out, and the offsets fit into a usize.
        Ok(self.ranges().filter_map(|range| tensor.get(range.start as usize..range.end as usize)))
    }

    /// Reads the runs of `tensor`, the bytes of a whole tensor, one run after the other. For an upload of a slice of a mapped
    /// file: `queue.upload_from(region, Some(&slice), |dst| reader.read(dst))`.
    ///
    /// # Errors
    /// [`ByteRunsError::OutOfBounds`].
    pub fn reader<'a>(&self, tensor: &'a [u8]) -> Result<RunReader<'a>, ByteRunsError> {
        self.check_bounds(tensor.len() as u64)?;
        Ok(RunReader { tensor, cursor: RunCursor::new(self) })
    }
}

/// Reads the bytes of [`ByteRuns`] in order.
#[derive(Debug)]
pub struct RunReader<'a> {
    tensor: &'a [u8],
    cursor: RunCursor,
}

impl RunReader<'_> {
    /// Fills `dst` with the next bytes.
    ///
    /// # Errors
    /// [`ByteRunsError::Exhausted`] if fewer bytes are left. What `dst` then holds is unspecified.
    pub fn read(&mut self, mut dst: &mut [u8]) -> Result<(), ByteRunsError> {
        while !dst.is_empty() {
            let range = self.cursor.take(dst.len() as u64).ok_or(ByteRunsError::Exhausted)?;
            // In bounds, so the offsets fit into a usize.
            let run = self.tensor.get(range.start as usize..range.end as usize).ok_or(ByteRunsError::Exhausted)?;
            let (now, later) = dst.split_at_mut(run.len());
            now.copy_from_slice(run);
            dst = later;
        }
        Ok(())
    }
}

/// A position in the bytes of [`ByteRuns`]. Runs without gaps between them count as one.
#[derive(Clone, Debug)]
pub(crate) struct RunCursor {
    /// Bytes of the current run that are left.
    run: Range<u64>,
    run_bytes: u64,
    /// Distance from the end of a run to the start of the next one.
    gap: u64,
    /// Number of runs after the current one.
    later_runs: u64,
}

impl RunCursor {
    /// A cursor at the first byte.
    pub(crate) fn new(runs: &ByteRuns) -> RunCursor {
        let &ByteRuns { offset, run_bytes, stride, count } = runs;
        let (run_bytes, count) = if stride == run_bytes { (runs.bytes(), count.min(1)) } else { (run_bytes, count) };
        let first = if runs.is_empty() { 0 } else { run_bytes };
        let later_runs = if runs.is_empty() { 0 } else { count - 1 };
        // A single run has no gap. The end of the last run fits, so all of these offsets do.
        RunCursor { run: offset..offset + first, run_bytes, gap: stride.saturating_sub(run_bytes), later_runs }
    }

    /// The next bytes that lie one after the other; `None` at the end.
    pub(crate) fn peek(&mut self) -> Option<Range<u64>> {
        if self.run.is_empty() {
            self.later_runs = self.later_runs.checked_sub(1)?;
            let start = self.run.end + self.gap;
            self.run = start..start + self.run_bytes;
        }
        Some(self.run.clone())
    }

    /// As [`RunCursor::peek`], but at most `max` bytes, after which the cursor then is.
    pub(crate) fn take(&mut self, max: u64) -> Option<Range<u64>> {
        let Range { start, end } = self.peek()?;
        self.run.start = end.min(start.saturating_add(max));
        Some(start..self.run.start)
    }
}

#[cfg(test)]
mod tests;

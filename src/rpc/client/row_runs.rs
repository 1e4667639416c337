//! Reads of evenly spaced regions. On servers of 8.0 one GET_TENSOR_2D replaces one GET_TENSOR per region.

use super::device::{byte_range_record, remote_buffer};
use super::ggml_protocol::MAX_RECORD_BYTES;
use super::remote_read::ReadCompleter;
use crate::device::{DeviceError, Region};
use crate::rpc::wire::{GetTensor, GetTensor2d, Request};

/// Regions that one request reads: rows of equal length at an equal stride in one buffer. Most runs have one row.
pub(super) struct RowRun {
    first: Region,
    /// Distance from one row to the next, in bytes. Rows do not overlap. 0 for a single row.
    stride: u64,
    /// The completer of each row's pending read.
    completers: Vec<ReadCompleter>,
}

impl RowRun {
    /// A run of one row.
    pub(super) fn new(first: Region, completer: ReadCompleter) -> RowRun {
        RowRun { first, stride: 0, completers: vec![completer] }
    }

    /// Splits the parts of a download into runs, in order. `has_rows`: the server has GET_TENSOR_2D; otherwise each run has one
    /// row.
    pub(super) fn split(parts: Vec<(Region, ReadCompleter)>, has_rows: bool) -> Vec<RowRun> {
        let mut runs: Vec<RowRun> = Vec::new();
        for (region, completer) in parts {
            match runs.last_mut().filter(|run| has_rows && run.can_append(&region)) {
                Some(run) => run.append(&region, completer),
                None => runs.push(RowRun::new(region, completer)),
            }
        }
        runs
    }

    /// Length of a row in bytes.
    fn row_bytes(&self) -> u64 {
        self.first.bytes()
    }

    fn rows(&self) -> u64 {
        self.completers.len() as u64
    }

    /// Bytes of the reply.
    pub(super) fn bytes(&self) -> u64 {
        self.rows() * self.row_bytes()
    }

    /// Bytes from the first row's start to the last row's end.
    fn extent(&self) -> u64 {
        (self.rows() - 1) * self.stride + self.row_bytes()
    }

    fn can_append(&self, next: &Region) -> bool {
        let same_form = next.buffer().id() == self.first.buffer().id() && next.bytes() == self.row_bytes();
        let stride = next.offset().checked_sub(self.first.offset()).map(|distance| distance / self.rows());
        same_form
            && stride.is_some_and(|stride| {
                let expected = if self.rows() == 1 { stride.max(self.row_bytes()) } else { self.stride };
                stride == expected
                    && self.first.offset() + self.rows() * stride == next.offset()
                    && self.rows() * stride + self.row_bytes() <= MAX_RECORD_BYTES
            })
    }

    fn append(&mut self, next: &Region, completer: ReadCompleter) {
        self.stride = (next.offset() - self.first.offset()) / self.rows();
        self.completers.push(completer);
    }

    /// The request that reads the run.
    pub(super) fn request(&self) -> Result<Request<'static>, DeviceError> {
        let tensor = byte_range_record(remote_buffer(&self.first)?, self.first.offset(), self.extent());
        let (offset, size) = (0, self.row_bytes());
        Ok(match self.rows() {
            1 => Request::GetTensor(GetTensor { tensor, offset, size }),
            n_copies => Request::GetTensor2d(GetTensor2d { tensor, offset, size, n_copies, stride: self.stride }),
        })
    }

    /// The region of the first row and the pending reads. The sender drops the region once the request is sent: earlier, the
    /// buffer could be freed before the read; later, a buffer that the caller has dropped would stay allocated until the reply.
    pub(super) fn into_parts(self) -> (Region, RowCompleters) {
        let row_bytes = self.row_bytes() as usize;
        (self.first, RowCompleters { row_bytes, completers: self.completers })
    }

    /// Completes every pending read with an error.
    pub(super) fn fail(self, error: &DeviceError) {
        self.into_parts().1.complete(Err(error.clone()));
    }
}

/// The pending reads of a run whose request is sent.
pub(super) struct RowCompleters {
    /// Length of a row, not 0.
    row_bytes: usize,
    completers: Vec<ReadCompleter>,
}

impl RowCompleters {
    /// Completes every pending read: with its row of `reply`, or with the error.
    pub(super) fn complete(mut self, reply: Result<Vec<u8>, DeviceError>) {
        let Some(last) = self.completers.pop() else { return };
        match reply {
            // A single row: the reply's memory is passed on.
            Ok(bytes) if self.completers.is_empty() => last.complete(Ok(bytes)),
            Ok(bytes) => {
                let rows = bytes.chunks(self.row_bytes);
                let completers = self.completers.into_iter().chain([last]);
                completers.zip(rows).for_each(|(completer, row)| completer.complete(Ok(row.to_vec())));
            }
            Err(error) => {
                self.completers.into_iter().for_each(|completer| completer.complete(Err(error.clone())));
                last.complete(Err(error));
            }
        }
    }
}

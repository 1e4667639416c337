//! SET_TENSOR_2D and GET_TENSOR_2D of protocol 8.0: transfers of rows of equal length, at a stride in the tensor and packed in
//! the message. Clients send them for weights that a tensor split cuts along rows, and for outputs that it splits.

use std::time::Instant;

use super::error::GgmlError;
use super::session::GgmlSession;
use crate::device::{Region, UploadSource};
use crate::rpc::server::client_connection::BodyBuffer;
use crate::rpc::server::counters::DataSource;
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::server::session::handle_table::LocatedTensor;
use crate::rpc::wire::{GetTensor2d, SET_TENSOR_2D_HEAD, SetTensor2dHead};

/// Bytes of rows that are held on the host at a time.
const CHUNK_BYTES: u64 = 1 << 20;

/// Maximum number of rows whose downloads are under way at a time.
const MAX_PENDING_ROWS: u64 = 1024;

/// Rows of a tensor. All of them lie inside of the tensor's bytes and its buffer.
struct Rows<'a> {
    tensor: LocatedTensor<'a>,
    offset: u64,
    /// Length of a row in bytes, not 0.
    size: u64,
    /// Number of rows, not 0.
    count: u64,
    stride: u64,
}

impl<'a> Rows<'a> {
    /// # Errors
    /// [`GgmlError`] if there is no row or no byte in a row, a length overflows, or a row reaches past the tensor.
    fn new(
        tensor: LocatedTensor<'a>,
        offset: u64,
        size: u64,
        count: u64,
        stride: u64,
    ) -> Result<Rows<'a>, SessionError> {
        if size == 0 || count == 0 {
            return Err(GgmlError::NoRows { size, count }.into());
        }
        let extent = tensor.desc.extent() as u64;
        let end = stride.checked_mul(count - 1).and_then(|last| last.checked_add(size)?.checked_add(offset));
        let total = size.checked_mul(count).filter(|&total| isize::try_from(total).is_ok());
        match (end, total) {
            (Some(end), Some(_)) if end <= extent => Ok(Rows { tensor, offset, size, count, stride }),
            _ => Err(GgmlError::RowsOutsideTensor { offset, size, count, stride, extent }.into()),
        }
    }

    /// Bytes of all rows together.
    fn total(&self) -> u64 {
        self.size * self.count
    }

    /// The row at an index below `count`.
    fn row(&self, index: u64) -> Result<Region, SessionError> {
        Ok(self.tensor.region(self.offset + index * self.stride, self.size)?)
    }

    /// The bytes of all rows, if they lie one after the other in the tensor too.
    fn contiguous(&self) -> Result<Option<Region>, SessionError> {
        let packed = self.count == 1 || self.stride == self.size;
        Ok(if packed { Some(self.tensor.region(self.offset, self.total())?) } else { None })
    }

    /// Number of rows to hold at a time, at least one, in about `chunk` bytes.
    fn rows_per_chunk(&self, chunk: u64) -> u64 {
        (chunk / self.size).clamp(1, MAX_PENDING_ROWS)
    }
}

impl GgmlSession<'_> {
    /// SET_TENSOR_2D with a body of `len` bytes: streams the rows to the device, short ones through `chunk`, a reused buffer.
    /// A later row overwrites an earlier one where a stride below the row length makes them overlap.
    pub(super) fn set_tensor_2d(&mut self, len: usize, chunk: &mut BodyBuffer) -> Result<(), SessionError> {
        let head = SetTensor2dHead::decode(&self.connection.read_array()?)?;
        let tensor = self.resources.handles.locate(&head.tensor)?;
        let device = tensor.entry.device;
        let rows = Rows::new(tensor, head.offset, head.size, head.n_copies, head.stride)?;
        let have = (len - SET_TENSOR_2D_HEAD) as u64;
        if rows.total() != have {
            return Err(GgmlError::RowBytes { expected: rows.total(), have }.into());
        }
        let timeout = self.resources.server.config.reply_timeout;
        let queue = self.queues.get(device)?;
        if let Some(region) = rows.contiguous()? {
            queue.charge_upload(region.bytes(), timeout)?;
            queue.upload_from(region, None, |chunk| self.connection.read_exact(chunk))?;
            self.connection.audit().count_data(DataSource::Client, have);
            return Ok(());
        }
        let mut first = 0;
        while first < rows.count {
            let n = rows.rows_per_chunk(CHUNK_BYTES).min(rows.count - first);
            if rows.size > CHUNK_BYTES {
                queue.upload_from(rows.row(first)?, None, |chunk| self.connection.read_exact(chunk))?;
            } else {
                // At most `CHUNK_BYTES`; the buffer grows as bytes arrive.
                let bytes = self.connection.read_body((n * rows.size) as usize, chunk)?;
                for (index, row) in (first..).zip(bytes.chunks_exact(rows.size as usize)) {
                    queue.charge_upload(rows.size, timeout)?;
                    queue.upload(rows.row(index)?, None, UploadSource::Borrowed(row))?;
                }
            }
            first += n;
        }
        self.connection.audit().count_data(DataSource::Client, have);
        Ok(())
    }

    /// GET_TENSOR_2D: downloads and sends the rows, some at a time.
    pub(super) fn get_tensor_2d(&mut self, request: &GetTensor2d) -> Result<(), SessionError> {
        let tensor = self.resources.handles.locate(&request.tensor)?;
        let device = tensor.entry.device;
        let rows = Rows::new(tensor, request.offset, request.size, request.n_copies, request.stride)?;
        // Overlapping rows could repeat a few bytes without end. No client reads such rows.
        if rows.count > 1 && rows.stride < rows.size {
            return Err(GgmlError::OverlappingRows { size: rows.size, stride: rows.stride }.into());
        }
        let timeout = self.resources.server.config.reply_timeout;
        let queue = self.queues.get(device)?;
        let (piece, _charge) = self.resources.memory.reply_piece(rows.total(), CHUNK_BYTES);
        self.connection.begin_response(rows.total(), &[])?;
        let mut first = 0;
        while first < rows.count {
            let n = rows.rows_per_chunk(piece).min(rows.count - first);
            if rows.size > piece {
                // Of a row longer than a chunk, one part at a time is held.
                let row = rows.row(first)?;
                for at in (0..rows.size).step_by(piece as usize) {
                    let part = queue.download(row.subregion(at, piece.min(rows.size - at))?)?;
                    self.connection.send_bytes(&part.wait(Some(Instant::now() + timeout))?)?;
                }
            } else {
                let regions = (first..first + n).map(|index| rows.row(index)).collect::<Result<Vec<_>, _>>()?;
                let mut bytes = Vec::with_capacity((n * rows.size) as usize); // at most `piece`
                for row in queue.download_all(&regions)? {
                    bytes.extend_from_slice(&row.wait(Some(Instant::now() + timeout))?);
                }
                self.connection.send_bytes(&bytes)?;
            }
            first += n;
        }
        Ok(())
    }
}

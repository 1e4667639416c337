//! Bytes in, out and across: WRITE, READ, FILL, COPY.

use std::time::Instant;

use super::completions::Download;
use super::error::ExtendedError;
use super::session::ExtendedSession;
use super::spans;
use crate::device::{CopyOutcome, DeviceError, Queue, Region, UploadError};
use crate::rpc::server::session::failure::{SessionError, decoder_bug};
use crate::rpc::server::session::host_staged_copy;
use crate::rpc::server::session::request_error::RequestError;
use crate::rpc::server::session::upload;
use crate::rpc::wire::WireError;
use crate::rpc::wire::ext::{Copy, ExtCommand, ExtRequest, Fill, Read, Shape, WRITE_HEAD, WriteHead};
use crate::tensor::{DType, TensorDesc};

/// What a READ takes of the host beyond its bytes: a page at least, where a GPU's bytes arrive.
const READ_COST: u64 = 4 << 10;

/// And for each span.
const SPAN_COST: u64 = 512;

impl ExtendedSession<'_> {
    /// Streams the data behind a WRITE's head to its place.
    pub(super) fn write(&mut self, len: usize) -> Result<(), SessionError> {
        let head = self.connection.array::<WRITE_HEAD>()?;
        let limits = &self.resources.server.config.limits;
        let ExtRequest::WriteHead(WriteHead { queue, span, shape }) =
            ExtRequest::decode(ExtCommand::Write, &head, limits)?
        else {
            return Err(decoder_bug());
        };
        let data = (len - WRITE_HEAD) as u64; // the size in the header has been checked
        if span.len != data {
            return Err(ExtendedError::Data { span: span.len, data }.into());
        }
        let (device, region) = spans::region(&self.resources.handles, &span)?;
        let tensor = shape.map(|shape| tensor(&shape, data)).transpose()?;
        let (open, connection) = (self.queues.on(queue, device)?, &mut self.connection);
        let mut left = data;
        if data > 0 {
            let received = open.submit(|queue| {
                let received = |piece: &[u8]| left = left.saturating_sub(piece.len() as u64);
                match upload::receive(connection, queue, region, tensor.as_ref(), received) {
                    Ok(()) => Ok(Ok(())),
                    // A lost connection is no failure of the queue.
                    Err(UploadError::Source(e)) => Ok(Err(e)),
                    Err(UploadError::Device(e)) => Err(e),
                }
            })?;
            received.unwrap_or(Ok(()))?;
        }
        // The bytes that a failed queue has not taken: the next request begins behind them.
        Ok(self.connection.discard(left)?)
    }

    pub(super) fn read(&mut self, request: &Read<'_>) -> Result<(), SessionError> {
        let open = self.queues.get(request.queue)?;
        let limit = self.resources.server.config.limits.max_body;
        let asked = request.spans.iter().fold(0, |sum: u64, span| sum.saturating_add(span.len));
        if asked > limit {
            return Err(WireError::TooLarge { what: "READ", have: asked, limit }.into());
        }
        let mut regions = Vec::with_capacity(request.spans.len());
        for span in request.spans.iter() {
            let (lies_on, region) = spans::region(&self.resources.handles, &span)?;
            if lies_on != open.device {
                return Err(ExtendedError::QueueDevice { queue: request.queue, device: open.device, lies_on }.into());
            }
            if span.len > 0 {
                regions.push(region);
            }
        }
        let cost = asked.saturating_add(READ_COST + SPAN_COST * request.spans.len() as u64);
        let until = Instant::now() + self.resources.server.config.device_timeout;
        let replies_due = &self.replies_due;
        let data = open.submit(|queue| {
            let room = replies_due.take(cost, until)?;
            let tickets = queue.download_all(&regions)?;
            let moment = regions.is_empty().then(|| queue.mark());
            Ok(Download { tickets, moment, _room: room })
        })?;
        Ok(data.map_or(Ok(()), |data| open.completions.data(request.id, data))?)
    }

    pub(super) fn fill(&mut self, request: &Fill) -> Result<(), SessionError> {
        let (device, region) = spans::region(&self.resources.handles, &request.span)?;
        let open = self.queues.on(request.queue, device)?;
        if region.bytes() > 0 {
            open.submit(|queue| queue.fill(region, request.value))?;
        }
        Ok(())
    }

    /// Copies between two buffers. Where the devices cannot do it, the session waits until all bytes have left the source,
    /// which a queue of its own reads once the client's queue has come so far.
    pub(super) fn copy(&mut self, request: &Copy) -> Result<(), SessionError> {
        let ((reads, src), (writes, dst)) = (
            spans::region(&self.resources.handles, &request.src)?,
            spans::region(&self.resources.handles, &request.dst)?,
        );
        if src.bytes() != dst.bytes() {
            return Err(ExtendedError::Copy { src: src.bytes(), dst: dst.bytes() }.into());
        }
        let open = self.queues.on(request.queue, writes)?;
        if src.bytes() == 0
            || open.submit(|queue| queue.copy_from(src.clone(), dst.clone(), None))? != Some(CopyOutcome::Unreachable)
        {
            return Ok(());
        }
        let source = self.resources.device(reads)?;
        let timeout = self.resources.server.config.device_timeout;
        let (budget, staging_queues) = (&self.resources.budget, &mut self.staging_queues);
        let copied = open.submit(|queue| {
            let mut staging = match staging_queues.remove(&reads) {
                Some(staging) => staging,
                None => source.queue(budget)?,
            };
            staged((&mut *staging, &src), (queue, &dst), timeout)?;
            // One that has failed is of no more use.
            staging_queues.insert(reads, staging);
            Ok(())
        });
        Ok(copied.map(drop)?)
    }
}

fn staged(
    (staging, src): (&mut dyn Queue, &Region),
    (queue, dst): (&mut dyn Queue, &Region),
    timeout: std::time::Duration,
) -> Result<(), DeviceError> {
    staging.wait(&queue.mark())?;
    host_staged_copy::copy((staging, src), (queue, dst), timeout)
}

/// The contiguous tensor of a shape, which takes as many bytes as there are.
pub(super) fn tensor(shape: &Shape, bytes: u64) -> Result<TensorDesc, SessionError> {
    let dtype = DType::from_wire(shape.dtype).ok_or(RequestError::Type(shape.dtype))?;
    let desc = TensorDesc::contiguous(dtype, shape.ne.map(|n| n as usize))?;
    let tensor = desc.extent() as u64;
    if tensor == bytes { Ok(desc) } else { Err(ExtendedError::Shape { tensor, span: bytes }.into()) }
}

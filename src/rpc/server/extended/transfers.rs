//! Handlers for data transfers between client and buffers, and between buffers: WRITE, READ, FILL, COPY.

use std::sync::Arc;
use std::time::Instant;

use super::completions::Download;
use super::error::ExtendedError;
use super::session::ExtendedSession;
use super::spans;
use crate::device::{CopyOutcome, DeviceError, Queue, Region, UploadError};
use crate::rpc::server::counters::DataSource;
use crate::rpc::server::host_memory::SessionMemory;
use crate::rpc::server::session::failure::{SessionError, decoder_bug};
use crate::rpc::server::session::host_staged_copy;
use crate::rpc::server::session::request_error::RequestError;
use crate::rpc::server::session::watched_queue::WatchedQueue;
use crate::rpc::transport::TransportError;
use crate::rpc::wire::WireError;
use crate::rpc::wire::ext::{CopySpan, ExtCommand, ExtRequest, Fill, ReadSpans, TensorShape, WRITE_HEAD, WriteHead};
use crate::tensor::{DType, TensorDesc};

/// Host memory charged per READ in addition to its bytes: at least a page of pinned memory, into which a GPU copies.
const READ_OVERHEAD_BYTES: u64 = 4 << 10;

/// Host memory charged per span of a READ.
const SPAN_OVERHEAD_BYTES: u64 = 512;

impl ExtendedSession<'_> {
    /// Serves a WRITE: streams the data after its head to the device.
    pub(super) fn write(&mut self, len: usize) -> Result<(), SessionError> {
        let head = self.connection.read_array::<WRITE_HEAD>()?;
        let limits = &self.resources.server.config.limits;
        let ExtRequest::WriteHead(WriteHead { queue, span, shape }) =
            ExtRequest::decode(ExtCommand::Write, &head, limits)?
        else {
            return Err(decoder_bug());
        };
        let data = (len - WRITE_HEAD) as u64; // no underflow: the header's size was checked
        if span.len != data {
            return Err(ExtendedError::WriteLength { span: span.len, data }.into());
        }
        let (device, region) = spans::resolve_span(&self.resources.handles, &span)?;
        let tensor = shape.map(|shape| tensor_of_shape(&shape, data)).transpose()?;
        let (open_queue, connection) = (self.queues.get_on_device(queue, device)?, &mut self.connection);
        let mut remaining = data;
        if data > 0 && open_queue.charge_upload(data, self.resources.server.config.reply_timeout)? {
            let received = open_queue.submit(|queue| {
                let receive = |piece: &mut [u8]| {
                    connection.read_exact(piece)?;
                    remaining = remaining.saturating_sub(piece.len() as u64);
                    Ok::<_, TransportError>(())
                };
                match queue.upload_from(region, tensor.as_ref(), receive) {
                    Ok(()) => Ok(Ok(())),
                    // A lost connection ends the session, and must not be reported as a failure of the queue.
                    Err(UploadError::Source(e)) => Ok(Err(e)),
                    Err(UploadError::Device(e)) => Err(e),
                }
            })?;
            received.unwrap_or(Ok(()))?;
            self.connection.audit().count_data(DataSource::Client, data);
        }
        // Skips the bytes that a failed queue did not consume: the next request follows them in the stream.
        Ok(self.connection.discard(remaining)?)
    }

    /// Serves a READ: downloads the spans and sends them as READ_DATA when they are complete. Blocks while too many bytes of
    /// replies are not sent yet.
    pub(super) fn read(&mut self, request: &ReadSpans<'_>) -> Result<(), SessionError> {
        let open_queue = self.queues.get(request.queue)?;
        let limit = self.resources.server.config.limits.max_body;
        let requested = request.spans.iter().fold(0, |sum: u64, span| sum.saturating_add(span.len));
        if requested > limit {
            return Err(WireError::TooLarge { what: "READ", have: requested, limit }.into());
        }
        let mut regions = Vec::with_capacity(request.spans.len());
        for span in request.spans.iter() {
            let (buffer_device, region) = spans::resolve_span(&self.resources.handles, &span)?;
            if buffer_device != open_queue.device {
                return Err(ExtendedError::WrongQueueDevice {
                    queue: request.queue,
                    device: open_queue.device,
                    buffer_device,
                }
                .into());
            }
            if span.len > 0 {
                regions.push(region);
            }
        }
        let cost = requested.saturating_add(READ_OVERHEAD_BYTES + SPAN_OVERHEAD_BYTES * request.spans.len() as u64);
        let until = Instant::now() + self.resources.server.config.reply_timeout;
        let reply_memory = &self.reply_memory;
        let data = open_queue.submit(|queue| {
            let permit = reply_memory.acquire(cost, until)?;
            let reads = queue.download_all(&regions)?;
            Ok(Download { reads, end: queue.mark(), _permit: permit })
        })?;
        Ok(data.map_or(Ok(()), |data| open_queue.completions.send_read_data(request.id, data))?)
    }

    pub(super) fn fill(&mut self, request: &Fill) -> Result<(), SessionError> {
        let (device, region) = spans::resolve_span(&self.resources.handles, &request.span)?;
        let open_queue = self.queues.get_on_device(request.queue, device)?;
        if region.bytes() > 0 {
            open_queue.submit(|queue| queue.fill(region, request.value))?;
        }
        Ok(())
    }

    /// Copies between two buffers. If the devices cannot copy directly, the copy is staged through host memory. A device
    /// queue of the session then reads the source after the earlier work of the client's queue, and the session blocks until
    /// all bytes are read.
    pub(super) fn copy(&mut self, request: &CopySpan) -> Result<(), SessionError> {
        let ((src_device, src), (dst_device, dst)) = (
            spans::resolve_span(&self.resources.handles, &request.src)?,
            spans::resolve_span(&self.resources.handles, &request.dst)?,
        );
        if src.bytes() != dst.bytes() {
            return Err(ExtendedError::CopySizes { src: src.bytes(), dst: dst.bytes() }.into());
        }
        let open_queue = self.queues.get_on_device(request.queue, dst_device)?;
        if src.bytes() == 0
            || open_queue.submit(|queue| queue.copy_from(src.clone(), dst.clone(), None))?
                != Some(CopyOutcome::Unreachable)
        {
            return Ok(());
        }
        let source = self.resources.device(src_device)?;
        let timeout = self.resources.server.config.reply_timeout;
        let (budget, staging_queues) = (&self.resources.budget, &mut self.staging_queues);
        let (watch, memory) = (self.connection.watch(), self.connection.memory());
        let copied = open_queue.submit(|queue| {
            let mut staging = match staging_queues.remove(&src_device) {
                Some(staging) => staging,
                None => WatchedQueue::open(&**source, budget, watch, memory)?,
            };
            copy_via_host((&mut *staging, &src), (queue, &dst), memory, timeout)?;
            // Not reached after a failure: a failed staging queue is dropped.
            staging_queues.insert(src_device, staging);
            Ok(())
        });
        Ok(copied.map(drop)?)
    }
}

/// Copies through host memory, after the work that was submitted to `queue` so far.
fn copy_via_host(
    (staging, src): (&mut dyn Queue, &Region),
    (queue, dst): (&mut dyn Queue, &Region),
    memory: &Arc<SessionMemory>,
    timeout: std::time::Duration,
) -> Result<(), DeviceError> {
    staging.wait(&queue.mark())?;
    host_staged_copy::copy((staging, src), (queue, dst), memory, timeout)
}

/// The contiguous tensor of a shape, which has to have `bytes` bytes.
pub(super) fn tensor_of_shape(shape: &TensorShape, bytes: u64) -> Result<TensorDesc, SessionError> {
    let dtype = DType::from_wire(shape.dtype).ok_or(RequestError::UnknownType(shape.dtype))?;
    let desc = TensorDesc::contiguous(dtype, shape.ne.map(|n| n as usize))?;
    let tensor = desc.extent() as u64;
    if tensor == bytes { Ok(desc) } else { Err(ExtendedError::ShapeSize { tensor, span: bytes }.into()) }
}

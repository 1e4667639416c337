//! Bytes in, out and across: WRITE, READ, FILL, COPY.

use std::time::Instant;

use super::answers::Download;
use super::{Greeted, Refusal, bounce};
use crate::device::{CopyOutcome, DeviceError, Queue, Region, Source, SourceError};
use crate::rpc::wire::WireError;
use crate::rpc::wire::ext::{Copy, ExtCommand, ExtRequest, Fill, Read, Shape, WRITE_HEAD, WriteHead};
use crate::tensor::{DType, TensorDesc};

/// What a READ takes of the host beyond its bytes: a page at least, where a GPU's bytes arrive.
const READ_COST: u64 = 4 << 10;

/// And for each span.
const SPAN_COST: u64 = 512;

impl Greeted<'_> {
    /// Streams the data behind a WRITE's head to its place.
    pub(super) fn write(&mut self, len: usize) -> Result<(), Refusal> {
        let head = self.connection.array::<WRITE_HEAD>()?;
        let limits = &self.holdings.shared.config.limits;
        let ExtRequest::WriteHead(WriteHead { queue, span, shape }) =
            ExtRequest::decode(ExtCommand::Write, &head, limits)?
        else {
            return Err(super::confused());
        };
        let data = (len - WRITE_HEAD) as u64; // the size in the header has been checked
        if span.len != data {
            return Err(Refusal::Data { span: span.len, data });
        }
        let (device, region) = self.holdings.span(&span)?;
        let tensor = shape.map(|shape| tensor(&shape, data)).transpose()?;
        let open = self.queues.on(queue, device)?;
        let (connection, mut left, mut broken) = (&mut self.connection, data, None);
        if data > 0 {
            open.submit(|queue| {
                let mut fill = |piece: &mut [u8]| {
                    connection.read_exact(piece).map_err(|e| {
                        let text = SourceError::new(&e);
                        broken = Some(e);
                        text
                    })?;
                    left = left.saturating_sub(piece.len() as u64);
                    Ok(())
                };
                let done = queue.upload(region, tensor.as_ref(), Source::Writer(&mut fill));
                // The end of the connection is no failure of the queue.
                if broken.is_some() { Ok(()) } else { done }
            })?;
        }
        match broken {
            Some(broken) => Err(broken.into()),
            // A queue that has failed leaves its data where the next message begins.
            None => Ok(self.connection.discard(left)?),
        }
    }

    pub(super) fn read(&mut self, request: &Read<'_>) -> Result<(), Refusal> {
        let open = self.queues.get(request.queue)?;
        let limit = self.holdings.shared.config.limits.max_body;
        let asked = request.spans.iter().fold(0, |sum: u64, span| sum.saturating_add(span.len));
        if asked > limit {
            return Err(WireError::TooLarge { what: "READ", have: asked, limit }.into());
        }
        let mut regions = Vec::with_capacity(request.spans.len());
        for span in request.spans.iter() {
            let (lies_on, region) = self.holdings.span(&span)?;
            if lies_on != open.device {
                return Err(Refusal::QueueDevice { queue: request.queue, device: open.device, lies_on });
            }
            if span.len > 0 {
                regions.push(region);
            }
        }
        let cost = asked.saturating_add(READ_COST + SPAN_COST * request.spans.len() as u64);
        let until = Instant::now() + self.holdings.shared.config.device_timeout;
        let allowance = &self.allowance;
        let data = open.submit(|queue| {
            let room = allowance.take(cost, until)?;
            let tickets = queue.download_all(&regions)?;
            let moment = regions.is_empty().then(|| queue.mark());
            Ok(Download { tickets, moment, _room: room })
        })?;
        Ok(data.map_or(Ok(()), |data| open.answers.data(request.id, data))?)
    }

    pub(super) fn fill(&mut self, request: &Fill) -> Result<(), Refusal> {
        let (device, region) = self.holdings.span(&request.span)?;
        let open = self.queues.on(request.queue, device)?;
        if region.bytes() > 0 {
            open.submit(|queue| queue.fill(region, request.value))?;
        }
        Ok(())
    }

    /// Copies between two buffers. Where the devices cannot do it, the session waits until all bytes have left the source,
    /// which a queue of its own reads once the client's queue has come so far.
    pub(super) fn copy(&mut self, request: &Copy) -> Result<(), Refusal> {
        let ((reads, src), (writes, dst)) = (self.holdings.span(&request.src)?, self.holdings.span(&request.dst)?);
        if src.bytes() != dst.bytes() {
            return Err(Refusal::Copy { src: src.bytes(), dst: dst.bytes() });
        }
        let open = self.queues.on(request.queue, writes)?;
        if src.bytes() == 0
            || open.submit(|queue| queue.copy_from(src.clone(), dst.clone(), None))? != Some(CopyOutcome::Unreachable)
        {
            return Ok(());
        }
        let source = self.holdings.device(reads)?;
        let patience = self.holdings.shared.config.device_timeout;
        let (account, relays) = (&self.holdings.account, &mut self.relays);
        let copied = open.submit(|queue| {
            let mut relay = match relays.remove(&reads) {
                Some(relay) => relay,
                None => source.queue(account)?,
            };
            relayed((&mut *relay, &src), (queue, &dst), patience)?;
            // One that has failed is of no more use.
            relays.insert(reads, relay);
            Ok(())
        });
        Ok(copied.map(drop)?)
    }
}

fn relayed(
    (relay, src): (&mut dyn Queue, &Region),
    (queue, dst): (&mut dyn Queue, &Region),
    patience: std::time::Duration,
) -> Result<(), DeviceError> {
    relay.wait(&queue.mark())?;
    bounce::copy((relay, src), (queue, dst), patience)
}

/// The contiguous tensor of a shape, which takes as many bytes as there are.
pub(super) fn tensor(shape: &Shape, bytes: u64) -> Result<TensorDesc, Refusal> {
    let dtype = DType::from_wire(shape.dtype).ok_or(Refusal::Type(shape.dtype))?;
    let desc = TensorDesc::contiguous(dtype, shape.ne.map(|n| n as usize))?;
    let tensor = desc.extent() as u64;
    if tensor == bytes { Ok(desc) } else { Err(Refusal::Shape { tensor, span: bytes }) }
}

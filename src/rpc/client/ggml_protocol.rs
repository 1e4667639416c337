//! The protocol of a queue on servers without the extensions: sends its commands as messages of 7.0 or older, all on one
//! ordered stream.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::completion_probe::{DeviceProgress, DeviceWriteState, PriorWork, ProbedMarks, RequiredMessages};
use super::connection::{ReplySink, WriteGuard};
use super::device::{RemoteBuffer, RemoteDevice, byte_range_record, is_whole_tensor, remote_buffer};
use super::graph_messages::{GraphMessage, tensor_record};
use super::queue::{DigestLoad, MAX_STAGED_UPLOAD_BYTES, PlacementWaker, QueueCommand, QueueProtocol};
use super::queue_failure::QueueStatus;
use super::remote_read::ReadCompleter;
use super::row_runs::{RowCompleters, RowRun};
use crate::device::{DeviceError, PendingRead, Region, SourceError, Timeline, TimelinePoint};
use crate::rpc::wire::{
    BodySize, BufferClear, CopyTensor, GetTensor, GraphRecompute, MemsetTensor, Request, Response, RpcCommand,
    SetTensorHead, TensorRecord,
};
use crate::tensor::TensorDesc;

/// Chunk size of an upload that is not a whole tensor: between two chunks other queues can send.
const UPLOAD_CHUNK_BYTES: u64 = 4 << 20;

/// Staging limit for tensors that a writer produces: up to this size the bytes are gathered and sent as one message, so that
/// the server sees a whole tensor.
pub(super) const MAX_STAGED_TENSOR_BYTES: u64 = 64 << 20;

/// Largest range of bytes that one tensor record describes; dimensions of the wire format are below 2^32.
pub(super) const MAX_RECORD_BYTES: u64 = 1 << 30;

/// GRAPH_RECOMPUTE limit: a server may evict a graph when it needs the room. A graph is sent again if other graphs were sent
/// for any device since, and their bytes together with its own exceed this limit. fanout's servers cache several times as much.
const MAX_RECOMPUTE_BYTES: u64 = 4 << 20;

impl WriteGuard<'_> {
    pub(super) fn device_state(&mut self, device: u32) -> Result<&mut DeviceWriteState, DeviceError> {
        self.writer.devices.get_mut(device as usize).ok_or(DeviceError::Misuse("a device of another endpoint"))
    }

    /// Numbers a message that carries work for a device.
    pub(super) fn next_message_number(&self, progress: &DeviceProgress) -> u64 {
        progress.sent.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Sends a read of a device, whose reply has `size` bytes. The reply is a completion probe for all messages to this device
    /// before it. If the queue has failed by the time of the reply, the pending reads of `to` fail too.
    fn read(
        &mut self,
        (device, progress): (u32, &DeviceProgress),
        request: &Request<'_>,
        size: u64,
        to: Option<(RowCompleters, Arc<QueueStatus>)>,
    ) -> Result<u64, DeviceError> {
        let number = self.next_message_number(progress);
        progress.probed.store(number, Ordering::Release);
        let completions = Arc::clone(&self.shared.completions);
        let on_reply = move |bytes: Result<Vec<u8>, DeviceError>| {
            if bytes.is_ok() {
                completions.record_done((device, number));
            }
            if let Some((to, status)) = to {
                to.complete(bytes.and_then(|bytes| status.failure().map_or(Ok(bytes), Err)));
            }
            Ok(())
        };
        self.request(request, size, ReplySink::Callback(Box::new(on_reply)))?;
        Ok(number)
    }

    /// Writes `data` to a tensor, from its first byte.
    fn write_tensor(&mut self, tensor: TensorRecord, data: &[u8]) -> Result<(), DeviceError> {
        let head = SetTensorHead { tensor, cache: false, offset: 0 };
        let (codec, mut encoded) = (self.shared.codec, Ok(()));
        self.buffer(|out| encoded = codec.encode_set_tensor_head(&head, data.len() as u64, out));
        encoded.map_err(|e| DeviceError::Bug(format!("an upload that does not fit a message: {e}")))?;
        self.expect_empty_reply(RpcCommand::SetTensor)?;
        self.send_with_data(RpcCommand::SetTensor.name(), data)
    }

    /// Runs a graph for a queue. GRAPH_RECOMPUTE replaces the message if the device ran the same graph last.
    fn compute_graph(
        &mut self,
        device: u32,
        message: &GraphMessage,
        status: &Arc<QueueStatus>,
    ) -> Result<(), DeviceError> {
        let codec = self.shared.codec;
        if codec.has_graph_uid() {
            let stored = &mut self.device_state(device)?.stored_graphs;
            if stored.is_usable(message.id()) {
                return self.send(&Request::GraphRecompute(GraphRecompute { device, uid: Some(message.id()) }));
            }
            stored.record_sent(message.id());
            self.shared.count_graph(message.frame().len());
            return self.send_with_data(RpcCommand::GraphCompute.name(), message.frame());
        }
        let can_recompute = codec.command_number(RpcCommand::GraphRecompute).is_some();
        let bytes = message.frame().len() as u64;
        // Bytes of other graphs that were sent since this graph ran.
        let others = |(_, since): (u64, u64)| since.saturating_sub(bytes);
        let last = self.device_state(device)?.last_graph.filter(|last| last.0 == message.id());
        if can_recompute && last.is_some_and(|last| others(last) == 0 || last.1 <= MAX_RECOMPUTE_BYTES) {
            return self.send(&Request::GraphRecompute(GraphRecompute { device, uid: None }));
        }
        for (_, since) in self.writer.devices.iter_mut().filter_map(|device_state| device_state.last_graph.as_mut()) {
            *since += bytes;
        }
        self.device_state(device)?.last_graph = Some((message.id(), bytes));
        self.shared.count_graph(message.frame().len());
        if let Some(BodySize::Exact(len)) = codec.response_size(RpcCommand::GraphCompute) {
            let status = Arc::clone(status);
            let on_reply = move |reply: Result<Vec<u8>, DeviceError>| {
                if let Ok([ggml_status]) = reply.as_deref() {
                    status.record_graph_status(*ggml_status as i8);
                }
                Ok(())
            };
            self.expect(RpcCommand::GraphCompute.name(), len..=len, ReplySink::Callback(Box::new(on_reply)))?;
        }
        self.send_with_data(RpcCommand::GraphCompute.name(), message.frame())
    }

    /// Sends a completion probe, a read of one byte, to each device for which no later read is under way.
    pub(super) fn send_probes(&mut self, required: &RequiredMessages) -> Result<(), DeviceError> {
        for (device, number) in required.iter() {
            let probe = self.device_state(device)?.probe.clone();
            let (Some(progress), Some(probe)) = (self.shared.completions.progress(device), probe) else { continue };
            if progress.probed.load(Ordering::Acquire) < number {
                let request = Request::GetTensor(GetTensor { tensor: probe, offset: 0, size: 1 });
                self.read((device, &progress), &request, 1, None)?;
                self.shared.count_wait();
            }
        }
        Ok(())
    }
}

/// The protocol state of one queue.
pub(super) struct GgmlProtocol {
    remote: Arc<RemoteDevice>,
    progress: Arc<DeviceProgress>,
    marks: Arc<ProbedMarks>,
    /// Messages that must be done before the next mark is reached.
    required: RequiredMessages,
}

impl GgmlProtocol {
    pub(super) fn new(
        remote: Arc<RemoteDevice>,
        progress: Arc<DeviceProgress>,
    ) -> Result<(GgmlProtocol, Arc<Timeline>), DeviceError> {
        let (marks, timeline) = ProbedMarks::new(&remote.connection)?;
        Ok((GgmlProtocol { remote, progress, marks, required: RequiredMessages::default() }, timeline))
    }

    /// The mark state of a point of this connection.
    fn own_marks<'a>(&self, point: &'a TimelinePoint) -> Option<&'a ProbedMarks> {
        point.completion_source::<ProbedMarks>().filter(|marks| marks.belongs_to(&self.remote.connection))
    }

    /// Sends messages that carry work for the device.
    fn send_work(
        &mut self,
        work: impl FnOnce(&mut WriteGuard<'_>) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let number = self.remote.connection.with_writer(|guard| {
            let number = guard.next_message_number(&self.progress);
            work(guard).map(|()| number)
        })?;
        self.required.add(self.remote.index, number);
        Ok(())
    }

    /// Reads a run of rows that belong to a device.
    fn read_rows(&mut self, device: (u32, &DeviceProgress), run: RowRun) -> Result<u64, DeviceError> {
        let (request, bytes) = (run.request()?, run.bytes());
        let (region, completers) = run.into_parts();
        let mut to = Some((completers, Arc::clone(self.marks.status())));
        let number = self.remote.connection.with_writer(|guard| guard.read(device, &request, bytes, to.take()));
        drop(region);
        // Taken means registered: the reader thread completes the reads.
        number.inspect_err(|error| to.into_iter().for_each(|(rows, _)| rows.complete(Err(error.clone()))))
    }

    /// Whether an earlier copy has shown that the server can copy between the devices of two regions, and the regions do not
    /// overlap.
    fn copies_on_server(&self, src: &Region, dst: &Region) -> bool {
        let from = remote_buffer(src).map_or(self.remote.index, |memory| memory.device);
        !regions_overlap(src, dst)
            && self.remote.connection.completions.known_copy_support(from, self.remote.index) == Some(true)
    }

    /// Fills a region on servers without MEMSET_TENSOR: by BUFFER_CLEAR for a whole buffer, else by an upload.
    fn fill_by_upload(&mut self, dst: &Region, memory: &RemoteBuffer, value: u8) -> Result<(), DeviceError> {
        if dst.bytes() == dst.buffer().bytes() {
            let clear = Request::BufferClear(BufferClear { remote_ptr: memory.handle, value });
            return self.send_work(|guard| guard.send(&clear));
        }
        let bytes = vec![value; UPLOAD_CHUNK_BYTES.min(dst.bytes()) as usize];
        for at in (0..dst.bytes()).step_by(UPLOAD_CHUNK_BYTES as usize) {
            let part = dst.subregion(at, UPLOAD_CHUNK_BYTES.min(dst.bytes() - at))?;
            self.upload(&part, None, &bytes[..part.bytes() as usize])?;
        }
        Ok(())
    }

    /// Sends a copy and waits for its reply, to learn whether the server can copy between two devices, or within one: not every
    /// backend can.
    fn probe_copy_support(&mut self, request: &Request<'_>, (from, to): (u32, u32)) -> Result<bool, DeviceError> {
        let (sender, pending) = PendingRead::new();
        self.send_work(|guard| guard.request(request, 1, ReplySink::Waiter(sender)))?;
        let reply = pending.wait(None)?;
        match Response::decode(RpcCommand::CopyTensor, &reply) {
            Ok(Response::CopyTensor(copied)) => {
                self.remote.connection.completions.record_copy_support(from, to, copied);
                Ok(copied)
            }
            other => Err(self.remote.connection.fail(format!("the server replied to COPY_TENSOR with {other:?}"))),
        }
    }

    /// Copies through this host. All bytes are read before the first is written, because the regions may overlap.
    fn copy_through_host(&mut self, src: &Region, dst: &Region) -> Result<(), DeviceError> {
        let from = remote_buffer(src)?;
        let progress = self.remote.connection.completions.progress(from.device);
        let progress = progress.ok_or(DeviceError::Misuse("a region of another device"))?;
        let mut reads = Vec::new();
        for (at, size) in record_ranges(src.bytes()) {
            let (to, read) = ReadCompleter::new(&self.remote);
            self.read_rows((from.device, &progress), RowRun::new(src.subregion(at, size)?, to))?;
            reads.push((at, size, read));
        }
        let pieces = reads.into_iter().map(|(at, size, read)| Ok((dst.subregion(at, size)?, read.wait(None)?)));
        let pieces: Vec<_> = pieces.collect::<Result<_, DeviceError>>()?;
        pieces.iter().try_for_each(|(part, bytes)| self.upload(part, None, bytes))
    }
}

impl QueueProtocol for GgmlProtocol {
    fn must_block(&self, command: &QueueCommand) -> bool {
        match command {
            QueueCommand::Wait(point) => match self.own_marks(point) {
                Some(marks) => !marks.is_placed(point.seq()),
                None => point.poll() != Ok(true),
            },
            QueueCommand::Copy { src, dst } => !self.copies_on_server(src, dst),
            _ => false,
        }
    }

    fn upload(&mut self, dst: &Region, tensor: Option<&TensorDesc>, data: &[u8]) -> Result<(), DeviceError> {
        let memory = remote_buffer(dst)?;
        let has_type = |tensor: &TensorDesc| memory.connection.codec.has_type(tensor.dtype());
        let whole_tensor = tensor.filter(|tensor| is_whole_tensor(tensor, dst) && has_type(tensor));
        if let Some(tensor) = whole_tensor {
            let (buffer, data_at) = (memory.handle, memory.base + dst.offset());
            let record = TensorRecord { buffer, data: data_at, ..tensor_record(tensor) };
            return self.send_work(|guard| guard.write_tensor(record, data));
        }
        for (at, chunk) in (0..).step_by(UPLOAD_CHUNK_BYTES as usize).zip(data.chunks(UPLOAD_CHUNK_BYTES as usize)) {
            let record = byte_range_record(memory, dst.offset() + at, chunk.len() as u64);
            self.send_work(|guard| guard.write_tensor(record, chunk))?;
        }
        Ok(())
    }

    fn upload_from_source(
        &mut self,
        dst: &Region,
        tensor: Option<&TensorDesc>,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), SourceError>,
    ) -> Result<(), DeviceError> {
        let staging_limit = if tensor.is_some() { MAX_STAGED_TENSOR_BYTES } else { MAX_STAGED_UPLOAD_BYTES };
        let chunk = if dst.bytes() <= staging_limit { dst.bytes() } else { UPLOAD_CHUNK_BYTES };
        let mut bytes = vec![0; chunk as usize];
        let mut at = 0;
        while at < dst.bytes() {
            let part = dst.subregion(at, chunk.min(dst.bytes() - at))?;
            let bytes = &mut bytes[..part.bytes() as usize];
            fill(bytes)?;
            self.upload(&part, tensor, bytes)?;
            at += part.bytes();
        }
        Ok(())
    }

    fn download(&mut self, parts: Vec<(Region, ReadCompleter)>) -> Result<(), DeviceError> {
        let has_rows = self.remote.connection.codec.command_number(RpcCommand::GetTensor2d).is_some();
        let progress = Arc::clone(&self.progress);
        let mut runs = RowRun::split(parts, has_rows).into_iter();
        while let Some(run) = runs.next() {
            match self.read_rows((self.remote.index, &progress), run) {
                Ok(number) => self.required.add(self.remote.index, number),
                Err(error) => {
                    // The reads that were not sent must complete as well.
                    runs.for_each(|run| run.fail(&error));
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// 7.0 has no load by digest: the pending read completes with "not found".
    fn load_by_digest(&mut self, load: DigestLoad) -> Result<(), DeviceError> {
        load.to.complete(Ok(vec![0]));
        Ok(())
    }

    fn fill(&mut self, dst: &Region, value: u8) -> Result<(), DeviceError> {
        let memory = remote_buffer(dst)?;
        if memory.connection.codec.command_number(RpcCommand::MemsetTensor).is_none() {
            return self.fill_by_upload(dst, memory, value);
        }
        for (at, size) in record_ranges(dst.bytes()) {
            let tensor = byte_range_record(memory, dst.offset() + at, size);
            let request = Request::MemsetTensor(MemsetTensor { tensor, offset: 0, size, value });
            self.send_work(|guard| guard.send(&request))?;
        }
        Ok(())
    }

    fn copy(&mut self, src: &Region, dst: &Region) -> Result<(), DeviceError> {
        let (from, to) = (remote_buffer(src)?, remote_buffer(dst)?);
        let known = self.remote.connection.completions.known_copy_support(from.device, to.device);
        let copies = self.copies_on_server(src, dst);
        for (at, size) in record_ranges(dst.bytes()) {
            let request = Request::CopyTensor(CopyTensor {
                src: byte_range_record(from, src.offset() + at, size),
                dst: byte_range_record(to, dst.offset() + at, size),
            });
            if copies {
                let status = Arc::clone(self.marks.status());
                let on_reply = move |reply: Result<Vec<u8>, DeviceError>| {
                    let Ok(reply) = reply else { return Ok(()) };
                    match Response::decode(RpcCommand::CopyTensor, &reply) {
                        Ok(Response::CopyTensor(copied)) => {
                            if !copied {
                                status.fail_refused(RpcCommand::CopyTensor);
                            }
                            Ok(())
                        }
                        other => Err(format!("{other:?}")),
                    }
                };
                self.send_work(|guard| guard.request(&request, 1, ReplySink::Callback(Box::new(on_reply))))?;
            } else if known.is_none()
                && !regions_overlap(src, dst)
                && self.probe_copy_support(&request, (from.device, to.device))?
            {
                continue;
            } else {
                return self.copy_through_host(src, dst);
            }
        }
        Ok(())
    }

    fn copy_from_peer(&mut self, _: &Region, _: &Region, _: Option<&TimelinePoint>) -> Result<(), DeviceError> {
        Err(DeviceError::Bug("a peer copy on a connection without the extensions".to_owned()))
    }

    fn run_graph(&mut self, messages: &[GraphMessage]) -> Result<(), DeviceError> {
        let device = self.remote.index;
        let status = Arc::clone(self.marks.status());
        self.send_work(|guard| messages.iter().try_for_each(|message| guard.compute_graph(device, message, &status)))
    }

    /// Wait elimination: the server processes the messages of one connection in order, so a point of this connection needs no
    /// wait once its work was sent. This thread waits for any other point.
    fn wait(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        if let Some(marks) = self.own_marks(point)
            && let PriorWork::Sent(required) = marks.prior_work(point.seq())?
        {
            marks.status().add_dependent(self.marks.status(), point.seq());
            self.required.merge(&required);
            return Ok(());
        }
        point.wait(None)
    }

    fn mark(&mut self, seq: u64) -> Result<(), DeviceError> {
        self.marks.place_mark(seq, &self.required);
        Ok(())
    }

    /// Nothing to wake: a wait for a mark that is not placed waits for the timeline, which has failed.
    fn placement_waker(&self) -> PlacementWaker {
        Arc::new(|| {})
    }

    fn close(&mut self, last_made: u64) {
        self.marks.close(last_made);
    }
}

/// Whether two regions overlap. Not every server can copy within an overlap, and none reports it.
fn regions_overlap(src: &Region, dst: &Region) -> bool {
    src.buffer().id() == dst.buffer().id()
        && src.offset() < dst.offset() + dst.bytes()
        && dst.offset() < src.offset() + src.bytes()
}

/// Splits a range of bytes into the parts that one tensor record each can describe, as offsets and sizes.
fn record_ranges(bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..bytes).step_by(MAX_RECORD_BYTES as usize).map(move |at| (at, MAX_RECORD_BYTES.min(bytes - at)))
}

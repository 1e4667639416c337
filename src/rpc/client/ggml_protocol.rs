//! What a queue says where the server speaks 7.0 alone.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::completion_probe::{DeviceProgress, DeviceWriteState, PriorWork, ProbedMarks, RequiredMessages};
use super::connection::{ReplySink, WriteGuard};
use super::device::{RemoteBuffer, RemoteDevice, byte_range_record, is_whole_tensor, remote_buffer};
use super::graph_messages::{GraphMessage, tensor_record};
use super::queue::{DigestLoad, MAX_STAGED_UPLOAD_BYTES, QueueCommand, QueueProtocol, ReadCompleter};
use super::queue_failure::QueueStatus;
use crate::device::{DeviceError, Point, Region, SourceError, Ticket, Timeline};
use crate::rpc::wire::{
    BodySize, BufferClear, Command as Wire, CopyTensor, GetTensor, GraphRecompute, MemsetTensor, Request, Response,
    SetTensorHead, TensorRecord,
};
use crate::tensor::TensorDesc;

/// Largest message of an upload that is no whole tensor: others come in between.
const UPLOAD_CHUNK_BYTES: u64 = 4 << 20;

/// Largest tensor whose bytes are gathered from a writer before they are sent, so that the server knows it as one.
pub(super) const MAX_STAGED_TENSOR_BYTES: u64 = 64 << 20;

/// Largest range that one tensor record describes here; dimensions are below 2^32.
pub(super) const MAX_RECORD_BYTES: u64 = 1 << 30;

/// A server forgets graphs when others need the room. One whose bytes, with those of the graphs that were sent for other
/// devices since, are more than this is sent again; fanout's servers keep several times as much.
const MAX_RECOMPUTE_BYTES: u64 = 4 << 20;

impl WriteGuard<'_> {
    pub(super) fn device_state(&mut self, device: u32) -> Result<&mut DeviceWriteState, DeviceError> {
        self.writer.devices.get_mut(device as usize).ok_or(DeviceError::Misuse("a device of another endpoint"))
    }

    /// Numbers a message that is work for a device.
    pub(super) fn next_message_number(&self, progress: &DeviceProgress) -> u64 {
        progress.sent.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Reads bytes of a device; their reply proves all that it was sent before. A queue that has failed by then gets none.
    fn read_tensor(
        &mut self,
        (device, progress): (u32, &DeviceProgress),
        tensor: TensorRecord,
        size: u64,
        to: Option<(ReadCompleter, Arc<QueueStatus>)>,
    ) -> Result<u64, DeviceError> {
        let number = self.next_message_number(progress);
        progress.probed.store(number, Ordering::Release);
        let proofs = Arc::clone(&self.shared.completions);
        let told = move |bytes: Result<Vec<u8>, DeviceError>| {
            if bytes.is_ok() {
                proofs.record_done((device, number));
            }
            if let Some((to, fate)) = to {
                to.complete(bytes.and_then(|bytes| fate.failure().map_or(Ok(bytes), Err)));
            }
            Ok(())
        };
        let request = Request::GetTensor(GetTensor { tensor, offset: 0, size });
        self.request(&request, size, ReplySink::Callback(Box::new(told)))?;
        Ok(number)
    }

    /// Writes bytes into a tensor, from its start.
    fn write_tensor(&mut self, tensor: TensorRecord, data: &[u8]) -> Result<(), DeviceError> {
        let head = SetTensorHead { tensor, cache: false, offset: 0 };
        let (dialect, mut encoded) = (self.shared.dialect, Ok(()));
        self.buffer(|out| encoded = dialect.encode_head(&head, data.len() as u64, out));
        encoded.map_err(|e| DeviceError::Bug(format!("an upload that no message holds: {e}")))?;
        self.expect_empty_reply(Wire::SetTensor)?;
        self.send_with_data(Wire::SetTensor.name(), data)
    }

    /// Runs a graph for a queue; one that the device ran last is not sent again.
    fn compute_graph(&mut self, device: u32, body: &GraphMessage, fate: &Arc<QueueStatus>) -> Result<(), DeviceError> {
        let dialect = self.shared.dialect;
        let again = dialect.number(Wire::GraphRecompute).is_some();
        let bytes = body.frame().len() as u64;
        let others = |(_, since): (u64, u64)| since.saturating_sub(bytes);
        let last = self.device_state(device)?.last_graph.filter(|last| last.0 == body.id());
        if again && last.is_some_and(|last| others(last) == 0 || last.1 <= MAX_RECOMPUTE_BYTES) {
            return self.send(&Request::GraphRecompute(GraphRecompute { device }));
        }
        for (_, since) in self.writer.devices.iter_mut().filter_map(|lane| lane.last_graph.as_mut()) {
            *since += bytes;
        }
        self.device_state(device)?.last_graph = Some((body.id(), bytes));
        if let Some(BodySize::Exact(len)) = dialect.reply(Wire::GraphCompute) {
            let fate = Arc::clone(fate);
            let told = move |status: Result<Vec<u8>, DeviceError>| {
                if let Ok([status]) = status.as_deref() {
                    fate.record_graph_status(*status as i8);
                }
                Ok(())
            };
            self.expect(Wire::GraphCompute.name(), len..=len, ReplySink::Callback(Box::new(told)))?;
        }
        self.send_with_data(Wire::GraphCompute.name(), body.frame())
    }

    /// Reads a byte of each device that has to be proved.
    pub(super) fn send_probes(&mut self, wanted: &RequiredMessages) -> Result<(), DeviceError> {
        for (device, number) in wanted.iter() {
            let probe = self.device_state(device)?.probe.clone();
            let (Some(progress), Some(probe)) = (self.shared.completions.progress(device), probe) else { continue };
            if progress.probed.load(Ordering::Acquire) < number {
                self.read_tensor((device, &progress), probe, 1, None)?;
                self.shared.count_wait();
            }
        }
        Ok(())
    }
}

/// Speaks for one queue.
pub(super) struct GgmlProtocol {
    remote: Arc<RemoteDevice>,
    progress: Arc<DeviceProgress>,
    marks: Arc<ProbedMarks>,
    /// What has to be done before the next mark is reached.
    required: RequiredMessages,
}

impl GgmlProtocol {
    pub(super) fn new(
        remote: Arc<RemoteDevice>,
        progress: Arc<DeviceProgress>,
    ) -> Result<(GgmlProtocol, Arc<Timeline>), DeviceError> {
        let (track, timeline) = ProbedMarks::new(&remote.connection)?;
        Ok((GgmlProtocol { remote, progress, marks: track, required: RequiredMessages::default() }, timeline))
    }

    /// The track of a point of this connection.
    fn own_marks<'a>(&self, point: &'a Point) -> Option<&'a ProbedMarks> {
        point.progress::<ProbedMarks>().filter(|track| track.belongs_to(&self.remote.connection))
    }

    /// Sends work for the device.
    fn send_work(
        &mut self,
        work: impl FnOnce(&mut WriteGuard<'_>) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let number = self.remote.connection.with_writer(|turn| {
            let number = turn.next_message_number(&self.progress);
            work(turn).map(|()| number)
        })?;
        self.required.add(self.remote.index, number);
        Ok(())
    }

    /// Reads a region, for whoever is taken out of `to`.
    fn read_region(
        &mut self,
        src: &Region,
        to: &mut Option<(ReadCompleter, Arc<QueueStatus>)>,
    ) -> Result<(), DeviceError> {
        let record = byte_range_record(remote_buffer(src)?, src.offset(), src.bytes());
        let lane = (self.remote.index, &*self.progress);
        let number =
            self.remote.connection.with_writer(|turn| turn.read_tensor(lane, record, src.bytes(), to.take()))?;
        self.required.add(self.remote.index, number);
        Ok(())
    }

    /// Whether the server is known to copy between two regions.
    fn copies_on_server(&self, src: &Region, dst: &Region) -> bool {
        let from = remote_buffer(src).map_or(self.remote.index, |memory| memory.device);
        !regions_overlap(src, dst)
            && self.remote.connection.completions.known_copy_support(from, self.remote.index) == Some(true)
    }

    /// Fills a region where the server has no word for it.
    fn fill_by_upload(&mut self, dst: &Region, memory: &RemoteBuffer, value: u8) -> Result<(), DeviceError> {
        if dst.bytes() == dst.buffer().bytes() {
            let clear = Request::BufferClear(BufferClear { remote_ptr: memory.handle, value });
            return self.send_work(|turn| turn.send(&clear));
        }
        let bytes = vec![value; UPLOAD_CHUNK_BYTES.min(dst.bytes()) as usize];
        for at in (0..dst.bytes()).step_by(UPLOAD_CHUNK_BYTES as usize) {
            let part = dst.part(at, UPLOAD_CHUNK_BYTES.min(dst.bytes() - at))?;
            self.upload(&part, None, &bytes[..part.bytes() as usize])?;
        }
        Ok(())
    }

    /// Finds out whether the server copies between two devices, or within one: not every device does.
    fn probe_copy_support(&mut self, request: &Request<'_>, (from, to): (u32, u32)) -> Result<bool, DeviceError> {
        let (sender, ticket) = Ticket::new();
        self.send_work(|turn| turn.request(request, 1, ReplySink::Waiter(sender)))?;
        let reply = ticket.wait(None)?;
        match Response::decode(Wire::CopyTensor, &reply) {
            Ok(Response::CopyTensor(does)) => {
                self.remote.connection.completions.record_copy_support(from, to, does);
                Ok(does)
            }
            other => Err(self.remote.connection.fail(format!("the server answered COPY_TENSOR with {other:?}"))),
        }
    }

    /// All of it is read before any of it is written: the two may overlap.
    fn copy_through_host(&mut self, src: &Region, dst: &Region) -> Result<(), DeviceError> {
        let from = remote_buffer(src)?;
        let progress = self.remote.connection.completions.progress(from.device);
        let progress = progress.ok_or(DeviceError::Misuse("a region of another device"))?;
        let mut tickets = Vec::new();
        for (at, size) in record_ranges(src.bytes()) {
            let (to, ticket) = ReadCompleter::new(&self.remote);
            let record = byte_range_record(from, src.offset() + at, size);
            let lane = (from.device, &*progress);
            let to = (to, Arc::clone(self.marks.status()));
            self.remote.connection.with_writer(|turn| turn.read_tensor(lane, record, size, Some(to)))?;
            tickets.push((at, size, ticket));
        }
        let pieces = tickets.into_iter().map(|(at, size, ticket)| Ok((dst.part(at, size)?, ticket.wait(None)?)));
        let pieces: Vec<_> = pieces.collect::<Result<_, DeviceError>>()?;
        pieces.iter().try_for_each(|(part, bytes)| self.upload(part, None, bytes))
    }
}

impl QueueProtocol for GgmlProtocol {
    fn must_block(&self, command: &QueueCommand) -> bool {
        match command {
            QueueCommand::Wait(point) => match self.own_marks(point) {
                Some(track) => !track.is_placed(point.seq()),
                None => point.poll() != Ok(true),
            },
            QueueCommand::Copy { src, dst } => !self.copies_on_server(src, dst),
            _ => false,
        }
    }

    fn upload(&mut self, dst: &Region, tensor: Option<&TensorDesc>, data: &[u8]) -> Result<(), DeviceError> {
        let memory = remote_buffer(dst)?;
        let known = |tensor: &TensorDesc| memory.connection.dialect.has_type(tensor.dtype());
        let whole = tensor.filter(|tensor| is_whole_tensor(tensor, dst) && known(tensor));
        if let Some(tensor) = whole {
            let (buffer, data_at) = (memory.handle, memory.base + dst.offset());
            let record = TensorRecord { buffer, data: data_at, ..tensor_record(tensor) };
            return self.send_work(|turn| turn.write_tensor(record, data));
        }
        for (at, piece) in (0..).step_by(UPLOAD_CHUNK_BYTES as usize).zip(data.chunks(UPLOAD_CHUNK_BYTES as usize)) {
            let record = byte_range_record(memory, dst.offset() + at, piece.len() as u64);
            self.send_work(|turn| turn.write_tensor(record, piece))?;
        }
        Ok(())
    }

    fn upload_from_source(
        &mut self,
        dst: &Region,
        tensor: Option<&TensorDesc>,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), SourceError>,
    ) -> Result<(), DeviceError> {
        let at_once = if tensor.is_some() { MAX_STAGED_TENSOR_BYTES } else { MAX_STAGED_UPLOAD_BYTES };
        let piece = if dst.bytes() <= at_once { dst.bytes() } else { UPLOAD_CHUNK_BYTES };
        let mut bytes = vec![0; piece as usize];
        let mut at = 0;
        while at < dst.bytes() {
            let part = dst.part(at, piece.min(dst.bytes() - at))?;
            let bytes = &mut bytes[..part.bytes() as usize];
            fill(bytes)?;
            self.upload(&part, tensor, bytes)?;
            at += part.bytes();
        }
        Ok(())
    }

    fn download(&mut self, parts: Vec<(Region, ReadCompleter)>) -> Result<(), DeviceError> {
        let mut parts = parts.into_iter();
        let mut failed = None;
        while failed.is_none()
            && let Some((src, to)) = parts.next()
        {
            let mut to = Some((to, Arc::clone(self.marks.status())));
            failed = self.read_region(&src, &mut to).err().map(|error| (error, to));
        }
        let Some((error, to)) = failed else { return Ok(()) };
        // What no message was made of is waited for too.
        let left = to.into_iter().map(|(to, _)| to).chain(parts.map(|(_, to)| to));
        left.for_each(|to| to.complete(Err(error.clone())));
        Err(error)
    }

    /// No server of 7.0 does.
    fn load_by_digest(&mut self, recall: DigestLoad) -> Result<(), DeviceError> {
        recall.to.complete(Ok(vec![0]));
        Ok(())
    }

    fn fill(&mut self, dst: &Region, value: u8) -> Result<(), DeviceError> {
        let memory = remote_buffer(dst)?;
        if memory.connection.dialect.number(Wire::MemsetTensor).is_none() {
            return self.fill_by_upload(dst, memory, value);
        }
        for (at, size) in record_ranges(dst.bytes()) {
            let tensor = byte_range_record(memory, dst.offset() + at, size);
            let request = Request::MemsetTensor(MemsetTensor { tensor, offset: 0, size, value });
            self.send_work(|turn| turn.send(&request))?;
        }
        Ok(())
    }

    fn copy(&mut self, src: &Region, dst: &Region) -> Result<(), DeviceError> {
        let (from, to) = (remote_buffer(src)?, remote_buffer(dst)?);
        let known = self.remote.connection.completions.known_copy_support(from.device, to.device);
        let plain = self.copies_on_server(src, dst);
        for (at, size) in record_ranges(dst.bytes()) {
            let request = Request::CopyTensor(CopyTensor {
                src: byte_range_record(from, src.offset() + at, size),
                dst: byte_range_record(to, dst.offset() + at, size),
            });
            if plain {
                let fate = Arc::clone(self.marks.status());
                let told = move |reply: Result<Vec<u8>, DeviceError>| {
                    let Ok(reply) = reply else { return Ok(()) };
                    match Response::decode(Wire::CopyTensor, &reply) {
                        Ok(Response::CopyTensor(copied)) => {
                            if !copied {
                                fate.fail_refused(Wire::CopyTensor);
                            }
                            Ok(())
                        }
                        other => Err(format!("{other:?}")),
                    }
                };
                self.send_work(|turn| turn.request(&request, 1, ReplySink::Callback(Box::new(told))))?;
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

    fn copy_from_peer(&mut self, _: &Region, _: &Region, _: Option<&Point>) -> Result<(), DeviceError> {
        Err(DeviceError::Bug("a copy between servers that do not know each other".to_owned()))
    }

    fn run_graph(&mut self, bodies: &[GraphMessage]) -> Result<(), DeviceError> {
        let device = self.remote.index;
        let fate = Arc::clone(self.marks.status());
        self.send_work(|turn| bodies.iter().try_for_each(|body| turn.compute_graph(device, body, &fate)))
    }

    /// What this connection has sent before is done before what it sends later; anything else is waited for.
    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        if let Some(track) = self.own_marks(point)
            && let PriorWork::Sent(needs) = track.prior_work(point.seq())?
        {
            track.status().add_dependent(self.marks.status(), point.seq());
            self.required.merge(&needs);
            return Ok(());
        }
        point.wait(None)
    }

    fn mark(&mut self, seq: u64) -> Result<(), DeviceError> {
        self.marks.place_mark(seq, &self.required);
        Ok(())
    }

    fn close(&mut self, made: u64) {
        self.marks.close(made);
    }
}

/// Whether two regions do: not every server copies then, and none says so.
fn regions_overlap(src: &Region, dst: &Region) -> bool {
    src.buffer().id() == dst.buffer().id()
        && src.offset() < dst.offset() + dst.bytes()
        && dst.offset() < src.offset() + src.bytes()
}

/// Offsets and sizes of the parts that a record each describes.
fn record_ranges(bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..bytes).step_by(MAX_RECORD_BYTES as usize).map(move |at| (at, MAX_RECORD_BYTES.min(bytes - at)))
}

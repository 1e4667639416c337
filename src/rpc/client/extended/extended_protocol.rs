//! The protocol of a queue on servers with the extensions: sends its commands to its own queue on the server.

use std::sync::Arc;

use super::super::connection::{Connection, MAX_COALESCED_BYTES, ReplySink, WriteGuard};
use super::super::device::{RemoteBuffer, RemoteDevice, is_whole_tensor, remote_buffer};
use super::super::ggml_protocol::MAX_STAGED_TENSOR_BYTES;
use super::super::graph_messages::GraphMessage;
use super::super::queue::{DigestLoad, MAX_STAGED_UPLOAD_BYTES, PlacementWaker, QueueCommand, QueueProtocol};
use super::super::remote_read::ReadCompleter;
use super::mark_tracker::{FailureScope, MarkTracker};
use super::peer_copies::{SendingQueues, UnconfirmedCopies, connection_of};
use crate::device::{
    DeviceError, Domain, Region, ServerMember, SourceError, TRANSFER_CHUNK_BYTES, Timeline, TimelinePoint,
};
use crate::rpc::wire::WireError;
use crate::rpc::wire::ext::{
    BufferSpan, BufferSpans, CloseQueue, CopySpan, ExtCommand, ExtRequest, ExtResponse, Fill, GroupSecret, JoinGroup,
    Load, Mark, NotifyReached, OpenQueue, Ping, RankAddresses, ReadSpans, TensorShape, WriteHead,
};
use crate::tensor::TensorDesc;

/// Chunk size for tensors that are too large for staging: bytes that the writer produces at a time.
const SOURCE_CHUNK_BYTES: u64 = 4 << 20;

/// Bytes of a LOAD besides the name: queue, span, shape, digest, length, runs, and the length of the name.
const LOAD_HEAD_BYTES: u64 = 4 + 24 + 20 + 32 + 8 + 32 + 4;

impl WriteGuard<'_> {
    /// Coalescing: appends a request to the write buffer, which is sent with the next request that has to leave, or when it is
    /// full.
    pub(super) fn buffer_ext(&mut self, request: &ExtRequest<'_>) -> Result<(), DeviceError> {
        self.buffer(|out| request.encode(out));
        if self.buffered_bytes() > MAX_COALESCED_BYTES { self.flush(request.command().name()) } else { Ok(()) }
    }

    /// Sends the write buffer and a request after it.
    pub(super) fn send_ext(&mut self, request: &ExtRequest<'_>) -> Result<(), DeviceError> {
        self.buffer(|out| request.encode(out));
        self.flush(request.command().name())
    }

    /// Appends the head of an upload; its data must follow directly.
    fn buffer_write_head(&mut self, queue: u32, span: BufferSpan, shape: Option<TensorShape>) {
        self.buffer(|out| ExtRequest::WriteHead(WriteHead { queue, span, shape }).encode(out));
    }

    /// Sends `bytes`, and then chunks that `fill` writes over them, until `len` bytes were sent. After an error of `fill` the
    /// rest is zeros, because a message that was begun must be completed.
    fn send_from_source(
        &mut self,
        mut len: u64,
        mut bytes: Vec<u8>,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), SourceError>,
    ) -> Result<Result<(), SourceError>, DeviceError> {
        let mut filled = Ok(());
        loop {
            self.send_with_data(ExtCommand::Write.name(), &bytes)?;
            len -= bytes.len() as u64;
            if len == 0 {
                return Ok(filled);
            }
            bytes.truncate(len.min(SOURCE_CHUNK_BYTES) as usize);
            match &filled {
                Ok(()) => filled = fill(&mut bytes),
                Err(_) => bytes.fill(0),
            }
        }
    }

    /// Appends an upload of one span to the write buffer, or sends it with the buffer if it is long.
    fn write_span(
        &mut self,
        queue: u32,
        span: BufferSpan,
        shape: Option<TensorShape>,
        data: &[u8],
    ) -> Result<(), DeviceError> {
        self.buffer_write_head(queue, span, shape);
        if data.len() > MAX_COALESCED_BYTES {
            return self.send_with_data(ExtCommand::Write.name(), data);
        }
        self.buffer(|out| out.extend_from_slice(data));
        if self.buffered_bytes() > MAX_COALESCED_BYTES { self.flush(ExtCommand::Write.name()) } else { Ok(()) }
    }
}

/// The protocol state of one queue, which has a queue of its own on the server.
pub(super) struct ExtendedProtocol {
    pub(super) remote: Arc<RemoteDevice>,
    pub(super) marks: Arc<MarkTracker>,
    pub(super) timeline: Arc<Timeline>,
    /// Whether the last mark was followed by nothing but reads.
    mark_is_last: bool,
    /// The last read, if no other message followed it.
    pub(super) last_read: Option<u64>,
    /// The queues on other connections that send to this queue.
    pub(super) sources: SendingQueues,
    pub(super) unconfirmed: UnconfirmedCopies,
}

/// Registers a queue and appends its OPEN_QUEUE to the write buffer.
pub(super) fn open_queue(
    connection: &Connection,
    device: u32,
    name: &str,
) -> Result<(Arc<MarkTracker>, Arc<Timeline>), DeviceError> {
    connection.with_writer(|guard| {
        let (tracker, timeline) = guard.shared.session()?.register_queue(connection, name)?;
        guard.buffer_ext(&ExtRequest::OpenQueue(OpenQueue { queue: tracker.queue, device }))?;
        Ok((tracker, timeline))
    })
}

/// Closes a queue. `last_made` is the last mark that was made. Does not block: the messages are deferred.
pub(super) fn close_queue(connection: &Arc<Connection>, tracker: &Arc<MarkTracker>, last_made: u64) {
    let (reply_connection, tracker) = (Arc::clone(connection), Arc::clone(tracker));
    connection.defer_send(move |guard| {
        let Some(session) = &guard.shared.session else { return Ok(()) };
        let queue = tracker.queue;
        let last = tracker.close();
        // A NOTIFY_REACHED after the last mark makes the server report complete work before it closes the queue.
        if let Some(number) = last {
            guard.buffer(|out| ExtRequest::NotifyReached(NotifyReached { queue, number }).encode(out));
        }
        let request = ExtRequest::CloseQueue(CloseQueue { queue });
        if last.is_none() && !session.has_outstanding_reads(queue) {
            guard.send_ext(&request)?;
            session.queue_closed_idle(&tracker, last_made);
            return Ok(());
        }
        guard.buffer(|out| request.encode(out));
        let on_reply = move |_| {
            if let Some(session) = &reply_connection.session {
                session.queue_closed(queue);
            }
            Ok(())
        };
        let ping = ExtRequest::Ping(Ping {});
        guard.request_encoded(ExtCommand::Ping.name(), 5..=5, ReplySink::Callback(Box::new(on_reply)), |out| {
            ping.encode(out)
        })
    });
}

impl ExtendedProtocol {
    pub(super) fn new(remote: Arc<RemoteDevice>) -> Result<ExtendedProtocol, DeviceError> {
        let (tracker, timeline) = open_queue(&remote.connection, remote.index, &remote.info.name)?;
        Ok(ExtendedProtocol {
            remote,
            marks: tracker,
            timeline,
            mark_is_last: false,
            last_read: None,
            sources: SendingQueues::default(),
            unconfirmed: UnconfirmedCopies::default(),
        })
    }

    /// The mark tracker of a point of this connection.
    fn own_marks<'a>(&self, point: &'a TimelinePoint) -> Option<&'a MarkTracker> {
        point.completion_source::<MarkTracker>().filter(|tracker| tracker.belongs_to(&self.remote.connection))
    }

    fn with_writer<T>(
        &mut self,
        work: impl FnOnce(&mut WriteGuard<'_>, u32) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        (self.mark_is_last, self.last_read) = (false, None);
        let queue = self.marks.queue;
        self.remote.connection.with_writer(|guard| work(guard, queue))
    }

    /// Limits of one read: the number of its spans, and their bytes.
    fn read_limits(&self) -> Result<(usize, u64), DeviceError> {
        let max_message = self.remote.connection.session()?.server.max_message;
        // Spans of 24 bytes follow the queue (4 bytes) and the read's id (8 bytes).
        Ok((usize::try_from((max_message - 12) / 24).unwrap_or(usize::MAX), max_message))
    }
}

impl QueueProtocol for ExtendedProtocol {
    fn must_block(&self, command: &QueueCommand) -> bool {
        match command {
            QueueCommand::Wait(point) => match self.own_marks(point) {
                Some(tracker) => !tracker.can_be_waited_for(point.seq()) && !tracker.is_reached(point.seq()),
                None => point.poll() != Ok(true),
            },
            QueueCommand::PeerCopy { src, dst, after } => {
                let ready = self.remote.connection.has_token() && self.unconfirmed.has_room(dst.bytes());
                let after = after.as_ref();
                !ready || after.is_some_and(|after| !region_connection(src).is_ok_and(|source| source.can_wait(after)))
            }
            _ => false,
        }
    }

    fn upload(&mut self, dst: &Region, tensor: Option<&TensorDesc>, data: &[u8]) -> Result<(), DeviceError> {
        let memory = remote_buffer(dst)?;
        if let Some(tensor) = tensor.filter(|tensor| is_whole_tensor(tensor, dst)) {
            let span = span(memory, dst.offset(), dst.bytes());
            return self.with_writer(|guard, queue| guard.write_span(queue, span, Some(shape(tensor)), data));
        }
        for (at, chunk) in (0..).step_by(TRANSFER_CHUNK_BYTES as usize).zip(data.chunks(TRANSFER_CHUNK_BYTES as usize))
        {
            let span = span(memory, dst.offset() + at, chunk.len() as u64);
            self.with_writer(|guard, queue| guard.write_span(queue, span, None, chunk))?;
        }
        Ok(())
    }

    fn upload_from_source(
        &mut self,
        dst: &Region,
        tensor: Option<&TensorDesc>,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), SourceError>,
    ) -> Result<(), DeviceError> {
        let memory = remote_buffer(dst)?;
        if let Some(tensor) =
            tensor.filter(|tensor| is_whole_tensor(tensor, dst) && dst.bytes() > MAX_STAGED_UPLOAD_BYTES)
        {
            let span = span(memory, dst.offset(), dst.bytes());
            // The first chunk is filled before the writer is taken, so that other queues can send meanwhile.
            let first = if span.len <= MAX_STAGED_TENSOR_BYTES { span.len } else { SOURCE_CHUNK_BYTES };
            let mut bytes = vec![0; first as usize];
            fill(&mut bytes)?;
            return self.with_writer(|guard, queue| {
                guard.buffer_write_head(queue, span, Some(shape(tensor)));
                guard.send_from_source(span.len, bytes, fill).map(|filled| filled.map_err(DeviceError::Source))
            })?;
        }
        let mut bytes = vec![0; dst.bytes().min(TRANSFER_CHUNK_BYTES) as usize];
        let mut at = 0;
        while at < dst.bytes() {
            let part = dst.subregion(at, TRANSFER_CHUNK_BYTES.min(dst.bytes() - at))?;
            let bytes = &mut bytes[..part.bytes() as usize];
            fill(bytes)?;
            self.upload(&part, tensor, bytes)?;
            at += part.bytes();
        }
        Ok(())
    }

    fn download(&mut self, parts: Vec<(Region, ReadCompleter)>) -> Result<(), DeviceError> {
        let (tracker, marked, (max_spans, max_bytes)) =
            (Arc::clone(&self.marks), self.mark_is_last, self.read_limits()?);
        let mut reads: Vec<Vec<(Region, BufferSpan, ReadCompleter)>> = Vec::new();
        let (mut free_bytes, mut last) = (0, None);
        for (src, to) in parts {
            let span = span(remote_buffer(&src)?, src.offset(), src.bytes());
            match reads.last_mut().filter(|read| read.len() < max_spans && span.len <= free_bytes) {
                Some(read) => read.push((src, span, to)),
                None => {
                    free_bytes = max_bytes;
                    reads.push(vec![(src, span, to)]);
                }
            }
            free_bytes -= span.len;
        }
        let sent = self.remote.connection.with_writer(|guard| {
            let session = guard.shared.session()?;
            let proven_mark = tracker.place_read(marked);
            for read in std::mem::take(&mut reads) {
                let spans: Vec<_> = read.iter().map(|(_, span, _)| BufferSpans::encode(span)).collect();
                // The regions are dropped only here, with exclusive use of the writer: a FREE_BUFFER follows the READ.
                let parts = read.into_iter().map(|(_, span, to)| (span.len, to)).collect();
                let id = session.register_read(tracker.queue, proven_mark, parts);
                last = Some(id);
                let request = ReadSpans { queue: tracker.queue, id, spans: BufferSpans::new(&spans) };
                guard.buffer(|out| ExtRequest::ReadSpans(request).encode(out));
            }
            // The reads must be registered before this check: a thread that fails the connection then either finds the reads,
            // or has failed the connection before the check.
            guard.shared.check_alive().inspect_err(|failure| session.fail_all(failure))?;
            // The same holds for a failed queue: the server does not reply to a READ after the failure.
            tracker.failure().map_or(Ok(()), Err)?;
            guard.flush(ExtCommand::Read.name())
        });
        self.last_read = last;
        sent.inspect_err(|e| {
            reads.into_iter().flatten().for_each(|(_, _, to)| to.complete(Err(e.clone())));
            if let Some(session) = &self.remote.connection.session {
                session.fail_queue(&self.marks, e, FailureScope::AllConnections);
            }
        })
    }

    fn load_by_digest(&mut self, load: DigestLoad) -> Result<(), DeviceError> {
        let DigestLoad { dst, tensor, digest, bytes, runs, name, to } = load;
        let span = span(remote_buffer(&dst)?, dst.offset(), dst.bytes());
        let shape = tensor.filter(|tensor| is_whole_tensor(tensor, &dst)).map(|tensor| shape(&tensor));
        // The name is only a hint. It is left out if the message would exceed the server's limit.
        let max_message = self.remote.connection.session()?.server.max_message;
        let name = if name.len() as u64 + LOAD_HEAD_BYTES <= max_message { &*name } else { "" };
        let mut to = Some(to);
        let sent = self.with_writer(|guard, queue| {
            let to = to.take();
            let on_reply = move |reply: Result<Vec<u8>, DeviceError>| {
                let check = reply.as_ref().map_or(Ok(()), |reply| check_load_reply(reply)).map_err(|e| e.to_string());
                if let Some(to) = to {
                    to.complete(reply);
                }
                check
            };
            let load = ExtRequest::Load(Load { queue, span, shape, digest, bytes, runs, name });
            guard.request_encoded(ExtCommand::Load.name(), 1..=1, ReplySink::Callback(Box::new(on_reply)), |out| {
                load.encode(out)
            })
        });
        // On a lost connection no reply arrives.
        sent.inspect_err(|e| to.into_iter().for_each(|to| to.complete(Err(e.clone()))))
    }

    fn fill(&mut self, dst: &Region, value: u8) -> Result<(), DeviceError> {
        let span = span(remote_buffer(dst)?, dst.offset(), dst.bytes());
        self.with_writer(|guard, queue| guard.buffer_ext(&ExtRequest::Fill(Fill { queue, span, value })))
    }

    fn copy(&mut self, src: &Region, dst: &Region) -> Result<(), DeviceError> {
        let [src, dst] =
            [(remote_buffer(src)?, src), (remote_buffer(dst)?, dst)].map(|(m, r)| span(m, r.offset(), r.bytes()));
        self.with_writer(|guard, queue| guard.send_ext(&ExtRequest::CopySpan(CopySpan { queue, src, dst })))
    }

    fn copy_from_peer(&mut self, src: &Region, dst: &Region, after: Option<&TimelinePoint>) -> Result<(), DeviceError> {
        (self.mark_is_last, self.last_read) = (false, None);
        self.receive_copy(src, dst, after)
    }

    fn run_graph(&mut self, messages: &[GraphMessage]) -> Result<(), DeviceError> {
        self.with_writer(|guard, queue| {
            messages.iter().try_for_each(|message| guard.run_graph(queue, message))?;
            guard.flush(ExtCommand::RunGraph.name())
        })
    }

    /// Wait elimination: the server itself waits (WAIT) for points of this connection. This thread waits for any other point.
    fn wait(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        if let Some(tracker) = self.own_marks(point) {
            let seq = point.seq();
            if tracker.queue == self.marks.queue || tracker.is_reached(seq) {
                return Ok(());
            }
            if let Some(failure) = tracker.failure() {
                return Err(failure);
            }
            tracker.wait_until_placed(point, &self.marks)?;
            let dependent = Arc::clone(&self.marks);
            let placed = self.with_writer(|guard, _| {
                let placed = guard.buffer_wait(&dependent, point);
                if guard.buffered_bytes() > MAX_COALESCED_BYTES {
                    guard.flush(ExtCommand::Wait.name()).map(|()| placed)
                } else {
                    Ok(placed)
                }
            })?;
            if placed {
                return Ok(());
            }
        }
        point.wait(None)
    }

    /// Sent at once: the servers connect when all ranks have joined, while the client goes on.
    fn join(&mut self, group: u32, member: &ServerMember) -> Result<(), DeviceError> {
        let mut random = GroupSecret::default();
        let failed = |e: getrandom::Error| DeviceError::Exhausted { resource: "random bytes", reason: e.to_string() };
        getrandom::fill(&mut random).map_err(failed)?;
        let (secret, own) = (member.secret(random), &self.remote.connection);
        let address = |domain: &Domain| {
            if *domain == own.domain() {
                return Ok(String::new());
            }
            let other = connection_of(domain).map(|other| other.endpoint().to_owned());
            other.ok_or(DeviceError::Misuse("the connection to a server of the group is closed"))
        };
        let addresses = member.domains().iter().map(address).collect::<Result<Vec<_>, _>>()?;
        // The servers tell each other's sessions apart by address.
        let ranks = || addresses.iter().zip(member.domains()).filter(|(address, _)| !address.is_empty());
        let is_ambiguous = |(address, domain): (&String, &Domain)| ranks().any(|(a, d)| a == address && d != domain);
        if ranks().any(is_ambiguous) {
            return Err(DeviceError::Misuse("a group of three or more ranks has two connections to one server"));
        }
        let addresses = RankAddresses::encode(addresses.iter().map(String::as_str));
        let (rank, part_bytes) = (member.rank() as u32, member.part_bytes());
        let addresses = RankAddresses::new(&addresses);
        self.with_writer(|guard, queue| {
            guard.send_ext(&ExtRequest::JoinGroup(JoinGroup { queue, group, secret, rank, part_bytes, addresses }))
        })
    }

    fn mark(&mut self, seq: u64) -> Result<(), DeviceError> {
        let (tracker, read) = (Arc::clone(&self.marks), self.last_read);
        self.with_writer(|guard, queue| {
            let mut request_now = tracker.place_mark(seq);
            if let Some(read) = read {
                request_now = false;
                if guard.shared.session()?.extend_read_proof(read, seq) {
                    tracker.cover_by_read(seq);
                } else if tracker.failure().is_none() {
                    // The data of the read has already arrived.
                    guard.shared.session()?.record_reached(queue, seq);
                }
            }
            let mark = ExtRequest::Mark(Mark { queue, number: seq });
            if !request_now {
                return guard.buffer_ext(&mark);
            }
            guard.buffer(|out| mark.encode(out));
            guard.send_ext(&ExtRequest::NotifyReached(NotifyReached { queue, number: seq }))
        })?;
        self.mark_is_last = true;
        Ok(())
    }

    fn placement_waker(&self) -> PlacementWaker {
        let marks = Arc::clone(&self.marks);
        Arc::new(move || marks.wake_placement_waiters())
    }

    fn close(&mut self, last_made: u64) {
        close_queue(&self.remote.connection, &self.marks, last_made);
        self.sources.close();
    }
}

/// A range of a buffer.
pub(super) fn span(memory: &RemoteBuffer, offset: u64, len: u64) -> BufferSpan {
    BufferSpan { buffer: memory.handle, offset, len }
}

/// The connection of a region's buffer.
pub(super) fn region_connection(src: &Region) -> Result<&Arc<Connection>, DeviceError> {
    Ok(&remote_buffer(src)?.connection)
}

/// Type and shape of a tensor whose dimensions fit the wire format.
fn shape(tensor: &TensorDesc) -> TensorShape {
    TensorShape { dtype: tensor.dtype().to_wire(), ne: tensor.ne().map(|n| n as u32) }
}

/// Validates the reply to a LOAD.
fn check_load_reply(reply: &[u8]) -> Result<(), WireError> {
    ExtResponse::decode(ExtCommand::Load, reply).map(drop)
}

//! What a queue says to a server that has greeted.

use std::sync::Arc;

use super::super::connection::{Connection, MAX_COALESCED_BYTES, ReplySink, WriteGuard};
use super::super::device::{RemoteBuffer, RemoteDevice, is_whole_tensor, remote_buffer};
use super::super::ggml_protocol::MAX_STAGED_TENSOR_BYTES;
use super::super::graph_messages::GraphMessage;
use super::super::queue::{DigestLoad, MAX_STAGED_UPLOAD_BYTES, QueueCommand, QueueProtocol, ReadCompleter};
use super::mark_tracker::{FailureScope, MarkTracker};
use super::peer_copies::SendingQueues;
use crate::device::{DeviceError, PIECE, Point, Region, SourceError, Timeline};
use crate::rpc::wire::WireError;
use crate::rpc::wire::ext::{
    Answer, Ask, CloseQueue, Copy, ExtCommand, ExtRequest, Fill, Load, Mark, OpenQueue, Ping, Read, Shape, Span, Spans,
    WriteHead,
};
use crate::tensor::TensorDesc;

/// Bytes that are asked of a writer at a time where a tensor is too large to be gathered from it.
const SOURCE_CHUNK_BYTES: u64 = 4 << 20;

/// Bytes of a LOAD besides the name.
const LOAD_HEAD_BYTES: u64 = 4 + 24 + 20 + 32 + 4;

impl WriteGuard<'_> {
    /// Says something that can wait for what leaves next.
    pub(super) fn buffer_ext(&mut self, request: &ExtRequest<'_>) -> Result<(), DeviceError> {
        self.buffer(|out| request.encode(out));
        if self.buffered_bytes() > MAX_COALESCED_BYTES { self.flush(request.command().name()) } else { Ok(()) }
    }

    /// Says something at once, and all that has been waiting for it.
    pub(super) fn send_ext(&mut self, request: &ExtRequest<'_>) -> Result<(), DeviceError> {
        self.buffer(|out| request.encode(out));
        self.flush(request.command().name())
    }

    /// The head of an upload, whose data has to come behind it.
    fn buffer_write_head(&mut self, queue: u32, span: Span, shape: Option<Shape>) {
        self.buffer(|out| ExtRequest::WriteHead(WriteHead { queue, span, shape }).encode(out));
    }

    /// Sends `bytes`, and then what `fill` writes over them, piece after piece, until `len` bytes have left. Where it fails the
    /// rest is zeros: what was begun must be ended.
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

    fn write_span(&mut self, queue: u32, span: Span, shape: Option<Shape>, data: &[u8]) -> Result<(), DeviceError> {
        self.buffer_write_head(queue, span, shape);
        if data.len() > MAX_COALESCED_BYTES {
            return self.send_with_data(ExtCommand::Write.name(), data);
        }
        self.buffer(|out| out.extend_from_slice(data));
        if self.buffered_bytes() > MAX_COALESCED_BYTES { self.flush(ExtCommand::Write.name()) } else { Ok(()) }
    }
}

/// Speaks for one queue, which is one of the server's.
pub(super) struct ExtendedProtocol {
    remote: Arc<RemoteDevice>,
    pub(super) marks: Arc<MarkTracker>,
    pub(super) timeline: Arc<Timeline>,
    /// Whether nothing was said since the last mark but what reads.
    mark_is_last: bool,
    /// The last read, if nothing was said since.
    last_read: Option<u64>,
    sources: SendingQueues,
}

/// A queue's number and its books; the server is told with whatever leaves next.
pub(super) fn open_queue(
    connection: &Connection,
    device: u32,
    name: &str,
) -> Result<(Arc<MarkTracker>, Arc<Timeline>), DeviceError> {
    connection.with_writer(|turn| {
        let (track, timeline) = turn.shared.session()?.register_queue(connection, name)?;
        turn.buffer_ext(&ExtRequest::OpenQueue(OpenQueue { queue: track.queue, device }))?;
        Ok((track, timeline))
    })
}

/// Ends a queue, of which marks up to `made` were made. Waits for nobody.
pub(super) fn close_queue(connection: &Arc<Connection>, track: &Arc<MarkTracker>, made: u64) {
    let (kept, track) = (Arc::clone(connection), Arc::clone(track));
    connection.defer_send(move |turn| {
        let Some(session) = &turn.shared.session else { return Ok(()) };
        let queue = track.queue;
        let last = track.close();
        // What is done by now is said before the end of the queue is.
        if let Some(number) = last {
            turn.buffer(|out| ExtRequest::Ask(Ask { queue, number }).encode(out));
        }
        let request = ExtRequest::CloseQueue(CloseQueue { queue });
        if last.is_none() && !session.has_outstanding_reads(queue) {
            turn.send_ext(&request)?;
            session.peers.tokens.forget_queue(queue);
            session.queue_closed_idle(&track, made);
            return Ok(());
        }
        turn.buffer(|out| request.encode(out));
        session.peers.tokens.forget_queue(queue);
        let ended = move |_| {
            if let Some(session) = &kept.session {
                session.queue_closed(queue);
            }
            Ok(())
        };
        let ping = ExtRequest::Ping(Ping {});
        turn.request_encoded(ExtCommand::Ping.name(), 5..=5, ReplySink::Callback(Box::new(ended)), |out| {
            ping.encode(out)
        })
    });
}

impl ExtendedProtocol {
    pub(super) fn new(remote: Arc<RemoteDevice>) -> Result<ExtendedProtocol, DeviceError> {
        let (track, timeline) = open_queue(&remote.connection, remote.index, &remote.info.name)?;
        Ok(ExtendedProtocol {
            remote,
            marks: track,
            timeline,
            mark_is_last: false,
            last_read: None,
            sources: SendingQueues::default(),
        })
    }

    /// The track of a point of this connection.
    fn own_marks<'a>(&self, point: &'a Point) -> Option<&'a MarkTracker> {
        point.progress::<MarkTracker>().filter(|track| track.belongs_to(&self.remote.connection))
    }

    fn with_writer<T>(
        &mut self,
        work: impl FnOnce(&mut WriteGuard<'_>, u32) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        (self.mark_is_last, self.last_read) = (false, None);
        let queue = self.marks.queue;
        self.remote.connection.with_writer(|turn| work(turn, queue))
    }

    /// The most spans of one read, and the most bytes.
    fn read_limits(&self) -> Result<(usize, u64), DeviceError> {
        let most = self.remote.connection.session()?.server.max_message;
        // Behind the queue's number and the read's.
        Ok((usize::try_from((most - 12) / 24).unwrap_or(usize::MAX), most))
    }
}

impl QueueProtocol for ExtendedProtocol {
    fn must_block(&self, command: &QueueCommand) -> bool {
        match command {
            QueueCommand::Wait(point) => match self.own_marks(point) {
                Some(track) => !track.can_be_waited_for(point.seq()) && !track.is_reached(point.seq()),
                None => point.poll() != Ok(true),
            },
            QueueCommand::PeerCopy { src, dst, after } => {
                let ready = self.remote.connection.has_tokens(dst.bytes());
                let after = after.as_ref();
                !ready || after.is_some_and(|after| !source_connection(src).is_ok_and(|source| source.can_wait(after)))
            }
            _ => false,
        }
    }

    fn upload(&mut self, dst: &Region, tensor: Option<&TensorDesc>, data: &[u8]) -> Result<(), DeviceError> {
        let memory = remote_buffer(dst)?;
        if let Some(tensor) = tensor.filter(|tensor| is_whole_tensor(tensor, dst)) {
            let span = span(memory, dst.offset(), dst.bytes());
            return self.with_writer(|turn, queue| turn.write_span(queue, span, Some(shape(tensor)), data));
        }
        for (at, piece) in (0..).step_by(PIECE as usize).zip(data.chunks(PIECE as usize)) {
            let span = span(memory, dst.offset() + at, piece.len() as u64);
            self.with_writer(|turn, queue| turn.write_span(queue, span, None, piece))?;
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
            // While it is filled, others speak.
            let first = if span.len <= MAX_STAGED_TENSOR_BYTES { span.len } else { SOURCE_CHUNK_BYTES };
            let mut bytes = vec![0; first as usize];
            fill(&mut bytes)?;
            return self.with_writer(|turn, queue| {
                turn.buffer_write_head(queue, span, Some(shape(tensor)));
                turn.send_from_source(span.len, bytes, fill).map(|filled| filled.map_err(DeviceError::Source))
            })?;
        }
        let mut bytes = vec![0; dst.bytes().min(PIECE) as usize];
        let mut at = 0;
        while at < dst.bytes() {
            let part = dst.part(at, PIECE.min(dst.bytes() - at))?;
            let bytes = &mut bytes[..part.bytes() as usize];
            fill(bytes)?;
            self.upload(&part, tensor, bytes)?;
            at += part.bytes();
        }
        Ok(())
    }

    fn download(&mut self, parts: Vec<(Region, ReadCompleter)>) -> Result<(), DeviceError> {
        let (track, marked, (spans, bytes)) = (Arc::clone(&self.marks), self.mark_is_last, self.read_limits()?);
        let mut reads: Vec<Vec<(Span, ReadCompleter)>> = Vec::new();
        let (mut room, mut last) = (0, None);
        for (src, to) in parts {
            let span = span(remote_buffer(&src)?, src.offset(), src.bytes());
            match reads.last_mut().filter(|read| read.len() < spans && span.len <= room) {
                Some(read) => read.push((span, to)),
                None => {
                    room = bytes;
                    reads.push(vec![(span, to)]);
                }
            }
            room -= span.len;
        }
        let sent = self.remote.connection.with_writer(|turn| {
            let session = turn.shared.session()?;
            let proves = track.place_read(marked);
            for read in std::mem::take(&mut reads) {
                let spans: Vec<_> = read.iter().map(|(span, _)| Spans::encode(span)).collect();
                let parts = read.into_iter().map(|(span, to)| (span.len, to)).collect();
                let id = session.register_read(track.queue, proves, parts);
                last = Some(id);
                let request = Read { queue: track.queue, id, spans: Spans::new(&spans) };
                turn.buffer(|out| ExtRequest::Read(request).encode(out));
            }
            // After the books have them: whoever fails the connection either sees the reads, or has failed it before this.
            turn.shared.check_alive().inspect_err(|failure| session.fail_all(failure))?;
            // And whoever fails the queue: the server answers no READ that comes after that.
            track.failure().map_or(Ok(()), Err)?;
            turn.flush(ExtCommand::Read.name())
        });
        self.last_read = last;
        sent.inspect_err(|e| {
            reads.into_iter().flatten().for_each(|(_, to)| to.complete(Err(e.clone())));
            if let Some(session) = &self.remote.connection.session {
                session.fail_queue(&self.marks, e, FailureScope::AllConnections);
            }
        })
    }

    fn load_by_digest(&mut self, recall: DigestLoad) -> Result<(), DeviceError> {
        let DigestLoad { dst, tensor, digest, name, to } = recall;
        let span = span(remote_buffer(&dst)?, dst.offset(), dst.bytes());
        let shape = tensor.filter(|tensor| is_whole_tensor(tensor, &dst)).map(|tensor| shape(&tensor));
        // The name is a hint: it can be left out where the server takes no message that long.
        let most = self.remote.connection.session()?.server.max_message;
        let name = if name.len() as u64 + LOAD_HEAD_BYTES <= most { &*name } else { "" };
        let mut to = Some(to);
        let sent = self.with_writer(|turn, queue| {
            let to = to.take();
            let told = move |reply: Result<Vec<u8>, DeviceError>| {
                let wrong = reply.as_ref().map_or(Ok(()), |reply| check_load_reply(reply)).map_err(|e| e.to_string());
                if let Some(to) = to {
                    to.complete(reply);
                }
                wrong
            };
            let load = ExtRequest::Load(Load { queue, span, shape, digest, name });
            turn.request_encoded(ExtCommand::Load.name(), 1..=1, ReplySink::Callback(Box::new(told)), |out| {
                load.encode(out)
            })
        });
        // A connection that is lost says nothing.
        sent.inspect_err(|e| to.into_iter().for_each(|to| to.complete(Err(e.clone()))))
    }

    fn fill(&mut self, dst: &Region, value: u8) -> Result<(), DeviceError> {
        let span = span(remote_buffer(dst)?, dst.offset(), dst.bytes());
        self.with_writer(|turn, queue| turn.buffer_ext(&ExtRequest::Fill(Fill { queue, span, value })))
    }

    fn copy(&mut self, src: &Region, dst: &Region) -> Result<(), DeviceError> {
        let [src, dst] =
            [(remote_buffer(src)?, src), (remote_buffer(dst)?, dst)].map(|(m, r)| span(m, r.offset(), r.bytes()));
        self.with_writer(|turn, queue| turn.send_ext(&ExtRequest::Copy(Copy { queue, src, dst })))
    }

    fn copy_from_peer(&mut self, src: &Region, dst: &Region, after: Option<&Point>) -> Result<(), DeviceError> {
        (self.mark_is_last, self.last_read) = (false, None);
        self.remote.connection.receive_copy((&self.marks, &mut self.sources), src, dst, after)
    }

    fn run_graph(&mut self, bodies: &[GraphMessage]) -> Result<(), DeviceError> {
        self.with_writer(|turn, queue| {
            bodies.iter().try_for_each(|body| turn.run_graph(queue, body))?;
            turn.flush(ExtCommand::RunGraph.name())
        })
    }

    /// The server waits for points of this connection that it knows of; anything else is waited for here.
    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        if let Some(track) = self.own_marks(point) {
            let seq = point.seq();
            if track.queue == self.marks.queue || track.is_reached(seq) {
                return Ok(());
            }
            if let Some(failure) = track.failure() {
                return Err(failure);
            }
            track.wait_until_placed(seq)?;
            let user = Arc::clone(&self.marks);
            let said = self.with_writer(|turn, _| {
                let said = turn.buffer_wait(&user, point);
                if turn.buffered_bytes() > MAX_COALESCED_BYTES {
                    turn.flush(ExtCommand::Wait.name()).map(|()| said)
                } else {
                    Ok(said)
                }
            })?;
            if said {
                return Ok(());
            }
        }
        point.wait(None)
    }

    fn mark(&mut self, seq: u64) -> Result<(), DeviceError> {
        let (track, read) = (Arc::clone(&self.marks), self.last_read);
        self.with_writer(|turn, queue| {
            let mut asks = track.place_mark(seq);
            if let Some(read) = read {
                asks = false;
                if turn.shared.session()?.extend_read_proof(read, seq) {
                    track.cover_by_read(seq);
                } else if track.failure().is_none() {
                    // Its bytes are here.
                    turn.shared.session()?.record_reached(queue, seq);
                }
            }
            let mark = ExtRequest::Mark(Mark { queue, number: seq });
            if !asks {
                return turn.buffer_ext(&mark);
            }
            turn.buffer(|out| mark.encode(out));
            turn.send_ext(&ExtRequest::Ask(Ask { queue, number: seq }))
        })?;
        self.mark_is_last = true;
        Ok(())
    }

    fn close(&mut self, made: u64) {
        close_queue(&self.remote.connection, &self.marks, made);
        self.sources.close();
    }
}

/// A part of a buffer.
pub(super) fn span(memory: &RemoteBuffer, offset: u64, len: u64) -> Span {
    Span { buffer: memory.handle, offset, len }
}

/// The connection of a region's buffer.
pub(super) fn source_connection(src: &Region) -> Result<&Arc<Connection>, DeviceError> {
    Ok(&remote_buffer(src)?.connection)
}

/// Type and shape of a tensor whose dimensions are known to fit.
fn shape(tensor: &TensorDesc) -> Shape {
    Shape { dtype: tensor.dtype().to_wire(), ne: tensor.ne().map(|n| n as u32) }
}

/// Whether the answer to a LOAD is one.
fn check_load_reply(reply: &[u8]) -> Result<(), WireError> {
    Answer::decode(ExtCommand::Load, reply).map(drop)
}

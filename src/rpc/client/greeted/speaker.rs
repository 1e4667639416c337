//! What a queue says to a server that has greeted.

use std::sync::Arc;

use super::super::connection::{Connection, JOINED, To, Turn};
use super::super::device::{Memory, Remote, memory, whole};
use super::super::graph::Body;
use super::super::plain::GATHERED;
use super::super::queue::{Awaited, Command, Recall, SMALL, Speaker};
use super::peers::Sources;
use super::track::{Track, Whom};
use crate::device::{DeviceError, PIECE, Point, Region, SourceError, Timeline};
use crate::rpc::wire::WireError;
use crate::rpc::wire::ext::{
    Answer, Ask, CloseQueue, Copy, ExtCommand, ExtRequest, Fill, Load, Mark, OpenQueue, Ping, Read, Shape, Span, Spans,
    WriteHead,
};
use crate::tensor::TensorDesc;

/// Bytes that are asked of a writer at a time where a tensor is too large to be gathered from it.
const STREAMED: u64 = 4 << 20;

/// Bytes of a LOAD besides the name.
const LOAD: u64 = 4 + 24 + 20 + 32 + 4;

impl Turn<'_> {
    /// Says something that can wait for what leaves next.
    pub(super) fn say(&mut self, request: &ExtRequest<'_>) -> Result<(), DeviceError> {
        self.put(|out| request.encode(out));
        if self.waiting() > JOINED { self.leave(request.command().name()) } else { Ok(()) }
    }

    /// Says something at once, and all that has been waiting for it.
    pub(super) fn say_now(&mut self, request: &ExtRequest<'_>) -> Result<(), DeviceError> {
        self.put(|out| request.encode(out));
        self.leave(request.command().name())
    }

    /// The head of an upload, whose data has to come behind it.
    fn head(&mut self, queue: u32, span: Span, shape: Option<Shape>) {
        self.put(|out| ExtRequest::WriteHead(WriteHead { queue, span, shape }).encode(out));
    }

    /// Sends `bytes`, and then what `fill` writes over them, piece after piece, until `len` bytes have left. Where it fails the
    /// rest is zeros: what was begun must be ended.
    fn stream_from(
        &mut self,
        mut len: u64,
        mut bytes: Vec<u8>,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), SourceError>,
    ) -> Result<Result<(), SourceError>, DeviceError> {
        let mut filled = Ok(());
        loop {
            self.stream(ExtCommand::Write.name(), &bytes)?;
            len -= bytes.len() as u64;
            if len == 0 {
                return Ok(filled);
            }
            bytes.truncate(len.min(STREAMED) as usize);
            match &filled {
                Ok(()) => filled = fill(&mut bytes),
                Err(_) => bytes.fill(0),
            }
        }
    }

    fn write(&mut self, queue: u32, span: Span, shape: Option<Shape>, data: &[u8]) -> Result<(), DeviceError> {
        self.head(queue, span, shape);
        if data.len() > JOINED {
            return self.stream(ExtCommand::Write.name(), data);
        }
        self.put(|out| out.extend_from_slice(data));
        if self.waiting() > JOINED { self.leave(ExtCommand::Write.name()) } else { Ok(()) }
    }
}

/// Speaks for one queue, which is one of the server's.
pub(super) struct Greeted {
    remote: Arc<Remote>,
    pub(super) track: Arc<Track>,
    pub(super) timeline: Arc<Timeline>,
    /// Whether nothing was said since the last mark but what reads.
    marked: bool,
    /// The last read, if nothing was said since.
    read: Option<u64>,
    sources: Sources,
}

/// A queue's number and its books; the server is told with whatever leaves next.
pub(super) fn open(
    connection: &Connection,
    device: u32,
    name: &str,
) -> Result<(Arc<Track>, Arc<Timeline>), DeviceError> {
    connection.turn(|turn| {
        let (track, timeline) = turn.shared.session()?.open(connection, name)?;
        turn.say(&ExtRequest::OpenQueue(OpenQueue { queue: track.queue, device }))?;
        Ok((track, timeline))
    })
}

/// Ends a queue, of which marks up to `made` were made. Waits for nobody.
pub(super) fn close(connection: &Arc<Connection>, track: &Arc<Track>, made: u64) {
    let (kept, track) = (Arc::clone(connection), Arc::clone(track));
    connection.later(move |turn| {
        let Some(session) = &turn.shared.session else { return Ok(()) };
        let queue = track.queue;
        let last = track.close();
        // What is done by now is said before the end of the queue is.
        if let Some(number) = last {
            turn.put(|out| ExtRequest::Ask(Ask { queue, number }).encode(out));
        }
        let request = ExtRequest::CloseQueue(CloseQueue { queue });
        if last.is_none() && !session.reads(queue) {
            turn.say_now(&request)?;
            session.peers.tickets.forget(queue);
            session.ended_at(&track, made);
            return Ok(());
        }
        turn.put(|out| request.encode(out));
        session.peers.tickets.forget(queue);
        let ended = move |_| {
            if let Some(session) = &kept.session {
                session.ended(queue);
            }
            Ok(())
        };
        let ping = ExtRequest::Ping(Ping {});
        turn.ask(ExtCommand::Ping.name(), 5..=5, To::Told(Box::new(ended)), |out| ping.encode(out))
    });
}

impl Greeted {
    pub(super) fn new(remote: Arc<Remote>) -> Result<Greeted, DeviceError> {
        let (track, timeline) = open(&remote.connection, remote.index, &remote.info.name)?;
        Ok(Greeted { remote, track, timeline, marked: false, read: None, sources: Sources::default() })
    }

    /// The track of a point of this connection.
    fn own<'a>(&self, point: &'a Point) -> Option<&'a Track> {
        point.progress::<Track>().filter(|track| track.is_of(&self.remote.connection))
    }

    fn turn<T>(&mut self, work: impl FnOnce(&mut Turn<'_>, u32) -> Result<T, DeviceError>) -> Result<T, DeviceError> {
        (self.marked, self.read) = (false, None);
        let queue = self.track.queue;
        self.remote.connection.turn(|turn| work(turn, queue))
    }

    /// The most spans of one read, and the most bytes.
    fn limits(&self) -> Result<(usize, u64), DeviceError> {
        let most = self.remote.connection.session()?.server.max_message;
        // Behind the queue's number and the read's.
        Ok((usize::try_from((most - 12) / 24).unwrap_or(usize::MAX), most))
    }
}

impl Speaker for Greeted {
    fn must_wait(&self, command: &Command) -> bool {
        match command {
            Command::Wait(point) => match self.own(point) {
                Some(track) => !track.is_placed(point.seq()) && !track.is_reached(point.seq()),
                None => point.poll() != Ok(true),
            },
            Command::Fetch { src, dst, after } => {
                let ready = self.remote.connection.has_tickets(dst.bytes());
                let after = after.as_ref();
                !ready || after.is_some_and(|after| !source(src).is_ok_and(|source| source.can_wait(after)))
            }
            _ => false,
        }
    }

    fn upload(&mut self, dst: &Region, tensor: Option<&TensorDesc>, data: &[u8]) -> Result<(), DeviceError> {
        let memory = memory(dst)?;
        if let Some(tensor) = tensor.filter(|tensor| whole(tensor, dst)) {
            let span = span(memory, dst.offset(), dst.bytes());
            return self.turn(|turn, queue| turn.write(queue, span, Some(shape(tensor)), data));
        }
        for (at, piece) in (0..).step_by(PIECE as usize).zip(data.chunks(PIECE as usize)) {
            let span = span(memory, dst.offset() + at, piece.len() as u64);
            self.turn(|turn, queue| turn.write(queue, span, None, piece))?;
        }
        Ok(())
    }

    fn upload_from(
        &mut self,
        dst: &Region,
        tensor: Option<&TensorDesc>,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), SourceError>,
    ) -> Result<(), DeviceError> {
        let memory = memory(dst)?;
        if let Some(tensor) = tensor.filter(|tensor| whole(tensor, dst) && dst.bytes() > SMALL) {
            let span = span(memory, dst.offset(), dst.bytes());
            // While it is filled, others speak.
            let first = if span.len <= GATHERED { span.len } else { STREAMED };
            let mut bytes = vec![0; first as usize];
            fill(&mut bytes)?;
            return self.turn(|turn, queue| {
                turn.head(queue, span, Some(shape(tensor)));
                turn.stream_from(span.len, bytes, fill).map(|filled| filled.map_err(DeviceError::Source))
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

    fn download(&mut self, parts: Vec<(Region, Awaited)>) -> Result<(), DeviceError> {
        let (track, marked, (spans, bytes)) = (Arc::clone(&self.track), self.marked, self.limits()?);
        let mut reads: Vec<Vec<(Span, Awaited)>> = Vec::new();
        let (mut room, mut last) = (0, None);
        for (src, to) in parts {
            let span = span(memory(&src)?, src.offset(), src.bytes());
            match reads.last_mut().filter(|read| read.len() < spans && span.len <= room) {
                Some(read) => read.push((span, to)),
                None => {
                    room = bytes;
                    reads.push(vec![(span, to)]);
                }
            }
            room -= span.len;
        }
        let sent = self.remote.connection.turn(|turn| {
            let session = turn.shared.session()?;
            let proves = track.read(marked);
            for read in std::mem::take(&mut reads) {
                let spans: Vec<_> = read.iter().map(|(span, _)| Spans::encode(span)).collect();
                let parts = read.into_iter().map(|(span, to)| (span.len, to)).collect();
                let id = session.read(track.queue, proves, parts);
                last = Some(id);
                let request = Read { queue: track.queue, id, spans: Spans::new(&spans) };
                turn.put(|out| ExtRequest::Read(request).encode(out));
            }
            // After the books have them: whoever fails the connection either sees the reads, or has failed it before this.
            turn.shared.unbroken().inspect_err(|failure| session.fail(failure))?;
            // And whoever fails the queue: the server answers no READ that comes after that.
            track.failure().map_or(Ok(()), Err)?;
            turn.leave(ExtCommand::Read.name())
        });
        self.read = last;
        sent.inspect_err(|e| {
            reads.into_iter().flatten().for_each(|(_, to)| to.send(Err(e.clone())));
            if let Some(session) = &self.remote.connection.session {
                session.end(&self.track, e, Whom::All);
            }
        })
    }

    fn recall(&mut self, recall: Recall) -> Result<(), DeviceError> {
        let Recall { dst, tensor, digest, name, to } = recall;
        let span = span(memory(&dst)?, dst.offset(), dst.bytes());
        let shape = tensor.filter(|tensor| whole(tensor, &dst)).map(|tensor| shape(&tensor));
        // The name is a hint: it can be left out where the server takes no message that long.
        let most = self.remote.connection.session()?.server.max_message;
        let name = if name.len() as u64 + LOAD <= most { &*name } else { "" };
        let mut to = Some(to);
        let sent = self.turn(|turn, queue| {
            let to = to.take();
            let told = move |reply: Result<Vec<u8>, DeviceError>| {
                let wrong = reply.as_ref().map_or(Ok(()), |reply| found(reply)).map_err(|e| e.to_string());
                if let Some(to) = to {
                    to.send(reply);
                }
                wrong
            };
            let load = ExtRequest::Load(Load { queue, span, shape, digest, name });
            turn.ask(ExtCommand::Load.name(), 1..=1, To::Told(Box::new(told)), |out| load.encode(out))
        });
        // A connection that is lost says nothing.
        sent.inspect_err(|e| to.into_iter().for_each(|to| to.send(Err(e.clone()))))
    }

    fn fill(&mut self, dst: &Region, value: u8) -> Result<(), DeviceError> {
        let span = span(memory(dst)?, dst.offset(), dst.bytes());
        self.turn(|turn, queue| turn.say(&ExtRequest::Fill(Fill { queue, span, value })))
    }

    fn copy(&mut self, src: &Region, dst: &Region) -> Result<(), DeviceError> {
        let [src, dst] = [(memory(src)?, src), (memory(dst)?, dst)].map(|(m, r)| span(m, r.offset(), r.bytes()));
        self.turn(|turn, queue| turn.say_now(&ExtRequest::Copy(Copy { queue, src, dst })))
    }

    fn fetch(&mut self, src: &Region, dst: &Region, after: Option<&Point>) -> Result<(), DeviceError> {
        (self.marked, self.read) = (false, None);
        self.remote.connection.fetch((&self.track, &mut self.sources), src, dst, after)
    }

    fn run(&mut self, bodies: &[Body]) -> Result<(), DeviceError> {
        self.turn(|turn, queue| {
            bodies.iter().try_for_each(|body| turn.run(queue, body))?;
            turn.leave(ExtCommand::RunGraph.name())
        })
    }

    /// The server waits for points of this connection that it knows of; anything else is waited for here.
    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        if let Some(track) = self.own(point) {
            let seq = point.seq();
            if track.queue == self.track.queue || track.is_reached(seq) {
                return Ok(());
            }
            if let Some(failure) = track.failure() {
                return Err(failure);
            }
            track.until_placed(seq)?;
            let user = Arc::clone(&self.track);
            let said = self.turn(|turn, _| {
                let said = turn.waits(&user, point);
                if turn.waiting() > JOINED { turn.leave(ExtCommand::Wait.name()).map(|()| said) } else { Ok(said) }
            })?;
            if said {
                return Ok(());
            }
        }
        point.wait(None)
    }

    fn mark(&mut self, seq: u64) -> Result<(), DeviceError> {
        let (track, read) = (Arc::clone(&self.track), self.read);
        self.turn(|turn, queue| {
            let mut asks = track.place(seq);
            if let Some(read) = read {
                asks = false;
                if turn.shared.session()?.proves(read, seq) {
                    track.cover(seq);
                } else if track.failure().is_none() {
                    // Its bytes are here.
                    turn.shared.session()?.proved(queue, seq);
                }
            }
            let mark = ExtRequest::Mark(Mark { queue, number: seq });
            if !asks {
                return turn.say(&mark);
            }
            turn.put(|out| mark.encode(out));
            turn.say_now(&ExtRequest::Ask(Ask { queue, number: seq }))
        })?;
        self.marked = true;
        Ok(())
    }

    fn end(&mut self, made: u64) {
        close(&self.remote.connection, &self.track, made);
        self.sources.close();
    }
}

/// A part of a buffer.
pub(super) fn span(memory: &Memory, offset: u64, len: u64) -> Span {
    Span { buffer: memory.handle, offset, len }
}

/// The connection of a region's buffer.
pub(super) fn source(src: &Region) -> Result<&Arc<Connection>, DeviceError> {
    Ok(&memory(src)?.connection)
}

/// Type and shape of a tensor whose dimensions are known to fit.
fn shape(tensor: &TensorDesc) -> Shape {
    Shape { dtype: tensor.dtype().to_wire(), ne: tensor.ne().map(|n| n as u32) }
}

/// Whether the answer to a LOAD is one.
fn found(reply: &[u8]) -> Result<(), WireError> {
    Answer::decode(ExtCommand::Load, reply).map(drop)
}

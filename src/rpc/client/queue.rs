//! A queue of a remote device: its work is messages, sent at once unless something has to be waited for first.
//!
//! Whoever holds the queue's [`Executor`] sends. While nothing is pending that is the submitter. What must wait, for a point
//! of another connection or for a copy through this host, is handed with the executor to the queue's thread, and what is
//! submitted after it goes the same way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::{To, Turn};
use super::device::{Memory, Remote, bytes, memory};
use super::graph::{Body, Code, describe, fits};
use super::proof::{Before, Needs, Track};
use crate::device::{DeviceError, Line, Point, Program, Queue, Region, Source, Staged, Ticket, TicketSender, Timeline};
use crate::rpc::wire::{Command as Wire, CopyTensor, MemsetTensor, Request, Response, TensorRecord};
use crate::tensor::TensorDesc;

/// Largest upload that is copied into its command where it cannot be sent at once.
const SMALL: u64 = 256 << 10;

/// Largest message of an upload that is no whole tensor: others come in between.
const PIECE: u64 = 4 << 20;

/// Largest tensor whose bytes are gathered from a writer before they are sent, so that the server knows it as one.
const GATHERED: u64 = 64 << 20;

/// Largest range that one tensor record describes here; dimensions are below 2^32.
const RANGE: u64 = 1 << 30;

/// Longest wait for earlier work to be sent, before a large upload.
const PATIENCE: Duration = Duration::from_secs(600);

pub(super) struct RemoteQueue {
    remote: Arc<Remote>,
    line: Arc<Line<Command, Executor>>,
    /// Here while nothing is pending, unless the thread has not given it back yet: see [`RemoteQueue::idle`].
    executor: Option<Box<Executor>>,
    track: Arc<Track>,
    timeline: Arc<Timeline>,
    marked: u64,
    /// Whether anything was submitted since the last mark.
    dirty: bool,
}

enum Command {
    Upload {
        dst: Region,
        bytes: Vec<u8>,
    },
    Download {
        src: Region,
        to: TicketSender,
    },
    Fill {
        dst: Region,
        value: u8,
    },
    Copy {
        src: Region,
        dst: Region,
    },
    /// The regions are those of the bodies, which must not be freed before these are sent.
    Run {
        bodies: Arc<[Body]>,
        bindings: Arc<[Region]>,
    },
    Wait(Point),
    Mark(u64),
}

impl Staged for Command {
    fn staged(&self) -> usize {
        if let Command::Upload { bytes, .. } = self { bytes.len() } else { 0 }
    }
}

impl RemoteQueue {
    pub(super) fn new(remote: Arc<Remote>) -> Result<RemoteQueue, DeviceError> {
        let (track, timeline) = Track::new(&remote.connection)?;
        let line = Line::start("rpc-queue", Executor::obey)?;
        let executor = Executor {
            remote: Arc::clone(&remote),
            track: Arc::clone(&track),
            timeline: Arc::clone(&timeline),
            needs: Needs::default(),
        };
        Ok(RemoteQueue { remote, line, executor: Some(Box::new(executor)), track, timeline, marked: 0, dirty: false })
    }

    /// The executor, if everything submitted so far is sent.
    fn idle(&mut self) -> Option<&mut Executor> {
        if self.executor.is_none() {
            self.executor = self.line.idle();
        }
        self.executor.as_deref_mut()
    }

    fn unbroken(&self) -> Result<(), DeviceError> {
        self.timeline.failure().map_or(Ok(()), Err)
    }

    fn submit(&mut self, command: Command) -> Result<(), DeviceError> {
        self.unbroken()?;
        self.dirty |= !matches!(command, Command::Mark(_));
        if !self.must_wait(&command)
            && let Some(executor) = self.idle()
        {
            executor.obey(command);
            return self.unbroken();
        }
        self.line.hand_over(command, &mut self.executor)
    }

    /// Whether sending a command has to wait for something else than its turn.
    fn must_wait(&self, command: &Command) -> bool {
        match command {
            Command::Wait(point) => match own(point, &self.remote) {
                Some(track) => !track.has_placed(point.seq()),
                None => point.poll() != Ok(true),
            },
            Command::Copy { src, dst } => !self.remote.copies(src, dst),
            _ => false,
        }
    }

    /// The memory of a region that this queue works on.
    fn here<'a>(&self, region: &'a Region) -> Result<&'a Memory, DeviceError> {
        let memory = memory(region)?;
        let here = memory.is_of(&self.remote.connection) && memory.device == self.remote.index;
        if here { Ok(memory) } else { Err(DeviceError::Misuse("a region of another device")) }
    }

    /// Sends an upload straight from where its bytes are, when all that was submitted before is sent.
    fn upload_now(&mut self, dst: &Region, tensor: Option<&TensorDesc>, bytes: &[u8]) -> Result<(), DeviceError> {
        self.dirty = true;
        if self.idle().is_none() {
            self.executor = Some(self.line.idle_by(Instant::now() + PATIENCE)?);
        }
        self.unbroken()?;
        let executor = self.executor.as_mut().ok_or(DeviceError::Ended)?;
        executor.guard(|me| me.upload(dst, tensor, bytes))
    }

    fn upload_from(
        &mut self,
        dst: &Region,
        tensor: Option<&TensorDesc>,
        fill: &mut dyn FnMut(&mut [u8]) -> std::io::Result<()>,
    ) -> Result<(), DeviceError> {
        let at_once = if tensor.is_some() { GATHERED } else { SMALL };
        let piece = if dst.bytes() <= at_once { dst.bytes() } else { PIECE };
        let mut bytes = vec![0; piece as usize];
        let mut at = 0;
        while at < dst.bytes() {
            let part = dst.part(at, piece.min(dst.bytes() - at))?;
            let bytes = &mut bytes[..part.bytes() as usize];
            fill(bytes).map_err(|e| DeviceError::Source(e.to_string()))?;
            self.upload_now(&part, tensor, bytes)?;
            at += part.bytes();
        }
        Ok(())
    }
}

/// The track of a point of this connection.
fn own<'a>(point: &'a Point, remote: &Remote) -> Option<&'a Track> {
    point.progress::<Track>().filter(|track| track.is_of(&remote.connection))
}

impl Remote {
    /// Whether the server is known to copy between two regions.
    fn copies(&self, src: &Region, dst: &Region) -> bool {
        let overlap = src.buffer().id() == dst.buffer().id()
            && src.offset() < dst.offset() + dst.bytes()
            && dst.offset() < src.offset() + src.bytes();
        // Not every server can when they overlap, and none says so.
        let from = memory(src).map_or(self.index, |memory| memory.device);
        !overlap && self.connection.copies(from, self.index) == Some(true)
    }
}

impl Queue for RemoteQueue {
    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError> {
        self.here(&dst)?;
        self.unbroken()?;
        match src {
            Source::Borrowed(bytes) if bytes.len() as u64 != dst.bytes() => {
                Err(DeviceError::Misuse("an upload's length is not its region's"))
            }
            Source::Borrowed(bytes) if dst.bytes() <= SMALL && self.idle().is_none() => {
                self.submit(Command::Upload { dst, bytes: bytes.to_vec() })
            }
            Source::Borrowed(bytes) => self.upload_now(&dst, tensor, bytes),
            Source::Writer(fill) if dst.bytes() <= SMALL && self.idle().is_none() => {
                let mut bytes = vec![0; dst.bytes() as usize];
                fill(&mut bytes).map_err(|e| DeviceError::Source(e.to_string()))?;
                self.submit(Command::Upload { dst, bytes })
            }
            Source::Writer(fill) => self.upload_from(&dst, tensor, fill),
        }
    }

    fn download(&mut self, src: Region) -> Result<Ticket, DeviceError> {
        self.here(&src)?;
        let mut tickets = Vec::new();
        let mut at = 0;
        while at < src.bytes() {
            let part = src.part(at, RANGE.min(src.bytes() - at))?;
            at += part.bytes();
            let (to, ticket) = Ticket::new();
            self.submit(Command::Download { src: part, to })?;
            tickets.push(ticket);
        }
        match (tickets.pop(), tickets.is_empty()) {
            (None, _) => self.unbroken().map(|()| Ticket::ready(Vec::new())),
            (Some(only), true) => Ok(only),
            (Some(last), false) => Ok(Ticket::fetched(move |deadline| {
                let mut bytes = Vec::new();
                for ticket in tickets.into_iter().chain([last]) {
                    bytes.append(&mut ticket.wait(deadline)?);
                }
                Ok(bytes)
            })),
        }
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        self.here(&dst)?;
        self.submit(Command::Fill { dst, value })
    }

    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<bool, DeviceError> {
        self.here(&dst)?;
        if src.bytes() != dst.bytes() {
            return Err(DeviceError::Misuse("a copy's regions differ in size"));
        }
        if !memory(&src).is_ok_and(|memory| memory.is_of(&self.remote.connection)) {
            return Ok(false);
        }
        if let Some(point) = after {
            self.wait(point)?;
        }
        self.submit(Command::Copy { src, dst })?;
        Ok(true)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        let code = program.code::<Code>().filter(|code| code.is_of(&self.remote));
        let code = code.ok_or(DeviceError::Misuse("a program of another device"))?;
        let slots = program.graph().slots();
        if bindings.len() != slots.len() || bindings.iter().zip(slots).any(|(r, &s)| r.bytes() < s as u64) {
            return Err(DeviceError::Misuse("the bindings do not fit the program's slots"));
        }
        bindings.iter().try_for_each(|region| self.here(region).map(drop))?;
        self.unbroken()?;
        let bodies = code.bodies(program.graph(), bindings)?;
        self.submit(Command::Run { bodies, bindings: Arc::clone(bindings) })
    }

    fn mark(&mut self) -> Point {
        if self.dirty {
            self.marked += 1;
            self.track.make(self.marked);
            // When this fails, the timeline carries the failure that waiting for the point returns.
            let _ = self.submit(Command::Mark(self.marked));
            self.dirty = false;
        }
        Point::new(&self.timeline, self.marked)
    }

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        self.submit(Command::Wait(point.clone()))
    }
}

impl Drop for RemoteQueue {
    fn drop(&mut self) {
        // The thread ends when it has done what it is at. What was sent is with the server.
        self.line.end();
    }
}

/// What sends a queue's work.
struct Executor {
    remote: Arc<Remote>,
    track: Arc<Track>,
    timeline: Arc<Timeline>,
    /// What has to be done before the next mark is reached.
    needs: Needs,
}

impl Executor {
    /// Sends a command. Nothing is sent after a failure; whoever waits for bytes learns why.
    fn obey(&mut self, command: Command) {
        match (self.timeline.failure(), command) {
            (Some(failure), Command::Download { to, .. }) => to.send(Err(failure)),
            (Some(_), _) => {}
            (None, command) => {
                // The timeline has it.
                let _ = self.guard(|me| me.execute(command));
            }
        }
    }

    /// Makes a failure stick.
    fn guard<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T, DeviceError>) -> Result<T, DeviceError> {
        work(self).inspect_err(|error| self.timeline.fail(error.clone()))
    }

    fn execute(&mut self, command: Command) -> Result<(), DeviceError> {
        match command {
            Command::Upload { dst, bytes } => self.upload(&dst, None, &bytes),
            Command::Download { src, to } => self.download(&src, To::Ticket(to)),
            Command::Fill { dst, value } => self.fill(&dst, value),
            Command::Copy { src, dst } => self.copy(&src, &dst),
            Command::Run { bodies, bindings } => {
                let device = self.remote.index;
                let done = self.send(|turn, _| bodies.iter().try_for_each(|body| turn.compute(device, body)));
                drop(bindings);
                done
            }
            Command::Wait(point) => self.wait(&point),
            Command::Mark(seq) => {
                self.track.place(seq, &self.needs);
                Ok(())
            }
        }
    }

    /// Sends work for the device.
    fn send(
        &mut self,
        work: impl FnOnce(&mut Turn<'_>, &Remote) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let remote = &*self.remote;
        let number = remote.connection.turn(|turn| {
            let number = turn.number(&remote.progress);
            work(turn, remote).map(|()| number)
        })?;
        self.needs.add(remote.index, number);
        Ok(())
    }

    fn upload(&mut self, dst: &Region, tensor: Option<&TensorDesc>, data: &[u8]) -> Result<(), DeviceError> {
        let memory = memory(dst)?;
        let whole = tensor.and_then(|tensor| whole(tensor, memory, dst));
        if let Some(record) = whole {
            return self.send(|turn, _| turn.write(record, data));
        }
        for (at, piece) in (0..).step_by(PIECE as usize).zip(data.chunks(PIECE as usize)) {
            let record = bytes(memory, dst.offset() + at, piece.len() as u64);
            self.send(|turn, _| turn.write(record, piece))?;
        }
        Ok(())
    }

    fn download(&mut self, src: &Region, to: To) -> Result<(), DeviceError> {
        let remote = &*self.remote;
        let record = bytes(memory(src)?, src.offset(), src.bytes());
        let lane = (remote.index, &*remote.progress);
        let number = remote.connection.turn(|turn| turn.read(lane, record, src.bytes(), to))?;
        self.needs.add(remote.index, number);
        Ok(())
    }

    fn fill(&mut self, dst: &Region, value: u8) -> Result<(), DeviceError> {
        let memory = memory(dst)?;
        for part in ranges(dst.bytes()) {
            let (at, size) = part;
            let tensor = bytes(memory, dst.offset() + at, size);
            let request = Request::MemsetTensor(MemsetTensor { tensor, offset: 0, size, value });
            self.send(|turn, _| turn.tell(&request))?;
        }
        Ok(())
    }

    fn copy(&mut self, src: &Region, dst: &Region) -> Result<(), DeviceError> {
        let (from, to) = (memory(src)?, memory(dst)?);
        let known = self.remote.connection.copies(from.device, to.device);
        let plain = self.remote.copies(src, dst);
        for (at, size) in ranges(dst.bytes()) {
            let request = Request::CopyTensor(CopyTensor {
                src: bytes(from, src.offset() + at, size),
                dst: bytes(to, dst.offset() + at, size),
            });
            if plain {
                let track = Arc::downgrade(&self.track);
                self.send(|turn, _| turn.ask(&request, 1, To::Consent(track), None))?;
            } else if known.is_none() && self.try_copy(&request, (from.device, to.device))? {
                continue;
            } else {
                return self.copy_through_here(src, dst);
            }
        }
        Ok(())
    }

    /// Finds out whether the server copies between two devices.
    fn try_copy(&mut self, request: &Request<'_>, (from, to): (u32, u32)) -> Result<bool, DeviceError> {
        let (sender, ticket) = Ticket::new();
        self.send(|turn, _| turn.ask(request, 1, To::Ticket(sender), None))?;
        let reply = ticket.wait(None)?;
        match Response::decode(Wire::CopyTensor, &reply) {
            Ok(Response::CopyTensor(does)) => {
                self.remote.connection.learn_copies(from, to, does);
                Ok(does)
            }
            other => Err(self.remote.connection.fault(format!("the server answered COPY_TENSOR with {other:?}"))),
        }
    }

    /// All of it is read before any of it is written: the two may overlap.
    fn copy_through_here(&mut self, src: &Region, dst: &Region) -> Result<(), DeviceError> {
        let from = memory(src)?;
        let progress = self.remote.connection.progress(from.device);
        let progress = progress.ok_or(DeviceError::Misuse("a region of another device"))?;
        let mut tickets = Vec::new();
        for (at, size) in ranges(src.bytes()) {
            let (to, ticket) = Ticket::new();
            let record = bytes(from, src.offset() + at, size);
            let lane = (from.device, &*progress);
            self.remote.connection.turn(|turn| turn.read(lane, record, size, To::Ticket(to)))?;
            tickets.push((at, size, ticket));
        }
        let pieces = tickets.into_iter().map(|(at, size, ticket)| Ok((dst.part(at, size)?, ticket.wait(None)?)));
        let pieces: Vec<_> = pieces.collect::<Result<_, DeviceError>>()?;
        pieces.iter().try_for_each(|(part, bytes)| self.upload(part, None, bytes))
    }

    /// What this connection has sent before is done before what it sends later; anything else is waited for.
    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        if let Some(track) = own(point, &self.remote)
            && let Before::Sent(needs) = track.before(point.seq())?
        {
            self.needs.merge(&needs);
            return Ok(());
        }
        point.wait(None)
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // Marks that were never sent are never reached; what was sent may yet be proved.
        self.track.end();
    }
}

/// The record of a whole tensor, if that is what is to be written.
fn whole(tensor: &TensorDesc, memory: &Memory, dst: &Region) -> Option<TensorRecord> {
    let all = tensor.is_contiguous() && tensor.extent() as u64 == dst.bytes();
    let (buffer, data) = (memory.handle, memory.base + dst.offset());
    (fits(tensor) && all).then(|| TensorRecord { buffer, data, ..describe(tensor) })
}

/// Offsets and sizes of the parts that a record each describes.
fn ranges(bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..bytes).step_by(RANGE as usize).map(move |at| (at, RANGE.min(bytes - at)))
}

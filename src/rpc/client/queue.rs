//! A queue of a remote device: its work is messages, said at once unless something has to be waited for first.
//!
//! Whoever holds the queue's [`Executor`] speaks. While nothing is pending that is the submitter. What must wait, for a point
//! of another connection or for a copy through this host, is handed with the executor to the queue's thread, and what is
//! submitted after it goes the same way. What the work is called on the wire is a [`Speaker`]'s business.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::device::{RemoteBuffer, RemoteDevice, remote_buffer};
use super::graph_messages::{GraphMessage, RemoteProgram};
use crate::device::{
    CopyOutcome, DeviceError, Line, LoadByDigest, LoadOutcome, Point, Program, Queue, Region, Source, SourceError,
    Staged, TensorDigest, Ticket, TicketSender, Timeline,
};
use crate::tensor::TensorDesc;

/// Largest upload that is copied into its command where it cannot be sent at once.
pub(super) const MAX_STAGED_UPLOAD_BYTES: u64 = 256 << 10;

/// Longest wait for earlier work to be sent, before a large upload.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// What says a queue's work on the wire, one thing after another.
pub(super) trait QueueProtocol: Send + 'static {
    /// Whether saying a command has to wait for something else than its turn.
    fn must_block(&self, command: &QueueCommand) -> bool;

    fn upload(&mut self, dst: &Region, tensor: Option<&TensorDesc>, data: &[u8]) -> Result<(), DeviceError>;

    /// As an upload of what `fill` writes, piece after piece. [`DeviceError::Source`] is an error of `fill`.
    fn upload_from_source(
        &mut self,
        dst: &Region,
        tensor: Option<&TensorDesc>,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), SourceError>,
    ) -> Result<(), DeviceError>;

    fn download(&mut self, parts: Vec<(Region, ReadCompleter)>) -> Result<(), DeviceError>;

    fn load_by_digest(&mut self, recall: DigestLoad) -> Result<(), DeviceError>;

    fn fill(&mut self, dst: &Region, value: u8) -> Result<(), DeviceError>;

    /// Copies within the connection.
    fn copy(&mut self, src: &Region, dst: &Region) -> Result<(), DeviceError>;

    /// Copies from another connection that [`Remote::fetches_from`] has allowed.
    fn copy_from_peer(&mut self, src: &Region, dst: &Region, after: Option<&Point>) -> Result<(), DeviceError>;

    fn run_graph(&mut self, bodies: &[GraphMessage]) -> Result<(), DeviceError>;

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError>;

    fn mark(&mut self, seq: u64) -> Result<(), DeviceError>;

    /// Nothing more will be said, though marks up to `made` were made.
    fn close(&mut self, made: u64);
}

/// Bytes that somebody may wait for.
#[derive(Debug)]
pub(super) struct ReadCompleter {
    to: TicketSender,
    completed: Arc<AtomicBool>,
}

impl ReadCompleter {
    /// With the ticket for them. A wait for bytes that are not there yet is counted.
    pub(super) fn new(remote: &RemoteDevice) -> (ReadCompleter, Ticket) {
        let (to, ticket) = Ticket::new();
        let (came, shared) = (Arc::<AtomicBool>::default(), Arc::clone(&**remote.connection));
        let awaited = ReadCompleter { to, completed: Arc::clone(&came) };
        let ticket = Ticket::fetched(move |deadline| {
            if came.load(Ordering::Acquire) {
                return ticket.wait(deadline);
            }
            shared.count_wait();
            shared.spin.wait(|| came.load(Ordering::Acquire), || ticket.wait(deadline))
        });
        (awaited, ticket)
    }

    pub(super) fn complete(self, bytes: Result<Vec<u8>, DeviceError>) {
        self.completed.store(true, Ordering::Release);
        self.to.send(bytes);
    }
}

/// What is to be looked for on the server's disk.
pub(super) struct DigestLoad {
    pub(super) dst: Region,
    pub(super) tensor: Option<TensorDesc>,
    pub(super) digest: [u8; 32],
    pub(super) name: String,
    pub(super) to: ReadCompleter,
}

pub(super) enum QueueCommand {
    Upload {
        dst: Region,
        bytes: Vec<u8>,
    },
    Download(Vec<(Region, ReadCompleter)>),
    LoadByDigest(DigestLoad),
    Fill {
        dst: Region,
        value: u8,
    },
    Copy {
        src: Region,
        dst: Region,
    },
    PeerCopy {
        src: Region,
        dst: Region,
        after: Option<Point>,
    },
    /// The regions are those of the bodies, which must not be freed before these are sent.
    Run {
        bodies: Arc<[GraphMessage]>,
        bindings: Arc<[Region]>,
    },
    Wait(Point),
    Mark(u64),
}

impl Staged for QueueCommand {
    fn staged(&self) -> usize {
        if let QueueCommand::Upload { bytes, .. } = self { bytes.len() } else { 0 }
    }
}

pub(super) struct RemoteQueue<S: QueueProtocol> {
    remote: Arc<RemoteDevice>,
    channel: Arc<Line<QueueCommand, QueueExecutor<S>>>,
    /// Here while nothing is pending, unless the thread has not given it back yet: see [`RemoteQueue::idle`].
    executor: Option<Box<QueueExecutor<S>>>,
    timeline: Arc<Timeline>,
    /// The most bytes that one read may bring.
    max_read_bytes: u64,
    /// The last mark.
    last_mark: Arc<AtomicU64>,
    /// Whether anything was submitted since the last mark.
    has_unmarked_work: bool,
}

impl<S: QueueProtocol> RemoteQueue<S> {
    pub(super) fn new(
        remote: Arc<RemoteDevice>,
        timeline: Arc<Timeline>,
        speaker: S,
        most: u64,
    ) -> Result<RemoteQueue<S>, DeviceError> {
        let marked = Arc::<AtomicU64>::default();
        let executor = Box::new(QueueExecutor {
            protocol: speaker,
            timeline: Arc::clone(&timeline),
            last_mark: Arc::clone(&marked),
        });
        let line = Line::start("rpc-queue", QueueExecutor::process)?;
        Ok(RemoteQueue {
            remote,
            channel: line,
            executor: Some(executor),
            timeline,
            max_read_bytes: most,
            last_mark: marked,
            has_unmarked_work: false,
        })
    }

    /// The executor, if everything submitted so far is sent.
    fn idle(&mut self) -> Option<&mut QueueExecutor<S>> {
        if self.executor.is_none() {
            self.executor = self.channel.idle();
        }
        self.executor.as_deref_mut()
    }

    fn check_failure(&self) -> Result<(), DeviceError> {
        self.timeline.failure().map_or(Ok(()), Err)
    }

    fn submit(&mut self, command: QueueCommand) -> Result<(), DeviceError> {
        self.check_failure()?;
        self.has_unmarked_work |= !matches!(command, QueueCommand::Mark(_));
        if let Some(executor) = self.idle().filter(|executor| !executor.protocol.must_block(&command)) {
            executor.process(command);
            return self.check_failure();
        }
        self.channel.hand_over(command, &mut self.executor)
    }

    /// The memory of a region that this queue works on.
    fn here<'a>(&self, region: &'a Region) -> Result<&'a RemoteBuffer, DeviceError> {
        let memory = remote_buffer(region)?;
        let here = memory.belongs_to(&self.remote.connection) && memory.device == self.remote.index;
        if here { Ok(memory) } else { Err(DeviceError::Misuse("a region of another device")) }
    }

    /// Sends an upload straight from where its bytes are, when all that was submitted before is sent.
    fn upload_direct(&mut self, upload: impl FnOnce(&mut S) -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        self.has_unmarked_work = true;
        if self.idle().is_none() {
            self.executor = Some(self.channel.idle_by(Instant::now() + IDLE_TIMEOUT)?);
        }
        self.check_failure()?;
        self.executor.as_mut().ok_or(DeviceError::Ended)?.guard(upload)
    }

    /// The tickets of the parts that a region is read in.
    fn split_read(&self, src: &Region, parts: &mut Vec<(Region, ReadCompleter)>) -> Result<Ticket, DeviceError> {
        let mut tickets = Vec::new();
        let mut at = 0;
        while at < src.bytes() {
            let part = src.part(at, self.max_read_bytes.min(src.bytes() - at))?;
            at += part.bytes();
            let (awaited, ticket) = ReadCompleter::new(&self.remote);
            parts.push((part, awaited));
            tickets.push(ticket);
        }
        Ok(match (tickets.pop(), tickets.is_empty()) {
            (None, _) => Ticket::ready(Vec::new()),
            (Some(only), true) => only,
            (Some(last), false) => Ticket::fetched(move |deadline| {
                let mut bytes = Vec::new();
                for ticket in tickets.into_iter().chain([last]) {
                    bytes.append(&mut ticket.wait(deadline)?);
                }
                Ok(bytes)
            }),
        })
    }
}

impl<S: QueueProtocol> Queue for RemoteQueue<S> {
    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError> {
        self.here(&dst)?;
        self.check_failure()?;
        match src {
            Source::Borrowed(bytes) if bytes.len() as u64 != dst.bytes() => {
                Err(DeviceError::Misuse("an upload's length is not its region's"))
            }
            Source::Borrowed(bytes) if dst.bytes() <= MAX_STAGED_UPLOAD_BYTES && self.idle().is_none() => {
                self.submit(QueueCommand::Upload { dst, bytes: bytes.to_vec() })
            }
            Source::Borrowed(bytes) => self.upload_direct(|speaker| speaker.upload(&dst, tensor, bytes)),
            Source::Writer(fill) if dst.bytes() <= MAX_STAGED_UPLOAD_BYTES && self.idle().is_none() => {
                let mut bytes = vec![0; dst.bytes() as usize];
                fill(&mut bytes)?;
                self.submit(QueueCommand::Upload { dst, bytes })
            }
            Source::Writer(fill) => self.upload_direct(|speaker| speaker.upload_from_source(&dst, tensor, fill)),
        }
    }

    fn download(&mut self, src: Region) -> Result<Ticket, DeviceError> {
        self.download_all(std::slice::from_ref(&src))?.pop().ok_or(DeviceError::Ended)
    }

    fn download_all(&mut self, srcs: &[Region]) -> Result<Vec<Ticket>, DeviceError> {
        srcs.iter().try_for_each(|src| self.here(src).map(drop))?;
        let mut parts = Vec::new();
        let tickets = srcs.iter().map(|src| self.split_read(src, &mut parts)).collect::<Result<_, _>>()?;
        if parts.is_empty() {
            self.check_failure()?;
        } else {
            self.submit(QueueCommand::Download(parts))?;
        }
        Ok(tickets)
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        self.here(&dst)?;
        self.submit(QueueCommand::Fill { dst, value })
    }

    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<CopyOutcome, DeviceError> {
        self.here(&dst)?;
        if src.bytes() != dst.bytes() {
            return Err(DeviceError::Misuse("a copy's regions differ in size"));
        }
        let Ok(from) = remote_buffer(&src) else { return Ok(CopyOutcome::Unreachable) };
        if from.belongs_to(&self.remote.connection) {
            if let Some(point) = after {
                self.wait(point)?;
            }
            self.submit(QueueCommand::Copy { src, dst })?;
        } else if self.remote.can_receive_from(&from.connection) {
            self.submit(QueueCommand::PeerCopy { src, dst, after: after.cloned() })?;
        } else {
            return Ok(CopyOutcome::Unreachable);
        }
        Ok(CopyOutcome::Submitted)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        let code = program.code::<RemoteProgram>().filter(|code| code.belongs_to(&self.remote));
        let code = code.ok_or(DeviceError::Misuse("a program of another device"))?;
        let slots = program.graph().slot_sizes();
        if bindings.len() != slots.len() || bindings.iter().zip(slots).any(|(r, &s)| r.bytes() < s as u64) {
            return Err(DeviceError::Misuse("the bindings do not fit the program's slots"));
        }
        bindings.iter().try_for_each(|region| self.here(region).map(drop))?;
        self.check_failure()?;
        let bodies = code.messages(program.graph(), bindings)?;
        self.submit(QueueCommand::Run { bodies, bindings: Arc::clone(bindings) })
    }

    fn mark(&mut self) -> Point {
        let mut marked = self.last_mark.load(Ordering::Acquire);
        if self.has_unmarked_work {
            marked += 1;
            self.last_mark.store(marked, Ordering::Release);
            // When this fails, the timeline carries the failure that waiting for the point returns.
            let _ = self.submit(QueueCommand::Mark(marked));
            self.has_unmarked_work = false;
        }
        Point::new(&self.timeline, marked)
    }

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        self.submit(QueueCommand::Wait(point.clone()))
    }

    fn load_by_digest(&mut self) -> Option<&mut dyn LoadByDigest> {
        let session = self.remote.connection.session.as_ref();
        if session.is_some_and(|session| session.server().abilities.loads) { Some(self) } else { None }
    }
}

impl<S: QueueProtocol> LoadByDigest for RemoteQueue<S> {
    fn load_by_digest(
        &mut self,
        dst: Region,
        tensor: Option<&TensorDesc>,
        wanted: TensorDigest<'_>,
    ) -> Result<Ticket<LoadOutcome>, DeviceError> {
        self.here(&dst)?;
        let (to, reply) = ReadCompleter::new(&self.remote);
        let (digest, name) = (wanted.digest, wanted.name.to_owned());
        self.submit(QueueCommand::LoadByDigest(DigestLoad { dst, tensor: tensor.copied(), digest, name, to }))?;
        // The reply has been checked where it arrived: one byte, 0 or 1.
        let outcome = |reply: Vec<u8>| if reply == [1] { LoadOutcome::Found } else { LoadOutcome::Missing };
        Ok(Ticket::fetched(move |deadline| reply.wait(deadline).map(outcome)))
    }
}

impl<S: QueueProtocol> Drop for RemoteQueue<S> {
    fn drop(&mut self) {
        // The thread ends when it has done what it is at. What was sent is with the server.
        self.channel.end();
    }
}

/// What sends a queue's work.
struct QueueExecutor<S: QueueProtocol> {
    protocol: S,
    timeline: Arc<Timeline>,
    last_mark: Arc<AtomicU64>,
}

impl<S: QueueProtocol> QueueExecutor<S> {
    /// Says a command. Nothing is said after a failure; whoever waits for bytes learns why.
    fn process(&mut self, command: QueueCommand) {
        match (self.timeline.failure(), command) {
            (Some(failure), QueueCommand::Download(parts)) => {
                parts.into_iter().for_each(|(_, to)| to.complete(Err(failure.clone())));
            }
            (Some(failure), QueueCommand::LoadByDigest(recall)) => recall.to.complete(Err(failure)),
            (Some(_), _) => {}
            (None, command) => {
                // The timeline has it.
                let _ = self.guard(|speaker| send_command(speaker, command));
            }
        }
    }

    /// Makes a failure stick, unless it is that of an upload's source.
    fn guard<T>(&mut self, work: impl FnOnce(&mut S) -> Result<T, DeviceError>) -> Result<T, DeviceError> {
        work(&mut self.protocol).inspect_err(|error| {
            if !matches!(error, DeviceError::Source(_)) {
                self.timeline.fail(error.clone());
            }
        })
    }
}

fn send_command(speaker: &mut impl QueueProtocol, command: QueueCommand) -> Result<(), DeviceError> {
    match command {
        QueueCommand::Upload { dst, bytes } => speaker.upload(&dst, None, &bytes),
        QueueCommand::Download(parts) => speaker.download(parts),
        QueueCommand::LoadByDigest(recall) => speaker.load_by_digest(recall),
        QueueCommand::Fill { dst, value } => speaker.fill(&dst, value),
        QueueCommand::Copy { src, dst } => speaker.copy(&src, &dst),
        QueueCommand::PeerCopy { src, dst, after } => speaker.copy_from_peer(&src, &dst, after.as_ref()),
        QueueCommand::Run { bodies, bindings } => {
            let done = speaker.run_graph(&bodies);
            drop(bindings);
            done
        }
        QueueCommand::Wait(point) => speaker.wait(&point),
        QueueCommand::Mark(seq) => speaker.mark(seq),
    }
}

impl<S: QueueProtocol> Drop for QueueExecutor<S> {
    fn drop(&mut self) {
        // Marks that were never sent are never reached; what was sent may yet be.
        self.protocol.close(self.last_mark.load(Ordering::Acquire));
    }
}

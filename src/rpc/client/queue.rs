//! A queue of a remote device. Its commands are sent as messages, by the submitting thread itself unless a command has to block
//! first.
//!
//! The owner of the queue's [`QueueExecutor`] sends. While no command is pending, the submitting thread owns it. A command that
//! has to block (a wait for a point of another connection, a copy through this host) is handed over to the queue's thread
//! together with the executor, and so are all commands after it: their order is that of submission. A [`QueueProtocol`]
//! encodes the messages: `ggml_protocol` or `extended::extended_protocol`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::device::{RemoteBuffer, RemoteDevice, remote_buffer};
use super::graph_messages::{GraphMessage, RemoteProgram};
use super::remote_read::{JoinedReads, LoadReply, OpenReads, ReadCompleter};
use crate::device::{
    Collectives, Command, CommandChannel, CommandOutcome, CopyOutcome, DeviceError, Executor, Lane, LoadByDigest,
    LoadOutcome, Membership, PendingRead, Program, Queue, QueueAborter, Region, ServerMember, SourceError,
    TensorDigest, Timeline, TimelinePoint, Turn, UploadSource, check_copy,
};
use crate::tensor::{ByteRuns, TensorDesc};

/// Staging limit: a queue with pending commands copies an upload of at most this size into its command. A larger upload waits
/// for the pending commands instead.
pub(super) const MAX_STAGED_UPLOAD_BYTES: u64 = 256 << 10;

/// Longest wait of a large upload for the pending commands of its queue.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// Sends a queue's commands, in order, as the messages of one protocol.
pub(super) trait QueueProtocol: Send + 'static {
    /// Whether sending a command has to wait for anything besides exclusive use of the writer.
    fn must_block(&self, command: &QueueCommand) -> bool;

    fn upload(&mut self, dst: &Region, tensor: Option<&TensorDesc>, data: &[u8]) -> Result<(), DeviceError>;

    /// Uploads the bytes that `fill` produces chunk by chunk. An error of `fill` is returned as [`DeviceError::Source`].
    fn upload_from_source(
        &mut self,
        dst: &Region,
        tensor: Option<&TensorDesc>,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), SourceError>,
    ) -> Result<(), DeviceError>;

    fn download(&mut self, parts: Vec<(Region, ReadCompleter)>) -> Result<(), DeviceError>;

    fn load_by_digest(&mut self, load: DigestLoad) -> Result<(), DeviceError>;

    fn fill(&mut self, dst: &Region, value: u8) -> Result<(), DeviceError>;

    /// Copies between two regions of this connection.
    fn copy(&mut self, src: &Region, dst: &Region) -> Result<(), DeviceError>;

    /// Copies from a region of another connection, for which [`RemoteDevice::can_receive_from`] must hold.
    fn copy_from_peer(&mut self, src: &Region, dst: &Region, after: Option<&TimelinePoint>) -> Result<(), DeviceError>;

    fn run_graph(&mut self, messages: &[GraphMessage]) -> Result<(), DeviceError>;

    fn wait(&mut self, point: &TimelinePoint) -> Result<(), DeviceError>;

    /// Joins a group, if the protocol has groups.
    fn join(&mut self, _group: u32, _member: &ServerMember) -> Result<(), DeviceError> {
        Err(DeviceError::Misuse("the protocol of the server has no groups"))
    }

    fn mark(&mut self, seq: u64) -> Result<(), DeviceError>;

    /// Ends the waits until a mark of this queue is placed, and this queue's own such wait.
    fn placement_waker(&self) -> PlacementWaker;

    /// Closes the queue. `last_made` is the last mark that was made; marks that were not sent are never reached.
    fn close(&mut self, last_made: u64);
}

/// Called after the timeline of a queue has failed: it will place no further mark.
pub(super) type PlacementWaker = Arc<dyn Fn() + Send + Sync>;

/// A load by digest: the server searches its disk for a tensor with this BLAKE3 digest, and fills the region with a slice of
/// it.
pub(super) struct DigestLoad {
    pub(super) dst: Region,
    pub(super) tensor: Option<TensorDesc>,
    pub(super) digest: [u8; 32],
    /// Length of the whole tensor in bytes.
    pub(super) bytes: u64,
    /// The slice: within the tensor, and as long as `dst`.
    pub(super) runs: ByteRuns,
    pub(super) name: String,
    pub(super) to: ReadCompleter,
}

/// A command of a queue, between its submission and the sending of its messages.
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
        after: Option<TimelinePoint>,
    },
    /// The bindings keep the regions that the messages name allocated until the messages are sent.
    Run {
        messages: Arc<[GraphMessage]>,
        bindings: Arc<[Region]>,
    },
    Wait(TimelinePoint),
    Mark(u64),
    Join {
        group: u32,
        member: ServerMember,
    },
}

impl Command for QueueCommand {
    fn staged_bytes(&self) -> usize {
        if let QueueCommand::Upload { bytes, .. } = self { bytes.len() } else { 0 }
    }

    /// Sending blocks while the connection does.
    fn lane(&self) -> Lane {
        Lane::Long
    }
}

pub(super) struct RemoteQueue<S: QueueProtocol> {
    remote: Arc<RemoteDevice>,
    channel: Arc<CommandChannel<QueueExecutor<S>>>,
    /// Present while no command is pending, unless the thread has not handed it back yet: see
    /// [`RemoteQueue::executor_if_idle`].
    executor: Option<Box<QueueExecutor<S>>>,
    timeline: Arc<Timeline>,
    open_reads: Arc<OpenReads>,
    wake_placement_waiters: PlacementWaker,
    /// Largest number of bytes of one read request.
    max_read_bytes: u64,
    last_mark: Arc<AtomicU64>,
    /// Whether any command was submitted since the last mark.
    has_unmarked_work: bool,
}

impl<S: QueueProtocol> RemoteQueue<S> {
    pub(super) fn new(
        remote: Arc<RemoteDevice>,
        timeline: Arc<Timeline>,
        protocol: S,
        max_read_bytes: u64,
    ) -> Result<RemoteQueue<S>, DeviceError> {
        let last_mark = Arc::<AtomicU64>::default();
        let wake_placement_waiters = protocol.placement_waker();
        let executor =
            Box::new(QueueExecutor { protocol, timeline: Arc::clone(&timeline), last_mark: Arc::clone(&last_mark) });
        let channel = CommandChannel::with_own_thread("rpc-queue")?;
        Ok(RemoteQueue {
            remote,
            channel,
            executor: Some(executor),
            timeline,
            open_reads: Arc::default(),
            wake_placement_waiters,
            max_read_bytes,
            last_mark,
            has_unmarked_work: false,
        })
    }

    /// The executor, if all commands submitted so far have been sent.
    fn executor_if_idle(&mut self) -> Option<&mut QueueExecutor<S>> {
        if self.executor.is_none() {
            self.executor = self.channel.take_executor_if_idle();
        }
        self.executor.as_deref_mut()
    }

    fn check_failure(&self) -> Result<(), DeviceError> {
        self.timeline.failure().map_or(Ok(()), Err)
    }

    fn submit(&mut self, command: QueueCommand) -> Result<(), DeviceError> {
        self.check_failure()?;
        self.has_unmarked_work |= !matches!(command, QueueCommand::Mark(_));
        if let Some(executor) = self.executor_if_idle().filter(|executor| !executor.protocol.must_block(&command)) {
            executor.send(command);
            return self.check_failure();
        }
        self.channel.send(command, &mut self.executor)
    }

    /// The buffer of a region of this queue's device.
    fn own_buffer<'a>(&self, region: &'a Region) -> Result<&'a RemoteBuffer, DeviceError> {
        let memory = remote_buffer(region)?;
        let is_own = memory.belongs_to(&self.remote.connection) && memory.device == self.remote.index;
        if is_own { Ok(memory) } else { Err(DeviceError::Misuse("a region of another device")) }
    }

    /// Sends an upload without copying its bytes. Blocks until all pending commands have been sent.
    fn upload_direct(&mut self, upload: impl FnOnce(&mut S) -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        self.has_unmarked_work = true;
        if self.executor_if_idle().is_none() {
            self.executor = Some(self.channel.wait_idle(Instant::now() + IDLE_TIMEOUT)?);
        }
        self.check_failure()?;
        self.executor.as_mut().ok_or(DeviceError::Ended)?.record_failure(upload)
    }

    /// Splits a read into parts of at most `max_read_bytes`, and returns one pending read for all of them.
    fn split_read(&self, src: &Region, parts: &mut Vec<(Region, ReadCompleter)>) -> Result<PendingRead, DeviceError> {
        let mut reads = Vec::new();
        let mut at = 0;
        while at < src.bytes() {
            let part = src.subregion(at, self.max_read_bytes.min(src.bytes() - at))?;
            at += part.bytes();
            let (completer, read) = ReadCompleter::new(&self.remote);
            self.open_reads.add(&completer);
            parts.push((part, completer));
            reads.push(read);
        }
        Ok(match (reads.pop(), reads.is_empty()) {
            (None, _) => PendingRead::ready(Vec::new()),
            (Some(only), true) => only,
            (Some(last), false) => {
                reads.push(last);
                PendingRead::from_source(JoinedReads(reads))
            }
        })
    }
}

impl<S: QueueProtocol> Queue for RemoteQueue<S> {
    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: UploadSource<'_>) -> Result<(), DeviceError> {
        self.own_buffer(&dst)?;
        self.check_failure()?;
        src.check_size(dst.bytes())?;
        if dst.bytes() <= MAX_STAGED_UPLOAD_BYTES && self.executor_if_idle().is_none() {
            let bytes = src.into_bytes(dst.bytes())?;
            return self.submit(QueueCommand::Upload { dst, bytes });
        }
        match src {
            UploadSource::Borrowed(bytes) => self.upload_direct(|protocol| protocol.upload(&dst, tensor, bytes)),
            UploadSource::Writer(fill) => {
                self.upload_direct(|protocol| protocol.upload_from_source(&dst, tensor, fill))
            }
        }
    }

    fn download(&mut self, src: Region) -> Result<PendingRead, DeviceError> {
        self.download_all(std::slice::from_ref(&src))?.pop().ok_or(DeviceError::Ended)
    }

    fn download_all(&mut self, srcs: &[Region]) -> Result<Vec<PendingRead>, DeviceError> {
        srcs.iter().try_for_each(|src| self.own_buffer(src).map(drop))?;
        let mut parts = Vec::new();
        let reads = srcs.iter().map(|src| self.split_read(src, &mut parts)).collect::<Result<_, _>>()?;
        if parts.is_empty() {
            self.check_failure()?;
        } else {
            self.submit(QueueCommand::Download(parts))?;
        }
        Ok(reads)
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        self.own_buffer(&dst)?;
        self.submit(QueueCommand::Fill { dst, value })
    }

    fn copy_from(
        &mut self,
        src: Region,
        dst: Region,
        after: Option<&TimelinePoint>,
    ) -> Result<CopyOutcome, DeviceError> {
        self.own_buffer(&dst)?;
        check_copy(&src, &dst)?;
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
        let compiled = program.compiled::<RemoteProgram>().filter(|compiled| compiled.belongs_to(&self.remote));
        let compiled = compiled.ok_or(DeviceError::Misuse("a program of another device"))?;
        program.check_bindings(bindings)?;
        bindings.iter().try_for_each(|region| self.own_buffer(region).map(drop))?;
        self.check_failure()?;
        let messages = compiled.messages(program.graph(), bindings)?;
        self.submit(QueueCommand::Run { messages, bindings: Arc::clone(bindings) })
    }

    fn mark(&mut self) -> TimelinePoint {
        let mut last_mark = self.last_mark.load(Ordering::Acquire);
        if self.has_unmarked_work {
            last_mark += 1;
            self.last_mark.store(last_mark, Ordering::Release);
            // On failure the timeline holds the error, and waiting for the point returns it.
            let _ = self.submit(QueueCommand::Mark(last_mark));
            self.has_unmarked_work = false;
        }
        TimelinePoint::new(&self.timeline, last_mark)
    }

    fn wait(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        self.submit(QueueCommand::Wait(point.clone()))
    }

    fn collectives(&mut self) -> Option<&mut dyn Collectives> {
        if self.remote.connection.session.is_some() { Some(self) } else { None }
    }

    fn load_by_digest(&mut self) -> Option<&mut dyn LoadByDigest> {
        let session = self.remote.connection.session.as_ref();
        if session.is_some_and(|session| session.server().capabilities.load_by_digest) { Some(self) } else { None }
    }

    /// Ends this queue alone: its points and reads fail at once, because no memory of this host is in use by then (a reply that
    /// arrives later is dropped). The server ends the queue's work when the queue is closed, if it has the extensions. A call
    /// that is sending a message is not ended, because an incomplete message would end the connection of all queues: it ends
    /// when the server accepts the message, or with the connection's silence timeout.
    fn aborter(&mut self) -> Option<QueueAborter> {
        let (timeline, open_reads) = (Arc::clone(&self.timeline), Arc::clone(&self.open_reads));
        let (channel, wake) = (Arc::downgrade(&self.channel), Arc::clone(&self.wake_placement_waiters));
        Some(QueueAborter::new(move || {
            // Failed first: a read that is opened later is not submitted.
            timeline.fail(DeviceError::Ended);
            wake();
            open_reads.abort();
            if let Some(channel) = channel.upgrade() {
                channel.close();
            }
        }))
    }
}

impl<S: QueueProtocol> Collectives for RemoteQueue<S> {
    fn join(&mut self, group: u32, member: Membership) -> Result<(), DeviceError> {
        match member {
            Membership::OnServer(member) => self.submit(QueueCommand::Join { group, member }),
            Membership::InProcess(_) => {
                Err(DeviceError::Misuse("a queue of a remote device cannot join a group of this process"))
            }
        }
    }
}

impl<S: QueueProtocol> LoadByDigest for RemoteQueue<S> {
    fn load_by_digest(
        &mut self,
        dst: Region,
        tensor: Option<&TensorDesc>,
        wanted: TensorDigest<'_>,
        runs: ByteRuns,
    ) -> Result<PendingRead<LoadOutcome>, DeviceError> {
        self.own_buffer(&dst)?;
        // The server would end the connection.
        if runs.check_bounds(wanted.bytes).is_err() {
            return Err(DeviceError::Misuse("a load of a slice that reaches past its tensor"));
        }
        if runs.bytes() != dst.bytes() {
            return Err(DeviceError::Misuse("a load of a slice into a region of another length"));
        }
        let (to, reply) = ReadCompleter::new(&self.remote);
        self.open_reads.add(&to);
        let TensorDigest { digest, bytes, name } = wanted;
        let (tensor, name) = (tensor.copied(), name.to_owned());
        self.submit(QueueCommand::LoadByDigest(DigestLoad { dst, tensor, digest, bytes, runs, name, to }))?;
        Ok(PendingRead::from_source(LoadReply(reply)))
    }
}

impl<S: QueueProtocol> Drop for RemoteQueue<S> {
    fn drop(&mut self) {
        // The queue's thread ends after its current command. Messages that were sent stay with the server.
        self.channel.close();
    }
}

/// Sends a queue's commands, and fails its timeline when one fails.
struct QueueExecutor<S: QueueProtocol> {
    protocol: S,
    timeline: Arc<Timeline>,
    last_mark: Arc<AtomicU64>,
}

impl<S: QueueProtocol> Executor for QueueExecutor<S> {
    type Command = QueueCommand;

    fn execute(&mut self, command: QueueCommand, _: &Turn) -> CommandOutcome<QueueCommand> {
        self.send(command);
        CommandOutcome::Done
    }
}

impl<S: QueueProtocol> QueueExecutor<S> {
    /// Sends a command. After a failure nothing is sent, and pending reads complete with that failure.
    fn send(&mut self, command: QueueCommand) {
        match (self.timeline.failure(), command) {
            (Some(failure), QueueCommand::Download(parts)) => {
                parts.into_iter().for_each(|(_, to)| to.complete(Err(failure.clone())));
            }
            (Some(failure), QueueCommand::LoadByDigest(load)) => load.to.complete(Err(failure)),
            (Some(_), _) => {}
            (None, command) => {
                // `record_failure` has stored the error in the timeline.
                let _ = self.record_failure(|protocol| send_command(protocol, command));
            }
        }
    }

    /// Runs `work` and fails the timeline with its error, except with an error of an upload's source.
    fn record_failure<T>(&mut self, work: impl FnOnce(&mut S) -> Result<T, DeviceError>) -> Result<T, DeviceError> {
        work(&mut self.protocol).inspect_err(|error| {
            if !matches!(error, DeviceError::Source(_)) {
                self.timeline.fail(error.clone());
                (self.protocol.placement_waker())();
            }
        })
    }
}

fn send_command(protocol: &mut impl QueueProtocol, command: QueueCommand) -> Result<(), DeviceError> {
    match command {
        QueueCommand::Upload { dst, bytes } => protocol.upload(&dst, None, &bytes),
        QueueCommand::Download(parts) => protocol.download(parts),
        QueueCommand::LoadByDigest(load) => protocol.load_by_digest(load),
        QueueCommand::Fill { dst, value } => protocol.fill(&dst, value),
        QueueCommand::Copy { src, dst } => protocol.copy(&src, &dst),
        QueueCommand::PeerCopy { src, dst, after } => protocol.copy_from_peer(&src, &dst, after.as_ref()),
        QueueCommand::Run { messages, bindings } => {
            let done = protocol.run_graph(&messages);
            drop(bindings);
            done
        }
        QueueCommand::Wait(point) => protocol.wait(&point),
        QueueCommand::Mark(seq) => protocol.mark(seq),
        QueueCommand::Join { group, member } => protocol.join(group, &member),
    }
}

impl<S: QueueProtocol> Drop for QueueExecutor<S> {
    fn drop(&mut self) {
        // Marks that were never sent are never reached. Marks that were sent may still be.
        self.protocol.close(self.last_mark.load(Ordering::Acquire));
    }
}

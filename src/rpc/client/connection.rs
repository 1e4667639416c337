//! The one connection of an endpoint: requests go out in order, one writer at a time.

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use super::graph::Body;
use super::proof::{Needs, Track};
use super::reader;
use crate::device::{DeviceError, Ticket, TicketSender};
use crate::rpc::wire::{Command, FreeBuffer, GetTensor, GraphRecompute, Request, SetTensorHead, TensorRecord};

/// Data of at most so many bytes is copied behind the head of its message and leaves in one write.
const JOINED: usize = 64 << 10;

/// A server forgets graphs when others need the room. One whose bytes, with those of the graphs that were sent for other
/// devices since, are more than this is sent again; fanout's servers keep several times as much.
const REMEMBERED: u64 = 4 << 20;

/// Counts the connections of this process.
static NUMBER: AtomicU64 = AtomicU64::new(0);

/// A connection, ended when dropped.
#[derive(Debug)]
pub(super) struct Connection(Arc<Shared>);

/// What whoever writes, and the thread that reads, have in common.
#[derive(Debug)]
pub(super) struct Shared {
    endpoint: String,
    number: u64,
    pub(super) stream: TcpStream,
    pub(super) patience: Duration,
    /// Held while a message is written; what is in it changes in the order of the messages.
    writer: Mutex<Writer>,
    replies: Mutex<Replies>,
    errands: Mutex<Errands>,
    /// By device.
    progress: Mutex<Vec<Arc<Progress>>>,
    tracks: Mutex<Vec<Weak<Track>>>,
    /// By source and destination device: whether the server copies between the two.
    copies: Mutex<HashMap<(u32, u32), bool>>,
}

/// How far a device has come. Messages that it has work with are numbered from 1.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// The last that was sent. Changes only under the writer's lock, as `asked` does.
    sent: AtomicU64,
    /// The last that a read was sent behind.
    asked: AtomicU64,
    /// The last that is known to be done.
    done: AtomicU64,
}

#[derive(Debug, Default)]
struct Writer {
    out: Vec<u8>,
    lanes: Vec<Lane>,
}

/// What a writer knows of a device.
#[derive(Debug, Default)]
struct Lane {
    /// A byte of it that can be read, to prove that it has come so far.
    probe: Option<TensorRecord>,
    /// The graph that it computed last, and the bytes of graphs that were sent since, its own too.
    graph: Option<(u64, u64)>,
}

/// What is due from the server, in order.
#[derive(Debug, Default)]
struct Replies {
    due: VecDeque<Reply>,
    failure: Option<DeviceError>,
}

/// A reply that is due.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) command: Command,
    /// Bytes that it must have.
    pub(super) len: u64,
    pub(super) since: Instant,
    pub(super) to: To,
    /// A device, and the message of its that is done when this has come.
    pub(super) proves: Option<(u32, u64)>,
}

/// Who gets a reply.
#[derive(Debug)]
pub(super) enum To {
    /// Whoever waits for its bytes.
    Ticket(TicketSender),
    /// The queue that fails unless it says yes.
    Consent(Weak<Track>),
    /// Nobody: that it came is all.
    Nobody,
}

/// What somebody wants to be sent, and need not wait for: done by whoever writes next, or is just writing.
#[derive(Debug, Default)]
struct Errands {
    freed: Vec<u64>,
    /// Devices and messages to be proved.
    wanted: Needs,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The reader sees the end, and with it everything is freed there and here.
        let _ = self.0.stream.shutdown(Shutdown::Both);
    }
}

impl Connection {
    /// Takes over a stream whose handshake is done.
    pub(super) fn start(endpoint: &str, stream: TcpStream, patience: Duration) -> io::Result<Arc<Connection>> {
        let patience = patience.max(Duration::from_millis(1));
        stream.set_write_timeout(Some(patience))?;
        stream.set_read_timeout(Some(patience))?;
        let shared = Arc::new(Shared {
            endpoint: endpoint.to_owned(),
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            stream,
            patience,
            writer: Mutex::default(),
            replies: Mutex::default(),
            errands: Mutex::default(),
            progress: Mutex::default(),
            tracks: Mutex::default(),
            copies: Mutex::default(),
        });
        reader::start(Arc::clone(&shared))?;
        Ok(Arc::new(Connection(shared)))
    }

    pub(super) fn endpoint(&self) -> &str {
        &self.0.endpoint
    }

    /// Devices of one connection reach each other's memory, those of two connections to one server do not.
    pub(super) fn domain(&self) -> String {
        format!("{} (connection {})", self.0.endpoint, self.0.number)
    }

    /// Makes room in the books for another device.
    pub(super) fn add_device(&self) -> Result<Arc<Progress>, DeviceError> {
        let progress = Arc::<Progress>::default();
        lock(&self.0.progress).push(Arc::clone(&progress));
        self.turn(|turn| {
            turn.writer.lanes.push(Lane::default());
            Ok(())
        })?;
        Ok(progress)
    }

    /// From now on this byte is what is read to prove a device's work.
    pub(super) fn set_probe(&self, device: u32, probe: TensorRecord) -> Result<(), DeviceError> {
        self.turn(|turn| {
            turn.lane(device)?.probe = Some(probe);
            Ok(())
        })
    }

    /// A queue's track is told of replies and of the connection's end.
    pub(super) fn register(&self, track: &Arc<Track>) -> Result<(), DeviceError> {
        let mut tracks = lock(&self.0.tracks);
        tracks.retain(|track| track.strong_count() > 0);
        tracks.push(Arc::downgrade(track));
        drop(tracks);
        // After the push: whoever fails the connection either sees the track, or has failed it before this.
        self.0.unbroken()
    }

    /// Writes messages while nobody else does.
    pub(super) fn turn<T>(&self, work: impl FnOnce(&mut Turn<'_>) -> Result<T, DeviceError>) -> Result<T, DeviceError> {
        let done = {
            let mut writer = self.0.writer.lock().map_err(|_| self.0.torn())?;
            self.0.unbroken()?;
            let mut turn = Turn { shared: &self.0, writer: &mut writer };
            turn.run_errands()?;
            work(&mut turn)
        };
        self.run_errands();
        done
    }

    /// Sends a request and waits for its reply of `len` bytes.
    pub(super) fn call(&self, request: &Request<'_>, len: u64) -> Result<Vec<u8>, DeviceError> {
        let (to, ticket) = Ticket::new();
        self.turn(|turn| turn.ask(request, len, To::Ticket(to), None))?;
        // The reader ends every wait.
        ticket.wait(None)
    }

    /// Has a buffer freed, after all that was sent so far. Waits for nobody.
    pub(super) fn free(&self, handle: u64) {
        lock(&self.0.errands).freed.push(handle);
        self.run_errands();
    }

    /// Has it proved that devices have come so far. Waits for nobody.
    pub(super) fn prove(&self, needs: &Needs) {
        lock(&self.0.errands).wanted.merge(needs);
        self.run_errands();
    }

    /// Whoever is writing looks for errands when it is done: there is always someone to run them.
    fn run_errands(&self) {
        while !lock(&self.0.errands).is_empty() {
            match self.0.writer.try_lock() {
                Ok(mut writer) => {
                    let mut turn = Turn { shared: &self.0, writer: &mut writer };
                    // When this fails, it has failed everything that could be told of it.
                    if self.0.unbroken().and_then(|()| turn.run_errands()).is_err() {
                        *lock(&self.0.errands) = Errands::default();
                    }
                }
                Err(TryLockError::WouldBlock) => return,
                Err(TryLockError::Poisoned(_)) => {
                    self.0.torn();
                    return;
                }
            }
        }
    }

    /// Whether the server copies from one device to another, where that is known.
    pub(super) fn copies(&self, from: u32, to: u32) -> Option<bool> {
        if from == to { Some(true) } else { lock(&self.0.copies).get(&(from, to)).copied() }
    }

    pub(super) fn learn_copies(&self, from: u32, to: u32, does: bool) {
        lock(&self.0.copies).insert((from, to), does);
    }

    /// Ends the connection, because of something that cannot be.
    pub(super) fn fault(&self, reason: impl Into<String>) -> DeviceError {
        self.0.fail(reason.into())
    }

    pub(super) fn unbroken(&self) -> Result<(), DeviceError> {
        self.0.unbroken()
    }

    pub(super) fn progress(&self, device: u32) -> Option<Arc<Progress>> {
        lock(&self.0.progress).get(device as usize).cloned()
    }
}

impl Progress {
    pub(super) fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// Whether a read that would prove message `number` is on its way, or would come later than one sent at once did.
    pub(super) fn late(&self, number: u64) -> bool {
        self.asked.load(Ordering::Acquire) < number && self.sent.load(Ordering::Acquire) > number
    }
}

impl Shared {
    pub(super) fn unbroken(&self) -> Result<(), DeviceError> {
        lock(&self.replies).failure.clone().map_or(Ok(()), Err)
    }

    /// Makes the first failure stick to everything. Returns it.
    pub(super) fn fail(&self, reason: String) -> DeviceError {
        let failure = DeviceError::Lost { endpoint: self.endpoint.clone(), reason };
        let mut replies = lock(&self.replies);
        if let Some(first) = &replies.failure {
            return first.clone();
        }
        replies.failure = Some(failure.clone());
        let due = std::mem::take(&mut replies.due);
        drop(replies);
        // Whoever is stuck in a write or a read is so no more.
        let _ = self.stream.shutdown(Shutdown::Both);
        for reply in due {
            if let To::Ticket(to) = reply.to {
                to.send(Err(failure.clone()));
            }
        }
        self.tracks().iter().for_each(|track| track.fail(&failure));
        failure
    }

    /// A writer that panicked may have left a part of a message.
    fn torn(&self) -> DeviceError {
        self.fail("a thread of this process ended in the middle of a message".to_owned())
    }

    fn tracks(&self) -> Vec<Arc<Track>> {
        lock(&self.tracks).iter().filter_map(Weak::upgrade).collect()
    }

    /// The reply that is due next: its command, its bytes and since when.
    pub(super) fn due(&self) -> Option<(Command, u64, Instant)> {
        lock(&self.replies).due.front().map(|reply| (reply.command, reply.len, reply.since))
    }

    /// The reply that has come.
    pub(super) fn arrived(&self) -> Option<Reply> {
        lock(&self.replies).due.pop_front()
    }

    /// A device has done its messages up to this one.
    pub(super) fn proved(&self, (device, number): (u32, u64)) {
        let progress = lock(&self.progress).get(device as usize).cloned();
        if let Some(progress) = progress {
            progress.done.fetch_max(number, Ordering::AcqRel);
            self.tracks().iter().for_each(|track| track.settle());
        }
    }
}

/// The right to write messages.
pub(super) struct Turn<'a> {
    shared: &'a Shared,
    writer: &'a mut Writer,
}

impl Turn<'_> {
    fn lane(&mut self, device: u32) -> Result<&mut Lane, DeviceError> {
        self.writer.lanes.get_mut(device as usize).ok_or(DeviceError::Misuse("a device of another endpoint"))
    }

    /// Numbers a message that is work for a device.
    pub(super) fn number(&self, progress: &Progress) -> u64 {
        progress.sent.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Sends a request that has no reply.
    pub(super) fn tell(&mut self, request: &Request<'_>) -> Result<(), DeviceError> {
        self.writer.out.clear();
        request.encode(&mut self.writer.out);
        self.flush(request.command())
    }

    /// Sends a request whose reply has `len` bytes.
    pub(super) fn ask(
        &mut self,
        request: &Request<'_>,
        len: u64,
        to: To,
        proves: Option<(u32, u64)>,
    ) -> Result<(), DeviceError> {
        let reply = Reply { command: request.command(), len, since: Instant::now(), to, proves };
        let mut replies = lock(&self.shared.replies);
        if let Some(failure) = &replies.failure {
            return Err(failure.clone());
        }
        // Before the request leaves: the reader expects the reply.
        replies.due.push_back(reply);
        drop(replies);
        self.tell(request)
    }

    /// Reads bytes of a device; their reply proves all that it was sent before.
    pub(super) fn read(
        &mut self,
        (device, progress): (u32, &Progress),
        tensor: TensorRecord,
        size: u64,
        to: To,
    ) -> Result<u64, DeviceError> {
        let number = self.number(progress);
        progress.asked.store(number, Ordering::Release);
        let request = Request::GetTensor(GetTensor { tensor, offset: 0, size });
        self.ask(&request, size, to, Some((device, number)))?;
        Ok(number)
    }

    /// Writes bytes into a tensor, from its start.
    pub(super) fn write(&mut self, tensor: TensorRecord, data: &[u8]) -> Result<(), DeviceError> {
        self.writer.out.clear();
        let head = SetTensorHead { tensor, cache: false, offset: 0 };
        let encoded = head.encode(data.len() as u64, &mut self.writer.out);
        encoded.map_err(|e| DeviceError::Bug(format!("an upload that no message holds: {e}")))?;
        let (first, rest) = data.split_at(data.len().min(JOINED));
        self.writer.out.extend_from_slice(first);
        self.flush(Command::SetTensor)?;
        let sent = (&self.shared.stream).write_all(rest);
        sent.map_err(|e| self.unsent(Command::SetTensor, &e))
    }

    /// Runs a graph; one that the device ran last is not sent again.
    pub(super) fn compute(&mut self, device: u32, body: &Body) -> Result<(), DeviceError> {
        let bytes = body.frame().len() as u64;
        let others = |(_, since): (u64, u64)| since.saturating_sub(bytes);
        let last = self.lane(device)?.graph.filter(|last| last.0 == body.id());
        if last.is_some_and(|last| others(last) == 0 || last.1 <= REMEMBERED) {
            return self.tell(&Request::GraphRecompute(GraphRecompute { device }));
        }
        for (_, since) in self.writer.lanes.iter_mut().filter_map(|lane| lane.graph.as_mut()) {
            *since += bytes;
        }
        self.lane(device)?.graph = Some((body.id(), bytes));
        let sent = (&self.shared.stream).write_all(body.frame());
        sent.map_err(|e| self.unsent(Command::GraphCompute, &e))
    }

    fn run_errands(&mut self) -> Result<(), DeviceError> {
        let Errands { freed, wanted } = std::mem::take(&mut *lock(&self.shared.errands));
        for &remote_ptr in &freed {
            self.tell(&Request::FreeBuffer(FreeBuffer { remote_ptr }))?;
        }
        if !freed.is_empty() {
            // Graphs may go with the buffers that they touch, and from some servers all of them do.
            self.writer.lanes.iter_mut().for_each(|lane| lane.graph = None);
        }
        for (device, number) in wanted.iter() {
            let progress = lock(&self.shared.progress).get(device as usize).cloned();
            let probe = self.lane(device)?.probe.clone();
            let (Some(progress), Some(probe)) = (progress, probe) else { continue };
            if progress.asked.load(Ordering::Acquire) < number {
                self.read((device, &progress), probe, 1, To::Nobody)?;
            }
        }
        Ok(())
    }

    fn flush(&mut self, command: Command) -> Result<(), DeviceError> {
        let sent = (&self.shared.stream).write_all(&self.writer.out);
        sent.map_err(|e| self.unsent(command, &e))
    }

    fn unsent(&self, command: Command, e: &io::Error) -> DeviceError {
        self.shared.fail(match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                format!("the server took nothing of a {command} within {:?}", self.shared.patience)
            }
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted => {
                format!("the server closed the connection before a {command}; its log says why")
            }
            _ => format!("sending a {command}: {e}"),
        })
    }
}

impl Errands {
    fn is_empty(&self) -> bool {
        self.freed.is_empty() && self.wanted.is_empty()
    }
}

/// What these locks guard is whole between any two statements: a panic elsewhere cannot have left it torn.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

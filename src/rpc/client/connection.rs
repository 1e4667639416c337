//! The connection of an endpoint: requests leave in order, one writer at a time. All devices and queues of the endpoint share
//! it.

mod write_guard;

#[cfg(test)]
mod tests;

pub(super) use write_guard::WriteGuard;

use crate::poison::lock;
use std::fmt;
use std::ops::{Deref, RangeInclusive};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use super::completion_probe::{CompletionTracker, DeviceWriteState, RequiredMessages};
use super::extended::{ClientSession, RemoteGraphCache};
use super::reader;
use crate::device::AdaptiveSpin;
use crate::device::{DeviceError, Domain, LinkStats, PendingRead, PendingReadSender};
pub(super) use crate::rpc::connection::MAX_COALESCED_BYTES;
use crate::rpc::connection::{DueReplies, Handshake, MessageWriter};
use crate::rpc::transport::Aborter;
use crate::rpc::wire::ext::HelloExtReply;
use crate::rpc::wire::{Request, VersionCodec};

/// Chunk size of long writes. After each chunk the writer records progress, so that a server that keeps accepting bytes does
/// not count as silent.
const WRITE_CHUNK_BYTES: usize = 1 << 20;

/// How long a writer that finds the connection closed waits for the reader thread to report the reason.
const CLOSE_REASON_TIMEOUT: Duration = Duration::from_millis(500);

/// Spin-then-park: a wait for a reply that takes longer than this parks the thread.
const SPIN_LIMIT: Duration = Duration::from_millis(1);

/// Source of connection ids.
static NEXT_CONNECTION_ID: AtomicU64 = AtomicU64::new(0);

/// A connection; dropping it aborts the transport.
#[derive(Debug)]
pub(super) struct Connection(Arc<ConnectionShared>);

/// State that is shared by the writing threads and the reader thread.
#[derive(Debug)]
pub(super) struct ConnectionShared {
    endpoint: String,
    id: u64,
    domain: Domain,
    aborter: Aborter,
    /// The server's protocol version.
    pub(super) codec: VersionCodec,
    pub(super) silence_timeout: Duration,
    /// Longest time for which a reply may be outstanding, whatever else the server sends.
    pub(super) reply_timeout: Duration,
    /// When the server last accepted a chunk of a long message.
    write_progress: Mutex<Instant>,
    /// Locked while a thread writes, which may block on the server; its contents change in the order of the messages.
    writer: Mutex<WriterState>,
    /// Outstanding replies, and the failure of the connection.
    pub(super) replies: DueReplies<ReplySink, DeviceError>,
    deferred: Mutex<DeferredSends>,
    traffic: Traffic,
    pub(super) spin: AdaptiveSpin,
    /// Completed work per device, for servers without the extensions.
    pub(super) completions: Arc<CompletionTracker>,
    /// Open queues and outstanding reads, for servers with the extensions.
    pub(super) session: Option<ClientSession>,
}

/// Traffic counters of the connection.
#[derive(Debug, Default)]
struct Traffic {
    sent: AtomicU64,
    sent_graphs: AtomicU64,
    received: AtomicU64,
    waits: AtomicU64,
}

#[derive(Debug)]
pub(super) struct WriterState {
    out: MessageWriter,
    /// Per-device state; used for servers without the extensions.
    pub(super) devices: Vec<DeviceWriteState>,
    /// Graphs that the server caches; used for servers with the extensions.
    pub(super) graph_cache: RemoteGraphCache,
}

/// Destination of a reply.
pub(super) enum ReplySink {
    /// A thread that waits for the bytes.
    Waiter(PendingReadSender),
    /// Called with the bytes, or with the failure of the connection. `Err` describes why the reply is invalid.
    Callback(ReplyCallback),
    /// The reply's arrival is all that matters; its bytes are dropped.
    Discard,
}

type ReplyCallback = Box<dyn FnOnce(Result<Vec<u8>, DeviceError>) -> Result<(), String> + Send>;

impl fmt::Debug for ReplySink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReplySink::Waiter(_) => "waiter",
            ReplySink::Callback(_) => "callback",
            ReplySink::Discard => "discard",
        })
    }
}

impl ReplySink {
    /// Delivers a reply. `Err` describes why the reply is invalid.
    pub(super) fn deliver(self, bytes: Result<Vec<u8>, DeviceError>) -> Result<(), String> {
        match self {
            ReplySink::Waiter(waiter) => waiter.send(bytes),
            ReplySink::Callback(callback) => return callback(bytes),
            ReplySink::Discard => {}
        }
        Ok(())
    }
}

/// Deferred sends: messages that a thread queues without waiting for the writer. The thread that holds the writer, or the next
/// thread that gets it, sends them.
#[derive(Default)]
struct DeferredSends {
    freed_buffers: Vec<u64>,
    /// Messages for which a completion probe is requested, by device.
    probes: RequiredMessages,
    sends: Vec<DeferredSend>,
}

type DeferredSend = Box<dyn FnOnce(&mut WriteGuard<'_>) -> Result<(), DeviceError> + Send>;

impl fmt::Debug for DeferredSends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "freed buffers {:?}, probes {:?}, {} sends", self.freed_buffers, self.probes, self.sends.len())
    }
}

impl Deref for Connection {
    type Target = Arc<ConnectionShared>;

    fn deref(&self) -> &Arc<ConnectionShared> {
        &self.0
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The reader thread sees the end of the stream, fails the connection and releases its resources. The server frees the
        // client's buffers.
        self.0.aborter.abort();
    }
}

impl Connection {
    /// Starts the reader thread of a connection after its handshake. The two timeouts are `(silence, reply)`. `server_info` is
    /// the server's self-description; it is present only for servers with the extensions.
    ///
    /// # Errors
    /// [`DeviceError::Exhausted`] when the system cannot start a thread.
    pub(super) fn start(
        endpoint: &str,
        handshake: Handshake,
        codec: VersionCodec,
        (silence_timeout, reply_timeout): (Duration, Duration),
        server_info: Option<HelloExtReply>,
    ) -> Result<Arc<Connection>, DeviceError> {
        let silence_timeout = silence_timeout.max(Duration::from_millis(1));
        let Handshake { aborter, receiver, sender, sent, received } = handshake;
        let out = MessageWriter::new(sender, silence_timeout);
        let graph_cache = server_info.as_ref().map_or_else(RemoteGraphCache::default, RemoteGraphCache::new);
        let shared = Arc::new(ConnectionShared {
            endpoint: endpoint.to_owned(),
            id: NEXT_CONNECTION_ID.fetch_add(1, Ordering::Relaxed),
            domain: Domain::unique(endpoint),
            aborter,
            codec,
            silence_timeout,
            reply_timeout,
            write_progress: Mutex::new(Instant::now()),
            writer: Mutex::new(WriterState { out, devices: Vec::new(), graph_cache }),
            replies: DueReplies::new(),
            deferred: Mutex::default(),
            spin: AdaptiveSpin::new(SPIN_LIMIT),
            traffic: Traffic { sent: sent.into(), received: received.into(), ..Traffic::default() },
            completions: Arc::default(),
            session: server_info.map(ClientSession::new),
        });
        reader::start(Arc::clone(&shared), receiver)?;
        let connection = Arc::new(Connection(shared));
        if connection.session.is_some() {
            super::extended::register_connection(&connection);
        }
        Ok(connection)
    }
}

impl ConnectionShared {
    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Id of the connection, unique within this process.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// The domain of the connection's devices. Devices of one connection access each other's buffers; devices of two
    /// connections to the same server do not.
    pub(super) fn domain(&self) -> Domain {
        self.domain.clone()
    }

    pub(super) fn link_stats(&self) -> LinkStats {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Traffic { sent, sent_graphs, received, waits } = &self.traffic;
        LinkStats::new(self.endpoint.clone())
            .with_sent(count(sent))
            .with_sent_graphs(count(sent_graphs))
            .with_received(count(received))
            .with_waits(count(waits))
    }

    /// Counts the bytes of a message that carries a graph.
    pub(super) fn count_graph(&self, bytes: usize) {
        self.traffic.sent_graphs.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn count_wait(&self) {
        self.traffic.waits.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn add_received(&self, bytes: usize) {
        self.traffic.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Runs `work` with exclusive use of the writer.
    pub(super) fn with_writer<T>(
        &self,
        work: impl FnOnce(&mut WriteGuard<'_>) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let done = self.with_locked_writer(work);
        // Also after a failure: on a lost connection this drops the deferred sends and the resources that they hold.
        self.run_deferred_sends();
        done
    }

    fn with_locked_writer<T>(
        &self,
        work: impl FnOnce(&mut WriteGuard<'_>) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let mut writer = self.writer.lock().map_err(|_| self.fail_poisoned())?;
        self.check_alive()?;
        let mut guard = WriteGuard { shared: self, writer: &mut writer };
        guard.run_deferred_sends()?;
        work(&mut guard)
    }

    /// Sends a request of 7.0 and waits for its reply of `len` bytes.
    pub(super) fn call(&self, request: &Request<'_>, len: u64) -> Result<Vec<u8>, DeviceError> {
        let (sender, reply) = PendingRead::new();
        self.with_writer(|guard| guard.request(request, len, ReplySink::Waiter(sender)))?;
        self.count_wait();
        // The reader ends every wait.
        reply.wait(None)
    }

    /// As [`ConnectionShared::call`], for a request that `encode` appends to the write buffer, such as one of the extensions.
    /// `len` limits the length of the reply.
    pub(super) fn call_encoded(
        &self,
        command: &'static str,
        len: RangeInclusive<u64>,
        encode: impl FnOnce(&mut Vec<u8>),
    ) -> Result<Vec<u8>, DeviceError> {
        let (sender, reply) = PendingRead::new();
        self.with_writer(|guard| guard.request_encoded(command, len, ReplySink::Waiter(sender), encode))?;
        self.count_wait();
        // The reader ends every wait.
        reply.wait(None)
    }

    /// Queues a FREE_BUFFER after everything that was sent so far. Does not block.
    pub(super) fn defer_free(&self, handle: u64) {
        lock(&self.deferred).freed_buffers.push(handle);
        self.run_deferred_sends();
    }

    /// Queues completion probes for the given messages. Does not block.
    pub(super) fn defer_probe(&self, required: &RequiredMessages) {
        lock(&self.deferred).probes.merge(required);
        self.run_deferred_sends();
    }

    /// Queues a send that runs with exclusive use of the writer. Does not block.
    pub(super) fn defer_send(
        &self,
        send: impl FnOnce(&mut WriteGuard<'_>) -> Result<(), DeviceError> + Send + 'static,
    ) {
        lock(&self.deferred).sends.push(Box::new(send));
        self.run_deferred_sends();
    }

    /// Runs the deferred sends, unless another thread holds the writer. That thread runs them when it returns the writer: no
    /// deferred send is left behind.
    fn run_deferred_sends(&self) {
        while !lock(&self.deferred).is_empty() {
            let mut writer = match self.writer.try_lock() {
                Ok(writer) => writer,
                Err(TryLockError::WouldBlock) => return,
                Err(TryLockError::Poisoned(guard)) => {
                    // Drops that follow may defer sends, which must not find the writer locked.
                    drop(guard);
                    self.fail_poisoned();
                    self.drop_deferred_sends();
                    return;
                }
            };
            let mut guard = WriteGuard { shared: self, writer: &mut writer };
            // An error here has already failed the connection, its outstanding replies and its queues.
            if self.check_alive().and_then(|()| guard.run_deferred_sends()).is_err() {
                self.drop_deferred_sends();
            }
        }
    }

    fn drop_deferred_sends(&self) {
        // Moved out first, so that the lock is not held while the sends and their resources are dropped.
        let dropped = std::mem::take(&mut *lock(&self.deferred));
        drop(dropped);
    }

    pub(super) fn check_alive(&self) -> Result<(), DeviceError> {
        self.replies.failure().map_or(Ok(()), Err)
    }

    /// Fails the connection permanently: aborts the transport and fails all outstanding replies and queues. Only the first
    /// failure counts; it is returned.
    pub(super) fn fail(&self, reason: impl Into<String>) -> DeviceError {
        let failure = DeviceError::ConnectionLost { endpoint: self.endpoint.clone(), reason: reason.into() };
        let due = match self.replies.fail(failure.clone()) {
            Ok(due) => due,
            Err(first) => return first,
        };
        // Wakes the threads that block in a read or a write.
        self.aborter.abort();
        for reply in due {
            // A failure carries no bytes that could be invalid.
            let _ = reply.sink.deliver(Err(failure.clone()));
        }
        self.completions.fail(&failure);
        if let Some(session) = &self.session {
            session.fail_all(&failure);
        }
        failure
    }

    /// A writer that panicked may have left an incomplete message on the stream.
    fn fail_poisoned(&self) -> DeviceError {
        self.fail("a thread of this process panicked in the middle of a message")
    }

    /// The reason for the end of the connection, if the reader finds it soon: the server may have sent it before it closed the
    /// connection.
    fn wait_close_reason(&self) -> Option<DeviceError> {
        self.replies.wait_failure(CLOSE_REASON_TIMEOUT)
    }

    /// When the server last accepted a chunk of a long message. A server that accepts bytes is alive.
    pub(super) fn last_write_progress(&self) -> Instant {
        *lock(&self.write_progress)
    }

    /// The oldest outstanding request, and when it was sent.
    pub(super) fn oldest_due(&self) -> Option<(&'static str, Instant)> {
        let oldest_reply = self.replies.front().map(|(command, _, since)| (command, since));
        let oldest_notification = self.session.as_ref().and_then(ClientSession::oldest_due);
        oldest_reply.into_iter().chain(oldest_notification).min_by_key(|(_, since)| *since)
    }
}

impl DeferredSends {
    fn is_empty(&self) -> bool {
        self.freed_buffers.is_empty() && self.probes.is_empty() && self.sends.is_empty()
    }
}

//! The one connection of an endpoint: requests go out in order, one writer at a time.

mod write_guard;

#[cfg(test)]
mod tests;

pub(super) use write_guard::WriteGuard;

use std::fmt;
use std::ops::{Deref, RangeInclusive};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::completion_probe::{CompletionTracker, DeviceWriteState, RequiredMessages};
use super::extended::{ClientSession, RemoteGraphCache};
use super::reader;
use crate::device::{DeviceError, Domain, LinkStats, Ticket, TicketSender};
use crate::rpc::adaptive_spin::AdaptiveSpin;
pub(super) use crate::rpc::connection::MAX_COALESCED_BYTES;
use crate::rpc::connection::{DueReplies, Handshake, MessageWriter, Poisoned, WriteSlot};
use crate::rpc::transport::Aborter;
use crate::rpc::wire::ext::GreetReply;
use crate::rpc::wire::{Dialect, Request};

/// Bytes of a long message that are written at a time: so it is seen that the server takes them.
const WRITE_CHUNK_BYTES: usize = 1 << 20;

/// How long a writer that finds the connection closed waits for the reader to find out why.
const CLOSE_REASON_TIMEOUT: Duration = Duration::from_millis(500);

/// A wait for an answer that takes longer is worth a sleep.
const SPIN_LIMIT: Duration = Duration::from_millis(1);

/// Counts the connections of this process.
static NEXT_CONNECTION_ID: AtomicU64 = AtomicU64::new(0);

/// A connection, ended when dropped.
#[derive(Debug)]
pub(super) struct Connection(Arc<ConnectionShared>);

/// What whoever writes, and the thread that reads, have in common.
#[derive(Debug)]
pub(super) struct ConnectionShared {
    endpoint: String,
    id: u64,
    domain: Domain,
    aborter: Aborter,
    /// The version that the server speaks.
    pub(super) dialect: &'static Dialect,
    pub(super) silence_timeout: Duration,
    /// The longest that it may owe a reply, whatever else it says.
    pub(super) reply_timeout: Duration,
    /// When the server last took more of a long message.
    write_progress: Mutex<Instant>,
    /// One thread has it at a time; what is in it changes in the order of the messages.
    writer: WriteSlot<WriterState>,
    /// What is due from the server, and why no more comes.
    pub(super) replies: DueReplies<ReplySink, DeviceError>,
    deferred: Mutex<DeferredSends>,
    traffic: Traffic,
    pub(super) spin: AdaptiveSpin,
    /// What is known to be done, where the server speaks 7.0.
    pub(super) completions: Arc<CompletionTracker>,
    /// What is under way, where it has greeted.
    pub(super) session: Option<ClientSession>,
}

/// What has gone over it.
#[derive(Debug, Default)]
struct Traffic {
    sent: AtomicU64,
    received: AtomicU64,
    waits: AtomicU64,
}

#[derive(Debug)]
pub(super) struct WriterState {
    out: MessageWriter,
    /// In 7.0, what is known of each device.
    pub(super) devices: Vec<DeviceWriteState>,
    /// The graphs that a server which has greeted keeps.
    pub(super) graph_cache: RemoteGraphCache,
}

/// Who gets a reply.
pub(super) enum ReplySink {
    /// Whoever waits for its bytes.
    Waiter(TicketSender),
    /// Called with its bytes, or why there will be none; returns what is wrong with them.
    Callback(ReplyCallback),
    /// Nobody: that it came is all.
    Discard,
}

type ReplyCallback = Box<dyn FnOnce(Result<Vec<u8>, DeviceError>) -> Result<(), String> + Send>;

impl fmt::Debug for ReplySink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReplySink::Waiter(_) => "a ticket",
            ReplySink::Callback(_) => "someone",
            ReplySink::Discard => "nobody",
        })
    }
}

impl ReplySink {
    /// Hands a reply over. `Err` is what is wrong with it.
    pub(super) fn deliver(self, bytes: Result<Vec<u8>, DeviceError>) -> Result<(), String> {
        match self {
            ReplySink::Waiter(to) => to.send(bytes),
            ReplySink::Callback(told) => return told(bytes),
            ReplySink::Discard => {}
        }
        Ok(())
    }
}

/// What somebody wants to be sent, and need not wait for: done by whoever writes next, or is just writing.
#[derive(Default)]
struct DeferredSends {
    freed_buffers: Vec<u64>,
    /// Devices and messages to be proved.
    probes: RequiredMessages,
    sends: Vec<DeferredSend>,
}

type DeferredSend = Box<dyn FnOnce(&mut WriteGuard<'_>) -> Result<(), DeviceError> + Send>;

impl fmt::Debug for DeferredSends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "freed {:?}, wanted {:?}, {} more", self.freed_buffers, self.probes, self.sends.len())
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
        // The reader sees the end, and with it everything is freed there and here.
        self.0.aborter.abort();
    }
}

impl Connection {
    /// Takes over a connection whose handshake is done, with what the server said of itself if it greets.
    ///
    /// # Errors
    /// [`DeviceError::Exhausted`] when the system has no thread for it.
    pub(super) fn start(
        endpoint: &str,
        handshake: Handshake,
        dialect: &'static Dialect,
        (patience, longest): (Duration, Duration),
        greeted: Option<GreetReply>,
    ) -> Result<Arc<Connection>, DeviceError> {
        let patience = patience.max(Duration::from_millis(1));
        let Handshake { aborter, receiver, sender, sent, received } = handshake;
        let out = MessageWriter::new(sender, patience);
        let kept = greeted.as_ref().map_or_else(RemoteGraphCache::default, RemoteGraphCache::new);
        let shared = Arc::new(ConnectionShared {
            endpoint: endpoint.to_owned(),
            id: NEXT_CONNECTION_ID.fetch_add(1, Ordering::Relaxed),
            domain: Domain::unique(endpoint),
            aborter,
            dialect,
            silence_timeout: patience,
            reply_timeout: longest,
            write_progress: Mutex::new(Instant::now()),
            writer: WriteSlot::new(WriterState { out, devices: Vec::new(), graph_cache: kept }),
            replies: DueReplies::new(),
            deferred: Mutex::default(),
            spin: AdaptiveSpin::new(SPIN_LIMIT),
            traffic: Traffic { sent: sent.into(), received: received.into(), waits: AtomicU64::default() },
            completions: Arc::default(),
            session: greeted.map(ClientSession::new),
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

    /// A number that no other connection of this process has.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Devices of one connection reach each other's memory, those of two connections to one server do not.
    pub(super) fn domain(&self) -> Domain {
        self.domain.clone()
    }

    pub(super) fn link_stats(&self) -> LinkStats {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Traffic { sent, received, waits } = &self.traffic;
        LinkStats { endpoint: self.endpoint.clone(), sent: count(sent), received: count(received), waits: count(waits) }
    }

    pub(super) fn count_wait(&self) {
        self.traffic.waits.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn add_received(&self, bytes: usize) {
        self.traffic.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Writes messages while nobody else does.
    pub(super) fn with_writer<T>(
        &self,
        work: impl FnOnce(&mut WriteGuard<'_>) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let done = self.with_writer_inner(work);
        // Also when nothing was said: on a connection that is lost they are dropped, with what they hold.
        self.run_deferred_sends();
        done
    }

    fn with_writer_inner<T>(
        &self,
        work: impl FnOnce(&mut WriteGuard<'_>) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let done = self.writer.with(|writer| {
            self.check_alive()?;
            let mut turn = WriteGuard { shared: self, writer };
            turn.run_deferred_sends()?;
            work(&mut turn)
        });
        done.unwrap_or_else(|Poisoned| Err(self.fail_poisoned()))
    }

    /// Sends a request of 7.0 and waits for its reply of `len` bytes.
    pub(super) fn call(&self, request: &Request<'_>, len: u64) -> Result<Vec<u8>, DeviceError> {
        let (to, ticket) = Ticket::new();
        self.with_writer(|turn| turn.request(request, len, ReplySink::Waiter(to)))?;
        self.count_wait();
        // The reader ends every wait.
        ticket.wait(None)
    }

    /// Sends a request and waits for its reply.
    pub(super) fn exchange(
        &self,
        command: &'static str,
        len: RangeInclusive<u64>,
        encode: impl FnOnce(&mut Vec<u8>),
    ) -> Result<Vec<u8>, DeviceError> {
        let (to, ticket) = Ticket::new();
        self.with_writer(|turn| turn.request_encoded(command, len, ReplySink::Waiter(to), encode))?;
        self.count_wait();
        // The reader ends every wait.
        ticket.wait(None)
    }

    /// Has a buffer freed, after all that was sent so far. Waits for nobody.
    pub(super) fn defer_free(&self, handle: u64) {
        lock(&self.deferred).freed_buffers.push(handle);
        self.run_deferred_sends();
    }

    /// Has it proved that devices have come so far. Waits for nobody.
    pub(super) fn defer_probe(&self, needs: &RequiredMessages) {
        lock(&self.deferred).probes.merge(needs);
        self.run_deferred_sends();
    }

    /// Has something said, in a turn of whoever writes. Waits for nobody.
    pub(super) fn defer_send(
        &self,
        errand: impl FnOnce(&mut WriteGuard<'_>) -> Result<(), DeviceError> + Send + 'static,
    ) {
        lock(&self.deferred).sends.push(Box::new(errand));
        self.run_deferred_sends();
    }

    /// Whoever is writing looks for errands when it is done: there is always someone to run them.
    fn run_deferred_sends(&self) {
        while !lock(&self.deferred).is_empty() {
            let ran = self.writer.try_with(|writer| {
                let mut turn = WriteGuard { shared: self, writer };
                // When this fails, it has failed everything that could be told of it.
                if self.check_alive().and_then(|()| turn.run_deferred_sends()).is_err() {
                    self.drop_deferred_sends();
                }
            });
            match ran {
                Some(Ok(())) => {}
                None => return,
                Some(Err(Poisoned)) => {
                    self.fail_poisoned();
                    self.drop_deferred_sends();
                    return;
                }
            }
        }
    }

    fn drop_deferred_sends(&self) {
        let left = std::mem::take(&mut *lock(&self.deferred));
        drop(left);
    }

    pub(super) fn check_alive(&self) -> Result<(), DeviceError> {
        self.replies.failure().map_or(Ok(()), Err)
    }

    /// Makes the first failure stick to everything: the connection ends, because of something that cannot be. Returns it.
    pub(super) fn fail(&self, reason: impl Into<String>) -> DeviceError {
        let failure = DeviceError::Lost { endpoint: self.endpoint.clone(), reason: reason.into() };
        let due = match self.replies.fail(failure.clone()) {
            Ok(due) => due,
            Err(first) => return first,
        };
        // Whoever is stuck in a write or a read is so no more.
        self.aborter.abort();
        for reply in due {
            // There is nothing that could be wrong with no bytes.
            let _ = reply.sink.deliver(Err(failure.clone()));
        }
        self.completions.fail(&failure);
        if let Some(session) = &self.session {
            session.fail_all(&failure);
        }
        failure
    }

    /// A writer that panicked may have left a part of a message.
    fn fail_poisoned(&self) -> DeviceError {
        self.fail("a thread of this process ended in the middle of a message")
    }

    /// Why the connection ends, if the reader finds that out soon: the server may have said it.
    fn wait_close_reason(&self) -> Option<DeviceError> {
        self.replies.wait_failure(CLOSE_REASON_TIMEOUT)
    }

    /// When the server last took more of a long message: whoever takes what is sent is there.
    pub(super) fn last_write_progress(&self) -> Instant {
        *lock(&self.write_progress)
    }

    /// What has been due for longest, and since when.
    pub(super) fn oldest_due(&self) -> Option<(&'static str, Instant)> {
        let reply = self.replies.front().map(|(command, _, since)| (command, since));
        let notice = self.session.as_ref().and_then(ClientSession::oldest_due);
        reply.into_iter().chain(notice).min_by_key(|(_, since)| *since)
    }
}

impl DeferredSends {
    fn is_empty(&self) -> bool {
        self.freed_buffers.is_empty() && self.probes.is_empty() && self.sends.is_empty()
    }
}

/// What these locks guard is whole between any two statements: a panic elsewhere cannot have left it torn.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

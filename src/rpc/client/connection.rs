//! The one connection of an endpoint: requests go out in order, one writer at a time.

mod turn;

#[cfg(test)]
mod tests;

pub(super) use turn::Turn;

use std::fmt;
use std::ops::{Deref, RangeInclusive};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::greeted::{Kept, Session};
use super::proof::{Lane, Needs, Proofs};
use super::reader;
use crate::device::{DeviceError, Domain, LinkStats, Ticket, TicketSender};
use crate::rpc::adaptive_spin::AdaptiveSpin;
pub(super) use crate::rpc::connection::JOINED;
use crate::rpc::connection::{DueReplies, Handshake, MessageWriter, Poisoned, WriteSlot};
use crate::rpc::transport::Aborter;
use crate::rpc::wire::ext::GreetReply;
use crate::rpc::wire::{Dialect, Request};

/// Bytes of a long message that are written at a time: so it is seen that the server takes them.
const TAKEN: usize = 1 << 20;

/// How long a writer that finds the connection closed waits for the reader to find out why.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// A wait for an answer that takes longer is worth a sleep.
const SHORT: Duration = Duration::from_millis(1);

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
    domain: Domain,
    aborter: Aborter,
    /// The version that the server speaks.
    pub(super) dialect: &'static Dialect,
    pub(super) patience: Duration,
    /// The longest that it may owe a reply, whatever else it says.
    pub(super) longest: Duration,
    /// When the server last took more of a long message.
    taken: Mutex<Instant>,
    /// One thread has it at a time; what is in it changes in the order of the messages.
    writer: WriteSlot<Writer>,
    /// What is due from the server, and why no more comes.
    pub(super) replies: DueReplies<To, DeviceError>,
    errands: Mutex<Errands>,
    traffic: Traffic,
    pub(super) spin: AdaptiveSpin,
    /// What is known to be done, where the server speaks 7.0.
    pub(super) proofs: Arc<Proofs>,
    /// What is under way, where it has greeted.
    pub(super) session: Option<Session>,
}

/// What has gone over it.
#[derive(Debug, Default)]
struct Traffic {
    sent: AtomicU64,
    received: AtomicU64,
    waits: AtomicU64,
}

#[derive(Debug)]
pub(super) struct Writer {
    out: MessageWriter,
    /// In 7.0, what is known of each device.
    pub(super) lanes: Vec<Lane>,
    /// The graphs that a server which has greeted keeps.
    pub(super) kept: Kept,
}

/// Who gets a reply.
pub(super) enum To {
    /// Whoever waits for its bytes.
    Ticket(TicketSender),
    /// Called with its bytes, or why there will be none; returns what is wrong with them.
    Told(Told),
    /// Nobody: that it came is all.
    Nobody,
}

type Told = Box<dyn FnOnce(Result<Vec<u8>, DeviceError>) -> Result<(), String> + Send>;

impl fmt::Debug for To {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            To::Ticket(_) => "a ticket",
            To::Told(_) => "someone",
            To::Nobody => "nobody",
        })
    }
}

impl To {
    /// Hands a reply over. `Err` is what is wrong with it.
    pub(super) fn give(self, bytes: Result<Vec<u8>, DeviceError>) -> Result<(), String> {
        match self {
            To::Ticket(to) => to.send(bytes),
            To::Told(told) => return told(bytes),
            To::Nobody => {}
        }
        Ok(())
    }
}

/// What somebody wants to be sent, and need not wait for: done by whoever writes next, or is just writing.
#[derive(Default)]
struct Errands {
    freed: Vec<u64>,
    /// Devices and messages to be proved.
    wanted: Needs,
    said: Vec<Errand>,
}

type Errand = Box<dyn FnOnce(&mut Turn<'_>) -> Result<(), DeviceError> + Send>;

impl fmt::Debug for Errands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "freed {:?}, wanted {:?}, {} more", self.freed, self.wanted, self.said.len())
    }
}

impl Deref for Connection {
    type Target = Arc<Shared>;

    fn deref(&self) -> &Arc<Shared> {
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
        let kept = greeted.as_ref().map_or_else(Kept::default, Kept::new);
        let shared = Arc::new(Shared {
            endpoint: endpoint.to_owned(),
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            domain: Domain::unique(endpoint),
            aborter,
            dialect,
            patience,
            longest,
            taken: Mutex::new(Instant::now()),
            writer: WriteSlot::new(Writer { out, lanes: Vec::new(), kept }),
            replies: DueReplies::new(),
            errands: Mutex::default(),
            spin: AdaptiveSpin::new(SHORT),
            traffic: Traffic { sent: sent.into(), received: received.into(), waits: AtomicU64::default() },
            proofs: Arc::default(),
            session: greeted.map(Session::new),
        });
        reader::start(Arc::clone(&shared), receiver)?;
        let connection = Arc::new(Connection(shared));
        if connection.session.is_some() {
            super::greeted::enlist(&connection);
        }
        Ok(connection)
    }
}

impl Shared {
    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// A number that no other connection of this process has.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Devices of one connection reach each other's memory, those of two connections to one server do not.
    pub(super) fn domain(&self) -> Domain {
        self.domain.clone()
    }

    pub(super) fn link(&self) -> LinkStats {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Traffic { sent, received, waits } = &self.traffic;
        LinkStats { endpoint: self.endpoint.clone(), sent: count(sent), received: count(received), waits: count(waits) }
    }

    pub(super) fn count_wait(&self) {
        self.traffic.waits.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count(&self, bytes: usize) {
        self.traffic.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Writes messages while nobody else does.
    pub(super) fn turn<T>(&self, work: impl FnOnce(&mut Turn<'_>) -> Result<T, DeviceError>) -> Result<T, DeviceError> {
        let done = self.take_turn(work);
        // Also when nothing was said: on a connection that is lost they are dropped, with what they hold.
        self.run_errands();
        done
    }

    fn take_turn<T>(&self, work: impl FnOnce(&mut Turn<'_>) -> Result<T, DeviceError>) -> Result<T, DeviceError> {
        let done = self.writer.with(|writer| {
            self.unbroken()?;
            let mut turn = Turn { shared: self, writer };
            turn.run_errands()?;
            work(&mut turn)
        });
        done.unwrap_or_else(|Poisoned| Err(self.torn()))
    }

    /// Sends a request of 7.0 and waits for its reply of `len` bytes.
    pub(super) fn call(&self, request: &Request<'_>, len: u64) -> Result<Vec<u8>, DeviceError> {
        let (to, ticket) = Ticket::new();
        self.turn(|turn| turn.request(request, len, To::Ticket(to)))?;
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
        self.turn(|turn| turn.ask(command, len, To::Ticket(to), encode))?;
        self.count_wait();
        // The reader ends every wait.
        ticket.wait(None)
    }

    /// Has a buffer freed, after all that was sent so far. Waits for nobody.
    pub(super) fn free(&self, handle: u64) {
        lock(&self.errands).freed.push(handle);
        self.run_errands();
    }

    /// Has it proved that devices have come so far. Waits for nobody.
    pub(super) fn prove(&self, needs: &Needs) {
        lock(&self.errands).wanted.merge(needs);
        self.run_errands();
    }

    /// Has something said, in a turn of whoever writes. Waits for nobody.
    pub(super) fn later(&self, errand: impl FnOnce(&mut Turn<'_>) -> Result<(), DeviceError> + Send + 'static) {
        lock(&self.errands).said.push(Box::new(errand));
        self.run_errands();
    }

    /// Whoever is writing looks for errands when it is done: there is always someone to run them.
    fn run_errands(&self) {
        while !lock(&self.errands).is_empty() {
            let ran = self.writer.try_with(|writer| {
                let mut turn = Turn { shared: self, writer };
                // When this fails, it has failed everything that could be told of it.
                if self.unbroken().and_then(|()| turn.run_errands()).is_err() {
                    self.drop_errands();
                }
            });
            match ran {
                Some(Ok(())) => {}
                None => return,
                Some(Err(Poisoned)) => {
                    self.torn();
                    self.drop_errands();
                    return;
                }
            }
        }
    }

    fn drop_errands(&self) {
        let left = std::mem::take(&mut *lock(&self.errands));
        drop(left);
    }

    pub(super) fn unbroken(&self) -> Result<(), DeviceError> {
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
            let _ = reply.to.give(Err(failure.clone()));
        }
        self.proofs.fail(&failure);
        if let Some(session) = &self.session {
            session.fail(&failure);
        }
        failure
    }

    /// A writer that panicked may have left a part of a message.
    fn torn(&self) -> DeviceError {
        self.fail("a thread of this process ended in the middle of a message")
    }

    /// Why the connection ends, if the reader finds that out soon: the server may have said it.
    fn last_words(&self) -> Option<DeviceError> {
        self.replies.wait_failure(LAST_WORDS)
    }

    /// When the server last took more of a long message: whoever takes what is sent is there.
    pub(super) fn taken(&self) -> Instant {
        *lock(&self.taken)
    }

    /// What has been due for longest, and since when.
    pub(super) fn oldest_due(&self) -> Option<(&'static str, Instant)> {
        let reply = self.replies.next().map(|(command, _, since)| (command, since));
        let notice = self.session.as_ref().and_then(Session::oldest);
        reply.into_iter().chain(notice).min_by_key(|(_, since)| *since)
    }
}

impl Errands {
    fn is_empty(&self) -> bool {
        self.freed.is_empty() && self.wanted.is_empty() && self.said.is_empty()
    }
}

/// What these locks guard is whole between any two statements: a panic elsewhere cannot have left it torn.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

//! What is under way with a server that has greeted: its queues, and reads whose bytes have yet to come.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::super::connection::{ConnectionShared, lock};
use super::super::queue::ReadCompleter;
use super::mark_tracker::{FailureScope, MarkTracker};
use super::peer_copies::PeerCopyState;
use crate::device::{DeviceError, Timeline};
use crate::rpc::fault;
use crate::rpc::wire::ext::{Fault, GreetReply};

/// Queues that a server keeps for one connection.
const MAX_QUEUES: usize = 256;

/// The books of a connection to a server that has greeted.
#[derive(Debug)]
pub(in super::super) struct ClientSession {
    /// What the server has said of itself.
    pub(super) server: GreetReply,
    tables: Mutex<SessionTables>,
    pub(super) peers: PeerCopyState,
}

#[derive(Debug, Default)]
struct SessionTables {
    /// Those that notices may come about, by their numbers.
    queues: HashMap<u32, Arc<MarkTracker>>,
    /// The last queue's number.
    last_queue: u32,
    reads: HashMap<u64, OutstandingRead>,
    /// The last read's number.
    last_read: u64,
}

impl SessionTables {
    fn insert_read(&mut self, read: OutstandingRead) -> u64 {
        self.last_read += 1;
        self.reads.insert(self.last_read, read);
        self.last_read
    }

    /// Queues that the server was told of, or is about to be, and not of their end.
    fn open_queues(&self) -> usize {
        self.queues.values().filter(|track| !track.is_closed()).count()
    }
}

/// A read whose bytes have yet to come.
#[derive(Debug)]
struct OutstandingRead {
    queue: u32,
    /// The mark that they prove.
    proves: u64,
    since: Instant,
    /// Lengths of its spans, and who gets the bytes of each.
    parts: Vec<(u64, ReadCompleter)>,
    /// Tickets that the queue has received for: they are used when this is answered.
    tokens: usize,
}

impl ClientSession {
    pub(in super::super) fn new(server: GreetReply) -> ClientSession {
        ClientSession { server, tables: Mutex::default(), peers: PeerCopyState::default() }
    }

    /// What the server has said of itself.
    pub(in super::super) fn server(&self) -> &GreetReply {
        &self.server
    }

    /// A number and books for a queue of a device, in a turn: the ends that were said before count.
    pub(super) fn register_queue(
        &self,
        shared: &Arc<ConnectionShared>,
        device: &str,
    ) -> Result<(Arc<MarkTracker>, Arc<Timeline>), DeviceError> {
        let mut books = lock(&self.tables);
        if books.open_queues() >= MAX_QUEUES {
            let lacks = "has as many queues open as its server keeps for one connection: drop one";
            return Err(DeviceError::Lacks { device: device.to_owned(), lacks });
        }
        let used_up = || DeviceError::Exhausted {
            resource: "queue numbers",
            reason: format!("the connection to {device} has used up its own: connect again"),
        };
        let queue = books.last_queue.checked_add(1).ok_or_else(used_up)?;
        let (track, timeline) = MarkTracker::new(shared, queue, device);
        books.last_queue = queue;
        books.queues.insert(queue, Arc::clone(&track));
        drop(books);
        // After the insertion: whoever fails the connection either sees the track, or has failed it before this.
        shared.check_alive()?;
        Ok((track, timeline))
    }

    /// Whether a queue may be named in what is said in this turn.
    pub(super) fn is_open(&self, queue: u32) -> bool {
        lock(&self.tables).queues.get(&queue).is_some_and(|track| !track.is_closed())
    }

    /// No notice comes about a queue any more. Whoever waits for something of it waits in vain.
    pub(super) fn queue_closed(&self, queue: u32) {
        let track = lock(&self.tables).queues.remove(&queue);
        if let Some(track) = track {
            self.fail_queue(&track, &DeviceError::Ended, FailureScope::AllConnections);
        }
    }

    /// As [`Session::ended`], where nothing is left to wait for but marks up to `made` that the server was never told of.
    pub(super) fn queue_closed_idle(&self, track: &MarkTracker, made: u64) {
        lock(&self.tables).queues.remove(&track.queue);
        if !track.is_placed(made) {
            track.fail_marks(&DeviceError::Ended, FailureScope::AllConnections);
        }
    }

    /// A queue fails, and whoever waits for bytes of it is told.
    pub(super) fn fail_queue(&self, track: &MarkTracker, error: &DeviceError, whom: FailureScope) {
        // First: a read that is gone and has not failed has come.
        track.fail_marks(error, whom);
        let reads: Vec<_> =
            lock(&self.tables).reads.extract_if(|_, read| read.queue == track.queue).map(|(_, read)| read).collect();
        reads.into_iter().flat_map(|read| read.parts).for_each(|(_, to)| to.complete(Err(error.clone())));
        self.peers.tokens.wake_waiters();
    }

    /// Whether bytes of a queue have yet to come.
    pub(super) fn has_outstanding_reads(&self, queue: u32) -> bool {
        lock(&self.tables).reads.values().any(|read| read.queue == queue)
    }

    /// A number for a read that is about to leave.
    pub(super) fn register_read(&self, queue: u32, proves: u64, parts: Vec<(u64, ReadCompleter)>) -> u64 {
        lock(&self.tables).insert_read(OutstandingRead { queue, proves, since: Instant::now(), parts, tokens: 0 })
    }

    /// As [`Session::read`], of nothing: the answer tells that tickets are used. `None` where the queue may not be named.
    pub(super) fn register_empty_read(&self, queue: u32, tickets: usize) -> Option<u64> {
        let mut books = lock(&self.tables);
        let track = books.queues.get(&queue).filter(|track| !track.is_closed() && track.failure().is_none())?;
        let proves = track.place_read(false);
        Some(books.insert_read(OutstandingRead {
            queue,
            proves,
            since: Instant::now(),
            parts: Vec::new(),
            tokens: tickets,
        }))
    }

    /// Mark `seq` follows a read at once, whose bytes prove it too. Whether they have yet to come.
    pub(super) fn extend_read_proof(&self, id: u64, seq: u64) -> bool {
        let mut books = lock(&self.tables);
        let read = books.reads.get_mut(&id);
        let comes = read.is_some();
        if let Some(read) = read {
            read.proves = seq;
        }
        comes
    }

    /// The lengths of a read's spans; `None` for one that nobody waits for any more. `Err` for one that never was.
    pub(super) fn span_lengths(&self, id: u64) -> Result<Option<Vec<u64>>, String> {
        let books = lock(&self.tables);
        match books.reads.get(&id) {
            Some(read) => Ok(Some(read.parts.iter().map(|(len, _)| *len).collect())),
            None if (1..=books.last_read).contains(&id) => Ok(None),
            None => Err(format!("the server sent the bytes of READ {id}, which there never was")),
        }
    }

    /// The bytes of a read, span by span.
    pub(super) fn complete_read(&self, id: u64, bytes: Vec<Vec<u8>>) {
        let mut books = lock(&self.tables);
        let Some(read) = books.reads.remove(&id) else { return };
        drop(books);
        self.record_reached(read.queue, read.proves);
        self.peers.tokens.record_used(read.queue, read.tokens);
        read.parts.into_iter().zip(bytes).for_each(|((_, to), bytes)| to.complete(Ok(bytes)));
    }

    /// A queue of a notice; `None` for one that is closed. `Err` for one that never was.
    fn track(&self, queue: u32) -> Result<Option<Arc<MarkTracker>>, String> {
        let books = lock(&self.tables);
        match books.queues.get(&queue) {
            Some(track) => Ok(Some(Arc::clone(track))),
            None if (1..=books.last_queue).contains(&queue) => Ok(None),
            None => Err(format!("the server spoke of queue {queue}, which there never was")),
        }
    }

    /// REACHED.
    pub(super) fn handle_reached(&self, queue: u32, number: u64) -> Result<(), String> {
        if self.track(queue)?.is_some_and(|track| !track.is_placed(number)) {
            return Err(format!(
                "the server says that mark {number} of queue {queue} is reached, which was never made"
            ));
        }
        self.record_reached(queue, number);
        Ok(())
    }

    /// A mark is reached, and with it those of other queues that its own has waited for.
    pub(super) fn record_reached(&self, queue: u32, number: u64) {
        let (mut known, mut reached) = (vec![(queue, number)], Vec::new());
        while let Some((queue, number)) = known.pop() {
            if let Ok(Some(track)) = self.track(queue) {
                known.extend(track.record_reached(number).into_iter().flatten());
                reached.push((track, number));
            }
        }
        // What came first first: who hears of the one need not ask for the other.
        reached.iter().rev().for_each(|(track, number)| track.advance_timeline(*number));
    }

    /// FAILED.
    pub(super) fn handle_failed(&self, queue: u32, fault: Fault) -> Result<(), String> {
        if let Some(track) = self.track(queue)? {
            let error = fault::device_error(fault, track.device());
            self.fail_queue(&track, &error, FailureScope::OtherConnections);
        }
        Ok(())
    }

    /// What has been due for longest, besides replies, and since when.
    pub(in super::super) fn oldest_due(&self) -> Option<(&'static str, Instant)> {
        let books = lock(&self.tables);
        let read = books.reads.values().map(|read| ("READ", read.since)).min_by_key(|(_, since)| *since);
        let asked = books.queues.values().filter_map(|track| track.oldest_request()).min().map(|since| ("ASK", since));
        read.into_iter().chain(asked).min_by_key(|(_, since)| *since)
    }

    /// The connection is lost.
    pub(in super::super) fn fail_all(&self, failure: &DeviceError) {
        let queues = std::mem::take(&mut lock(&self.tables).queues);
        queues.into_values().for_each(|track| track.fail_marks(failure, FailureScope::AllConnections));
        let reads = std::mem::take(&mut lock(&self.tables).reads);
        reads.into_values().flat_map(|read| read.parts).for_each(|(_, to)| to.complete(Err(failure.clone())));
        self.peers.tokens.wake_waiters();
    }
}

impl ConnectionShared {
    pub(super) fn session(&self) -> Result<&ClientSession, DeviceError> {
        let none = || DeviceError::Bug("words for a server that has not greeted".to_owned());
        self.session.as_ref().ok_or_else(none)
    }
}

//! Session state of a connection with the extensions: its open queues and its outstanding reads. Routes notifications to them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::super::connection::ConnectionShared;
use super::super::remote_read::ReadCompleter;
use super::mark_tracker::{FailureScope, MarkTracker};
use super::peer_copies::PeerCopyState;
use crate::device::{DeviceError, Timeline};
use crate::poison::lock;
use crate::rpc::fault;
use crate::rpc::wire::ext::{DeviceFault, HelloExtReply};

/// Limit of open queues per connection on a server.
const MAX_QUEUES: usize = 256;

/// The session of a connection to a server with the extensions.
#[derive(Debug)]
pub(in super::super) struct ClientSession {
    /// The server's self-description from the handshake.
    pub(super) server: HelloExtReply,
    tables: Mutex<SessionTables>,
    pub(super) peers: PeerCopyState,
}

#[derive(Debug, Default)]
struct SessionTables {
    /// Queues that notifications may name, by number.
    queues: HashMap<u32, Arc<MarkTracker>>,
    /// Number of the last queue.
    last_queue: u32,
    reads: HashMap<u64, OutstandingRead>,
    /// Id of the last read.
    last_read: u64,
}

impl SessionTables {
    fn insert_read(&mut self, read: OutstandingRead) -> u64 {
        self.last_read += 1;
        self.reads.insert(self.last_read, read);
        self.last_read
    }

    /// Number of queues that are open on the server, or will be when the write buffer is sent.
    fn open_queues(&self) -> usize {
        self.queues.values().filter(|tracker| !tracker.is_closed()).count()
    }
}

/// A read that waits for its data.
#[derive(Debug)]
struct OutstandingRead {
    queue: u32,
    /// Mark that is reached when the data arrives.
    proven_mark: u64,
    since: Instant,
    /// Length of each span, with the completer of its pending read.
    parts: Vec<(u64, ReadCompleter)>,
}

impl ClientSession {
    pub(in super::super) fn new(server: HelloExtReply) -> ClientSession {
        ClientSession { server, tables: Mutex::default(), peers: PeerCopyState::default() }
    }

    /// The server's self-description from the handshake.
    pub(in super::super) fn server(&self) -> &HelloExtReply {
        &self.server
    }

    /// Assigns a number to a new queue and registers its mark tracker. Called with exclusive use of the writer, so that queues
    /// that were closed by earlier messages do not count.
    pub(super) fn register_queue(
        &self,
        shared: &Arc<ConnectionShared>,
        device: &str,
    ) -> Result<(Arc<MarkTracker>, Arc<Timeline>), DeviceError> {
        let mut tables = lock(&self.tables);
        if tables.open_queues() >= MAX_QUEUES {
            let limitation = "has reached its server's limit of open queues per connection: drop a queue";
            return Err(DeviceError::CapabilityMissing { device: device.to_owned(), limitation });
        }
        let exhausted = || DeviceError::Exhausted {
            resource: "queue numbers",
            reason: format!("the connection to {device} has used all of them: connect again"),
        };
        let queue = tables.last_queue.checked_add(1).ok_or_else(exhausted)?;
        let (tracker, timeline) = MarkTracker::new(shared, queue, device);
        tables.last_queue = queue;
        tables.queues.insert(queue, Arc::clone(&tracker));
        drop(tables);
        // The queue must be registered before this check: a thread that fails the connection then either finds the queue, or
        // has failed the connection before the check.
        shared.check_alive()?;
        Ok((tracker, timeline))
    }

    /// Whether messages may name a queue. With exclusive use of the writer the result holds until the writer is returned.
    pub(super) fn is_open(&self, queue: u32) -> bool {
        lock(&self.tables).queues.get(&queue).is_some_and(|tracker| !tracker.is_closed())
    }

    /// Removes a queue after the server has confirmed its end: no notification names it any more. Everything that still waits
    /// for it fails.
    pub(super) fn queue_closed(&self, queue: u32) {
        let tracker = lock(&self.tables).queues.remove(&queue);
        if let Some(tracker) = tracker {
            self.fail_queue(&tracker, &DeviceError::Ended, FailureScope::AllConnections);
        }
    }

    /// As [`ClientSession::queue_closed`], for a queue without outstanding marks or reads. Only marks up to `last_made` that
    /// were never sent may be left.
    pub(super) fn queue_closed_idle(&self, tracker: &MarkTracker, last_made: u64) {
        lock(&self.tables).queues.remove(&tracker.queue);
        if !tracker.is_placed(last_made) {
            tracker.fail_marks(&DeviceError::Ended, FailureScope::AllConnections);
        }
    }

    /// Fails a queue and its outstanding reads.
    pub(super) fn fail_queue(&self, tracker: &MarkTracker, error: &DeviceError, scope: FailureScope) {
        // The order matters: a read that is no longer registered and has not failed must have its data.
        tracker.fail_marks(error, scope);
        let reads: Vec<_> =
            lock(&self.tables).reads.extract_if(|_, read| read.queue == tracker.queue).map(|(_, read)| read).collect();
        reads.into_iter().flat_map(|read| read.parts).for_each(|(_, to)| to.complete(Err(error.clone())));
    }

    /// Whether a queue has outstanding reads.
    pub(super) fn has_outstanding_reads(&self, queue: u32) -> bool {
        lock(&self.tables).reads.values().any(|read| read.queue == queue)
    }

    /// Assigns an id to a read that is about to be sent.
    pub(super) fn register_read(&self, queue: u32, proven_mark: u64, parts: Vec<(u64, ReadCompleter)>) -> u64 {
        lock(&self.tables).insert_read(OutstandingRead { queue, proven_mark, since: Instant::now(), parts })
    }

    /// Mark `seq` directly follows read `id`, whose data then proves the mark, too. Returns whether the read is still
    /// outstanding.
    pub(super) fn extend_read_proof(&self, id: u64, seq: u64) -> bool {
        let mut tables = lock(&self.tables);
        let read = tables.reads.get_mut(&id);
        let outstanding = read.is_some();
        if let Some(read) = read {
            read.proven_mark = seq;
        }
        outstanding
    }

    /// The lengths of a read's spans. `None` if the read's queue has failed or was closed; `Err` if the id was never used.
    pub(super) fn span_lengths(&self, id: u64) -> Result<Option<Vec<u64>>, String> {
        let tables = lock(&self.tables);
        match tables.reads.get(&id) {
            Some(read) => Ok(Some(read.parts.iter().map(|(len, _)| *len).collect())),
            None if (1..=tables.last_read).contains(&id) => Ok(None),
            None => Err(format!("the server sent data for READ {id}, which was never sent")),
        }
    }

    /// Completes a read with its data, span by span.
    pub(super) fn complete_read(&self, id: u64, bytes: Vec<Vec<u8>>) {
        let mut tables = lock(&self.tables);
        let Some(read) = tables.reads.remove(&id) else { return };
        drop(tables);
        self.record_reached(read.queue, read.proven_mark);
        read.parts.into_iter().zip(bytes).for_each(|((_, to), bytes)| to.complete(Ok(bytes)));
    }

    /// The queue that a notification names. `None` if it was closed; `Err` if the number was never used.
    fn find_queue(&self, queue: u32) -> Result<Option<Arc<MarkTracker>>, String> {
        let tables = lock(&self.tables);
        match tables.queues.get(&queue) {
            Some(tracker) => Ok(Some(Arc::clone(tracker))),
            None if (1..=tables.last_queue).contains(&queue) => Ok(None),
            None => Err(format!("the server named queue {queue}, which was never opened")),
        }
    }

    /// Handles MARK_REACHED.
    pub(super) fn handle_reached(&self, queue: u32, number: u64) -> Result<(), String> {
        if self.find_queue(queue)?.is_some_and(|tracker| !tracker.is_placed(number)) {
            return Err(format!(
                "the server reports that mark {number} of queue {queue} is reached, but this mark was never made"
            ));
        }
        self.record_reached(queue, number);
        Ok(())
    }

    /// Records that a mark is reached, and transitively the marks of other queues for which its queue has waited.
    pub(super) fn record_reached(&self, queue: u32, number: u64) {
        let (mut unprocessed, mut reached) = (vec![(queue, number)], Vec::new());
        while let Some((queue, number)) = unprocessed.pop() {
            if let Ok(Some(tracker)) = self.find_queue(queue) {
                unprocessed.extend(tracker.record_reached(number).into_iter().flatten());
                reached.push((tracker, number));
            }
        }
        // Implied marks first: a thread that wakes for the later mark then finds the earlier ones reached and requests nothing.
        reached.iter().rev().for_each(|(tracker, number)| tracker.advance_timeline(*number));
    }

    /// Handles QUEUE_FAILED.
    pub(super) fn handle_failed(&self, queue: u32, fault: DeviceFault) -> Result<(), String> {
        if let Some(tracker) = self.find_queue(queue)? {
            let error = fault::device_error(fault, tracker.device());
            self.fail_queue(&tracker, &error, FailureScope::OtherConnections);
        }
        Ok(())
    }

    /// The oldest outstanding read or mark request, and its time.
    pub(in super::super) fn oldest_due(&self) -> Option<(&'static str, Instant)> {
        let tables = lock(&self.tables);
        let read = tables.reads.values().map(|read| ("READ", read.since)).min_by_key(|(_, since)| *since);
        let requested = tables
            .queues
            .values()
            .filter_map(|tracker| tracker.oldest_request())
            .min()
            .map(|since| ("NOTIFY_REACHED", since));
        read.into_iter().chain(requested).min_by_key(|(_, since)| *since)
    }

    /// Fails all queues and reads: the connection is lost.
    pub(in super::super) fn fail_all(&self, failure: &DeviceError) {
        let queues = std::mem::take(&mut lock(&self.tables).queues);
        queues.into_values().for_each(|tracker| tracker.fail_marks(failure, FailureScope::AllConnections));
        let reads = std::mem::take(&mut lock(&self.tables).reads);
        reads.into_values().flat_map(|read| read.parts).for_each(|(_, to)| to.complete(Err(failure.clone())));
    }
}

impl ConnectionShared {
    pub(super) fn session(&self) -> Result<&ClientSession, DeviceError> {
        let none = || DeviceError::Bug("a message of the extensions for a server without them".to_owned());
        self.session.as_ref().ok_or_else(none)
    }
}

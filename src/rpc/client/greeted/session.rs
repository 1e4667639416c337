//! What is under way with a server that has greeted: its queues, and reads whose bytes have yet to come.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::super::connection::{Shared, lock};
use super::super::queue::Awaited;
use super::peers::Peers;
use super::track::{Track, Whom};
use crate::device::{DeviceError, Timeline};
use crate::rpc::fault;
use crate::rpc::wire::ext::{Fault, GreetReply};

/// Queues that a server keeps for one connection.
const QUEUES: usize = 256;

/// The books of a connection to a server that has greeted.
#[derive(Debug)]
pub(in super::super) struct Session {
    /// What the server has said of itself.
    pub(super) server: GreetReply,
    books: Mutex<Books>,
    pub(super) peers: Peers,
}

#[derive(Debug, Default)]
struct Books {
    /// Those that notices may come about, by their numbers.
    queues: HashMap<u32, Arc<Track>>,
    /// The last queue's number.
    opened: u32,
    reads: HashMap<u64, Read>,
    /// The last read's number.
    read: u64,
}

impl Books {
    fn read(&mut self, read: Read) -> u64 {
        self.read += 1;
        self.reads.insert(self.read, read);
        self.read
    }

    /// Queues that the server was told of, or is about to be, and not of their end.
    fn open(&self) -> usize {
        self.queues.values().filter(|track| !track.is_closed()).count()
    }
}

/// A read whose bytes have yet to come.
#[derive(Debug)]
struct Read {
    queue: u32,
    /// The mark that they prove.
    proves: u64,
    since: Instant,
    /// Lengths of its spans, and who gets the bytes of each.
    parts: Vec<(u64, Awaited)>,
    /// Tickets that the queue has received for: they are used when this is answered.
    tickets: usize,
}

impl Session {
    pub(in super::super) fn new(server: GreetReply) -> Session {
        Session { server, books: Mutex::default(), peers: Peers::default() }
    }

    /// What the server has said of itself.
    pub(in super::super) fn server(&self) -> &GreetReply {
        &self.server
    }

    /// A number and books for a queue of a device, in a turn: the ends that were said before count.
    pub(super) fn open(&self, shared: &Arc<Shared>, device: &str) -> Result<(Arc<Track>, Arc<Timeline>), DeviceError> {
        let mut books = lock(&self.books);
        if books.open() >= QUEUES {
            let lacks = "has as many queues open as its server keeps for one connection: drop one";
            return Err(DeviceError::Lacks { device: device.to_owned(), lacks });
        }
        let used_up = || DeviceError::Exhausted {
            resource: "queue numbers",
            reason: format!("the connection to {device} has used up its own: connect again"),
        };
        let queue = books.opened.checked_add(1).ok_or_else(used_up)?;
        let (track, timeline) = Track::new(shared, queue, device);
        books.opened = queue;
        books.queues.insert(queue, Arc::clone(&track));
        drop(books);
        // After the insertion: whoever fails the connection either sees the track, or has failed it before this.
        shared.unbroken()?;
        Ok((track, timeline))
    }

    /// Whether a queue may be named in what is said in this turn.
    pub(super) fn is_open(&self, queue: u32) -> bool {
        lock(&self.books).queues.get(&queue).is_some_and(|track| !track.is_closed())
    }

    /// No notice comes about a queue any more. Whoever waits for something of it waits in vain.
    pub(super) fn ended(&self, queue: u32) {
        let track = lock(&self.books).queues.remove(&queue);
        if let Some(track) = track {
            self.end(&track, &DeviceError::Ended, Whom::All);
        }
    }

    /// As [`Session::ended`], where nothing is left to wait for but marks up to `made` that the server was never told of.
    pub(super) fn ended_at(&self, track: &Track, made: u64) {
        lock(&self.books).queues.remove(&track.queue);
        if !track.has_placed(made) {
            track.fail(&DeviceError::Ended, Whom::All);
        }
    }

    /// A queue fails, and whoever waits for bytes of it is told.
    pub(super) fn end(&self, track: &Track, error: &DeviceError, whom: Whom) {
        // First: a read that is gone and has not failed has come.
        track.fail(error, whom);
        let reads: Vec<_> =
            lock(&self.books).reads.extract_if(|_, read| read.queue == track.queue).map(|(_, read)| read).collect();
        reads.into_iter().flat_map(|read| read.parts).for_each(|(_, to)| to.send(Err(error.clone())));
        self.peers.tickets.wake();
    }

    /// Whether bytes of a queue have yet to come.
    pub(super) fn reads(&self, queue: u32) -> bool {
        lock(&self.books).reads.values().any(|read| read.queue == queue)
    }

    /// A number for a read that is about to leave.
    pub(super) fn read(&self, queue: u32, proves: u64, parts: Vec<(u64, Awaited)>) -> u64 {
        lock(&self.books).read(Read { queue, proves, since: Instant::now(), parts, tickets: 0 })
    }

    /// As [`Session::read`], of nothing: the answer tells that tickets are used. `None` where the queue may not be named.
    pub(super) fn read_nothing(&self, queue: u32, tickets: usize) -> Option<u64> {
        let mut books = lock(&self.books);
        let track = books.queues.get(&queue).filter(|track| !track.is_closed() && track.failure().is_none())?;
        let proves = track.read(false);
        Some(books.read(Read { queue, proves, since: Instant::now(), parts: Vec::new(), tickets }))
    }

    /// Mark `seq` follows a read at once, whose bytes prove it too. Whether they have yet to come.
    pub(super) fn proves(&self, id: u64, seq: u64) -> bool {
        let mut books = lock(&self.books);
        let read = books.reads.get_mut(&id);
        let comes = read.is_some();
        if let Some(read) = read {
            read.proves = seq;
        }
        comes
    }

    /// The lengths of a read's spans; `None` for one that nobody waits for any more. `Err` for one that never was.
    pub(super) fn lengths(&self, id: u64) -> Result<Option<Vec<u64>>, String> {
        let books = lock(&self.books);
        match books.reads.get(&id) {
            Some(read) => Ok(Some(read.parts.iter().map(|(len, _)| *len).collect())),
            None if (1..=books.read).contains(&id) => Ok(None),
            None => Err(format!("the server sent the bytes of READ {id}, which there never was")),
        }
    }

    /// The bytes of a read, span by span.
    pub(super) fn data(&self, id: u64, bytes: Vec<Vec<u8>>) {
        let mut books = lock(&self.books);
        let Some(read) = books.reads.remove(&id) else { return };
        drop(books);
        self.proved(read.queue, read.proves);
        self.peers.tickets.used(read.queue, read.tickets);
        read.parts.into_iter().zip(bytes).for_each(|((_, to), bytes)| to.send(Ok(bytes)));
    }

    /// A queue of a notice; `None` for one that is closed. `Err` for one that never was.
    fn track(&self, queue: u32) -> Result<Option<Arc<Track>>, String> {
        let books = lock(&self.books);
        match books.queues.get(&queue) {
            Some(track) => Ok(Some(Arc::clone(track))),
            None if (1..=books.opened).contains(&queue) => Ok(None),
            None => Err(format!("the server spoke of queue {queue}, which there never was")),
        }
    }

    /// REACHED.
    pub(super) fn reached(&self, queue: u32, number: u64) -> Result<(), String> {
        if self.track(queue)?.is_some_and(|track| !track.has_placed(number)) {
            return Err(format!(
                "the server says that mark {number} of queue {queue} is reached, which was never made"
            ));
        }
        self.proved(queue, number);
        Ok(())
    }

    /// A mark is reached, and with it those of other queues that its own has waited for.
    pub(super) fn proved(&self, queue: u32, number: u64) {
        let (mut known, mut reached) = (vec![(queue, number)], Vec::new());
        while let Some((queue, number)) = known.pop() {
            if let Ok(Some(track)) = self.track(queue) {
                known.extend(track.reached(number).into_iter().flatten());
                reached.push((track, number));
            }
        }
        // What came first first: who hears of the one need not ask for the other.
        reached.iter().rev().for_each(|(track, number)| track.tell(*number));
    }

    /// FAILED.
    pub(super) fn failed(&self, queue: u32, fault: Fault) -> Result<(), String> {
        if let Some(track) = self.track(queue)? {
            let error = fault::error(fault, track.device());
            self.end(&track, &error, Whom::Elsewhere);
        }
        Ok(())
    }

    /// What has been due for longest, besides replies, and since when.
    pub(in super::super) fn oldest(&self) -> Option<(&'static str, Instant)> {
        let books = lock(&self.books);
        let read = books.reads.values().map(|read| ("READ", read.since)).min_by_key(|(_, since)| *since);
        let asked = books.queues.values().filter_map(|track| track.oldest()).min().map(|since| ("ASK", since));
        read.into_iter().chain(asked).min_by_key(|(_, since)| *since)
    }

    /// The connection is lost.
    pub(in super::super) fn fail(&self, failure: &DeviceError) {
        let queues = std::mem::take(&mut lock(&self.books).queues);
        queues.into_values().for_each(|track| track.fail(failure, Whom::All));
        let reads = std::mem::take(&mut lock(&self.books).reads);
        reads.into_values().flat_map(|read| read.parts).for_each(|(_, to)| to.send(Err(failure.clone())));
        self.peers.tickets.wake();
    }
}

impl Shared {
    pub(super) fn session(&self) -> Result<&Session, DeviceError> {
        let none = || DeviceError::Bug("words for a server that has not greeted".to_owned());
        self.session.as_ref().ok_or_else(none)
    }
}

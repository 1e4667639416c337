//! In-memory transport for tests: a seed determines all splits, delays and stalls. Bytes stay in order.
//!
//! Each direction splits reads and writes at random positions, delays the visibility of bytes by some attempts, keeps bytes
//! back until they are flushed, finds no room for some attempts to flush or to finish, and can be cut after a number of bytes.
//! Delays are counted in attempts: nothing sleeps.

use crate::poison::{Unpoisoned, lock};
use std::collections::{HashMap, VecDeque};
use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use super::{Address, Connection, Deadline, DialError, Interest, Listen, PeerAddr, Transport, TransportError};

/// Fault injection of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkConditions {
    /// Seed of the splits, delays and stalls.
    pub(crate) seed: u64,
    /// Both directions are cut after this many bytes of one direction.
    pub(crate) cut_after: Option<u64>,
}

/// Largest delay of bytes, in attempts to read.
const MAX_DELAY: u32 = 3;

/// Range of the buffer size of a direction, in bytes.
const CAPACITY: std::ops::Range<usize> = 1 << 10..64 << 10;

/// Source of connection numbers.
static NEXT_CONNECTION: AtomicU64 = AtomicU64::new(0);

/// Source of listener numbers. The address `memory:NUMBER` has the number in place of a port, for which `--peer` accepts 1 to
/// 65535.
static NEXT_LISTENER: AtomicU64 = AtomicU64::new(1);

/// The two ends of a connection.
pub(crate) fn pair(conditions: LinkConditions) -> (Connection, Connection) {
    pair_from(conditions, None)
}

/// The two ends of a connection. The second one sees `client` as the address of its peer, if there is one.
fn pair_from(conditions: LinkConditions, client: Option<SocketAddr>) -> (Connection, Connection) {
    let pipes = [0, 1].map(|n| Arc::new(Pipe::new(conditions, n)));
    let number = NEXT_CONNECTION.fetch_add(1, Ordering::Relaxed);
    let end = |from: usize| {
        let (incoming, outgoing) = (Arc::clone(&pipes[from]), Arc::clone(&pipes[1 - from]));
        let peer = client.filter(|_| from == 1).map_or(PeerAddr::Local(number), PeerAddr::Ip);
        Connection::new(MemoryTransport { peer, incoming, outgoing })
    };
    (end(0), end(1))
}

/// One end of a connection.
#[derive(Debug)]
struct MemoryTransport {
    peer: PeerAddr,
    incoming: Arc<Pipe>,
    outgoing: Arc<Pipe>,
}

/// One direction of a connection.
#[derive(Debug)]
struct Pipe {
    state: Mutex<PipeState>,
    changed: Condvar,
    /// Result of [`Transport::readable`], which takes no lock.
    readable: AtomicBool,
}

#[derive(Debug)]
struct PipeState {
    rng: fastrand::Rng,
    capacity: usize,
    /// Bytes that a read returns.
    visible: VecDeque<u8>,
    /// Bytes that become visible after a number of attempts to read.
    delayed: (VecDeque<u8>, u32),
    /// Bytes that the next flush makes delayed bytes.
    unflushed: VecDeque<u8>,
    /// Whether the last attempt to flush or to finish found no room.
    stalled: bool,
    /// Remaining bytes until the cut.
    until_cut: Option<u64>,
    finished: bool,
    aborted: bool,
}

impl PipeState {
    fn has_ended(&self) -> bool {
        (self.finished || self.aborted) && self.visible.is_empty() && self.delayed.0.is_empty()
    }

    fn has_room(&self) -> bool {
        self.visible.len() + self.delayed.0.len() + self.unflushed.len() < self.capacity
    }

    /// Whether an attempt to read makes progress, if only by ageing delayed bytes.
    fn is_readable(&self) -> bool {
        !self.visible.is_empty() || !self.delayed.0.is_empty() || self.has_ended()
    }

    fn is_writable(&self) -> bool {
        self.has_room() || self.stalled || self.aborted
    }

    fn flush(&mut self) {
        if !self.unflushed.is_empty() {
            self.delayed.1 = self.rng.u32(..=MAX_DELAY);
            self.delayed.0.append(&mut self.unflushed);
        }
    }

    /// Makes a random quarter of the attempts to flush or to finish find no room, but never two in a row. Returns whether this
    /// attempt is one of them.
    fn inject_stall(&mut self) -> bool {
        self.stalled = !self.stalled && self.rng.u8(..4) == 0;
        self.stalled
    }

    /// Ages the delayed bytes by one attempt to read.
    fn age(&mut self) {
        match self.delayed.1.checked_sub(1) {
            Some(left) => self.delayed.1 = left,
            None => self.visible.append(&mut self.delayed.0),
        }
    }
}

impl Pipe {
    fn new(conditions: LinkConditions, direction: u64) -> Pipe {
        let mut rng = fastrand::Rng::with_seed(2 * conditions.seed + direction);
        let state = PipeState {
            capacity: rng.usize(CAPACITY),
            rng,
            visible: VecDeque::new(),
            delayed: (VecDeque::new(), 0),
            unflushed: VecDeque::new(),
            stalled: false,
            until_cut: conditions.cut_after,
            finished: false,
            aborted: false,
        };
        Pipe { state: Mutex::new(state), changed: Condvar::new(), readable: AtomicBool::new(false) }
    }

    /// Changes the state and notifies the threads that poll or wait.
    fn change<T>(&self, work: impl FnOnce(&mut PipeState) -> T) -> T {
        let mut state = lock(&self.state);
        let done = work(&mut state);
        self.readable.store(!state.visible.is_empty() || state.has_ended(), Ordering::Release);
        drop(state);
        self.changed.notify_all();
        done
    }

    fn wait(&self, deadline: &Deadline, ready: impl Fn(&PipeState) -> bool) -> bool {
        let mut state = lock(&self.state);
        while !ready(&state) {
            let Some(left) = deadline.remaining() else { return false };
            state = self.changed.wait_timeout(state, left).unpoisoned().0;
        }
        true
    }
}

impl Transport for MemoryTransport {
    fn try_read(&self, dst: &mut [u8]) -> Result<Option<usize>, TransportError> {
        self.incoming.change(|state| {
            if state.visible.is_empty() {
                state.age();
            }
            if state.visible.is_empty() {
                return Ok(state.has_ended().then_some(0));
            }
            let most = dst.len().min(state.visible.len());
            let n = if state.rng.bool() { most } else { state.rng.usize(1..=most) };
            state.visible.drain(..n).zip(dst).for_each(|(byte, dst)| *dst = byte);
            Ok(Some(n))
        })
    }

    fn try_write(&self, src: &[IoSlice<'_>]) -> Result<Option<usize>, TransportError> {
        let (done, cut) = self.outgoing.change(|state| {
            if state.finished || state.aborted {
                return (Err(TransportError::cut()), false);
            }
            if !state.has_room() {
                state.flush();
                return (Ok(None), false);
            }
            let len = src.iter().map(|part| part.len()).sum::<usize>();
            let most = len.min(state.capacity);
            let mut n = if state.rng.bool() { most } else { state.rng.usize(1..=most) };
            let cut = state.until_cut.is_some_and(|left| left <= n as u64);
            if let Some(left) = &mut state.until_cut {
                n = n.min(*left as usize);
                *left -= n as u64;
            }
            state.unflushed.extend(src.iter().flat_map(|part| part.iter()).take(n));
            if state.rng.bool() || cut {
                state.flush();
            }
            (Ok(Some(n)), cut)
        });
        if cut {
            self.abort();
            return Err(TransportError::cut());
        }
        done
    }

    fn try_flush(&self) -> Result<bool, TransportError> {
        self.outgoing.change(|state| {
            if state.aborted && !state.unflushed.is_empty() {
                return Err(TransportError::cut());
            }
            // After the abort, too, a flush succeeds if the other end has had all bytes: it may have replied and closed.
            if !state.aborted && state.inject_stall() {
                return Ok(false);
            }
            state.flush();
            Ok(true)
        })
    }

    fn wait(&self, interest: Interest, deadline: &Deadline) -> Result<bool, TransportError> {
        Ok(match interest {
            Interest::Read => self.incoming.wait(deadline, PipeState::is_readable),
            Interest::Write => self.outgoing.wait(deadline, PipeState::is_writable),
            // The two directions have a condition variable each, so this polls both.
            Interest::ReadOrWrite => loop {
                if lock(&self.incoming.state).is_readable() || lock(&self.outgoing.state).is_writable() {
                    break true;
                }
                if deadline.remaining().is_none() {
                    break false;
                }
                std::thread::yield_now();
            },
        })
    }

    fn readable(&self) -> bool {
        self.incoming.readable.load(Ordering::Acquire)
    }

    fn hung_up(&self) -> bool {
        let incoming = lock(&self.incoming.state);
        incoming.finished || incoming.aborted
    }

    fn set_loss_timeout(&self, _: Duration) {}

    fn try_finish(&self) -> Result<bool, TransportError> {
        self.outgoing.change(|state| {
            if !state.finished && state.inject_stall() {
                return Ok(false);
            }
            state.flush();
            state.finished = true;
            Ok(true)
        })
    }

    fn abort(&self) {
        for pipe in [&self.incoming, &self.outgoing] {
            pipe.change(|state| state.aborted = true);
        }
    }

    fn peer(&self) -> PeerAddr {
        self.peer
    }

    fn local_addr(&self) -> Option<SocketAddr> {
        None
    }
}

impl Drop for MemoryTransport {
    fn drop(&mut self) {
        self.abort();
    }
}

/// Message to a listener: a connection, or `None` to wake it.
type Incoming = Option<Connection>;

/// The listeners of this process by their numbers, with the fault injection of their connections and the address of their
/// clients.
type Listeners = HashMap<u64, (mpsc::Sender<Incoming>, LinkConditions, Option<SocketAddr>)>;
static LISTENERS: Mutex<Option<Listeners>> = Mutex::new(None);

/// A listener that clients in this process reach as `memory:NUMBER`.
#[derive(Debug)]
pub(crate) struct MemoryListener {
    number: u64,
    to: mpsc::Sender<Incoming>,
    incoming: mpsc::Receiver<Incoming>,
}

/// Listens within this process. The seed of the first connection is that of `conditions`; each further connection has the next
/// seed.
pub(crate) fn listen(conditions: LinkConditions) -> MemoryListener {
    listen_for(conditions, None)
}

/// As [`listen`]. The listener sees `client` as the address of its clients, if there is one.
pub(crate) fn listen_for(conditions: LinkConditions, client: Option<SocketAddr>) -> MemoryListener {
    let number = NEXT_LISTENER.fetch_add(1, Ordering::Relaxed);
    let (to, incoming) = mpsc::channel();
    let mut listeners = LISTENERS.lock().unpoisoned();
    listeners.get_or_insert_default().insert(number, (to.clone(), conditions, client));
    MemoryListener { number, to, incoming }
}

/// Connects to a listener by its number.
pub(super) fn connect(number: u64) -> Result<Connection, DialError> {
    let mut listeners = LISTENERS.lock().unpoisoned();
    let (to, conditions, client) =
        listeners.as_mut().and_then(|all| all.get_mut(&number)).ok_or(DialError::NoAddress)?;
    let (ours, theirs) = pair_from(*conditions, *client);
    conditions.seed += 1;
    to.send(Some(theirs)).map_err(|_| DialError::OwnSocket)?;
    Ok(ours)
}

impl Listen for MemoryListener {
    fn accept(&self, deadline: &Deadline) -> Result<Option<Connection>, TransportError> {
        match self.incoming.recv_timeout(deadline.remaining().unwrap_or_default()) {
            Ok(incoming) => Ok(incoming),
            // Disconnected cannot happen: the listener itself holds a sender.
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(None),
        }
    }

    fn local_addr(&self) -> Address {
        Address::Memory(self.number)
    }

    fn waker(&self) -> Box<dyn Fn() + Send + Sync> {
        let to = self.to.clone();
        // Fails if the listener was dropped.
        Box::new(move || _ = to.send(None))
    }
}

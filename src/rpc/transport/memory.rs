//! In-memory transport for tests: a seed determines all splits, delays and stalls. Bytes stay in order.
//!
//! Each direction splits reads and writes at random positions, delays the visibility of bytes by some attempts, keeps bytes
//! back until they are flushed, finds no room for some attempts to flush or to finish, and can be cut after a number of bytes.
//! Delays are counted in attempts: nothing sleeps. [`Link::inject`] adds a [`Fault`] to a connection in use,
//! and [`inject_next`] to one that is about to be dialled.

mod listener;

pub(super) use listener::connect;
pub(crate) use listener::{Dialler, Link, inject_next, latest_link, listen, listen_at, listen_for, reserve_number};

use crate::poison::{Unpoisoned, lock};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::{Connection, Deadline, Interest, PeerAddr, Transport, TransportError};

/// Fault injection of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkConditions {
    /// Seed of the splits, delays and stalls.
    pub(crate) seed: u64,
    /// Both directions are cut after this many bytes of one direction.
    pub(crate) cut_after: Option<u64>,
}

/// What happens to a connection after some bytes of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Both directions end, after the bytes that were accepted.
    Cut,
    /// As [`Fault::Cut`], but bytes of the direction that were accepted and not received are lost.
    Reset,
    /// The direction ends after its bytes; the other one stays open.
    HalfClose,
    /// The direction delivers no byte for a time, `None`: until the connection ends. It accepts bytes until its buffer is full.
    Stall(Option<Duration>),
}

/// A fault, and where it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Injection {
    pub(crate) fault: Fault,
    /// The direction from client to server, or the other one.
    pub(crate) to_server: bool,
    /// Bytes of that direction that are still accepted before the fault. 0: it happens at once.
    pub(crate) after: u64,
}

/// Largest delay of bytes, in attempts to read.
const MAX_DELAY: u32 = 3;

/// Range of the buffer size of a direction, in bytes.
const CAPACITY: std::ops::Range<usize> = 1 << 10..64 << 10;

/// Source of connection numbers.
static NEXT_CONNECTION: AtomicU64 = AtomicU64::new(0);

/// The two ends of a connection.
pub(crate) fn pair(conditions: LinkConditions) -> (Connection, Connection) {
    pair_from(conditions, None)
}

/// The two ends of a connection. The second one sees `client` as the address of its peer, if there is one.
fn pair_from(conditions: LinkConditions, client: Option<SocketAddr>) -> (Connection, Connection) {
    ends(&pipes(conditions), client)
}

/// The directions to the first end and to the second end of a connection.
fn pipes(conditions: LinkConditions) -> [Arc<Pipe>; 2] {
    [0, 1].map(|n| Arc::new(Pipe::new(conditions, n)))
}

fn ends(pipes: &[Arc<Pipe>; 2], client: Option<SocketAddr>) -> (Connection, Connection) {
    let number = NEXT_CONNECTION.fetch_add(1, Ordering::Relaxed);
    let end = |from: usize| {
        let (incoming, outgoing) = (Arc::clone(&pipes[from]), Arc::clone(&pipes[1 - from]));
        let peer = client.filter(|_| from == 1).map_or(PeerAddr::Local(number), PeerAddr::Ip);
        Connection::new(MemoryTransport { peer, incoming, outgoing })
    };
    (end(0), end(1))
}

/// Injects a fault into a connection with these directions.
fn break_pipe(pipes: &[Arc<Pipe>; 2], Injection { fault, to_server, after }: Injection) {
    let cut = pipes[usize::from(to_server)].change(|state| {
        if after > 0 {
            state.fault = Some((after, fault));
        }
        after == 0 && state.break_down(fault)
    });
    if cut {
        pipes.iter().for_each(|pipe| pipe.change(|state| state.aborted = true));
    }
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
    /// The next fault, and the remaining bytes until it happens.
    fault: Option<(u64, Fault)>,
    /// The end of an injected stall, during which nothing is delivered; `Some(None)`: that of the connection.
    delivers_nothing_until: Option<Option<Instant>>,
    finished: bool,
    aborted: bool,
}

impl PipeState {
    fn has_ended(&self) -> bool {
        (self.finished || self.aborted) && self.visible.is_empty() && self.delayed.0.is_empty()
    }

    /// Whether an injected stall lasts. An abort ends it.
    fn delivers_nothing(&self) -> bool {
        !self.aborted && self.delivers_nothing_until.is_some_and(|until| until.is_none_or(|at| Instant::now() < at))
    }

    /// Makes the fault happen. Returns whether both directions have to end.
    fn break_down(&mut self, fault: Fault) -> bool {
        self.flush();
        match fault {
            Fault::Cut => return true,
            Fault::Reset => {
                self.visible.clear();
                self.delayed.0.clear();
                return true;
            }
            Fault::HalfClose => self.finished = true,
            Fault::Stall(time) => self.delivers_nothing_until = Some(time.map(|time| Instant::now() + time)),
        }
        false
    }

    fn has_room(&self) -> bool {
        self.visible.len() + self.delayed.0.len() + self.unflushed.len() < self.capacity
    }

    /// Whether an attempt to read makes progress, if only by ageing delayed bytes.
    fn is_readable(&self) -> bool {
        !self.delivers_nothing() && (!self.visible.is_empty() || !self.delayed.0.is_empty() || self.has_ended())
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
            fault: conditions.cut_after.map(|bytes| (bytes, Fault::Cut)),
            delivers_nothing_until: None,
            finished: false,
            aborted: false,
        };
        Pipe { state: Mutex::new(state), changed: Condvar::new(), readable: AtomicBool::new(false) }
    }

    /// Changes the state and notifies the threads that poll or wait.
    fn change<T>(&self, work: impl FnOnce(&mut PipeState) -> T) -> T {
        let mut state = lock(&self.state);
        let done = work(&mut state);
        let readable = !state.delivers_nothing() && (!state.visible.is_empty() || state.has_ended());
        self.readable.store(readable, Ordering::Release);
        drop(state);
        self.changed.notify_all();
        done
    }

    fn wait(&self, deadline: &Deadline, ready: impl Fn(&PipeState) -> bool) -> bool {
        let mut state = lock(&self.state);
        while !ready(&state) {
            let Some(mut left) = deadline.remaining() else { return false };
            if let Some(Some(at)) = state.delivers_nothing_until {
                // Zero once the stall is over, when only a change makes the direction ready.
                let stalled = at.saturating_duration_since(Instant::now());
                left = if stalled.is_zero() { left } else { left.min(stalled) };
            }
            state = self.changed.wait_timeout(state, left).unpoisoned().0;
        }
        true
    }
}

impl Transport for MemoryTransport {
    fn try_read(&self, dst: &mut [u8]) -> Result<Option<usize>, TransportError> {
        self.incoming.change(|state| {
            if state.delivers_nothing() {
                return Ok(None);
            }
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
            let due = state.fault.take_if(|(left, _)| *left <= n as u64);
            if let Some((left, _)) = &due {
                n = *left as usize;
            }
            if let Some((left, _)) = &mut state.fault {
                *left -= n as u64;
            }
            state.unflushed.extend(src.iter().flat_map(|part| part.iter()).take(n));
            if state.rng.bool() {
                state.flush();
            }
            (Ok(Some(n)), due.is_some_and(|(_, fault)| state.break_down(fault)))
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
        incoming.aborted || (incoming.finished && !incoming.delivers_nothing())
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

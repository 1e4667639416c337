//! A transport in memory: two bounded pipes. Its contract is that of the library's `Transport`: a read returns the bytes that arrived
//! before the end; an abort wakes all waiting threads; dropping the last half closes the connection. As with TCP, an abort, or a
//! close with unread bytes, may lose the bytes that this end has sent and the other end has not read.

use crate::sync::{self, Arc, Condvar, Instant, Mutex, MutexGuard, Unpoisoned, lock};
use shuttle::rand::{Rng, thread_rng};
use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// As the library's.
#[derive(Clone, Copy)]
pub(crate) struct Deadline {
    /// `None`: never.
    at: Option<Instant>,
    after: Duration,
}

/// For the other end of a connection, which waits as long as the clock may run.
pub(crate) const NEVER: Deadline = Deadline { at: None, after: Duration::MAX };

impl Deadline {
    pub(crate) fn after(after: Duration) -> Deadline {
        Deadline { at: sync::now().checked_add(after), after }
    }

    pub(crate) fn remaining(&self) -> Option<Duration> {
        let left = self.at.map_or(Duration::MAX, |at| at.saturating_duration_since(sync::now()));
        Some(left).filter(|left| !left.is_zero())
    }

    fn late(&self) -> TransportError {
        TransportError::TimedOut { after: self.after }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    #[error("the peer closed the connection in the middle of a message")]
    Closed,
    #[error("connection lost")]
    Reset,
    #[error("stalled for {after:?}")]
    TimedOut { after: Duration },
}

impl TransportError {
    pub(crate) fn cut() -> TransportError {
        TransportError::Reset
    }

    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self, TransportError::TimedOut { .. })
    }
}

/// As the library's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerAddr {
    Ip(SocketAddr),
}

impl PeerAddr {
    pub(crate) fn ip(&self) -> Option<IpAddr> {
        let PeerAddr::Ip(address) = self;
        Some(address.ip())
    }
}

/// One direction.
#[derive(Debug)]
struct Pipe {
    state: Mutex<PipeState>,
    changed: Condvar,
}

#[derive(Debug)]
struct PipeState {
    bytes: VecDeque<u8>,
    capacity: usize,
    /// The sender has ended this direction.
    is_finished: bool,
    is_aborted: bool,
}

impl Pipe {
    fn new(capacity: usize) -> Arc<Pipe> {
        let state = PipeState { bytes: VecDeque::new(), capacity, is_finished: false, is_aborted: false };
        Arc::new(Pipe { state: Mutex::new(state), changed: Condvar::new() })
    }

    fn change<T>(&self, change: impl FnOnce(&mut PipeState) -> T) -> T {
        let changed = change(&mut lock(&self.state));
        self.changed.notify_all();
        changed
    }

    /// Waits until `is_ready`. `None`: the deadline has passed.
    fn wait(&self, deadline: &Deadline, is_ready: impl Fn(&PipeState) -> bool) -> Option<MutexGuard<'_, PipeState>> {
        let mut state = lock(&self.state);
        while !is_ready(&state) {
            let left = deadline.remaining()?;
            state = match deadline.at {
                Some(_) => self.changed.wait_timeout(state, left).unpoisoned().0,
                None => self.changed.wait(state).unpoisoned(),
            };
        }
        Some(state)
    }
}

impl PipeState {
    fn has_ended(&self) -> bool {
        self.is_finished || self.is_aborted
    }

    fn is_readable(&self) -> bool {
        !self.bytes.is_empty() || self.has_ended()
    }

    fn has_room(&self) -> bool {
        self.bytes.len() < self.capacity || self.has_ended()
    }

    /// The bytes on the way may be lost.
    fn abort(&mut self) {
        self.is_aborted = true;
        if thread_rng().gen_bool(0.5) {
            self.bytes.clear();
        }
    }
}

/// One end.
#[derive(Debug)]
struct Transport {
    incoming: Arc<Pipe>,
    outgoing: Arc<Pipe>,
    peer: PeerAddr,
}

impl Transport {
    fn abort(&self) {
        self.incoming.change(|pipe| pipe.is_aborted = true);
        self.outgoing.change(PipeState::abort);
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        if self.incoming.change(|pipe| std::mem::replace(&mut pipe.is_aborted, true) || pipe.bytes.is_empty()) {
            self.outgoing.change(|pipe| pipe.is_finished = true);
        } else {
            self.outgoing.change(PipeState::abort);
        }
    }
}

/// A connection before it is split into its halves.
pub(crate) struct Connection(Arc<Transport>);

/// The two ends of a connection, each direction of which holds so many bytes.
pub(crate) fn pair(capacity: usize) -> (Connection, Connection) {
    let addresses = [1, 2].map(|last| PeerAddr::Ip(([10, 0, 0, last], 1).into()));
    pair_of(capacity, addresses)
}

/// As [`pair`], with the address that each end sees.
pub(crate) fn pair_of(capacity: usize, [first, second]: [PeerAddr; 2]) -> (Connection, Connection) {
    let [a, b] = [Pipe::new(capacity), Pipe::new(capacity)];
    let end = |incoming: &Arc<Pipe>, outgoing: &Arc<Pipe>, peer| {
        Connection(Arc::new(Transport { incoming: Arc::clone(incoming), outgoing: Arc::clone(outgoing), peer }))
    };
    (end(&a, &b, first), end(&b, &a, second))
}

impl Connection {
    pub(crate) fn aborter(&self) -> Aborter {
        Aborter(Arc::clone(&self.0))
    }

    pub(crate) fn split(self) -> (Receiver, Sender) {
        (Receiver(Arc::clone(&self.0)), Sender(self.0))
    }
}

/// Ends a connection from any thread.
#[derive(Clone)]
pub(crate) struct Aborter(Arc<Transport>);

impl Aborter {
    pub(crate) fn peer(&self) -> PeerAddr {
        self.0.peer
    }

    pub(crate) fn abort(&self) {
        self.0.abort();
    }

    pub(crate) fn hung_up(&self) -> bool {
        lock(&self.0.incoming.state).has_ended()
    }

    pub(crate) fn has_sent(&self) -> bool {
        let incoming = lock(&self.0.incoming.state);
        !incoming.bytes.is_empty() && !incoming.has_ended()
    }
}

/// The receiving half.
pub(crate) struct Receiver(Arc<Transport>);

impl Receiver {
    pub(crate) fn readable(&self) -> bool {
        lock(&self.0.incoming.state).is_readable()
    }

    /// Lets the peer's writes fail from now on. What it is sent still arrives.
    pub(crate) fn refuse(&self) {
        self.0.incoming.change(|pipe| pipe.is_aborted = true);
    }

    pub(crate) fn read_into(&mut self, dst: &mut [u8], deadline: &Deadline) -> Result<usize, TransportError> {
        let pipe = &self.0.incoming;
        let mut state = pipe.wait(deadline, PipeState::is_readable).ok_or_else(|| deadline.late())?;
        let n = dst.len().min(state.bytes.len());
        state.bytes.drain(..n).zip(dst).for_each(|(byte, dst)| *dst = byte);
        drop(state);
        pipe.changed.notify_all();
        Ok(n)
    }

    pub(crate) fn read_exact(&mut self, mut dst: &mut [u8], deadline: &Deadline) -> Result<(), TransportError> {
        while !dst.is_empty() {
            match self.read_into(dst, deadline)? {
                0 => return Err(TransportError::Closed),
                n => dst = &mut dst[n..],
            }
        }
        Ok(())
    }
}

/// The sending half.
#[derive(Debug)]
pub(crate) struct Sender(Arc<Transport>);

impl Sender {
    /// Sends all bytes, and fails when none was accepted for `stall`.
    pub(crate) fn write_all(&mut self, parts: &[&[u8]], stall: Duration) -> Result<(), TransportError> {
        let bytes = parts.concat();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let deadline = Deadline::after(stall);
            rest = &rest[self.write_available(&[rest])?.0..];
            if !rest.is_empty() && self.0.outgoing.wait(&deadline, PipeState::has_room).is_none() {
                return Err(deadline.late());
            }
        }
        Ok(())
    }

    pub(crate) fn write_by(&mut self, bytes: &[u8], deadline: &Deadline) -> Result<(), TransportError> {
        self.write_all(&[bytes], deadline.after)
    }

    /// Sends as many bytes as there is room for. A short write has left bytes behind, so they are flushed always.
    pub(crate) fn write_available(&mut self, parts: &[&[u8]]) -> Result<(usize, bool), TransportError> {
        let bytes = parts.concat();
        self.0.outgoing.change(|pipe| {
            if pipe.has_ended() {
                return Err(TransportError::cut());
            }
            let n = bytes.len().min(pipe.capacity - pipe.bytes.len());
            pipe.bytes.extend(&bytes[..n]);
            Ok((n, true))
        })
    }

    pub(crate) fn wait_for_room(&self, deadline: &Deadline) -> Result<(), TransportError> {
        self.0.outgoing.wait(deadline, PipeState::has_room);
        Ok(())
    }

    pub(crate) fn finish(&mut self, _: &Deadline) -> Result<(), TransportError> {
        self.0.outgoing.change(|pipe| pipe.is_finished = true);
        Ok(())
    }

    pub(crate) fn drain(&mut self, deadline: &Deadline) -> Result<(), TransportError> {
        let mut receiver = Receiver(Arc::clone(&self.0));
        while receiver.read_into(&mut [0; 64], deadline)? > 0 {}
        Ok(())
    }
}

//! Points on timelines: what other queues and the host wait for.

use super::DeviceError;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// How far one queue has come. A device advances it; anyone may wait for a [`Point`] on it.
#[derive(Debug, Default)]
pub struct Timeline {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    done: u64,
    failure: Option<DeviceError>,
}

impl Timeline {
    /// A timeline at moment 0.
    pub fn new() -> Arc<Timeline> {
        Arc::default()
    }

    /// All work up to `seq` is done.
    pub fn advance(&self, seq: u64) {
        let mut state = self.lock();
        state.done = state.done.max(seq);
        drop(state);
        self.changed.notify_all();
    }

    /// The queue failed: every point not yet reached fails with this, the first failure wins.
    pub fn fail(&self, error: DeviceError) {
        self.lock().failure.get_or_insert(error);
        self.changed.notify_all();
    }

    /// The failure that sticks to the queue, if there is one.
    pub fn failure(&self) -> Option<DeviceError> {
        self.lock().failure.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is two plain values, whole at every moment: a panic elsewhere cannot have left it torn.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A moment on a queue.
#[derive(Clone, Debug)]
pub struct Point {
    timeline: Arc<Timeline>,
    seq: u64,
}

impl Point {
    /// The moment `seq` of a timeline.
    pub fn new(timeline: &Arc<Timeline>, seq: u64) -> Point {
        Point { timeline: Arc::clone(timeline), seq }
    }

    /// Whether it has been reached; `Err` when the queue failed before.
    ///
    /// # Errors
    /// The queue's failure.
    pub fn poll(&self) -> Result<bool, DeviceError> {
        let state = self.timeline.lock();
        if state.done >= self.seq {
            return Ok(true);
        }
        state.failure.clone().map_or(Ok(false), Err)
    }

    /// Blocks until it is reached, the queue fails, or the deadline passes (`None`: no deadline; for a device's own
    /// threads, which end when the queue they wait for is dropped).
    ///
    /// # Errors
    /// The queue's failure, or [`DeviceError::Deadline`].
    pub fn wait(&self, deadline: Option<Instant>) -> Result<(), DeviceError> {
        let mut state = self.timeline.lock();
        loop {
            if state.done >= self.seq {
                return Ok(());
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            state = match deadline {
                None => self.timeline.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(at) => {
                    let left = at.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(DeviceError::Deadline("a point on a queue"));
                    }
                    self.timeline.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

/// Bytes on their way from a device.
#[derive(Debug)]
pub struct Ticket(Bytes);

#[derive(Debug)]
enum Bytes {
    Here(Vec<u8>),
    Coming(crossbeam::channel::Receiver<Result<Vec<u8>, DeviceError>>),
}

/// The device's end of a [`Ticket`]; dropping it unfulfilled makes the wait fail with [`DeviceError::Lost`].
#[derive(Debug)]
pub struct TicketSender(crossbeam::channel::Sender<Result<Vec<u8>, DeviceError>>);

impl Ticket {
    /// A ticket and the end that fulfils it.
    pub fn new() -> (TicketSender, Ticket) {
        let (tx, rx) = crossbeam::channel::bounded(1);
        (TicketSender(tx), Ticket(Bytes::Coming(rx)))
    }

    /// A ticket for bytes that are there already.
    pub fn ready(bytes: Vec<u8>) -> Ticket {
        Ticket(Bytes::Here(bytes))
    }

    /// Blocks until the bytes are there, the queue fails, or the deadline passes.
    ///
    /// # Errors
    /// The queue's failure, [`DeviceError::Lost`], or [`DeviceError::Deadline`].
    pub fn wait(self, deadline: Option<Instant>) -> Result<Vec<u8>, DeviceError> {
        use crossbeam::channel::RecvTimeoutError;
        let coming = match self.0 {
            Bytes::Here(bytes) => return Ok(bytes),
            Bytes::Coming(coming) => coming,
        };
        match deadline {
            None => coming.recv().unwrap_or(Err(DeviceError::Lost)),
            Some(at) => match coming.recv_deadline(at) {
                Ok(result) => result,
                Err(RecvTimeoutError::Timeout) => Err(DeviceError::Deadline("a download")),
                Err(RecvTimeoutError::Disconnected) => Err(DeviceError::Lost),
            },
        }
    }
}

impl TicketSender {
    /// Fulfils the ticket.
    pub fn send(self, result: Result<Vec<u8>, DeviceError>) {
        // Nobody waits any more: the bytes are of no use.
        let _ = self.0.send(result);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn points_are_reached_in_order_and_fail_with_their_queue() {
        let line = Timeline::new();
        let (a, b) = (Point::new(&line, 1), Point::new(&line, 2));
        assert_eq!(a.poll(), Ok(false));
        assert_eq!(a.wait(Some(Instant::now())), Err(DeviceError::Deadline("a point on a queue")));
        line.advance(1);
        line.fail(DeviceError::Lost);
        line.fail(DeviceError::Misuse("a later failure does not replace the first"));
        assert_eq!((a.poll(), a.wait(None)), (Ok(true), Ok(())));
        assert_eq!((b.poll(), b.wait(None)), (Err(DeviceError::Lost), Err(DeviceError::Lost)));
    }

    #[test]
    fn a_dropped_sender_is_a_lost_ticket() {
        let (tx, ticket) = Ticket::new();
        drop(tx);
        assert_eq!(ticket.wait(Some(Instant::now() + Duration::from_secs(60))), Err(DeviceError::Lost));
    }
}

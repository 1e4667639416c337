//! Points on timelines: what other queues and the host wait for.

use super::DeviceError;
use std::any::Any;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a waiter looks again and again before it pauses between two looks: a token's work is done by then.
const EAGER: Duration = Duration::from_micros(200);

/// The pause between two looks at a device that tells nobody when its work is done.
const PAUSE: Duration = Duration::from_micros(50);

/// How far one queue has come. A device advances it; anyone may wait for a [`Point`] on it.
#[derive(Debug, Default)]
pub struct Timeline {
    state: Mutex<State>,
    changed: Condvar,
    progress: Option<Arc<dyn Progress>>,
}

/// For devices: how a timeline comes to know what is done where the device tells nobody by itself: whoever wants to know
/// looks. Waiting for a point is looking for it, on the waiter's thread: first without a pause, then with short ones.
pub trait Progress: Send + Sync + fmt::Debug {
    /// Advances the timeline as far as the device has come, or fails it. It does not block; it may be called on any thread,
    /// on several at a time, and after the queue was dropped.
    fn look(&self, timeline: &Timeline);

    /// Someone wants to know of moment `seq`, which is not known to be reached. True where the timeline is advanced or failed
    /// by itself when that is known: nobody need look again. Else this looks, and whoever waits looks again and again.
    fn ask(&self, timeline: &Timeline, seq: u64) -> bool {
        let _ = seq;
        self.look(timeline);
        false
    }

    /// The device's own kind of it, for queues of the same kind: see [`Point::progress`].
    fn as_any(&self) -> &dyn Any;
}

/// Told once when a point is reached, or will never be.
type Watcher = Box<dyn FnOnce(Result<(), DeviceError>) + Send>;

#[derive(Default)]
struct State {
    done: u64,
    failure: Option<DeviceError>,
    watchers: Vec<(u64, Watcher)>,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "done {}, failure {:?}, {} watchers", self.done, self.failure, self.watchers.len())
    }
}

impl Timeline {
    /// A timeline at moment 0.
    pub fn new() -> Arc<Timeline> {
        Arc::default()
    }

    /// For devices: a timeline at moment 0 that `progress` brings up to date when someone polls or waits for a point that is
    /// not known to be reached.
    pub fn looked_at(progress: Arc<dyn Progress>) -> Arc<Timeline> {
        Arc::new(Timeline { progress: Some(progress), ..Timeline::default() })
    }

    /// All work up to `seq` is done.
    pub fn advance(&self, seq: u64) {
        let mut state = self.lock();
        state.done = state.done.max(seq);
        let done = state.done;
        let reached: Vec<_> = state.watchers.extract_if(.., |(seq, _)| *seq <= done).collect();
        drop(state);
        self.changed.notify_all();
        reached.into_iter().for_each(|(_, watcher)| watcher(Ok(())));
    }

    /// The queue failed: every point not yet reached fails with this, the first failure wins.
    pub fn fail(&self, error: DeviceError) {
        let mut state = self.lock();
        let failure = state.failure.get_or_insert(error).clone();
        let watchers = std::mem::take(&mut state.watchers);
        drop(state);
        self.changed.notify_all();
        watchers.into_iter().for_each(|(_, watcher)| watcher(Err(failure.clone())));
    }

    /// Brings it up to date, where it does not keep itself so ([`Timeline::looked_at`]).
    pub fn look(&self) {
        if let Some(progress) = &self.progress {
            progress.look(self);
        }
    }

    /// Has `seq` looked for; whether nobody need look for it again.
    fn ask(&self, seq: u64) -> bool {
        self.progress.as_ref().is_none_or(|progress| progress.ask(self, seq))
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
        let known = self.known();
        if known != Ok(false) || self.timeline.progress.is_none() {
            return known;
        }
        self.timeline.ask(self.seq);
        self.known()
    }

    /// As [`Point::poll`], from what is known without asking the device.
    fn known(&self) -> Result<bool, DeviceError> {
        let state = self.timeline.lock();
        if state.done >= self.seq {
            return Ok(true);
        }
        state.failure.clone().map_or(Ok(false), Err)
    }

    /// For devices: the moment's number on its timeline.
    pub fn seq(&self) -> u64 {
        self.seq
    }

    /// Whether both are moments of one queue.
    pub fn is_beside(&self, other: &Point) -> bool {
        Arc::ptr_eq(&self.timeline, &other.timeline)
    }

    /// Whether [`Point::when`] tells by itself, though nobody looks.
    pub(crate) fn tells(&self) -> bool {
        self.timeline.progress.is_none()
    }

    /// For devices: what brings the point's timeline up to date, where that is of the kind `T`; so a device knows points of
    /// its own queues.
    pub fn progress<T: 'static>(&self) -> Option<&T> {
        self.timeline.progress.as_ref()?.as_any().downcast_ref()
    }

    /// Calls `watcher` once when the point is reached or its queue fails, at once if that is so already; on whichever
    /// thread finds out. On a timeline that has to be looked at nobody finds out before someone looks.
    pub fn when(&self, watcher: impl FnOnce(Result<(), DeviceError>) + Send + 'static) {
        let mut state = self.timeline.lock();
        let known = if state.done >= self.seq { Some(Ok(())) } else { state.failure.clone().map(Err) };
        match known {
            None => {
                state.watchers.push((self.seq, Box::new(watcher)));
                drop(state);
                self.timeline.ask(self.seq);
            }
            Some(known) => {
                drop(state);
                watcher(known);
            }
        }
    }

    /// Blocks until it is reached, the queue fails, or the deadline passes (`None`: no deadline; for a device's own
    /// threads, which end when the queue they wait for is dropped).
    ///
    /// # Errors
    /// The queue's failure, or [`DeviceError::Deadline`].
    pub fn wait(&self, deadline: Option<Instant>) -> Result<(), DeviceError> {
        if self.known()? {
            return Ok(());
        }
        if !self.timeline.ask(self.seq) {
            return self.wait_looking(deadline);
        }
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

    fn wait_looking(&self, deadline: Option<Instant>) -> Result<(), DeviceError> {
        let began = Instant::now();
        while !self.poll()? {
            let now = Instant::now();
            if deadline.is_some_and(|at| now >= at) {
                return Err(DeviceError::Deadline("a point on a queue"));
            }
            if now - began < EAGER {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }
}

/// A result that a device has yet to deliver: the bytes of a download, unless said otherwise.
pub struct Ticket<T = Vec<u8>>(Pending<T>);

enum Pending<T> {
    Ready(T),
    Sent(crossbeam::channel::Receiver<Result<T, DeviceError>>),
    Fetched(Fetch<T>),
}

/// Waits for the result until a deadline, and returns it.
type Fetch<T> = Box<dyn FnOnce(Option<Instant>) -> Result<T, DeviceError> + Send>;

impl<T> fmt::Debug for Ticket<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_ready() { "Ticket(ready)" } else { "Ticket(pending)" })
    }
}

/// The device's end of a [`Ticket`]; dropping it unfulfilled makes the wait fail with [`DeviceError::Ended`].
#[derive(Debug)]
pub struct TicketSender<T = Vec<u8>>(crossbeam::channel::Sender<Result<T, DeviceError>>);

impl<T> Ticket<T> {
    /// A ticket and the end that fulfils it.
    pub fn new() -> (TicketSender<T>, Ticket<T>) {
        let (tx, rx) = crossbeam::channel::bounded(1);
        (TicketSender(tx), Ticket(Pending::Sent(rx)))
    }

    /// A ticket for a result that is there already.
    pub fn ready(result: T) -> Ticket<T> {
        Ticket(Pending::Ready(result))
    }

    /// For devices: a ticket whose owner fetches the result when it waits. `fetch` is given the wait's deadline.
    pub fn fetched(fetch: impl FnOnce(Option<Instant>) -> Result<T, DeviceError> + Send + 'static) -> Ticket<T> {
        Ticket(Pending::Fetched(Box::new(fetch)))
    }

    /// Whether [`Ticket::wait`] would return at once, as far as that can be told without asking the device.
    pub fn is_ready(&self) -> bool {
        match &self.0 {
            Pending::Ready(_) => true,
            Pending::Sent(sent) => !sent.is_empty(),
            Pending::Fetched(_) => false,
        }
    }

    /// Blocks until the result is there, the queue fails, or the deadline passes.
    ///
    /// # Errors
    /// The queue's failure, [`DeviceError::Ended`], or [`DeviceError::Deadline`].
    pub fn wait(self, deadline: Option<Instant>) -> Result<T, DeviceError> {
        use crossbeam::channel::RecvTimeoutError;
        let sent = match self.0 {
            Pending::Ready(result) => return Ok(result),
            Pending::Fetched(fetch) => return fetch(deadline),
            Pending::Sent(sent) => sent,
        };
        match deadline {
            None => sent.recv().unwrap_or(Err(DeviceError::Ended)),
            Some(at) => match sent.recv_deadline(at) {
                Ok(result) => result,
                Err(RecvTimeoutError::Timeout) => Err(DeviceError::Deadline("a download")),
                Err(RecvTimeoutError::Disconnected) => Err(DeviceError::Ended),
            },
        }
    }
}

impl<T> TicketSender<T> {
    /// Fulfils the ticket.
    pub fn send(self, result: Result<T, DeviceError>) {
        // If the ticket was dropped, the result is of no use.
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
        line.fail(DeviceError::Ended);
        line.fail(DeviceError::Misuse("a later failure does not replace the first"));
        assert_eq!((a.poll(), a.wait(None)), (Ok(true), Ok(())));
        assert_eq!((b.poll(), b.wait(None)), (Err(DeviceError::Ended), Err(DeviceError::Ended)));
    }

    #[test]
    fn watchers_are_told_once() {
        let (line, (tx, rx)) = (Timeline::new(), std::sync::mpsc::channel());
        let watch = |seq| {
            let tx = tx.clone();
            Point::new(&line, seq).when(move |outcome| tx.send((seq, outcome)).unwrap());
        };
        (1..=3).for_each(watch);
        assert!(rx.try_recv().is_err());
        line.advance(2);
        assert_eq!(rx.try_iter().collect::<Vec<_>>(), [(1, Ok(())), (2, Ok(()))]);
        line.fail(DeviceError::Ended);
        watch(2);
        watch(4);
        let lost = Err(DeviceError::Ended);
        assert_eq!(rx.try_iter().collect::<Vec<_>>(), [(3, lost.clone()), (2, Ok(())), (4, lost)]);
    }

    #[test]
    fn a_dropped_sender_is_a_lost_ticket() {
        let (tx, ticket) = Ticket::<Vec<u8>>::new();
        tx.send(Ok(vec![1]));
        assert!(ticket.is_ready() && Ticket::ready(()).is_ready());
        let (tx, ticket) = Ticket::<Vec<u8>>::new();
        assert!(!ticket.is_ready());
        drop(tx);
        assert_eq!(ticket.wait(Some(Instant::now() + Duration::from_secs(60))), Err(DeviceError::Ended));
    }
}

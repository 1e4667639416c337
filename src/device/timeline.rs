//! Timelines and their points, by which queues and the host wait for submitted work.
//!
//! A [`Timeline`] is a counter of completed work, like a Vulkan timeline semaphore: each queue has one and advances it. A
//! [`TimelinePoint`] is a value of that counter, made by [`Queue::mark`](super::Queue::mark). A timeline that fails never
//! advances again: every point that was not reached by then fails with the queue's error.

use super::DeviceError;
use crate::sync::{self, Arc, Condvar, Instant, Mutex, Unpoisoned, Weak, lock};
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// How long a waiter polls without a pause before it sleeps between two polls. Shorter work is awaited without a sleep's delay.
pub(crate) const SPIN_BEFORE_SLEEP: Duration = Duration::from_micros(200);

/// Longest sleep before the expected end: a failure or an abort is noticed by polling.
const MAX_PAUSE: Duration = Duration::from_millis(1);

/// The sleep between two polls of a device that does not notify completion.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// The completion counter of one queue. The device advances it as work completes, or fails it once; the host and other queues
/// wait for [`TimelinePoint`]s on it.
///
/// Without a completion source ([`Timeline::new`]), a thread of the device advances the timeline. With one
/// ([`Timeline::with_source`]), polling or waiting for a point makes the source bring the timeline up to date, or request a
/// notification from the device.
#[derive(Debug, Default)]
pub struct Timeline {
    state: Mutex<TimelineState>,
    advanced_or_failed: Condvar,
    source: Option<Arc<dyn CompletionSource>>,
}

/// For devices: reads the completion state of hardware that does not push it, such as CUDA events. Waiting for a point of such
/// a timeline polls the source on the waiter's thread: first spinning, then with short sleeps.
pub trait CompletionSource: Send + Sync + fmt::Debug {
    /// Advances the timeline to the device's current state, or fails it. Must not block. Called on any thread, on several
    /// threads at a time, and also after the queue was dropped.
    fn poll(&self, timeline: &Timeline);

    /// Requests a notification for point `seq`, which is not known to be reached. Returns true if the device will advance or
    /// fail the timeline by itself once the point is decided, so that the waiter can park. The default polls once and returns
    /// false: the waiter has to poll again.
    fn request_notify(&self, timeline: &Timeline, seq: u64) -> bool {
        let _ = seq;
        self.poll(timeline);
        false
    }

    /// When point `seq` is expected to be reached, if the source can tell. A waiting thread sleeps until shortly before.
    fn expected_end(&self, seq: u64) -> Option<Instant> {
        let _ = seq;
        None
    }

    /// For [`TimelinePoint::completion_source`], which downcasts to the device's own type.
    fn as_any(&self) -> &dyn Any;
}

/// Called once, when a point is reached or its queue fails.
type CompletionCallback = Box<dyn FnOnce(Result<(), DeviceError>) + Send>;

#[derive(Default)]
struct TimelineState {
    done: u64,
    failure: Option<DeviceError>,
    /// By the point's value and a number that is unique on the timeline.
    callbacks: BTreeMap<(u64, u64), CompletionCallback>,
    /// Callbacks registered so far.
    registered: u64,
}

impl fmt::Debug for TimelineState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "done {}, failure {:?}, {} callbacks", self.done, self.failure, self.callbacks.len())
    }
}

impl Timeline {
    /// A timeline at value 0 without a completion source: the device calls [`Timeline::advance`] and [`Timeline::fail`] by
    /// itself.
    pub fn new() -> Arc<Timeline> {
        Arc::default()
    }

    /// For devices: a timeline at value 0 with a completion source. `source` is called when a point that is not known to be
    /// reached is polled or awaited.
    pub fn with_source(source: Arc<dyn CompletionSource>) -> Arc<Timeline> {
        Arc::new(Timeline { source: Some(source), ..Timeline::default() })
    }

    /// Reports that all work up to `seq` is done: reaches all points up to it, wakes their waiters and calls their callbacks. A
    /// smaller value than before is ignored, and so is any value after a failure: the points that it failed stay failed, also
    /// if a thread submits a mark that it has begun before the failure.
    pub fn advance(&self, seq: u64) {
        let mut state = lock(&self.state);
        if state.failure.is_some() {
            return;
        }
        state.done = state.done.max(seq);
        let later = state.done.checked_add(1).map_or_else(BTreeMap::new, |next| state.callbacks.split_off(&(next, 0)));
        let reached = std::mem::replace(&mut state.callbacks, later);
        drop(state);
        self.advanced_or_failed.notify_all();
        reached.into_values().for_each(|callback| callback(Ok(())));
    }

    /// Fails every point that is not yet reached. The first failure is kept; later ones are ignored.
    pub fn fail(&self, error: DeviceError) {
        let mut state = lock(&self.state);
        let failure = state.failure.get_or_insert(error).clone();
        let callbacks = std::mem::take(&mut state.callbacks);
        drop(state);
        self.advanced_or_failed.notify_all();
        callbacks.into_values().for_each(|callback| callback(Err(failure.clone())));
    }

    /// Polls the completion source, if there is one.
    pub fn poll(&self) {
        if let Some(source) = &self.source {
            source.poll(self);
        }
    }

    /// [`CompletionSource::request_notify`]; true without a source, since the device then notifies by itself.
    fn request_notify(&self, seq: u64) -> bool {
        self.source.as_ref().is_none_or(|source| source.request_notify(self, seq))
    }

    /// The queue's sticky failure, if it has failed.
    pub fn failure(&self) -> Option<DeviceError> {
        lock(&self.state).failure.clone()
    }
}

/// A point in the work of a queue: reached when all work that was submitted before the point is done. Cheap to clone.
#[derive(Clone, Debug)]
pub struct TimelinePoint {
    timeline: Arc<Timeline>,
    seq: u64,
}

impl TimelinePoint {
    /// For devices: the point at value `seq` of a timeline.
    pub fn new(timeline: &Arc<Timeline>, seq: u64) -> TimelinePoint {
        TimelinePoint { timeline: Arc::clone(timeline), seq }
    }

    /// Whether the point is reached; polls the device if the timeline's value does not decide it. Does not block.
    ///
    /// # Errors
    /// The queue's failure.
    pub fn poll(&self) -> Result<bool, DeviceError> {
        let cached = self.cached_status();
        if cached != Ok(false) || self.timeline.source.is_none() {
            return cached;
        }
        self.timeline.request_notify(self.seq);
        self.cached_status()
    }

    /// The queue's failure, if it is known that the point will not be reached. Does not poll the device.
    pub fn failure(&self) -> Option<DeviceError> {
        self.cached_status().err()
    }

    /// As [`TimelinePoint::poll`], from the timeline's current value alone: does not poll the device.
    fn cached_status(&self) -> Result<bool, DeviceError> {
        let state = lock(&self.timeline.state);
        if state.done >= self.seq {
            return Ok(true);
        }
        state.failure.clone().map_or(Ok(false), Err)
    }

    /// When the point is expected to be reached, if the device can tell.
    pub(crate) fn expected_end(&self) -> Option<Instant> {
        self.timeline.source.as_ref().and_then(|source| source.expected_end(self.seq))
    }

    /// For devices: the point's value on its timeline.
    pub fn seq(&self) -> u64 {
        self.seq
    }

    /// Whether both points are on one queue's timeline.
    pub fn is_same_timeline(&self, other: &TimelinePoint) -> bool {
        Arc::ptr_eq(&self.timeline, &other.timeline)
    }

    /// For devices: the completion source of the point's timeline if it has type `T`. By it a device recognises points of its
    /// own queues, which it can order without the host.
    pub fn completion_source<T: 'static>(&self) -> Option<&T> {
        self.timeline.source.as_ref()?.as_any().downcast_ref()
    }

    /// Calls `callback` once, when the point is reached (`Ok`) or its queue fails (`Err`): at once if that is already known,
    /// else on the thread that advances or fails the timeline. If the timeline's completion source cannot notify, that happens
    /// only when some thread polls or waits. Dropping the returned registration drops a callback that was not called yet.
    pub fn on_reached(&self, callback: impl FnOnce(Result<(), DeviceError>) + Send + 'static) -> CallbackRegistration {
        let mut state = lock(&self.timeline.state);
        let status = if state.done >= self.seq { Some(Ok(())) } else { state.failure.clone().map(Err) };
        match status {
            None => {
                state.registered += 1;
                let key = (self.seq, state.registered);
                state.callbacks.insert(key, Box::new(callback));
                drop(state);
                let notifies = self.timeline.request_notify(self.seq);
                CallbackRegistration { registered: Some((Arc::downgrade(&self.timeline), key)), notifies }
            }
            Some(status) => {
                drop(state);
                callback(status);
                CallbackRegistration { registered: None, notifies: true }
            }
        }
    }

    /// Blocks until the point is reached, the queue fails, or the deadline passes. No deadline (`None`) is for a device's own
    /// threads, which end when the queue that they wait for is dropped.
    ///
    /// # Errors
    /// The queue's failure; [`DeviceError::Deadline`] when the deadline passes first.
    pub fn wait(&self, deadline: Option<Instant>) -> Result<(), DeviceError> {
        if self.cached_status()? {
            return Ok(());
        }
        if !self.timeline.request_notify(self.seq) {
            return self.wait_polling(deadline);
        }
        let mut state = lock(&self.timeline.state);
        loop {
            if state.done >= self.seq {
                return Ok(());
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            state = match deadline {
                None => self.timeline.advanced_or_failed.wait(state).unpoisoned(),
                Some(at) => {
                    let left = at.saturating_duration_since(sync::now());
                    if left.is_zero() {
                        return Err(DeviceError::Deadline("a point on a queue"));
                    }
                    self.timeline.advanced_or_failed.wait_timeout(state, left).unpoisoned().0
                }
            };
        }
    }

    fn wait_polling(&self, deadline: Option<Instant>) -> Result<(), DeviceError> {
        let began = sync::now();
        while !self.poll()? {
            let now = sync::now();
            if deadline.is_some_and(|at| now >= at) {
                return Err(DeviceError::Deadline("a point on a queue"));
            }
            match pause_before_poll(now, began, self.expected_end()) {
                Some(pause) => sync::thread::sleep(deadline.map_or(pause, |at| pause.min(at - now))),
                None => sync::spin_loop(),
            }
        }
        Ok(())
    }
}

/// How long a thread that began to wait at `began` sleeps before its next poll; `None`: it polls at once. It does so around the
/// expected end, or without one in the beginning.
fn pause_before_poll(now: Instant, began: Instant, expected: Option<Instant>) -> Option<Duration> {
    let spin_from = expected.and_then(|end| end.checked_sub(SPIN_BEFORE_SLEEP)).unwrap_or(began);
    let spin_until = expected.unwrap_or(began) + SPIN_BEFORE_SLEEP;
    if now < spin_from {
        Some((spin_from - now).min(MAX_PAUSE))
    } else if now < spin_until {
        None
    } else {
        Some(POLL_INTERVAL)
    }
}

/// A callback of [`TimelinePoint::on_reached`]. Dropping the registration removes the callback if it was not called yet; it may
/// be running meanwhile on another thread.
#[must_use = "dropping the registration removes the callback"]
#[derive(Debug)]
pub struct CallbackRegistration {
    registered: Option<(Weak<Timeline>, (u64, u64))>,
    notifies: bool,
}

impl CallbackRegistration {
    /// Leaves the callback registered until the point is decided, or the timeline is dropped.
    pub fn detach(mut self) {
        self.registered = None;
    }

    /// Whether the device calls the callback by itself. Otherwise some thread has to poll the point.
    pub(crate) fn notifies(&self) -> bool {
        self.notifies
    }
}

impl Drop for CallbackRegistration {
    fn drop(&mut self) {
        let Some((timeline, key)) = self.registered.take() else { return };
        if let Some(timeline) = timeline.upgrade() {
            let callback = lock(&timeline.state).callbacks.remove(&key);
            // Dropped outside of the lock: the callback may own the last reference to anything.
            drop(callback);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_waiter_sleeps_until_shortly_before_the_expected_end() {
        let began = Instant::now();
        let pause = |now: u64, expected: Option<u64>| {
            let after = |micros| began + Duration::from_micros(micros);
            pause_before_poll(after(now), began, expected.map(after)).map(|pause| pause.as_micros())
        };
        for (now, expected, want) in [
            (0, None, None),
            (199, None, None),
            (200, None, Some(50)),
            (0, Some(10_000), Some(1000)),
            (9_300, Some(10_000), Some(500)),
            (9_800, Some(10_000), None),
            (10_199, Some(10_000), None),
            (10_200, Some(10_000), Some(50)),
            (0, Some(100), None),
        ] {
            assert_eq!(pause(now, expected), want, "{now} {expected:?}");
        }
    }

    #[test]
    fn points_are_reached_in_order_and_fail_with_their_queue() {
        let timeline = Timeline::new();
        let (a, b) = (TimelinePoint::new(&timeline, 1), TimelinePoint::new(&timeline, 2));
        assert_eq!(a.poll(), Ok(false));
        assert_eq!(a.wait(Some(Instant::now())), Err(DeviceError::Deadline("a point on a queue")));
        timeline.advance(1);
        timeline.fail(DeviceError::Ended);
        timeline.fail(DeviceError::Misuse("a later failure does not replace the first"));
        timeline.advance(2);
        assert_eq!((a.poll(), a.wait(None)), (Ok(true), Ok(())));
        assert_eq!((b.poll(), b.wait(None)), (Err(DeviceError::Ended), Err(DeviceError::Ended)));
    }

    #[test]
    fn callbacks_run_once() {
        let (timeline, (tx, rx)) = (Timeline::new(), std::sync::mpsc::channel());
        let watch = |seq| {
            let tx = tx.clone();
            TimelinePoint::new(&timeline, seq).on_reached(move |outcome| tx.send((seq, outcome)).unwrap()).detach();
        };
        (1..=3).for_each(watch);
        assert!(rx.try_recv().is_err());
        timeline.advance(2);
        assert_eq!(rx.try_iter().collect::<Vec<_>>(), [(1, Ok(())), (2, Ok(()))]);
        timeline.fail(DeviceError::Ended);
        watch(2);
        watch(4);
        let lost = Err(DeviceError::Ended);
        assert_eq!(rx.try_iter().collect::<Vec<_>>(), [(3, lost.clone()), (2, Ok(())), (4, lost)]);
    }

    #[test]
    fn a_dropped_registration_removes_its_callback() {
        let timeline = Timeline::new();
        let point = TimelinePoint::new(&timeline, 1);
        for _ in 0..1000 {
            drop(point.on_reached(|_| unreachable!("its registration was dropped")));
        }
        assert!(lock(&timeline.state).callbacks.is_empty());
        timeline.advance(1);
    }
}

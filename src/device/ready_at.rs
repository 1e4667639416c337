//! Pending reads whose results are in memory once points on queues are reached, and the thread that polls the points of devices
//! that do not notify.

use super::pending_read::ReadSource;
use super::{CallbackRegistration, DeviceError, POLL_INTERVAL, PendingRead, TimelinePoint};
use crate::poison::{Unpoisoned, lock};
use crate::tensor::{PlainData, bytes_of_mut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, LazyLock, Mutex, Weak};
use std::task::{Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// How long the polling thread waits for further points before it ends.
const LINGER: Duration = Duration::from_secs(1);

/// The longest sleep between two polls of a point whose end the device expects later.
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

impl<T: 'static> PendingRead<T> {
    /// For devices: a read whose result is in memory once `point` is reached. `take` returns it; it is called at most once, after
    /// the point, and must not block.
    pub fn at(point: TimelinePoint, take: impl FnOnce() -> Result<T, DeviceError> + Send + 'static) -> PendingRead<T> {
        PendingRead::at_all("a download", vec![point], take)
    }

    /// As [`PendingRead::at`], for several points. `what` is what is awaited, for [`DeviceError::Deadline`].
    pub(crate) fn at_all(
        what: &'static str,
        points: Vec<TimelinePoint>,
        take: impl FnOnce() -> Result<T, DeviceError> + Send + 'static,
    ) -> PendingRead<T> {
        PendingRead::from_source(AtPoints { what, points, take, watch: None })
    }
}

impl PendingRead {
    /// Waits as [`PendingRead::wait`], and writes the bytes over `dst`, which must be as long as the region that is read.
    ///
    /// # Errors
    /// As [`PendingRead::wait`]; [`DeviceError::Misuse`] if the lengths differ.
    pub fn read_into<T: PlainData>(self, dst: &mut [T], deadline: Option<Instant>) -> Result<(), DeviceError> {
        let (bytes, dst) = (self.wait(deadline)?, bytes_of_mut(dst));
        if bytes.len() != dst.len() {
            return Err(DeviceError::Misuse("a download and the slice that it is read into differ in size"));
        }
        dst.copy_from_slice(&bytes);
        Ok(())
    }
}

/// A result after points.
struct AtPoints<F> {
    what: &'static str,
    points: Vec<TimelinePoint>,
    take: F,
    watch: Option<Watch>,
}

/// Wakes a thread that waits.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Registrations that wake a task when one of several points is decided.
struct Watch {
    waker: Arc<SharedWaker>,
    /// Whether some thread makes the points progress.
    is_driven: bool,
    _registrations: Vec<CallbackRegistration>,
}

/// The waker of the task that last polled.
type SharedWaker = Mutex<Option<Waker>>;

fn wake(waker: &SharedWaker) {
    // Woken outside of the lock: the waker may poll the read.
    let waker = lock(waker).take();
    waker.into_iter().for_each(Waker::wake);
}

impl<T, F: FnOnce() -> Result<T, DeviceError> + Send> ReadSource<T> for AtPoints<F> {
    fn is_ready(&self) -> bool {
        let mut ready = true;
        for point in &self.points {
            match point.poll() {
                Ok(reached) => ready &= reached,
                Err(_) => return true,
            }
        }
        ready
    }

    fn wait(mut self: Box<Self>, deadline: Option<Instant>) -> Result<T, DeviceError> {
        if self.points.len() > 1 {
            // Not one after the other: when one has failed, others may never be decided.
            let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
            self.wake(&waker);
            while !self.is_ready() {
                match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
                    None => std::thread::park(),
                    Some(Duration::ZERO) => return Err(DeviceError::Deadline(self.what)),
                    Some(left) => std::thread::park_timeout(left),
                }
                self.wake(&waker);
            }
        }
        if let Some(failure) = self.points.iter().find_map(TimelinePoint::failure) {
            return Err(failure);
        }
        for point in &self.points {
            point.wait(deadline).map_err(|e| match e {
                DeviceError::Deadline(_) => DeviceError::Deadline(self.what),
                e => e,
            })?;
        }
        (self.take)()
    }

    fn wake(&mut self, waker: &Waker) {
        let watch = self.watch.get_or_insert_with(|| Watch::new(&self.points));
        *lock(&watch.waker) = Some(waker.clone());
        if !watch.is_driven {
            // Then the task has to poll by itself.
            wake(&watch.waker);
        }
    }
}

impl Watch {
    fn new(points: &[TimelinePoint]) -> Watch {
        let (waker, mut is_driven) = (Arc::<SharedWaker>::default(), true);
        let register = |point: &TimelinePoint| {
            let shared = Arc::clone(&waker);
            let registration = point.on_reached(move |_| wake(&shared));
            is_driven &= registration.notifies() || poll_in_background(point, &waker);
            registration
        };
        let registrations = points.iter().map(register).collect();
        Watch { waker, is_driven, _registrations: registrations }
    }
}

/// The points that the polling thread polls.
#[derive(Default)]
struct Poller {
    state: Mutex<PollerState>,
    added: Condvar,
}

#[derive(Default)]
struct PollerState {
    points: Vec<PolledPoint>,
    runs: bool,
}

struct PolledPoint {
    point: TimelinePoint,
    /// Cannot be upgraded any more once the read that awaits the point was dropped.
    waker: Weak<SharedWaker>,
}

static POLLER: LazyLock<Poller> = LazyLock::new(Poller::default);

/// Adds `point` to those that the polling thread polls, until the point is reached, its queue has failed, or the read that has the
/// waker was dropped. A poll that finds the point reached calls the callbacks of its timeline. Returns false if the system starts no
/// thread.
fn poll_in_background(point: &TimelinePoint, waker: &Arc<SharedWaker>) -> bool {
    let mut state = lock(&POLLER.state);
    state.points.push(PolledPoint { point: point.clone(), waker: Arc::downgrade(waker) });
    if !state.runs {
        let spawned = std::thread::Builder::new().name("poll-points".to_owned()).spawn(|| POLLER.run());
        state.runs = spawned.is_ok();
        if let Err(e) = spawned {
            log::warn!("no thread polls the points of pending reads, so their tasks poll: {e}");
            state.points.pop();
        }
    }
    let runs = state.runs;
    drop(state);
    POLLER.added.notify_one();
    runs
}

impl Poller {
    fn run(&self) {
        let mut state = lock(&self.state);
        loop {
            if state.points.is_empty() {
                let (waited, timeout) = self.added.wait_timeout(state, LINGER).unpoisoned();
                state = waited;
                if timeout.timed_out() && state.points.is_empty() {
                    state.runs = false;
                    return;
                }
                continue;
            }
            let points = std::mem::take(&mut state.points);
            drop(state);
            // Without the lock: a poll may call callbacks.
            let pending: Vec<_> = points
                .into_iter()
                .filter(|polled| polled.waker.strong_count() > 0 && is_pending(&polled.point))
                .collect();
            let now = Instant::now();
            let pauses = pending.iter().map(|polled| pause(polled.point.expected_end(), now));
            std::thread::sleep(pauses.min().unwrap_or_default());
            state = lock(&self.state);
            state.points.extend(pending);
        }
    }
}

/// Polls a point. A panic of a callback or of a foreign waker does not end the thread.
fn is_pending(point: &TimelinePoint) -> bool {
    let polled = catch_unwind(AssertUnwindSafe(|| point.poll()));
    if polled.is_err() {
        log::error!("a task panicked when it was woken");
    }
    matches!(polled, Ok(Ok(false)))
}

/// The sleep before the next poll of a point with this expected end.
fn pause(expected: Option<Instant>, now: Instant) -> Duration {
    let left = expected.map_or(Duration::ZERO, |end| end.saturating_duration_since(now));
    (left / 2).clamp(POLL_INTERVAL, LONGEST_SLEEP)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{CompletionSource, Timeline};
    use std::any::Any;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    /// A device that has to be polled, and reaches point 1 at the third poll, and 2 with it.
    #[derive(Debug, Default)]
    struct Polled(AtomicUsize);

    impl CompletionSource for Polled {
        fn poll(&self, timeline: &Timeline) {
            if self.0.fetch_add(1, Ordering::Relaxed) >= 2 {
                timeline.advance(2);
            }
        }

        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    fn result<T: Send + 'static>(read: PendingRead<T>) -> mpsc::Receiver<Result<T, DeviceError>> {
        let (send, receive) = mpsc::channel();
        read.on_ready(move |result| send.send(result).unwrap());
        receive
    }

    #[test]
    fn devices_that_do_not_notify_are_polled_by_a_thread() {
        for seq in [1, 2] {
            let timeline = Timeline::with_source(Arc::new(Polled::default()));
            let read = PendingRead::at(TimelinePoint::new(&timeline, seq), || Ok(5));
            assert_eq!(result(read).recv_timeout(Duration::from_secs(60)), Ok(Ok(5)));
        }
    }

    #[test]
    fn polling_makes_a_read_ready() {
        let timeline = Timeline::with_source(Arc::new(Polled::default()));
        let read = PendingRead::at(TimelinePoint::new(&timeline, 1), || Ok(()));
        assert_eq!([read.is_ready(), read.is_ready(), read.is_ready()], [false, false, true]);
        assert_eq!(read.wait(Some(Instant::now())), Ok(()));
    }

    #[test]
    fn a_read_after_several_points_is_ready_at_the_last_or_fails_at_once() {
        let timelines = [Timeline::new(), Timeline::new()];
        let points = || timelines.iter().map(|timeline| TimelinePoint::new(timeline, 1)).collect();
        let (first, second) =
            (PendingRead::at_all("", points(), || Ok(())), result(PendingRead::at_all("", points(), || Ok(()))));
        timelines[1].advance(1);
        assert!(!first.is_ready() && second.try_recv().is_err());
        timelines[0].advance(1);
        assert!(first.is_ready());
        assert_eq!(second.try_recv(), Ok(Ok(())));
        let timelines = [Timeline::new(), Timeline::new()];
        let points: Vec<_> = timelines.iter().map(|timeline| TimelinePoint::new(timeline, 1)).collect();
        let read = || PendingRead::at_all("points", points.clone(), || Ok(()));
        let (failed, late) = (result(read()), read());
        assert_eq!(read().wait(Some(Instant::now())), Err(DeviceError::Deadline("points")));
        std::thread::scope(|scope| {
            let waited = scope.spawn(|| late.wait(None));
            timelines[1].fail(DeviceError::Ended);
            assert_eq!(waited.join().unwrap(), Err(DeviceError::Ended));
        });
        assert_eq!(failed.try_recv(), Ok(Err(DeviceError::Ended)));
    }
}

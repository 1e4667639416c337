//! Timelines. Invariants: a point that is reached stays reached, and one that has failed stays failed; each waiter and each callback
//! that is registered learns of either, once; a deadline changes neither.

use crate::device::{CompletionSource, DeviceError, PendingRead, Timeline, TimelinePoint};
use crate::sync::orders::{spawn, with_clock, yield_now};
use crate::sync::{self, Arc, Instant};
use std::any::Any;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// A deadline that only the clock lets pass.
fn deadline() -> Instant {
    sync::now() + Duration::from_secs(60)
}

/// What a point says now, and for ever if it is decided.
fn decided(point: &TimelinePoint) -> Option<Result<(), DeviceError>> {
    match point.poll() {
        Ok(true) => Some(Ok(())),
        Ok(false) => None,
        Err(e) => Some(Err(e)),
    }
}

/// Two waiters, a callback, a thread that advances and one that fails the timeline.
pub(super) fn waiters_and_a_failure() {
    let timeline = Timeline::new();
    let point = |seq| TimelinePoint::new(&timeline, seq);
    let waiters: Vec<_> = [1, 3]
        .into_iter()
        .map(|seq| {
            let point = point(seq);
            spawn(move || {
                let result = point.wait(None);
                assert_eq!(decided(&point), Some(result.clone()), "point {seq} after the wait");
                (point, result)
            })
        })
        .collect();
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let watched = point(2);
    let of_callback = watched.clone();
    watched
        .on_reached(move |outcome| {
            counted.fetch_add(1, Ordering::Relaxed);
            assert_eq!(decided(&of_callback), Some(outcome));
        })
        .detach();
    let failing = Arc::clone(&timeline);
    let failing = spawn(move || failing.fail(DeviceError::Ended));
    for seq in 1..=3 {
        timeline.advance(seq);
    }
    failing.join().unwrap();
    timeline.advance(4);
    assert_eq!(decided(&point(4)), Some(Err(DeviceError::Ended)), "a failed timeline does not advance");
    for waiter in waiters {
        let (point, result) = waiter.join().unwrap();
        assert_eq!(decided(&point), Some(result));
    }
    assert_eq!(calls.load(Ordering::Relaxed), 1, "calls of the callback");
}

/// Waits whose deadlines may pass at any moment.
pub(super) fn deadlines() {
    with_clock(|| {
        let timeline = Timeline::new();
        let waiters: Vec<_> = [1, 2]
            .into_iter()
            .map(|seq| {
                let point = TimelinePoint::new(&timeline, seq);
                spawn(move || {
                    let at = deadline();
                    let result = point.wait(Some(at));
                    match &result {
                        Err(DeviceError::Deadline(_)) => assert!(sync::now() >= at, "the deadline came early"),
                        result => assert_eq!(decided(&point).as_ref(), Some(result)),
                    }
                })
            })
            .collect();
        timeline.advance(1);
        timeline.fail(DeviceError::Ended);
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    });
}

/// Callbacks whose registrations are dropped while the timeline advances.
pub(super) fn dropped_registrations() {
    let timeline = Timeline::new();
    let registering: Vec<_> = [1, 2]
        .into_iter()
        .map(|seq| {
            let point = TimelinePoint::new(&timeline, seq);
            spawn(move || {
                let calls = Arc::new(AtomicU32::new(0));
                let counted = Arc::clone(&calls);
                let registration = point.on_reached(move |_| _ = counted.fetch_add(1, Ordering::Relaxed));
                yield_now();
                drop(registration);
                calls
            })
        })
        .collect();
    timeline.advance(1);
    timeline.advance(2);
    for thread in registering {
        let calls = thread.join().unwrap();
        assert!(calls.load(Ordering::Relaxed) <= 1, "a callback runs once at most");
    }
    for seq in [3, 4] {
        drop(TimelinePoint::new(&timeline, seq).on_reached(|outcome| panic!("a dropped callback ran: {outcome:?}")));
    }
    timeline.advance(3);
    timeline.fail(DeviceError::Ended);
}

/// A device that notifies only points that were requested before it is done, as by an event of the hardware.
#[derive(Debug, Default)]
struct LateSource {
    done: AtomicU64,
    notifies: bool,
}

impl CompletionSource for LateSource {
    fn poll(&self, timeline: &Timeline) {
        timeline.advance(self.done.load(Ordering::Relaxed));
    }

    fn request_notify(&self, timeline: &Timeline, _: u64) -> bool {
        self.poll(timeline);
        self.notifies
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Waiters of timelines whose values are read from a source: by notification, and by polling.
pub(super) fn late_source() {
    for notifies in [true, false] {
        let source = Arc::new(LateSource { notifies, ..LateSource::default() });
        let timeline = Timeline::with_source(Arc::clone(&source) as Arc<dyn CompletionSource>);
        let waiters: Vec<_> = [1, 2]
            .into_iter()
            .map(|seq| {
                let point = TimelinePoint::new(&timeline, seq);
                spawn(move || assert_eq!(point.wait(None), Ok(())))
            })
            .collect();
        for seq in [1, 2] {
            source.done.store(seq, Ordering::Relaxed);
            if notifies {
                timeline.advance(seq);
            }
            yield_now();
        }
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    }
}

/// Reads whose results are sent, or whose senders are dropped.
pub(super) fn pending_reads() {
    let reads: Vec<_> = [Some(7), None]
        .into_iter()
        .map(|value| {
            let (sender, read) = PendingRead::<u32>::new();
            let reading = spawn(move || {
                let was_ready = read.is_ready();
                let result = read.wait(if was_ready { Some(sync::now()) } else { None });
                assert_eq!(result, value.ok_or(DeviceError::Ended));
            });
            let sending = spawn(move || {
                if let Some(value) = value {
                    sender.send(Ok(value));
                }
            });
            [reading, sending]
        })
        .collect();
    reads.into_iter().flatten().for_each(|thread| thread.join().unwrap());
}

/// A result that is sent while the deadline passes.
pub(super) fn pending_reads_with_deadlines() {
    with_clock(|| {
        let (sender, read) = PendingRead::<u32>::new();
        let reading = spawn(move || {
            let at = deadline();
            let result = read.wait(Some(at));
            assert!(result == Ok(1) || sync::now() >= at, "the deadline came early");
            result
        });
        sender.send(Ok(1));
        let result = reading.join().unwrap();
        assert!(matches!(result, Ok(1) | Err(DeviceError::Deadline(_))), "{result:?}");
    });
}

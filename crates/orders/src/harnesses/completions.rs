//! Completions of a queue. Invariants: each is sent once, in the order of the queue's work, and not before its point is reached; a
//! failure is the last notification; nothing follows the end of a queue; the session's thread never waits for ever.

use super::completions::{Completions, Download};
use super::notifier::Notifier;
use crate::device::{DeviceError, PendingRead, Timeline, TimelinePoint};
use crate::rpc::server::client_connection::ClientWriter;
use crate::rpc::server::groups::SessionGroups;
use crate::rpc::server::hangup_watch::SessionWatch;
use crate::rpc::server::host_memory::BytePermit;
use crate::rpc::server::lifecycle::Lifecycle;
use crate::rpc::server::log_limits::LogLimits;
use crate::rpc::server::transfer_tokens::SessionTransfers;
use crate::rpc::wire::ext::DeviceFault;
use crate::sync::orders::{spawn, with_clock, yield_now};
use crate::sync::{Arc, lock};
use std::time::Duration;

/// A session with one queue.
struct Session {
    writer: Arc<ClientWriter>,
    timeline: Arc<Timeline>,
    completions: Completions,
    _notifier: Notifier,
    _groups: Arc<SessionGroups>,
}

impl Session {
    fn new() -> Session {
        let (writer, groups) = (Arc::new(ClientWriter::default()), Arc::new(SessionGroups));
        let of_session = (&Arc::new(Lifecycle), &Arc::new(LogLimits));
        let (watch, transfers) = (Arc::new(SessionWatch), Arc::new(SessionTransfers));
        let notifier = Notifier::start(of_session, &writer, &watch, &transfers, &groups).expect("the thread starts");
        let completions = Completions::new(0, &writer, notifier.shared(), Duration::from_secs(60));
        Session { writer, timeline: Timeline::new(), completions, _notifier: notifier, _groups: groups }
    }

    fn point(&self, seq: u64) -> TimelinePoint {
        TimelinePoint::new(&self.timeline, seq)
    }

    fn mark(&mut self, number: u64) {
        let point = self.point(number);
        self.completions.report_mark(number, Some(point)).expect("no write fails");
    }

    fn sent(&self) -> Vec<String> {
        lock(&self.writer.sent).clone()
    }

    /// Waits until the last notification is this one.
    fn wait_for(&self, last: &str) {
        while self.sent().last().is_none_or(|sent| sent != last) {
            yield_now();
        }
    }
}

/// Marks and a download, while the device's thread reaches their points.
pub(crate) fn in_order() {
    let mut session = Session::new();
    let timeline = Arc::clone(&session.timeline);
    let (sender, read) = PendingRead::new();
    let device = spawn(move || {
        timeline.advance(1);
        sender.send(Ok(vec![0; 5]));
        timeline.advance(2);
        timeline.advance(3);
    });
    session.mark(1);
    let download = Download { reads: vec![read], end: session.point(2), _permit: BytePermit };
    session.completions.send_read_data(7, download).expect("no write fails");
    session.mark(3);
    device.join().unwrap();
    session.wait_for("mark 3");
    assert_eq!(session.sent(), ["mark 1", "data 7: 5 bytes", "mark 3"]);
}

/// The device fails the queue while marks wait.
pub(crate) fn failure() {
    let mut session = Session::new();
    let timeline = Arc::clone(&session.timeline);
    let device = spawn(move || {
        timeline.advance(1);
        timeline.fail(DeviceError::Ended);
    });
    session.mark(1);
    session.mark(2);
    if !session.completions.has_failed() {
        session.mark(3);
    }
    device.join().unwrap();
    let failed = "failed: the queue has ended";
    session.wait_for(failed);
    assert_eq!(session.sent(), ["mark 1", failed]);
    assert!(session.completions.has_failed());
}

/// A failure of another thread, in order behind the pending completions, and one of the session.
pub(crate) fn ordered_failure() {
    let mut session = Session::new();
    let timeline = Arc::clone(&session.timeline);
    let fail = session.completions.ordered_failure_callback();
    session.mark(1);
    let failing = spawn(move || fail(&DeviceError::Ended));
    let device = spawn(move || timeline.advance(1));
    failing.join().unwrap();
    device.join().unwrap();
    session.completions.fail(DeviceFault { text: "twice".to_owned() }).expect("no write fails");
    while session.sent().len() < 2 {
        yield_now();
    }
    yield_now();
    assert_eq!(session.sent(), ["mark 1", "failed: the queue has ended"]);
}

/// The queue is closed while the notifier sends.
pub(crate) fn closed() {
    let mut session = Session::new();
    let timeline = Arc::clone(&session.timeline);
    let device = spawn(move || {
        timeline.advance(1);
        timeline.advance(2);
    });
    session.mark(1);
    session.mark(2);
    session.completions.close();
    let at_close = session.sent();
    device.join().unwrap();
    yield_now();
    assert_eq!(session.sent(), at_close, "nothing is sent after the close");
    assert!(at_close.len() <= 2 && at_close.is_sorted(), "{at_close:?}");
}

/// A point that is never reached: the deadline fails the queue.
pub(crate) fn deadlines() {
    with_clock(|| {
        let mut session = Session::new();
        session.mark(1);
        session.wait_for("failed: a point on a queue: the deadline has passed");
        assert_eq!(session.sent().len(), 1);
    });
}

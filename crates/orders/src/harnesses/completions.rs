//! Completions of a queue. Invariants: each is sent once, in the order of the queue's work, and not before its point is reached; a
//! failure is the last notification; nothing follows the end of a queue; the session's thread never waits for ever.

use super::completions::{Completions, Download};
use super::notifier::Notifier;
use crate::device::{CompletionSource, DeviceError, MemoryBudget, PendingRead, Timeline, TimelinePoint};
use crate::harnesses::channels::Polled;
use crate::rpc::server::admission::Admission;
use crate::rpc::server::client_connection::ClientWriter;
use crate::rpc::server::groups::{GroupTable, GroupTimeouts, SessionGroups};
use crate::rpc::server::hangup_watch::{HangupWatch, SessionWatch};
use crate::rpc::server::host_memory::{BytePermit, SessionMemory};
use crate::rpc::server::lifecycle::Lifecycle;
use crate::rpc::server::limits::Config;
use crate::rpc::server::log_limits::LogLimits;
use crate::rpc::server::tenants::Tenants;
use crate::rpc::server::transfer_tokens::SessionTransfers;
use crate::rpc::transport;
use crate::rpc::wire::ext::DeviceFault;
use crate::sync::atomic::Ordering;
use crate::sync::orders::{spawn, with_clock, yield_now};
use crate::sync::{Arc, lock};
use std::time::Duration;

/// A session with one queue.
struct Session {
    writer: Arc<ClientWriter>,
    timeline: Arc<Timeline>,
    completions: Completions,
    watch: Arc<SessionWatch>,
    notifier: Notifier,
    _groups: Arc<SessionGroups>,
}

/// The device timeout.
const TIMEOUT: Duration = Duration::from_secs(60);

impl Session {
    fn new() -> Session {
        let writer = Arc::new(ClientWriter::default());
        let timeouts = GroupTimeouts { join: Duration::from_secs(60), part: Duration::from_secs(60) };
        let (table, memory) = (Arc::new(GroupTable::default()), Arc::new(SessionMemory));
        let groups = SessionGroups::new(&table, &MemoryBudget::new(0), &memory, timeouts);
        let config = Config { max_connections: 1, max_handshakes: 1 };
        let lifecycle = Lifecycle::new(&Admission::new(&Tenants::new(&config), &config));
        let of_session = (&Arc::new(lifecycle), &Arc::new(LogLimits));
        let watch = HangupWatch::default().add_session(transport::pair(0).0.aborter());
        let transfers = Arc::new(SessionTransfers);
        let notifier = Notifier::start(of_session, &writer, &watch, &transfers, &groups).expect("the thread starts");
        let completions = Completions::new(0, &writer, notifier.shared(), TIMEOUT);
        Session { writer, timeline: Timeline::new(), completions, watch, notifier, _groups: groups }
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

/// Two queues of one session: one is done, the other fails.
pub(crate) fn two_queues() {
    let mut session = Session::new();
    let mut second = Completions::new(1, &session.writer, session.notifier.shared(), TIMEOUT);
    let (timeline, failing) = (Arc::clone(&session.timeline), Timeline::new());
    let devices = [
        spawn(move || {
            timeline.advance(1);
            timeline.advance(2);
        }),
        {
            let failing = Arc::clone(&failing);
            spawn(move || {
                failing.advance(1);
                failing.fail(DeviceError::Ended);
            })
        },
    ];
    for number in [1, 2] {
        session.mark(number);
        if !second.has_failed() {
            second.report_mark(number, Some(TimelinePoint::new(&failing, number))).expect("no write fails");
        }
    }
    devices.into_iter().for_each(|device| device.join().unwrap());
    let of_second = ["queue 1: mark 1", "queue 1: failed: the queue has ended"];
    while session.sent().len() < 4 {
        yield_now();
    }
    let (second, first): (Vec<_>, Vec<_>) = session.sent().into_iter().partition(|sent| sent.starts_with("queue 1: "));
    assert_eq!(first, ["mark 1", "mark 2"]);
    assert_eq!(second, of_second);
}

/// Marks of a device that does not notify: the notifier polls.
pub(crate) fn polled() {
    with_clock(|| {
        let mut session = Session::new();
        let source = Arc::new(Polled::default());
        session.timeline = Timeline::with_source(Arc::clone(&source) as Arc<dyn CompletionSource>);
        let device = {
            let source = Arc::clone(&source);
            spawn(move || (1..=2).for_each(|seq| source.0.store(seq, Ordering::Relaxed)))
        };
        session.mark(1);
        session.mark(2);
        device.join().unwrap();
        session.wait_for("mark 2");
        assert_eq!(session.sent(), ["mark 1", "mark 2"]);
    });
}

/// Two other threads fail the queue at once, without waiting for its completions, while the notifier sends one.
pub(crate) fn failed_at_once() {
    let mut session = Session::new();
    let timeline = Arc::clone(&session.timeline);
    let threads = [0, 1].map(|_| {
        let fail = session.completions.failure_callback();
        spawn(move || fail(DeviceError::Ended))
    });
    let device = spawn(move || {
        timeline.advance(1);
        timeline.advance(2);
    });
    for number in [1, 2] {
        if !session.completions.has_failed() {
            session.mark(number);
        }
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    device.join().unwrap();
    yield_now();
    let sent = session.sent();
    let (last, marks) = sent.split_last().expect("the failure");
    assert_eq!(last, "failed: the queue has ended");
    assert!(["mark 1", "mark 2"].iter().zip(marks).all(|(a, b)| a == b) && marks.len() <= 2, "{sent:?}");
    assert!(session.completions.has_failed());
}

/// The session's thread serves one request for long: the client gets the server's state meanwhile, and not afterwards.
pub(crate) fn heartbeat() {
    with_clock(|| {
        let session = Session::new();
        session.watch.count_boundary();
        while session.sent().len() < 2 {
            yield_now();
        }
        session.watch.count_boundary();
        let at_end = session.sent().len();
        (0..20).for_each(|_| yield_now());
        let sent = session.sent();
        assert!(sent.iter().all(|sent| sent == "ready"), "{sent:?}");
        assert!(sent.len() <= at_end + 1, "the heartbeat goes on while the session is idle");
    });
}

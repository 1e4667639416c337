//! Statistics: the counters, the sessions that run, and the rates of the last minute. A thread takes a sample each second, and logs the
//! clients that are slow.
//!
//! Sessions wait for no lock of this module: they count in atomics, and register without one. Readers of statistics (status pages,
//! scrapes) can therefore not delay them.

use crate::poison::{Unpoisoned, lock};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

use crossbeam::queue::SegQueue;

use super::audit::SessionAudit;
use super::counters::Counters;
use super::log_limits::{LogKind, LogLimits};
use crate::device::{Device, DeviceActivity, MemoryInfo};
use crate::rpc::transport::PeerAddr;

/// Time between two samples.
const INTERVAL: Duration = Duration::from_secs(1);

/// Samples that are kept: the samples of a minute, and the one before.
const SAMPLES: usize = 61;

/// A client counts as slow if nothing has moved for this time in the middle of a message.
const SLOW_CLIENT: Duration = Duration::from_secs(5);

/// The counters at a moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    /// Time since the start of the server.
    pub(super) at: Duration,
    pub(super) received: u64,
    pub(super) sent: u64,
    pub(super) graphs: u64,
    /// The activity of each device.
    pub(super) activity: Vec<Option<DeviceActivity>>,
}

/// Facts that need locks which sessions take, too. Only the sampling thread collects them, however many readers there are.
#[derive(Clone, Debug, Default)]
pub(super) struct SampledFacts {
    /// The memory of each device; `None`: the device has failed.
    pub(super) device_memory: Vec<Option<MemoryInfo>>,
    pub(super) lost: Vec<Option<String>>,
    pub(super) groups: usize,
    pub(super) transfers: usize,
}

pub(super) struct Statistics {
    start: Instant,
    pub(super) counters: Arc<Counters>,
    /// Sessions that are not in `sessions` yet.
    new_sessions: SegQueue<Weak<SessionAudit>>,
    sessions: Mutex<Vec<Weak<SessionAudit>>>,
    samples: Mutex<VecDeque<Sample>>,
    facts: Mutex<Arc<SampledFacts>>,
    /// The largest result of [`Statistics::device_time`], in nanoseconds.
    device_nanos: AtomicU64,
    has_ended: Mutex<bool>,
    ended: Condvar,
}

impl Statistics {
    pub(super) fn new() -> Statistics {
        Statistics {
            start: Instant::now(),
            counters: Arc::default(),
            new_sessions: SegQueue::new(),
            sessions: Mutex::default(),
            samples: Mutex::default(),
            facts: Mutex::default(),
            device_nanos: AtomicU64::new(0),
            has_ended: Mutex::new(false),
            ended: Condvar::new(),
        }
    }

    /// Time since the start of the server.
    pub(super) fn uptime(&self) -> Duration {
        self.start.elapsed()
    }

    /// A new connection. It is listed once its HELLO is complete, and until its audit is dropped.
    pub(super) fn add_session(&self, peer: PeerAddr) -> Arc<SessionAudit> {
        let audit = SessionAudit::new(peer, &self.counters);
        self.new_sessions.push(Arc::downgrade(&audit));
        // The thread that holds the lock may miss this session, so the next session or a reader moves it. The queue holds a few at most.
        if let Ok(mut sessions) = self.sessions.try_lock() {
            self.move_new_sessions(&mut sessions);
        }
        audit
    }

    fn move_new_sessions(&self, sessions: &mut Vec<Weak<SessionAudit>>) {
        sessions.retain(|audit| audit.strong_count() > 0);
        sessions.extend(std::iter::from_fn(|| self.new_sessions.pop()));
    }

    /// The sessions that run, in the order of their numbers.
    pub(super) fn sessions(&self) -> Vec<Arc<SessionAudit>> {
        let mut sessions = lock(&self.sessions);
        self.move_new_sessions(&mut sessions);
        let mut live: Vec<_> = sessions.iter().filter_map(Weak::upgrade).filter(|audit| audit.is_live()).collect();
        drop(sessions);
        live.sort_by_key(|audit| audit.number());
        live
    }

    /// Device time of all sessions. Never less than before: a session that ends is in neither sum for a moment.
    pub(super) fn device_time(&self) -> Duration {
        let live: Duration = self.sessions().iter().map(|audit| audit.device_time()).sum();
        let now = u64::try_from((live + self.counters.ended_device_time()).as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(self.device_nanos.fetch_max(now, Ordering::Relaxed).max(now))
    }

    /// The oldest and the newest sample of the last minute, and the counts of this moment. Asks no device: a GPU has locks that
    /// sessions take.
    pub(super) fn last_minute(&self) -> [Sample; 3] {
        let samples = lock(&self.samples);
        let [oldest, newest] = [samples.front(), samples.back()].map(|sample| sample.cloned().unwrap_or_default());
        drop(samples);
        [oldest, newest, self.sample(&[])]
    }

    fn sample(&self, devices: &[Arc<dyn Device>]) -> Sample {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Sample {
            at: self.uptime(),
            received: load(&self.counters.received),
            sent: load(&self.counters.sent),
            graphs: load(&self.counters.graphs),
            activity: devices.iter().map(|device| device.activity()).collect(),
        }
    }

    /// The facts of the last sample.
    pub(super) fn facts(&self) -> Arc<SampledFacts> {
        Arc::clone(&lock(&self.facts))
    }

    /// The thread that takes samples, the first after an interval: returns after [`Statistics::end`].
    pub(super) fn run(&self, devices: &[Arc<dyn Device>], logs: &LogLimits, facts: impl Fn() -> SampledFacts) {
        let mut ended = lock(&self.has_ended);
        loop {
            ended = self.ended.wait_timeout_while(ended, INTERVAL, |ended| !*ended).unpoisoned().0;
            if *ended {
                return;
            }
            drop(ended);
            self.take_sample(devices, facts());
            for audit in self.sessions() {
                if let Some(line) = audit.slow_client(SLOW_CLIENT) {
                    logs.log(audit.peer(), LogKind::SlowClient, format_args!("{line}"));
                }
            }
            ended = lock(&self.has_ended);
        }
    }

    pub(super) fn take_sample(&self, devices: &[Arc<dyn Device>], facts: SampledFacts) {
        let sample = self.sample(devices);
        let mut samples = lock(&self.samples);
        if samples.len() == SAMPLES {
            samples.pop_front();
        }
        samples.push_back(sample);
        drop(samples);
        *lock(&self.facts) = Arc::new(facts);
    }

    pub(super) fn end(&self) {
        *lock(&self.has_ended) = true;
        self.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::server::counters::{DataSource, EndReason};
    use crate::rpc::server::versions::ServedVersion;

    fn peer() -> PeerAddr {
        PeerAddr::Ip(([10, 0, 0, 5], 40_000).into())
    }

    #[test]
    fn sessions_are_listed_from_their_hello_to_their_end() {
        let statistics = Statistics::new();
        let numbers = || statistics.sessions().iter().map(|audit| audit.number()).collect::<Vec<_>>();
        let audits: Vec<_> = (0..3).map(|_| statistics.add_session(peer())).collect();
        assert_eq!(numbers(), [0; 0]);
        audits[2].begin_session(ServedVersion::DEFAULT_ORDER[0], peer());
        audits[0].begin_session(ServedVersion::DEFAULT_ORDER[0], peer());
        assert_eq!(numbers(), [1, 2]);
        audits[2].end_session(EndReason::Violation);
        audits[2].end_session(EndReason::Shutdown);
        assert_eq!(numbers(), [2]);
        assert_eq!(EndReason::ALL.iter().map(|&reason| statistics.counters.ended(reason)).sum::<u64>(), 1);
        assert_eq!(statistics.counters.ended(EndReason::Violation), 1);
        drop(audits);
        assert_eq!(numbers(), [0; 0]);
    }

    /// A reader that holds the lock delays no session.
    #[test]
    fn a_session_registers_while_another_thread_reads() {
        let statistics = Statistics::new();
        let reader = statistics.sessions.lock().unwrap();
        let audit = statistics.add_session(peer());
        drop(reader);
        audit.begin_session(ServedVersion::DEFAULT_ORDER[0], peer());
        assert_eq!(statistics.sessions().len(), 1);
    }

    /// Bytes of the handshake count once it is complete.
    #[test]
    fn bytes_count_for_the_server_if_there_is_a_session() {
        let statistics = Statistics::new();
        let [with, without] = [(); 2].map(|()| statistics.add_session(peer()));
        for audit in [&with, &without] {
            audit.count_received(100);
            audit.count_sent(10);
        }
        with.begin_session(ServedVersion::DEFAULT_ORDER[0], peer());
        with.count_received(1000);
        with.count_sent(500);
        let [_, _, now] = statistics.last_minute();
        assert_eq!((now.received, now.sent), (1100, 510));
    }

    #[test]
    fn a_line_tells_of_much_data_once() {
        let statistics = Statistics::new();
        let audit = statistics.add_session(peer());
        audit.begin_session(ServedVersion::DEFAULT_ORDER[0], peer());
        audit.count_data(DataSource::Client, 4 << 20);
        assert_eq!(audit.arrived_data(), None);
        audit.count_data(DataSource::Cache, 20 << 20);
        let line = audit.arrived_data().unwrap();
        let [head, tail] = [
            "data arrived: peer=10.0.0.5:40000 session=1 bytes=25165824 seconds=",
            " client_bytes=4194304 cache_bytes=20971520",
        ];
        assert!(line.starts_with(head) && line.ends_with(tail), "{line}");
        assert_eq!(audit.arrived_data(), None);
        audit.count_data(DataSource::Models, 17 << 20);
        assert!(audit.arrived_data().unwrap().ends_with(" models_bytes=17825792"));
    }

    #[test]
    fn a_slow_client_is_reported_once_for_each_pause() {
        let statistics = Statistics::new();
        let audit = statistics.add_session(peer());
        audit.begin_session(ServedVersion::DEFAULT_ORDER[0], peer());
        assert_eq!(audit.slow_client(Duration::ZERO), None);
        for _ in 0..2 {
            audit.set_writing(true);
            assert_eq!(audit.slow_client(Duration::from_secs(3600)), None);
            let line = audit.slow_client(Duration::ZERO).unwrap();
            assert!(
                line.starts_with("slow client: peer=10.0.0.5:40000 session=1 has not read what was sent for "),
                "{line}"
            );
            assert_eq!(audit.slow_client(Duration::ZERO), None);
            audit.set_writing(false);
        }
        audit.set_reading(true);
        assert!(audit.slow_client(Duration::ZERO).is_some());
    }
}

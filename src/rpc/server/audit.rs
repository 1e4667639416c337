//! Counters and activity of one session, and its lines in the log: one when it begins, one when data has arrived for its first graph,
//! and one when it ends (the audit line): docs/monitoring.md describes their fields.
//!
//! A connection whose HELLO never completed is no session and has no lines: otherwise a flood of connections would use up
//! the lines of sessions.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::counters::{Counters, DataSource, EndReason, command_name};
use super::versions::ServedVersion;
use crate::device::MemoryBudget;
use crate::rpc::transport::PeerAddr;
use crate::rpc::wire::HelloForm;

/// Bytes of tensors after which the next graph has a line about them. Inputs and outputs of tokens are smaller.
const MIN_REPORTED_DATA: u64 = 16 << 20;

/// The command of a session that waits for a request.
const IDLE: u16 = u16::MAX;

/// Counters of a session's use. The session's threads count; other threads may read.
pub(super) struct SessionAudit {
    peer: PeerAddr,
    start: Instant,
    /// The counters of the server.
    counters: Arc<Counters>,
    session: OnceLock<BegunSession>,
    is_extended: AtomicBool,
    is_over: AtomicBool,
    was_reset: AtomicBool,
    received: AtomicU64,
    sent: AtomicU64,
    graphs: AtomicU64,
    /// Bytes of tensors by source: all, and as many as the log has reported.
    data: [AtomicU64; DataSource::ALL.len()],
    reported_data: [AtomicU64; DataSource::ALL.len()],
    /// Nanoseconds from `start` until the first and the last of the bytes that the log has not reported.
    data_times: [AtomicU64; 2],
    budget: OnceLock<Arc<MemoryBudget>>,
    /// Number of the command that is served, or [`IDLE`].
    command: AtomicU16,
    /// Nanoseconds from `start` until this command or pause began.
    command_since: AtomicU64,
    /// Nanoseconds from `start` until a read within a message or a write began; 0: none is under way.
    reading_since: AtomicU64,
    writing_since: AtomicU64,
    /// Whether a line has told that the client is slow.
    is_reported_slow: AtomicBool,
}

/// A session whose HELLO is complete.
struct BegunSession {
    /// From 1.
    number: u64,
    /// The version that HELLO was answered with.
    protocol: ServedVersion,
    peer: PeerAddr,
}

/// What a session does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Activity {
    /// It waits for a request.
    Idle,
    /// It waits for more bytes of a message.
    Receiving,
    /// The client has yet to read bytes that were sent.
    Sending,
    /// It serves a request with this name.
    Serving(&'static str),
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Activity::Idle => "idle",
            Activity::Receiving => "receiving",
            Activity::Sending => "sending",
            Activity::Serving(command) => command,
        })
    }
}

impl SessionAudit {
    /// The counters of a new connection.
    pub(super) fn new(peer: PeerAddr, counters: &Arc<Counters>) -> Arc<SessionAudit> {
        Arc::new(SessionAudit {
            peer,
            start: Instant::now(),
            counters: Arc::clone(counters),
            session: OnceLock::new(),
            is_extended: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            was_reset: AtomicBool::new(false),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            graphs: AtomicU64::new(0),
            data: Default::default(),
            reported_data: Default::default(),
            data_times: Default::default(),
            budget: OnceLock::new(),
            command: AtomicU16::new(IDLE),
            command_since: AtomicU64::new(0),
            reading_since: AtomicU64::new(0),
            writing_since: AtomicU64::new(0),
            is_reported_slow: AtomicBool::new(false),
        })
    }

    /// The handshake is complete: the connection is a session of the client at `peer`.
    pub(super) fn begin_session(&self, protocol: ServedVersion, peer: PeerAddr) {
        let number = self.counters.sessions.fetch_add(1, Ordering::Relaxed) + 1;
        // Until now, only the session's thread has counted.
        self.counters.received.fetch_add(self.received(), Ordering::Relaxed);
        self.counters.sent.fetch_add(self.sent(), Ordering::Relaxed);
        let _ = self.session.set(BegunSession { number, protocol, peer });
    }

    /// Whether the handshake was completed.
    pub(super) fn is_session(&self) -> bool {
        self.session.get().is_some()
    }

    /// The session has ended.
    pub(super) fn end_session(&self, reason: EndReason) {
        if !self.is_over.swap(true, Ordering::Relaxed) {
            self.counters.count_end(reason, self.device_time());
        }
    }

    /// Whether the session runs: it has begun, and has not ended.
    pub(super) fn is_live(&self) -> bool {
        self.is_session() && !self.is_over.load(Ordering::Relaxed)
    }

    /// The client uses the extension.
    pub(super) fn set_extended(&self) {
        self.is_extended.store(true, Ordering::Relaxed);
    }

    /// The budget in which the session reserves device memory.
    pub(super) fn set_budget(&self, budget: &Arc<MemoryBudget>) {
        let _ = self.budget.set(Arc::clone(budget));
    }

    /// The connection was reset while the session waited for a request.
    pub(super) fn set_reset(&self) {
        self.was_reset.store(true, Ordering::Relaxed);
    }

    /// The reason of an end without a failure.
    pub(super) fn reason_of_close(&self) -> EndReason {
        if self.was_reset.load(Ordering::Relaxed) { EndReason::ClientReset } else { EndReason::ClientClosed }
    }

    pub(super) fn count_received(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
        if self.is_session() {
            self.counters.received.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    pub(super) fn count_sent(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
        if self.is_session() {
            self.counters.sent.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    /// Counts a graph that was submitted to a device.
    pub(super) fn count_graph(&self) {
        self.graphs.fetch_add(1, Ordering::Relaxed);
        self.counters.graphs.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts bytes of tensors.
    pub(super) fn count_data(&self, source: DataSource, bytes: u64) {
        let now = self.now();
        let _ = self.data_times[0].compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        self.data_times[1].store(now, Ordering::Relaxed);
        self.data[source as usize].fetch_add(bytes, Ordering::Relaxed);
        self.counters.count_data(source, bytes);
    }

    /// Counts a lookup in the tensor cache.
    pub(super) fn count_cache_lookup(&self, found: bool) {
        self.counters.count_cache_lookup(found);
    }

    /// A line about the bytes of tensors that have arrived since the last such line, if they are many.
    pub(super) fn arrived_data(&self) -> Option<String> {
        let total = |of: &[AtomicU64]| of.iter().map(|bytes| bytes.load(Ordering::Relaxed)).sum::<u64>();
        let bytes = total(&self.data).saturating_sub(total(&self.reported_data));
        if bytes < MIN_REPORTED_DATA {
            return None;
        }
        let [first, last] = [0, 1].map(|i| self.data_times[i].load(Ordering::Relaxed));
        self.data_times[0].store(0, Ordering::Relaxed);
        let seconds = Duration::from_nanos(last.saturating_sub(first)).as_secs_f64();
        let mut line = format!("data arrived: {} bytes={bytes} seconds={seconds:.3}", self.who());
        for &source in DataSource::ALL {
            let now = self.data[source as usize].load(Ordering::Relaxed);
            let before = self.reported_data[source as usize].swap(now, Ordering::Relaxed);
            if now > before {
                line.push_str(&format!(" {}_bytes={}", source.name(), now - before));
            }
        }
        Some(line)
    }

    /// The session reads requests again, or serves one with this number.
    pub(super) fn set_command(&self, command: Option<u8>) {
        let now = self.now();
        let before = self.command.swap(command.map_or(IDLE, u16::from), Ordering::Relaxed);
        let since = self.command_since.swap(now, Ordering::Relaxed);
        if let (Ok(command), true) = (u8::try_from(before), self.is_session()) {
            let time = Duration::from_nanos(now.saturating_sub(since));
            if self.has_current_numbers() {
                self.counters.requests.count(command, time);
            }
        }
    }

    /// A read within a message begins or ends.
    pub(super) fn set_reading(&self, begins: bool) {
        self.set_waiting(&self.reading_since, begins);
    }

    /// A write begins or ends.
    pub(super) fn set_writing(&self, begins: bool) {
        self.set_waiting(&self.writing_since, begins);
    }

    fn set_waiting(&self, since: &AtomicU64, begins: bool) {
        since.store(if begins { self.now().max(1) } else { 0 }, Ordering::Relaxed);
        if !begins && self.is_reported_slow.load(Ordering::Relaxed) {
            self.is_reported_slow.store(false, Ordering::Relaxed);
        }
    }

    /// What the session does, and for how long it has done it.
    pub(super) fn activity(&self) -> (Activity, Duration) {
        let now = self.now();
        let waiting = |since: &AtomicU64, activity| match since.load(Ordering::Relaxed) {
            0 => None,
            since => Some((activity, since)),
        };
        let sending = || waiting(&self.writing_since, Activity::Sending);
        let receiving = || waiting(&self.reading_since, Activity::Receiving);
        let (activity, since) = sending().or_else(receiving).unwrap_or_else(|| {
            let command = u8::try_from(self.command.load(Ordering::Relaxed)).ok();
            let activity = command.map_or(Activity::Idle, |number| {
                let name = if self.has_current_numbers() { command_name(number) } else { None };
                Activity::Serving(name.unwrap_or("a request"))
            });
            (activity, self.command_since.load(Ordering::Relaxed))
        });
        (activity, Duration::from_nanos(now.saturating_sub(since)))
    }

    /// A line about a client that has sent or read nothing for a `limit`, in the middle of a message. Once for each pause.
    pub(super) fn slow_client(&self, limit: Duration) -> Option<String> {
        let (activity, time) = self.activity();
        let what = match activity {
            Activity::Receiving => "has sent nothing in the middle of a message",
            Activity::Sending => "has not read what was sent",
            Activity::Idle | Activity::Serving(_) => return None,
        };
        if time < limit || self.is_reported_slow.swap(true, Ordering::Relaxed) {
            return None;
        }
        Some(format!("slow client: {} {what} for {:.0} s", self.who(), time.as_secs_f64()))
    }

    /// Whether commands have today's numbers: without HELLO they had others.
    fn has_current_numbers(&self) -> bool {
        self.session.get().is_none_or(|session| session.protocol.hello_form() != HelloForm::Absent)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// The client, which has proved its key once there is a session.
    pub(super) fn peer(&self) -> PeerAddr {
        self.session.get().map_or(self.peer, |session| session.peer)
    }

    /// The number of the session, from 1; 0 if there is none.
    pub(super) fn number(&self) -> u64 {
        self.session.get().map_or(0, |session| session.number)
    }

    pub(super) fn protocol(&self) -> String {
        self.session.get().map_or_else(|| "none".to_owned(), |session| session.protocol.to_string())
    }

    pub(super) fn is_extended(&self) -> bool {
        self.is_extended.load(Ordering::Relaxed)
    }

    pub(super) fn age(&self) -> Duration {
        self.start.elapsed()
    }

    pub(super) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    pub(super) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    pub(super) fn graphs(&self) -> u64 {
        self.graphs.load(Ordering::Relaxed)
    }

    pub(super) fn budget(&self) -> Option<&MemoryBudget> {
        self.budget.get().map(|budget| &**budget)
    }

    pub(super) fn device_time(&self) -> Duration {
        self.budget().map_or(Duration::ZERO, MemoryBudget::device_time)
    }

    /// The session in a line.
    fn who(&self) -> String {
        format!("peer={} session={}", self.peer(), self.number())
    }

    /// The line of the beginning.
    pub(super) fn first_line(&self) -> String {
        format!("session started: {} protocol={}", self.who(), self.protocol())
    }

    /// The audit line. `detail`: the text of the failure, if there was one.
    pub(super) fn line(&self, reason: EndReason, detail: Option<&dyn fmt::Display>) -> String {
        let line = format!(
            "session ended: {} protocol={} extended={} seconds={:.3} received_bytes={} sent_bytes={} graphs={} \
             device_seconds={:.6} peak_memory_bytes={} end={}",
            self.who(),
            self.protocol(),
            if self.is_extended() { "yes" } else { "no" },
            self.age().as_secs_f64(),
            self.received(),
            self.sent(),
            self.graphs(),
            self.device_time().as_secs_f64(),
            self.budget().map_or(0, |budget| budget.peak()),
            reason.name()
        );
        match detail {
            // In quotes and escaped: a detail cannot be taken for a field.
            Some(detail) => format!("{line} detail={:?}", detail.to_string()),
            None => line,
        }
    }
}

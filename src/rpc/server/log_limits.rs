//! Limited log lines: each line that a client or the network can cause takes a token of two buckets, that of its kind and its
//! source (a tenant, loopback, or the server itself) and that of its kind in the whole process. Without a token the line is left
//! out and counted, and the next line of its kind and source says how many were. Otherwise a client fills the server's disk at
//! the speed of its own messages: 19 MB/s by allocations that are refused.
//!
//! - **Nothing is lost.** A count of lines that were left out is appended to the next line, or is a line of its own once the
//!   bucket has a token again ([`LogLimits::report_left_out`], at most a minute later), or is in the totals at the server's end.
//! - **Nothing grows.** Above [`MAX_BUCKETS`] sources and kinds, further ones share a bucket per kind.
//! - **One line is one line.** Control characters, line separators and marks of direction are escaped, and a line ends after
//!   [`MAX_LINE_BYTES`]: the texts of errors quote names that clients choose.
//!
//! Not limited, because no client can cause any number of them: the lines of the start, the drain and the end; each problem of a
//! file in the folder of models, once while it persists; each op that falls back to another device, once. Lines at the levels
//! debug and trace are not limited either: they are off by default. A panic is a bug: its line here is limited, and the standard
//! library's hook prints another one to standard error, which only the program could replace.

use crate::poison::lock;
use std::collections::HashMap;
use std::fmt::{self, Write};
use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use log::Level;

use super::limits::Config;
use super::tenants::Tenant;
use crate::printable::breaks_lines;
use crate::rpc::transport::PeerAddr;

/// Tokens of the process, as a multiple of the tokens of one source.
const PROCESS_FACTOR: u32 = 4;

/// Limit of the buckets of sources and kinds. Beyond it, further ones share a bucket per kind.
const MAX_BUCKETS: usize = 4096;

/// Limit of a line in bytes, before the count of lines that were left out.
const MAX_LINE_BYTES: usize = 1024;

/// Shortest time between two passes over all buckets, so that a flood of connections does not pay for one each.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Generates from one table the kinds of lines, with the level, the weight and the name of each.
macro_rules! log_kinds {
    ($($(#[$doc:meta])* $kind:ident: $level:ident, $weight:literal, $name:literal;)*) => {
        /// The subject of a line: each kind has buckets of its own, so that a flood of one kind hides no line of another.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(crate) enum LogKind {
            $($(#[$doc])* $kind,)*
        }

        /// All kinds, in the order of the enum.
        const KINDS: &[LogKind] = &[$(LogKind::$kind),*];

        impl LogKind {
            /// The level of its lines.
            const fn level(self) -> Level {
                match self { $(LogKind::$kind => Level::$level,)* }
            }

            /// How many times the tokens of an ordinary kind it has.
            const fn weight(self) -> u32 {
                match self { $(LogKind::$kind => $weight,)* }
            }

            /// Its name in metrics, in CamelCase.
            const fn identifier(self) -> &'static str {
                match self { $(LogKind::$kind => stringify!($kind),)* }
            }

            /// Names its lines in the count of lines that were left out.
            const fn name(self) -> &'static str {
                match self { $(LogKind::$kind => $name,)* }
            }
        }
    };
}

log_kinds! {
    /// The system has no descriptor or memory for a connection.
    AcceptError: Error, 1, "connections that could not be accepted";
    ThreadStart: Error, 1, "threads that could not be started";
    /// A bug in fanout.
    Panic: Error, 1, "panics";
    /// A client that --allow does not list.
    RejectedAddress: Warn, 1, "clients whose addresses are not allowed";
    RejectedDraining: Info, 1, "clients rejected by the drain";
    RejectedFull: Warn, 1, "clients rejected by the limits of connections";
    RejectedMemory: Warn, 1, "clients rejected by the limit of host memory";
    RejectedAfterFaults: Warn, 1, "clients rejected after faults of their kernels";
    RejectedHandshake: Warn, 1, "clients closed by the limits of handshakes";
    /// A connection that ended badly before its HELLO was complete.
    BadConnection: Warn, 1, "connections that ended badly before their HELLO";
    SessionFailure: Warn, 1, "failed sessions";
    /// The line of the beginning.
    SessionStart: Info, 20, "sessions that have started";
    DataArrived: Info, 20, "data that has arrived";
    /// A client that sends or reads nothing in the middle of a message.
    SlowClient: Warn, 1, "slow clients";
    /// The audit line. Its weight lets a hundred clients of one address leave at once.
    SessionEnd: Info, 20, "sessions that have ended";
    RefusedAllocation: Info, 1, "refused allocations";
    RefusedQueue: Warn, 1, "refused queues";
    RefusedGraph: Info, 1, "refused graphs";
    RefusedLoad: Info, 1, "refused loads from disk";
    LoadTotals: Info, 1, "sessions that have loaded from disk";
    /// A server of `--peer` does not prove its key, or does not accept this server's.
    UntrustedPeer: Warn, 1, "servers that were not trusted";
    RefusedCollective: Warn, 1, "COMM_INITs that have connected no servers";
    /// Clients of another version of the protocol hang up after HELLO.
    VersionHangUp: Info, 1, "clients that hung up after HELLO";
    CacheInvalid: Warn, 1, "invalid entries of the cache";
    CacheFailure: Warn, 1, "failures of the cache";
    CacheEviction: Info, 1, "evicted entries of the cache";
    /// Of a relay: the server behind it cannot be reached, refuses the key, or is lost.
    RelayFailure: Warn, 1, "connections to servers that failed";
    RelayServerClosed: Info, 1, "connections that their server has closed";
}

/// The cause of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum LogSource {
    /// A client, by its tenant.
    Tenant(Tenant),
    /// Clients without a tenant: of loopback, or of a transport without IP addresses. They share their buckets.
    Loopback,
    /// The server, where no client is known to be the cause.
    Server,
}

impl fmt::Display for LogSource {
    /// Appended to the count of lines.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LogSource::Tenant(Tenant::Key(name)) => write!(f, " of {name}"),
            LogSource::Tenant(Tenant::Address(ip @ IpAddr::V4(_))) => write!(f, " of {ip}"),
            LogSource::Tenant(Tenant::Address(ip @ IpAddr::V6(_))) => write!(f, " of {ip}/64"),
            LogSource::Loopback => f.write_str(" of loopback"),
            LogSource::Server => Ok(()),
        }
    }
}

/// A token bucket by the time at which it is full again (GCRA), and the number of lines that found no token in it.
#[derive(Clone, Copy, Default)]
struct TokenBucket {
    /// Since [`LogLimits::start`].
    full_at: Duration,
    left_out: u64,
}

impl TokenBucket {
    fn has_token(&self, rate: TokenRate, now: Duration) -> bool {
        self.full_at.saturating_sub(now) <= rate.interval.saturating_mul(rate.burst.saturating_sub(1))
    }

    fn take(&mut self, rate: TokenRate, now: Duration) {
        self.full_at = self.full_at.max(now).saturating_add(rate.interval);
    }

    /// Whether dropping it changes nothing.
    fn is_idle(&self, now: Duration) -> bool {
        self.left_out == 0 && self.full_at <= now
    }
}

/// How many tokens a full bucket has, and how long one takes to come back.
#[derive(Clone, Copy)]
struct TokenRate {
    burst: u32,
    interval: Duration,
}

impl TokenRate {
    fn times(self, factor: u32) -> TokenRate {
        TokenRate { burst: self.burst.saturating_mul(factor), interval: self.interval / factor }
    }
}

/// Lines of one kind that were left out before a line that is logged.
#[derive(Debug, PartialEq, Eq)]
struct LeftOut {
    kind: LogKind,
    /// Lines that found no token in the bucket of this source.
    of_source: (LogSource, u64),
    /// Lines of any source that found none in that of the process.
    of_all: u64,
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, (source, count)) = (self.kind.name(), self.of_source);
        match (count, self.of_all) {
            (0, 0) => Ok(()),
            (count, 0) => write!(f, "left out: {count} more lines about {name}{source}"),
            (0, all) => write!(f, "left out: {all} more lines about {name} of several addresses"),
            (count, all) => write!(
                f,
                "left out: {count} more lines about {name}{source}, and {all} more lines about {name} of several addresses"
            ),
        }
    }
}

#[derive(Default)]
struct LogLimitsState {
    by_source: HashMap<(LogSource, LogKind), TokenBucket>,
    /// The buckets of all sources beyond [`MAX_BUCKETS`], by kind.
    overflow: [TokenBucket; KINDS.len()],
    /// By kind.
    process: [TokenBucket; KINDS.len()],
    next_report: Duration,
}

/// The buckets of a server, or of a relay.
pub(crate) struct LogLimits {
    start: Instant,
    /// The rate of an ordinary kind of line from one source.
    rate: TokenRate,
    /// Whether addresses of loopback are sources of their own: [`Config::loopback_tenants`](super::Config::loopback_tenants).
    with_loopback: bool,
    /// By kind: lines, also those that were left out.
    counts: [AtomicU64; KINDS.len()],
    state: Mutex<LogLimitsState>,
}

impl LogKind {
    /// Whether its lines are about clients or requests that were refused.
    pub(super) fn is_refusal(self) -> bool {
        ["Rejected", "Refused", "UntrustedPeer"].iter().any(|prefix| self.identifier().starts_with(prefix))
    }

    /// Its name in metrics: `rejected-full`.
    pub(super) fn label(self) -> String {
        let mut label = String::new();
        for (at, c) in self.identifier().char_indices() {
            if at > 0 && c.is_ascii_uppercase() {
                label.push('-');
            }
            label.push(c.to_ascii_lowercase());
        }
        label
    }
}

impl LogLimits {
    /// The limits that a configuration sets.
    pub(crate) fn new(config: &Config) -> LogLimits {
        LogLimits {
            start: Instant::now(),
            rate: TokenRate { burst: config.log_burst, interval: config.log_interval },
            with_loopback: config.loopback_tenants,
            counts: std::array::from_fn(|_| AtomicU64::new(0)),
            state: Mutex::default(),
        }
    }

    /// Logs a line that the client at `peer` has caused, or counts it as left out. `text` is formatted only if it is logged.
    pub(crate) fn log(&self, peer: PeerAddr, kind: LogKind, text: fmt::Arguments<'_>) {
        self.log_of(self.source(peer), kind, text);
    }

    /// As [`LogLimits::log`], where no client is known to be the cause.
    pub(crate) fn log_server(&self, kind: LogKind, text: fmt::Arguments<'_>) {
        self.log_of(LogSource::Server, kind, text);
    }

    /// Each kind with the number of its lines, also of those that were left out.
    pub(super) fn counts(&self) -> impl Iterator<Item = (LogKind, u64)> {
        KINDS.iter().zip(&self.counts).map(|(&kind, count)| (kind, count.load(Ordering::Relaxed)))
    }

    fn source(&self, peer: PeerAddr) -> LogSource {
        Tenant::of(peer, self.with_loopback).map_or(LogSource::Loopback, LogSource::Tenant)
    }

    fn log_of(&self, source: LogSource, kind: LogKind, text: fmt::Arguments<'_>) {
        self.counts[kind as usize].fetch_add(1, Ordering::Relaxed);
        let Some(left_out) = self.admit(source, kind, self.start.elapsed()) else { return };
        let line = line_text(text);
        if left_out.of_source.1 + left_out.of_all == 0 {
            log::log!(kind.level(), "{line}");
        } else {
            log::log!(kind.level(), "{line} ({left_out})");
        }
    }

    /// Takes the tokens of a line. `None`: the line is left out, and is counted.
    fn admit(&self, source: LogSource, kind: LogKind, now: Duration) -> Option<LeftOut> {
        let rate = self.rate.times(kind.weight());
        let state = &mut *lock(&self.state);
        let is_full = state.by_source.len() >= MAX_BUCKETS && !state.by_source.contains_key(&(source, kind));
        let bucket = if is_full {
            &mut state.overflow[kind as usize]
        } else {
            state.by_source.entry((source, kind)).or_default()
        };
        let process = &mut state.process[kind as usize];
        let process_rate = rate.times(PROCESS_FACTOR);
        if !bucket.has_token(rate, now) {
            bucket.left_out += 1;
            return None;
        }
        if !process.has_token(process_rate, now) {
            process.left_out += 1;
            return None;
        }
        bucket.take(rate, now);
        process.take(process_rate, now);
        // The lines of the shared bucket were not of this source alone.
        let of_bucket = std::mem::take(&mut bucket.left_out);
        let of_process = std::mem::take(&mut process.left_out);
        let (of_source, of_all) = if is_full { (0, of_bucket + of_process) } else { (of_bucket, of_process) };
        Some(LeftOut { kind, of_source: (source, of_source), of_all })
    }

    /// Logs counts of lines that were left out whose buckets have tokens again. To be called often: passes over all buckets at
    /// most once in [`REPORT_INTERVAL`].
    pub(crate) fn report_left_out(&self) {
        for left_out in self.due_reports(self.start.elapsed()) {
            log::log!(left_out.kind.level(), "{left_out}");
        }
    }

    /// Takes the counts that are to be logged at `now`, with a token each, and drops the idle buckets.
    fn due_reports(&self, now: Duration) -> Vec<LeftOut> {
        let mut due = Vec::new();
        let state = &mut *lock(&self.state);
        if now < state.next_report {
            return due;
        }
        state.next_report = now + REPORT_INTERVAL;
        for (&(source, kind), bucket) in &mut state.by_source {
            let rate = self.rate.times(kind.weight());
            let (process, process_rate) = (&mut state.process[kind as usize], rate.times(PROCESS_FACTOR));
            if bucket.left_out > 0 && bucket.has_token(rate, now) && process.has_token(process_rate, now) {
                bucket.take(rate, now);
                process.take(process_rate, now);
                let of_source = (source, std::mem::take(&mut bucket.left_out));
                due.push(LeftOut { kind, of_source, of_all: std::mem::take(&mut process.left_out) });
            }
        }
        state.by_source.retain(|_, bucket| !bucket.is_idle(now));
        for &kind in KINDS {
            let rate = self.rate.times(kind.weight()).times(PROCESS_FACTOR);
            let (process, overflow) = (&mut state.process[kind as usize], &mut state.overflow[kind as usize]);
            if process.left_out + overflow.left_out > 0 && process.has_token(rate, now) {
                process.take(rate, now);
                let of_all = std::mem::take(&mut process.left_out) + std::mem::take(&mut overflow.left_out);
                due.push(LeftOut { kind, of_source: (LogSource::Server, 0), of_all });
            }
        }
        due
    }

    /// Logs all counts that were not logged yet, one line for each kind. For the server's end.
    pub(crate) fn report_totals(&self) {
        for (kind, count) in self.take_totals() {
            log::log!(kind.level(), "left out: {count} more lines about {}, until the server's end", kind.name());
        }
    }

    /// Takes the counts of all buckets, by kind.
    pub(super) fn take_totals(&self) -> Vec<(LogKind, u64)> {
        let state = std::mem::take(&mut *lock(&self.state));
        let total = |&kind: &LogKind| {
            let of_sources =
                state.by_source.iter().filter(|((_, of), _)| *of == kind).map(|(_, bucket)| bucket.left_out);
            let shared = [state.process[kind as usize].left_out, state.overflow[kind as usize].left_out];
            (kind, of_sources.chain(shared).sum::<u64>())
        };
        KINDS.iter().map(total).filter(|&(_, count)| count > 0).collect()
    }
}

/// The text of a line: escaped, and cut off after [`MAX_LINE_BYTES`].
fn line_text(text: fmt::Arguments<'_>) -> String {
    let mut line = EscapedLine { text: String::new(), is_cut: false };
    // Fails at the limit, so that a long text is not formatted to its end.
    let _ = line.write_fmt(text);
    if line.is_cut {
        line.text.push('…');
    }
    line.text
}

/// Collects a line.
struct EscapedLine {
    text: String,
    is_cut: bool,
}

impl Write for EscapedLine {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            if self.text.len() >= MAX_LINE_BYTES {
                self.is_cut = true;
                return Err(fmt::Error);
            }
            if breaks_lines(c) { self.text.extend(c.escape_default()) } else { self.text.push(c) }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

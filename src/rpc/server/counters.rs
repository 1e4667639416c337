//! Counters of a server since its start. Sessions add to them and reports read them without a lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::rpc::wire::RpcCommand;
use crate::rpc::wire::ext::ExtCommand;

/// Generates from one table the reasons and their names.
macro_rules! names {
    ($(#[$of_enum:meta])* $name:ident, $what:literal: $($(#[$doc:meta])* $variant:ident: $text:literal,)*) => {
        $(#[$of_enum])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum $name {
            $($(#[$doc])* $variant,)*
        }

        impl $name {
            /// All, in the order of the enum.
            pub(super) const ALL: &[$name] = &[$($name::$variant),*];

            #[doc = $what]
            pub(super) const fn name(self) -> &'static str {
                match self { $($name::$variant => $text,)* }
            }
        }
    };
}

names! {
    /// Why a session ended.
    EndReason, "Its name in the audit line and in metrics.":
    /// The client closed its connection between two messages.
    ClientClosed: "client-closed",
    /// The client closed its connection in the middle of a message, or while the server worked for it.
    ClientGone: "client-gone",
    /// The client's process was killed, or its machine no longer responds.
    ClientReset: "client-reset",
    /// The list of allowed keys has changed: it no longer allows the client, or gives it other devices.
    KeyChanged: "key-changed",
    /// An invalid request.
    Violation: "violation",
    /// A deadline has passed: of a message, of a reply, or of the pause between requests.
    Timeout: "timeout",
    /// The host memory of clients is used up.
    HostMemory: "host-memory",
    /// A device has failed.
    Device: "device",
    /// The system has failed to read or to write.
    Connection: "connection",
    /// The grace period of a drain is over.
    Drain: "drain",
    Shutdown: "shutdown",
    /// A bug in fanout.
    Panic: "panic",
}

names! {
    /// Where the bytes of tensors come from.
    DataSource, "Its name in the log and in metrics.":
    /// The client has sent them.
    Client: "client",
    /// The tensor cache.
    Cache: "cache",
    /// A model file of the server.
    Models: "models",
    /// Another server.
    Peer: "peer",
}

/// The counters.
#[derive(Default)]
pub(super) struct Counters {
    /// Sessions that have begun.
    pub(super) sessions: AtomicU64,
    ended: [AtomicU64; EndReason::ALL.len()],
    /// Bytes of sessions, from and to their clients, with all headers.
    pub(super) received: AtomicU64,
    pub(super) sent: AtomicU64,
    /// Graphs that were submitted to devices.
    pub(super) graphs: AtomicU64,
    data: [AtomicU64; DataSource::ALL.len()],
    /// Device time of the sessions that have ended, in nanoseconds.
    ended_device_nanos: AtomicU64,
    /// Lookups in the tensor cache, by whether it had the data.
    cache_lookups: [AtomicU64; 2],
    pub(super) requests: RequestTimes,
}

impl Counters {
    pub(super) fn count_end(&self, reason: EndReason, device_time: Duration) {
        self.ended[reason as usize].fetch_add(1, Ordering::Relaxed);
        add_nanos(&self.ended_device_nanos, device_time);
    }

    /// Number of sessions that have ended for a reason.
    pub(super) fn ended(&self, reason: EndReason) -> u64 {
        self.ended[reason as usize].load(Ordering::Relaxed)
    }

    /// Device time of the sessions that have ended.
    pub(super) fn ended_device_time(&self) -> Duration {
        Duration::from_nanos(self.ended_device_nanos.load(Ordering::Relaxed))
    }

    pub(super) fn count_data(&self, source: DataSource, bytes: u64) {
        self.data[source as usize].fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes of tensors from a source.
    pub(super) fn data(&self, source: DataSource) -> u64 {
        self.data[source as usize].load(Ordering::Relaxed)
    }

    pub(super) fn count_cache_lookup(&self, found: bool) {
        self.cache_lookups[usize::from(found)].fetch_add(1, Ordering::Relaxed);
    }

    /// Number of lookups in the tensor cache that have found the data, or not.
    pub(super) fn cache_lookups(&self, found: bool) -> u64 {
        self.cache_lookups[usize::from(found)].load(Ordering::Relaxed)
    }
}

fn add_nanos(to: &AtomicU64, time: Duration) {
    to.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// Upper bounds of the buckets of request times, in microseconds. Longer ones are in a bucket of their own.
const BOUNDS_US: [u64; 14] =
    [10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000];

/// Requests by their time and the number of their command, which ggml's protocol and the extension do not share.
pub(super) struct RequestTimes(Box<[TimesOfCommand]>);

impl Default for RequestTimes {
    fn default() -> RequestTimes {
        RequestTimes((0..=u8::MAX).map(|_| TimesOfCommand::default()).collect())
    }
}

#[derive(Default)]
struct TimesOfCommand {
    counts: [AtomicU64; BOUNDS_US.len() + 1],
    nanos: AtomicU64,
}

/// The times of one command's requests.
#[derive(Debug, PartialEq)]
pub(super) struct RequestHistogram {
    pub(super) command: &'static str,
    pub(super) total: Duration,
    /// Upper bounds in seconds, the last one infinite, with the number of requests in each bucket alone.
    pub(super) buckets: Vec<(f64, u64)>,
}

impl RequestTimes {
    /// Counts a request: the time from its header until the next request is read.
    pub(super) fn count(&self, command: u8, time: Duration) {
        let Some(of) = self.0.get(usize::from(command)) else { return };
        let bucket = BOUNDS_US.partition_point(|&bound| u128::from(bound) * 1000 < time.as_nanos());
        of.counts[bucket].fetch_add(1, Ordering::Relaxed);
        add_nanos(&of.nanos, time);
    }

    /// The commands that were requested, in the order of their numbers.
    pub(super) fn histograms(&self) -> Vec<RequestHistogram> {
        let bounds = || BOUNDS_US.iter().map(|&us| us as f64 / 1e6).chain([f64::INFINITY]);
        let of_command = |(number, of): (usize, &TimesOfCommand)| {
            let command = command_name(u8::try_from(number).ok()?)?;
            let counts = of.counts.iter().map(|count| count.load(Ordering::Relaxed));
            let buckets: Vec<_> = bounds().zip(counts).collect();
            let total = Duration::from_nanos(of.nanos.load(Ordering::Relaxed));
            buckets.iter().any(|&(_, count)| count > 0).then_some(RequestHistogram { command, total, buckets })
        };
        self.0.iter().enumerate().filter_map(of_command).collect()
    }
}

/// The name of a command of ggml's protocol or of the extension.
pub(super) fn command_name(number: u8) -> Option<&'static str> {
    let of_ggml = RpcCommand::from_wire(number).map(RpcCommand::name);
    of_ggml.or_else(|_| ExtCommand::from_wire(number).map(ExtCommand::name)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_in_the_bucket_with_the_next_higher_bound() {
        let times = RequestTimes::default();
        let us = [0, 10, 11, 30, 2_999, 3_000, 30_000_000, 30_000_001, u64::MAX / 2000];
        for &us in &us {
            times.count(RpcCommand::SetTensor as u8, Duration::from_micros(us));
        }
        times.count(ExtCommand::Ping as u8, Duration::from_nanos(10_001));
        times.count(99, Duration::ZERO);
        let histograms = times.histograms();
        let [of_ggml, of_extension] = &histograms[..] else { panic!("{histograms:?}") };
        assert_eq!([of_ggml.command, of_extension.command], ["SET_TENSOR", "PING"]);
        let filled = |of: &RequestHistogram| -> Vec<_> { of.buckets.iter().copied().filter(|b| b.1 > 0).collect() };
        assert_eq!(filled(of_ggml), [(1e-5, 2), (3e-5, 2), (3e-3, 2), (30.0, 1), (f64::INFINITY, 2)]);
        assert_eq!((filled(of_extension), of_extension.total), (vec![(3e-5, 1)], Duration::from_nanos(10_001)));
    }
}

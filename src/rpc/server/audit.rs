//! Audit line: one line when a session ends, with what the session has used and why it ended. docs/ARCHITECTURE.md describes
//! its fields.
//!
//! A connection whose HELLO never completed is no session and has no audit line: otherwise a flood of connections would use up
//! the lines of sessions.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::versions::ServedVersion;
use crate::device::MemoryBudget;
use crate::rpc::transport::PeerAddr;

/// Generates from one table the reasons and their names.
macro_rules! end_reasons {
    ($($(#[$doc:meta])* $reason:ident: $name:literal,)*) => {
        /// Why a session ended.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum EndReason {
            $($(#[$doc])* $reason,)*
        }

        impl EndReason {
            /// Its name in the line.
            const fn name(self) -> &'static str {
                match self { $(EndReason::$reason => $name,)* }
            }
        }
    };
}

end_reasons! {
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

/// What a session has used. Its threads count; the line is written at the end.
pub(super) struct SessionAudit {
    start: Instant,
    /// The version that HELLO was answered with; unset until there is a session.
    protocol: OnceLock<ServedVersion>,
    is_extended: AtomicBool,
    was_reset: AtomicBool,
    received: AtomicU64,
    sent: AtomicU64,
    graphs: AtomicU64,
    budget: OnceLock<Arc<MemoryBudget>>,
}

impl SessionAudit {
    /// Of a new connection.
    pub(super) fn new() -> Arc<SessionAudit> {
        Arc::new(SessionAudit {
            start: Instant::now(),
            protocol: OnceLock::new(),
            is_extended: AtomicBool::new(false),
            was_reset: AtomicBool::new(false),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            graphs: AtomicU64::new(0),
            budget: OnceLock::new(),
        })
    }

    /// The handshake is complete: the connection is a session.
    pub(super) fn begin_session(&self, answered: ServedVersion) {
        let _ = self.protocol.set(answered);
    }

    /// Whether the handshake was completed.
    pub(super) fn is_session(&self) -> bool {
        self.protocol.get().is_some()
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
    }

    pub(super) fn count_sent(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts a graph that was submitted to a device.
    pub(super) fn count_graph(&self) {
        self.graphs.fetch_add(1, Ordering::Relaxed);
    }

    /// The line. `detail`: the text of the failure, if there was one.
    pub(super) fn line(&self, peer: PeerAddr, reason: EndReason, detail: Option<&dyn fmt::Display>) -> String {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let protocol = self.protocol.get().map_or_else(|| "none".to_owned(), ServedVersion::to_string);
        let extended = if self.is_extended.load(Ordering::Relaxed) { "yes" } else { "no" };
        let line = format!(
            "session ended: peer={peer} protocol={protocol} extended={extended} seconds={:.3} received_bytes={} sent_bytes={} \
             graphs={} device_seconds={:.6} peak_memory_bytes={} end={}",
            self.start.elapsed().as_secs_f64(),
            load(&self.received),
            load(&self.sent),
            load(&self.graphs),
            self.budget.get().map_or(0.0, |budget| budget.device_time().as_secs_f64()),
            self.budget.get().map_or(0, |budget| budget.peak()),
            reason.name()
        );
        match detail {
            // In quotes and escaped: a detail cannot be taken for a field.
            Some(detail) => format!("{line} detail={:?}", detail.to_string()),
            None => line,
        }
    }
}

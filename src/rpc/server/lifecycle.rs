//! Lifecycle of the server as its sessions see it: accepting or draining, the number of sessions, and whether it is shutting
//! down.
//!
//! Sessions read this and subscribe to the drain. Only the accept loop, the drain and the shutdown in `mod.rs` change it.

use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, Ordering};

use super::admission::Admission;
use super::client_connection::ClientWriter;
use crate::rpc::wire::ext::ServerState;

/// The sessions' view of the server's state.
pub(super) struct Lifecycle {
    admission: Arc<Admission>,
    stopping: AtomicBool,
}

impl Lifecycle {
    /// The lifecycle of a server with this admission control.
    pub(super) fn new(admission: &Arc<Admission>) -> Lifecycle {
        Lifecycle { admission: Arc::clone(admission), stopping: AtomicBool::new(false) }
    }

    /// "ready" or "draining". Never "full", which concerns new clients only.
    pub(super) fn state(&self) -> ServerState {
        self.admission.state()
    }

    /// Whether the server drains or shuts down. Takes no lock.
    pub(super) fn is_ending(&self) -> bool {
        self.is_stopping() || self.admission.is_draining()
    }

    /// Number of sessions.
    pub(super) fn session_count(&self) -> u32 {
        self.admission.session_count().try_into().unwrap_or(u32::MAX)
    }

    /// Sends SERVER_STATE to this client when the server begins to drain. Returns the current state.
    pub(super) fn subscribe(&self, writer: &Arc<ClientWriter>) -> ServerState {
        self.admission.subscribe(writer)
    }

    /// Whether the server is shutting down.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Marks the server as shutting down. Returns true on the first call.
    pub(super) fn begin_shutdown(&self) -> bool {
        !self.stopping.swap(true, Ordering::AcqRel)
    }
}

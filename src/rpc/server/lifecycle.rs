//! What a session may know of the server that runs it: its state, its number of sessions, and that it is shutting down.
//!
//! Sessions read this and subscribe to it. Only the server's top changes it: the accept loop, the drain and the shutdown.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::client_connection::Writer;
use super::guests::Guests;
use crate::rpc::wire::ext::State;

/// The server's state as its sessions see it.
pub(super) struct Lifecycle {
    guests: Arc<Guests>,
    stopping: AtomicBool,
}

impl Lifecycle {
    /// Of a server that admits clients.
    pub(super) fn new(guests: &Arc<Guests>) -> Lifecycle {
        Lifecycle { guests: Arc::clone(guests), stopping: AtomicBool::new(false) }
    }

    /// Whether the server admits clients, as a client that has been admitted sees it: never "full".
    pub(super) fn state(&self) -> State {
        self.guests.state()
    }

    /// Connections that are served.
    pub(super) fn sessions(&self) -> u32 {
        self.guests.sessions().try_into().unwrap_or(u32::MAX)
    }

    /// Sends STATE to this client when the server begins to drain. Returns the state as of now.
    pub(super) fn subscribe(&self, writer: &Arc<Writer>) -> State {
        self.guests.tell(writer)
    }

    /// Whether the server is shutting down.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Begins the shutdown. True for the first call.
    pub(super) fn stop(&self) -> bool {
        !self.stopping.swap(true, Ordering::AcqRel)
    }
}

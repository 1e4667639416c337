//! Accept loop: the thread of one listener, which accepts connections, and starts a session for each or rejects it.

use std::sync::Arc;
use std::time::Duration;

use log::debug;

use super::admission::Rejection;
use super::context::ServerContext;
use super::listen::{AllowedClients, HttpUse};
use super::log_limits::LogKind;
use super::versions::{VersionChoice, VersionPolicy};
use super::{ServerControl, http, reject, serve};
use crate::rpc::transport::{Connection, Deadline, Listen, PeerAddr};
use crate::rpc::wire::ext::ServerState;

/// Longest wait for the next connection before the accept loop checks for a shutdown. A shutdown also wakes the loop at once
/// ([`ServerControl::wakers`]); the timeout is a fallback.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(60);

/// Pause after the system ran out of file descriptors or threads for a connection, so that the accept loop does not spin.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

/// Accepts the connections of one listener.
pub(super) struct AcceptLoop {
    pub(super) listener: Box<dyn Listen>,
    pub(super) policy: VersionPolicy,
    pub(super) clients: AllowedClients,
    pub(super) http: HttpUse,
    pub(super) control: Arc<ServerControl>,
    pub(super) context: Arc<ServerContext>,
}

impl AcceptLoop {
    /// Accepts connections until the shutdown, and then closes the listener.
    pub(super) fn run(self) {
        while !self.control.lifecycle.is_stopping() {
            self.context.logs.report_left_out();
            match self.listener.accept(&Deadline::after(ACCEPT_TIMEOUT)) {
                Ok(_) if self.control.lifecycle.is_stopping() => break,
                Ok(Some(connection)) => self.admit(connection),
                Ok(None) => {}
                Err(e) => {
                    let text = format_args!("cannot accept a connection: {e}");
                    self.context.logs.log_server(LogKind::AcceptError, text);
                    std::thread::sleep(EXHAUSTED_PAUSE);
                }
            }
        }
    }

    /// Starts the session of a new connection, or rejects the connection if the server is full or draining. Never blocks on the
    /// client.
    fn admit(&self, connection: Connection) {
        let peer = connection.peer();
        if !self.clients.permits(peer) {
            let text = format_args!("{peer}: its address is not allowed here (--allow); connection closed");
            return self.context.logs.log(peer, LogKind::RejectedAddress, text);
        }
        if self.http == HttpUse::Only {
            let context = Arc::clone(&self.context);
            return self.spawn_connection_thread("http", peer, move || http::serve(&context, connection, Vec::new()));
        }
        let (permit, handshake, memory) = match self.control.admission.admit(peer, connection.aborter()) {
            Ok(permits) => permits,
            Err(rejection) => return self.reject(connection, &rejection),
        };
        let (context, policy, serves_http) =
            (Arc::clone(&self.context), self.policy.clone(), self.http == HttpUse::Shared);
        self.spawn_connection_thread("session", peer, move || {
            serve::serve(&context, connection, (permit, handshake, memory), &policy, serves_http);
        });
    }

    /// Logs why the client is not accepted, and sends the reason from another thread.
    fn reject(&self, connection: Connection, rejection: &Rejection) {
        let peer = connection.peer();
        let logs = &self.context.logs;
        let (state, kind, reason) = match rejection {
            Rejection::Draining => {
                let reason = "this server is draining and accepts no more clients".to_owned();
                (ServerState::Draining, LogKind::RejectedDraining, reason)
            }
            Rejection::Full(reason) => (ServerState::Full, LogKind::RejectedFull, reason.to_string()),
            Rejection::FullMemory(reason) => (ServerState::Full, LogKind::RejectedMemory, reason.to_string()),
            Rejection::TooManyHandshakes(reason) => {
                let text = format_args!("{peer}: closed without a reply: {reason}");
                return logs.log(peer, LogKind::RejectedHandshake, text);
            }
        };
        let text = format!("{peer}: rejected: {reason}; connection closed");
        let Some(permit) = self.control.admission.reserve_rejection() else {
            return logs.log(peer, kind, format_args!("{text}"));
        };
        let (context, policy, serves_http) =
            (Arc::clone(&self.context), self.policy.clone(), self.http == HttpUse::Shared);
        self.spawn_connection_thread("reject", peer, move || {
            let versions = VersionChoice::new(&policy, &context.version_probe, peer);
            let log = || context.logs.log(peer, kind, format_args!("{text}"));
            let rejected = reject::reply_with_state(connection, &versions, state, serves_http, log);
            drop(permit);
            match rejected {
                Ok(None) => {}
                // Who asks for the state of the server is not rejected.
                Ok(Some((connection, received))) => http::serve(&context, connection, received),
                Err(e) => debug!("{peer}: rejected without a reply, because its HELLO could not be served: {e}"),
            }
        });
    }

    /// Runs `work` for the connection of `peer` on a new thread. If no thread can be started, `work` is dropped, which closes the
    /// connection.
    fn spawn_connection_thread(&self, name: &str, peer: PeerAddr, work: impl FnOnce() + Send + 'static) {
        if let Err(e) = std::thread::Builder::new().name(name.to_owned()).spawn(work) {
            let text = format_args!("{peer}: cannot start the {name} thread: {e}; connection closed");
            self.context.logs.log(peer, LogKind::ThreadStart, text);
            std::thread::sleep(EXHAUSTED_PAUSE);
        }
    }
}

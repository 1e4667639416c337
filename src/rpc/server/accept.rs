//! Accept loop: the thread of one listener, which accepts connections and starts a thread for each.

use std::sync::Arc;
use std::time::Duration;

use super::context::ServerContext;
use super::listen::{AllowedClients, HttpUse};
use super::log_limits::LogKind;
use super::versions::VersionPolicy;
use super::{ServerControl, http, serve};
use crate::rpc::transport::{Connection, Deadline, Listen, PeerAddr};

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

    /// Starts the thread of a new connection. Never blocks on a client: at the limit of handshakes, one that is pending is closed,
    /// and its thread ends by itself.
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
        let logs = &self.context.logs;
        let permit = match self.control.admission.admit(peer, connection.aborter()) {
            Ok((permit, None)) => permit,
            Ok((permit, Some(closed))) => {
                let (peer, reason) = (closed.peer(), &closed.reason);
                let text = format_args!("{peer}: closed without a complete HELLO, for a new connection: {reason}");
                logs.log(peer, LogKind::RejectedHandshake, text);
                permit
            }
            Err(rejection) => {
                let text = format_args!("{peer}: closed without a reply: {rejection}");
                return logs.log(peer, LogKind::RejectedHandshake, text);
            }
        };
        let aborter = connection.aborter();
        let memory = self.control.host_memory.connect(move || aborter.abort());
        let (context, policy, serves_http) =
            (Arc::clone(&self.context), self.policy.clone(), self.http == HttpUse::Shared);
        self.spawn_connection_thread("session", peer, move || {
            serve::serve(&context, connection, (permit, memory), &policy, serves_http);
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

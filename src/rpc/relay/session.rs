//! One connection of a client and the connection to its server, from the dial to the end of both.

use crate::poison::Unpoisoned;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use log::debug;

use super::ForwardedServer;
use crate::rpc::server::{LogKind, LogLimits};
use crate::rpc::transport::tls::ClientTls;
use crate::rpc::transport::{
    Aborter, Connection, Deadline, ForwardError, PeerAddr, Receiver, ResolveError, Sender, TransportError, dial_with,
    resolve,
};

/// A session of the client at `peer` with `server`, for the log.
pub(super) struct RelaySession<'a> {
    pub(super) peer: PeerAddr,
    pub(super) server: &'a ForwardedServer,
    pub(super) logs: &'a LogLimits,
}

/// Which of the two connections has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Client,
    Server,
}

/// The state that the two directions share.
struct Link {
    client: Aborter,
    server: Aborter,
    /// Whether the client has ended its sending direction, or its connection.
    client_ended: AtomicBool,
    /// The failure that is reported. A failure ends both connections, which causes further ones.
    failure: Mutex<Option<(Side, TransportError)>>,
}

impl RelaySession<'_> {
    /// Dials the server and forwards until both directions have ended. Both connections are closed then.
    pub(super) fn run(&self, client: Connection, tls: &ClientTls, timeout: Duration) {
        match self.dial(tls, &Deadline::after(timeout)) {
            Ok(server) => self.forward(client, server),
            Err(reason) => self.log_failure(&reason),
        }
    }

    /// A connection to the server, which has proved its key.
    fn dial(&self, tls: &ClientTls, deadline: &Deadline) -> Result<Connection, String> {
        let targets = resolve(self.server.endpoint()).map_err(|e| match e {
            ResolveError::Name => "no address of the form HOST:PORT".to_owned(),
            ResolveError::Host(e) => format!("no such host: {e}"),
        })?;
        let (_, server) = dial_with(&targets, deadline, Some(tls)).map_err(|(_, e)| format!("cannot connect: {e}"))?;
        server.handshake(deadline).map_err(|e| e.to_string())?;
        Ok(server)
    }

    /// Forwards both directions, each in a thread: this one, and another for what the client sends.
    pub(super) fn forward(&self, client: Connection, server: Connection) {
        let link = Link {
            client: client.aborter(),
            server: server.aborter(),
            client_ended: AtomicBool::new(false),
            failure: Mutex::default(),
        };
        let ((from_client, to_client), (from_server, to_server)) = (client.split(), server.split());
        let (received, sent) = std::thread::scope(|scope| {
            let requests = || link.forward_requests(from_client, to_server);
            let requests = std::thread::Builder::new().name("relay-requests".to_owned()).spawn_scoped(scope, requests);
            match requests {
                Ok(requests) => {
                    let received = self.forward_replies(&link, from_server, to_client);
                    // A panic was reported when it happened.
                    (received, requests.join().unwrap_or_default())
                }
                Err(e) => {
                    let text = format_args!("{}: cannot start a relay thread: {e}; connection closed", self.peer);
                    self.logs.log(self.peer, LogKind::ThreadStart, text);
                    (0, 0)
                }
            }
        });
        match link.failure.into_inner().unpoisoned() {
            Some((Side::Server, e)) => self.log_failure(&e.to_string()),
            Some((Side::Client, e)) => debug!("{}: {e}; connection to {} closed", self.peer, self.server.endpoint()),
            None => debug!(
                "{}: disconnected from {}; {sent} bytes sent, {received} received",
                self.peer,
                self.server.endpoint()
            ),
        }
    }

    /// Forwards what the server sends. Returns the number of bytes.
    fn forward_replies(&self, link: &Link, mut from_server: Receiver, mut to_client: Sender) -> u64 {
        let ends = AbortBoth(Some(link));
        let on_end = || {
            if !link.client_ended.load(Ordering::Relaxed) {
                let (peer, server) = (self.peer, self.server.endpoint());
                let text = format_args!("{peer}: {server} has closed the connection; its log may have the reason");
                self.logs.log(peer, LogKind::RelayServerClosed, text);
            }
        };
        match forward_with_end(&mut from_server, &mut to_client, on_end) {
            Ok(bytes) => {
                ends.disarm();
                return bytes;
            }
            // The reason, such as an alert of TLS, if the other thread could not send.
            Err(ForwardError::Receive(e)) => link.fail(Side::Server, e, true),
            Err(ForwardError::Send(e)) => link.fail(Side::Client, e, false),
        }
        0
    }

    fn log_failure(&self, reason: &str) {
        let text = format_args!("{}: {}: {reason}; connection closed", self.peer, self.server.endpoint());
        self.logs.log(self.peer, LogKind::RelayFailure, text);
    }
}

/// Forwards one direction, and then its end (half close); calls `on_end` between the two. Returns the number of bytes.
fn forward_with_end(from: &mut Receiver, to: &mut Sender, on_end: impl FnOnce()) -> Result<u64, ForwardError> {
    let bytes = from.forward_to(to)?;
    on_end();
    to.finish(&Deadline::after(Duration::MAX)).map_err(ForwardError::Send)?;
    Ok(bytes)
}

impl Link {
    /// Forwards what the client sends. Returns the number of bytes.
    fn forward_requests(&self, mut from_client: Receiver, mut to_server: Sender) -> u64 {
        let ends = AbortBoth(Some(self));
        // Before the server learns of the end, and ends its own direction.
        let on_end = || self.client_ended.store(true, Ordering::Relaxed);
        let forwarded = forward_with_end(&mut from_client, &mut to_server, on_end);
        on_end();
        match forwarded {
            Ok(bytes) => {
                ends.disarm();
                return bytes;
            }
            Err(ForwardError::Receive(e)) => self.fail(Side::Client, e, false),
            Err(ForwardError::Send(e)) => {
                let is_reset = e.is_reset();
                self.fail(Side::Server, e, false);
                // The server has ended the connection. Its last bytes may say why, and an abort would hide them from the other
                // thread, which finds the end by itself.
                if is_reset {
                    self.client.abort();
                    ends.disarm();
                }
            }
        }
        0
    }

    /// Notes the failure that is reported: the first one, unless a later one `overrides` it.
    fn fail(&self, side: Side, e: TransportError, overrides: bool) {
        // Ignores poisoning: a change is a single assignment.
        let mut failure = self.failure.lock().unpoisoned();
        if failure.is_none() || overrides {
            *failure = Some((side, e));
        }
    }
}

/// Ends both connections when it is dropped, also by a panic: the thread of the other direction wakes and ends, too.
struct AbortBoth<'a>(Option<&'a Link>);

impl AbortBoth<'_> {
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for AbortBoth<'_> {
    fn drop(&mut self) {
        if let Some(link) = self.0 {
            link.client.abort();
            link.server.abort();
        }
    }
}

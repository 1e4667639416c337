//! Relay: lets clients without TLS, such as llama.cpp's, use servers that demand keys. It listens on addresses of this machine,
//! and forwards each accepted connection over TLS to the server behind its address, with the relay's own key.
//!
//! ```text
//! client ══TCP══► accept loop ──► session: dial the server over TLS, then two threads
//!                                   client → server   Receiver::forward_to (encrypts from its read buffer)
//!                                   server → client   Receiver::forward_to (writes from the decrypted records)
//! ```
//!
//! - **Two threads per connection**, each of which blocks in one socket at a time, so a request costs one wake-up in the relay and
//!   its reply another.
//! - **Transparent**: bytes are not interpreted, an end of one direction is forwarded (half close), and a failure ends both
//!   connections. Timeouts are those of the server and the client, except for the connection to the server and its handshake.
//! - **Limits**: [`RelayConfig::max_connections`], and with it threads, handshakes and buffers (64 KiB for the bytes of a client,
//!   and the records of TLS). A client that does not read stops only its own connection, by TCP's flow control.
//! - Every user of this machine who can connect to a loopback address can use the servers with the relay's key.
//!
//! Start here, then read `session.rs`. `forwarded_server.rs` parses what the command line says.

mod forwarded_server;
mod session;
#[cfg(test)]
mod tests;

pub use forwarded_server::{ForwardedServer, ParseForwardedServerError};

use crate::poison::lock;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use thiserror::Error;

use crate::rpc::keys::SecretKey;
use crate::rpc::server::{BindError, Config, ListenAddress, LogKind, LogLimits};
use crate::rpc::transport::tls::{ClientTls, Credentials};
use crate::rpc::transport::{self, Aborter, Connection, Deadline, Listen};
use crate::setters::setters;
use session::RelaySession;

/// Longest wait for the next connection before an accept loop reports log lines that were left out.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(60);

/// Pause after the system ran out of file descriptors or threads for a connection, so that an accept loop does not spin.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

/// Configuration of a relay.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RelayConfig {
    /// The key that the relay proves to the servers.
    pub key: SecretKey,
    /// Whether the relay may listen on an address that other machines can reach.
    pub insecure: bool,
    /// Maximum number of connections at a time, of all servers together. Further ones are closed.
    pub max_connections: usize,
    /// Longest time from the connection of a client to a complete TLS handshake with the server.
    pub handshake_timeout: Duration,
}

setters!(RelayConfig {
    with_insecure insecure: bool,
    with_max_connections max_connections: usize,
    with_handshake_timeout handshake_timeout: Duration,
});

impl RelayConfig {
    /// [`RelayConfig::max_connections`] unless another limit is set.
    pub const DEFAULT_MAX_CONNECTIONS: usize = 256;

    /// The defaults, with this key.
    pub fn new(key: SecretKey) -> RelayConfig {
        RelayConfig {
            key,
            insecure: false,
            max_connections: RelayConfig::DEFAULT_MAX_CONNECTIONS,
            handshake_timeout: Duration::from_secs(10),
        }
    }
}

/// Why a relay could not be started.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RelayError {
    /// A local address cannot be listened on.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The number of the server is too large for a local port of its own, counted from 50052.
    #[error("{0}: no local port is left for it: give one, as in 127.0.0.1:50060={0}")]
    NoPort(ForwardedServer),
    /// Other machines can reach a local address, and [`RelayConfig::insecure`] does not permit it.
    #[error(
        "{addr} can be reached from other machines, and whoever reaches it can use the devices with this key: listen on \
         loopback, or give --insecure if all of the network is trusted"
    )]
    Insecure {
        /// The address and port.
        addr: SocketAddr,
    },
    /// The key cannot be used for TLS.
    #[error("TLS: {0}")]
    Tls(String),
}

/// A relay that listens. [`Relay::run`] accepts and forwards connections.
pub struct Relay {
    routes: Vec<Route>,
    control: Arc<RelayControl>,
}

/// Stops a relay from another thread.
#[derive(Clone)]
pub struct RelayHandle(Arc<RelayControl>);

/// A listener, and the server behind it.
struct Route {
    listener: Box<dyn Listen>,
    addr: SocketAddr,
    server: Arc<ForwardedServer>,
    tls: ClientTls,
}

/// Shared by a relay, its handles and its sessions.
struct RelayControl {
    /// Each makes the blocked `accept` of a listener return.
    wakers: Vec<Box<dyn Fn() + Send + Sync>>,
    sessions: Arc<Sessions>,
    logs: LogLimits,
    handshake_timeout: Duration,
}

impl Relay {
    /// Listens on the local address of each server; a server without one gets 127.0.0.1 and port 50052 plus its index in the list.
    ///
    /// # Errors
    /// [`RelayError`].
    pub fn bind(servers: &[ForwardedServer], config: &RelayConfig) -> Result<Relay, RelayError> {
        let tls_error = |e: &dyn std::fmt::Display| RelayError::Tls(e.to_string());
        let credentials = Credentials::of_key(&config.key).map_err(|e| tls_error(&e))?;
        let mut routes = Vec::new();
        for (index, server) in servers.iter().enumerate() {
            let tls = ClientTls::new(&credentials, &[server.key()]).map_err(|e| tls_error(&e))?;
            let local = server.local().cloned().or_else(|| default_address(index));
            let socket = local.ok_or_else(|| RelayError::NoPort(server.clone()))?.bind()?;
            let take_over = |error| RelayError::Bind(BindError::Sockets { error });
            let listener = transport::listen_on(socket, None).map_err(take_over)?;
            let addr = listener.local_addr().ip();
            let addr = addr.ok_or_else(|| take_over(io::ErrorKind::AddrNotAvailable.into()))?;
            if !(config.insecure || addr.ip().to_canonical().is_loopback()) {
                return Err(RelayError::Insecure { addr });
            }
            routes.push(Route { listener, addr, server: Arc::new(server.clone()), tls });
        }
        let control = RelayControl {
            wakers: routes.iter().map(|route| route.listener.waker()).collect(),
            sessions: Arc::new(Sessions { max: config.max_connections, state: Mutex::default() }),
            logs: LogLimits::new(&Config::default()),
            handshake_timeout: config.handshake_timeout,
        };
        Ok(Relay { routes, control: Arc::new(control) })
    }

    /// The addresses on which the relay listens, with the actual ports, and the server behind each.
    pub fn listeners(&self) -> Vec<(SocketAddr, ForwardedServer)> {
        self.routes.iter().map(|route| (route.addr, ForwardedServer::clone(&route.server))).collect()
    }

    /// A handle that stops the relay.
    pub fn handle(&self) -> RelayHandle {
        RelayHandle(Arc::clone(&self.control))
    }

    /// Forwards connections until [`RelayHandle::shutdown`], which ends them all. Does not wait for the threads of sessions.
    pub fn run(self) {
        let Relay { routes, control } = self;
        std::thread::scope(|scope| {
            for route in routes {
                let (addr, control) = (route.addr, &control);
                let thread = std::thread::Builder::new().name("accept".to_owned());
                if let Err(e) = thread.spawn_scoped(scope, move || route.run(control)) {
                    log::error!("cannot start the thread that accepts connections on {addr}: {e}; the relay ends");
                    RelayHandle(Arc::clone(control)).shutdown();
                }
            }
        });
        control.logs.report_totals();
    }
}

/// The local address of the server with this index in the list, if no address is given.
fn default_address(index: usize) -> Option<ListenAddress> {
    let port = u16::try_from(index).ok()?.checked_add(ListenAddress::DEFAULT_PORT)?;
    Some(ListenAddress::new(ListenAddress::DEFAULT_HOST, port))
}

impl RelayHandle {
    /// Makes [`Relay::run`] end all connections and return.
    pub fn shutdown(&self) {
        self.0.sessions.stop();
        self.0.wakers.iter().for_each(|wake| wake());
    }
}

impl Route {
    /// Accepts connections until the relay ends, and then closes the listener.
    fn run(self, control: &Arc<RelayControl>) {
        while !lock(&control.sessions.state).stopping {
            control.logs.report_left_out();
            match self.listener.accept(&Deadline::after(ACCEPT_TIMEOUT)) {
                Ok(Some(client)) => self.admit(client, control),
                Ok(None) => {}
                Err(e) => {
                    let text = format_args!("cannot accept a connection on {}: {e}", self.addr);
                    control.logs.log_server(LogKind::AcceptError, text);
                    std::thread::sleep(EXHAUSTED_PAUSE);
                }
            }
        }
    }

    /// Starts the session of a new connection, or closes the connection if there are too many.
    fn admit(&self, client: Connection, control: &Arc<RelayControl>) {
        let peer = client.peer();
        let Some(permit) = control.sessions.admit(client.aborter()) else {
            if !lock(&control.sessions.state).stopping {
                let max = control.sessions.max;
                let text = format_args!(
                    "{peer}: rejected: the relay has {max} connections, its limit (--max-connections); connection closed"
                );
                control.logs.log(peer, LogKind::RejectedFull, text);
            }
            return;
        };
        let (control, server, tls) = (Arc::clone(control), Arc::clone(&self.server), self.tls.clone());
        let thread_control = Arc::clone(&control);
        let session = move || {
            let _permit = permit;
            let RelayControl { logs, handshake_timeout, .. } = &*thread_control;
            RelaySession { peer, server: &server, logs }.run(client, &tls, *handshake_timeout);
        };
        if let Err(e) = std::thread::Builder::new().name("relay".to_owned()).spawn(session) {
            let text = format_args!("{peer}: cannot start the relay thread: {e}; connection closed");
            control.logs.log(peer, LogKind::ThreadStart, text);
            std::thread::sleep(EXHAUSTED_PAUSE);
        }
    }
}

/// The open connections of clients.
struct Sessions {
    max: usize,
    state: Mutex<SessionsState>,
}

#[derive(Default)]
struct SessionsState {
    /// Each ends the connection of a client, by the key of its [`RelayPermit`].
    open: HashMap<u64, Aborter>,
    next_key: u64,
    stopping: bool,
}

impl Sessions {
    /// Counts a connection that `aborter` ends; `None` if there are too many, or if the relay ends.
    fn admit(self: &Arc<Sessions>, aborter: Aborter) -> Option<RelayPermit> {
        let mut state = lock(&self.state);
        if state.stopping || state.open.len() >= self.max {
            return None;
        }
        let key = state.next_key;
        state.next_key += 1;
        state.open.insert(key, aborter);
        Some(RelayPermit { sessions: Arc::clone(self), key })
    }

    /// Ends all connections, and admits no more.
    fn stop(&self) {
        let mut state = lock(&self.state);
        state.stopping = true;
        state.open.values().for_each(Aborter::abort);
    }
}

/// Counts one connection until it is dropped.
struct RelayPermit {
    sessions: Arc<Sessions>,
    key: u64,
}

impl Drop for RelayPermit {
    fn drop(&mut self) {
        lock(&self.sessions.state).open.remove(&self.key);
    }
}

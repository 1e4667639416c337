//! A server: devices of this machine for clients over the network, fanout's and llama.cpp's.
//!
//! ```text
//! this file: listen → guests (admission; doorman: rejects with a reason) → one thread per connection
//!   ↓
//! serve            the choice of a front end, the end of the session
//!   ↓
//! ggml │ extended  the two front ends: decode requests, call the core, encode replies; neither names the other
//!   ↓
//! handshake, resource_requests   HELLO, and requests that both front ends serve
//!   ↓
//! session          the core: buffers, prepared graphs, uploads, copies, failures; device::Queue does the work
//!   ↓
//! context          what all sessions share: devices, limits, lifecycle,
//!                  tensor_cache, gguf_index, transfer_tokens (from other servers), peers (to others)
//!   ↓
//! client_connection  frames from and to one client, with deadlines
//! ```
//!
//! `tests/layout/rooms.rs` has a row for each of these rooms and what it may use.
//!
//! - A session owns its handles, virtual addresses and memory account, and frees all of it however it ends.
//! - There is no error reply in 7.0. A message that cannot be served closes its own connection, with one line
//!   in the log that names peer, command and reason; other sessions do not notice.
//! - Nothing is believed: memory for a message grows as its bytes arrive, deadlines bound every message that has begun,
//!   and every limit is in [`Config`].
//! - There is no authentication and no encryption. Bind to addresses of trusted networks only.

mod allowance;
mod client_connection;
mod context;
mod doorman;
mod extended;
mod ggml;
mod gguf_index;
mod guests;
mod handshake;
mod lifecycle;
mod limits;
mod listen;
mod peers;
mod resource_requests;
mod serve;
mod session;
mod tensor_cache;
mod transfer_tokens;

pub use limits::{CacheConfig, Config, MIN_MESSAGE};
pub use listen::BindError;
pub use peers::{BadPeer, Peer};

use std::net::{Ipv4Addr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use log::{debug, error, info, warn};

use crate::device::Device;
use crate::rpc::transport::{Address, Connection, Deadline, Listen, PeerAddr};
use crate::rpc::wire::ext::State;
use context::ServerContext;
use gguf_index::GgufIndex;
use guests::Guests;
use lifecycle::Lifecycle;
use peers::PeerList;
use tensor_cache::Cache;

/// How long a shutdown waits for sessions: one may be waiting for a device.
const GRACE: Duration = Duration::from_secs(10);

/// How long a server waits for the next connection before it looks around. Whoever stops it wakes it.
const ACCEPT: Duration = Duration::from_secs(60);

/// The pause after the system had no descriptor or thread for a connection, so that the loop does not spin.
const EXHAUSTED: Duration = Duration::from_millis(100);

/// A server that listens. [`Server::run`] serves.
pub struct Server {
    listener: Box<dyn Listen>,
    control: Arc<Control>,
    context: Arc<ServerContext>,
}

/// Ends a server from another thread. Cloning shares it.
#[derive(Clone)]
pub struct Handle(Arc<Control>);

/// What ends a server: it wakes the accept loop, closes connections and waits for their sessions.
struct Control {
    addr: Address,
    /// Ends the wait for the next connection.
    wake: Box<dyn Fn() + Send + Sync>,
    guests: Arc<Guests>,
    lifecycle: Arc<Lifecycle>,
}

impl Server {
    /// Listens on `host` (an IPv4 or IPv6 address, or a name) and `port` (0: any free one).
    ///
    /// # Errors
    /// [`BindError`] when that is not possible, when the cache's or the models' folder cannot be used, when a peer's name is
    /// not known, or without any device.
    pub fn bind(host: &str, port: u16, devices: Vec<Arc<dyn Device>>, config: Config) -> Result<Server, BindError> {
        Server::over(|| listen::listen(host, port), devices, config)
    }

    /// A server of what a listener accepts, which begins to listen when all else is in order.
    pub(in crate::rpc) fn over(
        listen: impl FnOnce() -> Result<Box<dyn Listen>, BindError>,
        devices: Vec<Arc<dyn Device>>,
        config: Config,
    ) -> Result<Server, BindError> {
        if devices.is_empty() {
            return Err(BindError::NoDevice);
        }
        let cache = config
            .cache
            .as_ref()
            .map(|at| Cache::open(at).map_err(|source| BindError::Cache { dir: at.dir.display().to_string(), source }));
        let cache = cache.transpose()?;
        let peers = PeerList::resolve(&config.peers)
            .map_err(|(peer, source)| BindError::Peer { peer: peer.to_string(), source })?;
        let models = config.models.as_ref().map(|dir| {
            GgufIndex::open(dir).map_err(|source| BindError::Models { dir: dir.display().to_string(), source })
        });
        let models = models.transpose()?;
        let listener = listen()?;
        let addr = listener.local_addr();
        let guests = Guests::new(config.max_connections);
        let lifecycle = Arc::new(Lifecycle::new(&guests));
        let context = ServerContext {
            devices,
            config,
            tensor_cache: cache,
            transfer_tokens: Arc::default(),
            peers: Arc::new(peers),
            models,
            lifecycle: Arc::clone(&lifecycle),
        };
        let control = Control { addr, wake: listener.waker(), guests, lifecycle };
        Ok(Server { listener, control: Arc::new(control), context: Arc::new(context) })
    }

    /// The IP address and the actual port where the server listens. 0.0.0.0:0 where its transport has no IP addresses, which none
    /// that [`Server::bind`] chooses does; [`Server::endpoint`] names the place for every transport.
    pub fn local_addr(&self) -> SocketAddr {
        self.control.addr.ip().unwrap_or_else(|| (Ipv4Addr::UNSPECIFIED, 0).into())
    }

    /// The place where the server listens, as messages show it and clients connect to it.
    pub fn endpoint(&self) -> String {
        self.control.addr.to_string()
    }

    /// A handle that ends the server.
    pub fn handle(&self) -> Handle {
        Handle(Arc::clone(&self.control))
    }

    /// Serves until [`Handle::shutdown`]; then closes every connection and returns when the sessions have ended, or
    /// after some seconds if a device keeps one of them waiting.
    pub fn run(self) {
        while !self.control.lifecycle.is_stopping() {
            match self.listener.accept(&Deadline::after(ACCEPT)) {
                Ok(_) if self.control.lifecycle.is_stopping() => break,
                Ok(Some(connection)) => self.admit(connection),
                Ok(None) => {}
                Err(e) => {
                    error!("cannot accept a connection: {e}");
                    std::thread::sleep(EXHAUSTED);
                }
            }
        }
        drop(self.listener);
        self.control.guests.close();
        match self.control.guests.wait(Instant::now() + GRACE) {
            0 => {}
            left => warn!("{left} sessions still wait for a device; not waiting for them"),
        }
    }

    /// Starts the session of a new connection, if there is room for it. Never waits for the client.
    fn admit(&self, connection: Connection) {
        let peer = connection.peer();
        let guest = match self.control.guests.enter(connection.aborter()) {
            Ok(guest) => guest,
            Err(state) => return self.turn_away(connection, state),
        };
        let context = Arc::clone(&self.context);
        start("session", peer, move || {
            let _guest = guest;
            // A panic is a bug of ours that this client's input has found. It ends this session alone.
            if catch_unwind(AssertUnwindSafe(|| serve::serve(&context, connection))).is_err() {
                error!("{peer}: bug in fanout: the session panicked; connection closed");
            }
        });
    }

    fn turn_away(&self, connection: Connection, state: State) {
        let peer = connection.peer();
        match state {
            State::Draining => info!("{peer}: refused: this server is about to end; connection closed"),
            _ => {
                let max = self.context.config.max_connections;
                warn!("{peer}: refused: there are already {max} connections; connection closed");
            }
        }
        let Some(place) = self.control.guests.turn_away() else { return };
        start("doorman", peer, move || {
            let _place = place;
            if let Err(e) = doorman::turn_away(connection, state) {
                debug!("{peer}: closed before its HELLO: {e}");
            }
        });
    }
}

/// Runs what a connection needs on a thread of its own.
fn start(name: &str, peer: PeerAddr, work: impl FnOnce() + Send + 'static) {
    if let Err(e) = std::thread::Builder::new().name(name.to_owned()).spawn(work) {
        error!("{peer}: cannot start a thread for the {name}: {e}; connection closed");
        std::thread::sleep(EXHAUSTED);
    }
}

impl Handle {
    /// Makes [`Server::run`] close all connections and return.
    pub fn shutdown(&self) {
        if self.0.lifecycle.stop() {
            (self.0.wake)();
        }
    }

    /// Takes no more clients, but goes on serving those that are there, and tells them: fanout's may move on to another
    /// server. Once they have left, or `patience` has passed, shuts the server down. Returns then.
    pub fn drain(&self, patience: Duration) {
        let guests = &self.0.guests;
        let until = Instant::now() + patience;
        guests.drain();
        info!("draining: no more clients are taken; {} may go on for {patience:?}", guests.sessions());
        match guests.wait(until) {
            0 => info!("drained: all clients have left"),
            left => warn!("{left} clients have not left within {patience:?}"),
        }
        self.shutdown();
    }

    /// How many connections are open.
    pub fn connections(&self) -> usize {
        self.0.lifecycle.sessions() as usize
    }
}

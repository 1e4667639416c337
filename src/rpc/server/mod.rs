//! A server: devices of this machine for clients over the network, fanout's and llama.cpp's.
//!
//! One thread per connection moves frames and keeps the session's books; devices compute on queues of their own.
//!
//! ```text
//! listen → guests (who has a place; doorman: a word for those that have none)
//!   ↓
//! connection (frames, deadlines) → session (commands of 7.0) → holdings, handles (account, regions)
//!    ↓                                                       → compile, programs (graphs)
//! outgoing (whole messages)                                  → cache (tensor data), models (from disk)
//!    ↑                                                       → device::Queue, one per session and device
//!    ↑                                                       → bounce (copies between kinds of devices)
//!    ↑                            → greeted (commands of the extensions)
//!    ↑                                → queues (device::Queue, as many as the client opens)
//!    ├──────────────────────────────────── answers (what waits for a queue, in the order of its work)
//!    └──────────────────────────────────── peers (bytes of a queue that go to other servers)
//!                                      → tickets (bytes from other servers that go to a queue's memory)
//! ```
//!
//! - A session owns its handles, virtual addresses and memory account, and frees all of it however it ends.
//! - There is no error reply in 7.0. A message that cannot be served closes its own connection, with one line
//!   in the log that names peer, command and reason; other sessions do not notice.
//! - Nothing is believed: memory for a message grows as its bytes arrive, deadlines bound every message that has begun,
//!   and every limit is in [`Config`].
//! - There is no authentication and no encryption. Bind to addresses of trusted networks only.

mod allowance;
mod bounce;
mod cache;
mod compile;
mod connection;
mod doorman;
mod foresight;
mod greeted;
mod guests;
mod handles;
mod holdings;
mod limits;
mod listen;
mod models;
mod outgoing;
mod peers;
mod programs;
mod refusal;
mod session;
mod tickets;

pub use limits::{CacheConfig, Config, MIN_MESSAGE};
pub use listen::BindError;
pub use peers::{BadPeer, Peer};

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use log::{debug, error, info, warn};

use crate::device::Device;
use crate::rpc::wire::ext::State;
use cache::Cache;
use guests::Guests;
use models::Models;
use peers::PeerList;
use refusal::Refusal;
use tickets::Table;

/// How long a shutdown waits for sessions: one may be waiting for a device.
const GRACE: Duration = Duration::from_secs(10);

/// The pause after the system had no descriptor or thread for a connection, so that the loop does not spin.
const EXHAUSTED: Duration = Duration::from_millis(100);

/// A server that listens. [`Server::run`] serves.
pub struct Server {
    listener: TcpListener,
    shared: Arc<Shared>,
}

/// Ends a server from another thread. Cloning shares it.
#[derive(Clone)]
pub struct Handle(Arc<Shared>);

/// What all sessions of a server share.
struct Shared {
    addr: SocketAddr,
    devices: Vec<Arc<dyn Device>>,
    config: Config,
    cache: Option<Cache>,
    tickets: Arc<Table>,
    peers: Arc<PeerList>,
    models: Option<Models>,
    stopping: AtomicBool,
    guests: Arc<Guests>,
}

impl Server {
    /// Listens on `host` (an IPv4 or IPv6 address, or a name) and `port` (0: any free one).
    ///
    /// # Errors
    /// [`BindError`] when that is not possible, when the cache's or the models' folder cannot be used, when a peer's name is
    /// not known, or without any device.
    pub fn bind(host: &str, port: u16, devices: Vec<Arc<dyn Device>>, config: Config) -> Result<Server, BindError> {
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
            Models::open(dir).map_err(|source| BindError::Models { dir: dir.display().to_string(), source })
        });
        let models = models.transpose()?;
        let listener = listen::listen(host, port)?;
        let addr = listener.local_addr().map_err(|source| BindError::Host { host: host.to_owned(), source })?;
        let guests = Guests::new(config.max_connections);
        let shared = Shared {
            addr,
            devices,
            config,
            cache,
            tickets: Arc::default(),
            peers: Arc::new(peers),
            models,
            stopping: AtomicBool::new(false),
            guests,
        };
        Ok(Server { listener, shared: Arc::new(shared) })
    }

    /// Where it listens, with the actual port.
    pub fn local_addr(&self) -> SocketAddr {
        self.shared.addr
    }

    /// A handle that ends the server.
    pub fn handle(&self) -> Handle {
        Handle(Arc::clone(&self.shared))
    }

    /// Serves until [`Handle::shutdown`]; then closes every connection and returns when the sessions have ended, or
    /// after some seconds if a device keeps one of them waiting.
    pub fn run(self) {
        while !self.shared.stopping() {
            match self.listener.accept() {
                Ok(_) if self.shared.stopping() => break,
                Ok((stream, peer)) => self.admit(stream, peer),
                // The client was gone before we came to it.
                Err(e) if matches!(e.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {}
                Err(e) => {
                    error!("cannot accept a connection: {e}");
                    std::thread::sleep(EXHAUSTED);
                }
            }
        }
        drop(self.listener);
        self.shared.guests.close();
        match self.shared.guests.wait(Instant::now() + GRACE) {
            0 => {}
            left => warn!("{left} sessions still wait for a device; not waiting for them"),
        }
    }

    /// Starts the session of a new connection, if there is room for it. Never waits for the client.
    fn admit(&self, stream: TcpStream, peer: SocketAddr) {
        let stream = Arc::new(stream);
        let guest = match self.shared.guests.enter(&stream) {
            Ok(guest) => guest,
            Err(state) => return self.turn_away(stream, peer, state),
        };
        let shared = Arc::clone(&self.shared);
        start("session", peer, move || {
            let _guest = guest;
            // A panic is a bug of ours that this client's input has found. It ends this session alone.
            if catch_unwind(AssertUnwindSafe(|| serve(&shared, stream, peer))).is_err() {
                error!("{peer}: bug in fanout: the session panicked; connection closed");
            }
        });
    }

    fn turn_away(&self, stream: Arc<TcpStream>, peer: SocketAddr, state: State) {
        match state {
            State::Draining => info!("{peer}: refused: this server is about to end; connection closed"),
            _ => {
                let max = self.shared.config.max_connections;
                warn!("{peer}: refused: there are already {max} connections; connection closed");
            }
        }
        let Some(place) = self.shared.guests.turn_away() else { return };
        start("doorman", peer, move || {
            let _place = place;
            if let Err(e) = doorman::turn_away(&stream, state) {
                debug!("{peer}: closed before its HELLO: {e}");
            }
        });
    }
}

/// Runs what a connection needs on a thread of its own.
fn start(name: &str, peer: SocketAddr, work: impl FnOnce() + Send + 'static) {
    if let Err(e) = std::thread::Builder::new().name(name.to_owned()).spawn(work) {
        error!("{peer}: cannot start a thread for the {name}: {e}; connection closed");
        std::thread::sleep(EXHAUSTED);
    }
}

fn serve(shared: &Arc<Shared>, stream: Arc<TcpStream>, peer: SocketAddr) {
    debug!("{peer}: connected");
    match session::run(shared, stream, peer) {
        Ok(session::End::Closed) => debug!("{peer}: disconnected"),
        Ok(session::End::Silent) => debug!("{peer}: disconnected without a HELLO"),
        // Our own doing, said once for all.
        Err(_) if shared.stopping() => debug!("{peer}: closed by shutdown"),
        Err(failure) => {
            warn!("{peer}: {failure}; connection closed");
            failure.tell();
        }
    }
}

impl Shared {
    fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Whether clients are taken, as those hear it that have a place.
    fn state(&self) -> State {
        self.guests.state()
    }

    /// Connections that are served.
    fn sessions(&self) -> u32 {
        self.guests.sessions().try_into().unwrap_or(u32::MAX)
    }
}

impl Handle {
    /// Makes [`Server::run`] close all connections and return.
    pub fn shutdown(&self) {
        if !self.0.stopping.swap(true, Ordering::AcqRel) {
            // Wakes the accept loop. If this cannot connect, nobody can, and the loop is awake.
            let _ = TcpStream::connect_timeout(&listen::reachable(self.0.addr), Duration::from_secs(1));
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
        self.0.sessions() as usize
    }
}

//! A server: devices of this machine for clients over the network, fanout's and llama.cpp's.
//!
//! One thread per connection moves frames and keeps the session's books; devices compute on queues of their own.
//!
//! ```text
//! listen → connection (frames, deadlines) → session (commands of 7.0) → holdings, handles (account, regions)
//!             ↓                                                       → compile, programs (graphs)
//!          outgoing (whole messages)                                  → cache (tensor data), models (from disk)
//!             ↑                                                       → device::Queue, one per session and device
//!             ↑                                                       → bounce (copies between kinds of devices)
//!             ↑                            → greeted (commands of the extensions)
//!             ↑                                → queues (device::Queue, as many as the client opens)
//!             └──────────────────────────────────── answers (what waits for a queue, in the order of its work)
//! ```
//!
//! - A session owns its handles, virtual addresses and memory account, and frees all of it however it ends.
//! - There is no error reply in 7.0. A message that cannot be served closes its own connection, with one line
//!   in the log that names peer, command and reason; other sessions do not notice.
//! - Nothing is believed: memory for a message grows as its bytes arrive, deadlines bound every message that has begun,
//!   and every limit is in [`Config`].
//! - There is no authentication and no encryption. Bind to addresses of trusted networks only.

mod bounce;
mod cache;
mod compile;
mod connection;
mod greeted;
mod handles;
mod holdings;
mod limits;
mod listen;
mod models;
mod outgoing;
mod programs;
mod refusal;
mod session;

pub use limits::{BadSize, CacheConfig, Config, MIN_MESSAGE, parse_bytes};
pub use listen::BindError;

use std::collections::HashMap;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use log::{debug, error, warn};

use crate::device::Device;
use crate::rpc::wire::ext::State;
use cache::Cache;
use models::Models;
use refusal::Refusal;

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
    models: Option<Models>,
    stopping: AtomicBool,
    live: Mutex<Live>,
    /// A session has ended.
    ended: Condvar,
}

/// Sockets of the sessions, to close them.
#[derive(Default)]
struct Live {
    streams: HashMap<u64, Arc<TcpStream>>,
    next: u64,
}

impl Server {
    /// Listens on `host` (an IPv4 or IPv6 address, or a name) and `port` (0: any free one).
    ///
    /// # Errors
    /// [`BindError`] when that is not possible, when the cache's or the models' folder cannot be used, or without any device.
    pub fn bind(host: &str, port: u16, devices: Vec<Arc<dyn Device>>, config: Config) -> Result<Server, BindError> {
        if devices.is_empty() {
            return Err(BindError::NoDevice);
        }
        let cache = config
            .cache
            .as_ref()
            .map(|at| Cache::open(at).map_err(|source| BindError::Cache { dir: at.dir.display().to_string(), source }));
        let cache = cache.transpose()?;
        let models = config.models.as_ref().map(|dir| {
            Models::open(dir).map_err(|source| BindError::Models { dir: dir.display().to_string(), source })
        });
        let models = models.transpose()?;
        let listener = listen::listen(host, port)?;
        let addr = listener.local_addr().map_err(|source| BindError::Host { host: host.to_owned(), source })?;
        let shared = Shared {
            addr,
            devices,
            config,
            cache,
            models,
            stopping: AtomicBool::new(false),
            live: Mutex::default(),
            ended: Condvar::new(),
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
        self.shared.close_all();
    }

    /// Starts the session of a new connection, if there is room for it. Never waits for the client.
    fn admit(&self, stream: TcpStream, peer: SocketAddr) {
        let max = self.shared.config.max_connections;
        let stream = Arc::new(stream);
        let Some(guest) = Guest::enter(&self.shared, &stream) else {
            warn!("{peer}: refused: there are already {max} connections; connection closed");
            return;
        };
        let started = std::thread::Builder::new().name("session".to_owned()).spawn(move || {
            let shared = &guest.shared;
            // A panic is a bug of ours that this client's input has found. It ends this session alone.
            if catch_unwind(AssertUnwindSafe(|| serve(shared, stream, peer))).is_err() {
                error!("{peer}: bug in fanout: the session panicked; connection closed");
            }
        });
        if let Err(e) = started {
            error!("{peer}: cannot start a thread for the session: {e}; connection closed");
            std::thread::sleep(EXHAUSTED);
        }
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

/// A place among the live connections, given back when dropped.
struct Guest {
    shared: Arc<Shared>,
    key: u64,
}

impl Guest {
    fn enter(shared: &Arc<Shared>, stream: &Arc<TcpStream>) -> Option<Guest> {
        let mut live = shared.live();
        if live.streams.len() >= shared.config.max_connections {
            return None;
        }
        let key = live.next;
        live.next += 1;
        live.streams.insert(key, Arc::clone(stream));
        Some(Guest { shared: Arc::clone(shared), key })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.shared.live().streams.remove(&self.key);
        self.shared.ended.notify_all();
    }
}

impl Shared {
    fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Whether clients are taken.
    fn state(&self) -> State {
        State::Ready
    }

    /// Connections that are served.
    fn sessions(&self) -> u32 {
        self.live().streams.len().try_into().unwrap_or(u32::MAX)
    }

    fn live(&self) -> MutexGuard<'_, Live> {
        // Each change of the map is one call: a panic elsewhere cannot have left it torn.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close_all(&self) {
        let until = Instant::now() + GRACE;
        let mut live = self.live();
        for stream in live.streams.values() {
            // Fails where the client was faster.
            let _ = stream.shutdown(Shutdown::Both);
        }
        while !live.streams.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                warn!("{} sessions still wait for a device; not waiting for them", live.streams.len());
                return;
            }
            live = self.ended.wait_timeout(live, left).unwrap_or_else(PoisonError::into_inner).0;
        }
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

    /// How many connections are open.
    pub fn connections(&self) -> usize {
        self.0.live().streams.len()
    }
}

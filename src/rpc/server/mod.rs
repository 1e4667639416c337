//! RPC server: offers the devices of this process to clients over the network, both fanout's and llama.cpp's.
//!
//! ```text
//! this file: listen → accept → admission, pending_handshakes, tenants (budgets of what is counted) → one thread per connection
//!   ↓
//! serve            chooses the front end, logs the end of the session (audit)
//!   ↓
//! ggml │ extended  the two front ends: decode requests, call the core, encode replies; independent of each other
//!   ↓
//! handshake, resource_requests   HELLO, and the requests that both front ends serve
//! version_adapter   clients of other versions than the newest, before the ggml front end
//!   ↓
//! session          the core: buffers, graph import, program cache, uploads, copies, failures; device::Queue does the work
//!   ↓
//! http             the state of the server for browsers, probes and Prometheus: no session, and no lock that a session takes
//! status, statistics, counters   that state: what sessions have counted
//!   ↓
//! context          shared by all sessions: devices, limits, lifecycle, versions, tensor_cache, gguf_index,
//!                  transfer_tokens (transfers from other servers), peers (transfers to other servers),
//!                  collectives (sums with another server, protocol 8.0), groups (collectives of the extension)
//!   ↓
//! client_connection                   framed I/O with one client, with deadlines
//! log_limits                          limits the log lines that clients cause
//! folder                              opens the files of the cache and of the models by their folder's handle
//! host_memory                         budget of the host memory that clients cause, by tenants and their sessions
//! refused_clients                     clients that are refused for a time, after faults of their kernels
//! hangup_watch                        aborts the work of clients that have gone
//! device_watch                        ends the server when a device is lost
//! ```
//!
//! Not here: the messages (`rpc::wire`), sockets (`rpc::transport`), and the execution of graphs (`device`). Read this file
//! first, then `serve.rs` and one of the front ends. `tests/layout/layer_table.rs` lists which of these modules may use which.
//!
//! - A session owns its handles, virtual addresses and memory budget. All of it is freed when the session ends, also after a
//!   failure or a panic.
//! - ggml's protocol has no error reply. A request that fails closes its connection. The log has a line with the peer, the
//!   command and the reason, and the audit line of the session, both within the limits of `log_limits`; other sessions are not
//!   affected.
//! - Client input is untrusted: memory for a message grows only as its bytes arrive, deadlines bound every message that has
//!   begun, and everything that a client can cause has a limit. [`Config`] has the limits that an operator may change; the
//!   others are constants. docs/flags.md lists the former, docs/ARCHITECTURE.md the latter.
//! - Without [`Config::keys`] there is no authentication and no encryption. Bind to addresses of trusted networks only.

mod accept;
mod admission;
mod allowed_keys;
mod audit;
mod client_connection;
mod collectives;
mod context;
mod counters;
mod device_watch;
mod extended;
mod folder;
mod ggml;
mod gguf_index;
mod groups;
mod handshake;
mod hangup_watch;
mod host_memory;
mod http;
mod ip_network;
mod lifecycle;
mod limits;
mod listen;
mod log_limits;
mod peers;
mod pending_handshakes;
mod refused_clients;
mod resource_requests;
mod serve;
mod session;
mod statistics;
mod status;
mod tenants;
mod tensor_cache;
mod transfer_tokens;
mod version_adapter;
mod versions;

pub use crate::rpc::transport::BoundSocket;
pub use allowed_keys::{ServerKeys, ServerKeysError};
pub use gguf_index::model_link_targets;
pub use ip_network::{IpNetwork, ParseNetworkError};
pub use limits::{CacheConfig, Config, MIN_MESSAGE};
pub use listen::{BindError, ListenerInfo};
pub(crate) use log_limits::{LogKind, LogLimits};
pub use peers::{ParsePeerError, Peer};
pub use refused_clients::RefusedClient;
pub use versions::{ListenAddress, ParseListenError, ParseVersionError, ServedVersion};

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use log::{error, info, warn};

use crate::device::{Device, DeviceError};
use crate::rpc::status::HostMemoryStatus;
#[cfg(test)]
use crate::rpc::transport::Listen;
use crate::rpc::transport::tls::Proof;
use crate::rpc::transport::{Address, PeerAddr};
use accept::AcceptLoop;
use admission::Admission;
use collectives::Rendezvous;
use context::ServerContext;
use device_watch::DeviceWatch;
use gguf_index::GgufIndex;
use hangup_watch::HangupWatch;
use host_memory::HostMemory;
use http::{HostNames, HttpPool};
use lifecycle::Lifecycle;
#[cfg(test)]
use listen::AllowedClients;
use listen::{HttpUse, ServedListener};
use peers::PeerAllowlist;
use statistics::Statistics;
use tenants::Tenants;
use tensor_cache::TensorCache;
#[cfg(test)]
use versions::VersionPolicy;
use versions::VersionProbe;

/// How long a shutdown waits for sessions to end: a session may be blocked on a device.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the server drains when a device is lost, before it closes all connections: sessions on other devices can finish
/// what they run.
pub const LOST_DEVICE_DRAIN: Duration = Duration::from_secs(10);

/// How long the shutdown after [`LOST_DEVICE_DRAIN`] waits for sessions to end. Those on the lost device may never end.
const LOST_DEVICE_SHUTDOWN: Duration = Duration::from_secs(1);

/// A listening server. [`Server::run`] accepts and serves connections.
pub struct Server {
    /// At least one.
    listeners: Vec<ServedListener>,
    control: Arc<ServerControl>,
    context: Arc<ServerContext>,
}

/// Why [`Server::run`] has returned.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ended {
    /// [`ServerHandle::shutdown`] or [`ServerHandle::drain`] was called.
    Shutdown,
    /// A thread that the server needs could not be started, with the system's error.
    NoThread(DeviceError),
    /// A device is lost, with its error. The process must be started again to use the device. It should exit without running
    /// destructors (`_exit`): the release of a device's resources may wait for a kernel that never ends.
    DeviceLost(DeviceError),
}

/// Stops or drains a server from another thread. Clones control the same server.
#[derive(Clone)]
pub struct ServerHandle(Arc<ServerControl>);

/// Shared by a server and its handles: wakes the accept loops, and closes and counts the sessions.
struct ServerControl {
    /// The address of the first listener.
    addr: Address,
    /// Each makes the blocked `accept` of a listener return.
    wakers: Vec<Box<dyn Fn() + Send + Sync>>,
    admission: Arc<Admission>,
    lifecycle: Arc<Lifecycle>,
    host_memory: Arc<HostMemory>,
    tenants: Arc<Tenants>,
    device_watch: DeviceWatch,
    keys: Option<ServerKeys>,
    device_count: usize,
}

impl Server {
    /// Listens on `host` (an IPv4 or IPv6 address, or a host name) and `port` (0: any free port).
    ///
    /// # Errors
    /// [`BindError`] if the address cannot be listened on, the folder of the cache or of the models cannot be used, the host
    /// name of a peer cannot be resolved, or `devices` is empty.
    pub fn bind(host: &str, port: u16, devices: Vec<Arc<dyn Device>>, config: Config) -> Result<Server, BindError> {
        Server::bind_all(&[ListenAddress::new(host, port)], devices, config)
    }

    /// Listens on several addresses, each with versions of the protocol of its own. All of them serve the same devices.
    ///
    /// # Errors
    /// As [`Server::bind`]. Also if `addresses` is empty, or if one has no version and [`Config::protocol`] is empty.
    pub fn bind_all(
        addresses: &[ListenAddress],
        devices: Vec<Arc<dyn Device>>,
        config: Config,
    ) -> Result<Server, BindError> {
        let bind = || addresses.iter().map(ListenAddress::bind).collect();
        Server::bind_listeners(|config| listen::open_listeners(addresses, config, bind), devices, config)
    }

    /// As [`Server::bind_all`], on sockets that are bound already, possibly by another process: `sockets` returns one for each
    /// of `addresses`, in their order. It is called last, once everything else that may fail has succeeded.
    ///
    /// # Errors
    /// As [`Server::bind_all`]. [`BindError::Sockets`] if `sockets` fails or returns another number of sockets.
    pub fn bind_sockets(
        addresses: &[ListenAddress],
        sockets: impl FnOnce() -> io::Result<Vec<BoundSocket>>,
        devices: Vec<Arc<dyn Device>>,
        config: Config,
    ) -> Result<Server, BindError> {
        let sockets = || sockets().map_err(|error| BindError::Sockets { error });
        Server::bind_listeners(|config| listen::open_listeners(addresses, config, sockets), devices, config)
    }

    /// As [`Server::bind`], with any transport.
    #[cfg(test)]
    pub(in crate::rpc) fn bind_with(
        listener: Box<dyn Listen>,
        devices: Vec<Arc<dyn Device>>,
        config: Config,
    ) -> Result<Server, BindError> {
        let with_policy = |config: &Config| {
            let policy = VersionPolicy::new(None, &config.protocol).ok_or(BindError::NoVersion)?;
            let http = if config.http { HttpUse::Shared } else { HttpUse::No };
            Ok(vec![ServedListener { listener, policy, tls: false, clients: AllowedClients::default(), http }])
        };
        Server::bind_listeners(with_policy, devices, config)
    }

    /// `listen` is called last, so that no client can connect to a server that then fails to
    /// start.
    fn bind_listeners(
        listen: impl FnOnce(&Config) -> Result<Vec<ServedListener>, BindError>,
        devices: Vec<Arc<dyn Device>>,
        config: Config,
    ) -> Result<Server, BindError> {
        if devices.is_empty() {
            return Err(BindError::NoDevice);
        }
        if let Some(keys) = &config.keys {
            keys.check_devices(devices.len())?;
        }
        let logs = Arc::new(LogLimits::new(&config));
        let tensor_cache = config.cache.as_ref().map(|at| {
            TensorCache::open(at, &logs).map_err(|error| BindError::Cache { dir: at.dir.display().to_string(), error })
        });
        let tensor_cache = tensor_cache.transpose()?;
        let proof = config.keys.as_ref().map(ServerKeys::proof);
        let lacks_proof = |peer: &&Peer| match &proof {
            None => peer.demands_key() || peer.demands_certificate(),
            Some(Proof::Key(_)) => peer.demands_certificate(),
            Some(Proof::Certificate(_)) => peer.demands_key(),
        };
        if let Some(peer) = config.peers.iter().find(lacks_proof) {
            return Err(BindError::PeerKey { peer: peer.to_string() });
        }
        let peers = PeerAllowlist::resolve(&config.peers, proof)
            .map_err(|(peer, error)| BindError::Peer { peer: peer.to_string(), error })?;
        let gguf_index = config.models.as_ref().map(|dir| {
            GgufIndex::open(dir, config.digests.as_deref())
                .map_err(|error| BindError::Models { dir: dir.display().to_string(), error })
        });
        let gguf_index = gguf_index.transpose()?;
        let listeners = listen(&config)?;
        let addr = listeners.first().ok_or(BindError::NoAddress)?.listener.local_addr();
        let wakers = listeners.iter().map(|served| served.listener.waker()).collect();
        let info = |served: &ServedListener| ListenerInfo {
            addr: ip_address(&served.listener.local_addr()),
            versions: served.policy.versions().to_vec(),
            tls: served.tls,
            allowed: served.clients.networks().to_vec(),
            http: served.http != HttpUse::No,
        };
        let tenants = Tenants::new(&config);
        let host_memory = Arc::clone(&tenants.host_memory);
        let host_memory = HostMemory::new(host_memory, config.max_connections, config.stall_timeout);
        let admission = Admission::new(&tenants, &config);
        let lifecycle = Arc::new(Lifecycle::new(&admission));
        let (keys, device_count) = (config.keys.clone(), devices.len());
        let context = ServerContext {
            all_devices: devices,
            listeners: listeners.iter().map(info).collect(),
            tensor_cache,
            transfer_tokens: Arc::default(),
            groups: Arc::default(),
            peers: Arc::new(peers),
            gguf_index,
            lifecycle: Arc::clone(&lifecycle),
            host_memory: Arc::clone(&host_memory),
            statistics: Statistics::new(),
            http: HttpPool::new(HostNames::new(config.http_hosts.iter().cloned())),
            hangup_watch: HangupWatch::default(),
            tenants: Arc::clone(&tenants),
            version_probe: VersionProbe::of_order(&config.protocol),
            rendezvous: Rendezvous::default(),
            logs,
            config,
        };
        let device_watch = DeviceWatch::default();
        let control = ServerControl {
            addr,
            wakers,
            admission,
            lifecycle,
            host_memory,
            tenants,
            device_watch,
            keys,
            device_count,
        };
        Ok(Server { listeners, control: Arc::new(control), context: Arc::new(context) })
    }

    /// The IP address and the actual port on which the server listens; the first one of several. 0.0.0.0:0 for a transport
    /// without IP addresses, which [`Server::bind`] never uses; [`Server::endpoint`] works for every transport.
    pub fn local_addr(&self) -> SocketAddr {
        ip_address(&self.control.addr)
    }

    /// The addresses on which the server listens, in the order of [`Server::bind_all`], with the versions of the protocol that
    /// it answers there.
    pub fn listeners(&self) -> Vec<ListenerInfo> {
        self.context.listeners.clone()
    }

    /// The address on which the server listens, as shown in messages and as clients connect to it; the first one of several.
    pub fn endpoint(&self) -> String {
        self.control.addr.to_string()
    }

    /// A handle that stops or drains the server.
    pub fn handle(&self) -> ServerHandle {
        ServerHandle(Arc::clone(&self.control))
    }

    /// Serves until [`ServerHandle::shutdown`]. Then closes every connection, and returns when all sessions have ended, or
    /// after 10 seconds if a session is still blocked on a device.
    ///
    /// When a device is lost ([`Device::lost`]), the server drains by itself for at most [`LOST_DEVICE_DRAIN`], as by
    /// [`ServerHandle::drain`]; [`ServerHandle::wait_for_lost_device`] returns when that begins.
    pub fn run(self) -> Ended {
        self.run_with(|| ())
    }

    /// As [`Server::run`]. Calls `on_ready` when all threads that the server needs have started, so that it serves; never if one
    /// cannot be started.
    pub fn run_with(self, on_ready: impl FnOnce()) -> Ended {
        let control = Arc::clone(&self.control);
        let started = self.serve(on_ready);
        control.device_watch.end();
        match (control.device_watch.lost(), started) {
            (Some(error), _) => Ended::DeviceLost(error),
            (None, Err(error)) => Ended::NoThread(error),
            (None, Ok(())) => Ended::Shutdown,
        }
    }

    fn serve(self, on_ready: impl FnOnce()) -> Result<(), DeviceError> {
        let Server { listeners, control, context } = self;
        let hangups = Arc::clone(&context);
        let watch =
            std::thread::Builder::new().name("hangup-watch".to_owned()).spawn(move || hangups.hangup_watch.run());
        let watch =
            watch.map_err(|e| DeviceError::thread_spawn_failed("that watches for clients that have gone", &e))?;
        let drain_if_lost = {
            let (handle, context) = (ServerHandle(Arc::clone(&control)), Arc::clone(&context));
            move || handle.drain_if_lost(&context.all_devices)
        };
        let device_watch = std::thread::Builder::new().name("device-watch".to_owned()).spawn(drain_if_lost);
        let not_watching = |e| DeviceError::thread_spawn_failed("that watches for devices that are lost", &e);
        let mut started = device_watch.map(drop).map_err(not_watching);
        // Before the first connection, so that its query of the status finds the devices' memory.
        context.statistics.take_sample(&context.all_devices, status::sample_facts(&context));
        let sample = {
            let context = Arc::clone(&context);
            move || context.statistics.run(&context.all_devices, &context.logs, || status::sample_facts(&context))
        };
        if let Err(e) = std::thread::Builder::new().name("statistics".to_owned()).spawn(sample) {
            warn!("cannot start the thread of the statistics: {e}; rates and memory are not shown");
        }
        let accept_loop = |ServedListener { listener, policy, clients, http, .. }| AcceptLoop {
            listener,
            policy,
            clients,
            http,
            control: Arc::clone(&control),
            context: Arc::clone(&context),
        };
        let mut loops = listeners.into_iter().map(accept_loop);
        let first = loops.next();
        std::thread::scope(|scope| {
            for other in loops {
                let thread = std::thread::Builder::new().name("accept".to_owned());
                if let Err(e) = thread.spawn_scoped(scope, || other.run()) {
                    started = Err(DeviceError::thread_spawn_failed("that accepts connections", &e));
                }
            }
            match &started {
                Ok(()) => on_ready(),
                Err(_) => ServerHandle(Arc::clone(&control)).shutdown(),
            }
            if let Some(first) = first {
                first.run();
            }
        });
        control.admission.abort_connections();
        context.http.abort_connections();
        let timeout = control.device_watch.lost().map_or(SHUTDOWN_TIMEOUT, |_| LOST_DEVICE_SHUTDOWN);
        match control.admission.wait_until_empty(Instant::now() + timeout) {
            0 => {}
            left => {
                warn!("{left} sessions still wait for a device after {timeout:?}; the shutdown does not wait for them")
            }
        }
        context.hangup_watch.end();
        context.statistics.end();
        // A panic of the thread was reported when it happened.
        let _ = watch.join();
        context.logs.report_totals();
        started
    }
}

/// The IP address and port of a listener; 0.0.0.0:0 for a transport without IP addresses.
fn ip_address(addr: &Address) -> SocketAddr {
    addr.ip().unwrap_or_else(|| (Ipv4Addr::UNSPECIFIED, 0).into())
}

impl ServerHandle {
    /// Reads the list of [`Config::keys`] again, and ends the sessions of clients whose keys are no longer allowed, or may use
    /// other devices than before. Other limits of keys that have changed hold at once for the sessions that there are; what a
    /// session has beyond a lower limit stays. If the list cannot be used, the former one stays.
    ///
    /// # Errors
    /// [`ServerKeysError::Io`] and [`ServerKeysError::Line`].
    pub fn reread_keys(&self) -> Result<(), ServerKeysError> {
        let ServerControl { keys: Some(keys), admission, tenants, device_count, .. } = &*self.0 else { return Ok(()) };
        let changed = keys.reread(*device_count)?;
        for peer in admission.abort_if(|peer| !keys.still_allows(peer)) {
            info!("{peer}: the list no longer allows its key under this name; connection closed");
        }
        let has_other_devices = |peer| match peer {
            PeerAddr::Key(_, name) => changed.contains(name.identity()) && keys.still_allows(peer),
            _ => false,
        };
        for peer in admission.abort_if(has_other_devices) {
            info!("{peer}: its key may use other devices now; connection closed");
        }
        // After the ends: a key that left the list has no limits any more.
        tenants.update_key_limits();
        Ok(())
    }

    /// Makes [`Server::run`] close all connections and return.
    pub fn shutdown(&self) {
        if self.0.lifecycle.begin_shutdown() {
            self.0.wakers.iter().for_each(|wake| wake());
        }
    }

    /// Drains the server: rejects new clients, sends SERVER_STATE "draining" to the connected fanout clients (which may then
    /// move to another server), and keeps serving all connected clients. Shuts the server down and returns when all clients
    /// have disconnected, or after `grace_period`.
    pub fn drain(&self, grace_period: Duration) {
        let admission = &self.0.admission;
        let until = Instant::now() + grace_period;
        admission.drain();
        info!(
            "draining: no more clients are accepted; clients that are connected and served for up to {grace_period:?}: {}",
            admission.session_count()
        );
        match admission.wait_until_drained(until) {
            0 => info!("drained: all clients have disconnected"),
            left => warn!("{left} clients are still connected after {grace_period:?}; their connections are closed"),
        }
        self.shutdown();
    }

    /// Blocks until the server drains because a device is lost ([`Device::lost`]), and returns the device's error. `None` when
    /// [`Server::run`] returns without that.
    pub fn wait_for_lost_device(&self) -> Option<DeviceError> {
        self.0.device_watch.wait()
    }

    /// The client whose kernel made a device unusable: a key, or "address" and an IP address. `None`: no device is lost, or not by a
    /// kernel, or kernels of several clients ran, or the limits per address do not apply to the client, as to one from loopback.
    pub fn faulting_client(&self) -> Option<String> {
        self.0.device_watch.lost_by()
    }

    /// Refuses new sessions of these clients for a time, and of no others.
    pub fn refuse(&self, clients: &[RefusedClient]) {
        self.0.tenants.refused.set(clients);
    }

    /// Drains the server when a device is lost. Returns when the drain is over, or [`Server::run`] ends.
    fn drain_if_lost(&self, devices: &[Arc<dyn Device>]) {
        if let Some(error) = self.0.device_watch.run(devices, |session| self.0.tenants.identity_of_budget(session)) {
            error!("{error}; the server drains for at most {LOST_DEVICE_DRAIN:?} and ends");
            self.drain(LOST_DEVICE_DRAIN);
        }
    }

    /// The host memory that clients use, and its limit.
    pub fn host_memory(&self) -> HostMemoryStatus {
        self.0.host_memory.status()
    }

    /// Number of accepted connections that are open, whether or not their handshake is complete.
    pub fn connections(&self) -> usize {
        self.0.admission.connection_count()
    }
}

#[cfg(test)]
mod tests;

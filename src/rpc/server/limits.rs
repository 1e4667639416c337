//! Configuration of a server: protocol versions, limits and deadlines of its clients, tensor cache, peers, models.

use std::path::PathBuf;
use std::time::Duration;

use super::allowed_keys::ServerKeys;
use super::ip_network::IpNetwork;
use super::peers::Peer;
use super::versions::ServedVersion;
use crate::rpc::wire::Limits;
use crate::setters::setters;

/// Configuration of a server. Every limit and deadline has a default.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Config {
    /// Versions of ggml's protocol that the server answers on addresses without a version of their own, in the order in which
    /// it tries them with a client whose version it does not know. Must not be empty if there is such an address.
    pub protocol: Vec<ServedVersion>,
    /// The keys of the server and of its clients, who connect over TLS, except to addresses that are
    /// [plain](super::ListenAddress::plain). `None`: without TLS.
    pub keys: Option<ServerKeys>,
    /// Whether the server may listen without TLS on an address that other machines can reach, although no networks are allowed
    /// there ([`Config::allow`]).
    pub insecure: bool,
    /// The networks of the clients that may connect to addresses without TLS, except those with networks
    /// [of their own](super::ListenAddress::with_allowed). Others are closed before anything is read. Empty: all. Clients of
    /// loopback may always connect to addresses of loopback.
    pub allow: Vec<IpNetwork>,
    /// Maximum number of sessions at a time. Further clients receive the state "full" and are closed.
    pub max_connections: usize,
    /// Maximum number of sessions at a time of one key, or from one address (IPv6: from one network of 64 bits) except loopback. Further
    /// clients from it receive the state "full" and are closed.
    pub max_connections_per_address: usize,
    /// Whether the limits per address, and the equal shares of a device, hold for addresses of loopback as for others.
    /// Otherwise each session from loopback is a tenant of its own, to which the limits per address do not apply.
    pub loopback_tenants: bool,
    /// Maximum number of connections whose HELLO is not complete; a quarter of it for one address, except loopback. They are not
    /// sessions. At the limit, the oldest one of the address with the most of them is closed for a new one, without a reply.
    pub max_handshakes: usize,
    /// Device memory that one session may hold, in bytes over all devices. `None`: the total memory of the devices.
    pub max_memory: Option<u64>,
    /// Device memory that the sessions of one key or address (IPv6: of one network of 64 bits) may hold together, in bytes over all
    /// devices, except loopback. `None`: the total memory of the devices.
    pub max_memory_per_address: Option<u64>,
    /// Maximum host memory that clients may cause outside of devices, in bytes over all sessions: message bodies, prepared
    /// graphs, replies, staged uploads, transfers, bookkeeping. The sessions of one key or address may hold as much as stays
    /// free, so at most half of it; at loopback, each session may.
    pub max_host_memory: u64,
    /// Maximum number of threads for transfers and groups between servers; a quarter of it for one key or address. A session from
    /// loopback may have a quarter.
    pub max_transfer_threads: usize,
    /// Maximum number of buffers of one session.
    pub max_buffers: usize,
    /// Maximum host memory for the bodies of the graphs that a client of protocol 8.0 has numbered, in bytes per session.
    /// Beyond it, superseded and long unused graphs are dropped.
    pub max_graph_memory: u64,
    /// Maximum number of queues that clients of the extension have open, over all sessions; a quarter of it for one key or
    /// address, except loopback. A queue beyond it fails.
    pub max_queues: usize,
    /// Maximum sizes of messages and graphs.
    pub limits: Limits,
    /// Maximum time from the accepted connection to a complete HELLO.
    pub handshake_timeout: Duration,
    /// Maximum time within which 256 KiB of a message, or its end, must arrive, and maximum pause of a reply. Also the
    /// time in which all queues of a group must join, and a server of it must reply to a heartbeat.
    pub stall_timeout: Duration,
    /// Maximum pause before a request. A client that pauses longer is closed, also while its queues have work; the heartbeat of
    /// fanout's clients counts as requests. `None`: without limit.
    pub idle_timeout: Option<Duration>,
    /// Maximum time that a reply waits for the device that computes its data. A part of a collective that is missing for nine
    /// tenths of this time fails its group.
    pub reply_timeout: Duration,
    /// Maximum time for which one graph may use a CPU device, without the turns of others; a graph beyond it fails its queue.
    /// A wait for memory that another queue uses counts; the conversion of a weight before its first use is not ended. `None`:
    /// without limit.
    pub max_run: Option<Duration>,
    /// The tensor cache on disk, which serves SET_TENSOR_HASH. `None`: disabled.
    pub cache: Option<CacheConfig>,
    /// Allow-list of the servers with which this server exchanges tensors on a client's request: it may connect to them, and
    /// they to it. Empty by default: it connects to none, and answers COMM_INIT with 0.
    pub peers: Vec<Peer>,
    /// Port on which COMM_INIT lets this server listen for another server. `None`: 1000 above the port to which its client has
    /// connected, as llama.cpp's clients expect.
    pub comm_port: Option<u16>,
    /// Maximum time of a COMM_INIT, which waits for another server.
    pub comm_init_timeout: Duration,
    /// Number of log lines of one kind that one key or address (IPv6: one network of 64 bits) may cause at once; clients of loopback
    /// count together. Four times as many for all addresses, and twenty times as many lines about sessions that have ended.
    pub log_burst: u32,
    /// Time after which an address may cause one more such line. Lines in between are left out and counted.
    pub log_interval: Duration,
    /// Whether the state of the server is shown over HTTP on the addresses without TLS, if there are no keys. Addresses for
    /// [HTTP alone](super::ListenAddress::for_http) show it in any case.
    pub http: bool,
    /// Names under which clients of HTTP reach the server, beside `localhost`, addresses, and the hosts on which it listens.
    pub http_hosts: Vec<String>,
    /// Folder of GGUF files from which clients may load tensors by digest. `None`: disabled.
    pub models: Option<PathBuf>,
    /// Folder in which the digests of the tensors in `models` are kept, so that the next start need not compute them again;
    /// created if it does not exist. `None`: they are not kept.
    pub digests: Option<PathBuf>,
}

/// Minimum of [`Limits::max_body`], in bytes: every message of fixed size must fit.
pub const MIN_MESSAGE: u64 = 4 << 10;

impl Default for Config {
    fn default() -> Config {
        Config {
            protocol: ServedVersion::DEFAULT_ORDER.to_vec(),
            keys: None,
            insecure: false,
            allow: Vec::new(),
            max_connections: 1024,
            max_connections_per_address: 256,
            loopback_tenants: false,
            max_handshakes: 128,
            max_memory: None,
            max_memory_per_address: None,
            max_host_memory: 1 << 30,
            max_transfer_threads: 256,
            max_buffers: 1 << 16,
            max_graph_memory: 16 << 20,
            max_queues: 4096,
            limits: Config::limits(1 << 15, 16 << 20),
            handshake_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(60),
            idle_timeout: None,
            reply_timeout: Duration::from_secs(600),
            max_run: None,
            cache: None,
            peers: Vec::new(),
            comm_port: None,
            comm_init_timeout: Duration::from_secs(10),
            log_burst: 5,
            log_interval: Duration::from_secs(10),
            http: true,
            http_hosts: Vec::new(),
            models: None,
            digests: None,
        }
    }
}

setters!(Config {
    with_protocol protocol: Vec<ServedVersion>,
    with_keys keys: Option<ServerKeys>,
    with_insecure insecure: bool,
    with_allow allow: Vec<IpNetwork>,
    with_max_connections max_connections: usize,
    with_max_connections_per_address max_connections_per_address: usize,
    with_loopback_tenants loopback_tenants: bool,
    with_max_handshakes max_handshakes: usize,
    with_max_memory max_memory: Option<u64>,
    with_max_memory_per_address max_memory_per_address: Option<u64>,
    with_max_host_memory max_host_memory: u64,
    with_max_transfer_threads max_transfer_threads: usize,
    with_max_buffers max_buffers: usize,
    with_max_graph_memory max_graph_memory: u64,
    with_max_queues max_queues: usize,
    with_limits limits: Limits,
    with_handshake_timeout handshake_timeout: Duration,
    with_stall_timeout stall_timeout: Duration,
    with_idle_timeout idle_timeout: Option<Duration>,
    with_reply_timeout reply_timeout: Duration,
    with_max_run max_run: Option<Duration>,
    with_cache cache: Option<CacheConfig>,
    with_peers peers: Vec<Peer>,
    with_comm_port comm_port: Option<u16>,
    with_comm_init_timeout comm_init_timeout: Duration,
    with_log_burst log_burst: u32,
    with_log_interval log_interval: Duration,
    with_http http: bool,
    with_http_hosts http_hosts: Vec<String>,
    with_models models: Option<PathBuf>,
    with_digests digests: Option<PathBuf>,
});

impl Config {
    /// Limits for graphs of up to `max_nodes` nodes (four tensors per node, leaves included) and messages of up to `max_body`
    /// bytes, or [`MIN_MESSAGE`] if that is more.
    pub fn limits(max_nodes: u32, max_body: u64) -> Limits {
        Limits::new(max_nodes, max_nodes.saturating_mul(4), max_body.max(MIN_MESSAGE))
    }
}

/// Folder and size limit of the tensor cache.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CacheConfig {
    /// Folder of the cache; created if it does not exist. Files that the cache did not create are not touched.
    pub dir: PathBuf,
    /// Maximum size of all files of the cache together, in bytes.
    pub max_bytes: u64,
}

impl CacheConfig {
    /// A cache in the folder `dir` of at most [`CacheConfig::DEFAULT_BYTES`].
    pub fn new(dir: impl Into<PathBuf>) -> CacheConfig {
        CacheConfig { dir: dir.into(), max_bytes: CacheConfig::DEFAULT_BYTES }
    }

    /// Default size limit of a cache: 20 GiB.
    pub const DEFAULT_BYTES: u64 = 20 << 30;

    /// `$XDG_CACHE_HOME/fanout`, else `~/.cache/fanout`. `None` if there is neither an absolute `$XDG_CACHE_HOME` nor a home
    /// directory.
    pub fn default_dir() -> Option<PathBuf> {
        // XDG base directory specification: relative paths are ignored.
        let xdg = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|dir| dir.is_absolute());
        let base = xdg.or_else(|| std::env::home_dir().map(|home| home.join(".cache")))?;
        Some(base.join("fanout"))
    }
}

setters!(CacheConfig {
    with_max_bytes max_bytes: u64,
});

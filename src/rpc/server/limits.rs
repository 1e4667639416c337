//! What a server lets its clients have.

use std::path::PathBuf;
use std::time::Duration;

use super::peers::Peer;
use crate::rpc::wire::Limits;
use crate::setters::setters;

/// How a server treats its clients. Every limit has a sane default.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Config {
    /// Sessions at a time; further clients are told that the server is full, and closed.
    pub max_connections: usize,
    /// Bytes of device memory that one session may hold, over all devices; `None`: what the devices have.
    pub max_memory: Option<u64>,
    /// Buffers that one session may hold.
    pub max_buffers: usize,
    /// Sizes of messages and graphs.
    pub limits: Limits,
    /// From the accepted connection to the end of its HELLO.
    pub handshake_timeout: Duration,
    /// The longest pause inside a message, in either direction. Between messages a client may be silent for ever.
    pub stall_timeout: Duration,
    /// The longest that a reply waits for the device that computes its bytes.
    pub device_timeout: Duration,
    /// Where to keep tensor data for SET_TENSOR_HASH; `None`: nowhere.
    pub cache: Option<CacheConfig>,
    /// Other servers that this one may dial, to copy to them what its clients ask it to; none by default.
    pub peers: Vec<Peer>,
    /// A folder of GGUF files whose tensors clients may have loaded from there; `None`: none.
    pub models: Option<PathBuf>,
}

/// The smallest [`Limits::max_body`]: every message of a fixed size must fit.
pub const MIN_MESSAGE: u64 = 4 << 10;

impl Default for Config {
    fn default() -> Config {
        Config {
            max_connections: 1024,
            max_memory: None,
            max_buffers: 1 << 16,
            limits: Config::limits(1 << 15, 16 << 20),
            handshake_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(60),
            device_timeout: Duration::from_secs(600),
            cache: None,
            peers: Vec::new(),
            models: None,
        }
    }
}

setters!(Config {
    with_max_connections max_connections: usize,
    with_max_memory max_memory: Option<u64>,
    with_max_buffers max_buffers: usize,
    with_limits limits: Limits,
    with_handshake_timeout handshake_timeout: Duration,
    with_stall_timeout stall_timeout: Duration,
    with_device_timeout device_timeout: Duration,
    with_cache cache: Option<CacheConfig>,
    with_peers peers: Vec<Peer>,
    with_models models: Option<PathBuf>,
});

impl Config {
    /// Limits for graphs of `max_nodes` nodes (with a few leaves for each) and messages of `max_body` bytes.
    pub fn limits(max_nodes: u32, max_body: u64) -> Limits {
        Limits::new(max_nodes, max_nodes.saturating_mul(4), max_body.max(MIN_MESSAGE))
    }
}

/// Where the tensor cache lives and how large it may grow.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CacheConfig {
    /// Its folder; made if it is not there. Files of other names in it are left alone.
    pub dir: PathBuf,
    /// Bytes of all its files together.
    pub max_bytes: u64,
}

impl CacheConfig {
    /// A cache in this folder, of [`CacheConfig::DEFAULT_BYTES`].
    pub fn new(dir: impl Into<PathBuf>) -> CacheConfig {
        CacheConfig { dir: dir.into(), max_bytes: CacheConfig::DEFAULT_BYTES }
    }

    /// The size that a cache has unless told otherwise: 20 GiB.
    pub const DEFAULT_BYTES: u64 = 20 << 30;

    /// `$XDG_CACHE_HOME/fanout`, else `~/.cache/fanout`; `None` where neither variable is set.
    pub fn default_dir() -> Option<PathBuf> {
        // The XDG specification: a relative path is to be ignored.
        let xdg = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|dir| dir.is_absolute());
        let base = xdg.or_else(|| std::env::home_dir().map(|home| home.join(".cache")))?;
        Some(base.join("fanout"))
    }
}

setters!(CacheConfig {
    with_max_bytes max_bytes: u64,
});

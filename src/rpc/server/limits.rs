//! What a server lets its clients have.

use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::peers::Peer;
use crate::rpc::wire::Limits;

/// How a server treats its clients. Every limit has a sane default.
#[derive(Clone, Debug)]
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

impl Config {
    /// Limits for graphs of `max_nodes` nodes (with a few leaves for each) and messages of `max_body` bytes.
    pub fn limits(max_nodes: u32, max_body: u64) -> Limits {
        Limits { max_nodes, max_tensors: max_nodes.saturating_mul(4), max_body: max_body.max(MIN_MESSAGE) }
    }
}

/// Where the tensor cache lives and how large it may grow.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// Its folder; made if it is not there. Files of other names in it are left alone.
    pub dir: PathBuf,
    /// Bytes of all its files together.
    pub max_bytes: u64,
}

impl CacheConfig {
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

/// A text that is no size.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("expected a size such as 512M, 8G or 1048576, got {0:?}")]
pub struct BadSize(String);

/// Reads a size in bytes: digits and an optional K, M, G or T (powers of 1024), as in `20G`.
///
/// # Errors
/// [`BadSize`] for anything else, and for sizes of 2^64 bytes and more.
pub fn parse_bytes(text: &str) -> Result<u64, BadSize> {
    let bad = || BadSize(text.to_owned());
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        _ => return Err(bad()),
    };
    if digits.starts_with('+') {
        return Err(bad());
    }
    let number: u64 = digits.parse().map_err(|_| bad())?;
    number.checked_mul(1 << shift).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_powers_of_1024() {
        for (text, want) in [
            ("0", Some(0)),
            ("1048576", Some(1 << 20)),
            ("20G", Some(20 << 30)),
            ("512m", Some(512 << 20)),
            ("3KiB", Some(3 << 10)),
            ("16777215T", Some(16_777_215 << 40)),
            ("16777216T", None),
            ("99999999999999999999", None),
            ("", None),
            ("G", None),
            ("+1", None),
            ("-1", None),
            ("1.5G", None),
            ("5X", None),
        ] {
            assert_eq!(parse_bytes(text).ok(), want, "{text:?}");
        }
    }
}

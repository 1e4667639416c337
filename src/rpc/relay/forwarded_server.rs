//! A server behind a relay, as text: `[[LOCALHOST:]LOCALPORT=]HOST[:PORT]=KEY`.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::rpc::keys::{ParsePublicKeyError, PublicKey};
use crate::rpc::server::ListenAddress;
use crate::rpc::transport::with_default_port;

/// A server with a key, and the local address at which a [`Relay`](super::Relay) listens for its clients.
///
/// Parsed from `[[LOCALHOST:]LOCALPORT=]HOST[:PORT]=KEY`: `gpu-1=ed25519:…`, `50060=10.0.0.5:50053=ed25519:…`,
/// `[::1]:50060=[fd00::5]=ed25519:…`. Without `PORT`, 50052.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardedServer {
    local: Option<ListenAddress>,
    endpoint: String,
    key: PublicKey,
}

/// A text that is no [`ForwardedServer`].
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ParseForwardedServerError {
    /// The text after the last `=` is `cert`.
    #[error("the relay proves a key, and needs that of the server: it cannot use servers with certificates")]
    Certificate,
    /// There is no key after the address.
    #[error(
        "the server's key is missing, as in gpu-1:50052=ed25519:…: rpc-server prints its key when it starts, and `rpc-server \
         keygen --public FILE` prints that of a file"
    )]
    NoKey,
    /// The part after the last `=` is no key.
    #[error(transparent)]
    Key(#[from] ParsePublicKeyError),
    /// The address of the server is neither a host nor a host and a port.
    #[error("expected the server's address, such as gpu-1, 10.0.0.5:50052 or [fd00::5]:50052, got {0:?}")]
    Endpoint(String),
    /// The local address is neither a port nor a host and a port.
    #[error("expected a local address, such as 50060 or 127.0.0.1:50060, got {0:?}")]
    Local(String),
}

impl ForwardedServer {
    /// The local address; `None`: the default of its place in the list.
    pub fn local(&self) -> Option<&ListenAddress> {
        self.local.as_ref()
    }

    /// The server's `HOST:PORT`.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// The server's key.
    pub fn key(&self) -> PublicKey {
        self.key
    }
}

impl FromStr for ForwardedServer {
    type Err = ParseForwardedServerError;

    fn from_str(text: &str) -> Result<ForwardedServer, ParseForwardedServerError> {
        let (addresses, key) = text.rsplit_once('=').ok_or(ParseForwardedServerError::NoKey)?;
        let (local, server) = match addresses.rsplit_once('=') {
            Some((local, server)) => (Some(local), server),
            None => (None, addresses),
        };
        if key == "cert" {
            return Err(ParseForwardedServerError::Certificate);
        }
        // The key of `50060=gpu-1` was forgotten: say so, rather than that `gpu-1` is no key.
        if local.is_none() && endpoint(key).is_some() {
            return Err(ParseForwardedServerError::NoKey);
        }
        let key = key.parse()?;
        let endpoint = endpoint(server).ok_or_else(|| ParseForwardedServerError::Endpoint(server.to_owned()))?;
        let local = local.map(|local| {
            let address: Option<ListenAddress> = local.parse().ok();
            // `=VERSION`, `=plain` and `=allow:` belong to addresses of servers.
            let is_bare = |at: &ListenAddress| at.version().is_none() && !at.plain() && at.allowed().is_empty();
            let address = address.filter(is_bare);
            address.ok_or_else(|| ParseForwardedServerError::Local(local.to_owned()))
        });
        Ok(ForwardedServer { local: local.transpose()?, endpoint, key })
    }
}

fn endpoint(text: &str) -> Option<String> {
    with_default_port(text, ListenAddress::DEFAULT_PORT)
}

impl fmt::Display for ForwardedServer {
    /// For example `gpu-1:50052 (ed25519:…)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.endpoint, self.key)
    }
}

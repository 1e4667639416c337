//! RPC client: connects to a server that implements ggml's RPC protocol and presents its devices as devices of this process. It
//! supports the versions of the protocol from that of 2024 to 8.0, in the one that the server answers, and the extensions of
//! fanout's server, if it has the same revision of them.
//!
//! ```no_run
//! use fanout::rpc::client::{Endpoint, Options};
//!
//! let endpoint = Endpoint::connect("10.0.0.5:50052", &Options::default())?;
//! for device in endpoint.devices() {
//!     println!("{}: {} bytes free", device.info().name, device.memory()?.free);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ```text
//! device ─┬─► queue ──► connection (one writer at a time, requests in order) ══► server
//!         │     │           ▲ deferred sends: buffers to free, completion probes
//!         │     ▼           │
//!         │   completion_probe ◄──── reader (replies in order) ◄═════════════════ server
//!         └─► graph_messages (a Graph as the body of a GRAPH_COMPUTE)
//! ```
//!
//! - **One connection per endpoint**: all devices and queues of an endpoint share it. A server processes the messages of 7.0 in
//!   order, also across its devices. Work on one endpoint therefore needs no explicit synchronization, and a copy between two
//!   of its devices is a message.
//! - **Pipelining**: a request without a reply is written and forgotten. Replies arrive in the order of their
//!   requests; a reader thread dispatches them.
//! - **Completion probes**: 7.0 has no completion message. A [`TimelinePoint`](crate::device::TimelinePoint) counts as reached
//!   when the reply to a later read of the same device arrives. That read is either a download that was sent anyway, or a read
//!   of one byte that is sent when a caller waits for the point. A probe is late if more work has been sent in the meantime;
//!   after a late probe the queue probes each later point at once, without waiting for a caller.
//! - **Liveness**: the connection is lost when the server closes it, sends an unsolicited reply, or sends nothing for
//!   [`Options::silence_timeout`] while a reply is due. All pending waits then fail at once with
//!   [`DeviceError::ConnectionLost`], and so do all later calls. A server with the
//!   extensions gets a heartbeat (PING) when it has been silent for a third of the timeout. The heartbeat reveals a frozen
//!   server even while no reply is due, for example while only another server waits for this server's result. To recover,
//!   connect again: the buffers of a lost connection are gone.
//! - **Older versions**: the client encodes requests in the server's own version (`rpc::wire::version_codec`). Devices report ops
//!   that this version cannot express as unsupported.
//! - **Validation**: replies are untrusted input, as requests are for a server. Lengths are checked before bytes are read,
//!   values before they are used.
//!
//! Start reading at `connect.rs`, then `connection.rs` and `queue.rs`. `ggml_protocol.rs` sends a queue's work by the messages
//! of 7.0, and `extended/` by the messages of the extensions. The encoding of messages lives in `rpc::wire`, sockets in
//! `rpc::transport`, and what clients share with servers in `rpc::connection`.

mod completion_probe;
mod connect;
mod connection;
mod device;
mod extended;
mod ggml_protocol;
mod graph_messages;
mod queue;
mod queue_failure;
mod reader;
mod remote_read;
mod row_runs;
mod stored_graphs;

pub use crate::rpc::transport::DialError;
pub use crate::rpc::wire::Version;
pub use connect::{ConnectError, endpoint_with_port};
pub(crate) use extended::is_sending_queue;

use crate::device::{DEVICE_TIMEOUT, Device, DeviceError};
use crate::rpc::keys::{Certificate, PublicKey, SecretKey};
use crate::rpc::status::ServerStatus;
use crate::rpc::wire::ext::{ExtCommand, ExtRequest, ExtResponse, HelloExtReply, Status};
use crate::setters::setters;
use connect::AcceptedHandshake;
use connection::Connection;
use extended::ClientSession;
use std::sync::Arc;
use std::time::Duration;

/// Limit of the state of a server in bytes: 256 sessions, and devices.
const MAX_STATUS_BYTES: u64 = 1 << 20;

/// Timeouts and keys of a connection to a server.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Timeout of one attempt to connect, including its handshake.
    pub connect_timeout: Duration,
    /// How long to retry with exponential backoff while the connection is refused or not answered, the server is full or
    /// draining, or its host name does not resolve (in container networks a name exists only while its container runs). An
    /// attempt that starts within this time is allowed to finish. Zero: a single attempt.
    pub retry: Duration,
    /// Longest time for which a server may send nothing while a reply is due, or accept no byte of a message. Work that was
    /// sent before a read delays its reply: the server must finish that work within this time. A server with the extensions
    /// replies to heartbeats in between, also while it is idle. A heartbeat is sent after a third of this time.
    pub silence_timeout: Duration,
    /// The keys of servers: the connection uses TLS, and the server must prove one of them. Empty: without TLS.
    pub server_keys: Vec<PublicKey>,
    /// The key that this client proves to a server over TLS. Servers demand one.
    pub key: Option<SecretKey>,
    /// The certificate that this client proves to a server over TLS, instead of keys. The server must prove one of the same CA,
    /// for the host of the endpoint.
    pub certificate: Option<Certificate>,
}

setters!(Options {
    with_connect_timeout connect_timeout: Duration,
    with_retry retry: Duration,
    with_silence_timeout silence_timeout: Duration,
    with_server_keys server_keys: Vec<PublicKey>,
    with_key key: Option<SecretKey>,
    with_certificate certificate: Option<Certificate>,
});

impl Default for Options {
    fn default() -> Options {
        Options {
            connect_timeout: Duration::from_secs(10),
            retry: Duration::ZERO,
            silence_timeout: Duration::from_secs(60),
            server_keys: Vec::new(),
            key: None,
            certificate: None,
        }
    }
}

/// A connection to a server and the devices that it offers. The connection stays open until the endpoint and every object that
/// was made by its devices are dropped.
#[derive(Debug)]
pub struct Endpoint {
    connection: Arc<Connection>,
    version: Version,
    devices: Vec<Arc<dyn Device>>,
}

impl Endpoint {
    /// Connects to `host:port` (`[host]:port` for an IPv6 address), negotiates the protocol version and lists the server's
    /// devices. Their names are `host:port/0`, `host:port/1` and so on, where the part before the slash is `endpoint` as given.
    /// Devices of a server with the extensions keep the names that the server gives them, where those are unique and printable,
    /// instead of numbers.
    ///
    /// # Errors
    /// [`ConnectError`]: `endpoint` is malformed, or the server is unreachable, does not reply, is full or draining, or has an
    /// unsupported version.
    pub fn connect(endpoint: &str, options: &Options) -> Result<Endpoint, ConnectError> {
        connect::retry_with_backoff(options.retry, || Endpoint::attempt(endpoint, options))
    }

    fn attempt(endpoint: &str, options: &Options) -> Result<Endpoint, ConnectError> {
        let AcceptedHandshake { mut handshake, server } = connect::connect(endpoint, options)?;
        let negotiate_extensions = || extended::hello_ext(endpoint, &mut handshake, options.connect_timeout);
        let server_info = server.supports_extensions().then(negotiate_extensions).transpose()?;
        let timeouts = (options.silence_timeout, DEVICE_TIMEOUT.max(options.silence_timeout));
        let connection = Connection::start(endpoint, handshake, server.codec, timeouts, server_info)?;
        let devices = match &connection.session {
            Some(_) => extended::enumerate(&connection)?,
            None => device::enumerate(&connection)?,
        };
        Ok(Endpoint { connection, version: server.version, devices })
    }

    /// The devices, in the server's order.
    pub fn devices(&self) -> &[Arc<dyn Device>] {
        &self.devices
    }

    /// The endpoint, as it was given to [`Endpoint::connect`].
    pub fn name(&self) -> &str {
        self.connection.endpoint()
    }

    /// The protocol version of the server; 0.0.0 for versions from before HELLO existed.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The state of a server with the extensions.
    ///
    /// # Errors
    /// The connection has failed, or the server has no extensions or sends no valid state.
    pub fn status(&self) -> Result<ServerStatus, DeviceError> {
        if self.connection.session.is_none() {
            let limitation = "is a server without extensions, and tells nothing of its state";
            return Err(DeviceError::CapabilityMissing { device: self.name().to_owned(), limitation });
        }
        let command = ExtCommand::Status;
        let encode = |out: &mut Vec<u8>| ExtRequest::Status(Status {}).encode(out);
        let reply = self.connection.call_encoded(command.name(), 4..=MAX_STATUS_BYTES, encode)?;
        match ExtResponse::decode(command, &reply) {
            Ok(ExtResponse::Status(json)) => serde_json::from_str(json)
                .map_err(|e| self.connection.fail(format!("the server replied to STATUS with invalid JSON: {e}"))),
            other => Err(self.connection.fail(format!("the server replied to STATUS with {other:?}"))),
        }
    }

    /// The server's self-description from the handshake of the extensions; `None` for servers without them.
    pub fn server(&self) -> Option<&HelloExtReply> {
        self.connection.session.as_ref().map(ClientSession::server)
    }
}

#[cfg(test)]
mod test_support {
    use crate::rpc::connection::Handshake;
    use crate::rpc::transport::{Address, Deadline, dial};
    use std::net::SocketAddr;
    use std::time::Duration;

    /// Dials a server. The returned handshake has not sent anything yet.
    pub(super) fn dial_handshake(addr: SocketAddr) -> Handshake {
        Handshake::new(dial(&[Address::Tcp(addr)], &Deadline::after(Duration::from_secs(30))).unwrap().1)
    }
}

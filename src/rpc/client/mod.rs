//! A client: the devices of a server of protocol 7.0, fanout's or llama.cpp's, or of an older version, as devices of this
//! process.
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
//!         │     │           ▲ errands: buffers to free, proofs that someone waits for
//!         │     ▼           │
//!         │   proof ◄──── reader (replies in order) ◄════════════════════════════ server
//!         └─► graph (a Graph as the body of a GRAPH_COMPUTE)
//! ```
//!
//! - All devices and queues of an endpoint share one connection. A server takes its messages in order, also across devices,
//!   so that work on one endpoint needs no waiting for each other: a copy between two of its devices is a message.
//! - A request that has no reply is written and forgotten. The others wait in order; a thread reads their replies.
//! - The protocol has no word for "done". A [`Point`](crate::device::Point) is proved by the reply to a later read of the
//!   same device: one that was sent anyway, or one of a single byte, which is sent when somebody asks for the point. Where
//!   that turns out to be late, because more work has been sent meanwhile, the queue's later points send it at once.
//! - A server that closes the connection, answers what nobody asked, or says nothing for [`Options::patience`] while a reply
//!   is due, is lost: [`DeviceError::Lost`](crate::device::DeviceError::Lost) for all that waits, at once,
//!   and for all that comes later. One that greets is asked now and then whether it is there, so that something is due also
//!   while others alone wait for its work, and while it has none. To go on, connect again: buffers of a lost connection are gone.
//! - A server of an older version is spoken to in that version (`rpc::wire::dialect`). What it has no word
//!   for, its devices do not run.
//! - What comes from the server is checked as what comes to ours is: lengths before bytes, values before use.

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

pub use crate::rpc::transport::DialError;
pub use connect::ConnectError;

use crate::device::{Device, PATIENCE};
use crate::rpc::wire::Version;
use crate::rpc::wire::ext::GreetReply;
use crate::setters::setters;
use connect::AcceptedHandshake;
use connection::Connection;
use extended::ClientSession;
use std::sync::Arc;
use std::time::Duration;

/// How to speak to a server.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// From an attempt to connect to the end of its handshake.
    pub connect_timeout: Duration,
    /// For how long to try again, with growing pauses, where nobody answers, a server is full or about to end, or its host's
    /// name is not known: the names of containers come and go with them. An attempt that has begun in that time is let
    /// finish; zero: a single attempt.
    pub retry: Duration,
    /// The longest that a server may say nothing while a reply is due, or take nothing of a message. Work that is sent
    /// before a read counts: a server must be able to do it in this time. One that greets answers in between, and must do so
    /// also when it has nothing to do: it is asked after a third of this.
    pub silence_timeout: Duration,
}

setters!(Options {
    with_connect_timeout connect_timeout: Duration,
    with_retry retry: Duration,
    with_silence_timeout silence_timeout: Duration,
});

impl Default for Options {
    fn default() -> Options {
        Options {
            connect_timeout: Duration::from_secs(10),
            retry: Duration::ZERO,
            silence_timeout: Duration::from_secs(60),
        }
    }
}

/// A connection to a server, and the devices that it offers. The connection lives as long as this, or anything made by one
/// of its devices.
#[derive(Debug)]
pub struct Endpoint {
    connection: Arc<Connection>,
    version: Version,
    devices: Vec<Arc<dyn Device>>,
}

impl Endpoint {
    /// Connects to `host:port` (`[host]:port` for an IPv6 address) and asks which devices there are. They are named
    /// `host:port/0`, `host:port/1` and so on, with the endpoint as it is given here.
    ///
    /// # Errors
    /// [`ConnectError`] says whose fault it is: a name that is none, a server that cannot be reached, does not answer,
    /// takes nobody now, or speaks another version.
    pub fn connect(endpoint: &str, options: &Options) -> Result<Endpoint, ConnectError> {
        connect::retry_with_backoff(options.retry, || Endpoint::attempt(endpoint, options))
    }

    fn attempt(endpoint: &str, options: &Options) -> Result<Endpoint, ConnectError> {
        let AcceptedHandshake { mut handshake, server } = connect::connect(endpoint, options)?;
        let greet = || extended::hello_ext(endpoint, &mut handshake, options.connect_timeout);
        let greeted = server.supports_extensions().then(greet).transpose()?;
        let patience = (options.silence_timeout, PATIENCE.max(options.silence_timeout));
        let connection = Connection::start(endpoint, handshake, server.dialect, patience, greeted)?;
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

    /// The server, as it was given to [`Endpoint::connect`].
    pub fn name(&self) -> &str {
        self.connection.endpoint()
    }

    /// The version of the protocol that the server speaks; 0.0.0 where that is older than HELLO.
    pub fn version(&self) -> Version {
        self.version
    }

    /// What a server of fanout's said of itself when it was connected to; `None` from others.
    pub fn server(&self) -> Option<&GreetReply> {
        self.connection.session.as_ref().map(ClientSession::server)
    }
}

#[cfg(test)]
mod tests {
    use crate::rpc::connection::Handshake;
    use crate::rpc::transport::{Address, Deadline, dial};
    use std::net::SocketAddr;
    use std::time::Duration;

    /// A connection before its handshake.
    pub(super) fn dial_handshake(addr: SocketAddr) -> Handshake {
        Handshake::new(dial(&[Address::Tcp(addr)], &Deadline::after(Duration::from_secs(30))).unwrap().1)
    }
}

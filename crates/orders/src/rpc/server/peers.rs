//! Connections to other servers, and fakes of what dials them.

#[path = "../../harnesses/peer_connections.rs"]
pub(crate) mod harness;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../../../src/rpc/server/peers/message.rs"]
mod message;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../../../src/rpc/server/peers/peer_connection.rs"]
mod peer_connection;

pub(super) use dial::describe_transport_error;
pub(super) use message::{PeerMessage, read_message};

use crate::device::{Budget, DeviceError, Reservation};
use crate::rpc::connection::Handshake;
use crate::rpc::transport::Connection;
use crate::sync::orders::yield_now;
use crate::sync::{Arc, Mutex, lock};
use std::time::Duration;

pub(super) const MAX_ADDRESS_BYTES: usize = 8;

pub(super) type FailQueue = Arc<dyn Fn(DeviceError) + Send + Sync>;

fn copy_failure(address: &str, why: String) -> DeviceError {
    DeviceError::Remote { device: address.to_owned(), reason: format!("cannot copy to {why}") }
}

#[derive(Clone, Copy)]
struct PeerTimeouts {
    handshake: Duration,
    stall: Duration,
}

mod dial {
    use crate::rpc::transport::TransportError;

    pub(in crate::rpc::server) fn describe_transport_error(e: &TransportError) -> String {
        e.to_string()
    }
}

/// Dials once, with a result that is known before.
pub(super) struct PeerDialer {
    address: String,
    timeouts: PeerTimeouts,
    dialled: Mutex<Option<Result<Connection, String>>>,
    _thread: Reservation,
}

/// The threads of connections, each with its dialer.
#[derive(Clone)]
pub(super) struct DialThreads(Arc<Budget>);

impl DialThreads {
    pub(super) fn new() -> DialThreads {
        DialThreads(Budget::new(64))
    }

    pub(super) fn dialer(&self, address: &str, dialled: Result<Connection, String>) -> PeerDialer {
        PeerDialer {
            address: address.to_owned(),
            timeouts: PeerTimeouts { handshake: Duration::from_secs(10), stall: Duration::from_secs(30) },
            dialled: Mutex::new(Some(dialled)),
            _thread: self.0.reserve(1).expect("no limit"),
        }
    }

    /// Waits until the thread of each connection has ended.
    pub(super) fn wait_until_ended(&self) {
        while self.0.used() > 0 {
            yield_now();
        }
    }
}

impl PeerDialer {
    pub(super) fn handshake_timeout(&self) -> Duration {
        self.timeouts.handshake
    }

    pub(super) fn stall_timeout(&self) -> Duration {
        self.timeouts.stall
    }

    pub(super) fn dial(&self) -> Result<Handshake, String> {
        yield_now();
        lock(&self.dialled).take().expect("dialled once").map(Handshake::new)
    }
}

/// Dials by a function of the address.
pub(super) struct PeerPool(pub(super) Dial);

type Dial = Box<dyn Fn(&str) -> Result<PeerDialer, String> + Send + Sync>;

impl PeerPool {
    pub(super) fn dialer(&self, address: &str) -> Result<PeerDialer, String> {
        self.0(address)
    }
}

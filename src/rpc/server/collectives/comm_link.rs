//! The connection of one device to the device of another server, for collectives.

use std::time::Duration;

use super::exchange::{ExchangeError, ExchangeLimits, Payload, exchange};
use crate::device::AdaptiveSpin;
use crate::rpc::transport::{Connection, Deadline, Duplex, Interest, PeerAddr, TransportError};

/// Size of the capabilities that both ends send first, in bytes. All zero: TCP, without an upgrade.
pub(super) const CAPS_BYTES: usize = 24;

/// Spin-then-park: longest time that an exchange polls for the peer's bytes before its thread sleeps.
const MAX_SPIN: Duration = Duration::from_millis(2);

/// What a COMM_INIT requests: the same values name the same connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::rpc::server) struct LinkRequest {
    /// [`LISTENING_RANK`](super::LISTENING_RANK) or [`CONNECTING_RANK`](super::CONNECTING_RANK).
    pub(in crate::rpc::server) rank: u32,
    /// Port on which rank 0 listens.
    pub(in crate::rpc::server) port: u16,
    /// Host of rank 0; empty at rank 0.
    pub(in crate::rpc::server) host: String,
}

/// An established connection.
pub(in crate::rpc::server) struct CommLink {
    request: LinkRequest,
    connection: Duplex,
    spin: AdaptiveSpin,
}

/// A peer that has connected to rank 0 and has yet to send its capabilities.
pub(super) struct Candidate {
    connection: Duplex,
    /// Bytes of its capabilities that have arrived.
    received: usize,
    deadline: Deadline,
}

impl Candidate {
    /// A peer that has to send its capabilities within `timeout`.
    pub(super) fn new(connection: Connection, timeout: Duration) -> Candidate {
        let (connection, deadline) = (connection.into_duplex(), Deadline::after(timeout));
        Candidate { connection, received: 0, deadline }
    }

    /// Address of the peer, for the log.
    pub(super) fn peer(&self) -> PeerAddr {
        self.connection.peer()
    }

    /// Waits until bytes have arrived, for up to `timeout`.
    pub(super) fn wait(&self, timeout: Duration) -> Result<bool, TransportError> {
        self.connection.wait(Interest::Read, &Deadline::after(timeout))
    }

    /// Reads what has arrived, and checks it as rank 1 does ([`check_caps`]). Returns whether all of the capabilities have.
    ///
    /// # Errors
    /// The peer is late or lost, or offers more than TCP.
    pub(super) fn poll_caps(&mut self) -> Result<bool, ExchangeError> {
        let mut caps = [0; CAPS_BYTES];
        while let Some(missing) = caps.get_mut(self.received..).filter(|missing| !missing.is_empty()) {
            match self.connection.try_read(missing)? {
                Some(n) => {
                    check_caps(missing.get(..n).unwrap_or_default())?;
                    self.received += n;
                }
                None if self.deadline.remaining().is_some() => return Ok(false),
                None => {
                    let (what, after) = ("no capabilities of the other server", self.deadline.timeout());
                    return Err(TransportError::TimedOut { what, after }.into());
                }
            }
        }
        Ok(true)
    }

    /// Sends the capabilities of rank 0, after the peer's have arrived.
    ///
    /// # Errors
    /// The peer is late or lost, or the client has hung up.
    pub(super) fn complete(
        self,
        request: &LinkRequest,
        timeout: Duration,
        hung_up: &dyn Fn() -> bool,
    ) -> Result<CommLink, ExchangeError> {
        CommLink::establish(request, self.connection, 0, timeout, hung_up)
    }
}

impl CommLink {
    /// Exchanges the capabilities with rank 0, to which `connection` was dialled.
    ///
    /// # Errors
    /// The peer is late or lost, or offers more than TCP, or the client has hung up.
    pub(super) fn join(
        request: &LinkRequest,
        connection: Connection,
        timeout: Duration,
        hung_up: &dyn Fn() -> bool,
    ) -> Result<CommLink, ExchangeError> {
        CommLink::establish(request, connection.into_duplex(), CAPS_BYTES, timeout, hung_up)
    }

    fn establish(
        request: &LinkRequest,
        mut connection: Duplex,
        incoming: usize,
        timeout: Duration,
        hung_up: &dyn Fn() -> bool,
    ) -> Result<CommLink, ExchangeError> {
        let spin = AdaptiveSpin::new(MAX_SPIN);
        let limits = ExchangeLimits { stall: timeout, deadline: Deadline::after(timeout), hung_up };
        exchange(&mut connection, &spin, incoming as u64, &mut CapsPayload { sent: false }, &limits)?;
        Ok(CommLink { request: request.clone(), connection, spin })
    }

    /// Whether this is a working connection for that request.
    pub(in crate::rpc::server) fn serves(&self, request: &LinkRequest) -> bool {
        self.request == *request && !self.connection.hung_up()
    }

    /// Address of the other server, for the log.
    pub(in crate::rpc::server) fn peer(&self) -> PeerAddr {
        self.connection.peer()
    }

    /// Sends all bytes of `payload` and receives `incoming` bytes. After an error, the connection is useless.
    pub(super) fn exchange<P: Payload>(
        &mut self,
        incoming: u64,
        payload: &mut P,
        limits: &ExchangeLimits<'_>,
    ) -> Result<(), P::Error> {
        exchange(&mut self.connection, &self.spin, incoming, payload, limits)
    }
}

/// Capabilities: zeros in both directions.
struct CapsPayload {
    sent: bool,
}

impl Payload for CapsPayload {
    type Error = ExchangeError;

    fn next_outgoing(&mut self) -> Result<Option<Vec<u8>>, ExchangeError> {
        Ok((!std::mem::replace(&mut self.sent, true)).then(|| vec![0; CAPS_BYTES]))
    }

    fn receive(&mut self, bytes: &[u8]) -> Result<(), ExchangeError> {
        check_caps(bytes)
    }
}

/// Refuses capabilities that are not zero, at either end: another protocol would be taken for collectives. The client could read
/// the bytes of a dialled service that sends first, such as an SSH server, through COMM_ALLREDUCE; and rank 0 would add the bytes
/// of a program that dials its port, such as a browser, to the client's tensor.
fn check_caps(bytes: &[u8]) -> Result<(), ExchangeError> {
    if bytes.iter().all(|&byte| byte == 0) { Ok(()) } else { Err(ExchangeError::NotPlainTcp) }
}

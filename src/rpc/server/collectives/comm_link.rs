//! The connection of one device to the device of another server, for collectives.

use std::time::Duration;

use super::exchange::{ExchangeError, ExchangeLimits, Payload, exchange};
use super::{CONNECTING_RANK, LISTENING_RANK};
use crate::rpc::adaptive_spin::AdaptiveSpin;
use crate::rpc::transport::{Deadline, Duplex, PeerAddr};

/// Size of the capabilities that both ends send first, in bytes. All zero: TCP, without an upgrade.
pub(super) const CAPS_BYTES: usize = 24;

/// Spin-then-park: longest time that an exchange polls for the peer's bytes before its thread sleeps.
const MAX_SPIN: Duration = Duration::from_millis(2);

/// What a COMM_INIT requests: the same values name the same connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::rpc::server) struct LinkRequest {
    /// [`LISTENING_RANK`] or [`CONNECTING_RANK`].
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

impl CommLink {
    /// Exchanges the capabilities with a peer that has just connected, or been connected to. Rank 0 sends nothing before it has
    /// received the peer's.
    ///
    /// # Errors
    /// The peer is late or lost, or the client has hung up.
    pub(super) fn establish(
        request: &LinkRequest,
        mut connection: Duplex,
        timeout: Duration,
        hung_up: &dyn Fn() -> bool,
    ) -> Result<CommLink, ExchangeError> {
        let spin = AdaptiveSpin::new(MAX_SPIN);
        let limits = ExchangeLimits { stall: timeout, deadline: Deadline::after(timeout), hung_up };
        // The peer's capabilities do not matter: without an offer of this end, the connection stays TCP.
        let receive = |link: &mut Duplex| exchange(link, &spin, CAPS_BYTES as u64, &mut Caps { send: false }, &limits);
        if request.rank == LISTENING_RANK {
            receive(&mut connection)?;
        }
        exchange(&mut connection, &spin, 0, &mut Caps { send: true }, &limits)?;
        if request.rank == CONNECTING_RANK {
            receive(&mut connection)?;
        }
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

/// Capabilities: zeros to send, or any bytes to receive.
struct Caps {
    send: bool,
}

impl Payload for Caps {
    type Error = ExchangeError;

    fn next_outgoing(&mut self) -> Result<Option<Vec<u8>>, ExchangeError> {
        Ok(std::mem::take(&mut self.send).then(|| vec![0; CAPS_BYTES]))
    }

    fn receive(&mut self, _: &[u8]) -> Result<(), ExchangeError> {
        Ok(())
    }
}

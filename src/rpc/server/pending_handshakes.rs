//! Pending handshakes: the connections whose HELLO is not complete, oldest first, and which of them is closed for a new
//! connection at the limit of handshakes.
//!
//! Eviction instead of refusal: connections that send nothing cost an attacker nothing, and would keep every new client out
//! until their handshakes time out. The *victim* is chosen in two steps.
//!
//! - **Address**: the one with the most pending handshakes, the new connection included, so that a flood from one address closes
//!   no handshake of another one. Addresses of loopback are told apart here, whatever the configuration says.
//! - **Connection** of that address: the oldest that has sent nothing. A client sends its HELLO, or begins TLS, at once, so a
//!   flood of silent connections does not close its handshake. The newest quarter of the address's connections
//!   is exempt from the search for a silent one: otherwise a flood of connections that send a part of HELLO would close each new
//!   client before its first byte arrives. A flood of a quarter of the limit within that time still does.

use crate::sync::Weak;
use std::collections::{BTreeMap, HashMap};

use super::audit::SessionAudit;
use super::tenants::Tenant;
use crate::device::Reservation;
use crate::rpc::transport::Aborter;

/// The pending handshakes of a server.
#[derive(Default)]
pub(super) struct PendingHandshakes {
    /// By the number of the connection, which grows with time.
    by_key: BTreeMap<u64, PendingHandshake>,
}

/// A connection whose HELLO is not complete.
struct PendingHandshake {
    /// Counts it.
    _permit: Reservation,
    address: Option<Tenant>,
    connection: Aborter,
    /// Has the number of bytes that the session's thread has received; none before the thread runs.
    audit: Weak<SessionAudit>,
}

impl PendingHandshake {
    /// Whether the client has sent nothing, or has gone. A peer that begins TLS has sent something.
    fn is_silent(&self) -> bool {
        let has_received = self.audit.upgrade().is_some_and(|audit| audit.received() > 0);
        !has_received && !self.connection.has_sent()
    }
}

impl PendingHandshakes {
    pub(super) fn insert(&mut self, key: u64, permit: Reservation, connection: Aborter) {
        let address = Tenant::address(connection.peer());
        let pending = PendingHandshake { _permit: permit, address, connection, audit: Weak::new() };
        self.by_key.insert(key, pending);
    }

    /// `audit` counts the bytes of the connection from now on.
    pub(super) fn set_audit(&mut self, key: u64, audit: Weak<SessionAudit>) {
        if let Some(pending) = self.by_key.get_mut(&key) {
            pending.audit = audit;
        }
    }

    /// Ends the count of a handshake, if it is pending.
    pub(super) fn remove(&mut self, key: u64) {
        self.by_key.remove(&key);
    }

    /// The handshake to close for a new connection of the address `newcomer`; `None`: there is none. `within`: the tenant whose
    /// own limit is reached.
    pub(super) fn victim(&self, newcomer: Option<Tenant>, within: Option<Tenant>) -> Option<u64> {
        let addresses = self.by_key.values().map(|pending| pending.address);
        let address = within.or_else(|| most_frequent(addresses.clone(), newcomer).flatten());
        let count = addresses.filter(|&of| of == address).count();
        let mut of_address = self.by_key.iter().filter(|(_, pending)| pending.address == address);
        let oldest = of_address.clone().next();
        let silent = of_address.by_ref().take(count - count / 4).find(|(_, pending)| pending.is_silent());
        silent.or(oldest).map(|(&key, _)| key)
    }
}

/// The most frequent of `addresses` if `newcomer` is added to them; of several, the one that comes first. `None`: there are none.
fn most_frequent(
    addresses: impl Iterator<Item = Option<Tenant>> + Clone,
    newcomer: Option<Tenant>,
) -> Option<Option<Tenant>> {
    let mut counts = HashMap::from([(newcomer, 1)]);
    addresses.clone().for_each(|address| *counts.entry(address).or_insert(0) += 1);
    // `max_by_key` would return the last of several.
    addresses.reduce(|best, address| if counts.get(&address) > counts.get(&best) { address } else { best })
}

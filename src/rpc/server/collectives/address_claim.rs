//! The addresses on which rank 0 listens: one client at a time uses an address.
//!
//! Nothing on the connection of two servers names a client. If two clients start collectives between the same servers, rank 1 of
//! one may connect to rank 0 of the other. This is harmless while one of the clients gets a 0 from any server, because it then
//! sends no COMM_ALLREDUCE. So the second client of an address is answered 0 at once, while the first one's COMM_INIT is pending
//! and as long afterwards as the first one's rank 1 may still be dialling.

use crate::sync::{Arc, Mutex, lock};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use super::rendezvous::RendezvousError;
use crate::rpc::transport::Deadline;

/// The claimed addresses of a server.
#[derive(Default)]
pub(super) struct AddressClaims(Mutex<ClaimTable>);

#[derive(Default)]
struct ClaimTable {
    by_address: HashMap<SocketAddr, Claim>,
    next_number: u64,
}

struct Claim {
    number: u64,
    /// When the client's rank 1 has stopped dialling. `None` while COMM_INIT is pending.
    until: Option<Deadline>,
}

impl AddressClaims {
    /// Claims an address for a COMM_INIT.
    ///
    /// # Errors
    /// [`RendezvousError::AddressClaimed`].
    pub(super) fn claim(self: &Arc<Self>, at: SocketAddr) -> Result<AddressClaim, RendezvousError> {
        let mut table = lock(&self.0);
        if let Some(claim) = table.by_address.get(&at)
            && claim.until.is_none_or(|until| until.remaining().is_some())
        {
            return Err(RendezvousError::AddressClaimed { at });
        }
        let number = table.next_number;
        table.next_number += 1;
        table.by_address.insert(at, Claim { number, until: None });
        Ok(AddressClaim { claims: Arc::clone(self), at, number })
    }
}

/// The use of an address by one client. Dropped as soon as the client's rank 1 is known to dial no more: at the first
/// COMM_ALLREDUCE, which a client sends only after both servers have replied, and at the end of the session.
pub(in crate::rpc::server) struct AddressClaim {
    claims: Arc<AddressClaims>,
    at: SocketAddr,
    number: u64,
}

impl AddressClaim {
    /// Limits the claim: a peer has connected, and rank 1 dials for at most `dial`.
    pub(super) fn expire_after(&self, dial: Duration) {
        if let Some(claim) = lock(&self.claims.0).by_address.get_mut(&self.at) {
            claim.until = Some(Deadline::after(dial));
        }
    }
}

impl Drop for AddressClaim {
    fn drop(&mut self) {
        let mut table = lock(&self.claims.0);
        // An expired claim may have been replaced.
        if table.by_address.get(&self.at).is_some_and(|claim| claim.number == self.number) {
            table.by_address.remove(&self.at);
        }
    }
}

//! Host memory: one budget of the server for the memory outside of devices that clients cause (`max-host-memory` in `--limits`): message
//! bodies, prepared and stored graphs, replies, staged uploads, transfers, bookkeeping. Everything is charged before it is
//! allocated, to the session and to the server.
//!
//! *Dynamic threshold*, as in the shared buffers of network switches: beside the bases of its sessions, a tenant may hold at most
//! as many bytes as stay free. One tenant can therefore take half of the budget, two a third each, and a newcomer always finds
//! something, however many sessions the others have. A fixed limit would waste memory if few clients are connected, or be exceeded
//! by the sum of many. Within what its tenant may hold, a session may hold at most [`SESSION_FACTOR`] times as much as is left for
//! the others of the tenant. A session without a tenant, as at loopback, is a tenant of its own, and
//! the factor does not apply to it.
//!
//! *Unfinished messages of the largest holder go first.* Many tenants together can still hold nearly everything, at no cost, by
//! messages that they never finish. A thread that waits for memory therefore ends, after [`EVICT_AFTER`], sessions that read a
//! large message, if that frees enough: sessions of tenants that hold more than the waiting tenant would, largest first, or larger
//! sessions of the waiting tenant.
//!
//! The *base* ([`BASE_BYTES`]) is reserved when the handshake of a connection is complete. It pays for small messages and small
//! replies, so an admitted session is served also while others hold all the rest. Up to half of the budget is kept for the bases
//! of sessions to come, so that connected sessions cannot fill the server for new ones.

mod byte_semaphore;
mod session;
#[cfg(test)]
mod tests;

pub(super) use byte_semaphore::{BytePermit, ByteSemaphore};
pub(super) use session::{HostCharge, SessionMemory};

use crate::poison::Unpoisoned;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use session::Account;
use thiserror::Error;

use crate::device::{Budget, DeviceError};
use crate::rpc::status::HostMemoryStatus;
use crate::size::Bytes;

/// Part of the base for the first bytes of a message's body, which are never charged.
pub(super) const BASE_BODY_BYTES: usize = 64 << 10;

/// Part of the base for the bytes of one reply at a time, which are not charged either.
pub(super) const BASE_REPLY_BYTES: u64 = 64 << 10;

/// Part of the base for the connection's buffers and the session's own state.
const CONNECTION_BYTES: u64 = 32 << 10;

/// Part of the base that pays for the first charges of a session: its first queue, some buffers, a small graph.
const PREPAID_BYTES: u64 = 64 << 10;

/// Host memory that is reserved for a session while it is connected.
pub(super) const BASE_BYTES: u64 = BASE_BODY_BYTES as u64 + BASE_REPLY_BYTES + CONNECTION_BYTES + PREPAID_BYTES;

/// Longest wait for host memory that other sessions hold.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// Part of its longest wait after which a thread ends unfinished messages of others: a message that is just arriving in a short
/// time is not ended for a wait that it would have satisfied.
const EVICT_AFTER: u32 = 8;

/// How many times as much as its tenant has left a session may hold. One session can take three quarters of what its tenant may
/// hold, and another one still finds something.
const SESSION_FACTOR: u64 = 3;

/// Host memory that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(super) enum HostMemoryError {
    #[error(
        "{} of host memory are not available{}: the session holds {}, all of its key or address {}, and {} of the server's {} are \
         free (max-host-memory in --limits); a key or address may hold as much as stays free",
        Bytes(*requested),
        if *.waited { ", also after a wait" } else { "" },
        Bytes(*held),
        Bytes(*of_tenant),
        Bytes(*free),
        Bytes(*limit)
    )]
    Exhausted { requested: u64, held: u64, of_tenant: u64, free: u64, limit: u64, waited: bool },
    #[error(
        "host memory is short (max-host-memory in --limits), and the session, which held {}, had not finished its message: its key or address, or \
         at loopback the session, held the most",
        Bytes(*held)
    )]
    Evicted { held: u64 },
    #[error("the client has gone while the session waited for host memory")]
    ClientGone,
}

impl From<HostMemoryError> for DeviceError {
    fn from(e: HostMemoryError) -> DeviceError {
        match e {
            HostMemoryError::ClientGone => DeviceError::Ended,
            e => DeviceError::Exhausted { resource: "host memory", reason: e.to_string() },
        }
    }
}

/// The host memory of a server.
pub(super) struct HostMemory {
    /// Contains the budgets of tenants, and the bases and charges of sessions. Changed only while the state is locked.
    budget: Arc<Budget>,
    /// Bytes that only bases may use.
    kept_for_bases: u64,
    /// Longest wait of a session.
    max_wait: Duration,
    /// Part of it after which unfinished messages of others are ended.
    evict_after: Duration,
    state: Mutex<HostMemoryState>,
    /// Notified when bytes are released while sessions wait, and when a session is closed.
    released: Condvar,
}

#[derive(Default)]
struct HostMemoryState {
    /// The accounts of all connections, by the number of their [`SessionMemory`].
    accounts: BTreeMap<u64, Account>,
    next_id: u64,
    /// Bytes of the bases.
    bases: u64,
    /// Number of threads that wait for bytes.
    waiting: usize,
}

impl HostMemory {
    /// The host memory of `budget`. As much as the bases of `max_sessions` need, but at most half, is kept for bases. A
    /// session waits for up to `stall_timeout`, and at most [`MAX_WAIT`].
    pub(super) fn new(budget: Arc<Budget>, max_sessions: usize, stall_timeout: Duration) -> Arc<HostMemory> {
        let kept_for_bases = BASE_BYTES.saturating_mul(max_sessions as u64).min(budget.limit() / 2);
        let max_wait = stall_timeout.min(MAX_WAIT);
        let (evict_after, state, released) = (max_wait / EVICT_AFTER, Mutex::default(), Condvar::new());
        Arc::new(HostMemory { budget, kept_for_bases, max_wait, evict_after, state, released })
    }

    pub(super) fn status(&self) -> HostMemoryStatus {
        HostMemoryStatus { used: self.budget.used(), limit: self.budget.limit(), peak: self.budget.peak() }
    }

    /// The memory of a new connection, which is to charge nothing before [`SessionMemory::reserve_base`]. `end` closes the
    /// connection, without blocking.
    pub(super) fn connect(self: &Arc<Self>, end: impl Fn() + Send + Sync + 'static) -> Arc<SessionMemory> {
        SessionMemory::new(self, Box::new(end))
    }

    /// The memory of a new session that is a tenant of its own, with its base.
    #[cfg(test)]
    pub(super) fn admit(self: &Arc<Self>) -> Result<Arc<SessionMemory>, HostMemoryError> {
        let session = self.connect(|| {});
        session.reserve_base(None).map(|()| session)
    }

    /// How many bytes of others must be released before a session may hold `own` and its tenant `of_tenant`, while others hold
    /// `others`: of other tenants, and of other sessions of its tenant, if it `has_tenant`.
    fn missing(&self, has_tenant: bool, own: u64, of_tenant: u64, others: u64) -> [u64; 2] {
        let limit = self.budget.limit();
        // As much as the tenant holds then must stay free.
        let of_others = of_tenant.saturating_mul(2).saturating_add(others).saturating_sub(limit);
        if !has_tenant {
            return [of_others, 0];
        }
        let most = limit.saturating_sub(others) / 2;
        [of_others, own.div_ceil(SESSION_FACTOR).saturating_add(of_tenant).saturating_sub(most)]
    }

    /// Bytes that are in use or kept for bases to come.
    fn used_and_kept(&self, state: &HostMemoryState) -> u64 {
        self.budget.used().saturating_add(self.kept_for_bases.saturating_sub(state.bases))
    }

    /// Ends sessions with unfinished messages, of the largest holders first, for the session `id` that waits: tenants that hold
    /// more than `of_tenant`, and sessions of its own tenant that hold more than `own`, until they will release as much as is
    /// `missing`.
    fn evict(&self, state: &mut HostMemoryState, id: u64, own: u64, of_tenant: u64, missing: [u64; 2]) {
        let tenant = state.accounts.get(&id).and_then(|account| account.tenant().cloned());
        for (is_own_tenant, mut missing) in [false, true].into_iter().zip(missing) {
            let is_own = |account: &Account| matches!((account.tenant(), &tenant), (Some(one), Some(other)) if Arc::ptr_eq(one, other));
            let of_kind = state.accounts.values_mut().filter(|account| is_own(account) == is_own_tenant);
            // Ended before, but not yet released.
            let (ending, mut victims): (Vec<_>, Vec<_>) = of_kind.partition(|account| account.is_evicted);
            missing = ending.iter().fold(missing, |missing, account| missing.saturating_sub(account.charged()));
            victims.retain(|account| {
                let holds_more = if is_own_tenant { account.charged() > own } else { account.of_tenant() > of_tenant };
                holds_more && account.charged() > 0 && account.has_unfinished_message
            });
            // Ending sessions that do not suffice would help nobody.
            if victims.iter().map(|account| account.charged()).sum::<u64>() < missing {
                continue;
            }
            victims.sort_by_key(|account| Reverse((account.of_tenant(), account.charged())));
            for victim in victims {
                if missing == 0 {
                    break;
                }
                missing = missing.saturating_sub(victim.charged());
                victim.evict();
                // It may wait for memory itself.
                self.released.notify_all();
            }
        }
    }

    /// Wakes the sessions that wait, after bytes were released.
    fn notify(&self, state: &HostMemoryState) {
        if state.waiting > 0 {
            self.released.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HostMemoryState> {
        // Ignores poisoning: no code that can panic runs while the numbers disagree.
        self.state.lock().unpoisoned()
    }
}

/// The part of a session's charged bytes that its base has not prepaid.
fn beyond_prepaid(held: u64) -> u64 {
    held.saturating_sub(PREPAID_BYTES)
}

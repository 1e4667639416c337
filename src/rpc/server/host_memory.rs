//! Host memory: one budget of the server for the memory outside of devices that clients cause (`--max-host-memory`): message
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
//! large message, if that frees enough: those of tenants that hold more than the waiting tenant would, largest first, or larger
//! sessions of the waiting tenant.
//!
//! The *base* ([`BASE_BYTES`]) is reserved when the handshake of a connection is complete. It pays for small messages and small
//! replies, so an admitted session is served also while others hold all the rest. Up to half of the budget is kept for the bases
//! of sessions to come, so that connected sessions cannot fill the server for new ones.

mod eviction;
mod session;
#[cfg(test)]
mod tests;

pub(super) use session::{HostCharge, SessionMemory};

use crate::poison::Unpoisoned;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use eviction::EVICT_AFTER;
use session::SessionAccount;
use thiserror::Error;

use crate::device::DeviceError;

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

/// How many times as much as its tenant has left a session may hold. One session can take three quarters of what its tenant may
/// hold, and another one still finds something.
const SESSION_FACTOR: u64 = 3;

/// Host memory that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(super) enum HostMemoryError {
    #[error(
        "{requested} bytes of host memory are not available{}: the session holds {held}, all of its key or address {of_tenant}, and \
         {free} of the server's {limit} are free (--max-host-memory); a key or address may hold as much as stays free",
        if *.waited { ", also after a wait" } else { "" }
    )]
    Exhausted { requested: u64, held: u64, of_tenant: u64, free: u64, limit: u64, waited: bool },
    #[error(
        "host memory is short (--max-host-memory), and the session, which held {held} bytes, had not finished its message: its key or \
         address, or at loopback the session, held the most"
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
    limit: u64,
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
    /// Bases of the sessions.
    bases: u64,
    /// Charges of the sessions beyond what their bases have prepaid.
    charged: u64,
    peak: u64,
    /// Number of threads that wait for bytes.
    waiting: usize,
    /// The sessions that have a base.
    sessions: Vec<Arc<SessionAccount>>,
}

impl HostMemoryState {
    fn used(&self) -> u64 {
        self.bases + self.charged
    }
}

/// How much host memory clients use at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostMemoryInfo {
    /// The limit in bytes.
    pub limit: u64,
    /// Bytes that are reserved now.
    pub used: u64,
    /// The most bytes that were reserved at a time.
    pub peak: u64,
}

impl HostMemory {
    /// A budget of `limit` bytes, of which as much as the bases of `max_sessions` need, but at most half, is kept for bases. A
    /// session waits for up to `stall_timeout`, and at most [`MAX_WAIT`].
    pub(super) fn new(limit: u64, max_sessions: usize, stall_timeout: Duration) -> Arc<HostMemory> {
        let kept_for_bases = BASE_BYTES.saturating_mul(max_sessions as u64).min(limit / 2);
        let max_wait = stall_timeout.min(MAX_WAIT);
        let (evict_after, state, released) = (max_wait / EVICT_AFTER, Mutex::default(), Condvar::new());
        Arc::new(HostMemory { limit, kept_for_bases, max_wait, evict_after, state, released })
    }

    pub(super) fn info(&self) -> HostMemoryInfo {
        let state = self.lock();
        HostMemoryInfo { limit: self.limit, used: state.used(), peak: state.peak }
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
        session.reserve_base(TenantHostMemory::of_session()).map(|()| session)
    }

    /// How many bytes of others must be released before a session may hold `own` and its tenant `of_tenant`, while others hold
    /// `others`: of other tenants, and of other sessions of its tenant.
    fn missing(&self, tenant: &TenantHostMemory, own: u64, of_tenant: u64, others: u64) -> [u64; 2] {
        // As much as the tenant holds then must stay free.
        let of_others = of_tenant.saturating_mul(2).saturating_add(others).saturating_sub(self.limit);
        if !tenant.has_sessions {
            return [of_others, 0];
        }
        let most = self.limit.saturating_sub(others) / 2;
        [of_others, own.div_ceil(SESSION_FACTOR).saturating_add(of_tenant).saturating_sub(most)]
    }

    /// Wakes the sessions that wait, after bytes were released.
    fn notify(&self, state: &HostMemoryState) {
        if state.waiting > 0 {
            self.released.notify_all();
        }
    }

    fn refusal(
        &self,
        state: &HostMemoryState,
        requested: u64,
        session: &SessionAccount,
        waited: bool,
    ) -> HostMemoryError {
        let free = self.limit.saturating_sub(state.bases.max(self.kept_for_bases) + state.charged);
        let (held, of_tenant) = (session.held(), session.of_tenant());
        HostMemoryError::Exhausted { requested, held, of_tenant, free, limit: self.limit, waited }
    }

    fn lock(&self) -> MutexGuard<'_, HostMemoryState> {
        // Ignores poisoning: no code that can panic runs while the numbers disagree.
        self.state.lock().unpoisoned()
    }
}

/// The host memory of a tenant, which limits its sessions together.
#[derive(Default)]
pub(super) struct TenantHostMemory {
    /// Charges of its sessions beyond what their bases have prepaid. Changed only while the server's state is locked.
    charged: AtomicU64,
    /// Whether it may have several sessions.
    has_sessions: bool,
}

impl TenantHostMemory {
    /// Of a tenant with any number of sessions.
    pub(super) fn new() -> Arc<TenantHostMemory> {
        Arc::new(TenantHostMemory { charged: AtomicU64::new(0), has_sessions: true })
    }

    /// Of a session that is a tenant of its own.
    pub(super) fn of_session() -> Arc<TenantHostMemory> {
        Arc::default()
    }
}

/// The part of a session's charged bytes that its base has not prepaid.
fn beyond_prepaid(held: u64) -> u64 {
    held.saturating_sub(PREPAID_BYTES)
}

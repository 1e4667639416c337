//! The host memory of one session: its account and its charges.

use crate::poison::Unpoisoned;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{
    BASE_BODY_BYTES, BASE_BYTES, BASE_REPLY_BYTES, HostMemory, HostMemoryError, HostMemoryState, beyond_prepaid,
};
use crate::device::{Budget, Reservation};

/// Shortest time between two evictions of one thread: the sessions need a moment to end.
const MIN_EVICT_INTERVAL: Duration = Duration::from_millis(10);

/// The host memory that a connection holds, read by its own threads and by threads that need memory of the largest holders.
pub(super) struct Account {
    /// Bytes that are charged to the session. Its base pays for the first [`PREPAID_BYTES`](super::PREPAID_BYTES) of them.
    held: u64,
    /// What the session has reserved; none before its base is. A connection has nothing to charge then: its HELLO is small.
    reserved: Option<SessionReservations>,
    /// Whether the session reads a message that is larger than its base pays for.
    pub(super) has_unfinished_message: bool,
    /// Whether the session was ended for others.
    pub(super) is_evicted: bool,
    /// Whether the client has gone: waits end.
    is_closed: bool,
    /// Closes the connection.
    end: Box<dyn Fn() + Send + Sync>,
}

struct SessionReservations {
    /// The budget of the session's tenant; `None`: it is a tenant of its own.
    tenant: Option<Arc<Budget>>,
    _base: Reservation,
    /// What is charged beyond what the base has prepaid, in the budget of the tenant.
    charges: Reservation,
}

impl Account {
    /// Bytes that are charged beyond what the base has prepaid.
    pub(super) fn charged(&self) -> u64 {
        beyond_prepaid(self.held)
    }

    pub(super) fn tenant(&self) -> Option<&Arc<Budget>> {
        self.reserved.as_ref()?.tenant.as_ref()
    }

    /// The same as [`Account::charged`] of all sessions of its tenant.
    pub(super) fn of_tenant(&self) -> u64 {
        self.tenant().map_or(self.charged(), |tenant| tenant.used())
    }

    /// Ends the session, so that others get its memory. Its waits are to be woken after this.
    pub(super) fn evict(&mut self) {
        self.is_evicted = true;
        (self.end)();
    }
}

/// The host memory of one session. Its base is released when the last charge is dropped, too.
pub(in crate::rpc::server) struct SessionMemory {
    pub(super) server: Arc<HostMemory>,
    id: u64,
}

/// Marks a session as one that reads a large message, until this is dropped.
pub(in crate::rpc::server) struct UnfinishedMessage(Arc<SessionMemory>);

impl Drop for UnfinishedMessage {
    fn drop(&mut self) {
        self.0.with_account(|account| account.has_unfinished_message = false);
    }
}

impl SessionMemory {
    /// The memory of a new connection, which `end` closes.
    pub(super) fn new(server: &Arc<HostMemory>, end: Box<dyn Fn() + Send + Sync>) -> Arc<SessionMemory> {
        let [has_unfinished_message, is_evicted, is_closed] = [false; 3];
        let account = Account { held: 0, reserved: None, has_unfinished_message, is_evicted, is_closed, end };
        let mut state = server.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.accounts.insert(id, account);
        Arc::new(SessionMemory { server: Arc::clone(server), id })
    }

    fn with_account<T>(&self, with: impl FnOnce(&mut Account) -> T) -> Option<T> {
        self.server.lock().accounts.get_mut(&self.id).map(with)
    }

    /// Reserves the base: the connection becomes a session of a tenant, whose budget `tenant` is. To be called once.
    ///
    /// # Errors
    /// The base does not fit into the limit.
    pub(in crate::rpc::server) fn reserve_base(&self, tenant: Option<Arc<Budget>>) -> Result<(), HostMemoryError> {
        let (server, mut state) = (&*self.server, self.server.lock());
        let reserve = |budget: &Arc<Budget>, bytes| budget.reserve(bytes).ok();
        let base = reserve(&server.budget, BASE_BYTES);
        let charges = reserve(tenant.as_ref().unwrap_or(&server.budget), 0);
        let (Some(_base), Some(charges)) = (base, charges) else {
            return Err(self.refusal(&state, BASE_BYTES, false));
        };
        if let Some(account) = state.accounts.get_mut(&self.id) {
            account.reserved = Some(SessionReservations { tenant, _base, charges });
            state.bases += BASE_BYTES;
        }
        Ok(())
    }

    /// A message of `len` bytes begins, whose sender may never finish it. `None`: the base pays for it.
    pub(in crate::rpc::server) fn begin_message(self: &Arc<Self>, len: usize) -> Option<UnfinishedMessage> {
        (len > BASE_BODY_BYTES).then(|| {
            self.with_account(|account| account.has_unfinished_message = true);
            UnfinishedMessage(Arc::clone(self))
        })
    }

    /// Why the connection was closed, if that was for the memory of others.
    pub(in crate::rpc::server) fn eviction(&self) -> Option<HostMemoryError> {
        self.with_account(|account| account.is_evicted.then_some(HostMemoryError::Evicted { held: account.held }))?
    }

    /// A charge of no bytes, which can grow.
    pub(in crate::rpc::server) fn empty(self: &Arc<Self>) -> HostCharge {
        HostCharge { session: Arc::clone(self), bytes: 0 }
    }

    /// Charges `bytes` until the charge is dropped.
    ///
    /// # Errors
    /// The memory is not available now. Nothing is charged then.
    pub(in crate::rpc::server) fn reserve(self: &Arc<Self>, bytes: u64) -> Result<HostCharge, HostMemoryError> {
        let mut charge = self.empty();
        charge.grow(bytes)?;
        Ok(charge)
    }

    /// As [`SessionMemory::reserve`], but waits while others hold the memory.
    ///
    /// # Errors
    /// The memory was not available in time, or can never be: the limit is too small, or the session itself holds too much.
    pub(in crate::rpc::server) fn wait(self: &Arc<Self>, bytes: u64) -> Result<HostCharge, HostMemoryError> {
        let mut charge = self.empty();
        charge.wait_and_grow(bytes)?;
        Ok(charge)
    }

    /// For a reply of `total` bytes that is sent in pieces: the length of a piece, at most `most`, and the charge for two of
    /// them. If host memory is short, the pieces are so small that the base pays for them.
    pub(in crate::rpc::server) fn reply_piece(self: &Arc<Self>, total: u64, most: u64) -> (u64, HostCharge) {
        let piece = total.min(most);
        match if total <= BASE_REPLY_BYTES { Ok(self.empty()) } else { self.reserve(2 * piece) } {
            Ok(charge) => (piece, charge),
            Err(_) => (piece.min(BASE_REPLY_BYTES / 2), self.empty()),
        }
    }

    /// Ends the waits of the session's threads: the client for which they wait has gone.
    pub(in crate::rpc::server) fn close(&self) {
        self.with_account(|account| account.is_closed = true);
        self.server.released.notify_all();
    }

    pub(super) fn is_closed(&self, state: &HostMemoryState) -> bool {
        state.accounts.get(&self.id).is_none_or(|account| account.is_closed)
    }

    /// Bytes that are charged to the session. Its base pays for the first [`PREPAID_BYTES`](super::PREPAID_BYTES) of them.
    #[cfg(test)]
    pub(in crate::rpc::server) fn held(&self) -> u64 {
        self.with_account(|account| account.held).unwrap_or(0)
    }

    /// Whether more than half of the server's memory is free, so that a session may keep buffers that it does not need now.
    pub(in crate::rpc::server) fn is_plentiful(&self) -> bool {
        self.server.budget.used() < self.server.budget.limit() / 2
    }

    /// Charges `bytes`; waits for them if `wait`.
    fn take(&self, bytes: u64, wait: bool) -> Result<(), HostMemoryError> {
        let server = &*self.server;
        if bytes == 0 {
            return Ok(());
        }
        // Until when the thread waits, and when it ends unfinished messages of others.
        let mut wait = wait.then(Instant::now).map(|now| (now + server.max_wait, now + server.evict_after));
        let mut state = server.lock();
        loop {
            let used_and_kept = server.used_and_kept(&state);
            let Some(account) = state.accounts.get_mut(&self.id) else { return Err(HostMemoryError::ClientGone) };
            let (held, charged, of_tenant) = (account.held, account.charged(), account.of_tenant());
            if account.is_evicted {
                return Err(HostMemoryError::Evicted { held });
            }
            let Some(reserved) = &mut account.reserved else { return Err(self.refusal(&state, bytes, false)) };
            let (held_after, has_tenant) = (held.saturating_add(bytes), reserved.tenant.is_some());
            let own_after = beyond_prepaid(held_after);
            let tenant_after = (of_tenant - charged).saturating_add(own_after);
            let missing = server.missing(has_tenant, own_after, tenant_after, used_and_kept - of_tenant);
            if (own_after == charged || missing == [0; 2]) && reserved.charges.grow(own_after - charged).is_ok() {
                account.held = held_after;
                return Ok(());
            }
            if account.is_closed {
                return Err(HostMemoryError::ClientGone);
            }
            // Also without any other session, the limit would have to hold these bytes twice.
            let least = server.kept_for_bases.max(BASE_BYTES);
            let is_possible = server.missing(has_tenant, own_after, own_after, least) == [0; 2];
            let Some((until, evict_at)) = wait.as_mut().filter(|_| is_possible) else {
                return Err(self.refusal(&state, bytes, false));
            };
            let now = Instant::now();
            if now >= *until {
                return Err(self.refusal(&state, bytes, true));
            }
            if now >= *evict_at {
                *evict_at = now + server.evict_after.max(MIN_EVICT_INTERVAL);
                server.evict(&mut state, self.id, own_after, tenant_after, missing);
                continue;
            }
            state.waiting += 1;
            state = server.released.wait_timeout(state, (*until).min(*evict_at) - now).unpoisoned().0;
            state.waiting -= 1;
        }
    }

    fn refusal(&self, state: &HostMemoryState, requested: u64, waited: bool) -> HostMemoryError {
        let limit = self.server.budget.limit();
        let free = limit.saturating_sub(self.server.used_and_kept(state));
        let account = state.accounts.get(&self.id);
        let (held, of_tenant) = account.map_or((0, 0), |account| (account.held, account.of_tenant()));
        HostMemoryError::Exhausted { requested, held, of_tenant, free, limit, waited }
    }

    fn give_back(&self, bytes: u64) {
        let mut state = self.server.lock();
        if let Some(account) = state.accounts.get_mut(&self.id) {
            account.held -= bytes;
            let charged = account.charged();
            if let Some(reserved) = &mut account.reserved {
                reserved.charges.shrink_to(charged);
            }
        }
        self.server.notify(&state);
    }
}

impl Drop for SessionMemory {
    fn drop(&mut self) {
        let mut state = self.server.lock();
        if state.accounts.remove(&self.id).is_some_and(|account| account.reserved.is_some()) {
            state.bases -= BASE_BYTES;
            self.server.notify(&state);
        }
    }
}

/// Host memory that is charged to a session and to the server until this is dropped.
pub(in crate::rpc::server) struct HostCharge {
    session: Arc<SessionMemory>,
    bytes: u64,
}

impl HostCharge {
    pub(in crate::rpc::server) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The session that is charged.
    pub(in crate::rpc::server) fn session(&self) -> &Arc<SessionMemory> {
        &self.session
    }

    /// Charges `more` bytes.
    ///
    /// # Errors
    /// As [`SessionMemory::reserve`].
    pub(in crate::rpc::server) fn grow(&mut self, more: u64) -> Result<(), HostMemoryError> {
        self.session.take(more, false)?;
        self.bytes += more;
        Ok(())
    }

    /// Charges `more` bytes, and waits for them.
    ///
    /// # Errors
    /// As [`SessionMemory::wait`].
    pub(in crate::rpc::server) fn wait_and_grow(&mut self, more: u64) -> Result<(), HostMemoryError> {
        self.session.take(more, true)?;
        self.bytes += more;
        Ok(())
    }

    /// Releases all but `bytes` bytes.
    pub(in crate::rpc::server) fn shrink_to(&mut self, bytes: u64) {
        if bytes < self.bytes {
            self.session.give_back(self.bytes - bytes);
            self.bytes = bytes;
        }
    }

    /// Adds the bytes of another charge of the same session to this one.
    pub(in crate::rpc::server) fn absorb(&mut self, mut other: HostCharge) {
        debug_assert!(Arc::ptr_eq(&self.session, &other.session), "a charge of another session");
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for HostCharge {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.session.give_back(self.bytes);
        }
    }
}

//! The host memory of one session: its account and its charges.

use crate::poison::Unpoisoned;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::eviction::{MemoryWait, NextWait};
use super::{
    BASE_BODY_BYTES, BASE_BYTES, BASE_REPLY_BYTES, HostMemory, HostMemoryError, HostMemoryInfo, TenantHostMemory,
    beyond_prepaid,
};

/// What a session holds, for its own threads and for those that need memory of the largest holders.
pub(super) struct SessionAccount {
    /// Set when the base is reserved.
    tenant: OnceLock<Arc<TenantHostMemory>>,
    /// Bytes that are charged to the session. Its base pays for the first [`PREPAID_BYTES`] of them. Changed only while the
    /// server's state is locked.
    held: AtomicU64,
    /// Whether the session reads a message that is larger than its base pays for.
    has_unfinished_message: AtomicBool,
    /// Whether the session was ended for others.
    is_evicted: AtomicBool,
    /// Whether the client has gone: waits end.
    is_closed: AtomicBool,
    /// Closes the connection.
    end: Box<dyn Fn() + Send + Sync>,
}

impl SessionAccount {
    pub(super) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Bytes that are charged beyond what the base has prepaid.
    pub(super) fn charged(&self) -> u64 {
        beyond_prepaid(self.held())
    }

    /// The same of all sessions of its tenant.
    pub(super) fn of_tenant(&self) -> u64 {
        self.tenant.get().map_or(0, |tenant| tenant.charged.load(Ordering::Relaxed))
    }

    pub(super) fn has_tenant_of(&self, other: &SessionAccount) -> bool {
        matches!((self.tenant.get(), other.tenant.get()), (Some(a), Some(b)) if Arc::ptr_eq(a, b))
    }

    pub(super) fn has_unfinished_message(&self) -> bool {
        self.has_unfinished_message.load(Ordering::Relaxed)
    }

    pub(super) fn is_evicted(&self) -> bool {
        self.is_evicted.load(Ordering::Relaxed)
    }

    /// Ends the session, so that others get its memory. Its waits are to be woken after this.
    pub(super) fn evict(&self) {
        self.is_evicted.store(true, Ordering::Relaxed);
        (self.end)();
    }
}

/// The host memory of one session. Its base is released when the last charge is dropped, too.
pub(in crate::rpc::server) struct SessionMemory {
    server: Arc<HostMemory>,
    account: Arc<SessionAccount>,
}

/// Marks a session as one that reads a large message, until this is dropped.
pub(in crate::rpc::server) struct UnfinishedMessage(Arc<SessionAccount>);

impl Drop for UnfinishedMessage {
    fn drop(&mut self) {
        self.0.has_unfinished_message.store(false, Ordering::Relaxed);
    }
}

impl SessionMemory {
    /// The memory of a new connection, which `end` closes.
    pub(super) fn new(server: &Arc<HostMemory>, end: Box<dyn Fn() + Send + Sync>) -> Arc<SessionMemory> {
        let [has_unfinished_message, is_evicted, is_closed] = [(); 3].map(|()| AtomicBool::new(false));
        let (tenant, held) = (OnceLock::new(), AtomicU64::new(0));
        let account = SessionAccount { tenant, held, has_unfinished_message, is_evicted, is_closed, end };
        Arc::new(SessionMemory { server: Arc::clone(server), account: Arc::new(account) })
    }

    /// Reserves the base: the connection becomes a session of `tenant`. To be called once.
    ///
    /// # Errors
    /// The base does not fit into the limit.
    pub(in crate::rpc::server) fn reserve_base(&self, tenant: Arc<TenantHostMemory>) -> Result<(), HostMemoryError> {
        let server = &*self.server;
        let mut state = server.lock();
        if server.limit - state.used() < BASE_BYTES {
            return Err(server.refusal(&state, BASE_BYTES, &self.account, false));
        }
        if self.account.tenant.set(tenant).is_ok() {
            state.bases += BASE_BYTES;
            state.peak = state.peak.max(state.used());
            state.sessions.push(Arc::clone(&self.account));
        }
        Ok(())
    }

    /// A message of `len` bytes begins, whose sender may never finish it. `None`: the base pays for it.
    pub(in crate::rpc::server) fn begin_message(&self, len: usize) -> Option<UnfinishedMessage> {
        (len > BASE_BODY_BYTES).then(|| {
            self.account.has_unfinished_message.store(true, Ordering::Relaxed);
            UnfinishedMessage(Arc::clone(&self.account))
        })
    }

    /// Why the connection was closed, if that was for the memory of others.
    pub(in crate::rpc::server) fn eviction(&self) -> Option<HostMemoryError> {
        self.account.is_evicted().then(|| HostMemoryError::Evicted { held: self.held() })
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
        let _state = self.server.lock();
        self.account.is_closed.store(true, Ordering::Relaxed);
        self.server.released.notify_all();
    }

    /// The budget of the server.
    pub(in crate::rpc::server) fn of_server(&self) -> HostMemoryInfo {
        self.server.info()
    }

    /// Bytes that are charged to the session. Its base pays for the first [`PREPAID_BYTES`] of them.
    pub(in crate::rpc::server) fn held(&self) -> u64 {
        self.account.held()
    }

    /// Whether more than half of the server's memory is free, so that a session may keep buffers that it does not need now.
    pub(in crate::rpc::server) fn is_plentiful(&self) -> bool {
        self.server.lock().used() < self.server.limit / 2
    }

    /// Charges `bytes`; waits for them if `wait`.
    fn take(&self, bytes: u64, wait: bool) -> Result<(), HostMemoryError> {
        let (server, account) = (&*self.server, &*self.account);
        if bytes == 0 {
            return Ok(());
        }
        let mut state = server.lock();
        // Before its base, a connection has nothing to charge: its HELLO is small.
        let Some(tenant) = account.tenant.get() else { return Err(server.refusal(&state, bytes, account, false)) };
        let mut wait = wait.then(|| MemoryWait::new(server));
        loop {
            if let Some(evicted) = self.eviction() {
                return Err(evicted);
            }
            let held = self.held();
            let after = held.saturating_add(bytes);
            let (own, own_after) = (beyond_prepaid(held), beyond_prepaid(after));
            let of_tenant = account.of_tenant();
            let tenant_after = (of_tenant - own).saturating_add(own_after);
            let others = state.bases.max(server.kept_for_bases) + state.charged - of_tenant;
            let missing = server.missing(tenant, own_after, tenant_after, others);
            if own == own_after || missing == [0; 2] {
                state.charged += own_after - own;
                state.peak = state.peak.max(state.used());
                account.held.store(after, Ordering::Relaxed);
                tenant.charged.store(tenant_after, Ordering::Relaxed);
                return Ok(());
            }
            if account.is_closed.load(Ordering::Relaxed) {
                return Err(HostMemoryError::ClientGone);
            }
            // Also without any other session, the limit would have to hold these bytes twice.
            let least = server.kept_for_bases.max(BASE_BYTES);
            let is_possible = server.missing(tenant, own_after, own_after, least) == [0; 2];
            let Some(left) = wait.as_mut().filter(|_| is_possible).map(MemoryWait::next) else {
                return Err(server.refusal(&state, bytes, account, false));
            };
            match left {
                NextWait::Over => return Err(server.refusal(&state, bytes, account, true)),
                NextWait::Evict => server.evict(&state, account, own_after, tenant_after, missing),
                NextWait::Release(left) => {
                    state.waiting += 1;
                    state = server.released.wait_timeout(state, left).unpoisoned().0;
                    state.waiting -= 1;
                }
            }
        }
    }

    fn give_back(&self, bytes: u64) {
        let mut state = self.server.lock();
        let held = self.held();
        let released = beyond_prepaid(held) - beyond_prepaid(held - bytes);
        self.account.held.store(held - bytes, Ordering::Relaxed);
        state.charged -= released;
        if let Some(tenant) = self.account.tenant.get() {
            tenant.charged.fetch_sub(released, Ordering::Relaxed);
        }
        self.server.notify(&state);
    }
}

impl Drop for SessionMemory {
    fn drop(&mut self) {
        let mut state = self.server.lock();
        if self.account.tenant.get().is_some() {
            state.bases -= BASE_BYTES;
            state.sessions.retain(|other| !Arc::ptr_eq(other, &self.account));
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

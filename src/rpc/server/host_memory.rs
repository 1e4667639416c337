//! Host memory: one budget of the server for the memory outside of devices that clients cause (`--max-host-memory`): message
//! bodies, prepared and stored graphs, replies, staged uploads, transfers, bookkeeping. Everything is charged before it is
//! allocated, to the session and to the server.
//!
//! *Dynamic threshold*, as in the shared buffers of network switches: beside its base, a session may hold at most as many bytes
//! as stay free. One session can therefore take half of the budget, two a third each, and a newcomer always finds something. A
//! fixed limit per session would waste memory if few sessions are connected, or be exceeded by the sum of many.
//!
//! The *base* ([`BASE_BYTES`]) is reserved when the handshake of a connection is complete. It pays for small messages and small
//! replies, so an admitted session is served also while others hold all the rest. Up to half of the budget is kept for the bases of sessions to
//! come, so that connected sessions cannot fill the server for new ones.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

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

/// Longest wait for host memory that other sessions hold. A stalled message of another session ends after the stall timeout.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// Host memory that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(super) enum HostMemoryError {
    #[error(
        "{requested} bytes of host memory are not available{}: the session holds {held}, and {free} of the server's {limit} \
         are free (--max-host-memory); a session may hold as much as stays free",
        if *.waited { ", also after a wait" } else { "" }
    )]
    Exhausted { requested: u64, held: u64, free: u64, limit: u64, waited: bool },
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
        Arc::new(HostMemory { limit, kept_for_bases, max_wait, state: Mutex::default(), released: Condvar::new() })
    }

    pub(super) fn info(&self) -> HostMemoryInfo {
        let state = self.lock();
        HostMemoryInfo { limit: self.limit, used: state.used(), peak: state.peak }
    }

    /// The memory of a new connection, which is to charge nothing before [`SessionMemory::reserve_base`].
    pub(super) fn connect(self: &Arc<Self>) -> Arc<SessionMemory> {
        let (held, has_base, closed) = (AtomicU64::new(0), AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(SessionMemory { server: Arc::clone(self), held, has_base, closed })
    }

    /// The memory of a new session, with its base.
    #[cfg(test)]
    pub(super) fn admit(self: &Arc<Self>) -> Result<Arc<SessionMemory>, HostMemoryError> {
        let session = self.connect();
        session.reserve_base().map(|()| session)
    }

    /// Wakes the sessions that wait, after bytes were released.
    fn notify(&self, state: &HostMemoryState) {
        if state.waiting > 0 {
            self.released.notify_all();
        }
    }

    fn refusal(&self, state: &HostMemoryState, requested: u64, held: u64, waited: bool) -> HostMemoryError {
        let free = self.limit.saturating_sub(state.bases.max(self.kept_for_bases) + state.charged);
        HostMemoryError::Exhausted { requested, held, free, limit: self.limit, waited }
    }

    fn lock(&self) -> MutexGuard<'_, HostMemoryState> {
        // Ignores poisoning: no code that can panic runs while the numbers disagree.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The host memory of one session. Its base is released when the last charge is dropped, too.
pub(super) struct SessionMemory {
    server: Arc<HostMemory>,
    /// Bytes that are charged to the session. Its base pays for the first [`PREPAID_BYTES`] of them. Changed only while the
    /// server's state is locked.
    held: AtomicU64,
    /// Whether its base is reserved. Changed only while the server's state is locked.
    has_base: AtomicBool,
    /// Whether the client has gone: waits end.
    closed: AtomicBool,
}

impl SessionMemory {
    /// Reserves the base: the connection becomes a session. To be called once.
    ///
    /// # Errors
    /// The base does not fit into the limit.
    pub(super) fn reserve_base(&self) -> Result<(), HostMemoryError> {
        let server = &*self.server;
        let mut state = server.lock();
        if server.limit - state.used() < BASE_BYTES {
            return Err(server.refusal(&state, BASE_BYTES, 0, false));
        }
        state.bases += BASE_BYTES;
        state.peak = state.peak.max(state.used());
        self.has_base.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// A charge of no bytes, which can grow.
    pub(super) fn empty(self: &Arc<Self>) -> HostCharge {
        HostCharge { session: Arc::clone(self), bytes: 0 }
    }

    /// Charges `bytes` until the charge is dropped.
    ///
    /// # Errors
    /// The memory is not available now. Nothing is charged then.
    pub(super) fn reserve(self: &Arc<Self>, bytes: u64) -> Result<HostCharge, HostMemoryError> {
        let mut charge = self.empty();
        charge.grow(bytes)?;
        Ok(charge)
    }

    /// As [`SessionMemory::reserve`], but waits while others hold the memory.
    ///
    /// # Errors
    /// The memory was not available in time, or can never be: the limit is too small, or the session itself holds too much.
    pub(super) fn wait(self: &Arc<Self>, bytes: u64) -> Result<HostCharge, HostMemoryError> {
        let mut charge = self.empty();
        charge.wait_and_grow(bytes)?;
        Ok(charge)
    }

    /// For a reply of `total` bytes that is sent in pieces: the length of a piece, at most `most`, and the charge for two of
    /// them. If host memory is short, the pieces are so small that the base pays for them.
    pub(super) fn reply_piece(self: &Arc<Self>, total: u64, most: u64) -> (u64, HostCharge) {
        let piece = total.min(most);
        match if total <= BASE_REPLY_BYTES { Ok(self.empty()) } else { self.reserve(2 * piece) } {
            Ok(charge) => (piece, charge),
            Err(_) => (piece.min(BASE_REPLY_BYTES / 2), self.empty()),
        }
    }

    /// Ends the waits of the session's threads: the client for which they wait has gone.
    pub(super) fn close(&self) {
        let _state = self.server.lock();
        self.closed.store(true, Ordering::Relaxed);
        self.server.released.notify_all();
    }

    /// The budget of the server.
    pub(super) fn of_server(&self) -> HostMemoryInfo {
        self.server.info()
    }

    /// Bytes that are charged to the session. Its base pays for the first [`PREPAID_BYTES`] of them.
    pub(super) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Whether more than half of the server's memory is free, so that a session may keep buffers that it does not need now.
    pub(super) fn is_plentiful(&self) -> bool {
        self.server.lock().used() < self.server.limit / 2
    }

    /// Charges `bytes`; waits for them if `wait`.
    fn take(&self, bytes: u64, wait: bool) -> Result<(), HostMemoryError> {
        let server = &*self.server;
        let until = wait.then(|| Instant::now() + server.max_wait);
        let mut state = server.lock();
        loop {
            let held = self.held();
            let after = held.saturating_add(bytes);
            let (own, own_after) = (beyond_prepaid(held), beyond_prepaid(after));
            let others = state.bases.max(server.kept_for_bases) + state.charged - own;
            // As much as the session holds then must stay free.
            if own == own_after || own_after.saturating_mul(2).saturating_add(others) <= server.limit {
                state.charged += own_after - own;
                state.peak = state.peak.max(state.used());
                self.held.store(after, Ordering::Relaxed);
                return Ok(());
            }
            // Also without any other session, the limit would have to hold these bytes twice.
            let least = server.kept_for_bases.max(BASE_BYTES);
            let possible = own_after.saturating_mul(2).saturating_add(least) <= server.limit;
            let left = until.filter(|_| possible).map(|until| until.saturating_duration_since(Instant::now()));
            match left {
                _ if self.closed.load(Ordering::Relaxed) => return Err(HostMemoryError::ClientGone),
                Some(left) if !left.is_zero() => {
                    state.waiting += 1;
                    state = server.released.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                    state.waiting -= 1;
                }
                left => return Err(server.refusal(&state, bytes, held, left.is_some())),
            }
        }
    }

    fn give_back(&self, bytes: u64) {
        let mut state = self.server.lock();
        let held = self.held();
        self.held.store(held - bytes, Ordering::Relaxed);
        state.charged -= beyond_prepaid(held) - beyond_prepaid(held - bytes);
        self.server.notify(&state);
    }
}

impl Drop for SessionMemory {
    fn drop(&mut self) {
        let mut state = self.server.lock();
        if *self.has_base.get_mut() {
            state.bases -= BASE_BYTES;
            self.server.notify(&state);
        }
    }
}

/// The part of a session's charged bytes that its base has not prepaid.
fn beyond_prepaid(held: u64) -> u64 {
    held.saturating_sub(PREPAID_BYTES)
}

/// Host memory that is charged to a session and to the server until this is dropped.
pub(super) struct HostCharge {
    session: Arc<SessionMemory>,
    bytes: u64,
}

impl HostCharge {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The session that is charged.
    pub(super) fn session(&self) -> &Arc<SessionMemory> {
        &self.session
    }

    /// Charges `more` bytes.
    ///
    /// # Errors
    /// As [`SessionMemory::reserve`].
    pub(super) fn grow(&mut self, more: u64) -> Result<(), HostMemoryError> {
        self.session.take(more, false)?;
        self.bytes += more;
        Ok(())
    }

    /// Charges `more` bytes, and waits for them.
    ///
    /// # Errors
    /// As [`SessionMemory::wait`].
    pub(super) fn wait_and_grow(&mut self, more: u64) -> Result<(), HostMemoryError> {
        self.session.take(more, true)?;
        self.bytes += more;
        Ok(())
    }

    /// Releases all but `bytes` bytes.
    pub(super) fn shrink_to(&mut self, bytes: u64) {
        if bytes < self.bytes {
            self.session.give_back(self.bytes - bytes);
            self.bytes = bytes;
        }
    }

    /// Adds the bytes of another charge of the same session to this one.
    pub(super) fn absorb(&mut self, mut other: HostCharge) {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(limit: u64) -> Arc<HostMemory> {
        HostMemory::new(limit, 0, Duration::from_secs(600))
    }

    #[test]
    fn sessions_share_what_their_bases_leave() {
        const SHARED: u64 = 600 << 10;
        for sessions in [1, 2, 3, 5] {
            let server = memory(sessions * BASE_BYTES + SHARED);
            let admitted: Vec<_> = (0..sessions).map(|_| server.admit().unwrap()).collect();
            assert_eq!(server.info().used, sessions * BASE_BYTES);
            let mut charges: Vec<_> = admitted.iter().map(|session| session.reserve(PREPAID_BYTES).unwrap()).collect();
            assert_eq!(server.info().used, sessions * BASE_BYTES, "the base has prepaid these");
            // All of them take what they get, a KiB at a time.
            while charges.iter_mut().filter_map(|charge| charge.grow(1 << 10).ok()).count() > 0 {}
            for charge in &charges {
                let share = SHARED / (sessions + 1);
                let own = charge.bytes() - PREPAID_BYTES;
                assert!(own.abs_diff(share) <= 2 << 10, "{own} of {share} with {sessions} sessions");
            }
            let refused = charges[0].grow(u64::MAX).unwrap_err().to_string();
            assert!(refused.contains("--max-host-memory"), "{refused}");
            assert!(server.admit().is_ok() || SHARED / (sessions + 1) < BASE_BYTES, "a newcomer finds room");
            charges[0].shrink_to(1);
            let first = charges.remove(0);
            drop(charges);
            drop(admitted);
            assert_eq!(server.info().used, BASE_BYTES, "a charge keeps the base of its session");
            drop(first);
            assert_eq!(server.info().used, 0);
            assert!(server.info().peak <= server.info().limit);
        }
    }

    #[test]
    fn charges_leave_the_bases_of_sessions_to_come() {
        for (max_sessions, admitted) in [(0, 1 + 2), (4, 4), (100, 5)] {
            let server = HostMemory::new(10 * BASE_BYTES, max_sessions, Duration::ZERO);
            let first = server.admit().unwrap();
            let mut held = first.reserve(PREPAID_BYTES).unwrap();
            while held.grow(1 << 10).is_ok() {}
            let mut others = Vec::new();
            // Each newcomer takes all that it can get.
            while let Ok(other) = server.admit() {
                let mut charge = other.reserve(PREPAID_BYTES).unwrap();
                while charge.grow(1 << 10).is_ok() {}
                others.push((other, charge));
            }
            assert!(1 + others.len() >= admitted, "{max_sessions}: {}", others.len());
            assert!(server.info().peak <= server.info().limit);
        }
    }

    #[test]
    fn a_connection_without_its_base_is_refused() {
        let server = memory(2 * BASE_BYTES - 1);
        let first = server.admit().unwrap();
        assert!(matches!(server.admit(), Err(HostMemoryError::Exhausted { requested: BASE_BYTES, held: 0, .. })));
        drop(first);
        assert!(server.admit().is_ok());
    }

    #[test]
    fn a_wait_ends_by_a_release_by_the_client_s_end_or_at_once_if_it_is_hopeless() {
        let server = memory(3 * BASE_BYTES + 300);
        let [first, second] = [(); 2].map(|()| server.admit().unwrap());
        let third = BASE_BYTES / 2 + PREPAID_BYTES;
        let mut held = first.reserve(third).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| second.wait(third).map(|charge| charge.bytes()));
            while server.lock().waiting == 0 {
                std::thread::yield_now();
            }
            held.shrink_to(0);
            assert_eq!(waiter.join().unwrap(), Ok(third));
            held = first.reserve(third).unwrap();
            let waiter = scope.spawn(|| second.wait(third).map(|charge| charge.bytes()));
            while server.lock().waiting == 0 {
                std::thread::yield_now();
            }
            second.close();
            assert_eq!(waiter.join().unwrap(), Err(HostMemoryError::ClientGone));
        });
        let (free, total) = (BASE_REPLY_BYTES, 1 << 30);
        assert_eq!((first.reply_piece(free, total).0, first.reply_piece(free, total).1.bytes()), (free, 0));
        assert_eq!((second.reply_piece(total, 9).0, second.reply_piece(total, 9).1.bytes()), (9, 18));
        assert_eq!(second.reply_piece(total, total).0, BASE_REPLY_BYTES / 2, "small pieces if memory is short");
        // More than a session could ever hold is not waited for.
        let hopeless = first.wait(2 * BASE_BYTES);
        assert!(matches!(hopeless, Err(HostMemoryError::Exhausted { waited: false, .. })));
        let [mut a, b] = [3, 4].map(|bytes| first.reserve(bytes).unwrap());
        a.absorb(b);
        assert_eq!(a.bytes(), 7);
    }

    #[test]
    fn a_wait_ends_at_its_deadline() {
        let server = HostMemory::new(3 * BASE_BYTES, 0, Duration::ZERO);
        let [first, second] = [(); 2].map(|()| server.admit().unwrap());
        let _held = first.reserve(PREPAID_BYTES + BASE_BYTES / 2).unwrap();
        let refused = second.wait(PREPAID_BYTES + BASE_BYTES / 2).map(|charge| charge.bytes());
        assert!(matches!(refused, Err(HostMemoryError::Exhausted { waited: true, .. })), "{refused:?}");
    }
}

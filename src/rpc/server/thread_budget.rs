//! Thread budget: limits the threads that transfers between servers take, per process and per tenant. A thread is reserved
//! before it is started: the standard library aborts the process if a new thread finds no memory for its signal stack, so that
//! the number of threads must never depend on what clients send.

use std::fmt;
use std::sync::Arc;

use crate::device::{DeviceError, MemoryBudget, Reservation};

/// A limit of the number of threads, within that of a parent: a [`MemoryBudget`] that counts threads instead of bytes.
pub(super) struct ThreadBudget {
    threads: Arc<MemoryBudget>,
    /// Names what the limit holds for, in messages.
    owner: &'static str,
}

impl ThreadBudget {
    /// A budget of `limit` threads.
    pub(super) fn new(limit: usize) -> Arc<ThreadBudget> {
        Arc::new(ThreadBudget { threads: MemoryBudget::new(limit as u64), owner: "the server" })
    }

    /// A budget within `parent`: a quarter of it, at least 1. `owner` names what the limit holds for, in messages.
    pub(super) fn quarter_of(parent: &ThreadBudget, owner: &'static str) -> Arc<ThreadBudget> {
        let threads = MemoryBudget::within(&parent.threads, (parent.threads.limit() / 4).max(1));
        Arc::new(ThreadBudget { threads, owner })
    }

    /// Whether nothing but one handle refers to the budget.
    pub(super) fn is_unused(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) == 1 && Arc::strong_count(&self.threads) == 1
    }

    /// Reserves a thread until the reservation is dropped. The thread owns it, so that it is released when the thread has ended.
    ///
    /// # Errors
    /// [`DeviceError::Exhausted`] with the limit that is reached. Nothing is reserved then.
    pub(super) fn reserve(&self) -> Result<Reservation, DeviceError> {
        self.threads.reserve(1).map_err(|e| match e {
            DeviceError::OutOfMemory { limit, .. } => {
                let owner = if limit == self.threads.limit() { self.owner } else { "the server" };
                let reason =
                    format!("{owner} may have {limit} threads for transfers between servers (--max-transfer-threads)");
                DeviceError::Exhausted { resource: "threads", reason }
            }
            e => e,
        })
    }
}

impl fmt::Display for ThreadBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.threads.used(), self.threads.limit())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_has_a_quarter_and_a_refused_thread_takes_nothing() {
        let server = ThreadBudget::new(8);
        let sessions: Vec<_> = (0..5).map(|_| ThreadBudget::quarter_of(&server, "a session")).collect();
        let mut permits: Vec<_> =
            sessions[..4].iter().flat_map(|s| [s.reserve().unwrap(), s.reserve().unwrap()]).collect();
        for (session, limit) in [(0, "a session may have 2"), (4, "the server may have 8")] {
            let refused = sessions[session].reserve().unwrap_err().to_string();
            assert!(refused.contains(limit), "{refused}");
        }
        permits.pop();
        permits.push(sessions[4].reserve().unwrap());
        drop(permits);
        assert_eq!(server.threads.used(), 0);
    }
}

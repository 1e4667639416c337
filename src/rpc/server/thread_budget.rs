//! Thread budget: limits the threads that transfers between servers take, per process and per session. A thread is reserved
//! before it is started: the standard library aborts the process if a new thread finds no memory for its signal stack, so that
//! the number of threads must never depend on what clients send.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::device::DeviceError;

/// A limit of the number of threads, within that of a parent.
#[derive(Debug)]
pub(super) struct ThreadBudget {
    limit: usize,
    used: AtomicUsize,
    parent: Option<Arc<ThreadBudget>>,
}

impl ThreadBudget {
    /// A budget of `limit` threads.
    pub(super) fn new(limit: usize) -> Arc<ThreadBudget> {
        Arc::new(ThreadBudget { limit, used: AtomicUsize::new(0), parent: None })
    }

    /// The budget of one session: a quarter of `parent`, at least 1.
    pub(super) fn quarter_of(parent: &Arc<ThreadBudget>) -> Arc<ThreadBudget> {
        let limit = (parent.limit / 4).max(1);
        Arc::new(ThreadBudget { limit, used: AtomicUsize::new(0), parent: Some(Arc::clone(parent)) })
    }

    /// Reserves a thread until the permit is dropped.
    ///
    /// # Errors
    /// [`DeviceError::Exhausted`] with the limit that is reached. Nothing is reserved then.
    pub(super) fn reserve(self: &Arc<Self>) -> Result<ThreadPermit, DeviceError> {
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(1).filter(|&threads| threads <= self.limit)
        });
        if taken.is_err() {
            let (limit, owner) = (self.limit, if self.parent.is_some() { "a session" } else { "the server" });
            let reason =
                format!("{owner} may have {limit} threads for transfers between servers (max_transfer_threads)");
            return Err(DeviceError::Exhausted { resource: "threads", reason });
        }
        // From here on, dropping `permit` releases our part, also if the parent's part fails below.
        let mut permit = ThreadPermit { budget: Arc::clone(self), _parent: None };
        if let Some(parent) = &self.parent {
            permit._parent = Some(Box::new(parent.reserve()?));
        }
        Ok(permit)
    }
}

/// A reserved thread of a [`ThreadBudget`]. The thread owns it, so that it is released when the thread has ended.
#[derive(Debug)]
pub(super) struct ThreadPermit {
    budget: Arc<ThreadBudget>,
    _parent: Option<Box<ThreadPermit>>,
}

impl Drop for ThreadPermit {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_has_a_quarter_and_a_refused_thread_takes_nothing() {
        let server = ThreadBudget::new(8);
        let sessions: Vec<_> = (0..5).map(|_| ThreadBudget::quarter_of(&server)).collect();
        let mut permits: Vec<_> =
            sessions[..4].iter().flat_map(|s| [s.reserve().unwrap(), s.reserve().unwrap()]).collect();
        for (session, limit) in [(0, "a session may have 2"), (4, "the server may have 8")] {
            let refused = sessions[session].reserve().unwrap_err().to_string();
            assert!(refused.contains(limit), "{refused}");
        }
        permits.pop();
        permits.push(sessions[4].reserve().unwrap());
        drop(permits);
        assert_eq!(server.used.load(Ordering::Relaxed), 0);
    }
}

//! Requests whose replies are due.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A reply that is due.
#[derive(Debug)]
pub(in crate::rpc) struct DueReply<T> {
    pub(in crate::rpc) command: &'static str,
    /// Bytes that it may have.
    pub(in crate::rpc) len: RangeInclusive<u64>,
    pub(in crate::rpc) since: Instant,
    /// Where it goes.
    pub(in crate::rpc) sink: T,
}

/// The replies that are due, in the order of their requests, until the connection fails: `T` is where a reply goes, `F` why there
/// will be none.
#[derive(Debug)]
pub(in crate::rpc) struct DueReplies<T, F> {
    state: Mutex<DueRepliesState<T, F>>,
    failed: Condvar,
}

#[derive(Debug)]
struct DueRepliesState<T, F> {
    due: VecDeque<DueReply<T>>,
    failure: Option<F>,
}

impl<T, F: Clone> DueReplies<T, F> {
    pub(in crate::rpc) fn new() -> DueReplies<T, F> {
        DueReplies {
            state: Mutex::new(DueRepliesState { due: VecDeque::new(), failure: None }),
            failed: Condvar::new(),
        }
    }

    /// A reply is due. Called before its request leaves, by the thread that has the writer: so replies are expected in the order
    /// of their requests, and before the reader can see them.
    ///
    /// # Errors
    /// The connection's failure, and where the reply should have gone.
    pub(in crate::rpc) fn expect(&self, command: &'static str, len: RangeInclusive<u64>, to: T) -> Result<(), (F, T)> {
        let mut state = self.lock();
        if let Some(failure) = state.failure.clone() {
            return Err((failure, to));
        }
        state.due.push_back(DueReply { command, len, since: Instant::now(), sink: to });
        Ok(())
    }

    /// The reply that comes next: its command, the bytes that it may have, and since when it is due.
    pub(in crate::rpc) fn front(&self) -> Option<(&'static str, RangeInclusive<u64>, Instant)> {
        self.lock().due.front().map(|reply| (reply.command, reply.len.clone(), reply.since))
    }

    /// The reply that has come.
    pub(in crate::rpc) fn pop(&self) -> Option<DueReply<T>> {
        self.lock().due.pop_front()
    }

    /// Why there are no more replies.
    pub(in crate::rpc) fn failure(&self) -> Option<F> {
        self.lock().failure.clone()
    }

    /// As [`DueReplies::failure`], if that is known within `timeout`: a peer that ends a connection may have said why.
    pub(in crate::rpc) fn wait_failure(&self, timeout: Duration) -> Option<F> {
        let waited = self.failed.wait_timeout_while(self.lock(), timeout, |state| state.failure.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.failure.clone()
    }

    /// No more replies come. The first failure sticks: the replies that were due, for the caller to fail them.
    ///
    /// # Errors
    /// An earlier failure.
    pub(in crate::rpc) fn fail(&self, failure: F) -> Result<VecDeque<DueReply<T>>, F> {
        let mut state = self.lock();
        if let Some(first) = &state.failure {
            return Err(first.clone());
        }
        state.failure = Some(failure);
        let due = std::mem::take(&mut state.due);
        drop(state);
        self.failed.notify_all();
        Ok(due)
    }

    fn lock(&self) -> MutexGuard<'_, DueRepliesState<T, F>> {
        // Whole between any two statements: a panic elsewhere cannot have left it torn.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

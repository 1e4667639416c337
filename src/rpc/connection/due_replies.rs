//! Outstanding replies of a connection, in the order of their requests.

use crate::sync::{self, Condvar, Instant, Mutex, Unpoisoned, lock};
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::time::Duration;

/// An outstanding reply.
#[derive(Debug)]
pub(in crate::rpc) struct DueReply<T> {
    pub(in crate::rpc) command: &'static str,
    /// Allowed lengths, in bytes.
    pub(in crate::rpc) len: RangeInclusive<u64>,
    /// When the request was sent.
    pub(in crate::rpc) since: Instant,
    /// Destination of the reply.
    pub(in crate::rpc) sink: T,
}

/// FIFO of the outstanding replies, until the connection fails. `T` is the destination of a reply, `F` the failure of the
/// connection.
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

    /// Registers the reply to a request. The thread that holds the writer calls this before it sends the request: replies are
    /// thus registered in the order of their requests, and before the reader can receive them.
    ///
    /// # Errors
    /// The connection's failure, and the destination `sink`.
    pub(in crate::rpc) fn expect(
        &self,
        command: &'static str,
        len: RangeInclusive<u64>,
        sink: T,
    ) -> Result<(), (F, T)> {
        let mut state = lock(&self.state);
        if let Some(failure) = state.failure.clone() {
            return Err((failure, sink));
        }
        state.due.push_back(DueReply { command, len, since: sync::now(), sink });
        Ok(())
    }

    /// The next expected reply: its command, its allowed lengths, and the time of its request.
    pub(in crate::rpc) fn front(&self) -> Option<(&'static str, RangeInclusive<u64>, Instant)> {
        lock(&self.state).due.front().map(|reply| (reply.command, reply.len.clone(), reply.since))
    }

    /// Removes the next expected reply, after it has arrived.
    pub(in crate::rpc) fn pop(&self) -> Option<DueReply<T>> {
        lock(&self.state).due.pop_front()
    }

    /// The failure of the connection.
    pub(in crate::rpc) fn failure(&self) -> Option<F> {
        lock(&self.state).failure.clone()
    }

    /// Waits up to `timeout` for the failure of the connection: a peer may have sent the reason before it closed the
    /// connection.
    pub(in crate::rpc) fn wait_failure(&self, timeout: Duration) -> Option<F> {
        let waited = self.failed.wait_timeout_while(lock(&self.state), timeout, |state| state.failure.is_none());
        waited.unpoisoned().0.failure.clone()
    }

    /// Fails the connection; only the first failure counts. Returns the outstanding replies, which the caller has to fail.
    ///
    /// # Errors
    /// An earlier failure.
    pub(in crate::rpc) fn fail(&self, failure: F) -> Result<VecDeque<DueReply<T>>, F> {
        let mut state = lock(&self.state);
        if let Some(first) = &state.failure {
            return Err(first.clone());
        }
        state.failure = Some(failure);
        let due = std::mem::take(&mut state.due);
        drop(state);
        self.failed.notify_all();
        Ok(due)
    }
}

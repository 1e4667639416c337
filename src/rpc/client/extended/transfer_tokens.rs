//! Pool of transfer tokens. A transfer token is a single-use capability token of this connection's server: a peer server that
//! presents it may write [`TRANSFER_CHUNK_BYTES`] bytes for a RECEIVE_FROM_PEER. Tokens are requested in batches ahead of use.

use crate::poison::Unpoisoned;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};

use super::super::connection::{ConnectionShared, ReplySink, WriteGuard};
use super::mark_tracker::MarkTracker;
use crate::device::{DeviceError, TRANSFER_CHUNK_BYTES};
use crate::poison::lock;
use crate::rpc::wire::ext::{
    BufferSpans, ExtCommand, ExtRequest, ExtResponse, ReadSpans, TRANSFER_TOKEN_BYTES, TransferToken, TransferTokenList,
};

/// Tokens per request: the limit of a server.
pub(super) const TOKEN_BATCH: usize = 256;

/// Limit of unused tokens per session. The server also counts tokens whose data has not arrived.
const MAX_UNUSED_TOKENS: usize = 1024;

/// When this many tokens are named in RECEIVE_FROM_PEER messages without any later read that confirms their use, the client
/// sends empty READs.
const MAX_UNCONFIRMED_TOKENS: usize = TOKEN_BATCH / 2;

#[derive(Debug, Default)]
pub(super) struct TransferTokens {
    pool: Mutex<TokenPool>,
    /// Notified when tokens arrive, when there is room for more, and on failures.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct TokenPool {
    available: Vec<TransferToken>,
    /// Whether a request for more tokens is outstanding.
    requested: bool,
    /// Tokens that open queues have taken and whose use is not confirmed, by queue.
    taken: HashMap<u32, TakenTokens>,
}

#[derive(Debug, Default)]
struct TakenTokens {
    count: usize,
    /// How many of these are named in RECEIVE_FROM_PEER messages without a later read that will confirm their use.
    unconfirmed: usize,
}

impl TokenPool {
    /// Whether to request more tokens before taking `count`.
    fn runs_low(&self, count: usize) -> bool {
        let left = self.available.len().checked_sub(count);
        let unused = self.available.len() + self.taken.values().map(|taken| taken.count).sum::<usize>();
        left.is_none_or(|left| left < TOKEN_BATCH / 2) && !self.requested && unused + TOKEN_BATCH <= MAX_UNUSED_TOKENS
    }

    fn take(&mut self, queue: u32, count: usize) -> Option<Vec<TransferToken>> {
        let left = self.available.len().checked_sub(count)?;
        self.taken.entry(queue).or_default().count += count;
        Some(self.available.split_off(left))
    }

    /// Counts tokens of a RECEIVE_FROM_PEER. Returns the queues that need a confirming read, each with its number of tokens.
    fn add_unconfirmed(&mut self, queue: u32, count: usize) -> Vec<(u32, usize)> {
        self.taken.entry(queue).or_default().unconfirmed += count;
        if self.taken.values().map(|taken| taken.unconfirmed).sum::<usize>() < MAX_UNCONFIRMED_TOKENS {
            return Vec::new();
        }
        let unconfirmed = self.taken.iter_mut().map(|(&queue, taken)| (queue, std::mem::take(&mut taken.unconfirmed)));
        unconfirmed.filter(|(_, count)| *count > 0).collect()
    }

    fn record_used(&mut self, queue: u32, count: usize) {
        if let Some(taken) = self.taken.get_mut(&queue) {
            taken.count = taken.count.saturating_sub(count);
        }
    }
}

impl TransferTokens {
    /// Records that `count` tokens of a queue were used.
    pub(super) fn record_used(&self, queue: u32, count: usize) {
        if count > 0 {
            lock(&self.pool).record_used(queue, count);
            self.changed.notify_all();
        }
    }

    /// Forgets the tokens of a queue that is closed; called with exclusive use of the writer. The server drops unused tokens of
    /// the queue before it processes later messages.
    pub(super) fn forget_queue(&self, queue: u32) {
        lock(&self.pool).taken.remove(&queue);
        self.changed.notify_all();
    }

    /// Wakes the waiting threads after a failure.
    pub(super) fn wake_waiters(&self) {
        drop(lock(&self.pool));
        self.changed.notify_all();
    }
}

impl WriteGuard<'_> {
    /// Called after a RECEIVE_FROM_PEER of `count` tokens was encoded. Appends empty READs from time to time: the server
    /// replies to them when the work before them is done, which confirms the use of the tokens.
    pub(super) fn confirm_token_use(&mut self, queue: u32, count: usize) -> Result<(), DeviceError> {
        let session = self.shared.session()?;
        let unconfirmed = lock(&session.peers.tokens.pool).add_unconfirmed(queue, count);
        for (queue, count) in unconfirmed {
            if let Some(id) = session.register_empty_read(queue, count) {
                self.buffer(|out| {
                    ExtRequest::ReadSpans(ReadSpans { queue, id, spans: BufferSpans::new(&[]) }).encode(out)
                });
            }
        }
        Ok(())
    }
}

impl ConnectionShared {
    /// Whether the pool has tokens for this many bytes.
    pub(super) fn has_tokens(&self, bytes: u64) -> bool {
        let Some(session) = &self.session else { return false };
        lock(&session.peers.tokens.pool).available.len() as u64 >= bytes.div_ceil(TRANSFER_CHUNK_BYTES)
    }

    /// Takes `count` tokens for a queue, and requests more ahead of use. Blocks while there are too few: the server issues no
    /// more until earlier ones are used.
    pub(super) fn take_tokens(
        self: &Arc<Self>,
        tracker: &MarkTracker,
        count: usize,
    ) -> Result<Vec<TransferToken>, DeviceError> {
        let tokens = &self.session()?.peers.tokens;
        let mut pool = lock(&tokens.pool);
        let mut waited = false;
        loop {
            if pool.runs_low(count) {
                pool.requested = true;
                drop(pool);
                self.request_tokens()?;
                pool = lock(&tokens.pool);
            }
            if let Some(taken) = pool.take(tracker.queue, count) {
                return Ok(taken);
            }
            if !std::mem::replace(&mut waited, true) {
                self.count_wait();
            }
            self.check_alive()?;
            // A thread that fails the queue takes this lock afterwards and notifies, so the failure cannot be missed.
            if let Some(failure) = tracker.failure() {
                return Err(failure);
            }
            pool = tokens.changed.wait(pool).unpoisoned();
        }
    }

    fn request_tokens(self: &Arc<Self>) -> Result<(), DeviceError> {
        let shared = Arc::clone(self);
        let on_reply = move |reply: Result<Vec<u8>, DeviceError>| {
            let (Ok(reply), Some(session)) = (reply, &shared.session) else { return Ok(()) };
            match ExtResponse::decode(ExtCommand::IssueTokens, &reply) {
                Ok(ExtResponse::IssueTokens(TransferTokenList(list))) => {
                    let tokens = &session.peers.tokens;
                    let mut pool = lock(&tokens.pool);
                    pool.available.extend_from_slice(list);
                    pool.requested = false;
                    drop(pool);
                    tokens.changed.notify_all();
                    Ok(())
                }
                Ok(_) => Err("the reply of another command".to_owned()),
                Err(e) => Err(e.to_string()),
            }
        };
        let len = 4 + (TOKEN_BATCH * TRANSFER_TOKEN_BYTES) as u64;
        let request = ExtRequest::IssueTokens(crate::rpc::wire::ext::IssueTokens { count: TOKEN_BATCH as u32 });
        self.with_writer(|guard| {
            guard.request_encoded(
                ExtCommand::IssueTokens.name(),
                len..=len,
                ReplySink::Callback(Box::new(on_reply)),
                |out| request.encode(out),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(available: usize, taken: &[(u32, usize)]) -> TokenPool {
        let mut pool = TokenPool { available: vec![[0; TRANSFER_TOKEN_BYTES]; available], ..TokenPool::default() };
        pool.taken = taken.iter().map(|&(queue, count)| (queue, TakenTokens { count, unconfirmed: 0 })).collect();
        pool
    }

    #[test]
    fn requests_respect_the_limit_of_unused_tokens() {
        for (available, taken, count, want) in [
            (0, 0, 1, true),
            (256, 0, 128, false),
            (256, 0, 129, true),
            (256, 512, 256, true),
            (256, 513, 256, false),
            (0, 768, 256, true),
            (0, 769, 1, false),
            (100, 900, 256, false),
        ] {
            let mut pool = pool(available, &[(1, taken / 2), (2, taken - taken / 2)]);
            assert_eq!(pool.runs_low(count), want, "{available} available, {taken} taken, {count} requested");
            pool.requested = true;
            assert!(!pool.runs_low(count));
        }
    }

    #[test]
    fn taken_tokens_count_until_they_are_confirmed_as_used() {
        let mut pool = pool(512, &[]);
        assert_eq!(pool.take(1, 600), None);
        assert_eq!([pool.take(1, 100), pool.take(2, 300)].map(|taken| taken.map(|t| t.len())), [Some(100), Some(300)]);
        // A few tokens need no confirmation, and each token is confirmed once.
        assert_eq!(pool.add_unconfirmed(1, 100), []);
        let mut unconfirmed = pool.add_unconfirmed(2, 300);
        unconfirmed.sort_unstable();
        assert_eq!(unconfirmed, [(1, 100), (2, 300)]);
        assert_eq!(pool.add_unconfirmed(1, 1), []);
        pool.record_used(1, 100);
        pool.record_used(3, 7);
        let mut counts: Vec<_> = pool.taken.iter().map(|(&queue, taken)| (queue, taken.count)).collect();
        counts.sort_unstable();
        assert_eq!(counts, [(1, 0), (2, 300)]);
    }
}

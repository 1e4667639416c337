//! Tickets of this connection's server: for bytes that other servers put there.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::super::connection::{ConnectionShared, ReplySink, WriteGuard, lock};
use super::mark_tracker::MarkTracker;
use crate::device::{DeviceError, PIECE};
use crate::rpc::wire::ext::{Answer, ExtCommand, ExtRequest, Read, Spans, TICKET, Ticket, TicketList};

/// Tickets that are asked for at once, the most that a server issues to one request.
pub(super) const TOKEN_BATCH: usize = 256;

/// The most that a session may have without using them. The server counts those, too, whose bytes have yet to come.
const MAX_UNUSED_TOKENS: usize = 1024;

/// When so many are named in RECEIVEs and nothing tells whether they are used, the server is asked.
const MAX_UNCONFIRMED_TOKENS: usize = TOKEN_BATCH / 2;

#[derive(Debug, Default)]
pub(super) struct TransferTokens {
    pool: Mutex<TokenPool>,
    /// There are more of them, or room for more, or there will be none.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct TokenPool {
    available: Vec<Ticket>,
    /// Whether more are on their way.
    requested: bool,
    /// Those that open queues took, and that are not known to be used.
    taken: HashMap<u32, TakenTokens>,
}

#[derive(Debug, Default)]
struct TakenTokens {
    count: usize,
    /// Of these, how many are named in RECEIVEs with nothing behind them yet that will tell.
    unconfirmed: usize,
}

impl TokenPool {
    /// Whether to ask for more, where somebody wants `count`.
    fn runs_low(&self, count: usize) -> bool {
        let left = self.available.len().checked_sub(count);
        let unused = self.available.len() + self.taken.values().map(|taken| taken.count).sum::<usize>();
        left.is_none_or(|left| left < TOKEN_BATCH / 2) && !self.requested && unused + TOKEN_BATCH <= MAX_UNUSED_TOKENS
    }

    fn take(&mut self, queue: u32, count: usize) -> Option<Vec<Ticket>> {
        let left = self.available.len().checked_sub(count)?;
        self.taken.entry(queue).or_default().count += count;
        Some(self.available.split_off(left))
    }

    /// A queue is about to receive for so many. The queues to be asked about, with how many of each.
    fn add_unconfirmed(&mut self, queue: u32, count: usize) -> Vec<(u32, usize)> {
        self.taken.entry(queue).or_default().unconfirmed += count;
        if self.taken.values().map(|taken| taken.unconfirmed).sum::<usize>() < MAX_UNCONFIRMED_TOKENS {
            return Vec::new();
        }
        let unasked = self.taken.iter_mut().map(|(&queue, taken)| (queue, std::mem::take(&mut taken.unconfirmed)));
        unasked.filter(|(_, count)| *count > 0).collect()
    }

    fn record_used(&mut self, queue: u32, count: usize) {
        if let Some(taken) = self.taken.get_mut(&queue) {
            taken.count = taken.count.saturating_sub(count);
        }
    }
}

impl TransferTokens {
    /// So many that a queue received for are used.
    pub(super) fn record_used(&self, queue: u32, count: usize) {
        if count > 0 {
            lock(&self.pool).record_used(queue, count);
            self.changed.notify_all();
        }
    }

    /// A queue ends, in a turn: what it has not used the server forgets before it hears what comes later.
    pub(super) fn forget_queue(&self, queue: u32) {
        lock(&self.pool).taken.remove(&queue);
        self.changed.notify_all();
    }

    /// Whoever waits looks whether that is of any use.
    pub(super) fn wake_waiters(&self) {
        drop(lock(&self.pool));
        self.changed.notify_all();
    }
}

impl WriteGuard<'_> {
    /// A RECEIVE for `count` tickets was just put. Asks from time to time which are used, by READs of nothing: their answers
    /// come when what is before them is done.
    pub(super) fn confirm_token_use(&mut self, queue: u32, count: usize) -> Result<(), DeviceError> {
        let session = self.shared.session()?;
        let unasked = lock(&session.peers.tokens.pool).add_unconfirmed(queue, count);
        for (queue, count) in unasked {
            if let Some(id) = session.register_empty_read(queue, count) {
                self.buffer(|out| ExtRequest::Read(Read { queue, id, spans: Spans::new(&[]) }).encode(out));
            }
        }
        Ok(())
    }
}

impl ConnectionShared {
    /// Whether there are tickets for so many bytes here.
    pub(super) fn has_tokens(&self, bytes: u64) -> bool {
        let Some(session) = &self.session else { return false };
        lock(&session.peers.tokens.pool).available.len() as u64 >= bytes.div_ceil(PIECE)
    }

    /// Takes tickets for a queue, and asks for more ahead of time. Waits where there are too few: the server has no more before
    /// earlier ones are used.
    pub(super) fn take_tokens(self: &Arc<Self>, track: &MarkTracker, count: usize) -> Result<Vec<Ticket>, DeviceError> {
        let tickets = &self.session()?.peers.tokens;
        let mut pool = lock(&tickets.pool);
        let mut waited = false;
        loop {
            if pool.runs_low(count) {
                pool.requested = true;
                drop(pool);
                self.request_tokens()?;
                pool = lock(&tickets.pool);
            }
            if let Some(taken) = pool.take(track.queue, count) {
                return Ok(taken);
            }
            if !std::mem::replace(&mut waited, true) {
                self.count_wait();
            }
            self.check_alive()?;
            // Whoever fails the queue takes the lock after that.
            if let Some(failure) = track.failure() {
                return Err(failure);
            }
            pool = tickets.changed.wait(pool).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn request_tokens(self: &Arc<Self>) -> Result<(), DeviceError> {
        let shared = Arc::clone(self);
        let told = move |reply: Result<Vec<u8>, DeviceError>| {
            let (Ok(reply), Some(session)) = (reply, &shared.session) else { return Ok(()) };
            match Answer::decode(ExtCommand::Tickets, &reply) {
                Ok(Answer::Tickets(TicketList(list))) => {
                    let tickets = &session.peers.tokens;
                    let mut pool = lock(&tickets.pool);
                    pool.available.extend_from_slice(list);
                    pool.requested = false;
                    drop(pool);
                    tickets.changed.notify_all();
                    Ok(())
                }
                Ok(_) => Err("another command's answer".to_owned()),
                Err(e) => Err(e.to_string()),
            }
        };
        let len = 4 + (TOKEN_BATCH * TICKET) as u64;
        let request = ExtRequest::Tickets(crate::rpc::wire::ext::Tickets { count: TOKEN_BATCH as u32 });
        self.with_writer(|turn| {
            turn.request_encoded(ExtCommand::Tickets.name(), len..=len, ReplySink::Callback(Box::new(told)), |out| {
                request.encode(out)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(here: usize, taken: &[(u32, usize)]) -> TokenPool {
        let mut pool = TokenPool { available: vec![[0; TICKET]; here], ..TokenPool::default() };
        pool.taken = taken.iter().map(|&(queue, count)| (queue, TakenTokens { count, unconfirmed: 0 })).collect();
        pool
    }

    #[test]
    fn no_more_are_asked_for_than_a_session_may_have() {
        for (here, taken, count, want) in [
            (0, 0, 1, true),
            (256, 0, 128, false),
            (256, 0, 129, true),
            (256, 512, 256, true),
            (256, 513, 256, false),
            (0, 768, 256, true),
            (0, 769, 1, false),
            (100, 900, 256, false),
        ] {
            let mut pool = pool(here, &[(1, taken / 2), (2, taken - taken / 2)]);
            assert_eq!(pool.runs_low(count), want, "{here} here, {taken} taken, {count} wanted");
            pool.requested = true;
            assert!(!pool.runs_low(count));
        }
    }

    #[test]
    fn those_taken_count_until_they_are_used_or_their_queue_ends() {
        let mut pool = pool(512, &[]);
        assert_eq!(pool.take(1, 600), None);
        assert_eq!([pool.take(1, 100), pool.take(2, 300)].map(|taken| taken.map(|t| t.len())), [Some(100), Some(300)]);
        // Nobody is asked about a few, and each only once.
        assert_eq!(pool.add_unconfirmed(1, 100), []);
        let mut asked = pool.add_unconfirmed(2, 300);
        asked.sort_unstable();
        assert_eq!(asked, [(1, 100), (2, 300)]);
        assert_eq!(pool.add_unconfirmed(1, 1), []);
        pool.record_used(1, 100);
        pool.record_used(3, 7);
        let mut counts: Vec<_> = pool.taken.iter().map(|(&queue, taken)| (queue, taken.count)).collect();
        counts.sort_unstable();
        assert_eq!(counts, [(1, 0), (2, 300)]);
    }
}

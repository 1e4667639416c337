//! Tickets of this connection's server: for bytes that other servers put there.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::super::connection::{Shared, To, Turn, lock};
use super::track::Track;
use crate::device::{DeviceError, PIECE};
use crate::rpc::wire::ext::{Answer, ExtCommand, ExtRequest, Read, Spans, TICKET, Ticket, TicketList};

/// Tickets that are asked for at once, the most that a server issues to one request.
pub(super) const BATCH: usize = 256;

/// The most that a session may have without using them. The server counts those, too, whose bytes have yet to come.
const MOST: usize = 1024;

/// When so many are named in RECEIVEs and nothing tells whether they are used, the server is asked.
const UNASKED: usize = BATCH / 2;

#[derive(Debug, Default)]
pub(super) struct Tickets {
    pool: Mutex<Pool>,
    /// There are more of them, or room for more, or there will be none.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Pool {
    here: Vec<Ticket>,
    /// Whether more are on their way.
    asked: bool,
    /// Those that open queues took, and that are not known to be used.
    taken: HashMap<u32, Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    count: usize,
    /// Of these, how many are named in RECEIVEs with nothing behind them yet that will tell.
    unasked: usize,
}

impl Pool {
    /// Whether to ask for more, where somebody wants `count`.
    fn runs_low(&self, count: usize) -> bool {
        let left = self.here.len().checked_sub(count);
        let unused = self.here.len() + self.taken.values().map(|taken| taken.count).sum::<usize>();
        left.is_none_or(|left| left < BATCH / 2) && !self.asked && unused + BATCH <= MOST
    }

    fn take(&mut self, queue: u32, count: usize) -> Option<Vec<Ticket>> {
        let left = self.here.len().checked_sub(count)?;
        self.taken.entry(queue).or_default().count += count;
        Some(self.here.split_off(left))
    }

    /// A queue is about to receive for so many. The queues to be asked about, with how many of each.
    fn receive(&mut self, queue: u32, count: usize) -> Vec<(u32, usize)> {
        self.taken.entry(queue).or_default().unasked += count;
        if self.taken.values().map(|taken| taken.unasked).sum::<usize>() < UNASKED {
            return Vec::new();
        }
        let unasked = self.taken.iter_mut().map(|(&queue, taken)| (queue, std::mem::take(&mut taken.unasked)));
        unasked.filter(|(_, count)| *count > 0).collect()
    }

    fn used(&mut self, queue: u32, count: usize) {
        if let Some(taken) = self.taken.get_mut(&queue) {
            taken.count = taken.count.saturating_sub(count);
        }
    }
}

impl Tickets {
    /// So many that a queue received for are used.
    pub(super) fn used(&self, queue: u32, count: usize) {
        if count > 0 {
            lock(&self.pool).used(queue, count);
            self.changed.notify_all();
        }
    }

    /// A queue ends, in a turn: what it has not used the server forgets before it hears what comes later.
    pub(super) fn forget(&self, queue: u32) {
        lock(&self.pool).taken.remove(&queue);
        self.changed.notify_all();
    }

    /// Whoever waits looks whether that is of any use.
    pub(super) fn wake(&self) {
        drop(lock(&self.pool));
        self.changed.notify_all();
    }
}

impl Turn<'_> {
    /// A RECEIVE for `count` tickets was just put. Asks from time to time which are used, by READs of nothing: their answers
    /// come when what is before them is done.
    pub(super) fn received(&mut self, queue: u32, count: usize) -> Result<(), DeviceError> {
        let session = self.shared.session()?;
        let unasked = lock(&session.peers.tickets.pool).receive(queue, count);
        for (queue, count) in unasked {
            if let Some(id) = session.read_nothing(queue, count) {
                self.put(|out| ExtRequest::Read(Read { queue, id, spans: Spans::new(&[]) }).encode(out));
            }
        }
        Ok(())
    }
}

impl Shared {
    /// Whether there are tickets for so many bytes here.
    pub(super) fn has_tickets(&self, bytes: u64) -> bool {
        let Some(session) = &self.session else { return false };
        lock(&session.peers.tickets.pool).here.len() as u64 >= bytes.div_ceil(PIECE)
    }

    /// Takes tickets for a queue, and asks for more ahead of time. Waits where there are too few: the server has no more before
    /// earlier ones are used.
    pub(super) fn tickets(self: &Arc<Self>, track: &Track, count: usize) -> Result<Vec<Ticket>, DeviceError> {
        let tickets = &self.session()?.peers.tickets;
        let mut pool = lock(&tickets.pool);
        let mut waited = false;
        loop {
            if pool.runs_low(count) {
                pool.asked = true;
                drop(pool);
                self.refill()?;
                pool = lock(&tickets.pool);
            }
            if let Some(taken) = pool.take(track.queue, count) {
                return Ok(taken);
            }
            if !std::mem::replace(&mut waited, true) {
                self.count_wait();
            }
            self.unbroken()?;
            // Whoever fails the queue takes the lock after that.
            if let Some(failure) = track.failure() {
                return Err(failure);
            }
            pool = tickets.changed.wait(pool).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn refill(self: &Arc<Self>) -> Result<(), DeviceError> {
        let shared = Arc::clone(self);
        let told = move |reply: Result<Vec<u8>, DeviceError>| {
            let (Ok(reply), Some(session)) = (reply, &shared.session) else { return Ok(()) };
            match Answer::decode(ExtCommand::Tickets, &reply) {
                Ok(Answer::Tickets(TicketList(list))) => {
                    let tickets = &session.peers.tickets;
                    let mut pool = lock(&tickets.pool);
                    pool.here.extend_from_slice(list);
                    pool.asked = false;
                    drop(pool);
                    tickets.changed.notify_all();
                    Ok(())
                }
                Ok(_) => Err("another command's answer".to_owned()),
                Err(e) => Err(e.to_string()),
            }
        };
        let len = 4 + (BATCH * TICKET) as u64;
        let request = ExtRequest::Tickets(crate::rpc::wire::ext::Tickets { count: BATCH as u32 });
        self.turn(|turn| {
            turn.ask(ExtCommand::Tickets.name(), len..=len, To::Told(Box::new(told)), |out| request.encode(out))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(here: usize, taken: &[(u32, usize)]) -> Pool {
        let mut pool = Pool { here: vec![[0; TICKET]; here], ..Pool::default() };
        pool.taken = taken.iter().map(|&(queue, count)| (queue, Taken { count, unasked: 0 })).collect();
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
            pool.asked = true;
            assert!(!pool.runs_low(count));
        }
    }

    #[test]
    fn those_taken_count_until_they_are_used_or_their_queue_ends() {
        let mut pool = pool(512, &[]);
        assert_eq!(pool.take(1, 600), None);
        assert_eq!([pool.take(1, 100), pool.take(2, 300)].map(|taken| taken.map(|t| t.len())), [Some(100), Some(300)]);
        // Nobody is asked about a few, and each only once.
        assert_eq!(pool.receive(1, 100), []);
        let mut asked = pool.receive(2, 300);
        asked.sort_unstable();
        assert_eq!(asked, [(1, 100), (2, 300)]);
        assert_eq!(pool.receive(1, 1), []);
        pool.used(1, 100);
        pool.used(3, 7);
        let mut counts: Vec<_> = pool.taken.iter().map(|(&queue, taken)| (queue, taken.count)).collect();
        counts.sort_unstable();
        assert_eq!(counts, [(1, 0), (2, 300)]);
    }
}

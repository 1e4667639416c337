//! Tickets: who may put bytes into a session's memory, where, and once.
//!
//! A [`Table`] for the whole server, since tickets of one session are used on connections of others. A session has a [`Book`]:
//! it is issued tickets, and says where their bytes go ([`Book::receive`]). Whoever comes with a ticket has it taken from the
//! table before anything else happens, and the bytes go to the [`Inbound`] of the queue that waits for them; where nobody
//! waits for them yet they are kept, and the session pays for that. Bytes that nobody wants any more, because their queue has
//! failed or was closed, are dropped: who brings them need not know, and brings others' bytes on the same connection.
//!
//! A ticket is found by hashing with a key of this process and then compared, which may tell how long the look-up took, and
//! nothing of the 128 random bits: without the key nobody knows which guess comes near another ticket.

mod inbound;

pub(super) use inbound::{Arrivals, Inbound};

use std::collections::hash_map::Entry as Place;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use thiserror::Error;

use crate::device::{Account, Charge, Device, DeviceError, PIECE, Point, Queue, Region, SourceError, Timeline};
use crate::rpc::wire::ext::{TICKET, Ticket};

/// Unused tickets that a session may have, and so the most that one SEND can be about.
const MAX_TICKETS: usize = 1024;

/// Tickets that one message may ask for.
const MAX_ASKED: u32 = 256;

/// What is wrong with tickets.
#[derive(Debug, Error)]
pub(in crate::rpc::server) enum TicketError {
    #[error("expected to be asked for 1 to {MAX_ASKED} tickets, got {0}")]
    Asked(u32),
    #[error("the session would have {0} unused tickets; at most {MAX_TICKETS}: use those that it has")]
    TooMany(usize),
    #[error("the system gives no random bytes for tickets: {0}")]
    Random(getrandom::Error),
    #[error("{bytes} bytes take {need} tickets, one for each 256 KiB, got {have}")]
    Count { bytes: u64, need: u64, have: usize },
    #[error("expected at most {MAX_TICKETS} tickets, got {0}")]
    Many(usize),
    #[error("ticket {0} of the list was not issued to this session, or is used or expired")]
    Foreign(usize),
    #[error("the ticket was not issued here, or is used or expired")]
    Unknown,
    #[error("the ticket is for {expected} bytes, got {have}")]
    Length { expected: u64, have: usize },
    #[error("no memory to keep the bytes: {0}")]
    Memory(DeviceError),
}

impl TicketError {
    /// What it is to the queue that waits for the bytes.
    fn failure(&self) -> DeviceError {
        match self {
            TicketError::Memory(e) => e.clone(),
            e => DeviceError::Source(SourceError::new(format_args!("another server put wrong bytes: {e}"))),
        }
    }
}

/// How many tickets `bytes` bytes take, if that is how many there are.
pub(in crate::rpc::server) fn count(bytes: u64, have: usize) -> Result<(), TicketError> {
    if have > MAX_TICKETS {
        return Err(TicketError::Many(have));
    }
    let need = bytes.div_ceil(PIECE);
    if need == have as u64 { Ok(()) } else { Err(TicketError::Count { bytes, need, have }) }
}

/// Bytes that came before they could go to their place.
struct Stash {
    bytes: Vec<u8>,
    /// The session whose memory they go to pays for them.
    _charge: Charge,
}

impl Stash {
    fn new(bytes: &[u8], account: &Arc<Account>) -> Result<Stash, TicketError> {
        let charge = account.charge(bytes.len() as u64).map_err(TicketError::Memory)?;
        Ok(Stash { bytes: bytes.to_vec(), _charge: charge })
    }
}

/// Bytes of a PUT.
enum Data<'a> {
    Here(&'a [u8]),
    Kept(Stash),
}

impl Data<'_> {
    fn len(&self) -> usize {
        self.bytes().len()
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Data::Here(bytes) => bytes,
            Data::Kept(stash) => &stash.bytes,
        }
    }

    fn keep(self, account: &Arc<Account>) -> Result<Stash, TicketError> {
        match self {
            Data::Here(bytes) => Stash::new(bytes, account),
            Data::Kept(stash) => Ok(stash),
        }
    }
}

/// Whether bytes of a PUT can be some of a RECEIVE.
fn possible(data: &[u8]) -> Result<(), TicketError> {
    let have = data.len();
    if have == 0 || have as u64 > PIECE { Err(TicketError::Length { expected: PIECE, have }) } else { Ok(()) }
}

/// What is known of a live ticket.
enum State {
    /// Nobody has said where its bytes go.
    Issued,
    /// Nor this, and the bytes have come.
    Stashed(Stash),
    /// Nor this, and whoever came with it brought nothing that can be used.
    Spoiled(DeviceError),
    /// The bytes go to this piece of this RECEIVE.
    Armed(Arc<inbound::Inner>, u64, usize),
    /// The bytes have not come, and the queue that they were for has ended.
    Unwanted,
}

struct Entry {
    session: u64,
    account: Arc<Account>,
    state: State,
}

/// All live tickets of a server.
#[derive(Default)]
pub(in crate::rpc::server) struct Table(Mutex<Tables>);

#[derive(Default)]
struct Tables {
    entries: HashMap<Ticket, Entry>,
    /// The tickets of each session.
    sessions: HashMap<u64, Own>,
    next_session: u64,
}

/// The tickets of a session.
#[derive(Default)]
struct Own {
    unused: HashSet<Ticket>,
    /// Those that are [`State::Unwanted`], the oldest first, and no more than may be unused.
    unwanted: VecDeque<Ticket>,
}

impl Tables {
    fn remove(&mut self, ticket: &Ticket) -> Option<Entry> {
        let entry = self.entries.remove(ticket)?;
        if let Some(own) = self.sessions.get_mut(&entry.session) {
            match entry.state {
                State::Unwanted => own.unwanted.retain(|unwanted| unwanted != ticket),
                _ => _ = own.unused.remove(ticket),
            }
        }
        Some(entry)
    }

    /// Nobody wants the bytes of a ticket any more: if they come, they are dropped. What else is to be dropped, without the lock.
    fn abandon(&mut self, ticket: &Ticket) -> Option<State> {
        let entry = self.entries.get_mut(ticket)?;
        match entry.state {
            State::Unwanted => None,
            // Used.
            State::Stashed(_) | State::Spoiled(_) => self.remove(ticket).map(|entry| entry.state),
            State::Issued | State::Armed(..) => {
                let state = std::mem::replace(&mut entry.state, State::Unwanted);
                if let Some(own) = self.sessions.get_mut(&entry.session) {
                    own.unused.remove(ticket);
                    own.unwanted.push_back(*ticket);
                    if own.unwanted.len() > MAX_TICKETS {
                        own.unwanted.pop_front().map(|oldest| self.entries.remove(&oldest));
                    }
                }
                Some(state)
            }
        }
    }
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, Tables> {
        // A panic elsewhere can at most have left a ticket in one of the two maps, where it is of no use to anyone.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The book of a new session; `account` pays for bytes that come too early.
    pub(in crate::rpc::server) fn book(self: &Arc<Self>, account: &Arc<Account>) -> Book {
        let mut tables = self.lock();
        let session = tables.next_session;
        tables.next_session += 1;
        tables.sessions.insert(session, Own::default());
        Book { table: Arc::clone(self), session, account: Arc::clone(account), arrivals: Arc::default() }
    }

    /// Takes a ticket and the bytes that someone put for it. Never waits for a device. A ticket that was good is used
    /// afterwards, whatever this returns, and where this fails the queue that waits for its bytes, now or later, fails too. A
    /// failure that is the queue's own is not returned: whoever put the bytes did what was asked.
    ///
    /// # Errors
    /// [`TicketError::Unknown`], [`TicketError::Length`]: nothing was written then.
    pub(in crate::rpc::server) fn put(&self, ticket: &Ticket, data: &[u8]) -> Result<(), TicketError> {
        match self.take(ticket, data) {
            Err(TicketError::Memory(_)) => Ok(()),
            taken => taken,
        }
    }

    fn take(&self, ticket: &Ticket, data: &[u8]) -> Result<(), TicketError> {
        let early = match self.lock().entries.get(ticket) {
            Some(Entry { state: State::Armed(..) | State::Unwanted, .. }) => None,
            Some(Entry { state: State::Issued, account, .. }) => Some(Arc::clone(account)),
            _ => return Err(TicketError::Unknown),
        };
        // Copied while nobody has to wait for the table.
        let data = match early {
            None => Data::Here(data),
            Some(account) => match possible(data).and_then(|()| Stash::new(data, &account)) {
                Ok(stash) => Data::Kept(stash),
                Err(e) => return Err(self.spoil(ticket, e)),
            },
        };
        let mut tables = self.lock();
        let Some(entry) = tables.entries.get_mut(ticket) else { return Err(TicketError::Unknown) };
        match (&mut entry.state, data) {
            (state @ State::Issued, Data::Kept(stash)) => {
                *state = State::Stashed(stash);
                Ok(())
            }
            (State::Armed(..), data) => {
                let entry = tables.remove(ticket);
                drop(tables);
                match entry.map(|entry| entry.state) {
                    Some(State::Armed(inbound, receive, piece)) => inbound.put(receive, piece, data),
                    _ => Err(TicketError::Unknown),
                }
            }
            (State::Unwanted, data) => {
                tables.remove(ticket);
                drop(tables);
                possible(data.bytes())
            }
            _ => Err(TicketError::Unknown),
        }
    }

    /// Uses up a ticket that no RECEIVE had named when its bytes came.
    fn spoil(&self, ticket: &Ticket, e: TicketError) -> TicketError {
        let mut tables = self.lock();
        match tables.entries.get_mut(ticket).map(|entry| &mut entry.state) {
            Some(state @ State::Issued) => *state = State::Spoiled(e.failure()),
            // Meanwhile one has named it, or its queue has ended.
            Some(State::Armed(..) | State::Unwanted) => {
                let used = tables.remove(ticket);
                drop(tables);
                if let Some(Entry { state: State::Armed(inbound, ..), .. }) = used {
                    inbound.fail(e.failure());
                }
            }
            _ => {}
        }
        e
    }

    /// Tickets whose bytes nobody wants any more.
    fn abandon(&self, tickets: &[Ticket]) {
        let mut tables = self.lock();
        let gone: Vec<_> = tickets.iter().map(|ticket| tables.abandon(ticket)).collect();
        drop(tables);
        // Possibly the last handle of what lies on a device.
        drop(gone);
    }

    /// Tickets that are good for nothing any more.
    fn forget(&self, tickets: &[Ticket]) {
        let mut tables = self.lock();
        let gone: Vec<_> = tickets.iter().map(|ticket| tables.remove(ticket)).collect();
        drop(tables);
        // As above.
        drop(gone);
    }
}

/// The tickets of one session; they go with it.
pub(in crate::rpc::server) struct Book {
    table: Arc<Table>,
    session: u64,
    account: Arc<Account>,
    arrivals: Arc<Arrivals>,
}

impl Book {
    /// The place where bytes for a queue of `device` arrive: one for each queue that receives.
    pub(in crate::rpc::server) fn inbound(&self, device: &Arc<dyn Device>, patience: Duration) -> Inbound {
        let inbound = Inbound::new(&self.table, device, &self.account, patience);
        self.arrivals.add(&inbound);
        inbound
    }

    /// All such places.
    pub(in crate::rpc::server) fn arrivals(&self) -> &Arc<Arrivals> {
        &self.arrivals
    }

    /// New tickets.
    ///
    /// # Errors
    /// [`TicketError::Asked`], [`TicketError::TooMany`], [`TicketError::Random`].
    pub(in crate::rpc::server) fn issue(&self, count: u32) -> Result<Vec<Ticket>, TicketError> {
        if !(1..=MAX_ASKED).contains(&count) {
            return Err(TicketError::Asked(count));
        }
        let mut tickets = vec![[0; TICKET]; count as usize];
        getrandom::fill(tickets.as_flattened_mut()).map_err(TicketError::Random)?;
        let mut tables = self.table.lock();
        let Tables { entries, sessions, .. } = &mut *tables;
        let own = sessions.entry(self.session).or_default();
        let sum = own.unused.len() + tickets.len();
        if sum > MAX_TICKETS {
            return Err(TicketError::TooMany(sum));
        }
        for ticket in &tickets {
            // Two of 128 random bits are not equal; nobody's ticket is replaced if they are.
            if let Place::Vacant(place) = entries.entry(*ticket) {
                place.insert(Entry { session: self.session, account: Arc::clone(&self.account), state: State::Issued });
                own.unused.insert(*ticket);
            }
        }
        Ok(tickets)
    }

    /// That these are tickets for so many bytes of this session, all of which it was issued, and has not named before.
    ///
    /// # Errors
    /// [`TicketError::Count`], [`TicketError::Foreign`].
    pub(in crate::rpc::server) fn check(&self, bytes: u64, tickets: &[Ticket]) -> Result<(), TicketError> {
        count(bytes, tickets.len())?;
        let tables = self.table.lock();
        let mut seen = HashSet::new();
        for (at, ticket) in tickets.iter().enumerate() {
            let entry = tables.entries.get(ticket).filter(|entry| entry.session == self.session);
            let unused = entry.is_some_and(|entry| !matches!(entry.state, State::Armed(..) | State::Unwanted));
            // A list that is longer than what the session may have ends at the first repetition.
            if !unused || !seen.insert(ticket) {
                return Err(TicketError::Foreign(at));
            }
        }
        Ok(())
    }

    /// Makes what `queue` is sent from now on wait for the bytes of `tickets`, which have been checked. They go to `region` once
    /// the work that the queue was sent before is done. `inbound` is that queue's. When they do not come within its patience,
    /// or not as they should, the queue fails.
    ///
    /// # Errors
    /// That of the queue, which has failed; the tickets are used then.
    pub(in crate::rpc::server) fn receive(
        &self,
        inbound: &Inbound,
        queue: &mut dyn Queue,
        region: Region,
        tickets: &[Ticket],
    ) -> Result<(), DeviceError> {
        if tickets.is_empty() {
            return Ok(());
        }
        let ready = queue.mark();
        let arrival = Timeline::new();
        let expected = inbound.0.expect(ready, Arc::clone(&arrival), region, tickets);
        let receive = expected.inspect_err(|_| self.discard(tickets))?;
        for (piece, state) in self.arm(&inbound.0, receive, tickets) {
            match state {
                // Where they are wrong the queue fails; who put them is not here.
                State::Stashed(stash) => drop(inbound.0.put(receive, piece, Data::Kept(stash))),
                State::Spoiled(e) => inbound.0.fail(e),
                State::Issued | State::Armed(..) | State::Unwanted => {}
            }
        }
        if inbound.0.is_over() {
            self.discard(tickets);
        }
        // Last of all: where a device cannot make its queue wait, this waits for the bytes.
        queue.wait(&Point::new(&arrival, 1)).inspect_err(|e| inbound.0.fail(e.clone()))
    }

    /// Tickets for bytes that nobody wants any more: their queue has failed.
    pub(in crate::rpc::server) fn discard(&self, tickets: &[Ticket]) {
        let tables = self.table.lock();
        let own = tables.sessions.get(&self.session);
        let own = tickets.iter().filter(|ticket| own.is_some_and(|own| own.unused.contains(*ticket)));
        let own: Vec<_> = own.copied().collect();
        drop(tables);
        self.table.abandon(&own);
    }

    /// Says where the bytes of checked tickets go. Those that were used already, by their pieces.
    fn arm(&self, inbound: &Arc<inbound::Inner>, receive: u64, tickets: &[Ticket]) -> Vec<(usize, State)> {
        let mut tables = self.table.lock();
        let mut used = Vec::new();
        for (piece, ticket) in tickets.iter().enumerate() {
            match tables.entries.get_mut(ticket) {
                Some(entry) if matches!(entry.state, State::Issued) => {
                    entry.state = State::Armed(Arc::clone(inbound), receive, piece);
                }
                // The queue has failed since they were checked.
                None => {}
                Some(_) => used.extend(tables.remove(ticket).map(|entry| (piece, entry.state))),
            }
        }
        used
    }
}

impl Drop for Book {
    fn drop(&mut self) {
        let mut tables = self.table.lock();
        let own = tables.sessions.remove(&self.session).unwrap_or_default();
        let tickets = own.unused.iter().chain(&own.unwanted);
        let gone: Vec<_> = tickets.map(|ticket| tables.entries.remove(ticket)).collect();
        drop(tables);
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{CpuDevice, Path};

    /// Bytes that are of no use are found to be so while their ticket's RECEIVE comes.
    #[test]
    fn a_ticket_that_is_armed_before_it_is_spoilt_fails_its_queue() {
        let device = CpuDevice::new("CPU", 1, Path::Exact, 1 << 20).unwrap() as Arc<dyn Device>;
        let (table, account) = (Arc::new(Table::default()), Account::new(1 << 20));
        let mut queue = device.queue(&account).unwrap();
        let book = table.book(&account);
        let tickets = book.issue(2).unwrap();
        let inbound = book.inbound(&device, Duration::from_secs(600));
        let region = device.alloc(1, &account).unwrap().whole();
        book.receive(&inbound, &mut *queue, region, &tickets[..1]).unwrap();
        let have = table.spoil(&tickets[0], TicketError::Length { expected: PIECE, have: 0 });
        assert!(matches!(have, TicketError::Length { .. }));
        let failed = queue.mark().wait(Some(std::time::Instant::now() + Duration::from_secs(60)));
        assert!(matches!(failed, Err(DeviceError::Source(_))), "{failed:?}");
        assert!(matches!(table.put(&tickets[0], &[1]), Err(TicketError::Unknown)));
        // The other one is as good as before.
        assert!(table.put(&tickets[1], &[1]).is_ok());
    }
}

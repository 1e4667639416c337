//! Tickets: who may put bytes into a session's memory, where, and once.
//!
//! A [`Table`] for the whole server, since tickets of one session are used on connections of others. A session has a [`Book`]:
//! it is issued tickets, and says where their bytes go ([`Book::receive`]). Whoever comes with a ticket has it taken from the
//! table before anything else happens, and the bytes go to the [`Inbound`] of the queue that waits for them; where nobody
//! waits for them yet they are kept, and the session pays for that.
//!
//! A ticket is found by hashing with a key of this process and then compared, which may tell how long the look-up took, and
//! nothing of the 128 random bits: without the key nobody knows which guess comes near another ticket.

mod inbound;

pub(super) use inbound::Inbound;

use std::collections::hash_map::Entry as Place;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use thiserror::Error;

use crate::device::{Account, Charge, Device, DeviceError, PIECE, Point, Queue, Region, Timeline};
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
            e => DeviceError::Source(format!("another server put wrong bytes: {e}")),
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

/// Bytes of a PUT that nobody waits for yet, if they can be some of a RECEIVE.
fn early_bytes(data: &[u8], account: &Arc<Account>) -> Result<Stash, TicketError> {
    let have = data.len();
    if have == 0 || have as u64 > PIECE {
        return Err(TicketError::Length { expected: PIECE, have });
    }
    Stash::new(data, account)
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
    sessions: HashMap<u64, HashSet<Ticket>>,
    next_session: u64,
}

impl Tables {
    fn remove(&mut self, ticket: &Ticket) -> Option<Entry> {
        let entry = self.entries.remove(ticket)?;
        if let Some(tickets) = self.sessions.get_mut(&entry.session) {
            tickets.remove(ticket);
        }
        Some(entry)
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
        tables.sessions.insert(session, HashSet::new());
        Book { table: Arc::clone(self), session, account: Arc::clone(account) }
    }

    /// Takes a ticket and the bytes that someone put for it. Never waits for a device. A ticket that was good is used
    /// afterwards, whatever this returns, and where this fails the queue that waits for its bytes, now or later, fails too.
    ///
    /// # Errors
    /// [`TicketError::Unknown`], [`TicketError::Length`], [`TicketError::Memory`]: nothing was written then.
    pub(in crate::rpc::server) fn put(&self, ticket: &Ticket, data: &[u8]) -> Result<(), TicketError> {
        let early = match self.lock().entries.get(ticket) {
            Some(Entry { state: State::Armed(..), .. }) => None,
            Some(Entry { state: State::Issued, account, .. }) => Some(Arc::clone(account)),
            _ => return Err(TicketError::Unknown),
        };
        // Copied while nobody has to wait for the table.
        let data = match early {
            None => Data::Here(data),
            Some(account) => match early_bytes(data, &account) {
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
            _ => Err(TicketError::Unknown),
        }
    }

    /// Uses up a ticket that no RECEIVE has named.
    fn spoil(&self, ticket: &Ticket, e: TicketError) -> TicketError {
        if let Some(entry) = self.lock().entries.get_mut(ticket)
            && matches!(entry.state, State::Issued)
        {
            entry.state = State::Spoiled(e.failure());
        }
        e
    }

    /// Tickets that are good for nothing any more.
    fn forget(&self, tickets: &[Ticket]) {
        let mut tables = self.lock();
        let gone: Vec<_> = tickets.iter().map(|ticket| tables.remove(ticket)).collect();
        drop(tables);
        // Possibly the last handle of what lies on a device.
        drop(gone);
    }
}

/// The tickets of one session; they go with it.
pub(in crate::rpc::server) struct Book {
    table: Arc<Table>,
    session: u64,
    account: Arc<Account>,
}

impl Book {
    /// The place where bytes for a queue of `device` arrive: one for each queue that receives.
    pub(in crate::rpc::server) fn inbound(&self, device: &Arc<dyn Device>, patience: Duration) -> Inbound {
        Inbound::new(&self.table, device, &self.account, patience)
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
        let sum = own.len() + tickets.len();
        if sum > MAX_TICKETS {
            return Err(TicketError::TooMany(sum));
        }
        for ticket in &tickets {
            // Two of 128 random bits are not equal; nobody's ticket is replaced if they are.
            if let Place::Vacant(place) = entries.entry(*ticket) {
                place.insert(Entry { session: self.session, account: Arc::clone(&self.account), state: State::Issued });
                own.insert(*ticket);
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
            let unused = entry.is_some_and(|entry| !matches!(entry.state, State::Armed(..)));
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
                State::Issued | State::Armed(..) => {}
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
        let own: Vec<_> = tickets.iter().filter(|ticket| self.owns(&tables, ticket)).copied().collect();
        drop(tables);
        self.table.forget(&own);
    }

    fn owns(&self, tables: &Tables, ticket: &Ticket) -> bool {
        tables.sessions.get(&self.session).is_some_and(|own| own.contains(ticket))
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
        let tickets = tables.sessions.remove(&self.session).unwrap_or_default();
        let gone: Vec<_> = tickets.iter().map(|ticket| tables.entries.remove(ticket)).collect();
        drop(tables);
        drop(gone);
    }
}

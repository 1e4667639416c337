//! The tickets of one session: it is issued them, and says where their bytes go.

use std::collections::HashSet;
use std::collections::hash_map::Entry as Place;
use std::sync::Arc;
use std::time::Duration;

use super::error::{MAX_ASKED, MAX_TICKETS, TokenError, count};
use super::payload::Data;
use super::receiver::{Inner, PendingReceives, Receiver};
use super::table::{Destination, Entry, Own, State, Tables, TokenTable};
use crate::device::{Account, Device, DeviceError, Point, Queue, Region, Timeline};
use crate::rpc::wire::ext::{TICKET, Ticket};

/// The tickets of one session; they go with it.
pub(in crate::rpc::server) struct TokenLedger {
    table: Arc<TokenTable>,
    session: u64,
    account: Arc<Account>,
    arrivals: Arc<PendingReceives>,
}

impl TokenLedger {
    /// Of a new session; `account` pays for bytes that come too early.
    pub(in crate::rpc::server) fn new(table: &Arc<TokenTable>, account: &Arc<Account>) -> TokenLedger {
        let mut tables = table.lock();
        let session = tables.next_session;
        tables.next_session += 1;
        tables.sessions.insert(session, Own::default());
        TokenLedger { table: Arc::clone(table), session, account: Arc::clone(account), arrivals: Arc::default() }
    }

    /// The place where bytes for a queue of `device` arrive: one for each queue that receives.
    pub(in crate::rpc::server) fn inbound(&self, device: &Arc<dyn Device>, patience: Duration) -> Receiver {
        let inbound = Receiver::new(&self.table, device, &self.account, patience);
        self.arrivals.add(&inbound);
        inbound
    }

    /// All such places.
    pub(in crate::rpc::server) fn arrivals(&self) -> &Arc<PendingReceives> {
        &self.arrivals
    }

    /// New tickets.
    ///
    /// # Errors
    /// [`TokenError::Asked`], [`TokenError::TooMany`], [`TokenError::Random`].
    pub(in crate::rpc::server) fn issue(&self, count: u32) -> Result<Vec<Ticket>, TokenError> {
        if !(1..=MAX_ASKED).contains(&count) {
            return Err(TokenError::Asked(count));
        }
        let mut tickets = vec![[0; TICKET]; count as usize];
        getrandom::fill(tickets.as_flattened_mut()).map_err(TokenError::Random)?;
        let mut tables = self.table.lock();
        let Tables { entries, sessions, .. } = &mut *tables;
        let own = sessions.entry(self.session).or_default();
        let sum = own.unused.len() + tickets.len();
        if sum > MAX_TICKETS {
            return Err(TokenError::TooMany(sum));
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
    /// [`TokenError::Count`], [`TokenError::Foreign`].
    pub(in crate::rpc::server) fn check(&self, bytes: u64, tickets: &[Ticket]) -> Result<(), TokenError> {
        count(bytes, tickets.len())?;
        let tables = self.table.lock();
        let mut seen = HashSet::new();
        for (at, ticket) in tickets.iter().enumerate() {
            let entry = tables.entries.get(ticket).filter(|entry| entry.session == self.session);
            let unused = entry.is_some_and(|entry| !matches!(entry.state, State::Armed(..) | State::Unwanted));
            // A list that is longer than what the session may have ends at the first repetition.
            if !unused || !seen.insert(ticket) {
                return Err(TokenError::Foreign(at));
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
        inbound: &Receiver,
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
    fn arm(&self, inbound: &Arc<Inner>, receive: u64, tickets: &[Ticket]) -> Vec<(usize, State)> {
        let mut tables = self.table.lock();
        let mut used = Vec::new();
        for (piece, ticket) in tickets.iter().enumerate() {
            match tables.entries.get_mut(ticket) {
                Some(entry) if matches!(entry.state, State::Issued) => {
                    let destination: Arc<dyn Destination> = inbound.clone();
                    entry.state = State::Armed(destination, receive, piece);
                }
                // The queue has failed since they were checked.
                None => {}
                Some(_) => used.extend(tables.remove(ticket).map(|entry| (piece, entry.state))),
            }
        }
        used
    }
}

impl Drop for TokenLedger {
    fn drop(&mut self) {
        let mut tables = self.table.lock();
        let own = tables.sessions.remove(&self.session).unwrap_or_default();
        let tickets = own.unused.iter().chain(&own.unwanted);
        let gone: Vec<_> = tickets.map(|ticket| tables.entries.remove(ticket)).collect();
        drop(tables);
        drop(gone);
    }
}

//! All live tickets of a server. Whoever brings bytes has their ticket taken from here before anything else happens.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::{MAX_TICKETS, TokenError};
use super::payload::{Data, Stash, possible};
use crate::device::{Account, DeviceError};
use crate::rpc::wire::ext::Ticket;

/// Where the bytes of tickets go once a RECEIVE has named them.
pub(super) trait Destination: Send + Sync {
    /// Takes the bytes of piece `at` of the RECEIVE with this number. Never waits for a device.
    fn put(&self, number: u64, at: usize, data: Data<'_>) -> Result<(), TokenError>;

    /// Ends it: no further bytes are of use.
    fn fail(&self, failure: DeviceError);
}

/// What is known of a live ticket.
pub(super) enum State {
    /// Nobody has said where its bytes go.
    Issued,
    /// Nor this, and the bytes have come.
    Stashed(Stash),
    /// Nor this, and whoever came with it brought nothing that can be used.
    Spoiled(DeviceError),
    /// The bytes go to this piece of this RECEIVE.
    Armed(Arc<dyn Destination>, u64, usize),
    /// The bytes have not come, and the queue that they were for has ended.
    Unwanted,
}

pub(super) struct Entry {
    pub(super) session: u64,
    pub(super) account: Arc<Account>,
    pub(super) state: State,
}

/// All live tickets of a server.
#[derive(Default)]
pub(in crate::rpc::server) struct TokenTable(Mutex<Tables>);

#[derive(Default)]
pub(super) struct Tables {
    pub(super) entries: HashMap<Ticket, Entry>,
    /// The tickets of each session.
    pub(super) sessions: HashMap<u64, Own>,
    pub(super) next_session: u64,
}

/// The tickets of a session.
#[derive(Default)]
pub(super) struct Own {
    pub(super) unused: HashSet<Ticket>,
    /// Those that are [`State::Unwanted`], the oldest first, and no more than may be unused.
    pub(super) unwanted: VecDeque<Ticket>,
}

impl Tables {
    pub(super) fn remove(&mut self, ticket: &Ticket) -> Option<Entry> {
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

impl TokenTable {
    pub(super) fn lock(&self) -> MutexGuard<'_, Tables> {
        // A panic elsewhere can at most have left a ticket in one of the two maps, where it is of no use to anyone.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a ticket and the bytes that someone put for it. Never waits for a device. A ticket that was good is used
    /// afterwards, whatever this returns, and where this fails the queue that waits for its bytes, now or later, fails too. A
    /// failure that is the queue's own is not returned: whoever put the bytes did what was asked.
    ///
    /// # Errors
    /// [`TokenError::Unknown`], [`TokenError::Length`]: nothing was written then.
    pub(in crate::rpc::server) fn put(&self, ticket: &Ticket, data: &[u8]) -> Result<(), TokenError> {
        match self.take(ticket, data) {
            Err(TokenError::Memory(_)) => Ok(()),
            taken => taken,
        }
    }

    fn take(&self, ticket: &Ticket, data: &[u8]) -> Result<(), TokenError> {
        let early = match self.lock().entries.get(ticket) {
            Some(Entry { state: State::Armed(..) | State::Unwanted, .. }) => None,
            Some(Entry { state: State::Issued, account, .. }) => Some(Arc::clone(account)),
            _ => return Err(TokenError::Unknown),
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
        let Some(entry) = tables.entries.get_mut(ticket) else { return Err(TokenError::Unknown) };
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
                    _ => Err(TokenError::Unknown),
                }
            }
            (State::Unwanted, data) => {
                tables.remove(ticket);
                drop(tables);
                possible(data.bytes())
            }
            _ => Err(TokenError::Unknown),
        }
    }

    /// Uses up a ticket that no RECEIVE had named when its bytes came.
    pub(super) fn spoil(&self, ticket: &Ticket, e: TokenError) -> TokenError {
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
    pub(super) fn abandon(&self, tickets: &[Ticket]) {
        let mut tables = self.lock();
        let gone: Vec<_> = tickets.iter().map(|ticket| tables.abandon(ticket)).collect();
        drop(tables);
        // Possibly the last handle of what lies on a device.
        drop(gone);
    }

    /// Tickets that are good for nothing any more.
    pub(super) fn forget(&self, tickets: &[Ticket]) {
        let mut tables = self.lock();
        let gone: Vec<_> = tickets.iter().map(|ticket| tables.remove(ticket)).collect();
        drop(tables);
        // As above.
        drop(gone);
    }
}

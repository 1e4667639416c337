//! Who is connected: sessions, which have a place each, and those that are turned away with a word.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use log::debug;

use super::client_connection::Writer;
use crate::rpc::transport::Aborter;
use crate::rpc::wire::ext::{Notice, State};

/// Connections that are told at a time why they are not taken; further ones are closed without a word.
const TURNED_AWAY: usize = 64;

/// The connections of a server.
pub(super) struct Guests {
    max: usize,
    live: Mutex<Live>,
    /// A session has ended.
    ended: Condvar,
}

#[derive(Default)]
struct Live {
    /// Of the sessions, to end their connections.
    sessions: HashMap<u64, Aborter>,
    next: u64,
    turned_away: usize,
    draining: bool,
    /// Of the sessions whose clients have greeted: they are told.
    greeted: Vec<Weak<Writer>>,
}

impl Guests {
    /// A server that has at most so many sessions.
    pub(super) fn new(max: usize) -> Arc<Guests> {
        Arc::new(Guests { max, live: Mutex::default(), ended: Condvar::new() })
    }

    /// A place for a session; else why there is none.
    pub(super) fn enter(self: &Arc<Guests>, aborter: Aborter) -> Result<Guest, State> {
        let mut live = self.live();
        if live.draining {
            return Err(State::Draining);
        }
        if live.sessions.len() >= self.max {
            return Err(State::Full);
        }
        let key = live.next;
        live.next += 1;
        live.sessions.insert(key, aborter);
        Ok(Guest { guests: Arc::clone(self), key })
    }

    /// A place at the door, for one that is turned away; `None` when there are many.
    pub(super) fn turn_away(self: &Arc<Guests>) -> Option<AtDoor> {
        let mut live = self.live();
        (live.turned_away < TURNED_AWAY).then(|| {
            live.turned_away += 1;
            AtDoor(Arc::clone(self))
        })
    }

    /// What the server is for those that have a place: one that is full took them.
    pub(super) fn state(&self) -> State {
        self.live().state()
    }

    /// From now on a client that has greeted is told when that changes. Returns what it is now.
    pub(super) fn tell(&self, out: &Arc<Writer>) -> State {
        let mut live = self.live();
        live.greeted.retain(|out| out.strong_count() > 0);
        live.greeted.push(Arc::downgrade(out));
        live.state()
    }

    /// How many sessions there are.
    pub(super) fn sessions(&self) -> usize {
        self.live().sessions.len()
    }

    /// Gives no more places, and tells those that have one. Waits for no client.
    pub(super) fn drain(&self) {
        let mut live = self.live();
        live.draining = true;
        let greeted = std::mem::take(&mut live.greeted);
        drop(live);
        for out in greeted.iter().filter_map(Weak::upgrade) {
            // A client that takes nothing keeps no other from hearing it. One that no thread can be had for hears it from
            // PING.
            let tell = move || {
                if let Err(broken) = out.notice(&Notice::State(State::Draining)) {
                    out.give_up("STATE", broken);
                }
            };
            if let Err(e) = std::thread::Builder::new().name("draining".to_owned()).spawn(tell) {
                debug!("a client is not told that the server drains: {e}");
            }
        }
    }

    /// Waits until then for all sessions to end. Returns how many are left.
    pub(super) fn wait(&self, until: Instant) -> usize {
        let mut live = self.live();
        while !live.sessions.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            live = self.ended.wait_timeout(live, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        live.sessions.len()
    }

    /// Closes all connections.
    pub(super) fn close(&self) {
        self.live().sessions.values().for_each(Aborter::abort);
    }

    fn live(&self) -> MutexGuard<'_, Live> {
        // Each change of the map is one call: a panic elsewhere cannot have left it torn.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Live {
    fn state(&self) -> State {
        if self.draining { State::Draining } else { State::Ready }
    }
}

/// A session's place, given back when dropped.
pub(super) struct Guest {
    guests: Arc<Guests>,
    key: u64,
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.guests.live().sessions.remove(&self.key);
        self.guests.ended.notify_all();
    }
}

/// A place at the door, given back when dropped.
pub(super) struct AtDoor(Arc<Guests>);

impl Drop for AtDoor {
    fn drop(&mut self) {
        self.0.live().turned_away -= 1;
    }
}

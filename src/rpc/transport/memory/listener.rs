//! Listeners of the in-memory transport, and faults of their connections.

use crate::poison::{Unpoisoned, lock};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, Weak};
use std::thread::ThreadId;

use super::super::{Address, Connection, Deadline, DialError, Listen, TransportError};
use super::{Injection, LinkConditions, Pipe, break_pipe, ends, pipes};

/// Source of listener numbers. The address `memory:NUMBER` has the number in place of a port, for which `--peer` accepts 1 to
/// 65535.
static NEXT_LISTENER: AtomicU64 = AtomicU64::new(1);

/// Source of the generations of listeners.
static NEXT_GENERATION: AtomicU64 = AtomicU64::new(0);

/// Selects connections of a listener by the thread that dialled them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialler {
    /// The calling thread.
    ThisThread,
    /// Any other thread, such as one of another server.
    OtherThreads,
}

/// Message to a listener: a connection, or `None` to wake it.
type Incoming = Option<Connection>;

/// A listener, as clients see it.
struct ListenerEntry {
    /// Tells a listener from earlier ones at its number.
    generation: u64,
    to: mpsc::Sender<Incoming>,
    conditions: LinkConditions,
    /// The address of its clients.
    client: Option<SocketAddr>,
    /// The latest connections of its clients, with the threads that dialled them.
    links: Vec<(ThreadId, Link)>,
    /// Faults of connections to come: the thread that calls [`inject_next`], and the connections that it selects.
    injections: Vec<(ThreadId, Dialler, Injection)>,
}

/// Most open connections of a listener that [`latest_link`] finds.
const MAX_LINKS: usize = 64;

/// The listeners of this process by their numbers.
static LISTENERS: Mutex<Option<HashMap<u64, ListenerEntry>>> = Mutex::new(None);

/// A listener that clients in this process reach as `memory:NUMBER`.
#[derive(Debug)]
pub(crate) struct MemoryListener {
    number: u64,
    generation: u64,
    to: mpsc::Sender<Incoming>,
    incoming: mpsc::Receiver<Incoming>,
}

/// Listens within this process. The seed of the first connection is that of `conditions`; each further connection has the next
/// seed.
pub(crate) fn listen(conditions: LinkConditions) -> MemoryListener {
    listen_for(conditions, None)
}

/// As [`listen`]. The listener sees `client` as the address of its clients, if there is one.
pub(crate) fn listen_for(conditions: LinkConditions, client: Option<SocketAddr>) -> MemoryListener {
    listen_at(reserve_number(), conditions, client)
}

/// A number for [`listen_at`]: an address that is known before a server listens there.
pub(crate) fn reserve_number() -> u64 {
    NEXT_LISTENER.fetch_add(1, Ordering::Relaxed)
}

/// As [`listen_for`], at a reserved number, in place of an earlier listener.
pub(crate) fn listen_at(number: u64, conditions: LinkConditions, client: Option<SocketAddr>) -> MemoryListener {
    let (to, incoming) = mpsc::channel();
    let generation = NEXT_GENERATION.fetch_add(1, Ordering::Relaxed);
    let (links, injections) = (Vec::new(), Vec::new());
    let entry = ListenerEntry { generation, to: to.clone(), conditions, client, links, injections };
    LISTENERS.lock().unpoisoned().get_or_insert_default().insert(number, entry);
    MemoryListener { number, generation, to, incoming }
}

/// Connects to a listener by its number.
pub(in super::super) fn connect(number: u64) -> Result<Connection, DialError> {
    let mut listeners = LISTENERS.lock().unpoisoned();
    let entry = listeners.as_mut().and_then(|all| all.get_mut(&number)).ok_or(DialError::NoAddress)?;
    let pipes = pipes(entry.conditions);
    let (ours, theirs) = ends(&pipes, entry.client);
    entry.conditions.seed += 1;
    let dialler = std::thread::current().id();
    for (_, _, injection) in entry.injections.extract_if(.., |(caller, by, _)| by.selects(*caller, dialler)) {
        break_pipe(&pipes, injection);
    }
    entry.links.retain(|(_, link)| link.0.iter().all(|pipe| pipe.strong_count() > 0));
    entry.links.push((dialler, Link(pipes.each_ref().map(Arc::downgrade))));
    let surplus = entry.links.len().saturating_sub(MAX_LINKS);
    entry.links.drain(..surplus);
    entry.to.send(Some(theirs)).map_err(|_| DialError::OwnSocket)?;
    Ok(ours)
}

impl Dialler {
    fn selects(self, caller: ThreadId, dialler: ThreadId) -> bool {
        (caller == dialler) == (self == Dialler::ThisThread)
    }
}

/// Handle on a connection, for faults while it is in use. Does not keep the connection open.
#[derive(Clone, Debug)]
pub(crate) struct Link([Weak<Pipe>; 2]);

impl Link {
    /// Injects a fault. Does nothing to a connection that has ended.
    pub(crate) fn inject(&self, injection: Injection) {
        if let [Some(to_client), Some(to_server)] = self.0.each_ref().map(Weak::upgrade) {
            break_pipe(&[to_client, to_server], injection);
        }
    }

    fn is_open(&self) -> bool {
        self.0.iter().all(|pipe| pipe.upgrade().is_some_and(|pipe| !lock(&pipe.state).aborted))
    }
}

/// The latest open connection to a listener that a thread has dialled which `dialler` selects.
pub(crate) fn latest_link(number: u64, dialler: Dialler) -> Option<Link> {
    let caller = std::thread::current().id();
    let listeners = LISTENERS.lock().unpoisoned();
    let mut links = listeners.as_ref()?.get(&number)?.links.iter().rev();
    links.find(|(by, link)| dialler.selects(caller, *by) && link.is_open()).map(|(_, link)| link.clone())
}

/// Injects a fault into the next connection to a listener that a thread dials which `dialler` selects.
pub(crate) fn inject_next(number: u64, dialler: Dialler, injection: Injection) {
    let caller = std::thread::current().id();
    if let Some(entry) = LISTENERS.lock().unpoisoned().as_mut().and_then(|all| all.get_mut(&number)) {
        entry.injections.push((caller, dialler, injection));
    }
}

impl Listen for MemoryListener {
    fn accept(&self, deadline: &Deadline) -> Result<Option<Connection>, TransportError> {
        match self.incoming.recv_timeout(deadline.remaining().unwrap_or_default()) {
            Ok(incoming) => Ok(incoming),
            // Disconnected cannot happen: the listener itself holds a sender.
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(None),
        }
    }

    fn local_addr(&self) -> Address {
        Address::Memory(self.number)
    }

    fn waker(&self) -> Box<dyn Fn() + Send + Sync> {
        let to = self.to.clone();
        // Fails if the listener was dropped.
        Box::new(move || _ = to.send(None))
    }
}

impl Drop for MemoryListener {
    fn drop(&mut self) {
        let mut listeners = LISTENERS.lock().unpoisoned();
        let Some(listeners) = listeners.as_mut() else { return };
        // A later listener may have the number by now.
        if listeners.get(&self.number).is_some_and(|entry| entry.generation == self.generation) {
            listeners.remove(&self.number);
        }
    }
}

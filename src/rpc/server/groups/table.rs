//! The groups of a server, by their secrets.

use crate::poison::Unpoisoned;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::incoming::IncomingLink;
use super::links::GroupLinks;
use crate::device::{GroupHandle, GroupMember};
use crate::rpc::server::hangup_watch::SessionWatch;
use crate::rpc::wire::ext::{AttachGroup, GroupSecret};

/// Longest time after which an ATTACH_GROUP that waits checks whether its sender has gone.
const ATTACH_SLICE: Duration = Duration::from_millis(250);

/// Identifies an instance: the secret of the group, and the first rank of the session that has joined it. Two sessions of one
/// client may have joined the same group.
pub(super) type InstanceKey = (GroupSecret, usize);

/// All groups of a server. One table for all sessions: a group that one session has joined is attached on the connection of
/// another. A group that has failed stays until its session removes it.
#[derive(Default)]
pub(in crate::rpc::server) struct GroupTable {
    state: Mutex<TableState>,
    /// Wakes the threads that wait for a group to be joined.
    changed: Condvar,
}

#[derive(Default)]
struct TableState {
    groups: HashMap<InstanceKey, Arc<GroupInstance>>,
    /// How many threads wait for a group.
    waiting: HashMap<InstanceKey, usize>,
}

/// The instance of a group on this server.
pub(super) struct GroupInstance {
    pub(super) key: InstanceKey,
    /// By rank: the address of its server; empty for ranks of this server.
    pub(super) addresses: Vec<String>,
    /// By rank: the member, until a queue joins as the rank, or the rank's server attaches.
    pub(super) members: Mutex<Vec<Option<GroupMember>>>,
    pub(super) group: GroupHandle,
    pub(super) links: Arc<GroupLinks>,
    pub(super) created: Instant,
}

impl GroupInstance {
    pub(super) fn lock_members(&self) -> MutexGuard<'_, Vec<Option<GroupMember>>> {
        // Each change is a single assignment.
        self.members.lock().unpoisoned()
    }

    fn is_local(&self, rank: usize) -> bool {
        self.addresses.get(rank).is_some_and(String::is_empty)
    }

    /// A rank of this server that no queue has joined as.
    pub(super) fn missing_rank(&self) -> Option<usize> {
        let members = self.lock_members();
        members.iter().enumerate().position(|(rank, member)| member.is_some() && self.is_local(rank))
    }
}

impl GroupTable {
    /// Number of groups of which this server has ranks.
    pub(in crate::rpc::server) fn len(&self) -> usize {
        self.lock().groups.len()
    }

    fn lock(&self) -> MutexGuard<'_, TableState> {
        // Each change is a single call.
        self.state.lock().unpoisoned()
    }

    /// Serves the ATTACH_GROUP of another server, which `sender` watches: waits until the queues of this server have joined the
    /// group, for up to `timeout`, or until the sender has gone.
    ///
    /// # Errors
    /// The reason, as a text for the other server's client.
    pub(in crate::rpc::server) fn attach(
        &self,
        request: &AttachGroup,
        timeout: Duration,
        sender: &Arc<SessionWatch>,
    ) -> Result<IncomingLink, String> {
        let key = (request.secret, request.to as usize);
        let until = Instant::now() + timeout;
        let mut state = self.lock();
        *state.waiting.entry(key).or_default() += 1;
        let instance = loop {
            if let Some(group) = state.groups.get(&key).filter(|group| group.missing_rank().is_none()) {
                break Some(Arc::clone(group));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || sender.has_hung_up() {
                break None;
            }
            state = self.changed.wait_timeout(state, left.min(ATTACH_SLICE)).unpoisoned().0;
        };
        if let Some(count) = state.waiting.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                state.waiting.remove(&key);
            }
        }
        drop(state);
        let group = instance.ok_or("its client has not joined the group there")?;
        let link = IncomingLink::new(&group, request.ranks)?;
        group.links.add_incoming(link.address(), sender);
        match group.group.failure() {
            Some(failure) => Err(format!("the group has failed there: {failure}")),
            None => Ok(link),
        }
    }

    /// Adds a group, unless there is one with its key.
    pub(super) fn insert(&self, group: &Arc<GroupInstance>) -> bool {
        let mut state = self.lock();
        let is_new = !state.groups.contains_key(&group.key);
        if is_new {
            state.groups.insert(group.key, Arc::clone(group));
        }
        is_new
    }

    /// Wakes the threads that wait for a group, all of whose queues have joined now.
    pub(super) fn notify_joined(&self, key: &InstanceKey) {
        // With the lock, so that no thread has looked for the group but waits for the notification only now.
        if self.lock().waiting.contains_key(key) {
            self.changed.notify_all();
        }
    }

    pub(super) fn remove(&self, key: &InstanceKey) {
        let removed = self.lock().groups.remove(key);
        // Outside of the lock: members that no queue has taken leave their group.
        drop(removed);
    }
}

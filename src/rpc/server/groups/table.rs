//! The groups of a server, by their secrets.

use crate::sync::{self, Arc, Condvar, Instant, Mutex, MutexGuard, Unpoisoned};
use std::collections::HashMap;
use std::time::Duration;

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
    groups: Mutex<HashMap<InstanceKey, Arc<GroupInstance>>>,
    /// Wakes the threads that wait for a group to be joined.
    changed: Condvar,
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
    /// Number of groups with ranks on this server.
    pub(in crate::rpc::server) fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<InstanceKey, Arc<GroupInstance>>> {
        // Each change is a single call.
        self.groups.lock().unpoisoned()
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
        let until = sync::now() + timeout;
        let mut groups = self.lock();
        let group = loop {
            if let Some(group) = groups.get(&key).filter(|group| group.missing_rank().is_none()) {
                break Arc::clone(group);
            }
            let left = until.saturating_duration_since(sync::now());
            if left.is_zero() || sender.has_hung_up() {
                return Err("its client has not joined the group there".to_owned());
            }
            groups = self.changed.wait_timeout(groups, left.min(ATTACH_SLICE)).unpoisoned().0;
        };
        drop(groups);
        let link = IncomingLink::new(&group, request.from as usize, sender)?;
        match group.group.failure() {
            Some(failure) => Err(format!("the group has failed there: {failure}")),
            None => Ok(link),
        }
    }

    /// Adds a group, unless there is one with its key.
    pub(super) fn insert(&self, group: &Arc<GroupInstance>) -> bool {
        let mut groups = self.lock();
        let is_new = !groups.contains_key(&group.key);
        if is_new {
            groups.insert(group.key, Arc::clone(group));
        }
        is_new
    }

    /// Wakes the threads that wait for a group: all queues of one have joined now.
    pub(super) fn notify_joined(&self) {
        // With the lock, so that no thread has looked for the group but waits for the notification only now.
        let _groups = self.lock();
        self.changed.notify_all();
    }

    pub(super) fn remove(&self, key: &InstanceKey) {
        let removed = self.lock().remove(key);
        // Outside of the lock: members that no queue has taken leave their group.
        drop(removed);
    }
}

//! The groups that the queues of one session have joined.

use crate::sync::{self, Arc, Mutex, Weak, lock};
use std::time::Duration;

use super::links::{GroupLinks, LinkPlan};
use super::table::{GroupInstance, GroupTable};
use super::{CLOSE_TIMEOUT, MAX_GROUPS, MAX_RANKS};
use crate::device::{CollectiveGroup, DeviceError, GroupHandle, GroupMember, MemoryBudget, TimelinePoint};
use crate::rpc::server::host_memory::SessionMemory;
use crate::rpc::server::peers::{MAX_ADDRESS_BYTES, PeerPool};
use crate::rpc::wire::ext::GroupSecret;

/// Host memory that a group is charged, and that each of its ranks is charged in addition, with three copies of its address.
const GROUP_BYTES: u64 = 4 << 10;
const RANK_BYTES: u64 = 2 << 10;

/// The groups that the queues of one session have joined. Dropping it ends them.
pub(in crate::rpc::server) struct SessionGroups {
    table: Arc<GroupTable>,
    budget: Arc<MemoryBudget>,
    memory: Arc<SessionMemory>,
    timeouts: GroupTimeouts,
    state: Mutex<GroupsState>,
}

#[derive(Default)]
struct GroupsState {
    groups: Vec<Arc<GroupInstance>>,
    /// Groups whose memory is not freed, with their numbers of ranks.
    live: Vec<(Weak<GroupLinks>, usize)>,
}

/// Timeouts of groups.
#[derive(Clone, Copy)]
pub(in crate::rpc::server) struct GroupTimeouts {
    /// From the first JOIN_GROUP of this server to the last one.
    pub(in crate::rpc::server) join: Duration,
    /// Longest wait of another rank for a part.
    pub(in crate::rpc::server) part: Duration,
}

/// A queue's request to become a rank.
pub(in crate::rpc::server) struct JoinRequest<'a> {
    pub(in crate::rpc::server) secret: GroupSecret,
    pub(in crate::rpc::server) rank: u32,
    /// Length of the largest part in bytes.
    pub(in crate::rpc::server) part_bytes: u64,
    /// By rank: the address of its server; empty for ranks of this server.
    pub(in crate::rpc::server) addresses: Vec<&'a str>,
}

/// The membership of a queue that becomes a rank.
pub(in crate::rpc::server) struct Joined {
    pub(in crate::rpc::server) member: GroupMember,
    /// The point at which all servers of the group are connected.
    pub(in crate::rpc::server) connected: TimelinePoint,
    pub(in crate::rpc::server) group: GroupHandle,
}

impl SessionGroups {
    /// The groups of a session. Exchange memory is reserved in `budget`, and groups are charged to `memory`.
    pub(in crate::rpc::server) fn new(
        table: &Arc<GroupTable>,
        budget: &Arc<MemoryBudget>,
        memory: &Arc<SessionMemory>,
        timeouts: GroupTimeouts,
    ) -> Arc<SessionGroups> {
        let (table, budget, memory) = (Arc::clone(table), Arc::clone(budget), Arc::clone(memory));
        Arc::new(SessionGroups { table, budget, memory, timeouts, state: Mutex::default() })
    }

    /// Makes a queue a rank. The first request with a secret creates the group; that of the last rank of this server starts its
    /// connections.
    ///
    /// # Errors
    /// The failure of the queue.
    pub(in crate::rpc::server) fn join(
        &self,
        request: &JoinRequest<'_>,
        pool: &PeerPool,
    ) -> Result<Joined, DeviceError> {
        let rank = request.rank as usize;
        if request.addresses.get(rank).is_none_or(|address| !address.is_empty()) {
            return Err(DeviceError::Misuse("a queue joins a group as a rank of another server"));
        }
        let mut state = lock(&self.state);
        let group = match state.groups.iter().find(|group| group.key.0 == request.secret) {
            Some(group) => Arc::clone(group),
            None => self.create(&mut state, request)?,
        };
        drop(state);
        if group.addresses != request.addresses {
            return Err(DeviceError::Misuse("the JOIN_GROUP requests of a group have different lists of addresses"));
        }
        if let Some(failure) = group.group.failure() {
            return Err(failure);
        }
        let member = group.lock_members().get_mut(rank).and_then(Option::take);
        let member = member.ok_or(DeviceError::Misuse("another queue has joined the group as this rank"))?;
        if group.missing_rank().is_none() {
            let plan = LinkPlan { secret: request.secret, addresses: &group.addresses, budget: &self.budget };
            group.links.start(&group.group, &plan, pool);
            self.table.notify_joined();
        }
        Ok(Joined { member, connected: group.links.ready_point(), group: group.group.clone() })
    }

    fn create(&self, state: &mut GroupsState, request: &JoinRequest<'_>) -> Result<Arc<GroupInstance>, DeviceError> {
        let ranks = request.addresses.len();
        let exceeded = |live: &mut Vec<(Weak<GroupLinks>, usize)>| {
            live.retain(|(group, _)| group.strong_count() > 0);
            if live.len() >= MAX_GROUPS {
                return Some("a session has at most 16 groups");
            }
            let all = live.iter().map(|(_, ranks)| ranks).sum::<usize>() + ranks;
            (all > MAX_RANKS).then_some("the groups of a session have at most 128 ranks")
        };
        if exceeded(&mut state.live).is_some() {
            // Groups that have failed make room earlier than `check` would end them.
            for group in state.groups.extract_if(.., |group| group.links.failed_at().is_some()) {
                self.end(&group);
            }
            if let Some(limit) = exceeded(&mut state.live) {
                return Err(DeviceError::Misuse(limit));
            }
        }
        if request.addresses.iter().any(|address| address.len() > MAX_ADDRESS_BYTES) {
            return Err(DeviceError::Misuse("an address of a server is too long"));
        }
        let links = GroupLinks::new(ranks, self.memory.reserve(GROUP_BYTES + RANK_BYTES * ranks as u64)?);
        let remote: Vec<_> =
            request.addresses.iter().map(|address| (!address.is_empty()).then_some(*address)).collect();
        let to_others = Arc::clone(&links) as Arc<_>;
        let (members, group) =
            CollectiveGroup::with_remote_ranks(&remote, request.part_bytes, &self.budget, to_others)?;
        let first = remote.iter().position(Option::is_none).unwrap_or(0);
        let group = Arc::new(GroupInstance {
            key: (request.secret, first),
            addresses: request.addresses.iter().map(|&address| address.to_owned()).collect(),
            members: Mutex::new(members.into_iter().map(Some).collect()),
            group,
            links,
            created: sync::now(),
        });
        if !self.table.insert(&group) {
            return Err(DeviceError::Misuse("a group with this secret exists already"));
        }
        state.live.push((Arc::downgrade(&group.links), ranks));
        state.groups.push(Arc::clone(&group));
        Ok(group)
    }

    /// Fails the groups with a late JOIN_GROUP or part, and ends the groups that failed more than [`CLOSE_TIMEOUT`] ago. The
    /// notifier calls it once a second. Returns whether a group failed.
    pub(in crate::rpc::server) fn check(&self) -> bool {
        let (groups, mut has_failed) = (lock(&self.state).groups.clone(), false);
        for group in &groups {
            let failed_before = group.links.failed_at().is_some();
            let age = sync::now().saturating_duration_since(group.created);
            if let Some(rank) = group.missing_rank().filter(|_| age > self.timeouts.join) {
                group.group.fail_rank(rank, &DeviceError::Deadline("a queue's JOIN_GROUP"));
            }
            group.group.fail_if_overdue(self.timeouts.part);
            has_failed |= !failed_before && group.links.failed_at().is_some();
            // Until then, the other servers can learn the reason.
            if group.links.failed_at().is_some_and(|at| sync::now().saturating_duration_since(at) > CLOSE_TIMEOUT) {
                lock(&self.state).groups.retain(|other| !Arc::ptr_eq(other, group));
                self.end(group);
            }
        }
        has_failed
    }

    /// Ends all groups, because the session ends.
    pub(in crate::rpc::server) fn end_all(&self) {
        let groups = std::mem::take(&mut lock(&self.state).groups);
        groups.iter().for_each(|group| self.end(group));
    }

    fn end(&self, group: &GroupInstance) {
        self.table.remove(&group.key);
        // First, so that a server that attaches meanwhile is refused, or ended below.
        group.group.fail(DeviceError::Ended);
        group.links.end_incoming(None);
    }
}

impl Drop for SessionGroups {
    fn drop(&mut self) {
        self.end_all();
    }
}

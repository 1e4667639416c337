//! A connection of another server that is bound to a group: the parts of its ranks arrive on it.

use crate::sync::Arc;
use std::ops::{Range, RangeInclusive};

use super::NO_RANK;
use super::attach::displayable_reason;
use super::links::GroupLinks;
use super::table::GroupInstance;
use crate::device::{CollectivePart, DeviceError, GroupHandle, GroupMember};
use crate::rpc::server::hangup_watch::SessionWatch;

/// A connection of another server that is bound to a group. Dropping it fails the group, because the connection has ended.
pub(in crate::rpc::server) struct IncomingLink {
    group: GroupHandle,
    /// Ranks of the group.
    ranks: usize,
    /// From the first rank of this session to the last one.
    own: RangeInclusive<usize>,
    /// The other server's address, as this server's client named it.
    address: String,
    /// The ranks of the other server.
    members: Vec<GroupMember>,
    links: Arc<GroupLinks>,
    session: Arc<SessionWatch>,
}

impl IncomingLink {
    /// Binds the connection that `session` watches to a group, for all ranks of the server that has the rank `from`.
    ///
    /// # Errors
    /// The reason, as a text for the other server's client.
    pub(super) fn new(group: &GroupInstance, from: usize, session: &Arc<SessionWatch>) -> Result<IncomingLink, String> {
        let address = group.addresses.get(from).filter(|address| !address.is_empty());
        let address = address.ok_or("the sender has no rank in the group")?;
        let mut members = group.lock_members();
        let ranks = members.iter_mut().zip(&group.addresses).filter(|(_, of_rank)| *of_rank == address);
        let members: Vec<_> = ranks.filter_map(|(member, _)| member.take()).collect();
        if members.is_empty() {
            return Err("another connection has attached the ranks".to_owned());
        }
        let last = group.addresses.iter().rposition(String::is_empty).unwrap_or(group.key.1);
        group.links.add_incoming(address, session);
        Ok(IncomingLink {
            links: Arc::clone(&group.links),
            session: Arc::clone(session),
            group: group.group.clone(),
            ranks: group.addresses.len(),
            own: group.key.1..=last,
            address: address.clone(),
            members,
        })
    }

    /// The bytes of a part that are sent to this session.
    pub(in crate::rpc::server) fn bytes_of(&self, part: &CollectivePart) -> Range<usize> {
        part.bytes_for(&self.own, self.ranks)
    }

    /// The member of a rank of the other server.
    pub(in crate::rpc::server) fn member(&self, rank: u32) -> Option<&GroupMember> {
        self.members.iter().find(|member| member.rank() == rank as usize)
    }

    /// Fails the group, as the other server reports: because of any rank, or of [`NO_RANK`] in particular. An empty reason means
    /// that the rank has left. Returns whether the group has the rank.
    pub(in crate::rpc::server) fn fail(&self, rank: u32, reason: &str) -> bool {
        let reported = || DeviceError::Remote { device: self.address.clone(), reason: displayable_reason(reason) };
        match rank {
            NO_RANK => self.group.fail(DeviceError::Remote {
                device: self.address.clone(),
                reason: format!("{} reports: {}", self.address, displayable_reason(reason)),
            }),
            rank if rank as usize >= self.ranks => return false,
            rank if reason.is_empty() => self.group.fail_rank(rank as usize, &DeviceError::Ended),
            rank => self.group.fail_rank(rank as usize, &reported()),
        }
        true
    }
}

impl Drop for IncomingLink {
    fn drop(&mut self) {
        // The group's failure would end the connection before the session has sent its reason.
        self.links.remove_incoming(&self.session);
        let reason = "its connection to this server has ended; the logs of both servers have the reason".to_owned();
        let error = DeviceError::ConnectionLost { endpoint: self.address.clone(), reason };
        self.members.iter().for_each(|member| member.fail(&error));
    }
}

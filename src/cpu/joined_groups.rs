//! The groups that a queue has joined, for the collective nodes of its programs.

use crate::device::{DeviceError, GroupMember};

/// The members by which a queue is a rank of groups, by the groups' numbers in this queue.
#[derive(Default)]
pub(super) struct JoinedGroups(Vec<(u32, GroupMember)>);

impl JoinedGroups {
    /// Joins a group. A member that had the number leaves its group.
    pub(super) fn join(&mut self, group: u32, member: GroupMember) {
        match self.0.iter_mut().find(|(number, _)| *number == group) {
            Some((_, old)) => *old = member,
            None => self.0.push((group, member)),
        }
    }

    /// The member with a number.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] if the queue has not joined it. Queues check that before they accept a program.
    pub(super) fn member(&self, group: u32) -> Result<&GroupMember, DeviceError> {
        let member = self.0.iter().find(|(number, _)| *number == group);
        member.map(|(_, member)| member).ok_or(NOT_JOINED)
    }

    /// Fails all groups, because the queue has failed.
    pub(super) fn fail(&self, error: &DeviceError) {
        self.0.iter().for_each(|(_, member)| member.fail(error));
    }
}

/// The error for a program with a collective of a group that the queue has not joined.
pub(super) const NOT_JOINED: DeviceError =
    DeviceError::Misuse("the program has a collective of a group that the queue has not joined");

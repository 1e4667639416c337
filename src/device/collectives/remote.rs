//! Groups with ranks in other processes: the parts of these ranks arrive as messages, and are published on their behalf.

use super::{CollectiveGroup, CollectivePart, GroupMember, RemoteRanks};
use crate::device::{DeviceError, MemoryBudget};
use crate::sync::atomic::Ordering;
use crate::sync::{self, Arc, Weak, lock};
use std::ops::Range;
use std::time::Duration;

/// A group that is not kept alive.
#[derive(Clone)]
pub(crate) struct GroupHandle(Weak<CollectiveGroup>);

/// Why a part of another process was not published.
pub(crate) enum ReceiveError<E> {
    /// The group has failed, perhaps because of this part. Parts that follow are of no use, and are no fault of their sender.
    Group,
    /// The bytes could not be read.
    Source(E),
}

impl CollectiveGroup {
    /// As [`CollectiveGroup::members`], for a group with ranks in other processes. `addresses` has the server of
    /// each such rank, by rank; `None` for ranks of this process. Parts of this process are sent by `remote_ranks`.
    ///
    /// # Errors
    /// As [`CollectiveGroup::members`].
    pub(crate) fn with_remote_ranks(
        addresses: &[Option<&str>],
        part_bytes: u64,
        budget: &Arc<MemoryBudget>,
        remote_ranks: Arc<dyn RemoteRanks>,
    ) -> Result<(Vec<GroupMember>, GroupHandle), DeviceError> {
        let members = CollectiveGroup::create(addresses.len(), part_bytes, budget, Some(remote_ranks))?;
        let group = members.first().map_or(Weak::new(), |member| Arc::downgrade(&member.group));
        if let Some(group) = group.upgrade() {
            for (rank, address) in lock(&group.state).ranks.iter_mut().zip(addresses) {
                if let Some(address) = address {
                    (rank.is_remote, rank.device) = (true, (*address).to_owned());
                }
            }
        }
        Ok((members, GroupHandle(group)))
    }
}

impl GroupHandle {
    /// Fails the group because of a rank.
    pub(crate) fn fail_rank(&self, rank: usize, error: &DeviceError) {
        if let Some(group) = self.0.upgrade() {
            group.fail_rank(rank, error);
        }
    }

    /// Fails the group because of no rank in particular.
    pub(crate) fn fail(&self, error: DeviceError) {
        let Some(group) = self.0.upgrade() else { return };
        let state = lock(&group.state);
        if state.failure.is_none() {
            group.record_failure(state, error);
        }
    }

    /// Fails the group if a rank has waited for the parts of the others for longer than `timeout`; the error names one of them.
    pub(crate) fn fail_if_overdue(&self, timeout: Duration) {
        let Some(group) = self.0.upgrade() else { return };
        let state = lock(&group.state);
        let round = group.complete.load(Ordering::Relaxed);
        let [even, odd] = &state.rounds;
        let since = if round.is_multiple_of(2) { even.since } else { odd.since };
        if since.is_none_or(|since| sync::now().saturating_duration_since(since) <= timeout) {
            return;
        }
        let missing = state.ranks.iter().position(|rank| rank.published <= round);
        drop(state);
        group.fail_rank(missing.unwrap_or(0), &DeviceError::Deadline("a part of a collective"));
    }

    /// The failure of the group. A group without members has failed.
    pub(crate) fn failure(&self) -> Option<DeviceError> {
        match self.0.upgrade() {
            Some(group) if !group.failed.load(Ordering::Acquire) => None,
            Some(group) => Some(group.failure()),
            None => Some(DeviceError::Ended),
        }
    }
}

impl GroupMember {
    /// Publishes a part of round `round` that has arrived from the process of this rank; `fill` reads the `range` of its bytes that
    /// the ranks of this process need. A part that violates the order of rounds, does not fit the parts of the other ranks, or is
    /// larger than the exchange memory, fails the group with an error that names this rank.
    ///
    /// # Errors
    /// [`ReceiveError`]. Unless `fill` was called, none of the bytes are read.
    pub(crate) fn publish_received<E>(
        &self,
        round: u64,
        part: &CollectivePart,
        range: Range<usize>,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), ReceiveError<E>> {
        let fail = |error: DeviceError| {
            self.fail(&error);
            ReceiveError::Group
        };
        self.check_round(round).map_err(fail)?;
        let slot = self.group.buffer(self.rank, round).map_err(fail)?;
        let in_use = |_| DeviceError::Bug(format!("an exchange buffer of round {round} is in use"));
        let mut buffer = slot.try_write().map_err(|e| fail(in_use(e)))?;
        let too_large =
            |_| self.violation(format!("it sent a part of {} bytes, more than was announced", part.bytes()));
        let bytes = buffer.replace(part.bytes()).map_err(too_large).map_err(fail)?;
        let bytes = bytes.get_mut(range).ok_or_else(|| fail(DeviceError::Misuse("a range outside of a part")))?;
        fill(bytes).map_err(ReceiveError::Source)?;
        drop(buffer);
        // Published although the group may have failed meanwhile: the error is the group's.
        self.published.store(round + 1, Ordering::Relaxed);
        let awaited = self.group.arrive(self.rank, round, part, false).map_err(|_| ReceiveError::Group)?;
        if let Some(complete) = awaited {
            self.group.timeline.advance(complete);
        }
        Ok(())
    }

    /// Whether the rank may publish in a round: it is the rank's next one, and all ranks of this process have published in the
    /// round before. They have then combined the round before that, whose buffer the part overwrites.
    fn check_round(&self, round: u64) -> Result<(), DeviceError> {
        let next = self.published.load(Ordering::Relaxed);
        if round != next {
            return Err(self.violation(format!("it sent a part of round {round}, but its next round is {next}")));
        }
        let state = lock(&self.group.state);
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let behind = state.ranks.iter().any(|rank| !rank.is_remote && rank.published < round);
        drop(state);
        if behind {
            let reason = format!("it sent a part of round {round} before it can have had all of the round before");
            return Err(self.violation(reason));
        }
        Ok(())
    }

    /// The error for a rank whose process violates the protocol of a group.
    fn violation(&self, reason: String) -> DeviceError {
        DeviceError::Remote { device: lock(&self.group.state).device(self.rank), reason }
    }
}

#[cfg(test)]
mod tests;

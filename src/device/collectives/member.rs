//! A rank of a group: publishes its part, waits for the others, reads theirs.

use super::exchange::PartBytes;
use super::{CollectiveGroup, CollectivePart};
use crate::device::{AdaptiveSpin, DeviceError, TimelinePoint};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, Instant, Mutex, Unpoisoned, lock};
use std::fmt;

/// One rank of a [`CollectiveGroup`]. Dropping it leaves the group: rounds that are not complete by then fail on all ranks, with
/// [`DeviceError::RankLeft`].
///
/// The methods are for devices, which call them in the order that [`CollectiveGroup`] describes. One thread at a time publishes
/// and waits; any number of threads read the parts.
pub struct GroupMember {
    pub(super) group: Arc<CollectiveGroup>,
    pub(super) rank: usize,
    /// Rounds in which this rank has published. It has combined all of them, except perhaps the last one.
    pub(super) published: AtomicU64,
    pub(super) spin: AdaptiveSpin,
    /// The time since which the rank has waited for a point.
    pub(super) waiting_since: Mutex<Option<Instant>>,
}

impl GroupMember {
    /// The number of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks of the group.
    pub fn ranks(&self) -> usize {
        self.group.ranks()
    }

    /// Sets the name of the rank's device, for errors.
    pub fn set_device(&mut self, name: &str) {
        if let Some(rank) = lock(&self.group.state).ranks.get_mut(self.rank) {
            name.clone_into(&mut rank.device);
        }
    }

    /// Begins the next round: `write` fills the exchange buffer with the rank's part. The caller has combined all earlier rounds.
    ///
    /// # Errors
    /// The group's failure, which this part may have caused; [`DeviceError::Misuse`] if it is larger than the exchange memory.
    pub fn publish(&self, part: &CollectivePart, write: impl FnOnce(&mut [u8])) -> Result<(), DeviceError> {
        let round = self.published.load(Ordering::Relaxed);
        if !self.poll()? {
            return Err(DeviceError::Bug(format!("rank {} has not combined round {round}", self.rank)));
        }
        if self.group.failed.load(Ordering::Acquire) {
            return Err(self.group.failure());
        }
        let in_use = || DeviceError::Bug(format!("an exchange buffer of round {round} is in use"));
        let slot = self.group.buffer(self.rank, round)?;
        let mut buffer = slot.try_write().map_err(|_| in_use())?;
        write(buffer.replace(part.bytes)?);
        drop(buffer);
        self.published.store(round + 1, Ordering::Relaxed);
        let awaited = self.group.arrive(self.rank, round, part, self.group.remote_ranks.is_some())?;
        if let Some(remote_ranks) = &self.group.remote_ranks {
            // Counted before it is sent: the reply of another server must not overtake the count.
            let buffer = slot.try_read().map_err(|_| in_use());
            let sent = buffer.and_then(|buffer| remote_ranks.send(self.rank, round, part, buffer.part()));
            self.group.finish_send(&**remote_ranks);
            sent?;
        }
        if let Some(complete) = awaited {
            // Outside of the lock: the callbacks schedule the queues that wait.
            self.group.timeline.advance(complete);
        }
        Ok(())
    }

    /// Whether all ranks have published in the round that this rank has published in last, so that it can be combined.
    ///
    /// # Errors
    /// The group's failure, if the group failed before that.
    pub fn poll(&self) -> Result<bool, DeviceError> {
        let group = &*self.group;
        let is_complete = || group.complete.load(Ordering::Acquire) >= self.published.load(Ordering::Relaxed);
        if is_complete() {
            return Ok(true);
        }
        // A round that was completed before the failure counts as complete.
        if group.failed.load(Ordering::Acquire) && !is_complete() {
            return Err(group.failure());
        }
        Ok(is_complete())
    }

    /// As [`GroupMember::poll`], but polls for up to 50 µs unless the rank's last wait was longer, or `give_up`. A caller that
    /// gets false waits for [`GroupMember::await_point`] and then calls this again.
    ///
    /// # Errors
    /// As [`GroupMember::poll`].
    pub fn poll_briefly(&self, give_up: impl Fn() -> bool) -> Result<bool, DeviceError> {
        let mut waiting_since = self.waiting_since.lock().unpoisoned();
        if self.poll()? {
            if let Some(since) = waiting_since.take() {
                // Without the time that the thread took to wake up: it would make every wait a long one.
                let completed_at = lock(&self.group.state).completed_at.unwrap_or(since);
                self.spin.record_duration(completed_at.saturating_duration_since(since));
            }
            return Ok(true);
        }
        if waiting_since.is_some() {
            return Ok(false);
        }
        let since = self.spin.spin(|| self.poll() != Ok(false) || give_up());
        if self.poll()? {
            self.spin.record(since);
            return Ok(true);
        }
        *waiting_since = Some(since);
        Ok(false)
    }

    /// The point at which all ranks have published in the round that this rank has published in last; it fails with the group.
    /// `None` if that is decided already: see [`GroupMember::poll`].
    pub fn await_point(&self) -> Option<TimelinePoint> {
        let published = self.published.load(Ordering::Relaxed);
        let mut state = lock(&self.group.state);
        if state.failure.is_some() || self.group.complete.load(Ordering::Relaxed) >= published {
            return None;
        }
        state.awaited = true;
        Some(TimelinePoint::new(&self.group.timeline, published))
    }

    /// The part of a rank in the round that this rank has published in last, which is complete.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] if the group has no such rank, or the round is not complete; [`DeviceError::Bug`] if that rank has
    /// begun to overwrite the part, which the order of calls excludes.
    pub fn part(&self, rank: usize) -> Result<PartBytes<'_>, DeviceError> {
        let published = self.published.load(Ordering::Relaxed);
        let round = published.saturating_sub(1);
        if self.group.complete.load(Ordering::Acquire) < published.max(1) {
            return Err(DeviceError::Misuse("a part of a round that is not complete"));
        }
        let overwritten = |_| DeviceError::Bug(format!("rank {rank} overwrites its part of round {round}"));
        self.group.buffer(rank, round)?.try_read().map(PartBytes).map_err(overwritten)
    }

    /// Fails the group because the rank's queue has failed.
    pub fn fail(&self, error: &DeviceError) {
        self.group.fail_rank(self.rank, error);
    }
}

impl Drop for GroupMember {
    fn drop(&mut self) {
        self.fail(&DeviceError::Ended);
    }
}

impl fmt::Debug for GroupMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupMember(rank {} of {})", self.rank, self.ranks())
    }
}

//! Groups of ranks, which exchange the parts of collective nodes: the protocol of a round is documented at [`CollectiveGroup`].
//!
//! # Two exchange buffers replace a second barrier
//! Round k uses buffer k mod 2 of each rank. A rank publishes round k + 1 only after it has combined round k. Publishing round
//! k + 2 overwrites the buffer of round k. The rank that does so has combined round k + 1, so every rank has published round
//! k + 1, so every rank has combined round k and reads its buffers no more. The locks of the buffers check that argument:
//! a conflict is [`DeviceError::Bug`].
//!
//! # Ranks of other processes
//! A server has an instance of the group with all ranks ([`remote`]). The argument holds there as well, since a rank of another
//! server sends its part of round k + 2 only after it has combined round k + 1. But its parts may overtake the parts of a third
//! server: the part of round k + 1 may arrive while round k is still incomplete here. So up to two rounds are incomplete at a
//! time. A rank that sends a part before all ranks of this server have published the round before violates the protocol.
//!
//! # The timeline
//! The last rank to publish advances the group's timeline only if a rank waits for a point, because that takes a system call.

mod exchange;
mod member;
mod membership;
mod part;
#[cfg(feature = "server")]
pub(crate) mod remote;
mod round;

pub use exchange::PartBytes;
pub use member::GroupMember;
pub use membership::{Membership, ServerMember};
pub use part::CollectivePart;

use super::{AdaptiveSpin, DeviceError, MemoryBudget, Timeline};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{self, Arc, Mutex, MutexGuard, RwLock, lock};
use exchange::ExchangeBuffer;
use round::{GroupState, RankState};
use std::fmt;
use std::time::Duration;

/// How long a rank polls for the others before its program suspends.
const MAX_SPIN: Duration = Duration::from_micros(50);

/// A group of ranks, all or some of them in this process. Each rank has a [`GroupMember`], which a queue takes
/// ([`Membership::group`], [`Collectives::join`](super::Collectives::join)). The group exists as long as one of its members.
///
/// # A round
/// Each collective is a round of the group, in which every rank takes two steps:
/// 1. It *publishes*: it copies its part into its exchange buffer ([`GroupMember::publish`]).
/// 2. Once all ranks have published, it *combines*: it reads the parts of all ranks in order ([`GroupMember::part`]), and writes
///    its own destination.
///
/// A rank that has published before the others polls for a short time ([`GroupMember::poll_briefly`]), then waits for a point
/// ([`GroupMember::await_point`]).
///
/// # Failures
/// The group fails for good when a rank's queue fails, when a member is dropped, or when the ranks' collectives do not belong
/// together. Ranks that wait, and all later rounds, get the error. A round in which all ranks had published before can still be
/// combined: a rank that has finished its program may leave while the others read its last part.
pub struct CollectiveGroup {
    /// By rank: the exchange buffers of even and odd rounds.
    exchange: Box<[[RwLock<ExchangeBuffer>; 2]]>,
    /// Rounds in which all ranks have published.
    complete: AtomicU64,
    /// Whether the state has a failure.
    failed: AtomicBool,
    /// Reaches n when n rounds are complete, if a rank waits for that.
    timeline: Arc<Timeline>,
    state: Mutex<GroupState>,
    /// Sends the parts of this process's ranks to the others.
    remote_ranks: Option<Arc<dyn RemoteRanks>>,
}

/// The connections of a group to the processes of its other ranks.
pub(crate) trait RemoteRanks: Send + Sync {
    /// Sends a part of a rank of this process to the other processes. Called on the device's thread, so it must not wait for
    /// them.
    ///
    /// # Errors
    /// The failure of the group, which a process that does not receive has caused.
    fn send(&self, rank: usize, round: u64, part: &CollectivePart, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Sends the reason of the group's failure to the other processes, without waiting for them.
    fn report_failure(&self, error: &DeviceError);
}

impl CollectiveGroup {
    /// The most ranks of a group.
    pub const MAX_RANKS: usize = 64;

    /// A group of `ranks` ranks of this process; returns its members, by rank. The memory in which they exchange their parts, two
    /// parts of up to `part_bytes` bytes per rank, is reserved in `budget`.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] for no ranks or more than [`CollectiveGroup::MAX_RANKS`]; [`DeviceError::OutOfMemory`].
    pub(crate) fn members(
        ranks: usize,
        part_bytes: u64,
        budget: &Arc<MemoryBudget>,
    ) -> Result<Vec<GroupMember>, DeviceError> {
        CollectiveGroup::create(ranks, part_bytes, budget, None)
    }

    fn create(
        ranks: usize,
        part_bytes: u64,
        budget: &Arc<MemoryBudget>,
        remote_ranks: Option<Arc<dyn RemoteRanks>>,
    ) -> Result<Vec<GroupMember>, DeviceError> {
        if !(1..=CollectiveGroup::MAX_RANKS).contains(&ranks) {
            return Err(DeviceError::Misuse("a group has 1 to 64 ranks"));
        }
        let buffer = || ExchangeBuffer::new(part_bytes, budget).map(RwLock::new);
        let exchange = (0..ranks).map(|_| Ok([buffer()?, buffer()?])).collect::<Result<_, DeviceError>>()?;
        let group = Arc::new(CollectiveGroup {
            exchange,
            complete: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            timeline: Timeline::new(),
            state: Mutex::new(GroupState {
                ranks: (0..ranks).map(|_| RankState::default()).collect(),
                rounds: Default::default(),
                sending: 0,
                awaited: false,
                completed_at: None,
                failure: None,
            }),
            remote_ranks,
        });
        let member = |rank| GroupMember {
            group: Arc::clone(&group),
            rank,
            published: AtomicU64::new(0),
            spin: AdaptiveSpin::new(MAX_SPIN),
            waiting_since: Mutex::new(None),
        };
        Ok((0..ranks).map(member).collect())
    }

    fn ranks(&self) -> usize {
        self.exchange.len()
    }

    /// Counts a rank that has published its part of round `round`. `is_sent`: the part is about to be sent to other processes, and
    /// [`CollectiveGroup::finish_send`] follows. Returns the number of complete rounds if a rank waits for it: the caller then
    /// advances the timeline to it.
    fn arrive(
        &self,
        rank: usize,
        round: u64,
        part: &CollectivePart,
        is_sent: bool,
    ) -> Result<Option<u64>, DeviceError> {
        let mut state = lock(&self.state);
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        if let Err(error) = state.add(rank, round, part, self.remote_ranks.is_some()) {
            return Err(self.record_failure(state, error));
        }
        state.sending += usize::from(is_sent);
        // Round `round` may be complete before the one before it, whose last part is on its way from another server. Its parts
        // make both complete then.
        let mut complete = self.complete.load(Ordering::Relaxed);
        let before = complete;
        while state.take_if_complete(complete) {
            complete += 1;
        }
        if complete == before {
            return Ok(None);
        }
        let awaited = std::mem::take(&mut state.awaited);
        if awaited {
            state.completed_at = Some(sync::now());
        }
        self.complete.store(complete, Ordering::Release);
        Ok(awaited.then_some(complete))
    }

    /// Ends the sending of a part that [`CollectiveGroup::arrive`] has counted. Reports that a rank has left meanwhile.
    fn finish_send(&self, remote_ranks: &dyn RemoteRanks) {
        let mut state = lock(&self.state);
        state.sending -= 1;
        // A failed group counts no part, so no other thread finishes later.
        let left = state.failure.clone().filter(|failure| state.sending == 0 && is_leave(failure));
        drop(state);
        if let Some(error) = left {
            remote_ranks.report_failure(&error);
        }
    }

    /// The failure of a group that has failed.
    fn failure(&self) -> DeviceError {
        lock(&self.state).failure.clone().unwrap_or(DeviceError::Ended)
    }

    /// Fails the group, which has not failed before.
    fn record_failure(&self, mut state: MutexGuard<'_, GroupState>, error: DeviceError) -> DeviceError {
        state.failure = Some(error.clone());
        self.failed.store(true, Ordering::Release);
        // A part is counted before it is sent, so its round may be complete, and another rank of this process may leave before it
        // is sent. The report would end the connections.
        let is_late = is_leave(&error) && state.sending > 0;
        drop(state);
        self.timeline.fail(error.clone());
        if let Some(remote_ranks) = self.remote_ranks.as_ref().filter(|_| !is_late) {
            remote_ranks.report_failure(&error);
        }
        error
    }

    /// Fails the group because of a rank.
    fn fail_rank(&self, rank: usize, error: &DeviceError) {
        let state = lock(&self.state);
        if state.failure.is_some() {
            return;
        }
        let device = state.device(rank);
        let error = match error {
            DeviceError::Ended => DeviceError::RankLeft { rank, device },
            error => DeviceError::RankFailed { rank, device, error: Box::new(error.clone()) },
        };
        self.record_failure(state, error);
    }

    /// The exchange buffer of a rank for a round.
    fn buffer(&self, rank: usize, round: u64) -> Result<&RwLock<ExchangeBuffer>, DeviceError> {
        let [even, odd] = self.exchange.get(rank).ok_or(DeviceError::Misuse("the group has no such rank"))?;
        Ok(if round.is_multiple_of(2) { even } else { odd })
    }
}

/// Whether a rank has left, rather than failed.
fn is_leave(failure: &DeviceError) -> bool {
    matches!(failure, DeviceError::RankLeft { .. })
}

impl fmt::Debug for CollectiveGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let complete = self.complete.load(Ordering::Relaxed);
        write!(f, "CollectiveGroup({} ranks, {complete} rounds, {:?})", self.ranks(), lock(&self.state).failure)
    }
}

#[cfg(test)]
mod tests;

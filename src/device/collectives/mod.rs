//! Groups of ranks in one process, which exchange the parts of collective nodes: the protocol of a round is documented at
//! [`CollectiveGroup`].
//!
//! # Two exchange buffers replace a second barrier
//! Round k uses buffer k mod 2 of each rank. A rank publishes round k + 1 only after it has combined round k. Publishing round
//! k + 2 overwrites the buffer of round k. The rank that does so has combined round k + 1, so every rank has published round
//! k + 1, so every rank has combined round k and reads its buffers no more. The locks of the buffers check that argument:
//! a conflict is [`DeviceError::Bug`]. By the same argument at most one round is incomplete at a time.
//!
//! The last rank to publish advances the group's timeline only if a rank waits for a point, because that takes a system call.

use super::{AdaptiveSpin, DeviceError, HostBuffer, MemoryBudget, Timeline, TimelinePoint};
use crate::ops::collective::CollectiveKind;
use crate::tensor::{DIMS, DType, TensorDesc};
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

/// How long a rank polls for the others before its program suspends.
const MAX_SPIN: Duration = Duration::from_micros(50);

/// A group of ranks in one process. [`CollectiveGroup::new`] gives one [`GroupMember`] per rank, each of which a queue takes
/// ([`Collectives::join`](super::Collectives::join)). The group exists as long as one of its members.
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
    /// The budget of the exchange buffers.
    budget: Arc<MemoryBudget>,
    /// Rounds in which all ranks have published.
    complete: AtomicU64,
    /// Whether the state has a failure.
    failed: AtomicBool,
    /// Reaches n when n rounds are complete, if a rank waits for that.
    timeline: Arc<Timeline>,
    state: Mutex<GroupState>,
}

struct GroupState {
    /// By rank: the name of its device.
    devices: Vec<String>,
    /// Ranks that have published in the incomplete round.
    arrived: usize,
    /// The first of them, and its part.
    first: Option<(usize, CollectivePart)>,
    /// Sum of the extents of their parts.
    extents: usize,
    /// Whether a rank waits for the incomplete round.
    awaited: bool,
    /// When the last awaited round became complete.
    completed_at: Option<Instant>,
    failure: Option<DeviceError>,
}

/// The part of one rank in one round.
struct ExchangeBuffer {
    memory: HostBuffer,
    bytes: usize,
}

/// What a rank brings to a round: the collective and the shapes of its operands. It must fit the parts of the other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectivePart {
    kind: CollectiveKind,
    dtype: DType,
    /// Shape of the destination.
    ne: [usize; DIMS],
    /// Extent of the rank's part along the axis of ALL_GATHER.
    extent: usize,
    /// Size of the part.
    bytes: usize,
}

impl CollectivePart {
    /// The part of a node, whose shapes satisfy the shape rule of the op.
    pub fn new(kind: CollectiveKind, part: &TensorDesc, dst: &TensorDesc) -> CollectivePart {
        let extent = match kind {
            CollectiveKind::AllReduce => 0,
            CollectiveKind::AllGather { axis } => part.ne().get(usize::from(axis)).copied().unwrap_or(0),
        };
        CollectivePart { kind, dtype: dst.dtype(), ne: dst.ne(), extent, bytes: part.dense_bytes() }
    }

    fn belongs_to(&self, other: &CollectivePart) -> bool {
        (self.kind, self.dtype, self.ne) == (other.kind, other.dtype, other.ne)
    }
}

impl fmt::Display for CollectivePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            CollectiveKind::AllReduce => write!(f, "ALL_REDUCE of {} {:?}", self.dtype, self.ne),
            CollectiveKind::AllGather { axis } => {
                write!(f, "ALL_GATHER of {} {:?} along axis {axis}", self.dtype, self.ne)
            }
        }
    }
}

impl CollectiveGroup {
    /// The most ranks of a group.
    pub const MAX_RANKS: usize = 64;

    /// A group of `ranks` ranks; returns its members, by rank. The memory in which they exchange their parts, two parts per rank,
    /// is reserved in `budget`. It grows to the largest part.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] for no ranks or more than [`CollectiveGroup::MAX_RANKS`].
    #[allow(clippy::new_ret_no_self)] // the members are all that its users have of a group
    pub fn new(ranks: usize, budget: &Arc<MemoryBudget>) -> Result<Vec<GroupMember>, DeviceError> {
        if !(1..=CollectiveGroup::MAX_RANKS).contains(&ranks) {
            return Err(DeviceError::Misuse("a group has 1 to 64 ranks"));
        }
        let buffer = || RwLock::new(ExchangeBuffer { memory: HostBuffer::empty(), bytes: 0 });
        let group = Arc::new(CollectiveGroup {
            exchange: (0..ranks).map(|_| [buffer(), buffer()]).collect(),
            budget: Arc::clone(budget),
            complete: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            timeline: Timeline::new(),
            state: Mutex::new(GroupState {
                devices: vec!["no device yet".to_owned(); ranks],
                arrived: 0,
                first: None,
                extents: 0,
                awaited: false,
                completed_at: None,
                failure: None,
            }),
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

    /// Counts a rank that has published its part of round `round`.
    fn arrive(&self, rank: usize, round: u64, part: &CollectivePart) -> Result<(), DeviceError> {
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        if let Err(error) = state.add(rank, part, self.ranks()) {
            return Err(self.record_failure(state, error));
        }
        if state.arrived < self.ranks() {
            return Ok(());
        }
        (state.arrived, state.first, state.extents) = (0, None, 0);
        let awaited = std::mem::take(&mut state.awaited);
        if awaited {
            state.completed_at = Some(Instant::now());
        }
        self.complete.store(round + 1, Ordering::Release);
        drop(state);
        // Outside of the lock: the callbacks schedule the queues that wait.
        if awaited {
            self.timeline.advance(round + 1);
        }
        Ok(())
    }

    /// The failure of a group that has failed.
    fn failure(&self) -> DeviceError {
        self.lock().failure.clone().unwrap_or(DeviceError::Ended)
    }

    /// Fails the group, which has not failed before.
    fn record_failure(&self, mut state: MutexGuard<'_, GroupState>, error: DeviceError) -> DeviceError {
        state.failure = Some(error.clone());
        self.failed.store(true, Ordering::Release);
        drop(state);
        self.timeline.fail(error.clone());
        error
    }

    fn lock(&self) -> MutexGuard<'_, GroupState> {
        // Poisoning is ignored: no code under this lock panics between two dependent writes, so the state is consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GroupState {
    /// Adds a rank's part to the incomplete round, of `ranks` ranks.
    fn add(&mut self, rank: usize, part: &CollectivePart, ranks: usize) -> Result<(), DeviceError> {
        let &mut (first, first_part) = self.first.get_or_insert((rank, *part));
        if !first_part.belongs_to(part) {
            let (a, b) = (self.rank_text(first), self.rank_text(rank));
            return Err(DeviceError::RanksDisagree(format!("{a} runs {first_part}, {b} runs {part}")));
        }
        self.arrived += 1;
        self.extents = self.extents.saturating_add(part.extent);
        if let CollectiveKind::AllGather { axis } = part.kind
            && self.arrived == ranks
        {
            let (got, want) = (self.extents, part.ne.get(usize::from(axis)).copied().unwrap_or(0));
            if got != want {
                let reason = format!("{part}: the parts have {got} elements along the axis together, not {want}");
                return Err(DeviceError::RanksDisagree(reason));
            }
        }
        Ok(())
    }

    fn device(&self, rank: usize) -> String {
        self.devices.get(rank).cloned().unwrap_or_default()
    }

    fn rank_text(&self, rank: usize) -> String {
        format!("rank {rank} ({})", self.device(rank))
    }
}

impl fmt::Debug for CollectiveGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let complete = self.complete.load(Ordering::Relaxed);
        write!(f, "CollectiveGroup({} ranks, {complete} rounds, {:?})", self.ranks(), self.lock().failure)
    }
}

/// One rank of a [`CollectiveGroup`]. Dropping it leaves the group: rounds that are not complete by then fail on all ranks, with
/// [`DeviceError::RankLeft`].
///
/// The methods are for devices, which call them in the order that [`CollectiveGroup`] describes. One thread at a time publishes
/// and waits; any number of threads read the parts.
pub struct GroupMember {
    group: Arc<CollectiveGroup>,
    rank: usize,
    /// Rounds in which this rank has published. It has combined all of them, except perhaps the last one.
    published: AtomicU64,
    spin: AdaptiveSpin,
    /// Since when the rank has waited for a point.
    waiting_since: Mutex<Option<Instant>>,
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
        if let Some(device) = self.group.lock().devices.get_mut(self.rank) {
            name.clone_into(device);
        }
    }

    /// Allocates the rank's two exchange buffers for parts of up to `bytes` bytes, so that no round allocates. Call it before the
    /// rank publishes anything.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the budget or the system has fewer bytes available.
    pub fn reserve(&self, bytes: u64) -> Result<(), DeviceError> {
        for round in 0..2 {
            let in_use = |_| DeviceError::Misuse("exchange memory is reserved before the first round");
            let mut buffer = self.buffer(self.rank, round)?.try_write().map_err(in_use)?;
            buffer.memory = HostBuffer::zeroed(bytes, &self.group.budget)?;
        }
        Ok(())
    }

    /// Begins the next round: `write` fills the exchange buffer with the rank's part. The caller has combined all earlier rounds.
    ///
    /// # Errors
    /// The group's failure, which this part may have caused; [`DeviceError::OutOfMemory`] if the exchange memory cannot grow.
    pub fn publish(&self, part: &CollectivePart, write: impl FnOnce(&mut [u8])) -> Result<(), DeviceError> {
        let round = self.published.load(Ordering::Relaxed);
        if !self.poll()? {
            return Err(DeviceError::Bug(format!("rank {} has not combined round {round}", self.rank)));
        }
        if self.group.failed.load(Ordering::Acquire) {
            return Err(self.group.failure());
        }
        let in_use = |_| DeviceError::Bug(format!("an exchange buffer of round {round} is in use"));
        let mut buffer = self.buffer(self.rank, round)?.try_write().map_err(in_use)?;
        if buffer.memory.len() < part.bytes {
            // The old memory is released first, so that the budget never holds both.
            buffer.memory = HostBuffer::empty();
            buffer.memory = HostBuffer::zeroed(part.bytes as u64, &self.group.budget)?;
        }
        buffer.bytes = part.bytes;
        if let Some(bytes) = buffer.memory.get_mut(..part.bytes) {
            write(bytes);
        }
        drop(buffer);
        self.published.store(round + 1, Ordering::Relaxed);
        self.group.arrive(self.rank, round, part)
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
        let mut waiting_since = self.waiting_since.lock().unwrap_or_else(PoisonError::into_inner);
        if self.poll()? {
            if let Some(since) = waiting_since.take() {
                // Without the time that the thread took to wake up: it would make every wait a long one.
                let completed_at = self.group.lock().completed_at.unwrap_or(since);
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
        let mut state = self.group.lock();
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
        self.buffer(rank, round)?.try_read().map(PartBytes).map_err(overwritten)
    }

    /// Fails the group because the rank's queue has failed.
    pub fn fail(&self, error: &DeviceError) {
        let (rank, state) = (self.rank, self.group.lock());
        if state.failure.is_some() {
            return;
        }
        let device = state.device(rank);
        let error = match error {
            DeviceError::Ended => DeviceError::RankLeft { rank, device },
            error => DeviceError::RankFailed { rank, device, source: Box::new(error.clone()) },
        };
        self.group.record_failure(state, error);
    }

    /// The exchange buffer of a rank for a round.
    fn buffer(&self, rank: usize, round: u64) -> Result<&RwLock<ExchangeBuffer>, DeviceError> {
        let [even, odd] = self.group.exchange.get(rank).ok_or(DeviceError::Misuse("the group has no such rank"))?;
        Ok(if round.is_multiple_of(2) { even } else { odd })
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

/// The part of a rank in a round: its bytes, contiguous.
pub struct PartBytes<'a>(RwLockReadGuard<'a, ExchangeBuffer>);

impl Deref for PartBytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.memory.get(..self.0.bytes).unwrap_or_default()
    }
}

impl fmt::Debug for PartBytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PartBytes({} bytes)", self.len())
    }
}

#[cfg(test)]
mod tests;

//! One run of a graph: its members (the leader and the workers that joined), their step barrier, and the sharing of a node's
//! work.
//!
//! The leader starts alone; a worker joins at the next barrier after its request. So a run never waits for a worker to wake
//! up, and a worker that wakes too late costs nothing.

use super::spin_until;
use crate::cpu::joined_groups::JoinedGroups;
use crate::cpu::memory::{SharedScratch, View};
use crate::device::{DeviceError, GroupMember};
use crate::poison::lock;
use crossbeam::utils::CachePadded;
use std::cell::Cell;
use std::cmp::Ordering as CmpOrdering;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// State that the members of one run share.
pub(crate) struct Team<'a> {
    /// Number of members; changes only while all members are at a barrier.
    members: CachePadded<AtomicUsize>,
    /// Members that have arrived at the barrier.
    arrived: CachePadded<AtomicUsize>,
    /// The phase that the last barrier opened.
    phase: CachePadded<AtomicUsize>,
    /// Next unclaimed item of the phase.
    claims: CachePadded<AtomicUsize>,
    /// Workers that have requested to join.
    join_requests: CachePadded<AtomicUsize>,
    /// Step and phase at which the most recently admitted workers start.
    entry: (AtomicUsize, AtomicUsize),
    /// The run pauses: the step after the barrier just opened is left for a later run.
    paused: AtomicBool,
    /// Whether the run should pause.
    pause_is_due: &'a (dyn Fn() -> bool + Sync),
    /// The run pauses inside a step: no member claims any more, and `claims` keeps its value.
    interrupted: AtomicBool,
    /// Phase of the step in which that happened.
    interrupted_phase: AtomicUsize,
    /// No worker is admitted any more.
    closed: AtomicBool,
    abort: &'a AtomicBool,
    failed: AtomicBool,
    failure: Mutex<Option<DeviceError>>,
}

impl<'a> Team<'a> {
    /// `pause_is_due` is evaluated before a step and before a claim of a step's items, by any member.
    pub(crate) fn new(abort: &'a AtomicBool, pause_is_due: &'a (dyn Fn() -> bool + Sync)) -> Team<'a> {
        Team {
            members: CachePadded::new(AtomicUsize::new(1)),
            arrived: CachePadded::default(),
            phase: CachePadded::default(),
            claims: CachePadded::default(),
            join_requests: CachePadded::default(),
            entry: Default::default(),
            paused: AtomicBool::new(false),
            pause_is_due,
            interrupted: AtomicBool::new(false),
            interrupted_phase: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            abort,
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    fn stopping(&self) -> bool {
        self.failed.load(Ordering::Relaxed) || self.abort.load(Ordering::Relaxed)
    }

    fn fail(&self, error: DeviceError) {
        lock(&self.failure).get_or_insert(error);
        self.failed.store(true, Ordering::Relaxed);
    }

    /// The run's first failure.
    pub(crate) fn failure(&self) -> Option<DeviceError> {
        lock(&self.failure).clone()
    }

    /// How much of the last step the members have done, if it was interrupted; `began` is how much of it was done before this
    /// run, if it is the run's first step. All members have left the step.
    pub(crate) fn interrupted_step(&self, began: StepProgress) -> Option<StepProgress> {
        if !self.interrupted.load(Ordering::Relaxed) {
            return None;
        }
        let phase = self.interrupted_phase.load(Ordering::Relaxed);
        let before = if phase == began.phase { began.items } else { 0 };
        Some(StepProgress {
            phase,
            items: before.saturating_add(self.claims.load(Ordering::Relaxed)),
            workers: if began.workers > 0 { began.workers } else { self.members.load(Ordering::Relaxed) },
        })
    }

    /// The leader: the only member at the start of a run.
    pub(in crate::cpu) fn leader(&'a self) -> Member<'a> {
        Member { team: self, rank: 0, phase: Cell::new(0) }
    }

    /// Waits until `workers` workers have requested to join, at most `timeout`: later workers join at a later barrier.
    pub(super) fn gather(&self, workers: usize, timeout: Duration) {
        let until = Instant::now() + timeout;
        while self.join_requests.load(Ordering::Relaxed) < workers && Instant::now() < until {
            std::hint::spin_loop();
        }
    }

    /// Requests to join and waits for admission. Returns the step to start with, whose barrier is passed already; `None` if
    /// the run has ended.
    pub(super) fn join(&'a self) -> Option<(Member<'a>, usize)> {
        let rank = self.join_requests.fetch_add(1, Ordering::Relaxed) + 1;
        let admitted = || self.members.load(Ordering::Acquire) > rank;
        spin_until(|| admitted() || self.closed.load(Ordering::Acquire));
        if !admitted() {
            return None;
        }
        // The two values are written again only at a barrier, which now waits for this member too.
        let (step, phase) = (self.entry.0.load(Ordering::Relaxed), self.entry.1.load(Ordering::Relaxed));
        Some((Member { team: self, rank, phase: Cell::new(phase) }, step))
    }

    /// Ends the run for the workers that were not admitted.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }
}

/// How much of a step earlier runs have done: all phases before `phase`, and its items below `items`. The default is none.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct StepProgress {
    phase: usize,
    items: usize,
    /// Workers among which the step's work was divided when it began; 0 if it has not begun.
    workers: usize,
}

/// A member of a run.
pub(crate) struct Member<'a> {
    team: &'a Team<'a>,
    /// 0 for the leader; unique in the run.
    rank: usize,
    /// Barriers passed.
    phase: Cell<usize>,
}

impl Member<'_> {
    /// Whether this is the leader, which runs the serial nodes.
    pub(crate) fn is_leader(&self) -> bool {
        self.rank == 0
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// Barriers passed so far.
    pub(crate) fn phase(&self) -> usize {
        self.phase.get()
    }

    /// Whether the run ends early: a kernel failed, or the queue was dropped.
    pub(crate) fn stopping(&self) -> bool {
        self.team.stopping()
    }

    /// Ends the run with an error; the first error wins.
    pub(crate) fn fail(&self, error: DeviceError) {
        self.team.fail(error);
    }

    /// Whether the run should pause.
    pub(crate) fn pause_is_due(&self) -> bool {
        (self.team.pause_is_due)()
    }

    /// Step barrier: waits for all members before `step` and admits the workers that have requested to join. The last member
    /// to arrive evaluates `pause`; if it is true, or if the step before was interrupted, every member returns false, and the
    /// step is left for a later run.
    pub(crate) fn step_barrier(&self, step: usize, pause: impl FnOnce() -> bool) -> bool {
        let team = self.team;
        self.barrier(|phase| {
            if team.interrupted.load(Ordering::Relaxed) || pause() {
                team.paused.store(true, Ordering::Relaxed);
                return;
            }
            let members = team.join_requests.load(Ordering::Relaxed) + 1;
            if members > team.members.load(Ordering::Relaxed) {
                team.entry.0.store(step, Ordering::Relaxed);
                team.entry.1.store(phase, Ordering::Relaxed);
                team.members.store(members, Ordering::Release);
            }
        });
        !team.paused.load(Ordering::Relaxed)
    }

    /// Waits for all members and starts the next phase, with all items unclaimed.
    pub(crate) fn sync(&self) {
        self.barrier(|_| {});
    }

    /// The last member to arrive calls `at_last_arrival` with the number of the new phase, while all other members wait.
    fn barrier(&self, at_last_arrival: impl FnOnce(usize)) {
        let (team, phase) = (self.team, self.phase.get() + 1);
        self.phase.set(phase);
        // The number cannot change before this member has arrived.
        let members = team.members.load(Ordering::Relaxed);
        if team.arrived.fetch_add(1, Ordering::AcqRel) + 1 < members {
            spin_until(|| team.phase.load(Ordering::Acquire) == phase);
            return;
        }
        team.arrived.store(0, Ordering::Relaxed);
        if !team.interrupted.load(Ordering::Relaxed) {
            team.claims.store(0, Ordering::Relaxed);
        }
        at_last_arrival(phase);
        team.phase.store(phase, Ordering::Release);
    }
}

/// Arguments of a kernel: its operands, its scratch, and its share of the work.
pub(crate) struct KernelContext<'a> {
    pub(in crate::cpu) member: &'a Member<'a>,
    pub(in crate::cpu) serial: bool,
    pub(in crate::cpu) rhs_is_packed: bool,
    /// In the first step of a run: what earlier runs have done of it.
    pub(in crate::cpu) first_step: Option<StepProgress>,
    /// Phase of the step: calls of [`KernelContext::sync`] so far.
    pub(in crate::cpu) phase: Cell<usize>,
    pub(in crate::cpu) dst: View<'a>,
    pub(in crate::cpu) srcs: &'a [Option<View<'a>>],
    pub(in crate::cpu) local: &'a mut [f32],
    pub(in crate::cpu) shared: SharedScratch<'a>,
    pub(in crate::cpu) groups: &'a JoinedGroups,
}

impl<'a> KernelContext<'a> {
    /// The destination.
    pub(crate) fn dst(&self) -> View<'a> {
        self.dst
    }

    /// Source `i`, which the shape rule requires.
    ///
    /// # Panics
    /// If the source is absent: a bug, the shape rule does not require it.
    pub(crate) fn src(&self, i: usize) -> View<'a> {
        self.srcs[i].expect("a source that the shape rule requires")
    }

    /// Source `i`, if present.
    pub(crate) fn optional_src(&self, i: usize) -> Option<View<'a>> {
        self.srcs.get(i).copied().flatten()
    }

    /// Workers that run this node together; 1 for a serial node.
    pub(crate) fn workers(&self) -> usize {
        if self.serial { 1 } else { self.member.team.members.load(Ordering::Relaxed) }
    }

    /// This worker's own scratch with old contents: as many floats as [`Kernel::with_local`](crate::cpu::ops) requested. Empty
    /// at the second call.
    pub(crate) fn take_local_scratch(&mut self) -> &'a mut [f32] {
        std::mem::take(&mut self.local)
    }

    /// Workers among which the step's work was divided when it began. Unlike [`KernelContext::workers`], this number is the
    /// same in all runs of a step that pauses in its middle. Items whose number or meaning depends on the number of workers
    /// must use it.
    pub(crate) fn dividing_workers(&self) -> usize {
        self.first_step.map(|began| began.workers).filter(|&n| n > 0).unwrap_or_else(|| self.workers())
    }

    /// Whether an earlier product of the same source 1 left it packed in shared scratch.
    pub(crate) fn rhs_is_packed(&self) -> bool {
        self.rhs_is_packed
    }

    /// The member by which the queue is a rank of a group.
    pub(crate) fn member_of(&self, group: u32) -> Result<&'a GroupMember, DeviceError> {
        self.groups.member(group)
    }

    /// Scratch that all workers of the node share.
    pub(crate) fn shared(&self) -> SharedScratch<'a> {
        self.shared
    }

    /// Barrier: waits for all workers of the node. Data written to shared scratch before the barrier can be read after it.
    /// Every worker must call it equally often.
    pub(crate) fn sync(&self) {
        self.phase.set(self.phase.get() + 1);
        if !self.serial {
            self.member.sync();
        }
    }

    /// Dynamic scheduling: ranges of `0..total` of at most `grain` items, each claimed by one worker. Together they cover
    /// everything, unless the run is stopping or pauses. A kernel calls this at most once between two
    /// [`KernelContext::sync`]s.
    ///
    /// The run may pause before any claim. The kernel is then called again in a later run, and gets the items that no worker
    /// has claimed: every item is claimed once, and all items of a phase before any item of the next one. So a kernel must have
    /// no effect outside of claimed items, except one that may be repeated.
    pub(crate) fn chunks(&self, total: usize, grain: usize) -> Chunks<'a> {
        let claims = (!self.serial).then(|| &*self.member.team.claims);
        let (phase, began) = (self.phase.get(), self.first_step.unwrap_or_default());
        let offset = match phase.cmp(&began.phase) {
            CmpOrdering::Less => total,
            CmpOrdering::Equal => began.items,
            CmpOrdering::Greater => 0,
        };
        let must_claim = self.first_step.is_some() && phase == began.phase;
        Chunks { team: self.member.team, claims, phase, must_claim, offset, next: offset, total, grain: grain.max(1) }
    }

    /// Ends the run because of invalid data (a row index out of range).
    pub(crate) fn fail(&self, error: DeviceError) {
        self.member.team.fail(error);
    }
}

/// Iterator of [`KernelContext::chunks`].
pub(crate) struct Chunks<'a> {
    team: &'a Team<'a>,
    /// `None` in a serial step, which cannot be interrupted.
    claims: Option<&'a AtomicUsize>,
    phase: usize,
    /// The next claim does not evaluate whether the run should pause. Without such claims where a run begins, a run that should
    /// pause at once would never end.
    must_claim: bool,
    /// Items that earlier runs have claimed.
    offset: usize,
    next: usize,
    total: usize,
    grain: usize,
}

impl Chunks<'_> {
    /// Whether the run pauses before the next claim. A claim that was made is always executed.
    fn is_interrupted(&mut self) -> bool {
        if self.team.interrupted.load(Ordering::Relaxed) {
            return true;
        }
        if std::mem::take(&mut self.must_claim) || !(self.team.pause_is_due)() {
            return false;
        }
        // All members are in this phase: the next one begins with a barrier, and finds the flag set.
        self.team.interrupted_phase.store(self.phase, Ordering::Relaxed);
        self.team.interrupted.store(true, Ordering::Relaxed);
        true
    }
}

impl Iterator for Chunks<'_> {
    type Item = Range<usize>;

    fn next(&mut self) -> Option<Range<usize>> {
        if self.next >= self.total || self.team.stopping() {
            return None;
        }
        if self.claims.is_some() && self.is_interrupted() {
            return None;
        }
        let start = match self.claims {
            Some(claims) => claims.fetch_add(self.grain, Ordering::Relaxed).saturating_add(self.offset),
            None => self.next,
        };
        self.next = start.saturating_add(self.grain);
        (start < self.total).then(|| start..self.next.min(self.total))
    }
}

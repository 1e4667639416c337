//! One run of a graph: the workers that have joined it, their barriers, and how they share a node.
//!
//! The leader starts alone; workers join at the next barrier after they have come. So a run never waits for a worker to
//! wake up, and one that comes too late costs nothing.

use super::spin_until;
use crate::cpu::memory::{Shared, View};
use crate::device::DeviceError;
use crossbeam::utils::CachePadded;
use std::cell::Cell;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// What the workers of one run share.
pub(crate) struct Team<'a> {
    /// Workers that are in; changes only while all of them are at a barrier.
    members: CachePadded<AtomicUsize>,
    /// Members that have come to the barrier.
    arrived: CachePadded<AtomicUsize>,
    /// The phase that the last barrier has opened.
    phase: CachePadded<AtomicUsize>,
    /// Next unclaimed item of the phase.
    claims: CachePadded<AtomicUsize>,
    /// Workers that have asked to join.
    asked: CachePadded<AtomicUsize>,
    /// Where those start that were admitted last: the step and the phase.
    entry: (AtomicUsize, AtomicUsize),
    /// The barrier just opened was the last: its step is left for another run.
    paused: AtomicBool,
    /// Nobody is admitted any more.
    closed: AtomicBool,
    abort: &'a AtomicBool,
    failed: AtomicBool,
    failure: Mutex<Option<DeviceError>>,
}

impl<'a> Team<'a> {
    pub(crate) fn new(abort: &'a AtomicBool) -> Team<'a> {
        Team {
            members: CachePadded::new(AtomicUsize::new(1)),
            arrived: CachePadded::default(),
            phase: CachePadded::default(),
            claims: CachePadded::default(),
            asked: CachePadded::default(),
            entry: Default::default(),
            paused: AtomicBool::new(false),
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
        super::lock(&self.failure).get_or_insert(error);
        self.failed.store(true, Ordering::Relaxed);
    }

    /// The run's failure.
    pub(crate) fn failure(&self) -> Option<DeviceError> {
        super::lock(&self.failure).clone()
    }

    /// The one member that is there from the start.
    pub(super) fn lead(&'a self) -> Member<'a> {
        Member { team: self, rank: 0, phase: Cell::new(0) }
    }

    /// Waits until so many workers have asked to join, but not for long: whoever does not come then joins later.
    pub(super) fn gather(&self, workers: usize, patience: Duration) {
        let until = Instant::now() + patience;
        while self.asked.load(Ordering::Relaxed) < workers && Instant::now() < until {
            std::hint::spin_loop();
        }
    }

    /// Waits to be let in; the step to start with, already past its barrier. `None` when the run is over.
    pub(super) fn join(&'a self) -> Option<(Member<'a>, usize)> {
        let rank = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        let admitted = || self.members.load(Ordering::Acquire) > rank;
        spin_until(|| admitted() || self.closed.load(Ordering::Acquire));
        if !admitted() {
            return None;
        }
        // They are written again only at a barrier that this member has come to.
        let (step, phase) = (self.entry.0.load(Ordering::Relaxed), self.entry.1.load(Ordering::Relaxed));
        Some((Member { team: self, rank, phase: Cell::new(phase) }, step))
    }

    /// Ends the run for those who are not in.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }
}

/// A worker's place in a run.
pub(crate) struct Member<'a> {
    team: &'a Team<'a>,
    /// 0 for the leader; no two members have the same.
    rank: usize,
    /// Barriers passed.
    phase: Cell<usize>,
}

impl Member<'_> {
    /// Whether this is the leader, which runs the nodes that are not shared.
    pub(crate) fn first(&self) -> bool {
        self.rank == 0
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// Barriers passed so far.
    pub(crate) fn phase(&self) -> usize {
        self.phase.get()
    }

    /// Whether the run is to end early: a kernel failed, or the queue was dropped.
    pub(crate) fn stopping(&self) -> bool {
        self.team.stopping()
    }

    /// Ends the run with an error; the first one wins.
    pub(crate) fn fail(&self, error: DeviceError) {
        self.team.fail(error);
    }

    /// Waits for all members before `step`, and lets in those who have come since. `pause` is asked on whoever comes last;
    /// once it says yes, this returns false to everyone: the step is left for another run.
    pub(crate) fn meet(&self, step: usize, pause: impl FnOnce() -> bool) -> bool {
        let team = self.team;
        self.barrier(|phase| {
            if pause() {
                team.paused.store(true, Ordering::Relaxed);
                return;
            }
            let members = team.asked.load(Ordering::Relaxed) + 1;
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

    /// `between` is called on the member that comes last, while all others wait, with the phase that begins.
    fn barrier(&self, between: impl FnOnce(usize)) {
        let (team, phase) = (self.team, self.phase.get() + 1);
        self.phase.set(phase);
        // Nobody changes it before this member has arrived.
        let members = team.members.load(Ordering::Relaxed);
        if team.arrived.fetch_add(1, Ordering::AcqRel) + 1 < members {
            spin_until(|| team.phase.load(Ordering::Acquire) == phase);
            return;
        }
        team.arrived.store(0, Ordering::Relaxed);
        team.claims.store(0, Ordering::Relaxed);
        between(phase);
        team.phase.store(phase, Ordering::Release);
    }
}

/// A kernel's view of its run: who it is, what it reads and writes, which part of the work is its own.
pub(crate) struct Work<'a> {
    pub(in crate::cpu) member: &'a Member<'a>,
    pub(in crate::cpu) alone: bool,
    pub(in crate::cpu) finds_columns: bool,
    pub(in crate::cpu) dst: View<'a>,
    pub(in crate::cpu) srcs: &'a [Option<View<'a>>],
    pub(in crate::cpu) local: &'a mut [f32],
    pub(in crate::cpu) shared: Shared<'a>,
}

impl<'a> Work<'a> {
    /// The destination.
    pub(crate) fn dst(&self) -> View<'a> {
        self.dst
    }

    /// Source `i`, which the shape rule requires.
    ///
    /// # Panics
    /// When there is none: a bug, the rule does not require it.
    pub(crate) fn src(&self, i: usize) -> View<'a> {
        self.srcs[i].expect("a source that the shape rule requires")
    }

    /// Source `i`, where there is one.
    pub(crate) fn optional(&self, i: usize) -> Option<View<'a>> {
        self.srcs.get(i).copied().flatten()
    }

    /// This worker's index, below [`Work::workers`].
    pub(crate) fn worker(&self) -> usize {
        if self.alone { 0 } else { self.member.rank }
    }

    /// Workers that run this node together (1 when it is too small to share).
    pub(crate) fn workers(&self) -> usize {
        if self.alone { 1 } else { self.member.team.members.load(Ordering::Relaxed) }
    }

    /// This worker's own scratch: as many floats as the kernel asked for, with old values. Once per call.
    pub(crate) fn take_local(&mut self) -> &'a mut [f32] {
        std::mem::take(&mut self.local)
    }

    /// Whether shared scratch holds what an earlier product of the same source 1 has packed into it.
    pub(crate) fn finds_columns(&self) -> bool {
        self.finds_columns
    }

    /// Scratch that all workers of the node share.
    pub(crate) fn shared(&self) -> Shared<'a> {
        self.shared
    }

    /// Waits for all workers of the node; what they wrote to shared scratch can be read after it. Every worker calls
    /// it equally often.
    pub(crate) fn sync(&self) {
        if !self.alone {
            self.member.sync();
        }
    }

    /// Ranges of `0..total`, each of at most `grain` items and handed to one worker only; together they cover
    /// everything, unless the run is stopping. At most once between two [`Work::sync`]s.
    pub(crate) fn chunks(&self, total: usize, grain: usize) -> Chunks<'a> {
        let claims = (!self.alone).then(|| &*self.member.team.claims);
        Chunks { team: self.member.team, claims, next: 0, total, grain: grain.max(1) }
    }

    /// Ends the run because data is not what the op allows (a row index out of range).
    pub(crate) fn fail(&self, error: DeviceError) {
        self.member.team.fail(error);
    }
}

/// Iterator of [`Work::chunks`].
pub(crate) struct Chunks<'a> {
    team: &'a Team<'a>,
    claims: Option<&'a AtomicUsize>,
    next: usize,
    total: usize,
    grain: usize,
}

impl Iterator for Chunks<'_> {
    type Item = Range<usize>;

    fn next(&mut self) -> Option<Range<usize>> {
        if self.next >= self.total || self.team.stopping() {
            return None;
        }
        let start = match self.claims {
            Some(claims) => claims.fetch_add(self.grain, Ordering::Relaxed),
            None => self.next,
        };
        self.next = start.saturating_add(self.grain);
        (start < self.total).then(|| start..self.next.min(self.total))
    }
}

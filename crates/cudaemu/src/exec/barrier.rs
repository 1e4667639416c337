//! Block barriers: the sixteen `bar` barriers of a block and its cluster barrier.

use crate::bytecode::{Barrier, BarrierKind};
use crate::fault::{Fault, FaultKind};
use crate::operands::Args;

use crate::exec_context::{ExecContext, Registers};

/// Number of `bar` barriers of a block.
const BARRIERS: usize = 16;
/// Index of the cluster barrier, which has separate instructions to arrive and to wait. A cluster is always one block here.
const CLUSTER: usize = BARRIERS;

/// Lanes of a warp that execute a barrier instruction.
pub(super) struct Arrival {
    pub(super) warp: usize,
    pub(super) mask: u32,
    /// Lanes of the warp that have not exited.
    pub(super) live: u32,
    pub(super) barrier: Barrier,
}

/// Released lanes of a warp, with the results of a reduction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Released {
    pub(super) mask: u32,
    popc: u32,
    and: bool,
    or: bool,
}

impl Released {
    /// Writes a reduction's result to its destination, the first operand.
    pub(super) fn deliver(&self, kind: BarrierKind, regs: &mut Registers, args: &Args) {
        match kind {
            BarrierKind::Sync | BarrierKind::Arrive => {}
            BarrierKind::RedPopc => regs.set(args.s[0], &[self.popc; 32], self.mask),
            BarrierKind::RedAnd => regs.set_pred(args.s[0], if self.and { u32::MAX } else { 0 }, self.mask),
            BarrierKind::RedOr => regs.set_pred(args.s[0], if self.or { u32::MAX } else { 0 }, self.mask),
        }
    }
}

/// State of one barrier between its first arrival and its completion.
#[derive(Clone, Debug, Default)]
struct BarrierState {
    /// Threads that have arrived; an aligned instruction with a thread count counts a whole warp as 32.
    arrived: u32,
    /// Reduction: threads whose predicate was true, and all threads that contributed one.
    held: u32,
    asked: u32,
    /// The expected number of threads; 0 means all threads of the block that have not exited.
    expected: u32,
    /// (warp, lanes) that wait.
    waiting: Vec<(usize, u32)>,
    /// Lanes of each warp that have arrived at the cluster barrier.
    lanes: [u32; 32],
}

/// The barriers of one block.
#[derive(Debug, Default)]
pub(super) struct Barriers {
    states: [BarrierState; BARRIERS + 1],
    /// Threads that have not exited.
    live: u32,
    /// (warp, lanes and results) that a completed barrier releases.
    released: Vec<(usize, Released)>,
    /// (barrier, mask of waiting warps) of completed barriers, for the race checker.
    completed: Vec<(u32, u32)>,
}

impl Barriers {
    /// Resets all barriers for the next block.
    pub(super) fn reset(&mut self, threads: u32) {
        self.states = Default::default();
        self.live = threads;
        self.released.clear();
        self.completed.clear();
    }

    /// Takes the released lanes of this warp.
    pub(super) fn released(&mut self, warp: usize) -> Vec<Released> {
        if self.released.is_empty() {
            return Vec::new();
        }
        let mine = self.released.extract_if(.., |(w, _)| *w == warp);
        mine.map(|(_, released)| released).collect()
    }

    /// Removes exited threads: no barrier waits for them any more.
    pub(super) fn exited(&mut self, warp: usize, lanes: u32) {
        self.live = self.live.saturating_sub(lanes.count_ones());
        // Exited lanes that arrived at the cluster barrier without waiting no longer count.
        let cluster = &mut self.states[CLUSTER];
        cluster.arrived -= (cluster.lanes[warp] & lanes).count_ones();
        cluster.lanes[warp] &= !lanes;
        for number in 0..=CLUSTER {
            self.complete_if_due(number);
        }
    }

    /// Takes the barriers completed since the last call, with the warps that waited at them.
    pub(super) fn completed(&mut self) -> std::vec::Drain<'_, (u32, u32)> {
        self.completed.drain(..)
    }

    /// Counts the arrival of lanes; returns whether they must wait.
    pub(super) fn arrive(
        &mut self,
        arrival: &Arrival,
        args: &Args,
        cx: &mut ExecContext<'_>,
    ) -> Result<bool, Box<Fault>> {
        let Arrival { warp, mask, live, barrier } = *arrival;
        let lane = mask.trailing_zeros() as usize & 31;
        let reduces = !matches!(barrier.kind, BarrierKind::Sync | BarrierKind::Arrive);
        let mut operands = args.s.iter().skip(usize::from(reduces));
        let mut next = || operands.next().copied().unwrap_or_default();
        if args.s[0].is_none() {
            return Ok(self.cluster(arrival, cx));
        }
        let number = cx.regs.get::<u32>(next())[lane];
        let count = if barrier.counted { cx.regs.get::<u32>(next())[lane] } else { 0 };
        let predicate = if reduces { cx.regs.pred(next()) & mask } else { 0 };

        let invalid = |text: String| Err(Fault::new(FaultKind::InvalidValue(text), lane));
        if number as usize >= BARRIERS {
            return invalid(format!("barrier {number}; there are 0 to {}", BARRIERS - 1));
        }
        if barrier.counted && (count == 0 || !count.is_multiple_of(32) || count > 1024) {
            return invalid(format!(
                "a barrier for {count} threads; it must be a multiple of the warp size, at most 1024"
            ));
        }
        if barrier.aligned && mask != live {
            let text = format!(
                "lanes {mask:#010x} of warp {warp} are at barrier {number}, lanes {:#010x} are not; all must reach it together",
                live & !mask
            );
            cx.report_kind(FaultKind::DivergentBarrier(text), lane)?;
        }
        let state = &mut self.states[number as usize];
        if state.arrived > 0 && state.expected != count {
            let text = format!("barrier {number} is awaited by {} threads and by {count}", state.expected);
            return invalid(text);
        }
        state.expected = count;
        state.arrived += if barrier.aligned && barrier.counted { 32 } else { mask.count_ones() };
        state.held += predicate.count_ones();
        state.asked += mask.count_ones();
        cx.shared.arrive(number, warp as u32);
        let waits = barrier.kind != BarrierKind::Arrive;
        if waits {
            state.waiting.push((warp, mask));
        }
        self.complete_if_due(number as usize);
        Ok(waits)
    }

    /// `barrier.cluster.arrive` counts an arrival; `.wait` waits for the phase in which the warp arrived.
    fn cluster(&mut self, arrival: &Arrival, cx: &mut ExecContext<'_>) -> bool {
        let state = &mut self.states[CLUSTER];
        if arrival.barrier.kind == BarrierKind::Arrive {
            state.arrived += (arrival.mask & !state.lanes[arrival.warp]).count_ones();
            state.lanes[arrival.warp] |= arrival.mask;
            cx.shared.arrive(CLUSTER as u32, arrival.warp as u32);
            self.complete_if_due(CLUSTER);
            return false;
        }
        let waits = state.lanes[arrival.warp] & arrival.mask != 0;
        if waits {
            state.waiting.push((arrival.warp, arrival.mask));
        }
        waits
    }

    fn complete_if_due(&mut self, number: usize) {
        let state = &mut self.states[number];
        let expected = if state.expected == 0 { self.live } else { state.expected };
        if state.arrived == 0 || state.arrived < expected {
            return;
        }
        let done = std::mem::take(state);
        let (popc, and, or) = (done.held, done.held == done.asked, done.held > 0);
        self.released.extend(done.waiting.iter().map(|&(warp, mask)| (warp, Released { mask, popc, and, or })));
        // Warps that arrived at the cluster barrier and wait later will find it complete, so the race checker must order them
        // now.
        let came = (0..32).filter(|&warp| done.lanes[warp] != 0).fold(0, |warps, warp| warps | 1 << warp);
        let waited = done.waiting.iter().fold(came, |warps, &(warp, _)| warps | 1 << warp);
        self.completed.push((number as u32, waited));
    }

    /// Describes the threads that are missing, for the report of a deadlock.
    pub(super) fn describe(&self) -> String {
        let open = self.states.iter().enumerate().filter(|(_, s)| s.arrived > 0).map(|(number, s)| {
            let expected = if s.expected == 0 { self.live } else { s.expected };
            format!("barrier {number} has {} of {expected} threads", s.arrived)
        });
        let open: Vec<_> = open.collect();
        if open.is_empty() { "threads wait for lanes of their warp that cannot come".into() } else { open.join(", ") }
    }
}

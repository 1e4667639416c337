//! What happens before what, among the warps of a block: vector clocks.
//!
//! A warp's clock ticks when it synchronises. `seen[w][u]` is the clock of warp `u` up to which its accesses are ordered before
//! what warp `w` does now. Accesses of other lanes of the same warp are ordered if they are older than `whole[w]`, the
//! clock at which all its lanes met last; for lanes that met in part ([`Order::warp_sync`] with a part of the lanes), a
//! matrix tells. Threads that have exited count as arrived at every barrier.

use super::super::{LANES, Lanes};

/// Warps a block can have.
pub(super) const WARPS: usize = 32;

/// Block barriers that there are: `bar` 0 to 15, and the cluster's.
pub(super) const BARRIERS: usize = 17;

/// A clock beyond this makes the shadow forget ([`super::Shared`]), long before it overflows.
pub(super) const LAST_CLOCK: u32 = (1 << 26) - (1 << 16);

type Row = [u32; WARPS];

/// Who knows what.
#[derive(Debug)]
pub(super) struct VectorClocks {
    pub(super) clock: Row,
    seen: Box<[Row; WARPS]>,
    whole: Row,
    /// `lanes[w][l][m]`: accesses of lane `m` older than this are ordered before those of lane `l`. Only where a warp met in part.
    lanes: [Option<Box<Lanes<Row>>>; WARPS],
    /// What arrived at each barrier knows, and who arrived.
    barriers: [(Row, u32); BARRIERS],
    /// Accesses of any thread up to this clock are ordered before those of the warp.
    pub(super) settled: Row,
    /// … before those of every warp.
    pub(super) settled_for_all: u32,
    /// Warps of the block; of them, those that have exited.
    all: u32,
    exited: u32,
    /// A barrier of a part of the warps was used since the block began.
    pub(super) partial: bool,
}

fn warps(mask: u32) -> impl Iterator<Item = usize> {
    (0..WARPS).filter(move |&warp| mask >> warp & 1 != 0)
}

impl VectorClocks {
    pub(super) fn new(count: usize) -> Self {
        let all = if count >= WARPS { u32::MAX } else { (1 << count) - 1 };
        let mut order = Self {
            clock: [0; WARPS],
            seen: Box::new([[0; WARPS]; WARPS]),
            whole: [0; WARPS],
            lanes: [const { None }; WARPS],
            barriers: [([0; WARPS], 0); BARRIERS],
            settled: [0; WARPS],
            settled_for_all: 0,
            all,
            exited: 0,
            partial: false,
        };
        order.restart(1);
        order
    }

    /// Everything up to clock `past` is ordered before everything that comes.
    fn settle(&mut self, past: u32) {
        self.clock = [past + 1; WARPS];
        *self.seen = [[past; WARPS]; WARPS];
        self.whole = [past + 1; WARPS];
        self.settled = [past; WARPS];
        self.settled_for_all = past;
        self.lanes.iter_mut().for_each(|lanes| *lanes = None);
    }

    /// A new block, whose accesses have clocks above `past`.
    pub(super) fn restart(&mut self, past: u32) {
        self.settle(past);
        self.barriers = [([0; WARPS], 0); BARRIERS];
        self.exited = 0;
        self.partial = false;
    }

    /// The clocks start again; everything so far counts as ordered. Who arrived where is kept.
    pub(super) fn rewind(&mut self) {
        self.settle(1);
        self.barriers.iter_mut().for_each(|(known, _)| *known = [1; WARPS]);
    }

    /// The highest clock there is.
    pub(super) fn latest(&self) -> u32 {
        self.clock.iter().copied().max().unwrap_or(0)
    }

    /// All warps of the block that are left met.
    pub(super) fn synchronize_all(&mut self) {
        self.settle(self.latest());
    }

    /// A warp exited.
    pub(super) fn exit(&mut self, warp: usize) {
        self.exited |= 1 << warp;
    }

    /// A warp arrived at a barrier; what it does from now on is not covered by it.
    pub(super) fn arrive(&mut self, barrier: usize, warp: usize) {
        let (known, arrived) = &mut self.barriers[barrier];
        for other in 0..WARPS {
            known[other] = known[other].max(self.seen[warp][other]);
        }
        known[warp] = known[warp].max(self.clock[warp]);
        *arrived |= 1 << warp;
        self.clock[warp] += 1;
    }

    /// A barrier is complete: the warps that waited at it go on, knowing what all that arrived knew.
    pub(super) fn release(&mut self, barrier: usize, waiting: u32) {
        let (known, arrived) = std::mem::replace(&mut self.barriers[barrier], ([0; WARPS], 0));
        let left = self.all & !self.exited;
        if arrived & left == left && waiting & left == left {
            return self.synchronize_all();
        }
        self.partial = true;
        for warp in warps(waiting) {
            for other in 0..WARPS {
                let gone = if self.exited >> other & 1 != 0 { self.clock[other] } else { 0 };
                self.seen[warp][other] = self.seen[warp][other].max(known[other]).max(gone);
            }
            self.whole[warp] = self.clock[warp];
            self.lanes[warp] = None;
            self.settle_warp(warp);
        }
    }

    /// Lanes of a warp met (`bar.warp.sync`); `live` are those that have not exited.
    pub(super) fn warp_sync(&mut self, warp: usize, lanes: u32, live: u32) {
        self.clock[warp] += 1;
        let now = self.clock[warp];
        if lanes & live == live {
            self.whole[warp] = now;
            self.lanes[warp] = None;
            return self.settle_warp(warp);
        }
        let whole = self.whole[warp];
        let matrix = self.lanes[warp].get_or_insert_with(|| Box::new([[whole; LANES]; LANES]));
        let mut known = [0; LANES];
        for lane in super::lanes(lanes) {
            for other in 0..LANES {
                known[other] = known[other].max(matrix[lane][other]);
            }
        }
        super::lanes(lanes).for_each(|lane| known[lane] = now);
        super::lanes(lanes).for_each(|lane| matrix[lane] = known);
    }

    fn settle_warp(&mut self, warp: usize) {
        let others = warps(self.all).filter(|&other| other != warp).map(|other| self.seen[warp][other]);
        self.settled[warp] = others.min().unwrap_or(u32::MAX).min(self.whole[warp] - 1);
    }

    /// Whether an access of thread `earlier` at `clock` is ordered before what thread `now` does (threads: warp * 32 + lane).
    pub(super) fn ordered(&self, earlier: usize, clock: u32, now: usize) -> bool {
        let (warp, lane) = (now / LANES, now % LANES);
        let (old_warp, old_lane) = (earlier / LANES, earlier % LANES);
        if earlier == now || clock <= self.settled[warp] {
            return true;
        }
        if old_warp != warp {
            return clock <= self.seen[warp][old_warp];
        }
        clock < self.whole[warp] || self.lanes[warp].as_ref().is_some_and(|matrix| clock < matrix[lane][old_lane])
    }
}

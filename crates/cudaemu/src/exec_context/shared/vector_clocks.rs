//! Vector clocks: the happens-before order of accesses among the warps of a block.
//!
//! A warp's clock advances when it synchronises. `seen[w][u]` is the clock of warp `u` up to which its accesses happen before
//! the next access of warp `w`. Accesses of other lanes of the same warp are ordered if they are older than `whole[w]`, the
//! clock at which all its lanes last synchronised. If only a part of the lanes synchronised ([`VectorClocks::warp_sync`]), a
//! matrix over the lanes applies. Exited threads count as arrived at every barrier.

use super::super::{LANES, Lanes};

/// Maximum number of warps of a block.
pub(super) const WARPS: usize = 32;

/// Number of block barriers: `bar` 0 to 15 and the cluster barrier.
pub(super) const BARRIERS: usize = 17;

/// When a clock exceeds this limit, [`super::Shared`] restarts all clocks, long before they overflow their 26 bits.
pub(super) const LAST_CLOCK: u32 = (1 << 26) - (1 << 16);

type Row = [u32; WARPS];

/// Vector clocks of a block.
#[derive(Debug)]
pub(super) struct VectorClocks {
    pub(super) clock: Row,
    seen: Box<[Row; WARPS]>,
    whole: Row,
    /// `lanes[w][l][m]`: accesses of lane `m` older than this are ordered before those of lane `l`. Only for warps in which a
    /// part of the lanes synchronised.
    lanes: [Option<Box<Lanes<Row>>>; WARPS],
    /// For each barrier the joined clocks of the arrived warps, and the mask of these warps.
    barriers: [(Row, u32); BARRIERS],
    /// Per warp: accesses of any thread up to this clock are ordered before the warp's next access.
    pub(super) settled: Row,
    /// The minimum of `settled`: accesses up to this clock are ordered before every warp's next access.
    pub(super) settled_for_all: u32,
    /// Mask of the block's warps; `exited` is the subset that has exited.
    all: u32,
    exited: u32,
    /// Whether a barrier for a part of the warps was used since the block started.
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

    /// Orders everything up to clock `past` before all later accesses.
    fn settle(&mut self, past: u32) {
        self.clock = [past + 1; WARPS];
        *self.seen = [[past; WARPS]; WARPS];
        self.whole = [past + 1; WARPS];
        self.settled = [past; WARPS];
        self.settled_for_all = past;
        self.lanes.iter_mut().for_each(|lanes| *lanes = None);
    }

    /// Starts a new block, whose accesses have clocks above `past`.
    pub(super) fn restart(&mut self, past: u32) {
        self.settle(past);
        self.barriers = [([0; WARPS], 0); BARRIERS];
        self.exited = 0;
        self.partial = false;
    }

    /// Restarts the clocks; all accesses so far count as ordered. Arrivals at barriers are kept.
    pub(super) fn rewind(&mut self) {
        self.settle(1);
        self.barriers.iter_mut().for_each(|(known, _)| *known = [1; WARPS]);
    }

    /// The highest clock of any warp.
    pub(super) fn latest(&self) -> u32 {
        self.clock.iter().copied().max().unwrap_or(0)
    }

    /// Synchronises all warps of the block that have not exited.
    pub(super) fn synchronize_all(&mut self) {
        self.settle(self.latest());
    }

    /// Records that a warp exited.
    pub(super) fn exit(&mut self, warp: usize) {
        self.exited |= 1 << warp;
    }

    /// Records a warp's arrival at a barrier, which does not order the warp's later accesses.
    pub(super) fn arrive(&mut self, barrier: usize, warp: usize) {
        let (known, arrived) = &mut self.barriers[barrier];
        for other in 0..WARPS {
            known[other] = known[other].max(self.seen[warp][other]);
        }
        known[warp] = known[warp].max(self.clock[warp]);
        *arrived |= 1 << warp;
        self.clock[warp] += 1;
    }

    /// Completes a barrier: everything before any arrival is ordered before the next access of the waiting warps.
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

    /// Synchronises lanes of a warp (`bar.warp.sync`); `live` are the lanes that have not exited.
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

    /// Whether an access of thread `earlier` at `clock` happens before the next access of thread `now` (thread = warp * 32 +
    /// lane).
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

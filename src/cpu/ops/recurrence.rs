//! What the kernels of recurrent models share: how a state is divided among claims and a prompt into phases, and the loops
//! over rows of a state.
//!
//! A state consists of *units* that evolve independently of each other: rows of SSM_SCAN, RWKV_WKV7 and GATED_DELTA_NET, groups
//! of columns of RWKV_WKV6 and GATED_LINEAR_ATTN. A claim takes some units of one head through the tokens of a phase, in
//! scratch: it reads their state once and writes it once. A pause is possible between claims only, so a long prompt is divided
//! into phases. From phase to phase the state passes through the destination.

use crate::cpu::memory::View;
use crate::cpu::pool::KernelContext;
use crate::device::DeviceError;
use std::ops::Range;

/// Floats of state in a claim, unless one unit has more: as many as fit the L1 cache with the vectors of a token.
const CLAIM_STATE: usize = 6144;

/// Operations (see [`Kernel::new`](super::Kernel::new)) of a claim, unless one token has more: about half a millisecond.
const CLAIM_COST: usize = 1 << 21;

/// Operations for each element of a state and each token.
pub(super) const STATE_COST: usize = 4;

/// Claims per worker, to balance the load.
const CLAIMS_PER_WORKER: usize = 4;

/// Fewest units of a claim: with fewer, reading the vectors of a token would dominate.
const MIN_UNITS: usize = 4;

/// Division of a recurrence into phases and claims.
#[derive(Clone, Copy)]
pub(super) struct Recurrence {
    /// Independent states: heads of all sequences.
    states: usize,
    /// Units of a state.
    units: usize,
    /// Most units in a claim.
    max_units: usize,
    tokens: usize,
    tokens_per_phase: usize,
}

/// A claim: some units of one state, and some tokens.
pub(super) struct RecurrenceClaim {
    pub(super) state: usize,
    pub(super) units: Range<usize>,
    pub(super) tokens: Range<usize>,
}

/// Cost of a token of a claim, beside its state.
const TOKEN_COST: usize = 256;

impl Recurrence {
    /// `states` states of `units` units of `unit_floats` floats each, and `tokens` tokens for each state.
    pub(super) fn new(states: usize, units: usize, unit_floats: usize, tokens: usize) -> Recurrence {
        let max_units = (CLAIM_STATE / unit_floats.max(1)).clamp(1, units.max(1));
        let token_cost = max_units.saturating_mul(unit_floats).saturating_mul(STATE_COST).saturating_add(TOKEN_COST);
        Recurrence { states, units, max_units, tokens, tokens_per_phase: (CLAIM_COST / token_cost).max(1) }
    }

    /// The most units of a claim.
    pub(super) fn max_units(&self) -> usize {
        self.max_units
    }

    /// Barriers of [`Recurrence::each_claim`].
    pub(super) fn syncs(&self) -> usize {
        self.tokens.div_ceil(self.tokens_per_phase).saturating_sub(1)
    }

    /// Calls `each` for the claims of this worker, phase by phase. An error ends the run. Without tokens there is one phase, in which
    /// the claims copy the states to the destination.
    pub(super) fn each_claim(
        &self,
        ctx: &KernelContext<'_>,
        mut each: impl FnMut(RecurrenceClaim) -> Result<(), DeviceError>,
    ) {
        let all = self.states.saturating_mul(self.units);
        let fair = all.div_ceil(CLAIMS_PER_WORKER * ctx.dividing_workers().max(1));
        let units = fair.clamp(MIN_UNITS.min(self.max_units), self.max_units);
        let claims_per_state = self.units.div_ceil(units);
        for first in (0..self.tokens.max(1)).step_by(self.tokens_per_phase) {
            if first > 0 {
                ctx.sync();
            }
            let tokens = first..self.tokens.min(first + self.tokens_per_phase);
            for claim in ctx.chunks(self.states * claims_per_state, 1).flatten() {
                let (state, unit) = (claim / claims_per_state, claim % claims_per_state * units);
                let units = unit..self.units.min(unit + units);
                if let Err(error) = each(RecurrenceClaim { state, units, tokens: tokens.clone() }) {
                    return ctx.fail(error);
                }
            }
        }
    }
}

/// Cost of a recurrence for [`Kernel::new`](super::Kernel::new): `state` floats of all states, and the tokens of each.
pub(super) fn cost(state: usize, tokens: usize) -> usize {
    state.saturating_mul(STATE_COST).max(TOKEN_COST).saturating_mul(tokens.max(1))
}

/// Fills `out` with the elements of a vector from `start` on. Not [`View::fetch`]: the state is changed where it lies.
pub(super) fn load_flat(vector: &View<'_>, start: usize, out: &mut [f32]) {
    vector.load([start, 0, 0, 0], out);
}

/// Writes `values` to a vector from `start` on.
pub(super) fn store_flat(vector: &View<'_>, start: usize, values: &[f32]) {
    vector.store([start, 0, 0, 0], values);
}

/// Lanes of the sums of a row whose length is a multiple: four vectors of eight, because an addition waits four cycles for
/// the one before it.
const WIDE: usize = 32;

/// Lanes for other rows, such as the states of 16 elements of Mamba-1.
const NARROW: usize = 8;

/// `Σ row x`.
#[inline(always)]
pub(super) fn dot(row: &[f32], x: &[f32]) -> f32 {
    if row.len().is_multiple_of(WIDE) { dot_by::<WIDE>(row, x) } else { dot_by::<NARROW>(row, x) }
}

#[inline(always)]
fn dot_by<const L: usize>(row: &[f32], x: &[f32]) -> f32 {
    let ((row, row_rest), (x, x_rest)) = (row.as_chunks::<L>(), x.as_chunks::<L>());
    let mut sums = [0.0; L];
    for (row, x) in row.iter().zip(x) {
        for l in 0..L {
            sums[l] += row[l] * x[l];
        }
    }
    let mut total = 0.0;
    for (row, x) in row_rest.iter().zip(x_rest) {
        total += row * x;
    }
    add_lanes(sums) + total
}

/// `row = row decay + scale x`; returns `Σ row y`.
#[inline(always)]
pub(super) fn decay_add_dot(row: &mut [f32], decay: &[f32], (scale, x): (f32, &[f32]), y: &[f32]) -> f32 {
    if row.len().is_multiple_of(WIDE) {
        decay_add_dot_by::<WIDE>(row, decay, scale, x, y)
    } else {
        decay_add_dot_by::<NARROW>(row, decay, scale, x, y)
    }
}

#[inline(always)]
fn decay_add_dot_by<const L: usize>(row: &mut [f32], decay: &[f32], scale: f32, x: &[f32], y: &[f32]) -> f32 {
    let ((row, row_rest), (decay, decay_rest)) = (row.as_chunks_mut::<L>(), decay.as_chunks::<L>());
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<L>(), y.as_chunks::<L>());
    let mut sums = [0.0; L];
    for (((row, decay), x), y) in row.iter_mut().zip(decay).zip(x).zip(y) {
        for l in 0..L {
            let new = row[l] * decay[l] + scale * x[l];
            row[l] = new;
            sums[l] += new * y[l];
        }
    }
    let mut total = 0.0;
    for (((row, decay), x), y) in row_rest.iter_mut().zip(decay_rest).zip(x_rest).zip(y_rest) {
        *row = *row * decay + scale * x;
        total += *row * y;
    }
    add_lanes(sums) + total
}

/// `row = row decay + scale x + other_scale other`; returns `Σ row y`.
#[inline(always)]
pub(super) fn decay_add_two_dot(
    row: &mut [f32],
    decay: &[f32],
    first: (f32, &[f32]),
    second: (f32, &[f32]),
    y: &[f32],
) -> f32 {
    if row.len().is_multiple_of(WIDE) {
        decay_add_two_dot_by::<WIDE>(row, decay, first, second, y)
    } else {
        decay_add_two_dot_by::<NARROW>(row, decay, first, second, y)
    }
}

#[inline(always)]
fn decay_add_two_dot_by<const L: usize>(
    row: &mut [f32],
    decay: &[f32],
    (scale, x): (f32, &[f32]),
    (other_scale, other): (f32, &[f32]),
    y: &[f32],
) -> f32 {
    let ((row, row_rest), (decay, decay_rest)) = (row.as_chunks_mut::<L>(), decay.as_chunks::<L>());
    let ((x, x_rest), (other, other_rest)) = (x.as_chunks::<L>(), other.as_chunks::<L>());
    let (y, y_rest) = y.as_chunks::<L>();
    let mut sums = [0.0; L];
    for ((((row, decay), x), other), y) in row.iter_mut().zip(decay).zip(x).zip(other).zip(y) {
        for l in 0..L {
            let new = row[l] * decay[l] + scale * x[l] + other_scale * other[l];
            row[l] = new;
            sums[l] += new * y[l];
        }
    }
    let mut total = 0.0;
    for ((((row, decay), x), other), y) in row_rest.iter_mut().zip(decay_rest).zip(x_rest).zip(other_rest).zip(y_rest) {
        *row = *row * decay + scale * x + other_scale * other;
        total += *row * y;
    }
    add_lanes(sums) + total
}

/// The sum of all lanes, pairwise.
#[inline(always)]
fn add_lanes<const L: usize>(mut lanes: [f32; L]) -> f32 {
    let mut half = L / 2;
    while half > 0 {
        let (low, high) = lanes.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            *low += *high;
        }
        half /= 2;
    }
    lanes[0]
}

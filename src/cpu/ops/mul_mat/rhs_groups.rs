//! Groups of a product: which columns (rows of b) are multiplied by which matrix of a.
//!
//! A *group* is one matrix of a with all its *columns*: the planes of b that share a plane of a by broadcast, or the rows
//! routed to one expert. So each matrix is read once for all its columns.

use crate::cpu::memory::View;
use crate::cpu::ops::CHUNK;
use crate::cpu::pool::KernelContext;
use crate::device::DeviceError;
use crate::ops::OpCode;
use crate::ops::mul_mat::NO_EXPERT;
use crate::tensor::TensorDesc;

/// The groups of a node.
pub(super) enum RhsGroups<'a> {
    /// MUL_MAT: group `p3 * planes[0] + p2` is plane `[p2, p3]` of a with `r2 * r3` planes of b, each of `n` rows.
    Planes { n: usize, planes: [usize; 2], r2: usize, r3: usize },
    /// MUL_MAT_ID: the rows of each used expert. Group g is expert `experts[g]` with the slots
    /// `slots[starts[g]..starts[g + 1]]`; slot `t * used + e` is row `[t, e]` of the destination. `nb` is the number of rows of
    /// b per token. The slots after the last group's have no expert.
    Routed { experts: &'a [u32], starts: &'a [u32], slots: &'a [u32], used: usize, nb: usize },
}

/// A column: its row of b and its row of the destination, as `[i1, i2, i3]`.
#[derive(Clone, Copy, Default)]
pub(super) struct Column {
    pub(super) b: [usize; 3],
    pub(super) dst: [usize; 3],
}

/// Words of scratch for [`RhsGroups::routed`].
pub(super) fn routing_words(a: &TensorDesc, ids: &TensorDesc) -> usize {
    // Used experts, starts of all experts (one entry more than experts, and another one for counting), slots.
    2 * a.ne()[2] + 2 + ids.elements()
}

impl<'a> RhsGroups<'a> {
    /// The groups of MUL_MAT.
    pub(super) fn planes(a: &TensorDesc, b: &TensorDesc) -> RhsGroups<'a> {
        let (an, bn) = (a.ne(), b.ne());
        RhsGroups::Planes { n: bn[1], planes: [an[2], an[3]], r2: bn[2] / an[2], r3: bn[3] / an[3] }
    }

    /// The groups of MUL_MAT_ID, sorted into `words` (as many as [`routing_words`]). An id of [`NO_EXPERT`] is in no group.
    /// `None` if another id names no expert; the run has then failed.
    pub(super) fn routed(ctx: &KernelContext<'_>, words: &'a mut [u32]) -> Option<RhsGroups<'a>> {
        let (a, b, ids) = (ctx.src(0), ctx.src(1), ctx.src(2));
        let (count, [used, tokens, ..]) = (a.ne()[2], ids.ne());
        let (experts, words) = words.split_at_mut(count);
        let (starts, slots) = words.split_at_mut(count + 2);
        let id = |slot: usize| ids.index([slot % used, slot / used, 0, 0]);
        starts.fill(0);
        // Counting sort: `starts` holds the sizes shifted by two places, then the starts shifted by one; filling the slots
        // moves them into place.
        for slot in (0..used * tokens).filter(|&slot| id(slot) != NO_EXPERT) {
            let Some(expert) = usize::try_from(id(slot)).ok().filter(|&e| e < count) else {
                let reason = format!("expert id {} is out of range: the first source has {count} experts", id(slot));
                ctx.fail(DeviceError::Data { op: OpCode::MulMatId, reason });
                return None;
            };
            starts[expert + 2] += 1;
        }
        for e in 2..starts.len() {
            starts[e] += starts[e - 1];
        }
        let routed = starts[count + 1];
        let mut unrouted = routed;
        for slot in 0..used * tokens {
            // The ids are unchanged since the first pass: no node writes them during this one.
            let next = match id(slot) {
                NO_EXPERT => &mut unrouted,
                expert => &mut starts[expert as usize + 1],
            };
            slots[*next as usize] = slot as u32;
            *next += 1;
        }
        // Only used experts become groups.
        let mut groups = 0;
        for e in 0..count {
            let (start, end) = (starts[e], starts[e + 1]);
            if start < end {
                experts[groups] = e as u32;
                starts[groups] = start;
                groups += 1;
            }
        }
        starts[groups] = routed;
        Some(RhsGroups::Routed { experts: &experts[..groups], starts: &starts[..=groups], slots, used, nb: b.ne()[1] })
    }

    /// The slots whose id is [`NO_EXPERT`].
    pub(super) fn unrouted(&self) -> &[u32] {
        match self {
            RhsGroups::Planes { .. } => &[],
            RhsGroups::Routed { starts, slots, .. } => &slots[starts[starts.len() - 1] as usize..],
        }
    }

    /// Fills the row of the destination with zeros that belongs to an entry of [`RhsGroups::unrouted`].
    #[inline(never)] // keeps the loops over units short
    pub(super) fn clear_unrouted(&self, dst: &View<'_>, entry: usize) {
        let slot = self.unrouted()[entry] as usize;
        let used = dst.ne()[1];
        let (e, t) = (slot % used, slot / used);
        for start in (0..dst.ne()[0]).step_by(CHUNK) {
            dst.store([start, e, t, 0], &[0.0; CHUNK][..CHUNK.min(dst.ne()[0] - start)]);
        }
    }

    /// Number of groups.
    pub(super) fn len(&self) -> usize {
        match self {
            RhsGroups::Planes { planes, .. } => planes[0] * planes[1],
            RhsGroups::Routed { experts, .. } => experts.len(),
        }
    }

    /// Number of columns of a group.
    pub(super) fn count(&self, group: usize) -> usize {
        match self {
            RhsGroups::Planes { n, r2, r3, .. } => n * r2 * r3,
            RhsGroups::Routed { starts, .. } => (starts[group + 1] - starts[group]) as usize,
        }
    }

    /// Most columns of any group; an upper bound for MUL_MAT.
    pub(super) fn max_columns(&self) -> usize {
        match self {
            RhsGroups::Planes { .. } => self.count(0),
            RhsGroups::Routed { experts, .. } => (0..experts.len()).map(|g| self.count(g)).max().unwrap_or(0),
        }
    }

    /// The plane `[i2, i3]` of a that a group multiplies.
    pub(super) fn matrix(&self, group: usize) -> [usize; 2] {
        match self {
            RhsGroups::Planes { planes, .. } => [group % planes[0], group / planes[0]],
            RhsGroups::Routed { experts, .. } => [experts[group] as usize, 0],
        }
    }

    /// Column `c` of a group.
    pub(super) fn column(&self, group: usize, c: usize) -> Column {
        match *self {
            RhsGroups::Planes { n, planes, r2, r3 } => {
                let (i1, c) = (c % n, c / n);
                let (i2, i3) = (group % planes[0] * r2 + c % r2, group / planes[0] * r3 + c / r2);
                Column { b: [i1, i2, i3], dst: [i1, i2, i3] }
            }
            RhsGroups::Routed { starts, slots, used, nb, .. } => {
                let slot = slots[starts[group] as usize + c] as usize;
                let (e, t) = (slot % used, slot / used);
                Column { b: [e % nb, t, 0], dst: [e, t, 0] }
            }
        }
    }
}

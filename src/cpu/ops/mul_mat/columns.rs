//! Which rows of b meet which matrix of a.
//!
//! A *group* is one matrix of a and all *columns*, rows of b, that it is multiplied with: b's planes that share a plane
//! of a by broadcast, or the rows routed to one expert. So each matrix is read once for all that need it.

use crate::cpu::pool::Work;
use crate::device::DeviceError;
use crate::ops::OpCode;
use crate::tensor::TensorDesc;

/// The groups of a node.
pub(super) enum Columns<'a> {
    /// MUL_MAT: plane `[p3, p2]` of a and `r2 * r3` planes of b with `n` rows each.
    Planes { n: usize, planes: [usize; 2], r2: usize, r3: usize },
    /// MUL_MAT_ID: the rows of each expert that is used. Group g is expert `experts[g]` with the slots
    /// `slots[starts[g]..starts[g + 1]]`; slot `t * n_used + e` is row `[t, e]` of the destination.
    Routed { experts: &'a [u32], starts: &'a [u32], slots: &'a [u32], used: usize, nb: usize },
}

/// A column: the rows of b and of the destination, as `[i1, i2, i3]`.
#[derive(Clone, Copy, Default)]
pub(super) struct Column {
    pub(super) b: [usize; 3],
    pub(super) dst: [usize; 3],
}

/// Words of scratch for [`Columns::routed`].
pub(super) fn routing_words(a: &TensorDesc, ids: &TensorDesc) -> usize {
    // Experts in use, starts of all (one more than experts, and one more while counting), slots.
    2 * a.ne()[2] + 2 + ids.elements()
}

impl<'a> Columns<'a> {
    /// The groups of MUL_MAT.
    pub(super) fn planes(a: &TensorDesc, b: &TensorDesc) -> Columns<'a> {
        let (an, bn) = (a.ne(), b.ne());
        Columns::Planes { n: bn[1], planes: [an[2], an[3]], r2: bn[2] / an[2], r3: bn[3] / an[3] }
    }

    /// The groups of MUL_MAT_ID, sorted into `words` (of [`routing_words`]); `None`, and the run has failed, when an id
    /// is no expert.
    pub(super) fn routed(work: &Work<'_>, words: &'a mut [u32]) -> Option<Columns<'a>> {
        let (a, b, ids) = (work.src(0), work.src(1), work.src(2));
        let (count, [used, tokens, ..]) = (a.ne()[2], ids.ne());
        let (experts, words) = words.split_at_mut(count);
        let (starts, slots) = words.split_at_mut(count + 2);
        let id = |slot: usize| ids.index([slot % used, slot / used, 0, 0]);
        starts.fill(0);
        // Counting sort: sizes two places further, then starts one place further, which filling moves into place.
        for slot in 0..used * tokens {
            let Some(expert) = usize::try_from(id(slot)).ok().filter(|&e| e < count) else {
                let reason = format!("expert id {} is not one of the {count} of the first source", id(slot));
                work.fail(DeviceError::Data { op: OpCode::MulMatId, reason });
                return None;
            };
            starts[expert + 2] += 1;
        }
        for e in 2..starts.len() {
            starts[e] += starts[e - 1];
        }
        for slot in 0..used * tokens {
            // The ids cannot have changed: no node writes them now.
            let next = &mut starts[id(slot) as usize + 1];
            slots[*next as usize] = slot as u32;
            *next += 1;
        }
        // Only experts in use become groups.
        let mut groups = 0;
        for e in 0..count {
            let (start, end) = (starts[e], starts[e + 1]);
            if start < end {
                experts[groups] = e as u32;
                starts[groups] = start;
                groups += 1;
            }
        }
        starts[groups] = (used * tokens) as u32;
        Some(Columns::Routed { experts: &experts[..groups], starts: &starts[..=groups], slots, used, nb: b.ne()[1] })
    }

    /// Number of groups.
    pub(super) fn groups(&self) -> usize {
        match self {
            Columns::Planes { planes, .. } => planes[0] * planes[1],
            Columns::Routed { experts, .. } => experts.len(),
        }
    }

    /// Columns of a group.
    pub(super) fn count(&self, group: usize) -> usize {
        match self {
            Columns::Planes { n, r2, r3, .. } => n * r2 * r3,
            Columns::Routed { starts, .. } => (starts[group + 1] - starts[group]) as usize,
        }
    }

    /// Most columns of a group, or more.
    pub(super) fn most(&self) -> usize {
        match self {
            Columns::Planes { .. } => self.count(0),
            Columns::Routed { experts, .. } => (0..experts.len()).map(|g| self.count(g)).max().unwrap_or(0),
        }
    }

    /// The plane `[i2, i3]` of a.
    pub(super) fn matrix(&self, group: usize) -> [usize; 2] {
        match self {
            Columns::Planes { planes, .. } => [group % planes[0], group / planes[0]],
            Columns::Routed { experts, .. } => [experts[group] as usize, 0],
        }
    }

    /// Column `c` of a group.
    pub(super) fn column(&self, group: usize, c: usize) -> Column {
        match *self {
            Columns::Planes { n, planes, r2, r3 } => {
                let (i1, c) = (c % n, c / n);
                let (i2, i3) = (group % planes[0] * r2 + c % r2, group / planes[0] * r3 + c / r2);
                Column { b: [i1, i2, i3], dst: [i1, i2, i3] }
            }
            Columns::Routed { starts, slots, used, nb, .. } => {
                let slot = slots[starts[group] as usize + c] as usize;
                let (e, t) = (slot % used, slot / used);
                Column { b: [e % nb, t, 0], dst: [e, t, 0] }
            }
        }
    }
}

//! Runs of nodes on one device, and what they need from elsewhere.
//!
//! All nodes that write a slot run on its home, so within a split nothing changes that comes from elsewhere: a replica has
//! what the nodes before its first split left in the slot, and serves later splits until a node writes there again.

use super::{Assignment, Replica, ReplicaOrigin, Split, SplitGraph, Storage, Task};
use crate::graph::{Node, Tensor, TensorId};
use crate::ops::OpCode;
use crate::tensor::TensorDesc;
use std::ops::Range;

#[cfg(test)]
mod tests;

/// Cuts the list of nodes where the device changes, and before each node for which a weight is brought from elsewhere, so
/// that this happens just before it is used.
pub(crate) fn split(task: &Task, assigned: &[Assignment]) -> SplitGraph {
    let nodes = task.graph().nodes();
    let homes = home_devices(task, assigned);
    let mut pass = SplitPass {
        task,
        written: written_slots(task),
        live: vec![Vec::new(); homes.len()],
        needs: Vec::new(),
        cut: SplitGraph { homes, ..SplitGraph::default() },
    };
    let mut start = 0;
    for (at, (node, &Assignment { device, .. })) in nodes.iter().zip(assigned).enumerate() {
        if start < at && (assigned[start].device != device || pass.needs_weight_copy(node, device)) {
            pass.close_split(start..at, assigned[start].device);
            start = at;
        }
        pass.note_reads(at, node, device);
    }
    let end = nodes.len().min(assigned.len());
    if start < end {
        pass.close_split(start..end, assigned[start].device);
    }
    pass.cut
}

/// By slot: whether a node writes it.
pub(super) fn written_slots(task: &Task) -> Vec<bool> {
    let mut written = vec![false; task.storage().len()];
    for (slot, _) in task.graph().nodes().iter().filter_map(|node| task.write_range(node)) {
        written[slot as usize] = true;
    }
    written
}

fn home_devices(task: &Task, assigned: &[Assignment]) -> Vec<Option<usize>> {
    let stored = |s: &Storage| match *s {
        Storage::Stored { device, .. } => Some(device),
        Storage::Input | Storage::Computed => None,
    };
    let mut homes = task.storage().iter().map(stored).collect::<Vec<_>>();
    for (node, at) in task.graph().nodes().iter().zip(assigned) {
        if let Some((slot, _)) = task.write_range(node) {
            homes[slot as usize].get_or_insert(at.device);
        }
    }
    homes
}

/// Bytes from elsewhere that nodes of the current split read.
#[derive(Clone, Debug)]
struct RemoteRead {
    slot: u32,
    range: Range<usize>,
    /// The numbers of the experts to bring, where they are all that is read.
    experts: Option<TensorId>,
    /// The last node that reads them.
    last: usize,
}

struct SplitPass<'a> {
    task: &'a Task,
    /// By slot: whether any node writes it.
    written: Vec<bool>,
    /// By slot: replicas made since it was last written, which have all of their bytes.
    live: Vec<Vec<u32>>,
    needs: Vec<RemoteRead>,
    cut: SplitGraph,
}

impl SplitPass<'_> {
    /// Whether a node reads stored memory of another device which no node writes.
    fn is_weight_elsewhere(&self, slot: u32, device: usize) -> bool {
        let at = slot as usize;
        let stored = matches!(self.task.storage()[at], Storage::Stored { .. });
        stored && !self.written[at] && self.cut.homes[at] != Some(device)
    }

    /// Whether a node reads such memory that its device has not got so far.
    fn needs_weight_copy(&self, node: &Node, device: usize) -> bool {
        self.task.reads(node).any(|(_, slot, range)| {
            let here = |need: &RemoteRead| need.slot == slot && need.experts.is_none() && contains(&need.range, &range);
            self.is_weight_elsewhere(slot, device)
                && self.replica(slot, device, &range).is_none()
                && !self.needs.iter().any(here)
        })
    }

    /// A replica on a device that has these bytes as they are now.
    fn replica(&self, slot: u32, device: usize, range: &Range<usize>) -> Option<u32> {
        let replica = |&&i: &&u32| {
            let replica = &self.cut.replicas[i as usize];
            replica.device == device && replica.covers(slot, range)
        };
        self.live[slot as usize].iter().find(replica).copied()
    }

    /// Notes what a node of the current split reads from elsewhere.
    fn note_reads(&mut self, last: usize, node: &Node, device: usize) {
        for (id, slot, range) in self.task.reads(node) {
            if self.cut.homes[slot as usize] != Some(device) {
                let chosen = node.op.code() == OpCode::MulMatId && node.srcs[0] == Some(id);
                let apart = chosen && self.is_weight_elsewhere(slot, device) && self.experts_are_contiguous(id);
                let experts = node.srcs[2].filter(|_| apart);
                self.needs.push(RemoteRead { slot, range, experts, last });
            }
        }
    }

    /// Whether each expert's bytes lie together, before those of the next one: a permuted tensor's may not.
    fn experts_are_contiguous(&self, id: TensorId) -> bool {
        let Some(Tensor { desc, .. }) = self.task.graph().tensor(id) else { return false };
        let (ne, nb) = (desc.ne(), desc.nb());
        let row = TensorDesc::default_strides(desc.dtype(), ne).map_or(usize::MAX, |packed| packed[1]);
        row <= nb[1] && nb[1].saturating_mul(ne[1]) <= nb[2]
    }

    /// Ends the current split: finds or makes its replicas, then lets its nodes write.
    fn close_split(&mut self, nodes: Range<usize>, device: usize) {
        let mut needs = std::mem::take(&mut self.needs);
        // A replica that serves may reach into another need, or into a replica that serves that one: then one has to have
        // both.
        loop {
            merge_overlapping(&mut needs);
            let mut grown = false;
            for need in &mut needs {
                if let Some(found) = self.replica(need.slot, device, &need.range) {
                    let range = &self.cut.replicas[found as usize].range;
                    grown |= need.range != *range;
                    need.range = range.clone();
                    need.experts = None;
                }
            }
            if !grown {
                break;
            }
        }
        let mut reads = Vec::with_capacity(needs.len());
        for RemoteRead { slot, range, experts, last } in needs.drain(..) {
            let number = self.replica(slot, device, &range).unwrap_or_else(|| {
                let number = self.cut.replicas.len() as u32;
                let origin = match (self.cut.homes[slot as usize], experts) {
                    (None, _) => ReplicaOrigin::Host,
                    (Some(home), None) => ReplicaOrigin::Device(home),
                    (Some(home), Some(ids)) => ReplicaOrigin::Experts { home, ids },
                };
                if experts.is_none() {
                    self.live[slot as usize].push(number);
                }
                self.cut.replicas.push(Replica {
                    device,
                    slot,
                    range,
                    origin,
                    first_split: self.cut.splits.len(),
                    last_node: last,
                });
                number
            });
            self.cut.replicas[number as usize].last_node = last;
            reads.push(number);
        }
        self.needs = needs;
        for node in &self.task.graph().nodes()[nodes.clone()] {
            if let Some((slot, _)) = self.task.write_range(node) {
                self.live[slot as usize].clear();
            }
        }
        self.cut.splits.push(Split { device, nodes, reads });
    }
}

fn contains(outer: &Range<usize>, inner: &Range<usize>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

/// Sorts needs by slot and range, and makes one of those that overlap.
fn merge_overlapping(needs: &mut Vec<RemoteRead>) {
    needs.sort_by_key(|need| (need.slot, need.range.start));
    needs.dedup_by(|next, need| {
        let overlap = next.slot == need.slot && next.range.start < need.range.end;
        if overlap {
            need.range.end = need.range.end.max(next.range.end);
            need.experts = None;
            need.last = need.last.max(next.last);
        }
        overlap
    });
}

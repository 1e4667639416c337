//! Split pass: partitions the node list into splits (consecutive nodes on one device) and determines their replicas.
//!
//! Each slot that is stored on a device or written by a node has a home device, on which all nodes that write the slot run. So
//! while a split runs, no node writes a slot whose home is another device, and a replica made before a split stays valid
//! throughout it. Later splits reuse the replica until a node writes the slot again.

use super::{Assignment, Replica, ReplicaOrigin, Split, SplitGraph, Storage, Task};
use crate::graph::{Node, Tensor, TensorId};
use crate::ops::OpCode;
use crate::tensor::TensorDesc;
use std::ops::Range;

#[cfg(test)]
mod tests;

/// Starts a new split where the device changes, and before each node that is the first to read a weight of another device: the
/// weight is then copied just before its first use.
pub(crate) fn split(task: &Task, assigned: &[Assignment]) -> SplitGraph {
    let nodes = task.graph().nodes();
    let homes = home_devices(task, assigned);
    let mut pass = SplitPass {
        task,
        written: written_slots(task),
        live: vec![Vec::new(); homes.len()],
        remote_reads: Vec::new(),
        split_graph: SplitGraph { homes, ..SplitGraph::default() },
    };
    let mut start = 0;
    for (at, (node, &Assignment { device, .. })) in nodes.iter().zip(assigned).enumerate() {
        if start < at && (assigned[start].device != device || pass.needs_weight_copy(node, device)) {
            pass.close_split(start..at, assigned[start].device);
            start = at;
        }
        pass.record_reads(at, node, device);
    }
    let end = nodes.len().min(assigned.len());
    if start < end {
        pass.close_split(start..end, assigned[start].device);
    }
    pass.split_graph
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
    for (node, assignment) in task.graph().nodes().iter().zip(assigned) {
        if let Some((slot, _)) = task.write_range(node) {
            homes[slot as usize].get_or_insert(assignment.device);
        }
    }
    homes
}

/// Bytes of a slot on another device that nodes of the current split read.
#[derive(Clone, Debug)]
struct RemoteRead {
    slot: u32,
    range: Range<usize>,
    /// The tensor with the expert ids, if only the experts that it names are read.
    experts: Option<TensorId>,
    /// The last node that reads the bytes.
    last: usize,
}

struct SplitPass<'a> {
    task: &'a Task,
    /// By slot: whether any node writes it.
    written: Vec<bool>,
    /// By slot: complete replicas made since a node last wrote the slot.
    live: Vec<Vec<u32>>,
    remote_reads: Vec<RemoteRead>,
    split_graph: SplitGraph,
}

impl SplitPass<'_> {
    /// Whether a slot is a weight (stored, and written by no node) of another device.
    fn is_weight_elsewhere(&self, slot: u32, device: usize) -> bool {
        let at = slot as usize;
        let stored = matches!(self.task.storage()[at], Storage::Stored { .. });
        stored && !self.written[at] && self.split_graph.homes[at] != Some(device)
    }

    /// Whether a node reads a weight of another device and its own device has no replica of the weight yet.
    fn needs_weight_copy(&self, node: &Node, device: usize) -> bool {
        self.task.reads(node).any(|(_, slot, range)| {
            let already_read =
                |read: &RemoteRead| read.slot == slot && read.experts.is_none() && contains(&read.range, &range);
            self.is_weight_elsewhere(slot, device)
                && self.find_replica(slot, device, &range).is_none()
                && !self.remote_reads.iter().any(already_read)
        })
    }

    /// A replica on a device that holds the current contents of these bytes.
    fn find_replica(&self, slot: u32, device: usize, range: &Range<usize>) -> Option<u32> {
        let holds = |&&i: &&u32| {
            let replica = &self.split_graph.replicas[i as usize];
            replica.device == device && replica.covers(slot, range)
        };
        self.live[slot as usize].iter().find(holds).copied()
    }

    /// Records the reads of node `index` that are not on its device.
    fn record_reads(&mut self, index: usize, node: &Node, device: usize) {
        for (id, slot, range) in self.task.reads(node) {
            if self.split_graph.homes[slot as usize] != Some(device) {
                let is_expert_weight = node.op.code() == OpCode::MulMatId && node.srcs[0] == Some(id);
                let selectable =
                    is_expert_weight && self.is_weight_elsewhere(slot, device) && self.experts_are_separate(id);
                let experts = node.srcs[2].filter(|_| selectable);
                self.remote_reads.push(RemoteRead { slot, range, experts, last: index });
            }
        }
    }

    /// Whether each expert has a byte range of its own that overlaps no other expert. In a permuted tensor they may interleave.
    fn experts_are_separate(&self, id: TensorId) -> bool {
        let Some(Tensor { desc, .. }) = self.task.graph().tensor(id) else { return false };
        let (ne, nb) = (desc.ne(), desc.nb());
        let row = TensorDesc::default_strides(desc.dtype(), ne).map_or(usize::MAX, |packed| packed[1]);
        row <= nb[1] && nb[1].saturating_mul(ne[1]) <= nb[2]
    }

    /// Ends the current split: reuses or adds replicas for its reads, then invalidates replicas of the slots that its nodes
    /// write.
    fn close_split(&mut self, nodes: Range<usize>, device: usize) {
        let mut remote_reads = std::mem::take(&mut self.remote_reads);
        // Replicas of one slot must be disjoint. Extending a read to the range of the replica that it reuses may make it
        // overlap other reads of the slot, so ranges are merged until none grows any more.
        loop {
            merge_overlapping(&mut remote_reads);
            let mut grown = false;
            for read in &mut remote_reads {
                if let Some(found) = self.find_replica(read.slot, device, &read.range) {
                    let range = &self.split_graph.replicas[found as usize].range;
                    grown |= read.range != *range;
                    read.range = range.clone();
                    read.experts = None;
                }
            }
            if !grown {
                break;
            }
        }
        let mut reads = Vec::with_capacity(remote_reads.len());
        for RemoteRead { slot, range, experts, last } in remote_reads.drain(..) {
            let number = self.find_replica(slot, device, &range).unwrap_or_else(|| {
                let number = self.split_graph.replicas.len() as u32;
                let origin = match (self.split_graph.homes[slot as usize], experts) {
                    (None, _) => ReplicaOrigin::Host,
                    // Not beside collective nodes: the submitter would wait for the ids, and so for ranks that it has yet to submit.
                    (Some(home), Some(ids)) if self.task.collective_groups().is_empty() => {
                        ReplicaOrigin::Experts { home, ids }
                    }
                    (Some(home), _) => ReplicaOrigin::Device(home),
                };
                if experts.is_none() {
                    self.live[slot as usize].push(number);
                }
                self.split_graph.replicas.push(Replica {
                    device,
                    slot,
                    range,
                    origin,
                    first_split: self.split_graph.splits.len(),
                    last_node: last,
                });
                number
            });
            self.split_graph.replicas[number as usize].last_node = last;
            reads.push(number);
        }
        self.remote_reads = remote_reads;
        for node in &self.task.graph().nodes()[nodes.clone()] {
            if let Some((slot, _)) = self.task.write_range(node) {
                self.live[slot as usize].clear();
            }
        }
        self.split_graph.splits.push(Split { device, nodes, reads });
    }
}

fn contains(outer: &Range<usize>, inner: &Range<usize>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

/// Sorts reads by slot and range, and merges overlapping ones.
fn merge_overlapping(reads: &mut Vec<RemoteRead>) {
    reads.sort_by_key(|read| (read.slot, read.range.start));
    reads.dedup_by(|next, read| {
        let overlap = next.slot == read.slot && next.range.start < read.range.end;
        if overlap {
            read.range.end = read.range.end.max(next.range.end);
            read.experts = None;
            read.last = read.last.max(next.last);
        }
        overlap
    });
}

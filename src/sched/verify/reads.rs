//! The bytes that the nodes of a run read, and those that the host may read after it.

use crate::graph::Node;
use crate::ops::OpCode;
use crate::sched::{Plan, Storage};
use std::ops::Range;

/// A read of some bytes of a slot.
pub(super) struct Read {
    /// Its index among all reads of a run.
    pub(super) number: usize,
    pub(super) slot: u32,
    pub(super) range: Range<usize>,
    /// The reading node; `None` for a read by the host after the run.
    pub(super) node: Option<usize>,
}

/// All reads of a run.
pub(super) struct Reads {
    /// By node, in order.
    pub(super) nodes: Vec<Vec<Read>>,
    /// Slots that the host may read after the run: outputs, and stored slots that a node writes.
    pub(super) outputs: Vec<Read>,
    /// The total number of reads.
    pub(super) count: usize,
}

impl Reads {
    pub(super) fn new(plan: &Plan) -> Reads {
        let (graph, storage) = (plan.task.graph(), plan.task.storage());
        let mut count = 0;
        let mut read = |node, (slot, range): (u32, Range<usize>)| {
            count += 1;
            Read { number: count - 1, slot, range, node }
        };
        let mut nodes: Vec<Vec<Read>> = Vec::with_capacity(graph.nodes().len());
        let mut written = vec![false; storage.len()];
        for (at, node) in graph.nodes().iter().enumerate() {
            let sources = plan.task.reads(node).map(|(_, slot, range)| (slot, range));
            let old_contents = plan.task.write_range(node).filter(|_| keeps_rest(plan, node));
            nodes.push(sources.chain(old_contents).map(|of| read(Some(at), of)).collect());
            if let Some((slot, _)) = plan.task.write_range(node) {
                written[slot as usize] = true;
            }
        }
        let readable = |&slot: &u32| {
            let stored = matches!(storage[slot as usize], Storage::Stored { .. });
            written[slot as usize] && (stored || plan.task.is_output(slot))
        };
        let outputs = (0..storage.len() as u32).filter(readable);
        let outputs = outputs.map(|slot| read(None, (slot, 0..graph.slot_sizes()[slot as usize]))).collect();
        Reads { nodes, outputs, count }
    }
}

/// Whether a node leaves some of the bytes in its destination's span unchanged. The node then depends on their old contents.
fn keeps_rest(plan: &Plan, node: &Node) -> bool {
    let desc = plan.task.graph().tensor(node.dst).map(|tensor| tensor.desc);
    node.op.code() == OpCode::SetRows || desc.is_some_and(|desc| desc.extent() != desc.dense_bytes())
}

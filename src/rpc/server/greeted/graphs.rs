//! The graphs that a client has sent to be run by their numbers. The client counts as we do, and knows what is there.

use std::sync::Arc;

use super::super::Refusal;
use super::super::programs::{MAX_BYTES, MAX_PROGRAMS};
use crate::device::{Program, Region};
use crate::rpc::wire::ext::Fault;

/// A graph with all that it takes to run it.
pub(super) struct Kept {
    pub(super) id: u64,
    pub(super) device: u32,
    /// By [`graph_cost`](crate::rpc::wire::graph_cost).
    pub(super) cost: u64,
    /// Handles of the buffers that its tensors lie in.
    pub(super) buffers: Box<[u64]>,
    /// Why it cannot be run, which is said when it is.
    pub(super) made: Result<(Program, Arc<[Region]>), Fault>,
}

/// The kept graphs of a session, the longest unused first.
#[derive(Default)]
pub(super) struct Graphs {
    kept: Vec<Kept>,
    /// Costs of graphs that were dropped here and may wait in a queue yet.
    dropped: u64,
}

impl Graphs {
    pub(super) const MOST: usize = MAX_PROGRAMS;

    /// Bytes of host memory that they may take, about, which no account pays for; and as many again those that queues hold.
    pub(super) const BUDGET: u64 = MAX_BYTES as u64;

    /// Makes room for a graph, as `docs/protocol.md` says. True when the session must wait for its queues, and then call
    /// [`Graphs::settle`]: they may hold too much of what was dropped.
    pub(super) fn make_room(&mut self, id: u64, cost: u64) -> Result<bool, Refusal> {
        if self.kept.iter().any(|kept| kept.id == id) {
            return Err(Refusal::GraphKept(id));
        }
        let mut costs = self.costs();
        let mut gone = 0;
        for kept in &self.kept {
            if self.kept.len() - gone < Graphs::MOST && costs + cost <= Graphs::BUDGET {
                break;
            }
            costs -= kept.cost;
            gone += 1;
        }
        self.dropped += self.kept.drain(..gone).map(|kept| kept.cost).sum::<u64>();
        Ok(self.dropped > Graphs::BUDGET)
    }

    /// All work submitted so far is done: what was dropped is gone.
    pub(super) fn settle(&mut self) {
        self.dropped = 0;
    }

    /// Keeps a graph for which [`Graphs::make_room`] has made room.
    pub(super) fn keep(&mut self, graph: Kept) {
        self.kept.push(graph);
    }

    /// A graph that is used now.
    pub(super) fn find(&mut self, id: u64) -> Result<&Kept, Refusal> {
        let at = self.kept.iter().position(|kept| kept.id == id).ok_or(Refusal::NoKept(id))?;
        self.kept[at..].rotate_left(1);
        self.kept.last().ok_or(Refusal::NoKept(id))
    }

    /// Drops the graphs with a tensor in a buffer.
    pub(super) fn forget(&mut self, buffer: u64) {
        let before = self.costs();
        self.kept.retain(|kept| !kept.buffers.contains(&buffer));
        self.dropped += before - self.costs();
    }

    fn costs(&self) -> u64 {
        self.kept.iter().map(|kept| kept.cost).sum()
    }
}

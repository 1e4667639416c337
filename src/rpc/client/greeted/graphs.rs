//! Which graphs the server keeps. It says nothing about them: both ends count the same.

use std::collections::HashMap;

use super::super::connection::Turn;
use super::super::graph::Body;
use crate::device::DeviceError;
use crate::rpc::wire::ext::{ExtRequest, GreetReply, KeepGraph, RunGraph};
use crate::rpc::wire::{Command, Limits, REQUEST_HEADER, Request, graph_cost};

/// The graphs of a connection. Changes in the order of the messages.
#[derive(Debug, Default)]
pub(in super::super) struct Kept {
    /// What all of them may cost, and how many there may be.
    budget: u64,
    most: usize,
    /// What they do cost.
    cost: u64,
    /// By the numbers of their bodies.
    graphs: HashMap<u64, Graph>,
    /// Numbers that the server was given.
    named: u64,
    /// Counts uses.
    clock: u64,
}

#[derive(Debug)]
struct Graph {
    number: u64,
    cost: u64,
    used: u64,
    /// Handles of the buffers that its tensors lie in.
    buffers: Vec<u64>,
}

impl Kept {
    pub(in super::super) fn new(server: &GreetReply) -> Kept {
        Kept { budget: server.graph_budget, most: server.max_graphs as usize, ..Kept::default() }
    }

    /// The number of a graph that is there, which is used now.
    fn find(&mut self, body: u64) -> Option<u64> {
        self.clock += 1;
        let graph = self.graphs.get_mut(&body)?;
        graph.used = self.clock;
        Some(graph.number)
    }

    /// A number for a graph that comes: those used longest ago go until it has room.
    fn keep(&mut self, body: u64, cost: u64, buffers: Vec<u64>) -> u64 {
        let full = |kept: &Kept| kept.graphs.len() >= kept.most || kept.cost.saturating_add(cost) > kept.budget;
        while full(self)
            && let Some(&oldest) = self.graphs.iter().min_by_key(|(_, graph)| graph.used).map(|(body, _)| body)
        {
            self.cost -= self.graphs.remove(&oldest).map_or(0, |graph| graph.cost);
        }
        self.named += 1;
        self.clock += 1;
        self.cost += cost;
        self.graphs.insert(body, Graph { number: self.named, cost, used: self.clock, buffers });
        self.named
    }

    /// A buffer is freed: the graphs with a tensor in it go.
    pub(in super::super) fn free(&mut self, handle: u64) {
        for (_, graph) in self.graphs.extract_if(|_, graph| graph.buffers.contains(&handle)) {
            self.cost -= graph.cost;
        }
    }
}

impl Turn<'_> {
    /// Puts the messages that run a graph.
    pub(super) fn run(&mut self, queue: u32, body: &Body) -> Result<(), DeviceError> {
        let graph = match self.writer.kept.find(body.id()) {
            Some(number) => number,
            None => self.keep(body)?,
        };
        self.put(|out| ExtRequest::RunGraph(RunGraph { queue, graph }).encode(out));
        Ok(())
    }

    fn keep(&mut self, body: &Body) -> Result<u64, DeviceError> {
        let bug = |e: &dyn std::fmt::Display| DeviceError::Bug(format!("a graph that no message holds: {e}"));
        let bytes = body.frame().get(REQUEST_HEADER..).unwrap_or_default();
        let any = Limits { max_nodes: u32::MAX, max_tensors: u32::MAX, max_body: u64::MAX };
        let graph = match Request::decode(Command::GraphCompute, bytes, &any) {
            Ok(Request::GraphCompute(graph)) => graph,
            Ok(other) => return Err(bug(&other.command())),
            Err(e) => return Err(bug(&e)),
        };
        let mut buffers: Vec<u64> = graph.tensors().iter().map(|record| record.buffer).filter(|&b| b != 0).collect();
        buffers.sort_unstable();
        buffers.dedup();
        let id = self.writer.kept.keep(body.id(), graph_cost(bytes.len() as u64, &graph), buffers);
        self.put(|out| ExtRequest::KeepGraph(KeepGraph { id, graph }).encode(out));
        Ok(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(budget: u64, most: usize) -> Kept {
        Kept { budget, most, ..Kept::default() }
    }

    fn there(kept: &Kept) -> Vec<u64> {
        let mut bodies: Vec<_> = kept.graphs.keys().copied().collect();
        bodies.sort_unstable();
        bodies
    }

    #[test]
    fn those_used_longest_ago_go_first() {
        let mut by_count = kept(1000, 2);
        assert_eq!([by_count.keep(10, 1, vec![]), by_count.keep(11, 1, vec![])], [1, 2]);
        assert_eq!(by_count.find(10), Some(1));
        assert_eq!(by_count.keep(12, 1, vec![]), 3);
        assert_eq!((there(&by_count), by_count.find(11), by_count.cost), (vec![10, 12], None, 2));
        // The same body again, under a number of its own.
        assert_eq!(by_count.keep(11, 1, vec![]), 4);
        assert_eq!(there(&by_count), [11, 12]);
        let mut by_cost = kept(10, 100);
        for (body, cost) in [(1, 4), (2, 4), (3, 2)] {
            by_cost.keep(body, cost, vec![]);
        }
        assert_eq!(there(&by_cost), [1, 2, 3], "as much as there may be");
        by_cost.keep(4, 5, vec![]);
        assert_eq!((there(&by_cost), by_cost.cost), (vec![3, 4], 7));
        by_cost.keep(5, 99, vec![]);
        assert_eq!((there(&by_cost), by_cost.cost), (vec![5], 99), "one that is too large is alone");
    }

    #[test]
    fn graphs_go_with_their_buffers() {
        let mut kept = kept(100, 10);
        kept.keep(1, 3, vec![7]);
        kept.keep(2, 4, vec![8, 9]);
        kept.free(9);
        assert_eq!((there(&kept), kept.cost), (vec![1], 3));
        kept.free(5);
        assert_eq!(kept.find(1), Some(1));
    }
}

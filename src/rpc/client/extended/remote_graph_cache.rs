//! Which graphs the server keeps. It says nothing about them: both ends count the same.

use std::collections::HashMap;

use super::super::connection::WriteGuard;
use super::super::graph_messages::GraphMessage;
use crate::device::DeviceError;
use crate::rpc::wire::ext::{ExtRequest, GreetReply, KeepGraph, RunGraph};
use crate::rpc::wire::{Command, Limits, REQUEST_HEADER, Request, graph_cost};

/// The graphs of a connection. Changes in the order of the messages.
#[derive(Debug, Default)]
pub(in super::super) struct RemoteGraphCache {
    /// What all of them may cost, and how many there may be.
    budget: u64,
    max_graphs: usize,
    /// What they do cost.
    cost: u64,
    /// By the numbers of their bodies.
    graphs: HashMap<u64, CachedGraph>,
    /// Numbers that the server was given.
    last_id: u64,
    /// Counts uses.
    clock: u64,
}

#[derive(Debug)]
struct CachedGraph {
    id: u64,
    cost: u64,
    last_used: u64,
    /// Handles of the buffers that its tensors lie in.
    buffers: Vec<u64>,
}

impl RemoteGraphCache {
    pub(in super::super) fn new(server: &GreetReply) -> RemoteGraphCache {
        RemoteGraphCache {
            budget: server.graph_budget,
            max_graphs: server.max_graphs as usize,
            ..RemoteGraphCache::default()
        }
    }

    /// The number of a graph that is there, which is used now.
    fn use_cached(&mut self, body: u64) -> Option<u64> {
        self.clock += 1;
        let graph = self.graphs.get_mut(&body)?;
        graph.last_used = self.clock;
        Some(graph.id)
    }

    /// A number for a graph that comes: those used longest ago go until it has room.
    fn insert(&mut self, body: u64, cost: u64, buffers: Vec<u64>) -> u64 {
        let full = |kept: &RemoteGraphCache| {
            kept.graphs.len() >= kept.max_graphs || kept.cost.saturating_add(cost) > kept.budget
        };
        while full(self)
            && let Some(&oldest) = self.graphs.iter().min_by_key(|(_, graph)| graph.last_used).map(|(body, _)| body)
        {
            self.cost -= self.graphs.remove(&oldest).map_or(0, |graph| graph.cost);
        }
        self.last_id += 1;
        self.clock += 1;
        self.cost += cost;
        self.graphs.insert(body, CachedGraph { id: self.last_id, cost, last_used: self.clock, buffers });
        self.last_id
    }

    /// A buffer is freed: the graphs with a tensor in it go.
    pub(in super::super) fn evict_buffer(&mut self, handle: u64) {
        for (_, graph) in self.graphs.extract_if(|_, graph| graph.buffers.contains(&handle)) {
            self.cost -= graph.cost;
        }
    }
}

impl WriteGuard<'_> {
    /// Puts the messages that run a graph.
    pub(super) fn run_graph(&mut self, queue: u32, body: &GraphMessage) -> Result<(), DeviceError> {
        let graph = match self.writer.graph_cache.use_cached(body.id()) {
            Some(number) => number,
            None => self.keep_graph(body)?,
        };
        self.buffer(|out| ExtRequest::RunGraph(RunGraph { queue, graph }).encode(out));
        Ok(())
    }

    fn keep_graph(&mut self, body: &GraphMessage) -> Result<u64, DeviceError> {
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
        let id = self.writer.graph_cache.insert(body.id(), graph_cost(bytes.len() as u64, &graph), buffers);
        self.buffer(|out| ExtRequest::KeepGraph(KeepGraph { id, graph }).encode(out));
        Ok(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(budget: u64, most: usize) -> RemoteGraphCache {
        RemoteGraphCache { budget, max_graphs: most, ..RemoteGraphCache::default() }
    }

    fn there(kept: &RemoteGraphCache) -> Vec<u64> {
        let mut bodies: Vec<_> = kept.graphs.keys().copied().collect();
        bodies.sort_unstable();
        bodies
    }

    #[test]
    fn those_used_longest_ago_go_first() {
        let mut by_count = kept(1000, 2);
        assert_eq!([by_count.insert(10, 1, vec![]), by_count.insert(11, 1, vec![])], [1, 2]);
        assert_eq!(by_count.use_cached(10), Some(1));
        assert_eq!(by_count.insert(12, 1, vec![]), 3);
        assert_eq!((there(&by_count), by_count.use_cached(11), by_count.cost), (vec![10, 12], None, 2));
        // The same body again, under a number of its own.
        assert_eq!(by_count.insert(11, 1, vec![]), 4);
        assert_eq!(there(&by_count), [11, 12]);
        let mut by_cost = kept(10, 100);
        for (body, cost) in [(1, 4), (2, 4), (3, 2)] {
            by_cost.insert(body, cost, vec![]);
        }
        assert_eq!(there(&by_cost), [1, 2, 3], "as much as there may be");
        by_cost.insert(4, 5, vec![]);
        assert_eq!((there(&by_cost), by_cost.cost), (vec![3, 4], 7));
        by_cost.insert(5, 99, vec![]);
        assert_eq!((there(&by_cost), by_cost.cost), (vec![5], 99), "one that is too large is alone");
    }

    #[test]
    fn graphs_go_with_their_buffers() {
        let mut kept = kept(100, 10);
        kept.insert(1, 3, vec![7]);
        kept.insert(2, 4, vec![8, 9]);
        kept.evict_buffer(9);
        assert_eq!((there(&kept), kept.cost), (vec![1], 3));
        kept.evict_buffer(5);
        assert_eq!(kept.use_cached(1), Some(1));
    }
}

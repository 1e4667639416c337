//! Mirror of the server's graph cache: an LRU cache with a budget. The server sends nothing about evictions; both ends apply
//! the same eviction rule to the same sequence of messages, so the client's copy of the list stays equal to the server's.

use std::collections::HashMap;

use super::super::connection::WriteGuard;
use super::super::graph_messages::GraphMessage;
use crate::device::DeviceError;
use crate::rpc::wire::ext::{ExtRequest, HelloExtReply, PrepareGraph, RunGraph};
use crate::rpc::wire::{Limits, REQUEST_HEADER, Request, RpcCommand, graph_cost};

/// The cached graphs of a connection. Changes in the order of the messages.
#[derive(Debug, Default)]
pub(in super::super) struct RemoteGraphCache {
    /// Limit of the total cost.
    budget: u64,
    /// Limit of the number of graphs.
    max_graphs: usize,
    /// Total cost of the cached graphs.
    cost: u64,
    /// The graphs, by the ids of their messages.
    graphs: HashMap<u64, CachedGraph>,
    /// Last graph number that was sent to the server.
    last_id: u64,
    /// LRU clock: counts uses.
    clock: u64,
}

#[derive(Debug)]
struct CachedGraph {
    id: u64,
    cost: u64,
    last_used: u64,
    /// Handles of the buffers that contain its tensors.
    buffers: Vec<u64>,
}

impl RemoteGraphCache {
    pub(in super::super) fn new(server: &HelloExtReply) -> RemoteGraphCache {
        RemoteGraphCache {
            budget: server.graph_budget,
            max_graphs: server.max_graphs as usize,
            ..RemoteGraphCache::default()
        }
    }

    /// The number of a cached graph, which counts as used; `None` if the server does not have it.
    fn use_cached(&mut self, message: u64) -> Option<u64> {
        self.clock += 1;
        let graph = self.graphs.get_mut(&message)?;
        graph.last_used = self.clock;
        Some(graph.id)
    }

    /// Adds a graph and returns its number. Evicts the least recently used graphs until it fits.
    fn insert(&mut self, message: u64, cost: u64, buffers: Vec<u64>) -> u64 {
        let full = |cache: &RemoteGraphCache| {
            cache.graphs.len() >= cache.max_graphs || cache.cost.saturating_add(cost) > cache.budget
        };
        while full(self)
            && let Some(&oldest) =
                self.graphs.iter().min_by_key(|(_, graph)| graph.last_used).map(|(message, _)| message)
        {
            self.cost -= self.graphs.remove(&oldest).map_or(0, |graph| graph.cost);
        }
        self.last_id += 1;
        self.clock += 1;
        self.cost += cost;
        self.graphs.insert(message, CachedGraph { id: self.last_id, cost, last_used: self.clock, buffers });
        self.last_id
    }

    /// Evicts the graphs with a tensor in a freed buffer.
    pub(in super::super) fn evict_buffer(&mut self, handle: u64) {
        for (_, graph) in self.graphs.extract_if(|_, graph| graph.buffers.contains(&handle)) {
            self.cost -= graph.cost;
        }
    }
}

impl WriteGuard<'_> {
    /// Appends the messages that run a graph to the write buffer.
    pub(super) fn run_graph(&mut self, queue: u32, message: &GraphMessage) -> Result<(), DeviceError> {
        let graph = match self.writer.graph_cache.use_cached(message.id()) {
            Some(number) => number,
            None => self.prepare_graph(message)?,
        };
        self.buffer(|out| ExtRequest::RunGraph(RunGraph { queue, graph }).encode(out));
        Ok(())
    }

    /// Appends the PREPARE_GRAPH of a graph, and records the graph as cached. Returns its number.
    fn prepare_graph(&mut self, message: &GraphMessage) -> Result<u64, DeviceError> {
        let bug = |e: &dyn std::fmt::Display| DeviceError::Bug(format!("a graph that does not fit a message: {e}"));
        let bytes = message.frame().get(REQUEST_HEADER..).unwrap_or_default();
        let no_limits = Limits { max_nodes: u32::MAX, max_tensors: u32::MAX, max_body: u64::MAX };
        let graph = match Request::decode(RpcCommand::GraphCompute, bytes, &no_limits) {
            Ok(Request::GraphCompute(graph)) => graph,
            Ok(other) => return Err(bug(&other.command())),
            Err(e) => return Err(bug(&e)),
        };
        let mut buffers: Vec<u64> = graph.tensors().iter().map(|record| record.buffer).filter(|&b| b != 0).collect();
        buffers.sort_unstable();
        buffers.dedup();
        let id = self.writer.graph_cache.insert(message.id(), graph_cost(bytes.len() as u64, &graph), buffers);
        let before = self.buffered_bytes();
        self.buffer(|out| ExtRequest::PrepareGraph(PrepareGraph { id, graph }).encode(out));
        let bytes = self.buffered_bytes() - before;
        self.shared.count_graph(bytes);
        Ok(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(budget: u64, max_graphs: usize) -> RemoteGraphCache {
        RemoteGraphCache { budget, max_graphs, ..RemoteGraphCache::default() }
    }

    fn cached(cache: &RemoteGraphCache) -> Vec<u64> {
        let mut messages: Vec<_> = cache.graphs.keys().copied().collect();
        messages.sort_unstable();
        messages
    }

    #[test]
    fn the_least_recently_used_graphs_are_evicted_first() {
        let mut by_count = cache(1000, 2);
        assert_eq!([by_count.insert(10, 1, vec![]), by_count.insert(11, 1, vec![])], [1, 2]);
        assert_eq!(by_count.use_cached(10), Some(1));
        assert_eq!(by_count.insert(12, 1, vec![]), 3);
        assert_eq!((cached(&by_count), by_count.use_cached(11), by_count.cost), (vec![10, 12], None, 2));
        // The same graph again gets a new number.
        assert_eq!(by_count.insert(11, 1, vec![]), 4);
        assert_eq!(cached(&by_count), [11, 12]);
        let mut by_cost = cache(10, 100);
        for (message, cost) in [(1, 4), (2, 4), (3, 2)] {
            by_cost.insert(message, cost, vec![]);
        }
        assert_eq!(cached(&by_cost), [1, 2, 3], "exactly the budget");
        by_cost.insert(4, 5, vec![]);
        assert_eq!((cached(&by_cost), by_cost.cost), (vec![3, 4], 7));
        by_cost.insert(5, 99, vec![]);
        assert_eq!((cached(&by_cost), by_cost.cost), (vec![5], 99), "a graph above the budget is cached alone");
    }

    #[test]
    fn freeing_a_buffer_evicts_its_graphs() {
        let mut cache = cache(100, 10);
        cache.insert(1, 3, vec![7]);
        cache.insert(2, 4, vec![8, 9]);
        cache.evict_buffer(9);
        assert_eq!((cached(&cache), cache.cost), (vec![1], 3));
        cache.evict_buffer(5);
        assert_eq!(cache.use_cached(1), Some(1));
    }
}

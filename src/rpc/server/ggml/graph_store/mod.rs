//! Graph store: the bodies of the graphs that a client of protocol 8.0 has numbered, within a budget in bytes.
//!
//! GRAPH_RECOMPUTE names a graph by the number (uid) that its GRAPH_COMPUTE gave it. The program cache holds the compiled
//! graphs that the client runs in turn. This store holds the bodies of all numbered graphs: if the program cache has evicted a
//! graph, the server compiles it again from its body.
//!
//! By the protocol's rule, client and server forget all graphs of a device when a GRAPH_COMPUTE arrives while [`MAX_GRAPHS`]
//! numbers are counted for the device. The budget in bytes is the server's own: beyond it bodies are evicted, while their
//! numbers keep counting. A client of llama.cpp has one or more contexts on a connection, and each context runs only the last
//! graph again that it has sent. The graphs of a context name the same buffers, so a body is evicted first if a newer one names
//! the same buffers; otherwise a busy context would evict the only graph of an idle one, which ends that client's session.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;

use thiserror::Error;

use crate::rpc::server::host_memory::{HostCharge, HostMemoryError, SessionMemory};

/// Number of different uids at which the next GRAPH_COMPUTE makes client and server forget all graphs of its device.
const MAX_GRAPHS: usize = 1024;

/// Estimated overhead of a heap allocation, in bytes.
const ALLOCATION: u64 = 16;

/// Estimated bytes of a counted number in the hash table, which is at least 7/16 full.
const NUMBER_BYTES: u64 = (16 * (size_of::<(u64, Graph)>() as u64 + 1)).div_ceil(7);

/// Why a graph cannot be run again by its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub(super) enum MissingGraph {
    /// The number is 0.
    #[error("graphs with the number 0 are not stored")]
    Unnumbered,
    /// No GRAPH_COMPUTE had the number since the last clearing of the device's graphs.
    #[error(
        "no GRAPH_COMPUTE with this number came since the device's graphs were forgotten last, which happens when one follows \
         {MAX_GRAPHS} different numbers"
    )]
    Unknown,
    /// A buffer that it names was freed.
    #[error("a buffer of it was freed")]
    FreedBuffer,
    /// It did not fit into the budget.
    #[error(
        "it exceeded the server's memory for stored graphs, from which superseded and long unused ones are dropped \
         (max-graph-memory and max-host-memory in --limits)"
    )]
    Evicted,
}

/// The body of a graph.
struct StoredBody {
    body: Arc<[u8]>,
    /// Handles of the buffers that the graph names, sorted.
    buffers: Box<[u64]>,
    /// Time of its last use, by the store's logical clock.
    last_use: u64,
}

impl StoredBody {
    fn bytes(&self) -> u64 {
        stored_bytes(&self.body, &self.buffers)
    }
}

/// Bytes of a stored body, with its two reference counts, and of the handles of its buffers.
fn stored_bytes(body: &[u8], buffers: &[u64]) -> u64 {
    body.len() as u64 + 16 + size_of_val(buffers) as u64 + 2 * ALLOCATION
}

/// A counted graph.
enum Graph {
    Stored(StoredBody),
    Dropped(MissingGraph),
}

/// The graphs of a device.
#[derive(Default)]
struct DeviceGraphs {
    /// The counted graphs by number, at most [`MAX_GRAPHS`].
    graphs: HashMap<u64, Graph>,
    /// Bytes of the bodies.
    body_bytes: u64,
}

impl DeviceGraphs {
    /// Bytes of the numbers, which eviction does not release.
    fn number_bytes(&self) -> u64 {
        self.graphs.len() as u64 * NUMBER_BYTES
    }

    /// Applies the rule of [`MAX_GRAPHS`], and then counts a number, without a body. Returns true if all graphs were forgotten.
    fn count(&mut self, uid: u64) -> bool {
        let clear = self.graphs.len() >= MAX_GRAPHS;
        if clear {
            *self = DeviceGraphs::default();
        }
        self.drop_body(uid, MissingGraph::Evicted);
        self.graphs.insert(uid, Graph::Dropped(MissingGraph::Evicted));
        clear
    }

    /// Drops the body of a graph. The number keeps counting.
    fn drop_body(&mut self, uid: u64, reason: MissingGraph) {
        let Some(graph @ Graph::Stored(_)) = self.graphs.get_mut(&uid) else { return };
        if let Graph::Stored(stored) = mem::replace(graph, Graph::Dropped(reason)) {
            self.body_bytes -= stored.bytes();
        }
    }

    /// The stored bodies, with their numbers.
    fn stored(&self) -> impl Iterator<Item = (u64, &StoredBody)> {
        self.graphs.iter().filter_map(|(&uid, graph)| match graph {
            Graph::Stored(stored) => Some((uid, stored)),
            Graph::Dropped(_) => None,
        })
    }
}

/// The numbered graphs of a session. Devices are named by their position in the server's list, which the caller has checked.
pub(super) struct GraphStore {
    max_bytes: u64,
    devices: Vec<DeviceGraphs>,
    /// Logical clock: counts computations and uses.
    clock: u64,
    /// Pays for all bytes.
    charge: HostCharge,
}

impl GraphStore {
    /// An empty store, charged to `memory`. `max_bytes`: limit of the bodies and of the estimated memory of the bookkeeping. The
    /// numbers of a device, up to 160 KB, are kept even beyond the limit; no body is stored then.
    pub(super) fn new(max_bytes: u64, memory: &Arc<SessionMemory>) -> GraphStore {
        GraphStore { max_bytes, devices: Vec::new(), clock: 0, charge: memory.empty() }
    }

    /// Counts and stores the graph of a GRAPH_COMPUTE. A graph with the number 0 is neither counted nor stored. `buffers`:
    /// handles of the buffers that the graph names. Returns true if all earlier graphs of the device were forgotten. Otherwise
    /// the body replaces one with the same number. If host memory is short, other bodies make room for it, as at the limit of the
    /// store.
    ///
    /// # Errors
    /// There is no host memory for the number, also after a wait.
    pub(super) fn record_compute(
        &mut self,
        device: u32,
        uid: u64,
        body: &[u8],
        buffers: &[u64],
    ) -> Result<bool, HostMemoryError> {
        if uid == 0 {
            return Ok(false);
        }
        self.clock += 1;
        if self.charge.grow(NUMBER_BYTES).is_err() {
            self.evict(self.charge.bytes().saturating_sub(NUMBER_BYTES));
            if self.bytes() + NUMBER_BYTES > self.charge.bytes() {
                self.charge.wait_and_grow(NUMBER_BYTES)?;
            }
        }
        let bytes = stored_bytes(body, buffers);
        let limit = match self.charge.grow(bytes) {
            Ok(()) => self.max_bytes,
            Err(_) => self.max_bytes.min(self.charge.bytes()),
        };
        let slot = device as usize; // position of an existing device, so the resize is small
        if self.devices.len() <= slot {
            self.devices.resize_with(slot + 1, DeviceGraphs::default);
        }
        let cleared = self.devices[slot].count(uid);
        let numbers: u64 = self.devices.iter().map(DeviceGraphs::number_bytes).sum();
        if numbers + bytes <= limit {
            let device = &mut self.devices[slot];
            let mut buffers: Box<[u64]> = buffers.into();
            buffers.sort_unstable();
            let stored = StoredBody { body: body.into(), buffers, last_use: self.clock };
            device.graphs.insert(uid, Graph::Stored(stored));
            device.body_bytes += bytes;
        }
        self.evict(limit);
        self.charge.shrink_to(self.bytes());
        Ok(cleared)
    }

    /// Makes a graph the most recently used, if it is stored.
    pub(super) fn record_use(&mut self, device: u32, uid: u64) {
        self.clock += 1;
        if let Some(Graph::Stored(stored)) = self.devices.get_mut(device as usize).and_then(|d| d.graphs.get_mut(&uid))
        {
            stored.last_use = self.clock;
        }
    }

    /// The body of a graph, which becomes the most recently used.
    pub(super) fn body(&mut self, device: u32, uid: u64) -> Result<Arc<[u8]>, MissingGraph> {
        if uid == 0 {
            return Err(MissingGraph::Unnumbered);
        }
        self.record_use(device, uid);
        let device = self.devices.get(device as usize).ok_or(MissingGraph::Unknown)?;
        match device.graphs.get(&uid) {
            Some(Graph::Stored(stored)) => Ok(Arc::clone(&stored.body)),
            Some(Graph::Dropped(reason)) => Err(*reason),
            None => Err(MissingGraph::Unknown),
        }
    }

    /// Drops the graphs that name a buffer, which is being freed. Their numbers keep counting.
    pub(super) fn remove_graphs_of_buffer(&mut self, handle: u64) {
        for device in &mut self.devices {
            let named = device.stored().filter(|(_, stored)| stored.buffers.contains(&handle));
            for uid in named.map(|(uid, _)| uid).collect::<Vec<_>>() {
                device.drop_body(uid, MissingGraph::FreedBuffer);
            }
        }
        self.charge.shrink_to(self.bytes());
    }

    /// Bytes in use.
    fn bytes(&self) -> u64 {
        self.devices.iter().map(|device| device.number_bytes() + device.body_bytes).sum()
    }

    /// Keeps a sixteenth of the limit if host memory is short. Called after each request, as an idle session would otherwise keep
    /// memory that others wait for.
    pub(super) fn trim(&mut self) {
        if self.bytes() > self.max_bytes / 16 && !self.charge.session().is_plentiful() {
            self.evict(self.max_bytes / 16);
            self.charge.shrink_to(self.bytes());
        }
    }

    /// Drops bodies until the rest fits into `limit` bytes: first the least recently used among those that are superseded, that
    /// is, whose buffers a newer one of the device names too, then the least recently used. Spares the body that was stored last,
    /// which fits: the loop ends within the budget, unless the numbers alone exceed it.
    fn evict(&mut self, limit: u64) {
        while self.bytes() > limit {
            let stored = || {
                let devices = self.devices.iter().enumerate();
                devices.flat_map(|(slot, device)| device.stored().map(move |(uid, stored)| (slot, uid, stored)))
            };
            let mut newest: HashMap<(usize, &[u64]), u64> = HashMap::new();
            for (slot, _, stored) in stored() {
                let last_use = newest.entry((slot, &stored.buffers)).or_default();
                *last_use = stored.last_use.max(*last_use);
            }
            let is_newest = |slot, stored: &StoredBody| newest.get(&(slot, &*stored.buffers)) == Some(&stored.last_use);
            let others = stored().filter(|(_, _, stored)| stored.last_use != self.clock);
            let victim = others.min_by_key(|&(slot, _, stored)| (is_newest(slot, stored), stored.last_use));
            let Some((slot, uid, _)) = victim else { break };
            self.devices[slot].drop_body(uid, MissingGraph::Evicted);
        }
    }
}

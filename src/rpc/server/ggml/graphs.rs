//! GRAPH_COMPUTE and GRAPH_RECOMPUTE: run a graph, compiled once, and found again by its bytes or by its number (uid).
//!
//! Up to 7.0 GRAPH_RECOMPUTE runs the graph that the device ran last, and with several splits on a device clients send the same
//! few bodies for each token. From 8.0 on a client numbers its graphs, and names the number to run one again.

use std::time::Instant;

use super::error::GgmlError;
use super::session::GgmlSession;
use crate::graph::validate::OpSet;
use crate::rpc::server::client_connection::BodyBuffer;
use crate::rpc::server::host_memory::HostCharge;
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::server::session::graph_import::{ImportedGraph, import_graph};
use crate::rpc::server::session::program_cache::{BoundProgram, CachedProgram, INLINE_BUDGET};
use crate::rpc::wire::{GraphCompute, GraphRecompute, graph_cost};

/// Key of a cached program.
pub(super) enum GraphKey {
    /// The body of its GRAPH_COMPUTE. A lookup usually costs one comparison of the bytes. Equal bytes mean the same device and
    /// buffers: handles are never reused, and freeing a buffer removes its programs.
    Body(Box<[u8]>),
    /// The number that the client gave it.
    Stored(StoredId),
}

/// Number of a stored graph: uids are counted per device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct StoredId {
    pub(super) device: u32,
    pub(super) uid: u64,
}

/// A compiled graph that is not cached yet.
struct CostedGraph {
    /// Estimated bytes of the program: [`graph_cost`].
    cost: u64,
    /// Pays for it.
    charge: HostCharge,
    graph: ImportedGraph,
}

impl PartialEq<[u8]> for GraphKey {
    fn eq(&self, body: &[u8]) -> bool {
        matches!(self, GraphKey::Body(own) if **own == *body)
    }
}

impl PartialEq<StoredId> for GraphKey {
    fn eq(&self, id: &StoredId) -> bool {
        matches!(self, GraphKey::Stored(own) if own == id)
    }
}

impl GgmlSession<'_> {
    /// Runs the graph in the first `len` bytes of `body`. A graph that is cached by its bytes costs the comparison and a
    /// submission. For a new graph without a number, `body` is moved into the cache as the key.
    pub(super) fn graph_compute(&mut self, len: usize, body: &mut BodyBuffer) -> Result<(), SessionError> {
        let message = body.message(len);
        // The size in the header was checked, so the body has both numbers.
        let (device, uid) = message.split_at(size_of::<u32>());
        let device = device.first_chunk().copied().map_or(0, u32::from_le_bytes);
        let uid = uid.first_chunk().copied().map_or(0, u64::from_le_bytes);
        if uid != 0 {
            return self.compute_stored(StoredId { device, uid }, message);
        }
        if let Some(cached) = self.resources.programs.get(device, message) {
            let program = cached.program.clone()?;
            return self.run_program(device, &program);
        }
        let imported = self.import(message)?;
        let program = self.cache_program(GraphKey::Body(body.take(len)), device, imported);
        self.run_program(device, &program)
    }

    /// Runs a graph, and stores it under its number.
    fn compute_stored(&mut self, id: StoredId, message: &[u8]) -> Result<(), SessionError> {
        let imported = self.import(message)?;
        let StoredId { device, uid } = id;
        let cleared = self.graph_store.record_compute(device, uid, message, &imported.graph.buffers)?;
        // The same number may name another graph than before.
        let is_stale = |key: &GraphKey| match key {
            GraphKey::Stored(other) => *other == id || cleared && other.device == device,
            GraphKey::Body(_) => false,
        };
        self.resources.programs.remove_where(is_stale);
        let program = self.cache_program(GraphKey::Stored(id), device, imported);
        self.run_program(device, &program)
    }

    /// Decodes, validates and compiles the graph of a message, after the program cache has evicted what it must for it.
    fn import(&mut self, message: &[u8]) -> Result<CostedGraph, SessionError> {
        let graph = GraphCompute::decode_with_uid(message, &self.resources.server.config.limits)?;
        let target = self.resources.device(graph.device())?;
        let cost = graph_cost(message.len() as u64, &graph);
        if self.resources.programs.evict_for(cost) {
            self.queues.wait_idle(Instant::now() + self.resources.server.config.reply_timeout)?;
            self.resources.programs.release_evicted();
        }
        let charge = self.charge_program(cost)?;
        Ok(CostedGraph {
            cost,
            charge,
            graph: import_graph(&graph, &self.resources.handles, &**target, OpSet::Protocol)?,
        })
    }

    /// Charges a program of `cost` bytes. The protocol has no reply for a refusal: if host memory is short, the session first
    /// gives up its other programs and most stored graphs, and then waits for other sessions.
    fn charge_program(&mut self, cost: u64) -> Result<HostCharge, SessionError> {
        if let Ok(charge) = self.resources.memory.reserve(cost) {
            return Ok(charge);
        }
        self.resources.programs.evict_all();
        self.queues.wait_idle(Instant::now() + self.resources.server.config.reply_timeout)?;
        self.resources.programs.release_evicted();
        self.graph_store.trim();
        Ok(self.resources.memory.wait(cost)?)
    }

    /// Caches the program of an imported graph, and returns it.
    fn cache_program(&mut self, key: GraphKey, device: u32, imported: CostedGraph) -> BoundProgram {
        let CostedGraph { cost, charge, graph: ImportedGraph { program, buffers } } = imported;
        self.resources.programs.insert(CachedProgram::new(key, device, cost, buffers, Ok(program.clone()), charge));
        program
    }

    /// Runs a graph again: the one with the number, or, up to 7.0, the one that ran last on the device.
    pub(super) fn graph_recompute(&mut self, request: &GraphRecompute) -> Result<(), SessionError> {
        let device = request.device;
        self.resources.device(device)?;
        let program = match request.uid {
            None => {
                let last = self.resources.programs.most_recent(device).ok_or(GgmlError::NoLastGraph(device))?;
                last.program.clone()?
            }
            Some(uid) => self.stored_program(StoredId { device, uid })?,
        };
        self.run_program(device, &program)
    }

    /// The program of a stored graph: cached, or compiled anew from the stored body.
    fn stored_program(&mut self, id: StoredId) -> Result<BoundProgram, SessionError> {
        if let Some(cached) = self.resources.programs.get(id.device, &id) {
            self.graph_store.record_use(id.device, id.uid);
            return Ok(cached.program.clone()?);
        }
        let body =
            self.graph_store.body(id.device, id.uid).map_err(|reason| GgmlError::NoStoredGraph { id, reason })?;
        let imported = self.import(&body)?;
        Ok(self.cache_program(GraphKey::Stored(id), id.device, imported))
    }

    /// Runs a program. Inline on the session's thread, unless the session also uses other devices: this thread must read their
    /// requests meanwhile.
    fn run_program(&mut self, device: u32, program: &BoundProgram) -> Result<(), SessionError> {
        let inline = !self.queues.other_devices_in_use(device);
        self.resources.server.count_graph(self.connection.audit());
        let (queue, BoundProgram { program, bindings }) = (self.queues.get(device)?, program);
        Ok(if inline { queue.run_inline(program, bindings, INLINE_BUDGET) } else { queue.run(program, bindings) }?)
    }
}

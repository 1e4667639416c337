//! GRAPH_COMPUTE and GRAPH_RECOMPUTE: run a graph, compiled once and cached by its bytes.

use std::time::Instant;

use super::error::GgmlError;
use super::session::GgmlSession;
use crate::rpc::server::session::failure::{SessionError, decoder_bug};
use crate::rpc::server::session::graph_import::{ImportedGraph, import_graph};
use crate::rpc::server::session::program_cache::{BoundProgram, CachedProgram};
use crate::rpc::wire::{Request, RpcCommand, graph_cost};

/// Key of a cached graph: the body of its GRAPH_COMPUTE. ggml's clients send the same few bodies for each token, and a lookup
/// usually costs one comparison of the bytes. Equal bytes mean the same device and buffers: handles are never reused, and
/// freeing a buffer removes its programs.
pub(super) type GraphBody = Box<[u8]>;

impl GgmlSession<'_> {
    /// Runs the graph in the first `len` bytes of `body`. A cached graph costs the comparison and a submission. For a new
    /// graph, `body` is moved into the cache as the key.
    pub(super) fn graph_compute(&mut self, len: usize, body: &mut Vec<u8>) -> Result<(), SessionError> {
        let message = &body[..len];
        // The size in the header was checked, so the body has at least four bytes.
        let device = message.first_chunk().copied().map_or(0, u32::from_le_bytes);
        if let Some(cached) = self.resources.programs.get(device, message) {
            let program = cached.program.clone()?;
            return self.run_program(device, &program);
        }
        let target = self.resources.device(device)?;
        let server = self.resources.server;
        let Request::GraphCompute(graph) = Request::decode(RpcCommand::GraphCompute, message, &server.config.limits)?
        else {
            return Err(decoder_bug());
        };
        let cost = graph_cost(message.len() as u64, &graph);
        if self.resources.programs.evict_for(cost) {
            self.queues.wait_idle(Instant::now() + server.config.device_timeout)?;
            self.resources.programs.release_evicted();
        }
        let ImportedGraph { program, buffers } = import_graph(&graph, &self.resources.handles, &**target)?;
        let mut message = std::mem::take(body);
        message.truncate(len);
        self.resources.programs.insert(CachedProgram::new(message.into(), device, cost, buffers, Ok(program.clone())));
        self.run_program(device, &program)
    }

    /// Runs the graph that ran last on `device`.
    pub(super) fn graph_recompute(&mut self, device: u32) -> Result<(), SessionError> {
        self.resources.device(device)?;
        let last = self.resources.programs.most_recent(device).ok_or(GgmlError::NoLastGraph(device))?;
        let program = last.program.clone()?;
        self.run_program(device, &program)
    }

    /// Runs a program. Inline on the session's thread, unless the session also uses other devices: this thread must read their
    /// requests meanwhile.
    fn run_program(&mut self, device: u32, program: &BoundProgram) -> Result<(), SessionError> {
        let inline = !self.queues.other_devices_in_use(device);
        Ok(program.submit(self.queues.get(device)?, inline)?)
    }
}

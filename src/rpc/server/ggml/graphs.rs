//! GRAPH_COMPUTE and GRAPH_RECOMPUTE.

use std::time::Instant;

use super::error::GgmlError;
use super::session::GgmlSession;
use crate::rpc::server::session::failure::{SessionError, decoder_bug};
use crate::rpc::server::session::graph_import::{Imported, import};
use crate::rpc::server::session::program_cache::{CachedProgram, Prepared};
use crate::rpc::wire::{Command, Request, graph_cost};

/// The key of a prepared graph: the body of its GRAPH_COMPUTE. ggml's clients send the same few bodies for each token, and a look-up
/// costs one comparison of the bytes. Equal bytes mean the same device and buffers, because handles are never reused and a freed
/// buffer takes its programs along.
pub(super) type GraphBody = Box<[u8]>;

impl GgmlSession<'_> {
    /// Runs the graph in the first `len` bytes of `body`. A cached one costs its comparison and a submission; a new one takes the
    /// buffer as its key.
    pub(super) fn graph_compute(&mut self, len: usize, body: &mut Vec<u8>) -> Result<(), SessionError> {
        let message = &body[..len];
        // The size in the header has been checked: there are four bytes.
        let device = message.first_chunk().copied().map_or(0, u32::from_le_bytes);
        if let Some(cached) = self.resources.programs.get(device, message) {
            let prepared = cached.prepared.clone()?;
            return self.run(device, &prepared);
        }
        let on = self.resources.device(device)?;
        let server = self.resources.server;
        let Request::GraphCompute(graph) = Request::decode(Command::GraphCompute, message, &server.config.limits)?
        else {
            return Err(decoder_bug());
        };
        let cost = graph_cost(message.len() as u64, &graph);
        if self.resources.programs.make_room(cost) {
            self.queues.wait_idle(Instant::now() + server.config.device_timeout)?;
            self.resources.programs.settle();
        }
        let Imported { prepared, buffers } = import(&graph, &self.resources.handles, &**on)?;
        let mut message = std::mem::take(body);
        message.truncate(len);
        self.resources.programs.add(CachedProgram::new(message.into(), device, cost, buffers, Ok(prepared.clone())));
        self.run(device, &prepared)
    }

    pub(super) fn graph_recompute(&mut self, device: u32) -> Result<(), SessionError> {
        self.resources.device(device)?;
        let last = self.resources.programs.most_recent(device).ok_or(GgmlError::NoGraph(device))?;
        let prepared = last.prepared.clone()?;
        self.run(device, &prepared)
    }

    /// Runs a program: inline unless another device waits for this thread to read its next request.
    fn run(&mut self, device: u32, prepared: &Prepared) -> Result<(), SessionError> {
        let inline = !self.queues.has_others(device);
        Ok(prepared.submit(self.queues.get(device)?, inline)?)
    }
}

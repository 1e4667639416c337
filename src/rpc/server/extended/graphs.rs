//! KEEP_GRAPH and RUN_GRAPH.

use std::time::Instant;

use super::describe;
use super::error::ExtendedError;
use super::session::ExtendedSession;
use crate::device::DeviceError;
use crate::graph::validate::GraphError;
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::server::session::graph_import::import;
use crate::rpc::server::session::program_cache::CachedProgram;
use crate::rpc::server::session::request_error::RequestError;
use crate::rpc::transport::TransportError;
use crate::rpc::wire::ext::{Fault, KeepGraph, RunGraph};
use crate::rpc::wire::{GraphCompute, graph_cost};

/// The key of a prepared graph: the number that the client gave it in KEEP_GRAPH.
pub(super) type GraphNumber = u64;

impl ExtendedSession<'_> {
    /// Prepares a graph for RUN_GRAPH. That its device cannot run it is reported by the queue that is to run it.
    pub(super) fn keep_graph(&mut self, request: &KeepGraph<'_>, len: usize) -> Result<(), SessionError> {
        let graph = &request.graph;
        let device = self.resources.device(graph.device())?;
        let cost = graph_cost((len - size_of_val(&request.id)) as u64, graph); // the decoder has read the number
        if self.resources.programs.contains(&request.id) {
            return Err(ExtendedError::GraphKept(request.id).into());
        }
        if self.resources.programs.make_room(cost) {
            self.wait_idle()?;
            self.resources.programs.settle();
        }
        let prepared = match import(graph, &self.resources.handles, &**device) {
            Ok(imported) => Ok(imported.prepared),
            Err(SessionError::Device(e)) => Err(e),
            Err(SessionError::Request(RequestError::Graph(GraphError::UnsupportedOp(op)))) => {
                Err(DeviceError::from(describe::unknown_op(op)))
            }
            Err(e) => return Err(e),
        };
        // The client drops the graph when it frees any buffer that the graph names, bound or not.
        let buffers = named_buffers(graph);
        self.resources.programs.add(CachedProgram::new(request.id, graph.device(), cost, buffers, prepared));
        Ok(())
    }

    /// Waits until all work submitted so far is done.
    fn wait_idle(&mut self) -> Result<(), TransportError> {
        let until = Instant::now() + self.resources.server.config.device_timeout;
        self.queues.iter().try_for_each(|queue| queue.wait_idle(until))
    }

    /// Runs a graph: inline unless another queue waits for this thread to read its next request.
    pub(super) fn run_graph(&mut self, request: &RunGraph) -> Result<(), SessionError> {
        let inline = self.queues.alone();
        let queue = self.queues.get(request.queue)?;
        let cached =
            self.resources.programs.get(queue.device, &request.graph).ok_or(ExtendedError::NoKept(request.graph))?;
        if cached.device != queue.device {
            let (graph, made_for) = (request.graph, cached.device);
            let (queue, device) = (request.queue, queue.device);
            return Err(ExtendedError::GraphDevice { queue, device, graph, made_for }.into());
        }
        match &cached.prepared {
            Ok(prepared) => _ = queue.submit(|queue| prepared.submit(queue, inline))?,
            Err(_) if queue.completions.failed() => {}
            Err(e) => queue.completions.fail(Fault::from(e))?,
        }
        Ok(())
    }
}

/// Handles of all buffers that a graph's tensors name, bound or not.
fn named_buffers(graph: &GraphCompute<'_>) -> Box<[u64]> {
    let mut buffers: Vec<u64> = graph.tensors().iter().map(|record| record.buffer).filter(|&b| b != 0).collect();
    buffers.sort_unstable();
    buffers.dedup();
    buffers.into()
}

//! Handlers for prepared graphs: PREPARE_GRAPH and RUN_GRAPH.

use std::time::Instant;

use super::describe;
use super::error::ExtendedError;
use super::session::ExtendedSession;
use crate::device::DeviceError;
use crate::graph::validate::{GraphError, OpSet};
use crate::rpc::server::host_memory::{HostCharge, HostMemoryError};
use crate::rpc::server::log_limits::LogKind;
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::server::session::graph_import::import_graph;
use crate::rpc::server::session::program_cache::{BoundProgram, CachedProgram, INLINE_BUDGET};
use crate::rpc::server::session::request_error::RequestError;
use crate::rpc::transport::TransportError;
use crate::rpc::wire::ext::{DeviceFault, PrepareGraph, RunGraph};
use crate::rpc::wire::{GraphCompute, graph_cost};

/// Key of a prepared graph in the program cache: the number that the client gave it in PREPARE_GRAPH.
pub(super) type GraphNumber = u64;

impl ExtendedSession<'_> {
    /// Prepares a graph for RUN_GRAPH. If the device does not support it, or its host memory is refused, the error is stored
    /// with the graph and fails the queue that runs the graph.
    pub(super) fn prepare_graph(&mut self, request: &PrepareGraph<'_>, len: usize) -> Result<(), SessionError> {
        let graph = &request.graph;
        let device = self.resources.device(graph.device())?;
        let cost = graph_cost((len - size_of_val(&request.id)) as u64, graph); // the decoder has checked that the id is there
        if self.resources.programs.contains(&request.id) {
            return Err(ExtendedError::GraphExists(request.id).into());
        }
        if self.resources.programs.evict_for(cost) {
            self.wait_idle()?;
            self.resources.programs.release_evicted();
        }
        let (prepared, charge) = match self.charge_program(cost)? {
            Ok(charge) => match import_graph(graph, &self.resources.handles, &**device, OpSet::Extension) {
                Ok(imported) => (Ok(imported.program), charge),
                Err(SessionError::Device(e)) => (Err(e), self.resources.memory.empty()),
                Err(SessionError::Request(RequestError::InvalidGraph(GraphError::UnsupportedOp(op)))) => {
                    (Err(DeviceError::from(describe::unknown_op(op))), self.resources.memory.empty())
                }
                Err(e) => return Err(e),
            },
            Err(e) => {
                let peer = self.resources.peer;
                let text = format_args!("{peer}: cannot prepare graph {}: {e}", request.id);
                self.resources.server.logs.log(peer, LogKind::RefusedGraph, text);
                (Err(DeviceError::from(e)), self.resources.memory.empty())
            }
        };
        // Freeing any buffer that the graph names, used or not, drops the graph on the client. The cache has to do the same.
        let buffers = named_buffers(graph);
        self.resources.programs.insert(CachedProgram::new(request.id, graph.device(), cost, buffers, prepared, charge));
        Ok(())
    }

    /// Charges a program of `cost` bytes. If host memory is short, this waits for the session's queues, which may hold evicted
    /// programs, and then for other sessions. It evicts none: the client tracks the cache.
    fn charge_program(&mut self, cost: u64) -> Result<Result<HostCharge, HostMemoryError>, SessionError> {
        if let Ok(charge) = self.resources.memory.reserve(cost) {
            return Ok(Ok(charge));
        }
        self.wait_idle()?;
        self.resources.programs.release_evicted();
        Ok(self.resources.memory.wait(cost))
    }

    /// Waits until the work of all queues is done.
    fn wait_idle(&mut self) -> Result<(), TransportError> {
        let until = Instant::now() + self.resources.server.config.reply_timeout;
        self.queues.iter_mut().try_for_each(|queue| queue.wait_idle(until))
    }

    /// Runs a prepared graph: on the session's thread if no other queue is open, because another queue would have to wait for
    /// the session's thread to read its requests.
    pub(super) fn run_graph(&mut self, request: &RunGraph) -> Result<(), SessionError> {
        let inline = self.queues.at_most_one();
        let queue = self.queues.get(request.queue)?;
        let cached = self
            .resources
            .programs
            .get(queue.device, &request.graph)
            .ok_or(ExtendedError::NoSuchGraph(request.graph))?;
        if cached.device != queue.device {
            let (graph, graph_device) = (request.graph, cached.device);
            let (queue, device) = (request.queue, queue.device);
            return Err(ExtendedError::WrongGraphDevice { queue, device, graph, graph_device }.into());
        }
        match &cached.program {
            Ok(BoundProgram { program, bindings }) => {
                self.resources.server.count_graph(self.connection.audit());
                queue.submit(|queue| match inline {
                    true => queue.run_inline(program, bindings, INLINE_BUDGET),
                    false => queue.run(program, bindings),
                })?;
            }
            Err(_) if queue.completions.has_failed() => {}
            Err(e) => queue.completions.fail(DeviceFault::from(e))?,
        }
        Ok(())
    }
}

/// Handles of all buffers that a graph's tensors name, whether or not the graph uses those tensors.
fn named_buffers(graph: &GraphCompute<'_>) -> Box<[u64]> {
    let mut buffers: Vec<u64> = graph.tensors().iter().map(|record| record.buffer).filter(|&b| b != 0).collect();
    buffers.sort_unstable();
    buffers.dedup();
    buffers.into()
}

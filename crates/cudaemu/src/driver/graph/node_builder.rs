//! Creates nodes from the program's requests, with the same checks as the equivalent immediate calls.

use std::sync::Arc;

use super::{CopyNode, CopyRequest, GraphNode, KernelNode, MemOp};
use crate::bytecode;
use crate::driver::copy::Extent;
use crate::driver::launch::LaunchRequest;
use crate::driver::{Driver, DriverState, StateGuard};
use crate::engine::{Memcpy, Memset, StreamOp};
use crate::error::{Error, Result};
use crate::handle::{ContextId, EventId};

impl Driver {
    /// A kernel.
    pub fn kernel_node(
        &self,
        state: &mut StateGuard<'_>,
        request: LaunchRequest,
        params: impl FnOnce(&bytecode::Function) -> Result<Vec<u8>>,
    ) -> Result<GraphNode> {
        let (launch, context) = self.checked_launch(state, request, params)?;
        let block = launch.launch.params.as_ptr().expose_provenance() as u64;
        let kernel = launch.launch.kernel();
        let pointers: Arc<[u64]> = kernel.params.iter().map(|param| block + u64::from(param.offset)).collect();
        Ok(GraphNode::Kernel(Box::new(KernelNode { request, launch, context, priority: 0, pointers })))
    }

    /// A copy. Bytes of pageable memory are read and written when the copy executes, not when the node is made.
    pub fn copy_node(&self, request: CopyRequest, context: ContextId) -> Result<GraphNode> {
        let CopyRequest { to, to_pitch, from, from_pitch, extent } = request;
        let span = |pitch| extent.span(pitch).ok_or(Error::InvalidValue);
        if extent.is_empty() {
            return Err(Error::InvalidValue);
        }
        let to = self.resolve_endpoint(to, to_pitch, span(to_pitch)?)?;
        let from = self.resolve_endpoint(from, from_pitch, span(from_pitch)?)?;
        let Extent { width, height, depth } = extent;
        let copy = Memcpy { from, to, width, height, depth, corrupt: false };
        Ok(GraphNode::Memcpy(Box::new(CopyNode { request, copy, context })))
    }

    /// A memset.
    pub fn memset_node(&self, fill: Memset, context: ContextId) -> Result<GraphNode> {
        if !matches!(fill.bytes, 1 | 2 | 4) || fill.width == 0 || fill.height == 0 {
            return Err(Error::InvalidValue);
        }
        self.check_memset(&fill)?;
        Ok(GraphNode::Memset(fill, context))
    }
}

impl DriverState {
    /// A node that waits for or records an event.
    pub fn event_node(&self, event: EventId, make: fn(EventId) -> GraphNode) -> Result<GraphNode> {
        self.events.get(event).map(|_| make(event))
    }

    /// The node for a stream operation that needs no more than the operation itself.
    pub(in crate::driver) fn node_of(&self, work: StreamOp, context: ContextId) -> Result<GraphNode> {
        let values = |works: &[StreamOp]| works.iter().filter_map(MemOp::of).collect();
        match work {
            StreamOp::Memset(fill) => Ok(GraphNode::Memset(fill, context)),
            StreamOp::Call(call) => Ok(GraphNode::Host(call)),
            StreamOp::WriteValue(..) | StreamOp::WaitValue(..) => Ok(GraphNode::Values(values(&[work]), context)),
            StreamOp::Batch(works) => Ok(GraphNode::Values(values(&works), context)),
            StreamOp::Free(address) => self.free_node(address),
            StreamOp::Wait => Ok(GraphNode::Empty),
            // These nodes also keep the program's request, so other functions make them.
            StreamOp::Launch(_)
            | StreamOp::Memcpy(_)
            | StreamOp::Record(_)
            | StreamOp::Fault(..)
            | StreamOp::Hang(_) => Err(Error::StreamCaptureUnsupported),
        }
    }
}

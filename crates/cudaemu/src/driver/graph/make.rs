//! Nodes from what programs ask for: checked as the calls that do the same at once.

use std::sync::Arc;

use super::{CopyNode, CopyRequest, KernelNode, Node, Value};
use crate::bytecode;
use crate::driver::copy::Extent;
use crate::driver::launch::Request;
use crate::driver::{Driver, Guard, State};
use crate::engine::{Copy, Fill, Work};
use crate::error::{Error, Result};
use crate::handle::{ContextId, EventId};

impl Driver {
    /// A kernel.
    pub fn kernel_node(
        &self,
        state: &mut Guard<'_>,
        request: Request,
        params: impl FnOnce(&bytecode::Function) -> Result<Vec<u8>>,
    ) -> Result<Node> {
        let (launch, context) = self.checked_launch(state, request, params)?;
        let block = launch.launch.params.as_ptr().expose_provenance() as u64;
        let kernel = launch.launch.kernel();
        let pointers: Arc<[u64]> = kernel.params.iter().map(|param| block + u64::from(param.offset)).collect();
        Ok(Node::Kernel(Box::new(KernelNode { request, launch, context, priority: 0, pointers })))
    }

    /// A copy. Bytes of the program's own memory are read and written when the copy runs.
    pub fn copy_node(&self, request: CopyRequest, context: ContextId) -> Result<Node> {
        let CopyRequest { to, to_pitch, from, from_pitch, extent } = request;
        let span = |pitch| extent.span(pitch).ok_or(Error::InvalidValue);
        if extent.is_empty() {
            return Err(Error::InvalidValue);
        }
        let to = self.side(to, to_pitch, span(to_pitch)?)?;
        let from = self.side(from, from_pitch, span(from_pitch)?)?;
        let Extent { width, height, depth } = extent;
        let copy = Copy { from, to, width, height, depth };
        Ok(Node::Copy(Box::new(CopyNode { request, copy, context })))
    }

    /// A memset.
    pub fn fill_node(&self, fill: Fill, context: ContextId) -> Result<Node> {
        if !matches!(fill.bytes, 1 | 2 | 4) || fill.width == 0 || fill.height == 0 {
            return Err(Error::InvalidValue);
        }
        self.check_fill(&fill)?;
        Ok(Node::Fill(fill, context))
    }
}

impl State {
    /// A node that waits for or records an event.
    pub fn event_node(&self, event: EventId, make: fn(EventId) -> Node) -> Result<Node> {
        self.events.get(event).map(|_| make(event))
    }

    /// The node that does a stream's work, for what needs no more than the work itself.
    pub(in crate::driver) fn node_of(&self, work: Work, context: ContextId) -> Result<Node> {
        let values = |works: &[Work]| works.iter().filter_map(Value::of).collect();
        match work {
            Work::Fill(fill) => Ok(Node::Fill(fill, context)),
            Work::Call(call) => Ok(Node::Host(call)),
            Work::WriteValue(..) | Work::WaitValue(..) => Ok(Node::Values(values(&[work]), context)),
            Work::Batch(works) => Ok(Node::Values(values(&works), context)),
            Work::Free(address) => self.free_node(address),
            Work::Wait => Ok(Node::Empty),
            // These are made from what the program asked for.
            Work::Launch(_) | Work::Copy(_) | Work::Record(_) => Err(Error::StreamCaptureUnsupported),
        }
    }
}

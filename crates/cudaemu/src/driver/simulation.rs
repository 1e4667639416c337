//! Costs of operations in simulated time.

use super::{Driver, DriverState};
use crate::engine::{CopyEndpoint, OpCost, StreamOp, StreamPoint};
use crate::error::Result;
use crate::handle::{ContextId, StreamId};
use crate::mem::AllocationKind;

impl Driver {
    /// Appends an operation with its cost to a stream.
    pub(super) fn enqueue(&self, state: &mut DriverState, stream: StreamId, work: StreamOp) -> Result<StreamPoint> {
        if matches!(work, StreamOp::Launch(_)) {
            state.streams.host_launched();
        }
        let context = state.streams.get(stream)?.context;
        let cost = self.cost(state, context, &work);
        state.streams.submit_costing(stream, work, Vec::new(), cost)
    }

    /// The resource that an operation occupies, and the amount of work.
    pub(super) fn cost(&self, state: &DriverState, context: ContextId, work: &StreamOp) -> OpCost {
        if !state.streams.time.is_enabled() {
            return OpCost::Nothing;
        }
        let device = state.contexts.get(context).map_or(0, |context| context.device as u32);
        match work {
            StreamOp::Launch(launch) => OpCost::Kernel(launch.launch.device),
            StreamOp::Memcpy(copy) => match (self.place(&copy.from), self.place(&copy.to)) {
                (None, None) => OpCost::Nothing,
                (None, Some(to)) => OpCost::ToDevice(to, copy.bytes()),
                (Some(from), None) => OpCost::ToHost(from, copy.bytes()),
                (Some(from), Some(to)) if from == to => OpCost::Within(to, copy.bytes()),
                (Some(from), Some(to)) => OpCost::Peer(from, to, copy.bytes()),
            },
            StreamOp::Memset(fill) => OpCost::Within(device, fill.total()),
            StreamOp::Call(_)
            | StreamOp::Record(_)
            | StreamOp::Wait
            | StreamOp::Free(_)
            | StreamOp::WriteValue(..)
            | StreamOp::WaitValue(..)
            | StreamOp::Batch(_) => OpCost::Nothing,
        }
    }

    /// The device that holds one side of a copy; `None` for host memory.
    fn place(&self, side: &CopyEndpoint) -> Option<u32> {
        let CopyEndpoint::Known { address, .. } = side else { return None };
        let allocation = self.space().find(*address)?;
        let host = matches!(allocation.kind(), AllocationKind::PinnedHost | AllocationKind::RegisteredHost);
        (!host).then(|| allocation.device())
    }
}

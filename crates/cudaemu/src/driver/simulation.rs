//! What work costs in simulated time.

use super::{Driver, State};
use crate::engine::{Cost, Point, Side, Work};
use crate::error::Result;
use crate::handle::{ContextId, StreamId};
use crate::mem::AllocationKind;

impl Driver {
    /// Appends work to a stream, at its cost.
    pub(super) fn enqueue(&self, state: &mut State, stream: StreamId, work: Work) -> Result<Point> {
        if matches!(work, Work::Launch(_)) {
            state.streams.launched();
        }
        let context = state.streams.get(stream)?.context;
        let cost = self.cost(state, context, &work);
        state.streams.submit_costing(stream, work, Vec::new(), cost)
    }

    /// What work keeps busy, and for how much.
    pub(super) fn cost(&self, state: &State, context: ContextId, work: &Work) -> Cost {
        if !state.streams.time.on() {
            return Cost::Nothing;
        }
        let device = state.contexts.get(context).map_or(0, |context| context.device as u32);
        match work {
            Work::Launch(launch) => Cost::Kernel(launch.launch.device),
            Work::Copy(copy) => match (self.place(&copy.from), self.place(&copy.to)) {
                (None, None) => Cost::Nothing,
                (None, Some(to)) => Cost::ToDevice(to, copy.bytes()),
                (Some(from), None) => Cost::ToHost(from, copy.bytes()),
                (Some(from), Some(to)) if from == to => Cost::Within(to, copy.bytes()),
                (Some(from), Some(to)) => Cost::Peer(from, to, copy.bytes()),
            },
            Work::Fill(fill) => Cost::Within(device, fill.total()),
            Work::Call(_)
            | Work::Record(_)
            | Work::Wait
            | Work::Free(_)
            | Work::WriteValue(..)
            | Work::WaitValue(..)
            | Work::Batch(_) => Cost::Nothing,
        }
    }

    /// The device where one side of a copy lies; none for the host.
    fn place(&self, side: &Side) -> Option<u32> {
        let Side::Known { address, .. } = side else { return None };
        let allocation = self.space().find(*address)?;
        let host = matches!(allocation.kind(), AllocationKind::PinnedHost | AllocationKind::RegisteredHost);
        (!host).then(|| allocation.device())
    }
}

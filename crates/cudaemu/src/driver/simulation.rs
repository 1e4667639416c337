//! Simulated time in the driver: costs of operations, and calls that need times.

use std::sync::PoisonError;

use super::{Driver, DriverState, StateGuard};
use crate::engine::{CopyEndpoint, OpCost, StreamOp, StreamPoint};
use crate::error::{Error, Result};
use crate::handle::{ContextId, EventId, StreamId};

impl Driver {
    /// Appends an operation with its cost to a stream.
    pub(super) fn enqueue(&self, state: &mut DriverState, stream: StreamId, work: StreamOp) -> Result<StreamPoint> {
        if matches!(work, StreamOp::Launch(_)) {
            state.streams.host_launched();
        }
        let context = state.streams.get(stream)?.context;
        let cost = self.cost(state, context, &work);
        let work = self.apply_hardware_model(state, work);
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
            StreamOp::Fault(..) | StreamOp::Hang(_) => OpCost::Nothing,
            StreamOp::Memcpy(copy) => match (self.place(&copy.from), self.place(&copy.to)) {
                (None, None) => OpCost::Nothing,
                (None, Some(to)) => OpCost::ToDevice(to, copy.bytes),
                (Some(from), None) => OpCost::ToHost(from, copy.bytes),
                (Some(from), Some(to)) if from == to => OpCost::Within(to, copy.bytes),
                (Some(from), Some(to)) => OpCost::Peer(from, to, copy.bytes),
            },
            StreamOp::Memset(fill) => OpCost::Within(device, fill.total()),
            StreamOp::Call(_)
            | StreamOp::Record(_)
            | StreamOp::Wait
            | StreamOp::Free(_)
            | StreamOp::WriteValue(..)
            | StreamOp::WaitValue(..) => OpCost::Nothing,
        }
    }

    /// Executes operations until the points are reached and their simulated times are known. Stops early if no operation can
    /// execute before the host acts: then the points may be unreached.
    pub(super) fn settle<'a>(&'a self, mut state: StateGuard<'a>, points: &[StreamPoint]) -> StateGuard<'a> {
        while !state.streams.is_settled(points) {
            let ready = state.streams.ready_to_finish();
            let moved;
            if !ready.is_empty() {
                (state, _) = self.run_op_of(state, &ready);
            } else if !state.performing.is_empty() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            } else {
                (state, moved) = self.run_one_op(state);
                if !moved {
                    state.streams.time.resolve_executed();
                    break;
                }
            }
        }
        state
    }

    /// Executes all operations that can execute. With `restart`, simulated time is measured from their end.
    pub fn settle_simulated_time(&self, restart: bool) {
        let state = self.lock();
        let ends = state.streams.all_tails();
        let mut state = self.settle(state, &ends);
        if restart {
            state.streams.time.restart();
        }
    }

    /// `cuEventElapsedTime`, in milliseconds.
    pub fn elapsed(&self, from: EventId, to: EventId) -> Result<f32> {
        let mut state = self.lock();
        let points = [from, to].map(|id| {
            let event = state.events.get(id)?;
            state.check_alive(event.context)?;
            let point = event.recorded.filter(|_| event.timing).ok_or(Error::InvalidHandle)?;
            if state.streams.is_reached(point) { Ok((point, event.time)) } else { Err(Error::NotReady) }
        });
        let [(from, from_time), (to, to_time)] = match points {
            [Ok(from), Ok(to)] => [from, to],
            [Err(error), _] | [_, Err(error)] => return Err(error),
        };
        if !state.streams.time.is_enabled() {
            let [from, to] = [from_time, to_time].map(|time| time.ok_or(Error::NotReady));
            return Ok(((to? - from?) / 1e3) as f32);
        }
        state = self.settle(state, &[from, to]);
        let [from, to] = [from, to].map(|point| state.streams.time.end(point.entry).ok_or(Error::NotReady));
        Ok(((to? as f64 - from? as f64) / 1e9) as f32)
    }

    /// The device that holds one side of a copy; `None` for host memory.
    fn place(&self, side: &CopyEndpoint) -> Option<u32> {
        let CopyEndpoint::Known(address) = side else { return None };
        self.device_of(*address).map(|device| device as u32)
    }
}

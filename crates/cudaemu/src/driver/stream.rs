//! Streams and events: creation, submission, waits and queries.

use super::{Driver, DriverState, StateGuard};
use crate::engine::{Event, StreamKind, StreamOp, StreamPoint};
use crate::error::{Error, Result};
use crate::handle::{ContextId, EventId, StreamId};

/// `CU_EVENT_…`: blocking sync, no timing, interprocess.
const EVENT_FLAGS: u32 = 7;
/// `CU_EVENT_DISABLE_TIMING`
const EVENT_NO_TIMING: u32 = 2;
/// `CU_EVENT_INTERPROCESS`
const EVENT_INTERPROCESS: u32 = 4;

impl DriverState {
    /// Resolves a stream handle: 0 and 1 are the legacy default stream of the current context, 2 is the thread's default
    /// stream. Fails with the context's fault after one.
    pub fn resolve_stream(&mut self, stream: StreamId) -> Result<StreamId> {
        let id = match crate::engine::default_stream_kind(stream) {
            Some(kind) => {
                let context = self.current()?;
                self.streams.default_of(context, kind)
            }
            None => stream,
        };
        let context = self.streams.get(id)?.context;
        self.check_alive(context)?;
        Ok(id)
    }

    /// `cuStreamCreate`
    pub fn create_stream(&mut self, flags: u32) -> Result<StreamId> {
        let context = self.current()?;
        let kind = match flags {
            0 => StreamKind::Blocking,
            1 => StreamKind::NonBlocking,
            _ => return Err(Error::InvalidValue),
        };
        Ok(self.streams.create(context, kind))
    }

    /// `cuEventCreate`
    pub fn create_event(&mut self, flags: u32) -> Result<EventId> {
        let context = self.current()?;
        if flags & !EVENT_FLAGS != 0 || flags & (EVENT_INTERPROCESS | EVENT_NO_TIMING) == EVENT_INTERPROCESS {
            return Err(Error::InvalidValue);
        }
        Ok(self.events.insert(Event::new(context, flags & EVENT_NO_TIMING == 0)))
    }

    /// `cuEventDestroy`
    pub fn destroy_event(&mut self, event: EventId) -> Result<()> {
        let context = self.events.remove(event)?.context;
        self.check_device_of(context)
    }
}

impl Driver {
    /// `cuStreamDestroy`: default streams cannot be destroyed; queued operations still run.
    pub fn end_stream(&self, stream: StreamId) -> Result<()> {
        let mut state = self.lock();
        let context = state.streams.context_of(stream);
        if crate::engine::default_stream_kind(stream).is_some() {
            return Err(Error::InvalidHandle);
        }
        state.streams.destroy(stream)?;
        context.map_or(Ok(()), |context| state.check_device_of(context))
    }

    /// Appends an operation to a stream. The seed also chooses whether some queued operations run at once: CUDA may start a
    /// stream at any time.
    pub fn submit<'a>(&'a self, mut state: StateGuard<'a>, stream: StreamId, work: StreamOp) -> Result<()> {
        self.enqueue(&mut state, stream, work)?;
        self.maybe_run_ops(state);
        Ok(())
    }

    /// One submission in four runs up to four queued operations.
    pub(super) fn maybe_run_ops<'a>(&'a self, mut state: StateGuard<'a>) {
        self.wake_runner();
        if state.order.choose(4) == 0 {
            for _ in 0..=state.order.choose(4) {
                let moved;
                (state, moved) = self.run_one_op(state);
                if !moved {
                    break;
                }
            }
        }
    }

    /// Appends an operation and waits for it: a call that is synchronous with the host.
    pub fn submit_and_wait<'a>(&'a self, mut state: StateGuard<'a>, stream: StreamId, work: StreamOp) -> Result<()> {
        let point = self.enqueue(&mut state, stream, work)?;
        let context = state.streams.get(stream)?.context;
        let state = self.run_until_reached(state, &[point]);
        state.check_alive(context)
    }

    /// `cuStreamSynchronize`
    pub fn synchronize_stream(&self, stream: StreamId) -> Result<()> {
        let mut state = self.lock();
        let stream = state.resolve_stream(stream)?;
        let context = state.streams.get(stream)?.context;
        let ends = state.streams.sync_points(stream);
        let state = self.run_until_reached(state, &ends);
        state.check_alive(context)
    }

    /// `cuStreamQuery`: each query executes some operations, so that a program that polls makes progress.
    pub fn query_stream(&self, stream: StreamId) -> Result<()> {
        let mut state = self.lock();
        let stream = state.resolve_stream(stream)?;
        let context = state.streams.get(stream)?.context;
        let ends = state.streams.sync_points(stream);
        self.query(state, context, &ends)
    }

    fn query<'a>(&'a self, state: StateGuard<'a>, context: ContextId, points: &[StreamPoint]) -> Result<()> {
        let reached = |state: &DriverState| points.iter().all(|&point| state.streams.is_reached(point));
        let mut state = match state.streams.time.is_enabled() {
            true => self.settle(state, points),
            false if reached(&state) => state,
            false => self.run_one_op(state).0,
        };
        if !reached(&state) {
            self.check_deadlock(&mut state, points);
        }
        state.check_alive(context)?;
        if reached(&state) && state.streams.host_queried(points) { Ok(()) } else { Err(Error::NotReady) }
    }

    /// `cuStreamWaitEvent`: an event that was never recorded does not block.
    pub fn wait_event(&self, stream: StreamId, event: EventId, flags: u32) -> Result<()> {
        if flags > 1 {
            return Err(Error::InvalidValue);
        }
        let mut state = self.lock();
        let stream = state.resolve_stream(stream)?;
        let recorded = state.events.get(event)?.recorded;
        recorded.map_or(Ok(()), |point| state.streams.wait(stream, point))
    }

    /// `cuEventRecord`: event and stream must belong to one context.
    pub fn record_event(&self, event: EventId, stream: StreamId) -> Result<()> {
        let mut state = self.lock();
        let stream = state.resolve_stream(stream)?;
        if state.events.get(event)?.context != state.streams.get(stream)?.context {
            return Err(Error::InvalidHandle);
        }
        let point = state.streams.submit(stream, StreamOp::Record(event))?;
        let event = state.events.get_mut(event)?;
        (event.recorded, event.time) = (Some(point), None);
        self.maybe_run_ops(state);
        Ok(())
    }

    /// `cuEventSynchronize`: returns at once for an event that was never recorded.
    pub fn synchronize_event(&self, event: EventId) -> Result<()> {
        let state = self.lock();
        let found = state.events.get(event)?;
        let (context, point) = (found.context, found.recorded);
        state.check_alive(context)?;
        let state = self.run_until_reached(state, point.as_slice());
        state.check_alive(context)
    }

    /// `cuEventQuery`
    pub fn query_event(&self, event: EventId) -> Result<()> {
        let state = self.lock();
        let found = state.events.get(event)?;
        let (context, point) = (found.context, found.recorded);
        state.check_alive(context)?;
        self.query(state, context, point.as_slice())
    }
}

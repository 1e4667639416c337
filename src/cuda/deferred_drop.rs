//! Deferred drop: keeps the resources of dropped queues until the device has done their work, on one thread per device.

use super::context::{DeviceContext, lock};
use super::events::{Event, EventTimeline};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The sleep between two polls of the kept queues.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Resources of a dropped queue that its submitted work still uses.
pub(super) struct DeferredDrop {
    /// The stream, staging memory, scratch memory and copy paths.
    _resources: Box<dyn Any + Send>,
    events: Arc<EventTimeline>,
    /// Behind all work of the queue.
    end: Event,
    context: Arc<DeviceContext>,
}

/// The dropped queues of a device whose work is not done.
#[derive(Default)]
pub(super) struct DeferredDrops(Mutex<DeferredState>);

#[derive(Default)]
struct DeferredState {
    pending: Vec<DeferredDrop>,
    /// Whether the thread runs. It ends when nothing is pending.
    has_thread: bool,
}

impl DeferredDrop {
    /// `end` must be recorded behind all work of the queue.
    pub(super) fn new(
        context: &Arc<DeviceContext>,
        events: &Arc<EventTimeline>,
        end: Event,
        resources: Box<dyn Any + Send>,
    ) -> DeferredDrop {
        DeferredDrop { _resources: resources, events: Arc::clone(events), end, context: Arc::clone(context) }
    }

    /// Whether the device no longer uses the resources: the last event is reached, or the device has failed.
    fn is_complete(&self) -> bool {
        self.context.bind().is_err() || self.end.is_reached(&self.context) != Ok(false)
    }

    /// Drops the resources at once if their work is done, else on the device's thread. Does not block.
    pub(super) fn drop_when_complete(self) {
        if self.is_complete() {
            return;
        }
        let context = Arc::clone(&self.context);
        let mut state = lock(&context.deferred_drops.0);
        state.pending.push(self);
        if state.has_thread {
            return;
        }
        let of_thread = Arc::clone(&context);
        let spawned = std::thread::Builder::new()
            .name("cuda-deferred-drop".to_owned())
            .spawn(move || of_thread.deferred_drops.run());
        state.has_thread = spawned.is_ok();
        if spawned.is_err() {
            // The driver blocks until the work is done before it frees memory.
            let pending = std::mem::take(&mut state.pending);
            drop(state);
            drop(pending);
        }
    }
}

impl Drop for DeferredDrop {
    fn drop(&mut self) {
        // Points may outlive the queue and keep the event timeline alive; it must not keep memory alive.
        self.events.release_until(u64::MAX);
    }
}

impl DeferredDrops {
    fn run(&self) {
        // A panic is a bug of one queue's resources. The queues of all others are freed all the same.
        while catch_unwind(AssertUnwindSafe(|| self.drop_complete())).unwrap_or(true) {
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Drops the resources whose work is done. Returns false if nothing is pending: the thread must end.
    fn drop_complete(&self) -> bool {
        let mut state = lock(&self.0);
        let complete: Vec<_> = state.pending.extract_if(.., |pending| pending.is_complete()).collect();
        state.has_thread = !complete.is_empty() || !state.pending.is_empty();
        let goes_on = state.has_thread;
        drop(state);
        // Outside of the lock: the resources of a queue may include the last handle of another device.
        drop(complete);
        goes_on
    }
}

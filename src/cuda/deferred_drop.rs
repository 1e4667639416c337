//! Deferred drop: one thread per device does what must not happen on a thread that submits work. It keeps the resources of dropped
//! queues until the device has done their work, frees memory where that waits for the GPU, and returns unused memory to the system.

use super::context::{DeviceContext, lock};
use super::event_timeline::EventTimeline;
use super::events::Event;
use super::memory::DirectMemory;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// The sleep between two polls of the kept queues.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// How long freed memory stays in the pool of the device, for the next allocation.
const KEEP_FREED_MEMORY: Duration = Duration::from_secs(1);

/// Resources of a dropped queue that its submitted work still uses.
pub(super) struct DeferredDrop {
    /// The stream, staging memory and scratch memory.
    _resources: Box<dyn Any + Send>,
    events: Arc<EventTimeline>,
    /// Behind all work of the queue.
    end: Event,
    context: Arc<DeviceContext>,
}

/// What the thread of a device has to do.
#[derive(Default)]
pub(super) struct DeferredDrops(Mutex<DeferredState>);

#[derive(Default)]
struct DeferredState {
    /// The dropped queues whose work is not done.
    pending: Vec<DeferredDrop>,
    /// Memory to free, each with the context that it belongs to.
    direct: Vec<(Arc<DeviceContext>, DirectMemory)>,
    /// When unused memory is returned to the system.
    trim_at: Option<Instant>,
    /// Whether the thread runs. It ends when nothing is to be done.
    has_thread: bool,
}

impl DeferredState {
    fn has_work(&self) -> bool {
        !self.pending.is_empty() || !self.direct.is_empty() || self.trim_at.is_some()
    }
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
        self.context.bind().is_err() || self.end.is_reached() != Ok(false)
    }

    /// Drops the resources at once if their work is done, else on the device's thread. Does not block.
    pub(super) fn drop_when_complete(self) {
        if self.context.primary().is_hung() {
            // A kernel that never ends may still use them, and releasing them may wait for it.
            std::mem::forget(self);
        } else if !self.is_complete() {
            let context = Arc::clone(&self.context);
            // Without a thread, the driver defers the release of what it can, and blocks for the rest.
            drop(DeferredDrops::add(&context, |state| state.pending.push(self)));
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
    /// Returns the memory that the device's pool keeps to the system in a while.
    pub(super) fn trim_later(context: &Arc<DeviceContext>) {
        let trim_at = Instant::now() + KEEP_FREED_MEMORY;
        let _ = DeferredDrops::add(context, |state| state.trim_at = Some(trim_at));
    }

    /// Frees memory on the device's thread.
    pub(super) fn free_later(context: &Arc<DeviceContext>, memory: DirectMemory) {
        let left = DeferredDrops::add(context, |state| state.direct.push((Arc::clone(context), memory)));
        left.into_iter().flat_map(|state| state.direct).for_each(|(_, memory)| memory.free());
    }

    /// Adds work for the thread, and starts it if it does not run. Returns all work if the system starts no thread.
    fn add(context: &Arc<DeviceContext>, add: impl FnOnce(&mut DeferredState)) -> Option<DeferredState> {
        let mut state = lock(&context.deferred_drops.0);
        add(&mut state);
        if state.has_thread {
            return None;
        }
        // Weak: work that may be left undone does not keep the context alive.
        let of_thread = Arc::downgrade(context);
        let thread = std::thread::Builder::new().name("cuda-deferred-drop".to_owned());
        state.has_thread = thread.spawn(move || DeferredDrops::run(&of_thread)).is_ok();
        if state.has_thread { None } else { Some(std::mem::take(&mut *state)) }
    }

    fn run(context: &Weak<DeviceContext>) {
        loop {
            let Some(context) = context.upgrade() else { return };
            // A panic is a bug of one queue's resources. The queues of all others are freed all the same.
            let goes_on = catch_unwind(AssertUnwindSafe(|| context.deferred_drops.work(&context))).unwrap_or(true);
            if !goes_on {
                return;
            }
            drop(context);
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Does what can be done now. Returns false if nothing is left: the thread must end.
    fn work(&self, context: &DeviceContext) -> bool {
        let mut state = lock(&self.0);
        if context.primary().is_hung() {
            // See `drop_when_complete`.
            std::mem::forget((std::mem::take(&mut state.pending), std::mem::take(&mut state.direct)));
            state.trim_at = None;
        }
        let complete: Vec<_> = state.pending.extract_if(.., |pending| pending.is_complete()).collect();
        let direct = std::mem::take(&mut state.direct);
        let trims = state.trim_at.take_if(|at| *at <= Instant::now()).is_some();
        let did_something = !complete.is_empty() || !direct.is_empty();
        state.has_thread = did_something || state.has_work();
        let goes_on = state.has_thread;
        drop(state);
        // Outside of the lock: the resources of a queue may include the last handle of another device.
        drop(complete);
        for (context, memory) in direct {
            if context.bind().is_ok() {
                memory.free();
            }
        }
        if trims {
            context.memory_source.trim();
        }
        goes_on
    }
}

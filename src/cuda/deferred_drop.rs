//! Deferred drop: one thread per device does what must not happen on a thread that submits work. It keeps the resources of dropped
//! queues until the device has done their work, frees memory where that waits for the GPU, and returns unused memory to the system.

use super::context::DeviceContext;
use super::event_timeline::EventTimeline;
use super::events::Event;
use super::memory::DirectMemory;
use crate::poison::lock;
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
    /// Recorded after all work of the queue.
    end: Event,
    context: Arc<DeviceContext>,
}

/// The work of a device's thread. Work for which the system started no thread stays, and the next work, or a poll of the
/// device's queues, tries again.
#[derive(Default)]
pub(super) struct DeferredDrops(Mutex<DeferredState>);

#[derive(Default)]
struct DeferredState {
    /// The dropped queues whose work is not done.
    pending: Vec<DeferredDrop>,
    /// Memory to free, each with the context that it belongs to.
    direct: Vec<(Arc<DeviceContext>, DirectMemory)>,
    /// Number of memories in `direct`, and of those that the thread is freeing.
    unfreed: usize,
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
    /// `end` must be recorded after all work of the queue.
    pub(super) fn new(
        context: &Arc<DeviceContext>,
        events: &Arc<EventTimeline>,
        end: Event,
        resources: Box<dyn Any + Send>,
    ) -> DeferredDrop {
        DeferredDrop { _resources: resources, events: Arc::clone(events), end, context: Arc::clone(context) }
    }

    /// Whether the device no longer uses the resources: the last event is reached, or the device is lost. (A query that fails otherwise is
    /// repeated with the next poll.)
    fn is_complete(&self) -> bool {
        // Notices that the GPU hangs: nobody waits for the points of a dropped queue.
        let _ = self.events.poll_events();
        let is_reached = self.context.bind().and_then(|()| self.end.is_reached());
        is_reached == Ok(true) || self.context.primary().lost().is_some()
    }

    /// Drops the resources, whose work is done unless the GPU hangs.
    fn end(self) {
        if self.context.primary().is_hung() {
            // A kernel that never ends may still use them, and releasing them may wait for it.
            std::mem::forget(self);
        }
    }

    /// Drops the resources at once if their work is done, else on the device's thread. Does not block.
    pub(super) fn drop_when_complete(self) {
        if self.is_complete() {
            self.end();
        } else {
            let context = Arc::clone(&self.context);
            DeferredDrops::add(&context, |state| state.pending.push(self));
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
        DeferredDrops::add(context, |state| state.trim_at = state.trim_at.or(Some(trim_at)));
    }

    /// Frees memory on the device's thread.
    pub(super) fn free_later(context: &Arc<DeviceContext>, memory: DirectMemory) {
        DeferredDrops::add(context, |state| {
            state.unfreed += 1;
            state.direct.push((Arc::clone(context), memory));
        });
    }

    /// Whether memory is waiting to be freed by the thread.
    pub(super) fn has_unfreed(context: &Arc<DeviceContext>) -> bool {
        DeferredDrops::add(context, |_| {});
        lock(&context.deferred_drops.0).unfreed > 0
    }

    /// Adds work for the thread, and starts it if it does not run.
    fn add(context: &Arc<DeviceContext>, add: impl FnOnce(&mut DeferredState)) {
        let mut state = lock(&context.deferred_drops.0);
        add(&mut state);
        if !state.has_thread && state.has_work() {
            // Weak: work that may be left undone does not keep the context alive.
            let of_thread = Arc::downgrade(context);
            let thread = std::thread::Builder::new().name("cuda-deferred-drop".to_owned());
            state.has_thread = thread.spawn(move || DeferredDrops::run(&of_thread)).is_ok();
        }
    }

    /// Starts the thread if there is work and the system started none before.
    pub(super) fn retry(context: &Arc<DeviceContext>) {
        DeferredDrops::add(context, |_| {});
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
        let (pending, direct) = (std::mem::take(&mut state.pending), std::mem::take(&mut state.direct));
        let is_due = state.trim_at.is_some_and(|at| at <= Instant::now());
        drop(state);
        // Outside of the lock: polling may release the memory of other queues, and the resources of a queue may include the last
        // handle of another device.
        let freed = direct.len();
        let mut kept = Vec::new();
        for pending in pending {
            if pending.is_complete() {
                pending.end();
            } else {
                kept.push(pending);
            }
        }
        for (context, memory) in direct {
            if context.primary().bind_for_release() {
                memory.free();
            }
        }
        // The driver keeps memory whose free nobody has seen done.
        let trims = is_due && context.bind().is_ok() && context.service_stream().is_idle() != Ok(false);
        if trims {
            context.memory_source.trim();
        }
        let is_hung = context.primary().is_hung();
        let mut state = lock(&self.0);
        state.unfreed = state.unfreed.saturating_sub(freed);
        if trims || is_hung {
            state.trim_at = None;
        }
        state.pending.append(&mut kept);
        state.has_thread = state.has_work();
        state.has_thread
    }
}

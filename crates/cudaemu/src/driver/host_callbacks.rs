//! Host callbacks in stream order. They run on a separate thread, as in the real driver, so that a callback may wait for the
//! program's thread. They must not call the driver.

use std::cell::Cell;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::Driver;
use crate::engine::{HostCall, OpOutcome};
use crate::handle::{ContextId, StreamId};

/// The callback thread, started by the first callback. It ends with the driver.
#[derive(Debug, Default)]
pub(super) struct CallbackThread {
    jobs: OnceLock<Mutex<Sender<Job>>>,
}

struct Job {
    driver: Arc<Driver>,
    context: ContextId,
    stream: StreamId,
    call: HostCall,
}

thread_local! {
    static CALLING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is executing a stream's callback.
pub(super) fn in_host_callback() -> bool {
    CALLING.get()
}

impl CallbackThread {
    /// Queues a callback; its stream continues when the callback returns.
    pub(super) fn call(&self, driver: Arc<Driver>, context: ContextId, stream: StreamId, call: HostCall) {
        let jobs = self.jobs.get_or_init(|| {
            let (sender, jobs) = channel::<Job>();
            std::thread::spawn(move || jobs.into_iter().for_each(Job::run));
            Mutex::new(sender)
        });
        let jobs = jobs.lock().unwrap_or_else(PoisonError::into_inner);
        // Cannot fail: the thread receives as long as the sender exists.
        let _ = jobs.send(Job { driver, context, stream, call });
    }
}

impl Job {
    fn run(self) {
        CALLING.set(true);
        (self.call.0)();
        CALLING.set(false);
        self.driver.state().finish(self.context, self.stream, OpOutcome::default());
        self.driver.changed.notify_all();
    }
}

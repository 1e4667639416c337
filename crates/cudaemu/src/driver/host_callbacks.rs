//! Host callbacks in stream order. They run on a separate thread, as in the real driver, so that a callback may wait for the
//! program's thread. They must not call the driver.

use std::cell::Cell;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::Driver;
use crate::engine::{HostCall, OpOutcome};
use crate::error::Error;
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
    lost: Option<Error>,
}

thread_local! {
    static CALLING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is executing a stream's callback.
pub(super) fn in_host_callback() -> bool {
    CALLING.get()
}

impl CallbackThread {
    /// Queues a callback; its stream continues when the callback returns. `lost` is the error of a context that had a fault.
    pub(super) fn call(
        &self,
        driver: Arc<Driver>,
        context: ContextId,
        stream: StreamId,
        call: HostCall,
        lost: Option<Error>,
    ) {
        let jobs = self.jobs.get_or_init(|| {
            let (sender, jobs) = channel::<Job>();
            std::thread::spawn(move || jobs.into_iter().for_each(Job::run));
            Mutex::new(sender)
        });
        let jobs = jobs.lock().unwrap_or_else(PoisonError::into_inner);
        // Cannot fail: the thread receives as long as the sender exists.
        let _ = jobs.send(Job { driver, context, stream, call, lost });
    }
}

impl Job {
    fn run(self) {
        CALLING.set(true);
        (self.call.run)(self.lost);
        CALLING.set(false);
        self.driver.state().finish(self.context, self.stream, OpOutcome::default());
        self.driver.changed.notify_all();
    }
}

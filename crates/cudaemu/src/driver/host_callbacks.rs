//! Functions of the program that streams call: they run on a thread of their own, as the real driver's do, so that one that waits for the
//! program's thread does not keep it from going on. They may not call the driver.

use std::cell::Cell;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::Driver;
use crate::engine::{HostCall, OpOutcome};
use crate::error::Error;
use crate::handle::{ContextId, StreamId};

/// The thread that calls, once it was needed. It ends with the driver.
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

/// Whether this thread is in a function that a stream called.
pub(super) fn in_host_callback() -> bool {
    CALLING.get()
}

impl CallbackThread {
    /// Has a stream's work called; the stream goes on when it returns. `lost` is the error of a lost context.
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
        // The thread takes jobs as long as there is a sender.
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

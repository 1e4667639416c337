//! The idle runner: does what is queued when the program makes no calls.
//!
//! Work normally runs on the threads that wait for it. A program may also wait by other means, such as for what a host function does
//! or for a value in pinned memory; for its sake a thread of ours runs ready work when no call has come for a while. The thread
//! sleeps without a timeout while nothing is queued, is started by the first submission, and ends with the driver; a process that
//! ends does not wait for it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::console::say;

/// What came of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Something was done; there may be more.
    Moved,
    /// Something is queued, but cannot be done now.
    Blocked,
    /// Nothing is queued.
    Idle,
    /// The driver is gone.
    Gone,
}

/// The handle of the thread; dropping it ends the thread after its step.
#[derive(Debug)]
pub struct Runner {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Calls so far: whether one came meanwhile is seen by comparing.
    calls: AtomicU64,
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct State {
    started: bool,
    queued: bool,
    ended: bool,
}

impl Default for Runner {
    fn default() -> Self {
        Self { shared: Arc::new(Shared::default()) }
    }
}

impl Runner {
    /// A call came: the program is not idle.
    pub fn tick(&self) {
        self.shared.calls.fetch_add(1, Ordering::Relaxed);
    }

    /// Something is queued. The first time, the thread is made: it calls what `step` makes when no call came for `quiet`.
    pub fn submitted<S: FnMut() -> Progress + Send + 'static>(&self, quiet: Duration, step: impl FnOnce() -> S) {
        let mut state = self.shared.lock();
        if state.queued {
            return;
        }
        state.queued = true;
        if state.started {
            drop(state);
            self.shared.wake.notify_all();
            return;
        }
        state.started = true;
        drop(state);
        let shared = self.shared.clone();
        let step = step();
        let made = std::thread::Builder::new().name("cudaemu idle".into()).spawn(move || shared.run(quiet, step));
        if let Err(error) = made {
            say(format_args!(
                "no thread for idle times ({error}): queued work runs only when the program waits for it"
            ));
        }
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.wake.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, quiet: Duration, mut step: impl FnMut() -> Progress) {
        let mut state = self.lock();
        loop {
            while !state.queued && !state.ended {
                state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let before = self.calls.load(Ordering::Relaxed);
            if !state.ended {
                state = self.wake.wait_timeout(state, quiet).unwrap_or_else(PoisonError::into_inner).0;
            }
            if state.ended {
                return;
            }
            if self.calls.load(Ordering::Relaxed) != before {
                continue;
            }
            // What is submitted from here on sets it again.
            state.queued = false;
            drop(state);
            let progress = loop {
                let progress = step();
                if progress != Progress::Moved || self.calls.load(Ordering::Relaxed) != before {
                    break progress;
                }
            };
            state = self.lock();
            match progress {
                Progress::Moved | Progress::Blocked => state.queued = true,
                Progress::Idle => {}
                Progress::Gone => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    const QUIET: Duration = Duration::from_micros(200);
    /// Only a failure waits so long.
    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn runs_what_is_queued_and_parks() {
        let runner = Runner::default();
        let (steps, seen) = mpsc::channel();
        let (answers, asked) = mpsc::channel();
        let step = move || {
            move || {
                steps.send(()).unwrap();
                asked.recv().unwrap_or(Progress::Gone)
            }
        };
        let again = || || -> Progress { unreachable!("the thread is made once") };
        runner.submitted(QUIET, step);
        for answer in [Progress::Moved, Progress::Blocked, Progress::Moved, Progress::Idle] {
            seen.recv_timeout(PATIENCE).unwrap();
            answers.send(answer).unwrap();
        }
        // It sleeps now, or is about to; either way one submission is one step, with no other between.
        runner.tick();
        runner.submitted(QUIET, again);
        seen.recv_timeout(PATIENCE).unwrap();
        // Work that comes during a step is not forgotten.
        runner.submitted(QUIET, again);
        answers.send(Progress::Idle).unwrap();
        seen.recv_timeout(PATIENCE).unwrap();
        answers.send(Progress::Idle).unwrap();
        drop(runner);
        // The thread ends, and drops its end of the channel, without another step.
        assert_eq!(seen.recv_timeout(PATIENCE), Err(mpsc::RecvTimeoutError::Disconnected));
    }

    #[test]
    fn ends_when_the_driver_is_gone() {
        let runner = Runner::default();
        let (steps, seen) = mpsc::channel();
        runner.submitted(QUIET, || {
            move || {
                steps.send(()).unwrap();
                Progress::Gone
            }
        });
        seen.recv_timeout(PATIENCE).unwrap();
        assert_eq!(seen.recv_timeout(PATIENCE), Err(mpsc::RecvTimeoutError::Disconnected));
    }
}

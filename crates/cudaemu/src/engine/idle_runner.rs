//! The idle runner: does what is queued when the program makes no calls.
//!
//! Work normally runs on the threads that wait for it. A program may also wait by other means, such as for what a host function does
//! or for a value in pinned memory; for its sake a thread of ours runs ready work when no call has come for a while. The thread
//! sleeps without a timeout while nothing is queued, is started by the first submission, and ends with the driver; a process that
//! ends does not wait for it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::console::log_stderr;

/// What came of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepProgress {
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
pub struct IdleRunner {
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

impl Default for IdleRunner {
    fn default() -> Self {
        Self { shared: Arc::new(Shared::default()) }
    }
}

impl IdleRunner {
    /// A call came: the program is not idle.
    pub fn note_call(&self) {
        self.shared.calls.fetch_add(1, Ordering::Relaxed);
    }

    /// Something is queued. The first time, the thread is made: it calls what `step` makes when no call came for `quiet`.
    pub fn notify_submitted<S: FnMut() -> StepProgress + Send + 'static>(
        &self,
        quiet: Duration,
        step: impl FnOnce() -> S,
    ) {
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
            log_stderr(format_args!(
                "no thread for idle times ({error}): queued work runs only when the program waits for it"
            ));
        }
    }
}

impl Drop for IdleRunner {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.wake.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, quiet: Duration, mut step: impl FnMut() -> StepProgress) {
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
                if progress != StepProgress::Moved || self.calls.load(Ordering::Relaxed) != before {
                    break progress;
                }
            };
            state = self.lock();
            match progress {
                StepProgress::Moved | StepProgress::Blocked => state.queued = true,
                StepProgress::Idle => {}
                StepProgress::Gone => return,
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
        let runner = IdleRunner::default();
        let (steps, seen) = mpsc::channel();
        let (answers, asked) = mpsc::channel();
        let step = move || {
            move || {
                steps.send(()).unwrap();
                asked.recv().unwrap_or(StepProgress::Gone)
            }
        };
        let again = || || -> StepProgress { unreachable!("the thread is made once") };
        runner.notify_submitted(QUIET, step);
        for answer in [StepProgress::Moved, StepProgress::Blocked, StepProgress::Moved, StepProgress::Idle] {
            seen.recv_timeout(PATIENCE).unwrap();
            answers.send(answer).unwrap();
        }
        // It sleeps now, or is about to; either way one submission is one step, with no other between.
        runner.note_call();
        runner.notify_submitted(QUIET, again);
        seen.recv_timeout(PATIENCE).unwrap();
        // Work that comes during a step is not forgotten.
        runner.notify_submitted(QUIET, again);
        answers.send(StepProgress::Idle).unwrap();
        seen.recv_timeout(PATIENCE).unwrap();
        answers.send(StepProgress::Idle).unwrap();
        drop(runner);
        // The thread ends, and drops its end of the channel, without another step.
        assert_eq!(seen.recv_timeout(PATIENCE), Err(mpsc::RecvTimeoutError::Disconnected));
    }

    #[test]
    fn ends_when_the_driver_is_gone() {
        let runner = IdleRunner::default();
        let (steps, seen) = mpsc::channel();
        runner.notify_submitted(QUIET, || {
            move || {
                steps.send(()).unwrap();
                StepProgress::Gone
            }
        });
        seen.recv_timeout(PATIENCE).unwrap();
        assert_eq!(seen.recv_timeout(PATIENCE), Err(mpsc::RecvTimeoutError::Disconnected));
    }
}

//! Idle runner: a background thread that executes queued operations while the program makes no calls.
//!
//! Operations normally execute on the threads that wait for them. A program may also wait by other means, such as for the
//! effect of a host function, for a value in pinned memory or for freed memory. For these cases the idle runner executes ready
//! operations when no call arrived for a while, and now and then while calls arrive without a pause: a program may call until it
//! sees an effect that no call waits for. The first submission starts the thread. It sleeps without a timeout while nothing is
//! queued, and ends with the driver; process exit does not wait for it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::console::log_stderr;

/// After as many periods with calls, the thread executes an operation all the same.
const BUSY_PERIODS: u32 = 10;

/// Result of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepProgress {
    /// An operation was executed; there may be more.
    Moved,
    /// Operations are queued, but none can execute now.
    Blocked,
    /// Nothing is queued.
    Idle,
    /// The driver was dropped.
    Gone,
}

/// Handle of the thread. Dropping it ends the thread after its current step.
#[derive(Debug)]
pub struct IdleRunner {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Number of calls so far. The thread compares two readings to detect a call in between.
    calls: AtomicU64,
    state: Mutex<IdleRunnerState>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct IdleRunnerState {
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
    /// Records a call: the program is not idle.
    pub fn note_call(&self) {
        self.shared.calls.fetch_add(1, Ordering::Relaxed);
    }

    /// Wakes the thread after a submission. The first submission starts it: the thread calls the function that `step` returns
    /// when no API call arrived for `quiet`, and once in ten such periods with calls.
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
                "cannot start the idle runner's thread ({error}): queued work runs only when the program waits for it"
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
    fn lock(&self) -> MutexGuard<'_, IdleRunnerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, quiet: Duration, mut step: impl FnMut() -> StepProgress) {
        let mut state = self.lock();
        let mut busy = 0;
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
                busy += 1;
                if busy < BUSY_PERIODS {
                    continue;
                }
            }
            busy = 0;
            // A submission from here on sets the flag again, so none is lost.
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
    /// Test timeout: only a failure waits this long.
    const TIMEOUT: Duration = Duration::from_secs(20);

    #[test]
    fn queued_operations_run_and_the_thread_parks() {
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
            seen.recv_timeout(TIMEOUT).unwrap();
            answers.send(answer).unwrap();
        }
        // The thread sleeps now or is about to. In both cases one submission causes exactly one step.
        runner.note_call();
        runner.notify_submitted(QUIET, again);
        seen.recv_timeout(TIMEOUT).unwrap();
        // A submission during a step is not lost.
        runner.notify_submitted(QUIET, again);
        answers.send(StepProgress::Idle).unwrap();
        seen.recv_timeout(TIMEOUT).unwrap();
        answers.send(StepProgress::Idle).unwrap();
        drop(runner);
        // The thread ends without another step and drops its end of the channel.
        assert_eq!(seen.recv_timeout(TIMEOUT), Err(mpsc::RecvTimeoutError::Disconnected));
    }

    #[test]
    fn queued_operations_run_although_calls_never_pause() {
        let runner = IdleRunner::default();
        let (steps, seen) = mpsc::channel();
        runner.notify_submitted(QUIET, || {
            move || {
                steps.send(()).unwrap();
                StepProgress::Gone
            }
        });
        let ends = std::time::Instant::now() + TIMEOUT;
        while seen.try_recv().is_err() {
            assert!(std::time::Instant::now() < ends, "no operation runs");
            runner.note_call();
        }
    }

    #[test]
    fn the_thread_ends_when_the_driver_is_dropped() {
        let runner = IdleRunner::default();
        let (steps, seen) = mpsc::channel();
        runner.notify_submitted(QUIET, || {
            move || {
                steps.send(()).unwrap();
                StepProgress::Gone
            }
        });
        seen.recv_timeout(TIMEOUT).unwrap();
        assert_eq!(seen.recv_timeout(TIMEOUT), Err(mpsc::RecvTimeoutError::Disconnected));
    }
}

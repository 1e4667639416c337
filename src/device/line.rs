//! A queue's commands on their way to a thread of its own, and what runs them on its way to or from it.
//!
//! Whoever holds the *executor* runs commands. While nothing is pending that is the submitter; it hands the executor over
//! with the first command that it leaves to the thread, and the thread gives it back when it has nothing left.

use super::DeviceError;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Commands that may wait in a queue.
const DEPTH: usize = 64;

/// Bytes of uploads that may wait in a queue's commands.
const STAGED: usize = 4 << 20;

/// What a line carries.
pub(crate) trait Staged {
    /// Bytes of an upload that it holds itself.
    fn staged(&self) -> usize;
}

/// Commands `C` for an executor `X`, between the one submitter that made it and its thread.
pub(crate) struct Line<C, X> {
    state: Mutex<State<C, X>>,
    /// For the thread: there is a command, or there will be no more.
    news: Condvar,
    /// For the submitter: there is room again, or nothing pending any more.
    room: Condvar,
}

struct State<C, X> {
    pending: VecDeque<C>,
    /// Bytes that the pending commands hold.
    staged: usize,
    /// With the first pending command it comes, and goes when the last one is done.
    executor: Option<Box<X>>,
    /// Whether the thread waits for news, and the submitter for room: otherwise nobody need be woken.
    sleeps: bool,
    crowded: bool,
    /// The submitter or the thread is gone.
    ended: bool,
}

impl<C: Staged + Send + 'static, X: Send + 'static> Line<C, X> {
    /// A line whose thread runs commands by `obey`.
    ///
    /// # Errors
    /// [`DeviceError::Exhausted`] when the system has no thread for it.
    pub(crate) fn start(name: &str, obey: fn(&mut X, C)) -> Result<Arc<Line<C, X>>, DeviceError> {
        let state =
            State { pending: VecDeque::new(), staged: 0, executor: None, sleeps: false, crowded: false, ended: false };
        let line = Arc::new(Line { state: Mutex::new(state), news: Condvar::new(), room: Condvar::new() });
        let thread = Thread(Arc::clone(&line));
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || thread.0.serve(obey))
            .map_err(|e| DeviceError::no_thread("for a queue", &e))?;
        Ok(line)
    }

    /// The executor, if everything handed over so far is done.
    pub(crate) fn idle(&self) -> Option<Box<X>> {
        let mut state = self.lock();
        if state.pending.is_empty() { state.executor.take() } else { None }
    }

    /// As [`Line::idle`], once that is so.
    ///
    /// # Errors
    /// [`DeviceError::Ended`] when the thread is gone; [`DeviceError::Deadline`].
    pub(crate) fn idle_by(&self, deadline: Instant) -> Result<Box<X>, DeviceError> {
        let mut state = self.lock();
        loop {
            if state.pending.is_empty()
                && let Some(executor) = state.executor.take()
            {
                return Ok(executor);
            }
            if state.ended {
                return Err(DeviceError::Ended);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(DeviceError::Deadline("a queue's earlier work"));
            }
            state.crowded = true;
            state = self.room.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Leaves a command to the thread, with the executor if that is here. Waits for room.
    ///
    /// # Errors
    /// [`DeviceError::Ended`] when the thread is gone.
    pub(crate) fn hand_over(&self, command: C, executor: &mut Option<Box<X>>) -> Result<(), DeviceError> {
        let mut state = self.lock();
        while state.pending.len() >= DEPTH || (state.staged > 0 && state.staged + command.staged() > STAGED) {
            if state.ended {
                break;
            }
            state.crowded = true;
            state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.ended {
            return Err(DeviceError::Ended);
        }
        if let Some(executor) = executor.take() {
            state.executor = Some(executor);
        }
        state.staged += command.staged();
        state.pending.push_back(command);
        let wake = state.sleeps;
        drop(state);
        if wake {
            self.news.notify_one();
        }
        Ok(())
    }

    /// There will be no more commands, and nobody wants those that are pending.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        let left = std::mem::take(&mut state.pending);
        drop(state);
        self.news.notify_one();
        // Whoever waits for their bytes is told, also while the thread is busy yet.
        drop(left);
    }

    fn serve(&self, obey: fn(&mut X, C)) {
        let mut held: Option<Box<X>> = None;
        let mut state = self.lock();
        while !state.ended {
            let Some(command) = state.pending.pop_front() else {
                state.executor = held.take().or(state.executor.take());
                self.make_known(&mut state);
                state.sleeps = true;
                state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.sleeps = false;
                continue;
            };
            state.staged -= command.staged();
            held = held.or(state.executor.take());
            self.make_known(&mut state);
            drop(state);
            let Some(executor) = &mut held else { return };
            obey(executor, command);
            state = self.lock();
        }
    }

    /// Wakes a submitter that waits.
    fn make_known(&self, state: &mut State<C, X>) {
        if std::mem::take(&mut state.crowded) {
            self.room.notify_one();
        }
    }
}

impl<C, X> Line<C, X> {
    fn lock(&self) -> MutexGuard<'_, State<C, X>> {
        // Changes are single steps: a panic elsewhere cannot have left it torn.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The line's thread. However it ends, by a panic too, the submitter does not wait for it.
struct Thread<C, X>(Arc<Line<C, X>>);

impl<C, X> Drop for Thread<C, X> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.ended = true;
        // Whoever waits for their bytes is told.
        let left = (std::mem::take(&mut state.pending), state.executor.take());
        drop(state);
        self.0.room.notify_one();
        drop(left);
    }
}

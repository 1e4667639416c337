//! A bounded channel that carries a queue's commands from the submitter to a worker thread, and the *executor* back and forth.
//!
//! The executor is the state that runs commands; the side that holds it may run them. While no command is pending, the
//! submitter may take the executor and run small commands inline. It sends the executor along with the first command for the
//! thread. The thread returns the executor to the channel when no command is left.

use super::DeviceError;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Limit on the commands that are pending in a channel. A submitter that would exceed it waits: the backpressure of a queue.
const MAX_PENDING_COMMANDS: usize = 64;

/// Limit on the bytes of uploads that pending commands hold, with the same backpressure. A single larger upload is accepted
/// while no other bytes are pending.
const MAX_PENDING_BYTES: usize = 4 << 20;

/// A command that may hold the bytes of an upload.
pub(crate) trait StagedBytes {
    /// Bytes of an upload that the command holds; 0 for all other commands.
    fn staged_bytes(&self) -> usize;
}

/// Channel for commands `C` and an executor `X`, between one submitter and one thread.
pub(crate) struct CommandChannel<C, X> {
    state: Mutex<ChannelState<C, X>>,
    /// Wakes the thread: a command is pending, or the channel is closed.
    command_or_closed: Condvar,
    /// Wakes the submitter: a pending command was removed, the executor is back, or the channel is closed.
    space_or_idle: Condvar,
}

struct ChannelState<C, X> {
    pending: VecDeque<C>,
    /// Sum of [`StagedBytes::staged_bytes`] of the pending commands.
    pending_bytes: usize,
    /// `None` while the submitter or the thread holds the executor.
    executor: Option<Box<X>>,
    /// Whether the thread waits on `command_or_closed`. Notifications are sent only then, which saves system calls.
    thread_sleeping: bool,
    /// Whether the submitter waits on `space_or_idle`, likewise.
    submitter_waiting: bool,
    /// The submitter has closed the channel, or the thread has ended.
    closed: bool,
}

impl<C: StagedBytes + Send + 'static, X: Send + 'static> CommandChannel<C, X> {
    /// Makes a channel and spawns its thread, which runs each command with `process`.
    ///
    /// # Errors
    /// [`DeviceError::Exhausted`] when the system cannot start the thread.
    pub(crate) fn start(name: &str, process: fn(&mut X, C)) -> Result<Arc<CommandChannel<C, X>>, DeviceError> {
        let state = ChannelState {
            pending: VecDeque::new(),
            pending_bytes: 0,
            executor: None,
            thread_sleeping: false,
            submitter_waiting: false,
            closed: false,
        };
        let channel = Arc::new(CommandChannel {
            state: Mutex::new(state),
            command_or_closed: Condvar::new(),
            space_or_idle: Condvar::new(),
        });
        let thread = CloseOnDrop(Arc::clone(&channel));
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || thread.0.process_commands(process))
            .map_err(|e| DeviceError::thread_spawn_failed("for a queue", &e))?;
        Ok(channel)
    }

    /// Takes the executor back if all commands sent so far are done. Does not block.
    pub(crate) fn take_executor_if_idle(&self) -> Option<Box<X>> {
        let mut state = self.lock();
        if state.pending.is_empty() { state.executor.take() } else { None }
    }

    /// As [`CommandChannel::take_executor_if_idle`], but blocks until all commands sent so far are done.
    ///
    /// # Errors
    /// [`DeviceError::Ended`] when the thread has ended; [`DeviceError::Deadline`] when the deadline passes first.
    pub(crate) fn wait_idle(&self, deadline: Instant) -> Result<Box<X>, DeviceError> {
        let mut state = self.lock();
        loop {
            if state.pending.is_empty()
                && let Some(executor) = state.executor.take()
            {
                return Ok(executor);
            }
            if state.closed {
                return Err(DeviceError::Ended);
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return Err(DeviceError::Deadline("earlier commands of the queue"));
            }
            state.submitter_waiting = true;
            state = self.space_or_idle.wait_timeout(state, remaining).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sends a command to the thread, together with the executor if the submitter holds it. Blocks while the channel is full.
    ///
    /// # Errors
    /// [`DeviceError::Ended`] when the thread has ended.
    pub(crate) fn send(&self, command: C, executor: &mut Option<Box<X>>) -> Result<(), DeviceError> {
        let mut state = self.lock();
        while state.pending.len() >= MAX_PENDING_COMMANDS
            || (state.pending_bytes > 0 && state.pending_bytes + command.staged_bytes() > MAX_PENDING_BYTES)
        {
            if state.closed {
                break;
            }
            state.submitter_waiting = true;
            state = self.space_or_idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.closed {
            return Err(DeviceError::Ended);
        }
        if let Some(executor) = executor.take() {
            state.executor = Some(executor);
        }
        state.pending_bytes += command.staged_bytes();
        state.pending.push_back(command);
        let wake = state.thread_sleeping;
        drop(state);
        if wake {
            self.command_or_closed.notify_one();
        }
        Ok(())
    }

    /// Closes the channel and drops the pending commands, from any thread. The channel's thread ends after the command that it
    /// runs.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let dropped = std::mem::take(&mut state.pending);
        drop(state);
        self.command_or_closed.notify_one();
        self.space_or_idle.notify_one();
        // Dropping a pending download fails its `PendingRead` at once, even while the thread still runs an earlier command.
        drop(dropped);
    }

    fn process_commands(&self, process: fn(&mut X, C)) {
        let mut held: Option<Box<X>> = None;
        let mut state = self.lock();
        while !state.closed {
            let Some(command) = state.pending.pop_front() else {
                state.executor = held.take().or(state.executor.take());
                self.wake_submitter(&mut state);
                state.thread_sleeping = true;
                state = self.command_or_closed.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.thread_sleeping = false;
                continue;
            };
            state.pending_bytes -= command.staged_bytes();
            held = held.or(state.executor.take());
            self.wake_submitter(&mut state);
            drop(state);
            let Some(executor) = &mut held else { return };
            process(executor, command);
            state = self.lock();
        }
    }

    /// Wakes the submitter, if it is waiting.
    fn wake_submitter(&self, state: &mut ChannelState<C, X>) {
        if std::mem::take(&mut state.submitter_waiting) {
            self.space_or_idle.notify_one();
        }
    }
}

impl<C, X> CommandChannel<C, X> {
    fn lock(&self) -> MutexGuard<'_, ChannelState<C, X>> {
        // Poisoning is ignored: no code under this lock panics between two dependent writes, so the state is consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Held by the channel's thread: closes the channel when the thread ends, also by a panic, so that the submitter does not wait
/// for a thread that has ended.
struct CloseOnDrop<C, X>(Arc<CommandChannel<C, X>>);

impl<C, X> Drop for CloseOnDrop<C, X> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.closed = true;
        // Dropped outside of the lock. Dropping a pending download fails its `PendingRead`.
        let dropped = (std::mem::take(&mut state.pending), state.executor.take());
        drop(state);
        self.0.space_or_idle.notify_one();
        drop(dropped);
    }
}

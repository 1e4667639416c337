//! A bounded channel that carries a queue's commands from the submitter to the device's threads ([`QueueThreads`]), and the
//! *executor* back and forth.
//!
//! The executor is the state that runs commands; the side that holds it may run them. While no command is pending, the
//! submitter may take the executor and run small commands inline. It sends the executor along with the first command for the
//! threads. At most one thread at a time runs the commands of a channel; it returns the executor to the channel when no command
//! is left, or when the next command has to wait.
//!
//! # States of an open channel
//! - *Idle*: no command is pending. The submitter holds the executor, or the channel has it for the submitter.
//! - *Scheduled*: commands are pending. The channel stands in a lane of the threads, or a thread runs a command.
//! - *Parked*: commands are pending, and the first one waits for a timeline point, whose callback schedules the channel.

use super::queue_threads::{Lane, QueueThreads, RunCommands, Turn};
use super::{CallbackRegistration, DeviceError, MemoryBudget, TimelinePoint};
use crate::sync::{self, Arc, Condvar, Instant, Mutex, MutexGuard, Unpoisoned, Weak, lock};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Limit on the commands that are pending in a channel. A submitter that would exceed it waits: the backpressure of a queue.
const MAX_PENDING_COMMANDS: usize = 64;

/// Limit on the bytes of uploads that pending commands hold, with the same backpressure. A single larger upload is accepted
/// while no other bytes are pending.
pub(crate) const MAX_PENDING_BYTES: usize = 4 << 20;

/// A command of a queue.
pub(crate) trait Command: Send + 'static {
    /// Bytes of an upload that the command holds; 0 for all other commands.
    fn staged_bytes(&self) -> usize;

    /// The lane in which the command is tried first.
    fn lane(&self) -> Lane;
}

/// Runs the commands of one queue, one after another.
pub(crate) trait Executor: Send + Sized + 'static {
    /// The commands of the queue.
    type Command: Command;

    /// Runs a command, or gives it back. In a turn of [`Lane::Short`] it must not block. A command that takes longer than its
    /// turn should end it when others [interrupt](Turn::interrupts_command) it.
    fn execute(&mut self, command: Self::Command, turn: &Turn) -> CommandOutcome<Self::Command>;
}

/// The outcome of a command.
pub(crate) enum CommandOutcome<C> {
    /// It was run, or its failure was recorded.
    Done,
    /// It waits for the point. It is tried again when the point is decided.
    AwaitPoint(TimelinePoint, C),
    /// It might block: it is tried again in [`Lane::Long`].
    NeedsLongLane(C),
    /// It has ended its turn, and goes on in another turn of the same lane.
    TurnOver(C),
}

/// Channel for the commands of an executor, between one submitter and the threads of a device.
pub(crate) struct CommandChannel<X: Executor> {
    state: Mutex<ChannelState<X>>,
    /// Wakes the submitter: a pending command was removed, the executor is back, or the channel is closed.
    space_or_idle: Condvar,
    threads: QueueThreads,
    /// Budget of the session whose turns the commands take.
    session: Arc<MemoryBudget>,
    this: Weak<CommandChannel<X>>,
}

struct ChannelState<X: Executor> {
    pending: VecDeque<X::Command>,
    /// Sum of [`Command::staged_bytes`] of the pending commands.
    pending_bytes: usize,
    /// Whether the first pending command has to be run in the long lane, whatever its own lane is.
    first_needs_long_lane: bool,
    /// `None` while the submitter or a thread holds the executor.
    executor: Option<Box<X>>,
    /// Whether the channel is scheduled or parked.
    scheduled: bool,
    /// Counts the times that the channel was parked, so that the callback of an earlier time does nothing.
    parkings: u64,
    /// The callback that schedules the channel, while it is parked.
    parked: Option<CallbackRegistration>,
    /// Whether the submitter waits on `space_or_idle`. It is notified only then, which saves system calls.
    submitter_waiting: bool,
    /// The submitter has closed the channel, or a command has panicked.
    closed: bool,
}

impl<X: Executor> CommandChannel<X> {
    /// A channel whose commands run on `threads`, in turns of the session with the budget `session`.
    pub(crate) fn new(threads: &QueueThreads, session: &Arc<MemoryBudget>) -> Arc<CommandChannel<X>> {
        let state = ChannelState {
            pending: VecDeque::new(),
            pending_bytes: 0,
            first_needs_long_lane: false,
            executor: None,
            scheduled: false,
            parkings: 0,
            parked: None,
            submitter_waiting: false,
            closed: false,
        };
        Arc::new_cyclic(|this| CommandChannel {
            state: Mutex::new(state),
            space_or_idle: Condvar::new(),
            threads: threads.clone(),
            session: Arc::clone(session),
            this: this.clone(),
        })
    }

    /// A channel with a thread of its own, for executors that block in any command.
    ///
    /// # Errors
    /// [`DeviceError::Exhausted`] when the system cannot start the thread.
    pub(crate) fn with_own_thread(name: &str) -> Result<Arc<CommandChannel<X>>, DeviceError> {
        let threads = QueueThreads::start(name, 0).map_err(|e| DeviceError::thread_spawn_failed("for a queue", &e))?;
        Ok(CommandChannel::new(&threads, &MemoryBudget::new(0)))
    }

    /// Takes the executor back if all commands sent so far are done. Does not block.
    pub(crate) fn take_executor_if_idle(&self) -> Option<Box<X>> {
        let mut state = lock(&self.state);
        if state.pending.is_empty() { state.executor.take() } else { None }
    }

    /// As [`CommandChannel::take_executor_if_idle`], but blocks until all commands sent so far are done.
    ///
    /// # Errors
    /// [`DeviceError::Ended`] when the channel is closed; [`DeviceError::Deadline`] when the deadline passes first.
    pub(crate) fn wait_idle(&self, deadline: Instant) -> Result<Box<X>, DeviceError> {
        let mut state = lock(&self.state);
        loop {
            if state.pending.is_empty()
                && let Some(executor) = state.executor.take()
            {
                return Ok(executor);
            }
            if state.closed {
                return Err(DeviceError::Ended);
            }
            let remaining = deadline.saturating_duration_since(sync::now());
            if remaining.is_zero() {
                return Err(DeviceError::Deadline("earlier commands of the queue"));
            }
            state.submitter_waiting = true;
            state = self.space_or_idle.wait_timeout(state, remaining).unpoisoned().0;
        }
    }

    /// Sends a command to the threads, together with the executor if the submitter holds it. Blocks while the channel is full.
    ///
    /// # Errors
    /// [`DeviceError::Ended`] when the channel is closed.
    pub(crate) fn send(&self, command: X::Command, executor: &mut Option<Box<X>>) -> Result<(), DeviceError> {
        let mut state = lock(&self.state);
        while state.pending.len() >= MAX_PENDING_COMMANDS
            || (state.pending_bytes > 0 && state.pending_bytes + command.staged_bytes() > MAX_PENDING_BYTES)
        {
            if state.closed {
                break;
            }
            state.submitter_waiting = true;
            state = self.space_or_idle.wait(state).unpoisoned();
        }
        if state.closed {
            return Err(DeviceError::Ended);
        }
        if let Some(executor) = executor.take() {
            state.executor = Some(executor);
        }
        state.pending_bytes += command.staged_bytes();
        state.pending.push_back(command);
        if !state.scheduled {
            state.scheduled = true;
            self.schedule(&mut state);
        }
        Ok(())
    }

    /// Closes the channel, from any thread: drops the pending commands, and the executor unless the submitter or a thread holds
    /// it. A thread drops it after the command that it runs.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        if let Some(this) = self.this.upgrade() {
            // Under the channel's lock: a thread that schedules the channel holds it too, and finds the channel closed later.
            self.threads.lanes().remove(&(this as Arc<dyn RunCommands>));
        }
        let dropped = (std::mem::take(&mut state.pending), state.executor.take(), state.parked.take());
        self.wake_submitter(&mut state);
        drop(state);
        // Dropped outside of the lock. Dropping a pending download fails its `PendingRead` at once, even while a thread still
        // runs an earlier command.
        drop(dropped);
    }

    /// Puts the channel into the lane of its first pending command. Called under the channel's lock, which orders it with
    /// [`CommandChannel::close`].
    fn schedule(&self, state: &mut ChannelState<X>) {
        let lane = state.next_lane();
        if let (Some(this), Some(lane)) = (self.this.upgrade(), lane) {
            self.threads.lanes().schedule(this, lane);
        }
    }

    /// Parks the channel until a point is decided, for which its first pending command waits. If the point's device does not
    /// notify, the command is tried again at the next poll instead.
    fn park(self: &Arc<Self>, mut state: MutexGuard<'_, ChannelState<X>>, point: &TimelinePoint) {
        state.parkings += 1;
        let parking = state.parkings;
        drop(state);
        // A weak reference: the point may outlive the queue, and may never be reached. Registered outside of the lock, because
        // the callback may run at once.
        let channel = Weak::clone(&self.this);
        let registration = point.on_reached(move |_| {
            if let Some(channel) = channel.upgrade() {
                channel.unpark(parking);
            }
        });
        let mut state = lock(&self.state);
        let is_parked = state.parkings == parking && !state.closed;
        let unneeded = if !is_parked {
            Some(registration)
        } else if registration.notifies() {
            state.parked.replace(registration)
        } else {
            state.parkings += 1;
            self.threads.lanes().schedule_poll(Arc::clone(self) as Arc<dyn RunCommands>);
            Some(registration)
        };
        drop(state);
        drop(unneeded);
    }

    /// Schedules the channel if it has not been since it was parked for the `parking`th time.
    fn unpark(&self, parking: u64) {
        let mut state = lock(&self.state);
        if state.parkings == parking && !state.closed {
            state.parkings += 1;
            let registration = state.parked.take();
            self.schedule(&mut state);
            drop(state);
            drop(registration);
        }
    }

    /// Wakes the submitter, if it is waiting.
    fn wake_submitter(&self, state: &mut ChannelState<X>) {
        if std::mem::take(&mut state.submitter_waiting) {
            self.space_or_idle.notify_one();
        }
    }
}

impl<X: Executor> ChannelState<X> {
    /// The lane of the first pending command.
    fn next_lane(&self) -> Option<Lane> {
        let first = self.pending.front()?;
        Some(if self.first_needs_long_lane { Lane::Long } else { first.lane() })
    }

    /// Puts a command back in front of the others.
    fn put_back(&mut self, command: X::Command) {
        self.pending_bytes += command.staged_bytes();
        self.pending.push_front(command);
    }
}

impl<X: Executor> RunCommands for CommandChannel<X> {
    fn session(&self) -> &Arc<MemoryBudget> {
        &self.session
    }

    fn run_commands(self: Arc<Self>, turn: Turn) {
        let mut state = lock(&self.state);
        let Some(mut executor) = state.executor.take() else { return };
        while let Some(lane) = state.next_lane() {
            // Short commands after a long one run on its thread too.
            if lane == Lane::Long && turn.lane() == Lane::Short {
                break;
            }
            let Some(command) = state.pending.pop_front() else { break };
            state.first_needs_long_lane = false;
            state.pending_bytes -= command.staged_bytes();
            self.wake_submitter(&mut state);
            drop(state);
            let outcome = catch_unwind(AssertUnwindSafe(|| executor.execute(command, &turn)));
            state = lock(&self.state);
            if state.closed {
                drop(state);
                // Dropping the executor fails the timeline.
                drop(executor);
                return;
            }
            match outcome {
                Ok(CommandOutcome::Done) => {}
                Ok(CommandOutcome::NeedsLongLane(command)) => {
                    state.put_back(command);
                    state.first_needs_long_lane = true;
                }
                Ok(CommandOutcome::TurnOver(command)) => {
                    state.put_back(command);
                    state.first_needs_long_lane = lane == Lane::Long;
                    break;
                }
                Ok(CommandOutcome::AwaitPoint(point, command)) => {
                    state.put_back(command);
                    state.executor = Some(executor);
                    drop(turn);
                    return self.park(state, &point);
                }
                Err(_) => {
                    // A bug. It ends this queue only.
                    drop(state);
                    self.close();
                    drop(executor);
                    return;
                }
            }
            if turn.is_over() {
                break;
            }
        }
        state.executor = Some(executor);
        // Charged before the channel waits for its next turn.
        drop(turn);
        if state.pending.is_empty() {
            state.scheduled = false;
            self.wake_submitter(&mut state);
        } else {
            self.schedule(&mut state);
        }
    }
}

#[cfg(test)]
mod tests;

//! Files of the library's module `device`, and what else they use of it.
#![allow(dead_code, unused_imports, unreachable_pub, reason = "the library uses what no harness does")]

#[rustfmt::skip] // formatted where the file is
#[path = "../../../src/device/budget.rs"]
mod budget;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../src/device/command_channel.rs"]
mod command_channel;
mod error;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../src/device/fair_queue.rs"]
mod fair_queue;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../src/device/memory_budget.rs"]
mod memory_budget;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../src/device/pending_read.rs"]
mod pending_read;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../src/device/queue_threads.rs"]
mod queue_threads;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../src/device/timeline.rs"]
mod timeline;

pub(crate) use budget::{Budget, BudgetRefusal, Reservation};
pub(crate) use command_channel::{Command, CommandChannel, CommandOutcome, Executor};
pub(crate) use error::DeviceError;
pub(crate) use memory_budget::MemoryBudget;
pub(crate) use pending_read::{PendingRead, PendingReadSender};
pub(crate) use queue_threads::{Lane, QueueThreads, Turn};
pub(crate) use timeline::{
    CallbackRegistration, CompletionSource, POLL_INTERVAL, SPIN_BEFORE_SLEEP, Timeline, TimelinePoint,
};

use std::time::Duration;

/// A group of queues, of which these harnesses have none.
#[derive(Clone)]
pub struct GroupHandle;

impl GroupHandle {
    pub(crate) fn fail_rank(&self, _: usize, _: &DeviceError) {}

    pub(crate) fn failure(&self) -> Option<DeviceError> {
        None
    }
}

/// As the library's.
pub struct DeviceActivity {
    pub busy: Duration,
    pub waiting: usize,
}

//! Files of the library's module `device`, and what else they use of it.
#![allow(dead_code, unused_imports, unreachable_pub, reason = "the library uses what no harness does")]

#[rustfmt::skip] // formatted where the file is
#[path = "../../../src/device/adaptive_spin.rs"]
mod adaptive_spin;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../src/device/budget.rs"]
mod budget;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../src/device/collectives/mod.rs"]
#[allow(clippy::large_enum_variant, reason = "the atomics of the scheduler are large")]
mod collectives;
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

pub(crate) use adaptive_spin::AdaptiveSpin;
pub(crate) use budget::{Budget, BudgetRefusal, Reservation};
pub(crate) use collectives::remote::{GroupHandle, ReceiveError};
pub(crate) use collectives::{CollectiveGroup, CollectivePart, GroupMember, RemoteRanks};
pub(crate) use command_channel::{Command, CommandChannel, CommandOutcome, Executor};
pub(crate) use error::DeviceError;
pub(crate) use memory_budget::MemoryBudget;
pub(crate) use pending_read::{PendingRead, PendingReadSender};
pub(crate) use queue_threads::{Lane, QueueThreads, Turn};
pub(crate) use timeline::{
    CallbackRegistration, CompletionSource, POLL_INTERVAL, SPIN_BEFORE_SLEEP, Timeline, TimelinePoint,
};

use crate::sync::Arc;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

/// As the library's, in memory of the allocator.
pub struct HostBuffer {
    bytes: Vec<u8>,
    _reservation: Reservation,
}

impl HostBuffer {
    pub(crate) fn zeroed(bytes: u64, budget: &Arc<MemoryBudget>) -> Result<HostBuffer, DeviceError> {
        Ok(HostBuffer { bytes: vec![0; bytes as usize], _reservation: budget.reserve(bytes)? })
    }

    pub(crate) fn out_of_memory(requested: u64, budget: &MemoryBudget) -> DeviceError {
        DeviceError::OutOfMemory { requested, available: 0, limit: budget.limit() }
    }
}

impl Deref for HostBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

/// What a membership of a group asks of a device.
pub trait Device {
    fn link_stats(&self) -> Option<()>;
    fn copies_from(&self, other: &DeviceInfo) -> bool;
    fn info(&self) -> &DeviceInfo;
}

pub struct DeviceInfo {
    pub domain: Domain,
}

#[derive(Clone, Debug)]
pub struct Domain;

/// As the library's.
pub struct DeviceActivity {
    pub busy: Duration,
    pub waiting: usize,
}

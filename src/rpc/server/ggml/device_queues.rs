//! Implicit queues of a session of ggml's protocol, which has no queues: one per device.

use std::sync::Arc;
use std::time::Instant;

use crate::device::{Device, DeviceError, MemoryBudget};
use crate::rpc::server::hangup_watch::SessionWatch;
use crate::rpc::server::host_memory::SessionMemory;
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::server::session::request_error::RequestError;
use crate::rpc::server::session::watched_queue::WatchedQueue;

/// One queue per device, opened with the first work for the device: most connections only query the server.
pub(super) struct DeviceQueues<'a> {
    devices: Vec<&'a Arc<dyn Device>>,
    /// By the position of the device.
    queues: Vec<Option<WatchedQueue>>,
    budget: Arc<MemoryBudget>,
    watch: Arc<SessionWatch>,
    memory: Arc<SessionMemory>,
}

impl<'a> DeviceQueues<'a> {
    /// No queue is open at first. `budget` and `memory` are charged for the queues' memory. `watch` aborts the queues when the
    /// client has gone.
    pub(super) fn new(
        devices: Vec<&'a Arc<dyn Device>>,
        budget: &Arc<MemoryBudget>,
        watch: &Arc<SessionWatch>,
        memory: &Arc<SessionMemory>,
    ) -> DeviceQueues<'a> {
        let (budget, watch, memory) = (Arc::clone(budget), Arc::clone(watch), Arc::clone(memory));
        let queues = devices.iter().map(|_| None).collect();
        DeviceQueues { devices, queues, budget, watch, memory }
    }

    /// The queue of a device, which is opened if necessary.
    ///
    /// # Errors
    /// There is no such device, or the device cannot open a queue.
    pub(super) fn get(&mut self, device: u32) -> Result<&mut WatchedQueue, SessionError> {
        let count = self.devices.len();
        let index = device as usize;
        let (Some(target), Some(queue)) = (self.devices.get(index), self.queues.get_mut(index)) else {
            return Err(RequestError::NoSuchDevice { device, count }.into());
        };
        Ok(match queue {
            Some(queue) => queue,
            none => none.insert(WatchedQueue::open(&***target, &self.budget, &self.watch, &self.memory)?),
        })
    }

    /// The queues of two different devices.
    ///
    /// # Errors
    /// As [`DeviceQueues::get`].
    pub(super) fn get_pair(&mut self, a: u32, b: u32) -> Result<[&mut WatchedQueue; 2], SessionError> {
        self.get(a)?;
        self.get(b)?;
        match self.queues.get_disjoint_mut([a as usize, b as usize]) {
            Ok([Some(a), Some(b)]) => Ok([a, b]),
            _ => Err(RequestError::NoSuchDevice { device: a.max(b), count: self.devices.len() }.into()),
        }
    }

    /// Whether a device other than `device` has been used by this session.
    pub(super) fn other_devices_in_use(&self, device: u32) -> bool {
        (0..).zip(&self.queues).any(|(at, queue)| at != device && queue.is_some())
    }

    /// Blocks until all submitted work is done.
    ///
    /// # Errors
    /// A failed queue, or work that is not done by `until`.
    pub(super) fn wait_idle(&mut self, until: Instant) -> Result<(), DeviceError> {
        self.queues.iter_mut().flatten().try_for_each(|queue| queue.mark().wait(Some(until)))
    }
}

//! The queues of a session of ggml's messages: one per device, which the protocol never names.

use std::sync::Arc;
use std::time::Instant;

use crate::device::{Account, Device, DeviceError, Queue};
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::server::session::request_error::RequestError;

/// One queue per device, made for the device's first work: most connections only query the server.
pub(super) struct DeviceQueues<'a> {
    devices: &'a [Arc<dyn Device>],
    /// By the devices' positions.
    queues: Vec<Option<Box<dyn Queue>>>,
    budget: Arc<Account>,
}

impl<'a> DeviceQueues<'a> {
    /// None yet. `budget` pays for what the queues take.
    pub(super) fn new(devices: &'a [Arc<dyn Device>], budget: &Arc<Account>) -> DeviceQueues<'a> {
        DeviceQueues { devices, queues: devices.iter().map(|_| None).collect(), budget: Arc::clone(budget) }
    }

    /// The queue of a device.
    pub(super) fn get(&mut self, device: u32) -> Result<&mut dyn Queue, SessionError> {
        let count = self.devices.len();
        let at = device as usize;
        let (Some(on), Some(queue)) = (self.devices.get(at), self.queues.get_mut(at)) else {
            return Err(RequestError::Device { device, count }.into());
        };
        Ok(open(on, queue, &self.budget)?)
    }

    /// The queues of two devices.
    pub(super) fn two(&mut self, a: u32, b: u32) -> Result<[&mut dyn Queue; 2], SessionError> {
        let count = self.devices.len();
        let both = (self.devices.get(a as usize), self.devices.get(b as usize));
        let queues = self.queues.get_disjoint_mut([a as usize, b as usize]);
        let ((Some(on_a), Some(on_b)), Ok([a, b])) = (both, queues) else {
            return Err(RequestError::Device { device: a.max(b), count }.into());
        };
        Ok([open(on_a, a, &self.budget)?, open(on_b, b, &self.budget)?])
    }

    /// Whether another device has had work of this session.
    pub(super) fn has_others(&self, device: u32) -> bool {
        (0..).zip(&self.queues).any(|(at, queue)| at != device && queue.is_some())
    }

    /// Waits until all work submitted so far is done.
    pub(super) fn wait_idle(&mut self, until: Instant) -> Result<(), DeviceError> {
        self.queues.iter_mut().flatten().try_for_each(|queue| queue.mark().wait(Some(until)))
    }
}

fn open<'q>(
    device: &Arc<dyn Device>,
    queue: &'q mut Option<Box<dyn Queue>>,
    budget: &Arc<Account>,
) -> Result<&'q mut dyn Queue, DeviceError> {
    let queue = match queue {
        Some(queue) => queue,
        none => none.insert(device.queue(budget)?),
    };
    Ok(&mut **queue)
}

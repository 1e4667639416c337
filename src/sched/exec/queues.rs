//! Queue set: the open device queues that steps are submitted to.

use super::super::{CopyPaths, Devices, QueueId, QueueRole, SchedError};
use super::host_staging_queue::HostStagingQueue;
use crate::device::{MemoryBudget, Queue, TimelinePoint};
use std::fmt;
use std::sync::Arc;

/// The open queues of all devices. A queue is opened on first use.
pub(super) struct QueueSet {
    budget: Arc<MemoryBudget>,
    copy_paths: CopyPaths,
    all: Vec<SchedQueue>,
}

/// An open queue.
pub(super) struct SchedQueue {
    pub(super) id: QueueId,
    pub(super) backend: QueueBackend,
    /// The point of the last mark.
    pub(super) last_point: Option<TimelinePoint>,
    /// By device: whether the queue has accessed the device's memory.
    pub(super) touched_devices: Vec<bool>,
}

/// The implementation of a queue.
pub(super) enum QueueBackend {
    Direct(Box<dyn Queue>),
    /// A queue with a staging thread that waits for host-staged bytes.
    HostStaging(HostStagingQueue),
}

impl fmt::Debug for QueueSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.all.iter().map(|running| running.id)).finish()
    }
}

impl QueueSet {
    pub(super) fn new(budget: &Arc<MemoryBudget>, copy_paths: &CopyPaths) -> QueueSet {
        QueueSet { budget: Arc::clone(budget), copy_paths: copy_paths.clone(), all: Vec::new() }
    }

    /// The index of a queue, which is opened if necessary.
    pub(super) fn open(&mut self, devices: &Devices, id: QueueId) -> Result<usize, SchedError> {
        if let Some(number) = self.all.iter().position(|running| running.id == id) {
            return Ok(number);
        }
        let device = &devices[id.device];
        let info = device.info();
        let queue = device.queue(&self.budget).map_err(|e| SchedError::from_device(&info.name, e))?;
        // Only host-staged copies need a staging thread: it waits for their downloads while the host submits further steps.
        let backend = match id.role {
            QueueRole::Transfer if self.copy_paths.needs_host_staging(id.device) => {
                QueueBackend::HostStaging(HostStagingQueue::new(queue, &info.name)?)
            }
            _ => QueueBackend::Direct(queue),
        };
        self.all.push(SchedQueue { id, backend, last_point: None, touched_devices: vec![false; devices.len()] });
        Ok(self.all.len() - 1)
    }

    /// A queue by its index.
    pub(super) fn by_index(&mut self, number: usize) -> Result<&mut SchedQueue, SchedError> {
        self.all.get_mut(number).ok_or(SchedError::Bug("a queue that was never opened"))
    }

    /// A queue, which is opened if necessary.
    pub(super) fn get_or_open(&mut self, devices: &Devices, id: QueueId) -> Result<&mut SchedQueue, SchedError> {
        let number = self.open(devices, id)?;
        self.by_index(number)
    }

    /// The last point of each queue.
    pub(super) fn last_points(&self) -> impl Iterator<Item = (QueueId, &TimelinePoint)> {
        self.all.iter().filter_map(|running| Some((running.id, running.last_point.as_ref()?)))
    }

    /// Registers that a queue is about to access the memory of these devices, and makes it wait for the last point of each
    /// other queue that has accessed one of them.
    pub(super) fn order_after_others(
        &mut self,
        devices: &Devices,
        number: usize,
        touches: &[bool],
    ) -> Result<(), SchedError> {
        let overlaps = |other: &SchedQueue| other.touched_devices.iter().zip(touches).any(|(a, b)| *a && *b);
        let others = self.all.iter().enumerate().filter(|(other, running)| *other != number && overlaps(running));
        let ends: Vec<TimelinePoint> = others.filter_map(|(_, running)| running.last_point.clone()).collect();
        let running = self.by_index(number)?;
        running.touched_devices.iter_mut().zip(touches).for_each(|(all, new)| *all |= new);
        let name = &devices[running.id.device].info().name;
        ends.iter().try_for_each(|end| running.wait(end)).map_err(|e| SchedError::from_device(name, e))
    }

    /// Closes all queues and abandons their work.
    pub(super) fn clear(&mut self) {
        self.all.clear();
    }
}

impl SchedQueue {
    /// The device queue.
    pub(super) fn queue(&mut self) -> &mut dyn Queue {
        match &mut self.backend {
            QueueBackend::Direct(queue) => &mut **queue,
            QueueBackend::HostStaging(staging) => staging,
        }
    }

    pub(super) fn wait(&mut self, point: &TimelinePoint) -> Result<(), crate::device::DeviceError> {
        self.queue().wait(point)
    }
}

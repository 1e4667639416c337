//! The queues that steps go to.

use super::super::{CopyPaths, Devices, QueueId, QueueRole, SchedError};
use super::host_staging_queue::HostStagingQueue;
use crate::device::{Account, Point, Queue};
use std::fmt;
use std::sync::Arc;

/// Queues of all devices, made when they are first needed.
pub(super) struct QueueSet {
    account: Arc<Account>,
    reach: CopyPaths,
    all: Vec<SchedQueue>,
}

/// A lane at work.
pub(super) struct SchedQueue {
    pub(super) id: QueueId,
    pub(super) backend: QueueBackend,
    /// The last moment that was marked.
    pub(super) last_point: Option<Point>,
    /// Devices whose memory it has touched.
    pub(super) touched_devices: Vec<bool>,
}

/// What does a lane's work.
pub(super) enum QueueBackend {
    Direct(Box<dyn Queue>),
    /// A queue with a thread that waits for bytes on their way through the host.
    HostStaging(HostStagingQueue),
}

impl fmt::Debug for QueueSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.all.iter().map(|running| running.id)).finish()
    }
}

impl QueueSet {
    pub(super) fn new(account: &Arc<Account>, reach: &CopyPaths) -> QueueSet {
        QueueSet { account: Arc::clone(account), reach: reach.clone(), all: Vec::new() }
    }

    /// The number of a lane.
    pub(super) fn open(&mut self, devices: &Devices, lane: QueueId) -> Result<usize, SchedError> {
        if let Some(number) = self.all.iter().position(|running| running.id == lane) {
            return Ok(number);
        }
        let device = &devices[lane.device];
        let info = device.info();
        let queue = device.queue(&self.account).map_err(|e| SchedError::from_device(&info.name, e))?;
        // Only what is brought through the host has to be waited for by a thread, while the host submits more.
        let worker = match lane.role {
            QueueRole::Transfer if self.reach.needs_host_staging(lane.device) => {
                QueueBackend::HostStaging(HostStagingQueue::new(queue, &info.name)?)
            }
            _ => QueueBackend::Direct(queue),
        };
        self.all.push(SchedQueue {
            id: lane,
            backend: worker,
            last_point: None,
            touched_devices: vec![false; devices.len()],
        });
        Ok(self.all.len() - 1)
    }

    /// A lane by its number.
    pub(super) fn by_index(&mut self, number: usize) -> Result<&mut SchedQueue, SchedError> {
        self.all.get_mut(number).ok_or(SchedError::Bug("a lane that was never made"))
    }

    /// A lane.
    pub(super) fn get_or_open(&mut self, devices: &Devices, lane: QueueId) -> Result<&mut SchedQueue, SchedError> {
        let number = self.open(devices, lane)?;
        self.by_index(number)
    }

    /// The last moment of each lane.
    pub(super) fn last_points(&self) -> impl Iterator<Item = (QueueId, &Point)> {
        self.all.iter().filter_map(|running| Some((running.id, running.last_point.as_ref()?)))
    }

    /// A lane is to touch the memory of these devices from now on: it waits for what other lanes last did there.
    pub(super) fn order_after_others(
        &mut self,
        devices: &Devices,
        number: usize,
        touches: &[bool],
    ) -> Result<(), SchedError> {
        let meets = |other: &SchedQueue| other.touched_devices.iter().zip(touches).any(|(a, b)| *a && *b);
        let others = self.all.iter().enumerate().filter(|(other, running)| *other != number && meets(running));
        let ends: Vec<Point> = others.filter_map(|(_, running)| running.last_point.clone()).collect();
        let running = self.by_index(number)?;
        running.touched_devices.iter_mut().zip(touches).for_each(|(all, new)| *all |= new);
        let name = &devices[running.id.device].info().name;
        ends.iter().try_for_each(|end| running.wait(end)).map_err(|e| SchedError::from_device(name, e))
    }

    /// Abandons all work.
    pub(super) fn clear(&mut self) {
        self.all.clear();
    }
}

impl SchedQueue {
    /// What a computing lane works on.
    pub(super) fn queue(&mut self) -> &mut dyn Queue {
        match &mut self.backend {
            QueueBackend::Direct(queue) => &mut **queue,
            QueueBackend::HostStaging(porter) => porter,
        }
    }

    pub(super) fn wait(&mut self, point: &Point) -> Result<(), crate::device::DeviceError> {
        self.queue().wait(point)
    }
}

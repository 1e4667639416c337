//! The queues that steps go to.

use super::super::{Devices, Lane, LaneKind, Reach, SchedError};
use super::porter::Porter;
use crate::device::{Account, Point, Queue};
use std::fmt;
use std::sync::Arc;

/// Queues of all devices, made when they are first needed.
pub(super) struct Lanes {
    account: Arc<Account>,
    reach: Reach,
    all: Vec<Running>,
}

/// A lane at work.
pub(super) struct Running {
    pub(super) lane: Lane,
    pub(super) worker: Worker,
    /// The last moment that was marked.
    pub(super) end: Option<Point>,
    /// Devices whose memory it has touched.
    pub(super) touches: Vec<bool>,
}

/// What does a lane's work.
pub(super) enum Worker {
    Queue(Box<dyn Queue>),
    /// A queue with a thread that waits for bytes on their way through the host.
    Porter(Porter),
}

impl fmt::Debug for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.all.iter().map(|running| running.lane)).finish()
    }
}

impl Lanes {
    pub(super) fn new(account: &Arc<Account>, reach: &Reach) -> Lanes {
        Lanes { account: Arc::clone(account), reach: reach.clone(), all: Vec::new() }
    }

    /// The number of a lane.
    pub(super) fn number(&mut self, devices: &Devices, lane: Lane) -> Result<usize, SchedError> {
        if let Some(number) = self.all.iter().position(|running| running.lane == lane) {
            return Ok(number);
        }
        let device = &devices[lane.device];
        let info = device.info();
        let queue = device.queue(&self.account).map_err(|e| SchedError::of(&info.name, e))?;
        // Only what is brought through the host has to be waited for by a thread, while the host submits more.
        let worker = match lane.kind {
            LaneKind::Bring if self.reach.needs_host(lane.device) => Worker::Porter(Porter::new(queue, &info.name)?),
            _ => Worker::Queue(queue),
        };
        self.all.push(Running { lane, worker, end: None, touches: vec![false; devices.len()] });
        Ok(self.all.len() - 1)
    }

    /// A lane by its number.
    pub(super) fn at(&mut self, number: usize) -> Result<&mut Running, SchedError> {
        self.all.get_mut(number).ok_or(SchedError::Bug("a lane that was never made"))
    }

    /// A lane.
    pub(super) fn get(&mut self, devices: &Devices, lane: Lane) -> Result<&mut Running, SchedError> {
        let number = self.number(devices, lane)?;
        self.at(number)
    }

    /// The last moment of each lane.
    pub(super) fn ends(&self) -> impl Iterator<Item = (Lane, &Point)> {
        self.all.iter().filter_map(|running| Some((running.lane, running.end.as_ref()?)))
    }

    /// A lane is to touch the memory of these devices from now on: it waits for what other lanes last did there.
    pub(super) fn enter(&mut self, devices: &Devices, number: usize, touches: &[bool]) -> Result<(), SchedError> {
        let meets = |other: &Running| other.touches.iter().zip(touches).any(|(a, b)| *a && *b);
        let others = self.all.iter().enumerate().filter(|(other, running)| *other != number && meets(running));
        let ends: Vec<Point> = others.filter_map(|(_, running)| running.end.clone()).collect();
        let running = self.at(number)?;
        running.touches.iter_mut().zip(touches).for_each(|(all, new)| *all |= new);
        let name = &devices[running.lane.device].info().name;
        ends.iter().try_for_each(|end| running.wait(end)).map_err(|e| SchedError::of(name, e))
    }

    /// Abandons all work.
    pub(super) fn clear(&mut self) {
        self.all.clear();
    }
}

impl Running {
    /// What a computing lane works on.
    pub(super) fn queue(&mut self) -> &mut dyn Queue {
        match &mut self.worker {
            Worker::Queue(queue) => &mut **queue,
            Worker::Porter(porter) => porter,
        }
    }

    pub(super) fn wait(&mut self, point: &Point) -> Result<(), crate::device::DeviceError> {
        self.queue().wait(point)
    }
}

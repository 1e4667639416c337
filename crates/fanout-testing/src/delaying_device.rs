//! Devices that compute nothing and advance virtual time instead, so that tests compare schedules exactly, on any machine.
//!
//! The start and the end of a command are computed at submission: it starts after the earlier commands of its queue, after the
//! points for which its queue waits, when its engine is free, and not before the host's current time. The host's time advances
//! only while it waits for a point or a download.

use fanout::device::{
    Buffer, Caps, CompletionSource, CopyOutcome, Device, DeviceError, DeviceInfo, DeviceKind, Domain, MemoryBudget,
    MemoryInfo, PendingRead, Program, Queue, Region, Support, Timeline, TimelinePoint, UploadSource, check_copy,
};
use fanout::graph::Graph;
use fanout::ops::NodeView;
use fanout::tensor::TensorDesc;
use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard};

/// Virtual time: a moment since the start, or a duration.
pub type Ticks = u64;

/// The virtual time of devices that work together: the host's time, and when each engine is busy.
#[derive(Debug, Default)]
pub struct VirtualTime(Mutex<VirtualTimeState>);

#[derive(Debug, Default)]
struct VirtualTimeState {
    /// The host's time.
    now: Ticks,
    /// When the last command ends.
    end: Ticks,
    /// By device.
    engines: Vec<Engines>,
}

#[derive(Debug, Default)]
struct Engines {
    /// Runs the programs of all queues.
    compute: Engine,
    /// Copies bytes to and from the device, concurrently with programs.
    copy: Engine,
}

/// An execution unit that runs one command at a time: each command takes the first sufficient gap after it is ready.
#[derive(Debug, Default)]
struct Engine {
    /// Start and end of each command, in order of time.
    busy_intervals: Vec<(Ticks, Ticks)>,
}

impl Engine {
    /// Reserves the first gap of `time` ticks that starts at `ready` or later. Returns its end.
    fn reserve(&mut self, ready: Ticks, time: Ticks) -> Ticks {
        if time == 0 {
            return ready;
        }
        let (mut start, mut at) = (ready, 0);
        for &(from, to) in &self.busy_intervals {
            if start + time <= from {
                break;
            }
            start = start.max(to);
            at += 1;
        }
        self.busy_intervals.insert(at, (start, start + time));
        start + time
    }

    fn busy(&self) -> Ticks {
        self.busy_intervals.iter().map(|(from, to)| to - from).sum()
    }
}

impl VirtualTime {
    /// Time 0, without devices.
    pub fn new() -> Arc<VirtualTime> {
        Arc::default()
    }

    /// The moment when all commands submitted so far are done.
    pub fn makespan(&self) -> Ticks {
        self.lock().end
    }

    /// Busy time of a device's compute engine and of its copy engine. Devices are numbered in the order of their creation, from
    /// 0.
    pub fn busy(&self, device: usize) -> (Ticks, Ticks) {
        let state = self.lock();
        let engines = &state.engines[device];
        (engines.compute.busy(), engines.copy.busy())
    }

    /// The host's time: the latest moment for which it has waited.
    pub fn now(&self) -> Ticks {
        self.lock().now
    }

    /// Advances the host's time to `until`, unless it is later already.
    fn wait_until(&self, until: Ticks) {
        let mut state = self.lock();
        state.now = state.now.max(until);
    }

    fn lock(&self) -> MutexGuard<'_, VirtualTimeState> {
        self.0.lock().unwrap()
    }
}

/// A device that takes the same virtual time for every program.
#[derive(Clone, Debug)]
pub struct DelayingDevice {
    info: DeviceInfo,
    time: Arc<VirtualTime>,
    /// Index of the device's engines in the virtual time.
    number: usize,
    /// Time of each program.
    service: Ticks,
    /// Time to copy one byte.
    per_byte: Ticks,
    /// Overhead of each program and copy.
    launch: Ticks,
}

impl DelayingDevice {
    /// A device that takes `service` ticks for a program and 0 ticks for a copy. All such devices share the copy domain
    /// `delaying`.
    pub fn new(time: &Arc<VirtualTime>, name: &str, service: Ticks) -> DelayingDevice {
        let mut info = DeviceInfo::new(name, DeviceKind::Gpu);
        info.description = format!("{service} ticks for a program");
        (info.alignment, info.domain) = (64, Domain::named("delaying"));
        info.caps = Caps::default().with_asynchronous(true).with_events(true);
        let mut state = time.lock();
        let number = state.engines.len();
        state.engines.push(Engines::default());
        DelayingDevice { info, time: Arc::clone(time), number, service, per_byte: 0, launch: 0 }
    }

    /// Changes the description that [`Device::info`] returns.
    pub fn with_info(mut self, change: impl FnOnce(&mut DeviceInfo)) -> DelayingDevice {
        change(&mut self.info);
        self
    }

    /// Sets the ticks to copy one byte.
    pub fn with_time_per_byte(self, per_byte: Ticks) -> DelayingDevice {
        DelayingDevice { per_byte, ..self }
    }

    /// Sets the launch overhead of each program and copy, in ticks.
    pub fn with_launch_time(self, launch: Ticks) -> DelayingDevice {
        DelayingDevice { launch, ..self }
    }

    /// The finished device as a shared trait object, the form that lists of devices take.
    pub fn shared(self) -> Arc<dyn Device> {
        Arc::new(self)
    }
}

impl Device for DelayingDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        Ok(MemoryInfo { free: 1 << 40, total: 1 << 40 })
    }

    fn alloc(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError> {
        let reservation = budget.reserve(bytes)?;
        Ok(Buffer::new(&self.info, bytes, Box::new(self.info.domain.clone()), Box::new(reservation)))
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        tensor.extent() as u64
    }

    fn support(&self, _: NodeView<'_>) -> Support {
        Support::Yes
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        Ok(Program::new(graph, Box::new(())))
    }

    fn queue(&self, _: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        let points = Arc::new(PointTimes { time: Arc::clone(&self.time), list: Mutex::default() });
        let timeline = Timeline::with_source(Arc::clone(&points) as Arc<dyn CompletionSource>);
        Ok(Box::new(DelayingQueue { device: self.clone(), clock: 0, points, timeline }))
    }
}

/// The virtual times of a queue's points.
#[derive(Debug)]
struct PointTimes {
    time: Arc<VirtualTime>,
    list: Mutex<PointList>,
}

#[derive(Debug, Default)]
struct PointList {
    /// By point: `times[0]` is the time of the point with `seq` 1.
    times: Vec<Ticks>,
    /// The number of points whose completion the host has observed.
    reached: usize,
}

impl PointTimes {
    fn at(&self, seq: u64) -> Ticks {
        let list = self.list.lock().unwrap();
        seq.checked_sub(1).map_or(0, |i| list.times[i as usize])
    }
}

impl CompletionSource for PointTimes {
    /// Advances the host's time to the queue's next point, and reports that point as reached.
    fn poll(&self, timeline: &Timeline) {
        let mut list = self.list.lock().unwrap();
        let Some(&next) = list.times.get(list.reached) else { return };
        list.reached += 1;
        self.time.wait_until(next);
        timeline.advance(list.reached as u64);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct DelayingQueue {
    device: DelayingDevice,
    /// When all commands submitted so far are done.
    clock: Ticks,
    points: Arc<PointTimes>,
    timeline: Arc<Timeline>,
}

impl DelayingQueue {
    /// Occupies an engine for the launch overhead and `time`, after the queue's earlier commands.
    fn occupy(&mut self, engine: fn(&mut Engines) -> &mut Engine, time: Ticks) {
        let mut state = self.device.time.lock();
        let ready = self.clock.max(state.now);
        self.clock = engine(&mut state.engines[self.device.number]).reserve(ready, self.device.launch + time);
        state.end = state.end.max(self.clock);
    }

    fn occupy_copy_engine(&mut self, bytes: u64) {
        self.occupy(|engines| &mut engines.copy, bytes * self.device.per_byte);
    }

    /// Delays later commands until a point is reached. Points of devices without virtual time are at time 0.
    fn delay_until(&mut self, until: &TimelinePoint) {
        let time = until.completion_source::<PointTimes>().map_or(0, |points| points.at(until.seq()));
        self.clock = self.clock.max(time);
    }
}

impl Queue for DelayingQueue {
    fn upload(&mut self, dst: Region, _: Option<&TensorDesc>, src: UploadSource<'_>) -> Result<(), DeviceError> {
        src.check_size(dst.bytes())?;
        src.into_bytes(dst.bytes())?;
        self.occupy_copy_engine(dst.bytes());
        Ok(())
    }

    fn download(&mut self, src: Region) -> Result<PendingRead, DeviceError> {
        self.occupy_copy_engine(src.bytes());
        Ok(PendingRead::at(self.mark(), move || Ok(vec![0; src.bytes() as usize])))
    }

    fn fill(&mut self, dst: Region, _: u8) -> Result<(), DeviceError> {
        self.occupy_copy_engine(dst.bytes());
        Ok(())
    }

    fn copy_from(
        &mut self,
        src: Region,
        dst: Region,
        after: Option<&TimelinePoint>,
    ) -> Result<CopyOutcome, DeviceError> {
        check_copy(&src, &dst)?;
        if src.buffer().memory::<Domain>().is_none_or(|domain| *domain != self.device.info.domain) {
            return Ok(CopyOutcome::Unreachable);
        }
        if let Some(point) = after {
            self.delay_until(point);
        }
        self.occupy_copy_engine(dst.bytes());
        Ok(CopyOutcome::Submitted)
    }

    fn run(&mut self, _: &Program, _: &Arc<[Region]>) -> Result<(), DeviceError> {
        self.occupy(|engines| &mut engines.compute, self.device.service);
        Ok(())
    }

    fn mark(&mut self) -> TimelinePoint {
        let mut list = self.points.list.lock().unwrap();
        list.times.push(self.clock);
        TimelinePoint::new(&self.timeline, list.times.len() as u64)
    }

    fn wait(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        self.delay_until(point);
        Ok(())
    }
}

//! Devices that compute nothing and take virtual time for it: schedules are compared exactly, on any machine, without a clock.
//!
//! The begin and the end of a command are known when it is submitted: it begins after the commands before it on its queue,
//! after the points that its queue waits for, when the engine that it needs is free, and not before the host submitted it.
//! The host's own time passes only while it waits for a point or for bytes.

use fanout::device::{
    Account, Buffer, Caps, CopyOutcome, Device, DeviceError, DeviceInfo, DeviceKind, Domain, MemoryInfo, Point,
    Program, Progress, Queue, Region, Source, Support, Ticket, Timeline,
};
use fanout::graph::Graph;
use fanout::ops::NodeView;
use fanout::tensor::TensorDesc;
use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard};

/// Units of virtual time: since the beginning, or between two moments.
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
    /// Runs programs one at a time, of all queues.
    compute: Engine,
    /// Moves bytes to and from the device, beside programs.
    copy: Engine,
}

/// Does one thing at a time: of what is ready, the first submitted.
#[derive(Debug, Default)]
struct Engine {
    /// Begin and end of each piece of work, in order of time.
    busy_intervals: Vec<(Ticks, Ticks)>,
}

impl Engine {
    /// Takes the first gap of `time` ticks that begins at `ready` or later; returns its end.
    fn take(&mut self, ready: Ticks, time: Ticks) -> Ticks {
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

    /// For how long a device computes, and for how long it moves bytes. Devices are numbered in the order in which they were
    /// made, from 0.
    pub fn busy(&self, device: usize) -> (Ticks, Ticks) {
        let state = self.lock();
        let engines = &state.engines[device];
        (engines.compute.busy(), engines.copy.busy())
    }

    /// The host's time: the latest moment that it has waited for.
    pub fn now(&self) -> Ticks {
        self.lock().now
    }

    /// The host waits until a moment.
    fn wait_until(&self, until: Ticks) {
        let mut state = self.lock();
        state.now = state.now.max(until);
    }

    fn lock(&self) -> MutexGuard<'_, VirtualTimeState> {
        self.0.lock().unwrap()
    }
}

/// A device that takes the same time for every program.
#[derive(Clone, Debug)]
pub struct DelayingDevice {
    info: DeviceInfo,
    time: Arc<VirtualTime>,
    number: usize,
    service: Ticks,
    per_byte: Ticks,
    launch: Ticks,
}

impl DelayingDevice {
    /// A device that takes `service` ticks for a program, and none to move bytes. All of them share the domain `delaying`.
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

    /// Changes the facts that [`Device::info`] returns.
    pub fn with_info(mut self, change: impl FnOnce(&mut DeviceInfo)) -> DelayingDevice {
        change(&mut self.info);
        self
    }

    /// Sets the time to move one byte.
    pub fn with_time_per_byte(self, per_byte: Ticks) -> DelayingDevice {
        DelayingDevice { per_byte, ..self }
    }

    /// Sets the time to begin a program or a move of bytes.
    pub fn with_launch_time(self, launch: Ticks) -> DelayingDevice {
        DelayingDevice { launch, ..self }
    }

    /// The finished device as a trait object, as lists of devices hold it.
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

    fn alloc(&self, bytes: u64, account: &Arc<Account>) -> Result<Buffer, DeviceError> {
        let charge = account.charge(bytes)?;
        Ok(Buffer::new(&self.info, bytes, Box::new(self.info.domain.clone()), Box::new(charge)))
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

    fn queue(&self, _: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        let points = Arc::new(PointTimes { time: Arc::clone(&self.time), list: Mutex::default() });
        let timeline = Timeline::looked_at(Arc::clone(&points) as Arc<dyn Progress>);
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
    /// Of point 1 and so on.
    times: Vec<Ticks>,
    /// How many of them the host knows to be reached.
    reached: usize,
}

impl PointTimes {
    fn at(&self, seq: u64) -> Ticks {
        let list = self.list.lock().unwrap();
        seq.checked_sub(1).map_or(0, |i| list.times[i as usize])
    }
}

impl Progress for PointTimes {
    /// The host looks for a point that it does not know to be reached: its time passes until the queue's next one.
    fn look(&self, timeline: &Timeline) {
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
    /// Occupies an engine.
    fn occupy(&mut self, engine: fn(&mut Engines) -> &mut Engine, time: Ticks) {
        let mut state = self.device.time.lock();
        let ready = self.clock.max(state.now);
        self.clock = engine(&mut state.engines[self.device.number]).take(ready, self.device.launch + time);
        state.end = state.end.max(self.clock);
    }

    fn move_bytes(&mut self, bytes: u64) {
        self.occupy(|engines| &mut engines.copy, bytes * self.device.per_byte);
    }

    /// Begins later commands after a point. Points of devices without virtual time are at time 0.
    fn hold(&mut self, until: &Point) {
        let time = until.progress::<PointTimes>().map_or(0, |points| points.at(until.seq()));
        self.clock = self.clock.max(time);
    }
}

impl Queue for DelayingQueue {
    fn upload(&mut self, dst: Region, _: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError> {
        match src {
            Source::Borrowed(bytes) if bytes.len() as u64 != dst.bytes() => {
                return Err(DeviceError::Misuse("an upload's length is not its region's"));
            }
            Source::Borrowed(_) => {}
            Source::Writer(fill) => {
                fill(&mut vec![0; dst.bytes() as usize])?;
            }
        }
        self.move_bytes(dst.bytes());
        Ok(())
    }

    fn download(&mut self, src: Region) -> Result<Ticket, DeviceError> {
        self.move_bytes(src.bytes());
        let (time, there) = (Arc::clone(&self.device.time), self.clock);
        Ok(Ticket::fetched(move |_| {
            time.wait_until(there);
            Ok(vec![0; src.bytes() as usize])
        }))
    }

    fn fill(&mut self, dst: Region, _: u8) -> Result<(), DeviceError> {
        self.move_bytes(dst.bytes());
        Ok(())
    }

    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<CopyOutcome, DeviceError> {
        if src.bytes() != dst.bytes() {
            return Err(DeviceError::Misuse("a copy's regions differ in size"));
        }
        if src.buffer().memory::<Domain>().is_none_or(|domain| *domain != self.device.info.domain) {
            return Ok(CopyOutcome::Unreachable);
        }
        if let Some(point) = after {
            self.hold(point);
        }
        self.move_bytes(dst.bytes());
        Ok(CopyOutcome::Submitted)
    }

    fn run(&mut self, _: &Program, _: &Arc<[Region]>) -> Result<(), DeviceError> {
        self.occupy(|engines| &mut engines.compute, self.device.service);
        Ok(())
    }

    fn mark(&mut self) -> Point {
        let mut list = self.points.list.lock().unwrap();
        list.times.push(self.clock);
        Point::new(&self.timeline, list.times.len() as u64)
    }

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        self.hold(point);
        Ok(())
    }
}

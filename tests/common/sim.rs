//! Devices that compute nothing and take their time for it: virtual time, which no clock measures.
//!
//! When a command is submitted it is known at once when it begins and ends: after what is before it on its queue, after the
//! points its queue waits for, when the engine it needs is free, and not before the host submitted it. The host's own time
//! passes only while it waits for a point or for bytes.

use fanout::device::{
    Account, Buffer, Caps, Device, DeviceError, DeviceInfo, DeviceKind, MemoryInfo, Point, Program, Progress, Queue,
    Region, Source, Support, Ticket, Timeline,
};
use fanout::graph::Graph;
use fanout::ops::NodeView;
use fanout::tensor::TensorDesc;
use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard};

/// Ticks since the beginning, or between two moments.
pub type Ticks = u64;

/// What devices that work together share: the host's time, and what their engines do.
#[derive(Debug, Default)]
pub struct World(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The host's time.
    now: Ticks,
    /// When the last command ends.
    end: Ticks,
    /// By device.
    engines: Vec<Engines>,
}

#[derive(Debug, Default)]
struct Engines {
    /// Runs programs, one at a time, of whichever queue.
    compute: Engine,
    /// Moves bytes to and from the device, beside the programs.
    copy: Engine,
}

/// Does one thing at a time: of what is ready, what was submitted first.
#[derive(Debug, Default)]
struct Engine {
    /// From when to when it works, in order.
    taken: Vec<(Ticks, Ticks)>,
}

impl Engine {
    /// Takes the first gap of `time` ticks that begins at `ready` or later; returns its end.
    fn take(&mut self, ready: Ticks, time: Ticks) -> Ticks {
        if time == 0 {
            return ready;
        }
        let (mut start, mut at) = (ready, 0);
        for &(from, to) in &self.taken {
            if start + time <= from {
                break;
            }
            start = start.max(to);
            at += 1;
        }
        self.taken.insert(at, (start, start + time));
        start + time
    }

    fn busy(&self) -> Ticks {
        self.taken.iter().map(|(from, to)| to - from).sum()
    }
}

impl World {
    pub fn new() -> Arc<World> {
        Arc::default()
    }

    /// When all that was submitted so far ends.
    pub fn makespan(&self) -> Ticks {
        self.lock().end
    }

    /// How long a device computes, and how long it moves bytes. Devices count in the order they were made.
    pub fn busy(&self, device: usize) -> (Ticks, Ticks) {
        let state = self.lock();
        let engines = &state.engines[device];
        (engines.compute.busy(), engines.copy.busy())
    }

    /// The host's time: when the last moment that it waited for came.
    pub fn now(&self) -> Ticks {
        self.lock().now
    }

    /// The host waits until then.
    fn pass(&self, until: Ticks) {
        let mut state = self.lock();
        state.now = state.now.max(until);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

/// A device that runs every program in the same time.
#[derive(Clone, Debug)]
pub struct SimDevice {
    info: DeviceInfo,
    world: Arc<World>,
    number: usize,
    service: Ticks,
    per_byte: Ticks,
    launch: Ticks,
}

impl SimDevice {
    /// One that takes `service` ticks for a program and none to move bytes.
    pub fn new(world: &Arc<World>, name: &str, service: Ticks) -> SimDevice {
        let info = DeviceInfo::new(name, DeviceKind::Gpu)
            .with_description(format!("{service} ticks for a program"))
            .with_alignment(64)
            .with_domain("sim".to_owned())
            .with_caps(Caps::default().with_asynchronous(true).with_events(true));
        let mut state = world.lock();
        let number = state.engines.len();
        state.engines.push(Engines::default());
        SimDevice { info, world: Arc::clone(world), number, service, per_byte: 0, launch: 0 }
    }

    /// With other facts.
    pub fn with(mut self, change: impl FnOnce(&mut DeviceInfo)) -> SimDevice {
        change(&mut self.info);
        self
    }

    /// That moves bytes at this cost, each.
    pub fn per_byte(self, per_byte: Ticks) -> SimDevice {
        SimDevice { per_byte, ..self }
    }

    /// That takes so long to begin a program or a move of bytes.
    pub fn launch(self, launch: Ticks) -> SimDevice {
        SimDevice { launch, ..self }
    }

    /// As a scheduler's list has it.
    pub fn shared(self) -> Arc<dyn Device> {
        Arc::new(self)
    }
}

impl Device for SimDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        Ok(MemoryInfo { free: 1 << 40, total: 1 << 40 })
    }

    fn alloc(&self, bytes: u64, account: &Arc<Account>) -> Result<Buffer, DeviceError> {
        let charge = account.charge(bytes)?;
        Ok(Buffer::new(&self.info.name, bytes, Box::new(Domain(self.info.domain.clone())), Box::new(charge)))
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
        let moments = Arc::new(Moments { world: Arc::clone(&self.world), list: Mutex::default() });
        let timeline = Timeline::looked_at(Arc::clone(&moments) as Arc<dyn Progress>);
        Ok(Box::new(SimQueue { device: self.clone(), clock: 0, moments, timeline }))
    }
}

/// All there is to the memory of a device that holds nothing: who reaches it.
struct Domain(String);

/// When each moment of a queue is.
#[derive(Debug)]
struct Moments {
    world: Arc<World>,
    list: Mutex<List>,
}

#[derive(Debug, Default)]
struct List {
    /// Of moment 1 and so on.
    times: Vec<Ticks>,
    /// How many of them the host knows to be over.
    over: usize,
}

impl Moments {
    fn at(&self, seq: u64) -> Ticks {
        let list = self.list.lock().unwrap();
        seq.checked_sub(1).map_or(0, |i| list.times[i as usize])
    }
}

impl Progress for Moments {
    /// Whoever looks for a moment that is not over spends the time until the queue's next one.
    fn look(&self, timeline: &Timeline) {
        let mut list = self.list.lock().unwrap();
        let Some(&next) = list.times.get(list.over) else { return };
        list.over += 1;
        self.world.pass(next);
        timeline.advance(list.over as u64);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct SimQueue {
    device: SimDevice,
    /// When all that was submitted is done.
    clock: Ticks,
    moments: Arc<Moments>,
    timeline: Arc<Timeline>,
}

impl SimQueue {
    /// Something that takes a while on an engine.
    fn spend(&mut self, engine: fn(&mut Engines) -> &mut Engine, time: Ticks) {
        let mut state = self.device.world.lock();
        let ready = self.clock.max(state.now);
        self.clock = engine(&mut state.engines[self.device.number]).take(ready, self.device.launch + time);
        state.end = state.end.max(self.clock);
    }

    fn move_bytes(&mut self, bytes: u64) {
        self.spend(|engines| &mut engines.copy, bytes * self.device.per_byte);
    }

    /// Points of devices that know no virtual time have always been there.
    fn hold(&mut self, until: &Point) {
        let time = until.progress::<Moments>().map_or(0, |moments| moments.at(until.seq()));
        self.clock = self.clock.max(time);
    }
}

impl Queue for SimQueue {
    fn upload(&mut self, dst: Region, _: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError> {
        match src {
            Source::Borrowed(bytes) if bytes.len() as u64 != dst.bytes() => {
                return Err(DeviceError::Misuse("an upload's length is not its region's"));
            }
            Source::Borrowed(_) => {}
            Source::Writer(fill) => {
                fill(&mut vec![0; dst.bytes() as usize]).map_err(|e| DeviceError::Source(e.to_string()))?;
            }
        }
        self.move_bytes(dst.bytes());
        Ok(())
    }

    fn download(&mut self, src: Region) -> Result<Ticket, DeviceError> {
        self.move_bytes(src.bytes());
        let (world, there) = (Arc::clone(&self.device.world), self.clock);
        Ok(Ticket::fetched(move |_| {
            world.pass(there);
            Ok(vec![0; src.bytes() as usize])
        }))
    }

    fn fill(&mut self, dst: Region, _: u8) -> Result<(), DeviceError> {
        self.move_bytes(dst.bytes());
        Ok(())
    }

    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<bool, DeviceError> {
        if src.bytes() != dst.bytes() {
            return Err(DeviceError::Misuse("a copy's regions differ in size"));
        }
        if src.buffer().memory::<Domain>().is_none_or(|domain| domain.0 != self.device.info.domain) {
            return Ok(false);
        }
        if let Some(point) = after {
            self.hold(point);
        }
        self.move_bytes(dst.bytes());
        Ok(true)
    }

    fn run(&mut self, _: &Program, _: &Arc<[Region]>) -> Result<(), DeviceError> {
        self.spend(|engines| &mut engines.compute, self.device.service);
        Ok(())
    }

    fn mark(&mut self) -> Point {
        let mut list = self.moments.list.lock().unwrap();
        list.times.push(self.clock);
        Point::new(&self.timeline, list.times.len() as u64)
    }

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        self.hold(point);
        Ok(())
    }
}

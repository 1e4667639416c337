//! Devices that compute, and do nothing before someone waits: then a seeded [`Gate`] chooses what comes next.
//!
//! Each queue keeps its commands until the host waits for a point or for bytes. The gate then lets the first command of one
//! queue run, whichever of those that need not wait, and so on until what the host waits for is done: any order that the
//! queues' waits allow can come about, and a seed repeats it. Besides, the gate knows of each command what it reads and
//! writes, and what it comes after by order of its queue, waits, and the host's own waiting: two accesses to the same bytes
//! that nothing orders are a race, whether or not they did harm.

#[path = "races.rs"]
mod races;

use fanout::cpu::{CpuDevice, Path};
use fanout::device::{
    Account, Buffer, CopyOutcome, Device, DeviceError, DeviceInfo, Domain, MemoryInfo, PeerCopies, Point, Program,
    Progress, Queue, Region, Source, Support, Ticket, Timeline,
};
use fanout::graph::{Graph, TensorId};
use fanout::ops::NodeView;
use fanout::tensor::TensorDesc;
use races::{Access, Clock, Races};
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Memory of each device.
const MEMORY: u64 = 1 << 30;

/// More than any command takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Decides which queue goes on.
pub struct Gate(Mutex<State>);

struct State {
    rng: fastrand::Rng,
    /// Whether other threads may have their part in what comes next.
    threads: bool,
    /// The gate changes its mind about which queues it prefers after one in so many commands.
    steady: u32,
    lanes: Vec<Lane>,
    /// The domain of each device.
    domains: HashMap<String, Domain>,
    /// What the host knows to be done.
    host: Clock,
    races: Races,
    /// The lane of each command that ran.
    order: Vec<usize>,
}

/// What is kept of a queue.
struct Lane {
    device: String,
    /// Runs a command when its turn has come, while everyone waits.
    inner: Box<dyn Queue>,
    commands: VecDeque<Command>,
    submitted: u64,
    done: u64,
    failure: Option<DeviceError>,
    /// Moments that the host may wait for and does not know to be over.
    marks: VecDeque<u64>,
    /// What is known to be done where its next command begins.
    clock: Clock,
    /// The same after each command so far.
    past: Vec<Clock>,
    /// The gate prefers higher ones.
    rank: u32,
}

struct Command {
    after: Option<Point>,
    /// What the host knew when it submitted it.
    host: Clock,
    work: Work,
}

enum Work {
    Upload { dst: Region, bytes: Vec<u8> },
    Download { src: Region, to: Arc<Mutex<Vec<u8>>> },
    Fill { dst: Region, value: u8 },
    Copy { src: Region, dst: Region },
    Run { program: Program, bindings: Arc<[Region]> },
    Wait,
}

impl Gate {
    /// A gate that lets commands pass in an order of this seed.
    pub fn new(seed: u64) -> Arc<Gate> {
        Gate::with(seed, false)
    }

    /// As [`Gate::new`] where points from elsewhere may be reached while one waits. What threads do is no seed's choice; and
    /// what one of them has waited for counts as known to all that submit.
    pub fn among_threads(seed: u64) -> Arc<Gate> {
        Gate::with(seed, true)
    }

    fn with(seed: u64, threads: bool) -> Arc<Gate> {
        let mut rng = fastrand::Rng::with_seed(seed);
        // Some orders hold a queue up for long, others mix all of them.
        let steady = [1, 4, 32][rng.usize(0..3)];
        Arc::new(Gate(Mutex::new(State {
            rng,
            threads,
            steady,
            lanes: Vec::new(),
            domains: HashMap::new(),
            host: Clock::default(),
            races: Races::default(),
            order: Vec::new(),
        })))
    }

    /// A device behind the gate. All are of one domain unless told otherwise.
    pub fn device(self: &Arc<Gate>, name: &str) -> GatedDevice {
        let inner = CpuDevice::new(name, 1, Path::Exact, MEMORY).unwrap();
        let gated = GatedDevice { info: inner.info().clone(), copies: |_, _| false, inner, gate: Arc::clone(self) };
        gated.with(|info| info.domain = Domain::named("gated"))
    }

    /// Accesses to the same bytes, one of them writing, that nothing orders.
    pub fn races(&self) -> Vec<String> {
        self.lock().races.found.clone()
    }

    /// The queue of each command that ran, numbered as they were made.
    pub fn order(&self) -> Vec<usize> {
        self.lock().order.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

impl State {
    /// Runs one command that may run now; whether there was one.
    fn step(&mut self, gate: &Gate) -> bool {
        let heads = self.lanes.iter().enumerate().filter_map(|(at, lane)| Some((at, lane.commands.front()?)));
        let reached = heads.map(|(at, head)| (at, head.after.as_ref().map_or(Ok(true), |p| self.reached(gate, p))));
        let ready: Vec<_> = reached.filter(|(_, reached)| *reached != Ok(false)).collect();
        if self.rng.u32(0..self.steady) == 0 {
            self.lanes.iter_mut().for_each(|lane| lane.rank = self.rng.u32(..));
        }
        let Some((at, reached)) = ready.into_iter().max_by_key(|(at, _)| self.lanes[*at].rank) else { return false };
        self.order.push(at);
        let done = reached.and_then(|_| self.run(gate, at));
        if let Err(failure) = done {
            self.lanes[at].fail(failure);
        }
        true
    }

    /// Whether a point has been reached, whatever the host knows of it.
    fn reached(&self, gate: &Gate, point: &Point) -> Result<bool, DeviceError> {
        let Some(lane) = lane_of(gate, point) else { return point.poll() };
        let lane = &self.lanes[lane];
        if lane.done >= point.seq() { Ok(true) } else { lane.failure.clone().map_or(Ok(false), Err) }
    }

    /// Runs the first command of a lane.
    fn run(&mut self, gate: &Gate, at: usize) -> Result<(), DeviceError> {
        let Some(Command { after, host, work }) = self.lanes[at].commands.pop_front() else { return Ok(()) };
        let mut clock = std::mem::take(&mut self.lanes[at].clock);
        clock.join(&host);
        if let Some(point) = &after {
            match (lane_of(gate, point), point.seq().checked_sub(1)) {
                (Some(lane), Some(i)) => clock.join(&self.lanes[lane].past[i as usize]),
                (Some(_), None) => {}
                // Whoever reached it did so after what is known by now.
                (None, _) => clock.join(&self.host),
            }
        }
        let seq = self.lanes[at].done + 1;
        clock.learn(at, seq);
        work.accesses(|what, writes, region, range| {
            let range = region.offset() + range.start..region.offset() + range.end;
            self.races.accessed(region.buffer(), Access { range, writes, lane: at, seq, what }, &clock);
        });
        let lane = &mut self.lanes[at];
        lane.obey(work)?;
        lane.past.push(clock.clone());
        (lane.done, lane.clock) = (seq, clock);
        Ok(())
    }

    /// Whether a queue waits for a point that is not the gate's to reach.
    fn waits_elsewhere(&self, gate: &Gate) -> bool {
        let mut heads = self.lanes.iter().filter_map(|lane| lane.commands.front()?.after.as_ref());
        heads.any(|point| lane_of(gate, point).is_none())
    }

    /// What each queue would do next.
    fn stuck(&self, gate: &Gate) -> DeviceError {
        let head = |(at, lane): (usize, &Lane)| {
            let after = lane.commands.front()?.after.as_ref()?;
            let what = match lane_of(gate, after) {
                Some(of) => format!("moment {} of queue {of}, which is at {}", after.seq(), self.lanes[of].done),
                None => "a point from elsewhere".to_owned(),
            };
            Some(format!("queue {at} ({}) waits for {what}", lane.device))
        };
        let heads: Vec<_> = self.lanes.iter().enumerate().filter_map(head).collect();
        DeviceError::Bug(format!("nothing can go on: {}", heads.join("; ")))
    }
}

impl Work {
    /// Tells what is read and written: what does it, whether it writes, the region, and which of its bytes.
    fn accesses(&self, mut tell: impl FnMut(&'static str, bool, &Region, Range<u64>)) {
        let all = |region: &Region| 0..region.bytes();
        match self {
            Work::Upload { dst, .. } => tell("an upload", true, dst, all(dst)),
            Work::Download { src, .. } => tell("a download", false, src, all(src)),
            Work::Fill { dst, .. } => tell("a fill", true, dst, all(dst)),
            Work::Copy { src, dst } => {
                tell("a copy", false, src, all(src));
                tell("a copy", true, dst, all(dst));
            }
            Work::Wait => {}
            Work::Run { program, bindings } => {
                let graph = program.graph();
                let mut operand = |writes, id: TensorId| {
                    let Some((tensor, place)) = graph.tensor(id).and_then(|t| Some((t, t.place?))) else { return };
                    let Some(region) = bindings.get(place.slot as usize) else { return };
                    let start = place.offset as u64;
                    tell("a program", writes, region, start..start + tensor.desc.extent() as u64);
                };
                for node in graph.nodes() {
                    for (i, id) in node.srcs.iter().enumerate() {
                        if let Some(id) = id.filter(|_| !node.op.writes_onto(i)) {
                            operand(false, id);
                        }
                    }
                    operand(true, node.dst);
                }
            }
        }
    }
}

impl Lane {
    fn obey(&mut self, work: Work) -> Result<(), DeviceError> {
        let inner = &mut self.inner;
        let by = Instant::now() + PATIENCE;
        match work {
            Work::Upload { dst, bytes } => inner.upload(dst, None, Source::Borrowed(&bytes))?,
            Work::Download { src, to } => *to.lock().unwrap() = inner.download(src)?.wait(Some(by))?,
            Work::Fill { dst, value } => inner.fill(dst, value)?,
            Work::Copy { src, dst } => _ = inner.copy_from(src, dst, None)?,
            Work::Run { program, bindings } => inner.run_inline_or_submit(&program, &bindings, PATIENCE)?,
            Work::Wait => {}
        }
        inner.mark().wait(Some(by))
    }

    fn fail(&mut self, failure: DeviceError) {
        self.commands.clear();
        self.failure.get_or_insert(failure);
    }
}

/// The lane of a point of this gate.
fn lane_of(gate: &Gate, point: &Point) -> Option<usize> {
    point.progress::<Eye>().filter(|eye| std::ptr::eq(&*eye.gate, gate)).map(|eye| eye.lane)
}

/// What drives the gate: someone looks how far a lane has come.
struct Eye {
    gate: Arc<Gate>,
    lane: usize,
}

impl std::fmt::Debug for Eye {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "queue {} of a gate", self.lane)
    }
}

impl Progress for Eye {
    /// Goes on until the lane's next marked moment, and tells of no later one: the host knows what it has waited for.
    fn look(&self, timeline: &Timeline) {
        let mut state = self.gate.lock();
        loop {
            let lane = &mut state.lanes[self.lane];
            match lane.marks.front() {
                Some(&mark) if lane.done >= mark => {
                    lane.marks.pop_front();
                    let past = lane.past[mark as usize - 1].clone();
                    state.host.join(&past);
                    return timeline.advance(mark);
                }
                None => return,
                Some(_) => {}
            }
            if let Some(failure) = &lane.failure {
                return timeline.fail(failure.clone());
            }
            if !state.step(&self.gate) {
                if state.threads && state.waits_elsewhere(&self.gate) {
                    return;
                }
                let stuck = state.stuck(&self.gate);
                state.lanes[self.lane].fail(stuck);
            }
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A CPU device whose queues stand before a gate.
pub struct GatedDevice {
    info: DeviceInfo,
    /// Whether it copies from a device of another domain.
    copies: fn(&str, &str) -> bool,
    inner: Arc<CpuDevice>,
    gate: Arc<Gate>,
}

impl GatedDevice {
    /// With other facts; the name stays.
    pub fn with(mut self, change: impl FnOnce(&mut DeviceInfo)) -> GatedDevice {
        change(&mut self.info);
        self.info.name = self.inner.info().name.clone();
        self.gate.lock().domains.insert(self.info.name.clone(), self.info.domain.clone());
        self
    }

    /// That copies from some devices of other domains: by its name and the other's.
    pub fn copies(self, copies: fn(&str, &str) -> bool) -> GatedDevice {
        GatedDevice { copies, ..self }
    }

    /// As a scheduler's list has it.
    pub fn shared(self) -> Arc<dyn Device> {
        Arc::new(self)
    }
}

impl std::fmt::Debug for GatedDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GatedDevice({})", self.info.name)
    }
}

impl PeerCopies for GatedDevice {
    fn copies_from(&self, other: &DeviceInfo) -> bool {
        self.info.domain == other.domain || (self.copies)(&self.info.name, &other.name)
    }
}

impl Device for GatedDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        self.inner.memory()
    }

    fn alloc(&self, bytes: u64, account: &Arc<Account>) -> Result<Buffer, DeviceError> {
        self.inner.alloc(bytes, account)
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        self.inner.alloc_size(tensor)
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        self.inner.support(node)
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        self.inner.prepare(graph)
    }

    fn peer_copies(&self) -> Option<&dyn PeerCopies> {
        Some(self)
    }

    fn queue(&self, account: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        let inner = self.inner.queue(account)?;
        let mut state = self.gate.lock();
        let lane = state.lanes.len();
        let rank = state.rng.u32(..);
        state.lanes.push(Lane {
            device: self.info.name.clone(),
            inner,
            commands: VecDeque::new(),
            submitted: 0,
            done: 0,
            failure: None,
            marks: VecDeque::new(),
            clock: Clock::default(),
            past: Vec::new(),
            rank,
        });
        let gate = Arc::clone(&self.gate);
        let timeline = Timeline::looked_at(Arc::new(Eye { gate: Arc::clone(&gate), lane }));
        Ok(Box::new(GatedQueue { info: self.info.clone(), copies: self.copies, gate, lane, timeline }))
    }
}

struct GatedQueue {
    info: DeviceInfo,
    copies: fn(&str, &str) -> bool,
    gate: Arc<Gate>,
    lane: usize,
    timeline: Arc<Timeline>,
}

impl GatedQueue {
    fn submit(&mut self, after: Option<&Point>, work: Work) -> Result<(), DeviceError> {
        let mut state = self.gate.lock();
        let host = state.host.clone();
        let lane = &mut state.lanes[self.lane];
        if let Some(failure) = &lane.failure {
            return Err(failure.clone());
        }
        lane.submitted += 1;
        lane.commands.push_back(Command { after: after.cloned(), host, work });
        Ok(())
    }

    /// What is wrong with a command is its submitter's fault, not the queue's.
    fn ours(&self, region: &Region) -> Result<(), DeviceError> {
        let ours = region.buffer().device() == self.info.id;
        if ours { Ok(()) } else { Err(DeviceError::Misuse("a region of another device")) }
    }
}

impl Queue for GatedQueue {
    fn upload(&mut self, dst: Region, _: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError> {
        self.ours(&dst)?;
        let bytes = match src {
            Source::Borrowed(bytes) if bytes.len() as u64 != dst.bytes() => {
                return Err(DeviceError::Misuse("an upload's length is not its region's"));
            }
            Source::Borrowed(bytes) => bytes.to_vec(),
            Source::Writer(fill) => {
                let mut bytes = vec![0; dst.bytes() as usize];
                fill(&mut bytes)?;
                bytes
            }
        };
        self.submit(None, Work::Upload { dst, bytes })
    }

    fn download(&mut self, src: Region) -> Result<Ticket, DeviceError> {
        self.ours(&src)?;
        let to = Arc::default();
        self.submit(None, Work::Download { src, to: Arc::clone(&to) })?;
        let point = self.mark();
        Ok(Ticket::fetched(move |deadline| {
            point.wait(deadline)?;
            Ok(std::mem::take(&mut *to.lock().unwrap()))
        }))
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        self.ours(&dst)?;
        self.submit(None, Work::Fill { dst, value })
    }

    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<CopyOutcome, DeviceError> {
        self.ours(&dst)?;
        if src.bytes() != dst.bytes() {
            return Err(DeviceError::Misuse("a copy's regions differ in size"));
        }
        let other = src.buffer().device_name();
        let near = self.gate.lock().domains.get(other) == Some(&self.info.domain);
        let copies = near || (self.copies)(&self.info.name, other);
        if copies {
            self.submit(after, Work::Copy { src, dst })?;
        }
        Ok(if copies { CopyOutcome::Submitted } else { CopyOutcome::Unreachable })
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        bindings.iter().try_for_each(|region| self.ours(region))?;
        self.submit(None, Work::Run { program: program.clone(), bindings: Arc::clone(bindings) })
    }

    fn mark(&mut self) -> Point {
        let lane = &mut self.gate.lock().lanes[self.lane];
        if lane.submitted > 0 && lane.marks.back() != Some(&lane.submitted) {
            lane.marks.push_back(lane.submitted);
        }
        Point::new(&self.timeline, lane.submitted)
    }

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        self.submit(Some(point), Work::Wait)
    }
}

impl Drop for GatedQueue {
    fn drop(&mut self) {
        self.gate.lock().lanes[self.lane].fail(DeviceError::Ended);
        self.timeline.fail(DeviceError::Ended);
    }
}

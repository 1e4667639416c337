//! CPU devices whose queues run nothing before the host waits: then a seeded [`Gate`] schedules the commands of all queues.
//!
//! Each queue keeps its commands until the host waits for a point or for bytes. The gate then runs the first command of one
//! queue at a time, chosen among those whose waits are over, until what the host waits for is done. Every order that the
//! queues' waits allow can come about, and a seed repeats it.
//!
//! The gate also checks the orders that did not come about: it knows which bytes each command reads and writes, and which
//! commands it follows, by the order of its queue, by waits, and by the host's own waiting. Two accesses to the same bytes
//! that nothing orders are a race ([`Gate::races`]), whether or not they did harm this time.

mod command_kind;

#[cfg(test)]
mod tests;

use crate::races::{Access, Clock, Races};
use command_kind::CommandKind;
use fanout::cpu::{CpuDevice, Path};
use fanout::device::{
    Account, Buffer, CopyOutcome, Device, DeviceError, DeviceId, DeviceInfo, Domain, MemoryInfo, PeerCopies, Point,
    Program, Progress, Queue, Region, Source, Support, Ticket, Timeline,
};
use fanout::graph::Graph;
use fanout::ops::NodeView;
use fanout::tensor::TensorDesc;
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Memory of each device, in bytes.
const MEMORY: u64 = 1 << 30;

/// Longest time that a command may take.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// Schedules the commands of its devices. See the [module](self).
pub struct Gate {
    /// That of the devices that do not change it.
    domain: Domain,
    state: Mutex<GateState>,
}

struct GateState {
    rng: fastrand::Rng,
    /// Whether points from elsewhere may be reached by other threads while one waits.
    waits_for_threads: bool,
    /// The gate draws new ranks after one in so many commands, on average.
    rank_period: u32,
    queues: Vec<QueueState>,
    /// The facts of each device. The devices of the gate and no others copy from one another.
    devices: HashMap<DeviceId, DeviceInfo>,
    /// The commands that the host knows to be done.
    host: Clock,
    races: Races,
    /// The queue of each command that ran.
    order: Vec<usize>,
}

struct QueueState {
    device: String,
    /// Runs one command at a time, to its end.
    inner: Box<dyn Queue>,
    commands: VecDeque<GatedCommand>,
    submitted: u64,
    done: u64,
    failure: Option<DeviceError>,
    /// Points that the host may wait for and does not know to be reached.
    marks: VecDeque<u64>,
    /// The commands known to be done where the next one begins.
    clock: Clock,
    /// The clock after each command that ran.
    past: Vec<Clock>,
    /// Of the queues that can go on, the one with the highest rank does.
    rank: u32,
}

struct GatedCommand {
    after: Option<Point>,
    /// The commands that the host knew to be done when it submitted this one.
    host: Clock,
    work: CommandKind,
}

impl Gate {
    /// A gate that runs commands in the order of this seed.
    pub fn new(seed: u64) -> Arc<Gate> {
        Gate::seeded(seed, false)
    }

    /// As [`Gate::new`], for devices that several threads submit to. Points of other devices may be reached while a thread
    /// waits, so that a queue that waits for one is not stuck. What the threads do is no seed's choice; and what one of them
    /// has waited for counts as known to all that submit.
    pub fn among_threads(seed: u64) -> Arc<Gate> {
        Gate::seeded(seed, true)
    }

    fn seeded(seed: u64, threads: bool) -> Arc<Gate> {
        let mut rng = fastrand::Rng::with_seed(seed);
        // Rare draws hold queues up for long, frequent ones mix all of them.
        let steady = [1, 4, 32][rng.usize(0..3)];
        let state = GateState {
            rng,
            waits_for_threads: threads,
            rank_period: steady,
            queues: Vec::new(),
            devices: HashMap::new(),
            host: Clock::default(),
            races: Races::default(),
            order: Vec::new(),
        };
        Arc::new(Gate { domain: Domain::unique("gated"), state: Mutex::new(state) })
    }

    /// A device behind the gate. All are of one domain unless [`GatedDevice::with_info`] changes it.
    ///
    /// # Panics
    /// When the CPU device cannot be made.
    pub fn device(self: &Arc<Gate>, name: &str) -> GatedDevice {
        let inner = CpuDevice::new(name, 1, Path::Exact, MEMORY).unwrap();
        let gated = GatedDevice { info: inner.info().clone(), copy_rule: |_, _| false, inner, gate: Arc::clone(self) };
        gated.with_info(|info| info.domain = self.domain.clone())
    }

    /// Descriptions of the races so far: accesses to the same bytes, one of them a write, that nothing orders.
    pub fn races(&self) -> Vec<String> {
        self.lock().races.found.clone()
    }

    /// The queue of each command that ran. Queues are numbered in the order in which they were opened, from 0.
    pub fn order(&self) -> Vec<usize> {
        self.lock().order.clone()
    }

    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap()
    }
}

impl GateState {
    /// Runs one command whose waits are over. False when there is none.
    fn run_next(&mut self, gate: &Gate) -> bool {
        let heads = self.queues.iter().enumerate().filter_map(|(at, queue)| Some((at, queue.commands.front()?)));
        let reached = heads.map(|(at, head)| (at, head.after.as_ref().map_or(Ok(true), |p| self.reached(gate, p))));
        let ready: Vec<_> = reached.filter(|(_, reached)| *reached != Ok(false)).collect();
        if self.rng.u32(0..self.rank_period) == 0 {
            self.queues.iter_mut().for_each(|queue| queue.rank = self.rng.u32(..));
        }
        let Some((at, reached)) = ready.into_iter().max_by_key(|(at, _)| self.queues[*at].rank) else { return false };
        self.order.push(at);
        let done = reached.and_then(|_| self.run_head(gate, at));
        if let Err(failure) = done {
            self.queues[at].fail(failure);
        }
        true
    }

    /// Whether a point is reached, also where the host does not know it yet.
    fn reached(&self, gate: &Gate, point: &Point) -> Result<bool, DeviceError> {
        let Some(queue) = queue_of(gate, point) else { return point.poll() };
        let queue = &self.queues[queue];
        if queue.done >= point.seq() { Ok(true) } else { queue.failure.clone().map_or(Ok(false), Err) }
    }

    /// Runs the first command of a queue.
    fn run_head(&mut self, gate: &Gate, at: usize) -> Result<(), DeviceError> {
        let Some(GatedCommand { after, host, work }) = self.queues[at].commands.pop_front() else { return Ok(()) };
        let mut clock = std::mem::take(&mut self.queues[at].clock);
        clock.join(&host);
        if let Some(point) = &after {
            match (queue_of(gate, point), point.seq().checked_sub(1)) {
                (Some(queue), Some(i)) => clock.join(&self.queues[queue].past[i as usize]),
                (Some(_), None) => {}
                // A point from elsewhere: the host reached it after what it knows by now.
                (None, _) => clock.join(&self.host),
            }
        }
        let seq = self.queues[at].done + 1;
        clock.advance(at, seq);
        work.accesses(|what, writes, region, range| {
            let range = region.offset() + range.start..region.offset() + range.end;
            self.races.record(region.buffer(), Access { range, writes, queue: at, seq, what }, &clock);
        });
        let queue = &mut self.queues[at];
        queue.process(work)?;
        queue.past.push(clock.clone());
        (queue.done, queue.clock) = (seq, clock);
        Ok(())
    }

    /// Whether a queue waits for a point that this gate cannot reach.
    fn waits_elsewhere(&self, gate: &Gate) -> bool {
        let mut heads = self.queues.iter().filter_map(|queue| queue.commands.front()?.after.as_ref());
        heads.any(|point| queue_of(gate, point).is_none())
    }

    /// The error that nothing can go on: what each queue waits for.
    fn stuck(&self, gate: &Gate) -> DeviceError {
        let head = |(at, queue): (usize, &QueueState)| {
            let after = queue.commands.front()?.after.as_ref()?;
            let what = match queue_of(gate, after) {
                Some(of) => format!("moment {} of queue {of}, which is at {}", after.seq(), self.queues[of].done),
                None => "a point from elsewhere".to_owned(),
            };
            Some(format!("queue {at} ({}) waits for {what}", queue.device))
        };
        let heads: Vec<_> = self.queues.iter().enumerate().filter_map(head).collect();
        DeviceError::Bug(format!("nothing can go on: {}", heads.join("; ")))
    }
}

impl QueueState {
    fn process(&mut self, work: CommandKind) -> Result<(), DeviceError> {
        let inner = &mut self.inner;
        let by = Instant::now() + COMMAND_TIMEOUT;
        match work {
            CommandKind::Upload { dst, bytes } => inner.upload(dst, None, Source::Borrowed(&bytes))?,
            CommandKind::Download { src, to } => *to.lock().unwrap() = inner.download(src)?.wait(Some(by))?,
            CommandKind::Fill { dst, value } => inner.fill(dst, value)?,
            CommandKind::Copy { src, dst } => _ = inner.copy_from(src, dst, None)?,
            CommandKind::Run { program, bindings } => {
                inner.run_inline_or_submit(&program, &bindings, COMMAND_TIMEOUT)?
            }
            CommandKind::Wait => {}
        }
        inner.mark().wait(Some(by))
    }

    fn fail(&mut self, failure: DeviceError) {
        self.commands.clear();
        self.failure.get_or_insert(failure);
    }
}

/// The queue whose point this is, where it is one of this gate.
fn queue_of(gate: &Gate, point: &Point) -> Option<usize> {
    point.progress::<QueueProgress>().filter(|of| std::ptr::eq(&*of.gate, gate)).map(|of| of.queue)
}

/// The progress of one queue. Polling it makes the gate run commands.
struct QueueProgress {
    gate: Arc<Gate>,
    queue: usize,
}

impl std::fmt::Debug for QueueProgress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "queue {} of a gate", self.queue)
    }
}

impl Progress for QueueProgress {
    /// Runs commands until the queue's next marked point is reached. Later points are not reported, reached or not: the host
    /// knows only what it has waited for.
    fn look(&self, timeline: &Timeline) {
        let mut state = self.gate.lock();
        loop {
            let queue = &mut state.queues[self.queue];
            match queue.marks.front() {
                Some(&mark) if queue.done >= mark => {
                    queue.marks.pop_front();
                    let past = queue.past[mark as usize - 1].clone();
                    state.host.join(&past);
                    return timeline.advance(mark);
                }
                None => return,
                Some(_) => {}
            }
            if let Some(failure) = &queue.failure {
                return timeline.fail(failure.clone());
            }
            if !state.run_next(&self.gate) {
                if state.waits_for_threads && state.waits_elsewhere(&self.gate) {
                    return;
                }
                let stuck = state.stuck(&self.gate);
                state.queues[self.queue].fail(stuck);
            }
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Whether a device copies from a device of another domain: by its own facts and those of the other device.
type CopyRule = fn(&DeviceInfo, &DeviceInfo) -> bool;

fn copies(rule: CopyRule, info: &DeviceInfo, other: &DeviceInfo) -> bool {
    info.domain == other.domain || rule(info, other)
}

/// A CPU device whose queues are scheduled by a [`Gate`].
pub struct GatedDevice {
    info: DeviceInfo,
    copy_rule: CopyRule,
    inner: Arc<CpuDevice>,
    gate: Arc<Gate>,
}

impl GatedDevice {
    /// Changes the facts that [`Device::info`] returns, but for the name and the identity.
    pub fn with_info(mut self, change: impl FnOnce(&mut DeviceInfo)) -> GatedDevice {
        change(&mut self.info);
        (self.info.id, self.info.name) = (self.inner.info().id, self.inner.info().name.clone());
        self.gate.lock().devices.insert(self.info.id, self.info.clone());
        self
    }

    /// Decides from which devices of other domains the device copies, by its own facts and those of the other device.
    pub fn with_copies_from(self, rule: fn(&DeviceInfo, &DeviceInfo) -> bool) -> GatedDevice {
        GatedDevice { copy_rule: rule, ..self }
    }

    /// The finished device as a trait object, as lists of devices hold it.
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
        copies(self.copy_rule, &self.info, other)
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
        let queue = state.queues.len();
        let rank = state.rng.u32(..);
        state.queues.push(QueueState {
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
        let timeline = Timeline::looked_at(Arc::new(QueueProgress { gate: Arc::clone(&gate), queue }));
        Ok(Box::new(GatedQueue { info: self.info.clone(), copy_rule: self.copy_rule, gate, queue, timeline }))
    }
}

struct GatedQueue {
    info: DeviceInfo,
    copy_rule: CopyRule,
    gate: Arc<Gate>,
    queue: usize,
    timeline: Arc<Timeline>,
}

impl GatedQueue {
    fn submit(&mut self, after: Option<&Point>, work: CommandKind) -> Result<(), DeviceError> {
        let mut state = self.gate.lock();
        let host = state.host.clone();
        let queue = &mut state.queues[self.queue];
        if let Some(failure) = &queue.failure {
            return Err(failure.clone());
        }
        queue.submitted += 1;
        queue.commands.push_back(GatedCommand { after: after.cloned(), host, work });
        Ok(())
    }

    /// A foreign region is the caller's mistake, and does not fail the queue.
    fn check_own(&self, region: &Region) -> Result<(), DeviceError> {
        let own = region.buffer().device() == self.info.id;
        if own { Ok(()) } else { Err(DeviceError::Misuse("a region of another device")) }
    }
}

impl Queue for GatedQueue {
    fn upload(&mut self, dst: Region, _: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError> {
        self.check_own(&dst)?;
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
        self.submit(None, CommandKind::Upload { dst, bytes })
    }

    fn download(&mut self, src: Region) -> Result<Ticket, DeviceError> {
        self.check_own(&src)?;
        let to = Arc::default();
        self.submit(None, CommandKind::Download { src, to: Arc::clone(&to) })?;
        let point = self.mark();
        Ok(Ticket::fetched(move |deadline| {
            point.wait(deadline)?;
            Ok(std::mem::take(&mut *to.lock().unwrap()))
        }))
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        self.check_own(&dst)?;
        self.submit(None, CommandKind::Fill { dst, value })
    }

    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<CopyOutcome, DeviceError> {
        self.check_own(&dst)?;
        if src.bytes() != dst.bytes() {
            return Err(DeviceError::Misuse("a copy's regions differ in size"));
        }
        let other = self.gate.lock().devices.get(&src.buffer().device()).cloned();
        if !other.is_some_and(|other| copies(self.copy_rule, &self.info, &other)) {
            return Ok(CopyOutcome::Unreachable);
        }
        self.submit(after, CommandKind::Copy { src, dst })?;
        Ok(CopyOutcome::Submitted)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        bindings.iter().try_for_each(|region| self.check_own(region))?;
        self.submit(None, CommandKind::Run { program: program.clone(), bindings: Arc::clone(bindings) })
    }

    fn mark(&mut self) -> Point {
        let queue = &mut self.gate.lock().queues[self.queue];
        if queue.submitted > 0 && queue.marks.back() != Some(&queue.submitted) {
            queue.marks.push_back(queue.submitted);
        }
        Point::new(&self.timeline, queue.submitted)
    }

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        self.submit(Some(point), CommandKind::Wait)
    }
}

impl Drop for GatedQueue {
    fn drop(&mut self) {
        self.gate.lock().queues[self.queue].fail(DeviceError::Ended);
        self.timeline.fail(DeviceError::Ended);
    }
}

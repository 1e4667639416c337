//! CPU devices whose commands a seeded [`Gate`] runs in a random order that the waits allow.
//!
//! Each queue stores its commands until the host waits for a point or a download. The gate then runs one command at a time,
//! until the awaited work is done. It chooses a queue whose first command does not wait, or waits for a point that is reached.
//! Every order that the waits allow is possible. A seed reproduces it, unless programs have collective nodes: these run on
//! threads, so the times at which they end, and the commands that are ready then, also depend on the machine.
//!
//! The gate also detects errors in orders that did not occur. It records the bytes that each command reads and writes, and the
//! commands that are ordered before it: by its queue, by waits, and by the host's waiting. Two unordered accesses to the same
//! bytes, one of them a write, are a data race ([`Gate::races`]), whether or not this order gave a wrong result.
//!
//! A program with collective nodes waits for programs of other queues. While it runs, the gate runs the commands of other queues
//! (`collectives.rs`).

mod collectives;
mod command_kind;

#[cfg(test)]
mod tests;

use crate::races::{MemoryAccess, RaceDetector, VectorClock};
use collectives::RunningProgram;
use command_kind::CommandKind;
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{
    Buffer, Collectives, CompletionSource, CopyOutcome, Device, DeviceError, DeviceId, DeviceInfo, Domain,
    MemoryBudget, MemoryInfo, PeerCopies, PendingRead, Program, Queue, Region, Support, Timeline, TimelinePoint,
    UploadSource, check_copy,
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

/// Average numbers of commands between two draws of ranks: rare draws delay single queues for long, frequent ones interleave all
/// queues.
const RANK_PERIODS: [u32; 3] = [1, 4, 32];

/// Longest time that a command may take.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// Schedules the commands of its devices. See the [module](self).
pub struct Gate {
    /// Copy domain of the devices, unless [`GatedDevice::with_info`] changes it.
    domain: Domain,
    state: Mutex<GateState>,
}

struct GateState {
    rng: fastrand::Rng,
    /// Whether other threads may reach points of other devices during a wait.
    waits_for_threads: bool,
    /// Average number of commands after which the gate draws new ranks.
    rank_period: u32,
    queues: Vec<QueueState>,
    /// The description of each device. Only devices of the same gate copy from each other.
    devices: HashMap<DeviceId, DeviceInfo>,
    /// The commands whose completion the host has observed.
    host: VectorClock,
    races: RaceDetector,
    /// The queue of each command that ran.
    order: Vec<usize>,
}

struct QueueState {
    device: String,
    /// Runs one command at a time, to its end.
    inner: Box<dyn Queue>,
    commands: VecDeque<GatedCommand>,
    /// The number of commands submitted.
    submitted: u64,
    /// The number of commands that ran.
    done: u64,
    failure: Option<DeviceError>,
    /// Marked points whose completion the host has not observed.
    marks: VecDeque<u64>,
    /// The commands that are ordered before the queue's next command.
    clock: VectorClock,
    /// The vector clock after each command that ran.
    clocks: Vec<VectorClock>,
    /// Priority: of the queues with a ready command, the queue with the highest rank runs.
    rank: u32,
    /// The program with collective nodes that runs.
    running: Option<RunningProgram>,
}

struct GatedCommand {
    after: Option<TimelinePoint>,
    /// The host's clock at submission: the commands whose completion the host had observed.
    host: VectorClock,
    command: CommandKind,
}

impl Gate {
    /// A gate that schedules commands with this seed.
    pub fn new(seed: u64) -> Arc<Gate> {
        Gate::seeded(seed, false)
    }

    /// As [`Gate::new`], for devices to which several threads submit. A queue that waits for a point of another device is not
    /// reported as a deadlock, since another thread may reach that point. The seed does not determine the order of the threads'
    /// calls, and a completion that one thread observed counts as observed by all of them.
    pub fn among_threads(seed: u64) -> Arc<Gate> {
        Gate::seeded(seed, true)
    }

    fn seeded(seed: u64, threads: bool) -> Arc<Gate> {
        let mut rng = fastrand::Rng::with_seed(seed);
        let rank_period = RANK_PERIODS[rng.usize(0..RANK_PERIODS.len())];
        let state = GateState {
            rng,
            waits_for_threads: threads,
            rank_period,
            queues: Vec::new(),
            devices: HashMap::new(),
            host: VectorClock::default(),
            races: RaceDetector::default(),
            order: Vec::new(),
        };
        Arc::new(Gate { domain: Domain::unique("gated"), state: Mutex::new(state) })
    }

    /// A device that the gate schedules. All devices of a gate share a copy domain unless [`GatedDevice::with_info`] changes
    /// it.
    ///
    /// # Panics
    /// If the CPU device cannot start its threads.
    pub fn device(self: &Arc<Gate>, name: &str) -> GatedDevice {
        let inner = CpuDevice::new(name, 1, MathMode::Exact, MEMORY).unwrap();
        let gated = GatedDevice { info: inner.info().clone(), copy_rule: |_, _| false, inner, gate: Arc::clone(self) };
        gated.with_info(|info| info.domain = self.domain.clone())
    }

    /// Descriptions of the data races so far: unordered accesses to the same bytes, one of them a write.
    pub fn races(&self) -> Vec<String> {
        self.lock().races.found.clone()
    }

    /// The queue of each command that ran. Queues are numbered in the order in which they were opened, from 0.
    pub fn order(&self) -> Vec<usize> {
        self.lock().order.clone()
    }

    /// Draws the choices of the gate, and the ranks of all queues, from another seed.
    pub fn reseed(&self, seed: u64) {
        let mut state = self.lock();
        state.rng = fastrand::Rng::with_seed(seed);
        state.rank_period = RANK_PERIODS[state.rng.usize(0..RANK_PERIODS.len())];
        let GateState { rng, queues, .. } = &mut *state;
        queues.iter_mut().for_each(|queue| queue.rank = rng.u32(..));
    }

    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap()
    }
}

impl GateState {
    /// Runs one ready command. False if no command is ready.
    fn run_next(&mut self, gate: &Gate) -> bool {
        self.finish_programs();
        let queues = self.queues.iter().enumerate().filter(|(_, queue)| queue.running.is_none());
        let heads = queues.filter_map(|(at, queue)| Some((at, queue.commands.front()?)));
        let reached = heads.map(|(at, head)| (at, head.after.as_ref().map_or(Ok(true), |p| self.reached(gate, p))));
        let ready: Vec<_> = reached.filter(|(_, reached)| *reached != Ok(false)).collect();
        if self.rng.u32(0..self.rank_period) == 0 {
            self.queues.iter_mut().for_each(|queue| queue.rank = self.rng.u32(..));
        }
        let Some((at, reached)) = ready.into_iter().max_by_key(|(at, _)| self.queues[*at].rank) else {
            return self.wait_for_programs();
        };
        self.order.push(at);
        let done = reached.and_then(|_| self.run_head(gate, at));
        if let Err(failure) = done {
            self.queues[at].fail(failure);
        }
        true
    }

    /// Whether a point is reached, also if the host has not observed it yet.
    fn reached(&self, gate: &Gate, point: &TimelinePoint) -> Result<bool, DeviceError> {
        let Some(queue) = queue_of(gate, point) else { return point.poll() };
        let queue = &self.queues[queue];
        if queue.done >= point.seq() { Ok(true) } else { queue.failure.clone().map_or(Ok(false), Err) }
    }

    /// Runs the first command of a queue.
    fn run_head(&mut self, gate: &Gate, at: usize) -> Result<(), DeviceError> {
        let Some(GatedCommand { after, host, command }) = self.queues[at].commands.pop_front() else { return Ok(()) };
        let mut clock = std::mem::take(&mut self.queues[at].clock);
        clock.join(&host);
        if let Some(point) = &after {
            match (queue_of(gate, point), point.seq().checked_sub(1)) {
                (Some(queue), Some(i)) => clock.join(&self.queues[queue].clocks[i as usize]),
                (Some(_), None) => {}
                // A point of another device: the host reached it, so its current clock is an upper bound.
                (None, _) => clock.join(&self.host),
            }
        }
        let seq = self.queues[at].done + 1;
        clock.advance(at, seq);
        command.accesses(|what, writes, region, range| {
            let range = region.offset() + range.start..region.offset() + range.end;
            self.races.record(region.buffer(), MemoryAccess { range, writes, queue: at, seq, what }, &clock);
        });
        let queue = &mut self.queues[at];
        if command.has_collectives() {
            return queue.start(command, clock);
        }
        queue.process(command)?;
        queue.complete(clock);
        Ok(())
    }

    /// Whether a queue waits for a point that this gate cannot reach.
    fn waits_elsewhere(&self, gate: &Gate) -> bool {
        let mut heads = self.queues.iter().filter_map(|queue| queue.commands.front()?.after.as_ref());
        heads.any(|point| queue_of(gate, point).is_none())
    }

    /// The error for a deadlock: the point that each queue waits for.
    fn deadlock_error(&self, gate: &Gate) -> DeviceError {
        let head = |(at, queue): (usize, &QueueState)| {
            let after = queue.commands.front()?.after.as_ref()?;
            let what = match queue_of(gate, after) {
                Some(of) => format!("point {} of queue {of}, which has reached {}", after.seq(), self.queues[of].done),
                None => "a point of another device".to_owned(),
            };
            Some(format!("queue {at} ({}) waits for {what}", queue.device))
        };
        let heads: Vec<_> = self.queues.iter().enumerate().filter_map(head).collect();
        DeviceError::Bug(format!("deadlock: {}", heads.join("; ")))
    }
}

impl QueueState {
    fn process(&mut self, command: CommandKind) -> Result<(), DeviceError> {
        let inner = &mut self.inner;
        let by = Instant::now() + COMMAND_TIMEOUT;
        match command {
            CommandKind::Upload { dst, bytes } => inner.upload(dst, None, UploadSource::Borrowed(&bytes))?,
            CommandKind::Download { src, to } => *to.lock().unwrap() = inner.download(src)?.wait(Some(by))?,
            CommandKind::Fill { dst, value } => inner.fill(dst, value)?,
            CommandKind::Copy { src, dst } => _ = inner.copy_from(src, dst, None)?,
            CommandKind::Run { program, bindings } => inner.run_inline(&program, &bindings, COMMAND_TIMEOUT)?,
            CommandKind::Wait => {}
        }
        inner.mark().wait(Some(by))
    }

    /// Records that the next command has completed, with the commands that are ordered before its end.
    fn complete(&mut self, clock: VectorClock) {
        self.clocks.push(clock.clone());
        (self.done, self.clock) = (self.done + 1, clock);
    }

    fn fail(&mut self, failure: DeviceError) {
        self.commands.clear();
        self.failure.get_or_insert(failure);
    }
}

/// The queue of a point, if it is a queue of this gate.
fn queue_of(gate: &Gate, point: &TimelinePoint) -> Option<usize> {
    point.completion_source::<QueueProgress>().filter(|of| std::ptr::eq(&*of.gate, gate)).map(|of| of.queue)
}

/// The completion source of one queue. Polling it makes the gate run commands.
struct QueueProgress {
    gate: Arc<Gate>,
    queue: usize,
}

impl std::fmt::Debug for QueueProgress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "queue {} of a gate", self.queue)
    }
}

impl CompletionSource for QueueProgress {
    /// Runs commands until the queue's next marked point is reached. Later points are not reported even if they are reached,
    /// because the host's clock may contain only completions for which the host waited.
    fn poll(&self, timeline: &Timeline) {
        let mut state = self.gate.lock();
        loop {
            let queue = &mut state.queues[self.queue];
            match queue.marks.front() {
                Some(&mark) if queue.done >= mark => {
                    queue.marks.pop_front();
                    let clock = queue.clocks[mark as usize - 1].clone();
                    state.host.join(&clock);
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
                let deadlock = state.deadlock_error(&self.gate);
                state.queues[self.queue].fail(deadlock);
            }
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Whether a device copies from a device of another domain, given the descriptions of both.
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
    /// Changes the description that [`Device::info`] returns, except for name and identity.
    pub fn with_info(mut self, change: impl FnOnce(&mut DeviceInfo)) -> GatedDevice {
        change(&mut self.info);
        (self.info.id, self.info.name) = (self.inner.info().id, self.inner.info().name.clone());
        self.gate.lock().devices.insert(self.info.id, self.info.clone());
        self
    }

    /// Sets the rule that decides from which devices of other domains the device copies, given both descriptions.
    pub fn with_copies_from(self, rule: CopyRule) -> GatedDevice {
        GatedDevice { copy_rule: rule, ..self }
    }

    /// The finished device as a shared trait object, the form that lists of devices take.
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

    fn lost(&self) -> Option<DeviceError> {
        self.inner.lost()
    }

    fn alloc(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError> {
        self.inner.alloc(bytes, budget)
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

    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        let inner = self.inner.queue(budget)?;
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
            clock: VectorClock::default(),
            clocks: Vec::new(),
            rank,
            running: None,
        });
        let gate = Arc::clone(&self.gate);
        let timeline = Timeline::with_source(Arc::new(QueueProgress { gate: Arc::clone(&gate), queue }));
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
    fn submit(&mut self, after: Option<&TimelinePoint>, command: CommandKind) -> Result<(), DeviceError> {
        let mut state = self.gate.lock();
        let host = state.host.clone();
        let queue = &mut state.queues[self.queue];
        if let Some(failure) = &queue.failure {
            return Err(failure.clone());
        }
        queue.submitted += 1;
        queue.commands.push_back(GatedCommand { after: after.cloned(), host, command });
        Ok(())
    }
}

impl Queue for GatedQueue {
    fn upload(&mut self, dst: Region, _: Option<&TensorDesc>, src: UploadSource<'_>) -> Result<(), DeviceError> {
        dst.check_device(self.info.id)?;
        src.check_size(dst.bytes())?;
        let bytes = src.into_bytes(dst.bytes())?;
        self.submit(None, CommandKind::Upload { dst, bytes })
    }

    fn download(&mut self, src: Region) -> Result<PendingRead, DeviceError> {
        src.check_device(self.info.id)?;
        let to = Arc::default();
        self.submit(None, CommandKind::Download { src, to: Arc::clone(&to) })?;
        let point = self.mark();
        Ok(PendingRead::at(point, move || Ok(std::mem::take(&mut *to.lock().unwrap()))))
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        dst.check_device(self.info.id)?;
        self.submit(None, CommandKind::Fill { dst, value })
    }

    fn copy_from(
        &mut self,
        src: Region,
        dst: Region,
        after: Option<&TimelinePoint>,
    ) -> Result<CopyOutcome, DeviceError> {
        dst.check_device(self.info.id)?;
        check_copy(&src, &dst)?;
        let other = self.gate.lock().devices.get(&src.buffer().device()).cloned();
        if !other.is_some_and(|other| copies(self.copy_rule, &self.info, &other)) {
            return Ok(CopyOutcome::Unreachable);
        }
        self.submit(after, CommandKind::Copy { src, dst })?;
        Ok(CopyOutcome::Submitted)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        bindings.iter().try_for_each(|region| region.check_device(self.info.id))?;
        self.submit(None, CommandKind::Run { program: program.clone(), bindings: Arc::clone(bindings) })
    }

    fn mark(&mut self) -> TimelinePoint {
        let queue = &mut self.gate.lock().queues[self.queue];
        if queue.submitted > 0 && queue.marks.back() != Some(&queue.submitted) {
            queue.marks.push_back(queue.submitted);
        }
        TimelinePoint::new(&self.timeline, queue.submitted)
    }

    fn wait(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        self.submit(Some(point), CommandKind::Wait)
    }

    fn collectives(&mut self) -> Option<&mut dyn Collectives> {
        Some(self)
    }
}

impl Drop for GatedQueue {
    fn drop(&mut self) {
        self.gate.lock().queues[self.queue].fail(DeviceError::Ended);
        self.timeline.fail(DeviceError::Ended);
    }
}

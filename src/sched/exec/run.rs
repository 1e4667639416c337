//! Submitting the steps of a run.

use super::super::{Origin, Plan, SchedError, Storage, Work};
use super::lanes::Worker;
use super::porter;
use super::programs::Experts;
use super::{Fetched, Prepared, Scheduler, take, wait};
use crate::device::{DeviceError, PATIENCE, Point, Region};
use crate::graph::TensorId;
use crate::ops::OpCode;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long the caller's thread does a device's work itself before it leaves the rest to the device and looks whether to stop.
const HERE: Duration = Duration::from_millis(100);

/// How the nodes of a split are run.
pub(super) trait Runs {
    /// Submits a split.
    fn split(&mut self, scheduler: &mut Scheduler, of: &Prepared, split: u32, at: Moment) -> Result<(), SchedError>;

    /// Whether the rest of the run is left out.
    fn is_over(&self) -> bool {
        false
    }
}

/// Where a step runs.
#[derive(Clone, Copy)]
pub(super) struct Moment {
    /// The lane's number.
    pub(super) lane: usize,
    /// Which copy of the ring is this run's.
    pub(super) copy: usize,
}

/// As a whole.
struct Whole {
    /// Whether the calling thread may do the work.
    here: bool,
}

impl Runs for Whole {
    fn split(&mut self, scheduler: &mut Scheduler, of: &Prepared, split: u32, at: Moment) -> Result<(), SchedError> {
        let (program, bindings) = of.programs.split(split, at.copy)?;
        let running = scheduler.lanes.at(at.lane)?;
        let device = running.lane.device;
        let queue = running.queue();
        let done =
            if self.here { queue.run_inline_or_submit(program, bindings, HERE) } else { queue.run(program, bindings) };
        done.map_err(|e| SchedError::of(&of.plan.devices[device], e))
    }
}

impl Scheduler {
    /// Submits a run and returns while it is under way. Inputs are copied before that. Waits only for the run `depth` before
    /// this one, and with a depth above 1 only for the device that computes first.
    ///
    /// # Errors
    /// [`SchedError::Input`] where one is missing or of another length, [`SchedError::NoInput`] for bytes too many: nothing
    /// was submitted. Otherwise the failure of a device, now or of work submitted before. After a run that ended half-way
    /// there is only [`SchedError::Torn`] until [`Scheduler::reset`] makes the scheduler usable again.
    pub fn submit(&mut self, prepared: &mut Prepared, inputs: &[(TensorId, &[u8])]) -> Result<(), SchedError> {
        self.go(prepared, inputs, &mut Whole { here: false })
    }

    /// Submits a run and waits for it; the calling thread may do a device's work.
    ///
    /// # Errors
    /// As [`Scheduler::submit`] and [`Scheduler::synchronize`].
    pub fn run(&mut self, prepared: &mut Prepared, inputs: &[(TensorId, &[u8])]) -> Result<(), SchedError> {
        self.go(prepared, inputs, &mut Whole { here: true })?;
        self.synchronize(None)
    }

    pub(super) fn go(
        &mut self,
        prepared: &mut Prepared,
        inputs: &[(TensorId, &[u8])],
        runs: &mut dyn Runs,
    ) -> Result<(), SchedError> {
        self.own(prepared)?;
        let plan = Arc::clone(&prepared.plan);
        for &slot in &prepared.programs.inputs {
            given(&plan, slot, inputs)?;
        }
        wanted(&plan, inputs)?;
        if self.torn {
            return Err(SchedError::Torn);
        }
        // Other plans may have made it grow or a reset taken it away.
        self.make_room(&plan)?;
        prepared.programs.refresh(&plan, &self.rooms)?;
        if self.current != prepared.id {
            self.change_to(prepared)?;
        }
        self.make_room_for_one()?;
        let number = self.runs as usize;
        let (run, copy) = (number % (plan.depth + 1), number % plan.depth);
        self.history[run].fill(None);
        self.runs += 1;
        self.fetched.clear();
        self.counts.runs += 1;
        (self.torn, self.finished) = (true, 0);
        for step in &plan.steps {
            if self.abort.load(Ordering::Relaxed) {
                return Err(SchedError::Aborted);
            }
            let lane = self.numbers[step.lane];
            let device = plan.lanes[step.lane].device;
            let of = |e| SchedError::of(&plan.devices[device], e);
            let over = runs.is_over();
            // What a copy waits for on the device that it copies from need not hold up this one: whoever sends the bytes waits.
            let home = match step.work {
                Work::Copy(replica) => plan.home(plan.cut.replicas[replica as usize].slot),
                _ => None,
            };
            let mut after = None;
            for wait in step.waits.iter().filter(|_| !over) {
                let then = (run + plan.depth + 1 - wait.ago as usize) % (plan.depth + 1);
                let Some(point) = &self.history[then][wait.mark as usize] else { continue };
                if after.is_none() && home == Some(prepared.programs.makers[wait.mark as usize]) {
                    after = Some(point.clone());
                } else {
                    self.lanes.at(lane)?.wait(point).map_err(of)?;
                }
            }
            let at = Moment { lane, copy };
            match step.work {
                _ if over => {}
                Work::Run(split) => runs.split(self, prepared, split, at)?,
                work => self.bring(prepared, (work, after), at, inputs).map_err(|e| e.or(of))?,
            }
            if let Some(mark) = step.mark {
                let running = self.lanes.at(lane)?;
                let point = running.queue().mark();
                running.end = Some(point.clone());
                self.history[run][mark as usize] = Some(point);
            }
        }
        let first = plan.steps.iter().find(|step| matches!(step.work, Work::Run(_))).map(|step| step.lane);
        let at = number % self.under_way.len();
        // The lane that computes first comes first.
        let lanes = first.into_iter().chain((0..self.numbers.len()).filter(|&lane| Some(lane) != first));
        for number in lanes.map(|lane| self.numbers[lane]) {
            if let Some(end) = &self.lanes.at(number)?.end {
                self.under_way[at].push((number, end.clone()));
            }
        }
        // Whoever left the rest out waits for what was submitted.
        self.torn = runs.is_over();
        if !self.torn {
            self.finished = prepared.id;
        }
        Ok(())
    }

    /// Goes over to another plan, which uses the same memory in another way: each of its lanes waits for what others last did
    /// to the memory it touches.
    fn change_to(&mut self, prepared: &Prepared) -> Result<(), SchedError> {
        let plan = &*prepared.plan;
        // Should it fail half-way, no plan is the current one.
        self.current = 0;
        self.numbers.clear();
        for (&lane, touches) in plan.lanes.iter().zip(&prepared.programs.touches) {
            let number = self.lanes.number(&self.devices, lane)?;
            self.lanes.enter(&self.devices, number, touches)?;
            self.numbers.push(number);
        }
        // Repeated runs find all the memory that they need.
        self.history = vec![vec![None; plan.marks as usize]; plan.depth + 1];
        self.under_way.iter_mut().for_each(|ends| ends.reserve(plan.lanes.len()));
        self.current = prepared.id;
        Ok(())
    }

    /// Keeps the host from running ahead. The device that computes first sets the pace: it may be `depth` runs behind. The
    /// others follow at the distance that their waits allow; to wait for the last of them would leave the first idle where
    /// devices are more than runs. None is further behind than all rings together reach.
    fn make_room_for_one(&mut self) -> Result<(), SchedError> {
        let (number, all) = (self.runs as usize, self.under_way.len());
        let far = number % all;
        let near = number.checked_sub(self.options.depth).map(|near| near % all);
        let near = near.and_then(|near| self.under_way[near].first());
        let deadline = Instant::now() + PATIENCE;
        for (lane, end) in near.into_iter().chain(&self.under_way[far]) {
            let device = self.lanes.at(*lane)?.lane.device;
            wait(end, deadline, &self.abort, &self.devices[device].info().name)?;
        }
        self.under_way[far].clear();
        Ok(())
    }

    /// A step that brings something to a device, or on its way there; a copy after that moment.
    fn bring(
        &mut self,
        prepared: &mut Prepared,
        (work, after): (Work, Option<Point>),
        at: Moment,
        inputs: &[(TensorId, &[u8])],
    ) -> Result<(), Failed> {
        let (plan, programs) = (&*prepared.plan, &prepared.programs);
        let running = self.lanes.at(at.lane)?;
        let device = running.lane.device;
        match work {
            Work::Upload(number) => {
                let (replica, to) = (&plan.cut.replicas[number as usize], programs.to(number, at.copy)?);
                let bytes = given(plan, replica.slot, inputs)?;
                let bytes = bytes.get(replica.range.clone()).ok_or(SchedError::Bug("a replica beyond its input"))?;
                porter::upload(running.queue(), to, bytes)?;
                self.counts.uploaded[device] += bytes.len() as u64;
            }
            Work::Copy(number) => {
                let (from, to) = (programs.from(number, at.copy)?, programs.to(number, at.copy)?);
                porter::copy(running.queue(), from.clone(), to.clone(), after.as_ref())?;
                self.counts.copied[device] += to.bytes();
            }
            Work::Fetch(number) => {
                let ticket = running.queue().download(programs.from(number, at.copy)?.clone())?;
                self.fetched.push(Fetched { replica: number, ticket, done: running.queue().mark() });
            }
            Work::Deliver(number) => {
                let to = programs.to(number, at.copy)?;
                let fetched = self.fetched.iter().position(|fetched| fetched.replica == number);
                let at = fetched.ok_or(SchedError::Bug("nothing was fetched"))?;
                let Fetched { ticket, done, .. } = self.fetched.swap_remove(at);
                match &mut running.worker {
                    Worker::Porter(porter) => porter.deliver(to.clone(), ticket)?,
                    Worker::Queue(queue) => {
                        let home = plan.home(plan.cut.replicas[number as usize].slot).unwrap_or(device);
                        let bytes = take(ticket, &done, &self.abort, &plan.devices[home])?;
                        porter::upload(&mut **queue, to, &bytes)?;
                    }
                }
                self.counts.copied[device] += to.bytes();
            }
            Work::Experts(number) => {
                let experts = programs.experts(number)?;
                let ids = experts.ids.get(at.copy).ok_or(SchedError::Bug("a copy beyond the depth"))?;
                let (ids, done) = (running.queue().download(ids.clone())?, running.queue().mark());
                let ids = take(ids, &done, &self.abort, &plan.devices[device])?;
                let (from, to) = (programs.from(number, at.copy)?, programs.to(number, at.copy)?);
                let Origin::Experts { home, .. } = plan.cut.replicas[number as usize].origin else {
                    return Err(SchedError::Bug("experts of a replica that has none").into());
                };
                let ranges = used(experts, &ids, to.bytes())?;
                self.counts.copied[device] += ranges.iter().map(|range| range.end - range.start).sum::<u64>();
                self.bring_experts(home, at.lane, (from, to), &ranges)?;
            }
            Work::Run(_) => return Err(SchedError::Bug("a split is run, not brought").into()),
        }
        Ok(())
    }

    fn bring_experts(
        &mut self,
        home: usize,
        lane: usize,
        (from, to): (&Region, &Region),
        ranges: &[Range<u64>],
    ) -> Result<(), Failed> {
        let copies = self.reach.copies(self.lanes.at(lane)?.lane.device, home);
        for range in ranges {
            let part = |of: &Region| of.part(range.start, range.end - range.start);
            let (from, to) = (part(from)?, part(to)?);
            if copies {
                porter::copy(self.lanes.at(lane)?.queue(), from, to, None)?;
                continue;
            }
            let bytes = self.fetch(home, from)?;
            porter::upload(self.lanes.at(lane)?.queue(), &to, &bytes)?;
        }
        Ok(())
    }
}

/// A failure whose device is still to be named, or one of ours.
enum Failed {
    Device(DeviceError),
    Other(SchedError),
}

impl From<DeviceError> for Failed {
    fn from(e: DeviceError) -> Failed {
        Failed::Device(e)
    }
}

impl From<SchedError> for Failed {
    fn from(e: SchedError) -> Failed {
        Failed::Other(e)
    }
}

impl Failed {
    fn or(self, of: impl FnOnce(DeviceError) -> SchedError) -> SchedError {
        match self {
            Failed::Device(e) => of(e),
            Failed::Other(e) => e,
        }
    }
}

/// The bytes of an input.
fn given<'a>(plan: &Plan, slot: u32, inputs: &[(TensorId, &'a [u8])]) -> Result<&'a [u8], SchedError> {
    let want = plan.task.graph().slots().get(slot as usize).copied().unwrap_or(0);
    let is = |id: TensorId| plan.task.span(id).is_some_and(|(of, range)| of == slot && range == (0..want));
    let bytes = inputs.iter().find(|(id, _)| is(*id)).map(|(_, bytes)| *bytes);
    let complain = |got: String| SchedError::Input { name: plan.task.slot_name(slot).to_owned(), want, got };
    match bytes {
        Some(bytes) if bytes.len() == want => Ok(bytes),
        Some(bytes) => Err(complain(bytes.len().to_string())),
        None => Err(complain("none".to_owned())),
    }
}

/// That nothing is given but inputs, and each only once.
fn wanted(plan: &Plan, inputs: &[(TensorId, &[u8])]) -> Result<(), SchedError> {
    let slot = |id: TensorId| Some(plan.task.span(id)?.0);
    let twice = |at: usize, of: u32| inputs[..at].iter().any(|(id, _)| slot(*id) == Some(of));
    for (at, (id, _)) in inputs.iter().enumerate() {
        match slot(*id) {
            Some(of) if matches!(plan.task.storage().get(of as usize), Some(Storage::Input)) && !twice(at, of) => {}
            _ => return Err(SchedError::NoInput { name: plan.task.name(*id).to_owned() }),
        }
    }
    Ok(())
}

/// The bytes of the experts that are named, of `bytes` in all; neighbours together.
fn used(experts: &Experts, ids: &[u8], bytes: u64) -> Result<Vec<Range<u64>>, DeviceError> {
    let (ne, nb) = (experts.ids_desc.ne(), experts.ids_desc.nb());
    let mut named = BTreeSet::new();
    for token in 0..ne[1] {
        for at in (0..ne[0]).map(|i| i * nb[0] + token * nb[1]) {
            let word = ids.get(at..at + 4).and_then(|word| word.try_into().ok());
            let id = word.map(i32::from_le_bytes).unwrap_or(-1);
            match u64::try_from(id) {
                Ok(id) if id < experts.count => named.insert(id),
                _ => {
                    let reason = format!("expert id {id} is not one of the {} of the first source", experts.count);
                    return Err(DeviceError::Data { op: OpCode::MulMatId, reason });
                }
            };
        }
    }
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for id in named {
        let range = id * experts.stride..((id + 1) * experts.stride).min(bytes);
        match ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => ranges.push(range),
        }
    }
    Ok(ranges)
}

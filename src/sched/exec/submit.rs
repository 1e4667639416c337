//! Submitting the steps of a run.

use super::super::{Plan, ReplicaOrigin, SchedError, StepAction, Storage};
use super::host_staging_queue;
use super::programs::ExpertWeights;
use super::queues::QueueBackend;
use super::{PreparedPlan, Scheduler, StagedDownload, wait_for_bytes, wait_or_abort};
use crate::device::{DeviceError, PATIENCE, Point, Region};
use crate::graph::TensorId;
use crate::ops::OpCode;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long the caller's thread does a device's work itself before it leaves the rest to the device and looks whether to stop.
const INLINE_BUDGET: Duration = Duration::from_millis(100);

/// How the nodes of a split are run.
pub(super) trait SplitRunner {
    /// Submits a split.
    fn run_split(
        &mut self,
        scheduler: &mut Scheduler,
        of: &PreparedPlan,
        split: u32,
        at: StepContext,
    ) -> Result<(), SchedError>;

    /// Whether the rest of the run is left out.
    fn is_stopped(&self) -> bool {
        false
    }
}

/// Where a step runs.
#[derive(Clone, Copy)]
pub(super) struct StepContext {
    /// The lane's number.
    pub(super) queue: usize,
    /// Which copy of the ring is this run's.
    pub(super) ring_copy: usize,
}

/// As a whole.
struct WholeSplits {
    /// Whether the calling thread may do the work.
    inline: bool,
}

impl SplitRunner for WholeSplits {
    fn run_split(
        &mut self,
        scheduler: &mut Scheduler,
        of: &PreparedPlan,
        split: u32,
        at: StepContext,
    ) -> Result<(), SchedError> {
        let (program, bindings) = of.programs.bound_program(split, at.ring_copy)?;
        let running = scheduler.queues.by_index(at.queue)?;
        let device = running.id.device;
        let queue = running.queue();
        let done = if self.inline {
            queue.run_inline_or_submit(program, bindings, INLINE_BUDGET)
        } else {
            queue.run(program, bindings)
        };
        done.map_err(|e| SchedError::from_device(&of.plan.devices[device], e))
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
    pub fn submit(&mut self, prepared: &mut PreparedPlan, inputs: &[(TensorId, &[u8])]) -> Result<(), SchedError> {
        self.submit_steps(prepared, inputs, &mut WholeSplits { inline: false })
    }

    /// Submits a run and waits for it; the calling thread may do a device's work.
    ///
    /// # Errors
    /// As [`Scheduler::submit`] and [`Scheduler::synchronize`].
    pub fn run(&mut self, prepared: &mut PreparedPlan, inputs: &[(TensorId, &[u8])]) -> Result<(), SchedError> {
        self.submit_steps(prepared, inputs, &mut WholeSplits { inline: true })?;
        self.synchronize(None)
    }

    pub(super) fn submit_steps(
        &mut self,
        prepared: &mut PreparedPlan,
        inputs: &[(TensorId, &[u8])],
        runs: &mut dyn SplitRunner,
    ) -> Result<(), SchedError> {
        self.check_owner(prepared)?;
        let plan = Arc::clone(&prepared.plan);
        for &slot in &prepared.programs.inputs {
            input_bytes(&plan, slot, inputs)?;
        }
        check_inputs(&plan, inputs)?;
        if self.incomplete {
            return Err(SchedError::RunIncomplete);
        }
        // Other plans may have made it grow or a reset taken it away.
        self.ensure_arenas(&plan)?;
        prepared.programs.rebind_if_moved(&plan, &self.arenas)?;
        if self.current_plan != prepared.id {
            self.switch_plan(prepared)?;
        }
        self.limit_runs_in_flight()?;
        let number = self.runs as usize;
        let (run, copy) = (number % (plan.depth + 1), number % plan.depth);
        self.history[run].fill(None);
        self.runs += 1;
        self.staged.clear();
        self.counts.runs += 1;
        (self.incomplete, self.readable_plan) = (true, 0);
        for step in &plan.steps {
            if self.abort.load(Ordering::Relaxed) {
                return Err(SchedError::Aborted);
            }
            let lane = self.queue_numbers[step.queue];
            let device = plan.queues[step.queue].device;
            let of = |e| SchedError::from_device(&plan.devices[device], e);
            let over = runs.is_stopped();
            // What a copy waits for on the device that it copies from need not hold up this one: whoever sends the bytes waits.
            let home = match step.action {
                StepAction::DeviceCopy(replica) => plan.home(plan.split_graph.replicas[replica as usize].slot),
                _ => None,
            };
            let mut after = None;
            for wait in step.waits.iter().filter(|_| !over) {
                let then = (run + plan.depth + 1 - wait.runs_ago as usize) % (plan.depth + 1);
                let Some(point) = &self.history[then][wait.mark as usize] else { continue };
                if after.is_none() && home == Some(prepared.programs.mark_devices[wait.mark as usize]) {
                    after = Some(point.clone());
                } else {
                    self.queues.by_index(lane)?.wait(point).map_err(of)?;
                }
            }
            let at = StepContext { queue: lane, ring_copy: copy };
            match step.action {
                _ if over => {}
                StepAction::RunSplit(split) => runs.run_split(self, prepared, split, at)?,
                work => self.submit_transfer(prepared, (work, after), at, inputs).map_err(|e| e.into_sched(of))?,
            }
            if let Some(mark) = step.mark {
                let running = self.queues.by_index(lane)?;
                let point = running.queue().mark();
                running.last_point = Some(point.clone());
                self.history[run][mark as usize] = Some(point);
            }
        }
        let first =
            plan.steps.iter().find(|step| matches!(step.action, StepAction::RunSplit(_))).map(|step| step.queue);
        let at = number % self.in_flight.len();
        // The lane that computes first comes first.
        let lanes = first.into_iter().chain((0..self.queue_numbers.len()).filter(|&lane| Some(lane) != first));
        for number in lanes.map(|lane| self.queue_numbers[lane]) {
            if let Some(end) = &self.queues.by_index(number)?.last_point {
                self.in_flight[at].push((number, end.clone()));
            }
        }
        // Whoever left the rest out waits for what was submitted.
        self.incomplete = runs.is_stopped();
        if !self.incomplete {
            self.readable_plan = prepared.id;
        }
        Ok(())
    }

    /// Goes over to another plan, which uses the same memory in another way: each of its lanes waits for what others last did
    /// to the memory it touches.
    fn switch_plan(&mut self, prepared: &PreparedPlan) -> Result<(), SchedError> {
        let plan = &*prepared.plan;
        // Should it fail half-way, no plan is the current one.
        self.current_plan = 0;
        self.queue_numbers.clear();
        for (&lane, touches) in plan.queues.iter().zip(&prepared.programs.touched_devices) {
            let number = self.queues.open(&self.devices, lane)?;
            self.queues.order_after_others(&self.devices, number, touches)?;
            self.queue_numbers.push(number);
        }
        // Repeated runs find all the memory that they need.
        self.history = vec![vec![None; plan.marks as usize]; plan.depth + 1];
        self.in_flight.iter_mut().for_each(|ends| ends.reserve(plan.queues.len()));
        self.current_plan = prepared.id;
        Ok(())
    }

    /// Keeps the host from running ahead. The device that computes first sets the pace: it may be `depth` runs behind. The
    /// others follow at the distance that their waits allow; to wait for the last of them would leave the first idle where
    /// devices are more than runs. None is further behind than all rings together reach.
    fn limit_runs_in_flight(&mut self) -> Result<(), SchedError> {
        let (number, all) = (self.runs as usize, self.in_flight.len());
        let far = number % all;
        let near = number.checked_sub(self.options.depth).map(|near| near % all);
        let near = near.and_then(|near| self.in_flight[near].first());
        let deadline = Instant::now() + PATIENCE;
        for (lane, end) in near.into_iter().chain(&self.in_flight[far]) {
            let device = self.queues.by_index(*lane)?.id.device;
            wait_or_abort(end, deadline, &self.abort, &self.devices[device].info().name)?;
        }
        self.in_flight[far].clear();
        Ok(())
    }

    /// A step that brings something to a device, or on its way there; a copy after that moment.
    fn submit_transfer(
        &mut self,
        prepared: &mut PreparedPlan,
        (work, after): (StepAction, Option<Point>),
        at: StepContext,
        inputs: &[(TensorId, &[u8])],
    ) -> Result<(), StepError> {
        let (plan, programs) = (&*prepared.plan, &prepared.programs);
        let running = self.queues.by_index(at.queue)?;
        let device = running.id.device;
        match work {
            StepAction::UploadInput(number) => {
                let (replica, to) =
                    (&plan.split_graph.replicas[number as usize], programs.replica_region(number, at.ring_copy)?);
                let bytes = input_bytes(plan, replica.slot, inputs)?;
                let bytes = bytes.get(replica.range.clone()).ok_or(SchedError::Bug("a replica beyond its input"))?;
                host_staging_queue::upload_in_chunks(running.queue(), to, bytes)?;
                self.counts.uploaded[device] += bytes.len() as u64;
            }
            StepAction::DeviceCopy(number) => {
                let (from, to) =
                    (programs.home_region(number, at.ring_copy)?, programs.replica_region(number, at.ring_copy)?);
                host_staging_queue::copy_from_device(running.queue(), from.clone(), to.clone(), after.as_ref())?;
                self.counts.copied[device] += to.bytes();
            }
            StepAction::Download(number) => {
                let ticket = running.queue().download(programs.home_region(number, at.ring_copy)?.clone())?;
                self.staged.push(StagedDownload { replica: number, ticket, done: running.queue().mark() });
            }
            StepAction::UploadStaged(number) => {
                let to = programs.replica_region(number, at.ring_copy)?;
                let fetched = self.staged.iter().position(|fetched| fetched.replica == number);
                let at = fetched.ok_or(SchedError::Bug("nothing was fetched"))?;
                let StagedDownload { ticket, done, .. } = self.staged.swap_remove(at);
                match &mut running.backend {
                    QueueBackend::HostStaging(porter) => porter.upload_pending(to.clone(), ticket)?,
                    QueueBackend::Direct(queue) => {
                        let home = plan.home(plan.split_graph.replicas[number as usize].slot).unwrap_or(device);
                        let bytes = wait_for_bytes(ticket, &done, &self.abort, &plan.devices[home])?;
                        host_staging_queue::upload_in_chunks(&mut **queue, to, &bytes)?;
                    }
                }
                self.counts.copied[device] += to.bytes();
            }
            StepAction::CopyExperts(number) => {
                let experts = programs.experts(number)?;
                let ids = experts.ids.get(at.ring_copy).ok_or(SchedError::Bug("a copy beyond the depth"))?;
                let (ids, done) = (running.queue().download(ids.clone())?, running.queue().mark());
                let ids = wait_for_bytes(ids, &done, &self.abort, &plan.devices[device])?;
                let (from, to) =
                    (programs.home_region(number, at.ring_copy)?, programs.replica_region(number, at.ring_copy)?);
                let ReplicaOrigin::Experts { home, .. } = plan.split_graph.replicas[number as usize].origin else {
                    return Err(SchedError::Bug("experts of a replica that has none").into());
                };
                let ranges = expert_ranges(experts, &ids, to.bytes())?;
                self.counts.copied[device] += ranges.iter().map(|range| range.end - range.start).sum::<u64>();
                self.copy_experts(home, at.queue, (from, to), &ranges)?;
            }
            StepAction::RunSplit(_) => return Err(SchedError::Bug("a split is run, not brought").into()),
        }
        Ok(())
    }

    fn copy_experts(
        &mut self,
        home: usize,
        lane: usize,
        (from, to): (&Region, &Region),
        ranges: &[Range<u64>],
    ) -> Result<(), StepError> {
        let copies = self.copy_paths.can_copy(self.queues.by_index(lane)?.id.device, home);
        for range in ranges {
            let part = |of: &Region| of.part(range.start, range.end - range.start);
            let (from, to) = (part(from)?, part(to)?);
            if copies {
                host_staging_queue::copy_from_device(self.queues.by_index(lane)?.queue(), from, to, None)?;
                continue;
            }
            let bytes = self.download_blocking(home, from)?;
            host_staging_queue::upload_in_chunks(self.queues.by_index(lane)?.queue(), &to, &bytes)?;
        }
        Ok(())
    }
}

/// A failure whose device is still to be named, or one of ours.
enum StepError {
    Device(DeviceError),
    Other(SchedError),
}

impl From<DeviceError> for StepError {
    fn from(e: DeviceError) -> StepError {
        StepError::Device(e)
    }
}

impl From<SchedError> for StepError {
    fn from(e: SchedError) -> StepError {
        StepError::Other(e)
    }
}

impl StepError {
    fn into_sched(self, of: impl FnOnce(DeviceError) -> SchedError) -> SchedError {
        match self {
            StepError::Device(e) => of(e),
            StepError::Other(e) => e,
        }
    }
}

/// The bytes of an input.
fn input_bytes<'a>(plan: &Plan, slot: u32, inputs: &[(TensorId, &'a [u8])]) -> Result<&'a [u8], SchedError> {
    let want = plan.task.graph().slot_sizes().get(slot as usize).copied().unwrap_or(0);
    let is = |id: TensorId| plan.task.span(id).is_some_and(|(of, range)| of == slot && range == (0..want));
    let bytes = inputs.iter().find(|(id, _)| is(*id)).map(|(_, bytes)| *bytes);
    let complain = |got: String| SchedError::InputLength { name: plan.task.slot_name(slot).to_owned(), want, got };
    match bytes {
        Some(bytes) if bytes.len() == want => Ok(bytes),
        Some(bytes) => Err(complain(bytes.len().to_string())),
        None => Err(complain("none".to_owned())),
    }
}

/// That nothing is given but inputs, and each only once.
fn check_inputs(plan: &Plan, inputs: &[(TensorId, &[u8])]) -> Result<(), SchedError> {
    let slot = |id: TensorId| Some(plan.task.span(id)?.0);
    let twice = |at: usize, of: u32| inputs[..at].iter().any(|(id, _)| slot(*id) == Some(of));
    for (at, (id, _)) in inputs.iter().enumerate() {
        match slot(*id) {
            Some(of) if matches!(plan.task.storage().get(of as usize), Some(Storage::Input)) && !twice(at, of) => {}
            _ => return Err(SchedError::UnexpectedInput { name: plan.task.name(*id).to_owned() }),
        }
    }
    Ok(())
}

/// The bytes of the experts that are named, of `bytes` in all; neighbours together.
fn expert_ranges(experts: &ExpertWeights, ids: &[u8], bytes: u64) -> Result<Vec<Range<u64>>, DeviceError> {
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

//! Submission of a run: sends each step's waits, action and mark to its queue, in the order of the plan.

use super::super::{Plan, QueueId, QueueRole, ReplicaOrigin, SchedError, StepAction, Storage};
use super::host_staging_queue;
use super::programs::ExpertWeights;
use super::queues::QueueBackend;
use super::{IncompleteRun, PreparedPlan, Scheduler, StagedDownload, wait_for_bytes, wait_or_abort};
use crate::device::{DEVICE_TIMEOUT, DeviceError, Membership, Region, TimelinePoint};
use crate::graph::TensorId;
use crate::ops::OpCode;
use crate::ops::mul_mat::NO_EXPERT;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long the calling thread executes nodes inline before it hands the rest of the split to the queue. Bounds the delay until
/// the abort flag is polled.
const INLINE_BUDGET: Duration = Duration::from_millis(100);

/// Strategy for submitting the nodes of a split.
pub(super) trait SplitRunner {
    /// Submits the nodes of a split.
    fn run_split(
        &mut self,
        scheduler: &mut Scheduler,
        prepared: &PreparedPlan,
        split: u32,
        context: StepContext,
    ) -> Result<(), SchedError>;

    /// Whether the rest of the run is skipped.
    fn is_stopped(&self) -> bool {
        false
    }
}

/// The queue and the ring copy of a step.
#[derive(Clone, Copy)]
pub(super) struct StepContext {
    /// Index of the queue in the scheduler's [`super::queues::QueueSet`].
    pub(super) queue: usize,
    /// Index of this run's ring copy.
    pub(super) ring_copy: usize,
}

/// Submits each split as one program.
struct WholeSplits {
    /// Whether the calling thread may execute nodes itself (for CPU devices).
    inline: bool,
}

impl SplitRunner for WholeSplits {
    fn run_split(
        &mut self,
        scheduler: &mut Scheduler,
        prepared: &PreparedPlan,
        split: u32,
        context: StepContext,
    ) -> Result<(), SchedError> {
        let (program, bindings) = prepared.programs.bound_program(split, context.ring_copy)?;
        let running = scheduler.queues.by_index(context.queue)?;
        let device = running.id.device;
        let queue = running.queue();
        // Executed by this thread, the nodes of the first rank would delay the submission of the others.
        let done = if self.inline && prepared.plan.task.collective_groups().is_empty() {
            queue.run_inline(program, bindings, INLINE_BUDGET)
        } else {
            queue.run(program, bindings)
        };
        done.map_err(|e| SchedError::from_device(&prepared.plan.devices[device], e))
    }
}

impl Scheduler {
    /// Submits a run and returns without waiting for it. Inputs are copied before the call returns. Backpressure: waits for the
    /// run `depth` before this one; with a depth above 1, only for the device that runs the first split.
    ///
    /// # Errors
    /// [`SchedError::InputLength`] for an input that is missing or has the wrong length, [`SchedError::UnexpectedInput`] for
    /// bytes of another tensor: nothing was submitted. Otherwise a device's failure, possibly of earlier work. After a run that
    /// stopped before all steps were submitted, all calls fail with [`SchedError::RunIncomplete`] until [`Scheduler::reset`].
    pub fn submit(&mut self, prepared: &mut PreparedPlan, inputs: &[(TensorId, &[u8])]) -> Result<(), SchedError> {
        self.submit_steps(prepared, inputs, &mut WholeSplits { inline: false })
    }

    /// Submits a run and waits for it. The calling thread may execute nodes of CPU devices itself, which saves thread switches.
    ///
    /// # Errors
    /// As [`Scheduler::submit`] and [`Scheduler::synchronize`].
    pub fn run(&mut self, prepared: &mut PreparedPlan, inputs: &[(TensorId, &[u8])]) -> Result<(), SchedError> {
        self.submit_steps(prepared, inputs, &mut WholeSplits { inline: true })?;
        self.synchronize(None)
    }

    /// Submits a run, and remembers the failure of a device that stops it half way: later calls report it.
    pub(super) fn submit_steps(
        &mut self,
        prepared: &mut PreparedPlan,
        inputs: &[(TensorId, &[u8])],
        runner: &mut dyn SplitRunner,
    ) -> Result<(), SchedError> {
        let submitted = self.try_submit_steps(prepared, inputs, runner);
        submitted.inspect_err(|error| self.note_failure(error))
    }

    /// Remembers that the failure of a device has stopped a run half way.
    pub(super) fn note_failure(&mut self, error: &SchedError) {
        if let (Some(run), Some((device, error))) = (&mut self.incomplete, error.device_failure()) {
            run.stopped_by = Some((device.to_owned(), error.clone()));
        }
    }

    fn try_submit_steps(
        &mut self,
        prepared: &mut PreparedPlan,
        inputs: &[(TensorId, &[u8])],
        runner: &mut dyn SplitRunner,
    ) -> Result<(), SchedError> {
        self.check_owner(prepared)?;
        let plan = Arc::clone(&prepared.plan);
        for &slot in &prepared.programs.inputs {
            input_bytes(&plan, slot, inputs)?;
        }
        check_inputs(&plan, inputs)?;
        self.check_complete()?;
        // The arenas may have grown for another plan, or a reset may have freed them.
        self.ensure_arenas(&plan)?;
        prepared.programs.rebind_if_moved(&plan, &self.arenas)?;
        if self.current_plan != prepared.id {
            // First: once the plan is current, the next run would not repeat a join that failed.
            self.join_groups(prepared)?;
            self.switch_plan(prepared)?;
        }
        self.limit_runs_in_flight()?;
        let number = self.runs as usize;
        let (run, copy) = (number % (plan.depth + 1), number % plan.depth);
        self.history[run].fill(None);
        self.runs += 1;
        self.staged.clear();
        self.counts.runs += 1;
        (self.incomplete, self.readable_plan) = (Some(IncompleteRun::default()), 0);
        for step in &plan.steps {
            if self.abort.load(Ordering::Relaxed) {
                return Err(SchedError::Aborted);
            }
            let queue = self.queue_numbers[step.queue];
            let device = plan.queues[step.queue].device;
            let of = |e| SchedError::from_device(&plan.devices[device], e);
            let stopped = runner.is_stopped();
            // A copy passes its first wait on the source device as `after`: the sender of the bytes waits for it, and this
            // queue continues. All further waits block the queue.
            let home = match step.action {
                StepAction::DeviceCopy(replica) => plan.home(plan.split_graph.replicas[replica as usize].slot),
                _ => None,
            };
            let mut after = None;
            for wait in step.waits.iter().filter(|_| !stopped) {
                let earlier_run = (run + plan.depth + 1 - wait.runs_ago as usize) % (plan.depth + 1);
                let Some(point) = &self.history[earlier_run][wait.mark as usize] else { continue };
                if after.is_none() && home == Some(prepared.programs.mark_devices[wait.mark as usize]) {
                    after = Some(point.clone());
                } else {
                    self.queues.by_index(queue)?.wait(point).map_err(of)?;
                }
            }
            let context = StepContext { queue, ring_copy: copy };
            match step.action {
                _ if stopped => {}
                StepAction::RunSplit(split) => runner.run_split(self, prepared, split, context)?,
                action => self.submit_transfer(prepared, (action, after), context, inputs)?,
            }
            if let Some(mark) = step.mark {
                let running = self.queues.by_index(queue)?;
                let point = running.queue().mark();
                running.last_point = Some(point.clone());
                self.history[run][mark as usize] = Some(point);
            }
        }
        let first =
            plan.steps.iter().find(|step| matches!(step.action, StepAction::RunSplit(_))).map(|step| step.queue);
        let at = number % self.in_flight.len();
        // The queue that runs the first split is the first entry: see `limit_runs_in_flight`.
        let queues = first.into_iter().chain((0..self.queue_numbers.len()).filter(|&queue| Some(queue) != first));
        for number in queues.map(|queue| self.queue_numbers[queue]) {
            if let Some(end) = &self.queues.by_index(number)?.last_point {
                self.in_flight[at].push((number, end.clone()));
            }
        }
        // A runner that stopped waits for the submitted steps and then clears the flag: see `run_observed`.
        self.incomplete = runner.is_stopped().then(IncompleteRun::default);
        if self.incomplete.is_none() {
            self.readable_plan = prepared.id;
        }
        Ok(())
    }

    /// Makes another plan the current one. Plans share the arenas, so each queue of the new plan first waits for the last
    /// access of other queues to the devices' memory that it uses.
    fn switch_plan(&mut self, prepared: &PreparedPlan) -> Result<(), SchedError> {
        let plan = &*prepared.plan;
        // If an open or a wait below fails, no plan is current, and the next run switches again.
        self.current_plan = 0;
        self.queue_numbers.clear();
        for (&queue, touches) in plan.queues.iter().zip(&prepared.programs.touched_devices) {
            let number = self.queues.open(&self.devices, queue)?;
            self.queues.order_after_others(&self.devices, number, touches)?;
            self.queue_numbers.push(number);
        }
        // Allocates here so that repeated runs allocate nothing.
        self.history = vec![vec![None; plan.marks as usize]; plan.depth + 1];
        self.in_flight.iter_mut().for_each(|ends| ends.reserve(plan.queues.len()));
        self.current_plan = prepared.id;
        Ok(())
    }

    /// Makes the queues of a plan ranks of its groups, unless they are already, with exchange memory for its largest parts.
    pub(super) fn join_groups(&mut self, prepared: &PreparedPlan) -> Result<(), SchedError> {
        for (&number, &largest_part) in &prepared.programs.largest_parts {
            let missing = SchedError::Bug("a collective node of a group that its task does not have");
            let devices = prepared.plan.task.collective_groups().get(number as usize).ok_or(missing)?;
            if self
                .joined_groups
                .get(&number)
                .is_some_and(|(joined, bytes)| joined == devices && *bytes >= largest_part)
            {
                continue;
            }
            // Rounded up, so that plans for more and more tokens do not each make a new group.
            let part_bytes = largest_part.checked_next_power_of_two().unwrap_or(largest_part);
            // Queues that leave a group fail it, so programs of other plans must be done.
            self.synchronize(None)?;
            // If this fails half way, no plan is current, and the next run joins again.
            (self.current_plan, _) = (0, self.joined_groups.remove(&number));
            let of = |device: usize| {
                let name = self.devices[device].info().name.clone();
                move |e| SchedError::from_device(&name, e)
            };
            let ranks: Vec<_> = devices.iter().map(|&device| &*self.devices[device]).collect();
            let members = Membership::group(&ranks, part_bytes, &self.budget).map_err(of(devices[0]))?;
            for (&device, member) in devices.iter().zip(members) {
                let (id, of) = (QueueId { device, role: QueueRole::Compute }, of(device));
                let running = self.queues.get_or_open(&self.devices, id)?;
                let refused = DeviceError::Bug("a device that runs collective nodes has no groups".to_owned());
                let joined = running.queue().collectives().ok_or(refused).and_then(|to| to.join(number, member));
                joined.map_err(of)?;
            }
            self.joined_groups.insert(number, (devices.clone(), part_bytes));
        }
        Ok(())
    }

    /// Backpressure: keeps the host from submitting too far ahead. The queue of the first split may be `depth` runs behind; all
    /// further queues follow at the distance that their waits allow. Waiting for the last queue instead would leave the first
    /// device idle when there are more devices than runs in flight. No queue may be further behind than `in_flight` has
    /// entries.
    fn limit_runs_in_flight(&mut self) -> Result<(), SchedError> {
        let (number, all) = (self.runs as usize, self.in_flight.len());
        let oldest = number % all;
        let pacing = number.checked_sub(self.options.depth).map(|run| run % all);
        let pacing = pacing.and_then(|at| self.in_flight[at].first());
        let deadline = Instant::now() + DEVICE_TIMEOUT;
        for (queue, end) in pacing.into_iter().chain(&self.in_flight[oldest]) {
            let device = self.queues.by_index(*queue)?.id.device;
            wait_or_abort(end, deadline, &self.abort, &self.devices[device].info().name)?;
        }
        self.in_flight[oldest].clear();
        Ok(())
    }

    /// Submits the action of a step that makes a replica, or half of a host-staged copy. A device copy starts after point
    /// `after`.
    fn submit_transfer(
        &mut self,
        prepared: &mut PreparedPlan,
        (action, after): (StepAction, Option<TimelinePoint>),
        context: StepContext,
        inputs: &[(TensorId, &[u8])],
    ) -> Result<(), SchedError> {
        let (plan, programs) = (&*prepared.plan, &prepared.programs);
        let running = self.queues.by_index(context.queue)?;
        let device = running.id.device;
        let of = |e| SchedError::from_device(&plan.devices[device], e);
        match action {
            StepAction::UploadInput(number) => {
                let (replica, to) =
                    (&plan.split_graph.replicas[number as usize], programs.replica_region(number, context.ring_copy)?);
                let bytes = input_bytes(plan, replica.slot, inputs)?;
                let bytes = bytes.get(replica.range.clone()).ok_or(SchedError::Bug("a replica beyond its input"))?;
                host_staging_queue::upload_in_chunks(running.queue(), to, bytes).map_err(of)?;
                self.counts.uploaded[device] += bytes.len() as u64;
            }
            StepAction::DeviceCopy(number) => {
                let (from, to) = (
                    programs.home_region(number, context.ring_copy)?,
                    programs.replica_region(number, context.ring_copy)?,
                );
                host_staging_queue::copy_from_device(running.queue(), from.clone(), to.clone(), after.as_ref())
                    .map_err(of)?;
                self.counts.copied[device] += to.bytes();
            }
            StepAction::Download(number) => {
                let from = programs.home_region(number, context.ring_copy)?.clone();
                let read = running.queue().download(from).map_err(of)?;
                self.staged.push(StagedDownload { replica: number, read, done: running.queue().mark() });
            }
            StepAction::UploadStaged(number) => {
                let to = programs.replica_region(number, context.ring_copy)?;
                let staged = self.staged.iter().position(|staged| staged.replica == number);
                let at = staged.ok_or(SchedError::Bug("a staged upload without a download"))?;
                let StagedDownload { read, done, .. } = self.staged.swap_remove(at);
                match &mut running.backend {
                    QueueBackend::HostStaging(staging) => staging.upload_pending(to.clone(), read).map_err(of)?,
                    QueueBackend::Direct(queue) => {
                        let home = plan.home(plan.split_graph.replicas[number as usize].slot).unwrap_or(device);
                        let bytes = wait_for_bytes(read, &done, &self.abort, &plan.devices[home])?;
                        host_staging_queue::upload_in_chunks(&mut **queue, to, &bytes).map_err(of)?;
                    }
                }
                self.counts.copied[device] += to.bytes();
            }
            StepAction::CopyExperts(number) => {
                let experts = programs.experts(number)?;
                let ids = experts.ids.get(context.ring_copy).ok_or(SchedError::Bug("a ring copy beyond the depth"))?;
                let (ids, done) = (running.queue().download(ids.clone()).map_err(of)?, running.queue().mark());
                let ids = wait_for_bytes(ids, &done, &self.abort, &plan.devices[device])?;
                let (from, to) = (
                    programs.home_region(number, context.ring_copy)?,
                    programs.replica_region(number, context.ring_copy)?,
                );
                let ReplicaOrigin::Experts { home, .. } = plan.split_graph.replicas[number as usize].origin else {
                    return Err(SchedError::Bug("a copy of experts for a replica of another origin"));
                };
                let ranges = expert_ranges(experts, &ids, to.bytes()).map_err(of)?;
                self.counts.copied[device] += ranges.iter().map(|range| range.end - range.start).sum::<u64>();
                self.copy_experts(home, context.queue, (from, to), &ranges)?;
            }
            StepAction::RunSplit(_) => return Err(SchedError::Bug("a split was submitted as a transfer")),
        }
        Ok(())
    }

    fn copy_experts(
        &mut self,
        home: usize,
        queue: usize,
        (from, to): (&Region, &Region),
        ranges: &[Range<u64>],
    ) -> Result<(), SchedError> {
        let device = self.queues.by_index(queue)?.id.device;
        let name = self.devices[device].info().name.clone();
        let named = |e| SchedError::from_device(&name, e);
        let copies = self.copy_paths.can_copy(device, home);
        for range in ranges {
            let part = |of: &Region| of.subregion(range.start, range.end - range.start).map_err(named);
            let (from, to) = (part(from)?, part(to)?);
            if copies {
                let queue = self.queues.by_index(queue)?.queue();
                host_staging_queue::copy_from_device(queue, from, to, None).map_err(named)?;
                continue;
            }
            let bytes = self.download_blocking(home, from)?;
            host_staging_queue::upload_in_chunks(self.queues.by_index(queue)?.queue(), &to, &bytes).map_err(named)?;
        }
        Ok(())
    }
}

/// The bytes given for an input.
fn input_bytes<'a>(plan: &Plan, slot: u32, inputs: &[(TensorId, &'a [u8])]) -> Result<&'a [u8], SchedError> {
    let want = plan.task.graph().slot_sizes().get(slot as usize).copied().unwrap_or(0);
    let is = |id: TensorId| plan.task.span(id).is_some_and(|(of, range)| of == slot && range == (0..want));
    let bytes = inputs.iter().find(|(id, _)| is(*id)).map(|(_, bytes)| *bytes);
    let error = |got: String| SchedError::InputLength { name: plan.task.slot_name(slot).to_owned(), want, got };
    match bytes {
        Some(bytes) if bytes.len() == want => Ok(bytes),
        Some(bytes) => Err(error(bytes.len().to_string())),
        None => Err(error("none".to_owned())),
    }
}

/// Checks that only inputs are given, and each at most once.
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

/// The byte ranges of the experts with the given ids, in a tensor of `bytes` bytes. Ranges of adjacent experts are merged.
fn expert_ranges(experts: &ExpertWeights, ids: &[u8], bytes: u64) -> Result<Vec<Range<u64>>, DeviceError> {
    let (ne, nb) = (experts.ids_desc.ne(), experts.ids_desc.nb());
    let mut used = BTreeSet::new();
    for token in 0..ne[1] {
        for at in (0..ne[0]).map(|i| i * nb[0] + token * nb[1]) {
            let word = ids.get(at..at + 4).and_then(|word| word.try_into().ok());
            let id = word.map_or(i32::MIN, i32::from_le_bytes);
            match u64::try_from(id) {
                Ok(id) if id < experts.count => used.insert(id),
                _ if i64::from(id) == NO_EXPERT => continue,
                _ => {
                    let reason =
                        format!("expert id {id} is out of range: the first source has {} experts", experts.count);
                    return Err(DeviceError::Data { op: OpCode::MulMatId, reason });
                }
            };
        }
    }
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for id in used {
        let range = id * experts.stride..((id + 1) * experts.stride).min(bytes);
        match ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => ranges.push(range),
        }
    }
    Ok(ranges)
}

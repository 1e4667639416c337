//! Executor: opens queues, allocates arenas and submits runs of prepared plans.
//!
//! Start with [`Scheduler::submit`] in `submit`, which submits the steps of one run. `queues` opens device queues,
//! `host_staging_queue` waits for host-staged bytes on a thread, `arenas` owns the memory, `programs` prepares splits for their
//! devices and binds them to memory, `observer` runs a plan node by node. Planning is not here: see [`super::plan`].

mod arenas;
mod host_staging_queue;
mod observer;
mod programs;
mod queues;
mod submit;

use super::{CopyPaths, Devices, Options, Plan, QueueId, QueueRole, SchedError, Storage, Task};
use crate::device::{DEVICE_TIMEOUT, Device, DeviceError, MemoryBudget, PendingRead, Region, TimelinePoint};
use crate::graph::TensorId;
use arenas::Arenas;
pub use observer::{ObservedNode, Observer};
use programs::SplitPrograms;
use queues::QueueSet;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Interval at which a waiting host polls the abort flag.
const ABORT_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Plans tasks and runs them over several devices. Runs take effect in submission order; up to
/// [`depth`](field@Options::depth) runs are in flight at once.
#[derive(Debug)]
pub struct Scheduler {
    /// Identifies the plans that this scheduler prepared.
    id: u64,
    devices: Vec<Arc<dyn Device>>,
    copy_paths: CopyPaths,
    options: Options,
    budget: Arc<MemoryBudget>,
    arenas: Arenas,
    queues: QueueSet,
    /// Runs submitted so far.
    runs: u64,
    /// The prepared plan that `queue_numbers` and `history` belong to; 0 for none.
    current_plan: u64,
    /// The prepared plan of the last complete run, which has its outputs in memory; 0 for none.
    readable_plan: u64,
    /// Whether a run stopped before all of its steps were submitted, and the device's failure that stopped it. Later runs would
    /// wait for marks that were never made.
    incomplete: Option<IncompleteRun>,
    /// By run, then by mark: the timeline points of the last runs of the current plan. Run `i` is at `i % (depth + 1)`.
    history: Vec<Vec<Option<TimelinePoint>>>,
    /// Ring of the last runs of any plan: for each run, the last point on each queue. The queue that runs the first split is
    /// the first entry.
    in_flight: Vec<Vec<(usize, TimelinePoint)>>,
    /// By queue of the current plan: its index in `queues`.
    queue_numbers: Vec<usize>,
    /// By number of a collective group that the compute queues have joined: its devices by rank, and the bytes of the largest part
    /// that its exchange memory has room for.
    joined_groups: BTreeMap<u32, (Vec<usize>, u64)>,
    /// Host-staged downloads of the run that is being submitted.
    staged: Vec<StagedDownload>,
    abort: Arc<AtomicBool>,
    counts: TransferCounts,
}

/// A download of a replica's bytes from its home to the host.
#[derive(Debug)]
struct StagedDownload {
    replica: u32,
    read: PendingRead,
    /// The point after the download.
    done: TimelinePoint,
}

/// A run that stopped before all of its steps were submitted.
#[derive(Debug, Default)]
struct IncompleteRun {
    stopped_by: Option<(String, DeviceError)>,
}

/// Transfer statistics of a scheduler.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TransferCounts {
    /// Runs submitted.
    pub runs: u64,
    /// By device: bytes of inputs that the host wrote to it.
    pub uploaded: Vec<u64>,
    /// By device: bytes copied to it from other devices, directly or through the host.
    pub copied: Vec<u64>,
    /// By device: bytes that the host read from it with [`Scheduler::read`].
    pub downloaded: Vec<u64>,
}

/// A plan with programs and bindings, ready to run many times.
#[derive(Debug)]
pub struct PreparedPlan {
    id: u64,
    /// The id of the scheduler that prepared it.
    owner: u64,
    plan: Arc<Plan>,
    programs: SplitPrograms,
}

impl PreparedPlan {
    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}

/// The next id of a scheduler or a prepared plan; 0 means none.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl Scheduler {
    /// Creates a scheduler over devices, in order of preference. Its memory on all devices is charged to `budget`. Queries once
    /// which devices copy from which; later changes are not noticed.
    ///
    /// # Errors
    /// [`SchedError::NoDevices`] for an empty list.
    pub fn new(
        devices: Vec<Arc<dyn Device>>,
        options: Options,
        budget: &Arc<MemoryBudget>,
    ) -> Result<Scheduler, SchedError> {
        if devices.is_empty() {
            return Err(SchedError::NoDevices);
        }
        let (zeros, depth) = (vec![0; devices.len()], options.depth());
        let copy_paths = CopyPaths::new(&devices);
        Ok(Scheduler {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            queues: QueueSet::new(budget, &copy_paths),
            copy_paths,
            options: Options { depth, ..options },
            budget: Arc::clone(budget),
            arenas: Arenas::default(),
            runs: 0,
            current_plan: 0,
            readable_plan: 0,
            incomplete: None,
            history: Vec::new(),
            in_flight: vec![Vec::new(); if depth > 1 { depth * devices.len() } else { 1 }],
            queue_numbers: Vec::new(),
            joined_groups: BTreeMap::new(),
            staged: Vec::new(),
            abort: Arc::default(),
            counts: TransferCounts {
                uploaded: zeros.clone(),
                copied: zeros.clone(),
                downloaded: zeros,
                ..TransferCounts::default()
            },
            devices,
        })
    }

    /// The devices, in order of preference.
    pub fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Plans a task. Allocates, uploads and runs nothing.
    ///
    /// # Errors
    /// [`SchedError`] for a task that these devices cannot run.
    pub fn plan(&self, task: &Arc<Task>) -> Result<Plan, SchedError> {
        Plan::with_copy_paths(Arc::clone(task), &self.devices, &self.copy_paths, &self.options)
    }

    /// Allocates arenas for a plan, so that runs of this plan and of any smaller plan allocate nothing. If buffers must grow,
    /// waits for all runs first; the outputs of the last run are lost.
    ///
    /// # Errors
    /// [`SchedError::Device`] when a device is out of memory or an earlier run failed; [`SchedError::ForeignPlan`] for a plan
    /// over other devices.
    pub fn reserve(&mut self, plan: &Plan) -> Result<(), SchedError> {
        let same = self.devices.iter().map(|device| &device.info().id).eq(&plan.device_ids);
        if !same || plan.copy_paths != self.copy_paths {
            return Err(SchedError::ForeignPlan);
        }
        self.ensure_arenas(plan)
    }

    /// As [`Scheduler::reserve`], without the check that the plan is for these devices.
    fn ensure_arenas(&mut self, plan: &Plan) -> Result<(), SchedError> {
        if !self.arenas.are_large_enough(&plan.layout.arenas, plan.depth) {
            self.synchronize(None)?;
            self.readable_plan = 0;
            self.arenas.grow(&self.devices, &self.budget, &plan.layout.arenas, plan.depth)?;
        }
        Ok(())
    }

    /// Prepares a plan: allocates arenas, prepares a program for each split and binds it to memory. Waits for all runs if the queues
    /// have to join other groups for its collective nodes, or groups with more exchange memory.
    ///
    /// # Errors
    /// As [`Scheduler::reserve`]; [`SchedError::StoredWithoutRegion`] for a stored tensor without a region;
    /// [`SchedError::RegionOnOtherDevice`] if its region is not on its device.
    pub fn prepare(&mut self, plan: Plan) -> Result<PreparedPlan, SchedError> {
        self.check_stored_regions(&plan)?;
        self.reserve(&plan)?;
        let plan = Arc::new(plan);
        let programs = SplitPrograms::new(&plan, &self.devices, &self.arenas)?;
        let prepared = PreparedPlan { id: NEXT_ID.fetch_add(1, Ordering::Relaxed), owner: self.id, plan, programs };
        self.join_groups(&prepared)?;
        Ok(prepared)
    }

    /// Checks that the region of each stored tensor is on the device that the task declares.
    fn check_stored_regions(&self, plan: &Plan) -> Result<(), SchedError> {
        for (slot, storage) in (0..).zip(plan.task.storage()) {
            if let Storage::Stored { device, region: Some(region) } = storage
                && let Some(device) = self.devices.get(*device)
                && device.info().id != region.buffer().device()
            {
                let name = plan.task.slot_name(slot).to_owned();
                let (device, owner) = (device.info().name.clone(), region.buffer().device_name().to_owned());
                return Err(SchedError::RegionOnOtherDevice { name, device, owner });
            }
        }
        Ok(())
    }

    /// Plans and prepares a task.
    ///
    /// # Errors
    /// As [`Scheduler::plan`] and [`Scheduler::prepare`].
    pub fn build(&mut self, task: &Arc<Task>) -> Result<PreparedPlan, SchedError> {
        let plan = self.plan(task)?;
        self.prepare(plan)
    }

    /// Submits a download of an output, or of a stored tensor, as the last submitted run leaves it: all bytes that the tensor
    /// spans. Call it before the next run is submitted; runs submitted after this call do not affect the bytes.
    ///
    /// # Errors
    /// [`SchedError::NotAnOutput`] for a tensor that is neither stored nor declared as an output; [`SchedError::OutputExpired`]
    /// if the last run was of another plan or did not complete, or if a larger plan has replaced the arenas.
    pub fn read(&mut self, prepared: &PreparedPlan, id: TensorId) -> Result<PendingRead, SchedError> {
        self.check_owner(prepared)?;
        let plan = &*prepared.plan;
        let not_an_output = || SchedError::NotAnOutput { name: plan.task.name(id).to_owned() };
        let (slot, range) = plan.task.span(id).ok_or_else(not_an_output)?;
        let stored = matches!(plan.task.storage().get(slot as usize), Some(Storage::Stored { .. }));
        let home = plan.home(slot).filter(|_| stored || plan.task.is_output(slot)).ok_or_else(not_an_output)?;
        if !stored && self.readable_plan != prepared.id {
            return Err(SchedError::OutputExpired { name: plan.task.name(id).to_owned() });
        }
        let at = plan.home_range(slot, &range).ok_or_else(not_an_output)?;
        let copy = self.runs.saturating_sub(1) as usize % plan.depth;
        let region = self.arenas.region(plan, &at, copy)?;
        self.counts.downloaded[home] += region.bytes();
        self.download(home, region)
    }

    /// Submits a download on the device's compute queue.
    fn download(&mut self, device: usize, region: Region) -> Result<PendingRead, SchedError> {
        let open = self.queues.get_or_open(&self.devices, QueueId { device, role: QueueRole::Compute })?;
        open.queue().download(region).map_err(|e| SchedError::from_device(&self.devices[device].info().name, e))
    }

    /// As [`Scheduler::download`], and waits for the bytes.
    pub(crate) fn download_blocking(&mut self, device: usize, region: Region) -> Result<Vec<u8>, SchedError> {
        let read = self.download(device, region)?;
        let done = self.queues.get_or_open(&self.devices, QueueId { device, role: QueueRole::Compute })?.queue().mark();
        wait_for_bytes(read, &done, &self.abort, &self.devices[device].info().name)
    }

    /// Checks that this scheduler prepared the plan.
    pub(super) fn check_owner(&self, prepared: &PreparedPlan) -> Result<(), SchedError> {
        if prepared.owner == self.id { Ok(()) } else { Err(SchedError::ForeignPlan) }
    }

    /// Waits until all submitted work is done. Without a deadline, waits for at most ten minutes.
    ///
    /// # Errors
    /// The first failure; [`SchedError::RunIncomplete`] after a run with collective nodes that stopped half way;
    /// [`SchedError::Aborted`]; [`crate::device::DeviceError::Deadline`] when the deadline passes.
    pub fn synchronize(&mut self, deadline: Option<Instant>) -> Result<(), SchedError> {
        // The program of a rank waits for ranks whose programs were not submitted.
        if !self.joined_groups.is_empty() {
            self.check_complete()?;
        }
        let deadline = deadline.unwrap_or_else(|| Instant::now() + DEVICE_TIMEOUT);
        for (id, point) in self.queues.last_points() {
            let name = &self.devices[id.device].info().name;
            wait_or_abort(point, deadline, &self.abort, name)?;
        }
        Ok(())
    }

    /// The completion of all runs that were submitted so far, as a future: `.await` it in any executor, or give it a callback
    /// ([`PendingRead::on_ready`]). The runs do not end when it is dropped.
    ///
    /// # Errors
    /// [`SchedError::RunIncomplete`] after a run with collective nodes that stopped half way. The future returns the first
    /// failure.
    pub fn mark(&self) -> Result<PendingRead<()>, SchedError> {
        if !self.joined_groups.is_empty() {
            self.check_complete()?;
        }
        let points = self.queues.last_points().map(|(_, point)| point.clone()).collect();
        Ok(PendingRead::at_all("the end of runs", points, || Ok(())))
    }

    /// The abort flag. While any thread keeps it raised, running and new calls fail with [`SchedError::Aborted`] within a few
    /// milliseconds. The scheduler never lowers the flag: the caller lowers it before the next run.
    pub fn abort_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.abort)
    }

    /// Discards all runs, closes the queues and frees the arenas. Makes the scheduler usable again after a failure or an abort.
    /// Stored tensors keep their contents, which unfinished runs may have partly overwritten. Prepared plans stay valid.
    pub fn reset(&mut self) {
        self.queues.clear();
        self.arenas.clear();
        self.history.clear();
        self.in_flight.iter_mut().for_each(Vec::clear);
        self.staged.clear();
        self.joined_groups.clear();
        (self.current_plan, self.readable_plan, self.incomplete) = (0, 0, None);
    }

    /// Fails after a run that stopped before all of its steps were submitted.
    fn check_complete(&self) -> Result<(), SchedError> {
        match &self.incomplete {
            None => Ok(()),
            Some(IncompleteRun { stopped_by }) => Err(SchedError::RunIncomplete { stopped_by: stopped_by.clone() }),
        }
    }

    /// Transfer statistics since the scheduler was created.
    pub fn transfer_counts(&self) -> &TransferCounts {
        &self.counts
    }

    /// By device: bytes of arenas that the scheduler holds.
    pub fn arena_bytes(&self) -> Vec<u64> {
        let mut bytes = self.arenas.bytes();
        bytes.resize(self.devices.len(), 0);
        bytes
    }
}

/// Waits for downloaded bytes. Waits for `done`, the point after the download, first: only that wait polls the abort flag.
fn wait_for_bytes(
    read: PendingRead,
    done: &TimelinePoint,
    abort: &AtomicBool,
    device: &str,
) -> Result<Vec<u8>, SchedError> {
    let deadline = Instant::now() + DEVICE_TIMEOUT;
    wait_or_abort(done, deadline, abort, device)?;
    read.wait(Some(deadline)).map_err(|e| SchedError::from_device(device, e))
}

/// Waits for a point, and polls the abort flag every [`ABORT_POLL_INTERVAL`].
fn wait_or_abort(point: &TimelinePoint, deadline: Instant, abort: &AtomicBool, device: &str) -> Result<(), SchedError> {
    use crate::device::DeviceError::Deadline;
    loop {
        let next_poll = deadline.min(Instant::now() + ABORT_POLL_INTERVAL);
        match point.wait(Some(next_poll)) {
            Err(Deadline(_)) if next_poll < deadline => {}
            done => return done.map_err(|e| SchedError::from_device(device, e)),
        }
        if abort.load(Ordering::Relaxed) {
            return Err(SchedError::Aborted);
        }
    }
}

//! Plans at work: queues, memory, and the points of the last runs.

mod arenas;
mod host_staging_queue;
mod observer;
mod programs;
mod queues;
mod submit;

use super::{CopyPaths, Devices, Options, Plan, QueueId, QueueRole, SchedError, Storage, Task};
use crate::device::{Account, Device, PATIENCE, Point, Region, Ticket};
use crate::graph::TensorId;
use arenas::Arenas;
pub use observer::{ObservedNode, Observer};
use programs::SplitPrograms;
use queues::QueueSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often a waiting host looks whether it should stop.
const ABORT_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Runs tasks over several devices. One scheduler's runs follow each other in the order they are submitted; up to
/// [`depth`](field@Options::depth) of them are under way at once.
#[derive(Debug)]
pub struct Scheduler {
    /// Tells its prepared plans from those of others.
    id: u64,
    devices: Vec<Arc<dyn Device>>,
    copy_paths: CopyPaths,
    options: Options,
    account: Arc<Account>,
    arenas: Arenas,
    queues: QueueSet,
    /// Runs submitted so far.
    runs: u64,
    /// The plan whose lanes and history these are.
    current_plan: u64,
    /// The plan whose outputs the last run leaves behind.
    readable_plan: u64,
    /// Whether a run ended before all of its steps were submitted: marks that later ones would wait for were never made.
    incomplete: bool,
    /// By mark, for each of the last runs of the current plan: run `i` is at `i % (depth + 1)`.
    history: Vec<Vec<Option<Point>>>,
    /// The last moments on each lane of the last runs, of whatever plan, in a ring; that of the device that computes first
    /// comes first.
    in_flight: Vec<Vec<(usize, Point)>>,
    /// By lane of the current plan: its number among the lanes.
    queue_numbers: Vec<usize>,
    /// Bytes on their way through the host.
    staged: Vec<StagedDownload>,
    abort: Arc<AtomicBool>,
    counts: TransferCounts,
}

/// Bytes of a replica that have left its home.
#[derive(Debug)]
struct StagedDownload {
    replica: u32,
    ticket: Ticket,
    /// When they have.
    done: Point,
}

/// What a scheduler has moved.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TransferCounts {
    /// Runs submitted.
    pub runs: u64,
    /// By device: bytes that the host wrote to it.
    pub uploaded: Vec<u64>,
    /// By device: bytes that came to it from other devices.
    pub copied: Vec<u64>,
    /// By device: bytes that the host read from it.
    pub downloaded: Vec<u64>,
}

/// A plan made ready to run many times.
#[derive(Debug)]
pub struct PreparedPlan {
    id: u64,
    /// The scheduler's number.
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

/// Of schedulers and of prepared plans.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl Scheduler {
    /// A scheduler over devices in order of preference. `account` pays for what it holds on all of them. Asks the devices once
    /// which of them copy from which, and goes by that.
    ///
    /// # Errors
    /// [`SchedError::NoDevices`] for an empty list.
    pub fn new(
        devices: Vec<Arc<dyn Device>>,
        options: Options,
        account: &Arc<Account>,
    ) -> Result<Scheduler, SchedError> {
        if devices.is_empty() {
            return Err(SchedError::NoDevices);
        }
        let (none, depth) = (vec![0; devices.len()], options.depth());
        let reach = CopyPaths::new(&devices);
        Ok(Scheduler {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            queues: QueueSet::new(account, &reach),
            copy_paths: reach,
            options: Options { depth, ..options },
            account: Arc::clone(account),
            arenas: Arenas::default(),
            runs: 0,
            current_plan: 0,
            readable_plan: 0,
            incomplete: false,
            history: Vec::new(),
            in_flight: vec![Vec::new(); if depth > 1 { depth * devices.len() } else { 1 }],
            queue_numbers: Vec::new(),
            staged: Vec::new(),
            abort: Arc::default(),
            counts: TransferCounts {
                uploaded: none.clone(),
                copied: none.clone(),
                downloaded: none,
                ..TransferCounts::default()
            },
            devices,
        })
    }

    /// Its devices.
    pub fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Plans a task: nothing is allocated, uploaded or run.
    ///
    /// # Errors
    /// [`SchedError`] for a task that these devices cannot run.
    pub fn plan(&self, task: &Arc<Task>) -> Result<Plan, SchedError> {
        Plan::with_copy_paths(Arc::clone(task), &self.devices, &self.copy_paths, &self.options)
    }

    /// Makes room for a plan's tensors, so that running it and any smaller one allocates nothing. Waits for what runs where
    /// buffers must grow: outputs of the last run are gone then.
    ///
    /// # Errors
    /// [`SchedError::Device`] when a device's memory is used up; a failure of what runs; [`SchedError::Foreign`] for a plan
    /// over other devices.
    pub fn reserve(&mut self, plan: &Plan) -> Result<(), SchedError> {
        let same = self.devices.iter().map(|device| &device.info().id).eq(&plan.device_ids);
        if !same || plan.copy_paths != self.copy_paths {
            return Err(SchedError::ForeignPlan);
        }
        self.ensure_arenas(plan)
    }

    /// As [`Scheduler::reserve`], for a plan over these devices.
    fn ensure_arenas(&mut self, plan: &Plan) -> Result<(), SchedError> {
        if !self.arenas.are_large_enough(&plan.layout.arenas, plan.depth) {
            self.synchronize(None)?;
            self.readable_plan = 0;
            self.arenas.grow(&self.devices, &self.account, &plan.layout.arenas, plan.depth)?;
        }
        Ok(())
    }

    /// Makes a plan ready: memory for its tensors and programs for its splits.
    ///
    /// # Errors
    /// As [`Scheduler::reserve`]; [`SchedError::Unplaced`] for a stored tensor without a region, [`SchedError::Elsewhere`]
    /// for one whose region is not on its device.
    pub fn prepare(&mut self, plan: Plan) -> Result<PreparedPlan, SchedError> {
        self.check_stored_regions(&plan)?;
        self.reserve(&plan)?;
        let plan = Arc::new(plan);
        let programs = SplitPrograms::new(&plan, &self.devices, &self.arenas)?;
        Ok(PreparedPlan { id: NEXT_ID.fetch_add(1, Ordering::Relaxed), owner: self.id, plan, programs })
    }

    /// That stored tensors lie where their task says.
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

    /// Reads an output of the run that was submitted last, or a stored tensor as that run leaves it: all bytes that it
    /// spans. To be called before the next run is submitted; runs submitted while the ticket is waited for do it no harm.
    ///
    /// # Errors
    /// [`SchedError::NoOutput`] for a tensor that nobody said would be read; [`SchedError::Gone`] for one that the last run
    /// did not leave behind, or that made way for a larger plan.
    pub fn read(&mut self, prepared: &PreparedPlan, id: TensorId) -> Result<Ticket, SchedError> {
        self.check_owner(prepared)?;
        let plan = &*prepared.plan;
        let no = || SchedError::NotAnOutput { name: plan.task.name(id).to_owned() };
        let (slot, range) = plan.task.span(id).ok_or_else(no)?;
        let stored = matches!(plan.task.storage().get(slot as usize), Some(Storage::Stored { .. }));
        let home = plan.home(slot).filter(|_| stored || plan.task.is_output(slot)).ok_or_else(no)?;
        if !stored && self.readable_plan != prepared.id {
            return Err(SchedError::OutputExpired { name: plan.task.name(id).to_owned() });
        }
        let at = plan.home_range(slot, &range).ok_or_else(no)?;
        let copy = self.runs.saturating_sub(1) as usize % plan.depth;
        let region = self.arenas.region(plan, &at, copy)?;
        self.counts.downloaded[home] += region.bytes();
        self.download(home, region)
    }

    /// Bytes of a device, in order with what it computes.
    fn download(&mut self, device: usize, region: Region) -> Result<Ticket, SchedError> {
        let lane = self.queues.get_or_open(&self.devices, QueueId { device, role: QueueRole::Compute })?;
        lane.queue().download(region).map_err(|e| SchedError::from_device(&self.devices[device].info().name, e))
    }

    /// As [`Scheduler::download`], waited for.
    pub(crate) fn download_blocking(&mut self, device: usize, region: Region) -> Result<Vec<u8>, SchedError> {
        let ticket = self.download(device, region)?;
        let done = self.queues.get_or_open(&self.devices, QueueId { device, role: QueueRole::Compute })?.queue().mark();
        wait_for_bytes(ticket, &done, &self.abort, &self.devices[device].info().name)
    }

    /// That a plan was prepared by this scheduler.
    pub(super) fn check_owner(&self, prepared: &PreparedPlan) -> Result<(), SchedError> {
        if prepared.owner == self.id { Ok(()) } else { Err(SchedError::ForeignPlan) }
    }

    /// Waits until everything submitted so far is done; without a deadline, for ten minutes at most.
    ///
    /// # Errors
    /// The first failure; [`SchedError::Aborted`]; [`crate::device::DeviceError::Deadline`] when that passes.
    pub fn synchronize(&mut self, deadline: Option<Instant>) -> Result<(), SchedError> {
        let deadline = deadline.unwrap_or_else(|| Instant::now() + PATIENCE);
        for (lane, end) in self.queues.last_points() {
            let name = &self.devices[lane.device].info().name;
            wait_or_abort(end, deadline, &self.abort, name)?;
        }
        Ok(())
    }

    /// Raised by anyone, it ends what runs with [`SchedError::Aborted`], soon. Whoever raised it lowers it again.
    pub fn abort_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.abort)
    }

    /// Forgets all runs and gives all memory back, after a failure or an abort too. What is stored stays as it is; what was
    /// running may have written some of it. Programs made before stay good.
    pub fn reset(&mut self) {
        self.queues.clear();
        self.arenas.clear();
        self.history.clear();
        self.in_flight.iter_mut().for_each(Vec::clear);
        self.staged.clear();
        (self.current_plan, self.readable_plan, self.incomplete) = (0, 0, false);
    }

    /// What has been moved so far.
    pub fn transfer_counts(&self) -> &TransferCounts {
        &self.counts
    }

    /// Bytes of memory that it holds on each device for tensors of its runs.
    pub fn arena_bytes(&self) -> Vec<u64> {
        let mut bytes = self.arenas.bytes();
        bytes.resize(self.devices.len(), 0);
        bytes
    }
}

/// Waits for bytes, which are there at a moment of their device's queue, and looks now and then whether to stop.
fn wait_for_bytes(ticket: Ticket, there: &Point, abort: &AtomicBool, device: &str) -> Result<Vec<u8>, SchedError> {
    let deadline = Instant::now() + PATIENCE;
    wait_or_abort(there, deadline, abort, device)?;
    ticket.wait(Some(deadline)).map_err(|e| SchedError::from_device(device, e))
}

/// Waits for a point, and looks now and then whether to stop.
fn wait_or_abort(point: &Point, deadline: Instant, abort: &AtomicBool, device: &str) -> Result<(), SchedError> {
    use crate::device::DeviceError::Deadline;
    loop {
        let glance = deadline.min(Instant::now() + ABORT_POLL_INTERVAL);
        match point.wait(Some(glance)) {
            Err(Deadline(_)) if glance < deadline => {}
            done => return done.map_err(|e| SchedError::from_device(device, e)),
        }
        if abort.load(Ordering::Relaxed) {
            return Err(SchedError::Aborted);
        }
    }
}

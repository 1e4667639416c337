//! The CUDA driver API: semantics of its functions. The exported C functions are in [`crate::abi`]. Open this file first; the
//! other modules add methods to its two types by topic.
//!
//! One [`Driver`] holds the machine that the settings describe; one lock guards its [`DriverState`]. A call takes the lock,
//! looks up its handles, checks its arguments, and either returns a result or submits work to the engine. A call that waits
//! runs the engine meanwhile ([`Driver::run_until_reached`]); the lock is released while an operation executes.

pub mod context;
pub mod copy;
pub mod function;
pub mod graph;
mod hardware;
mod host_callbacks;
pub mod launch;
pub mod memory;
pub mod module;
pub mod occupancy;
pub mod pool;
pub mod simulation;
pub mod stream;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::config::{self, Config};
use crate::engine::{
    Event, IdleRunner, OpExecutor, OpOutcome, ScheduleRng, StepProgress, StreamOp, StreamPoint, Streams, Timeline,
};
use crate::error::{Error, Result};
use crate::handle::{ContextId, EventId, FunctionId, HandleTable, ModuleId, PoolId, StreamId};
use crate::mem::AddressSpace;
use crate::{console, counts};
use context::{Context, Primary};

/// The driver of a process; tests that reset it create several in succession.
#[derive(Debug)]
pub struct Driver {
    /// The settings.
    pub config: Config,
    /// Executes stream operations; holds memory and limits.
    pub machinery: OpExecutor,
    state: Mutex<DriverState>,
    changed: Condvar,
    caller: host_callbacks::CallbackThread,
    runner: IdleRunner,
    me: Weak<Driver>,
}

/// All mutable state.
#[derive(Debug)]
pub struct DriverState {
    /// Mutable state of each device.
    pub devices: Vec<Device>,
    /// Contexts.
    pub contexts: HandleTable<ContextId, Context>,
    /// Loaded modules.
    pub modules: HandleTable<ModuleId, module::Module>,
    /// Functions of modules.
    pub functions: HandleTable<FunctionId, function::Function>,
    /// Streams with their queues.
    pub streams: Streams,
    /// Graphs.
    pub graphs: graph::Graphs,
    /// Events.
    pub events: HandleTable<EventId, Event>,
    /// Memory pools.
    pub pools: HandleTable<PoolId, pool::Pool>,
    /// Owner and origin of each allocation.
    pub memory: memory::Ledger,
    /// Reports of the checker, oldest first.
    pub reports: Vec<String>,
    /// Counts of all kernels so far.
    pub counts: counts::Totals,
    /// State of the hardware model.
    pub hardware: hardware::HardwareState,
    /// Contexts with an operation that a thread is executing outside of the lock, one entry per operation.
    performing: Vec<ContextId>,
    order: ScheduleRng,
}

/// Mutable state of a device.
#[derive(Debug)]
pub struct Device {
    /// Its primary context while it is retained.
    pub primary: Option<Primary>,
    /// The default pool, which exists from the start and from which `cuMemAllocAsync` allocates.
    pub pool: PoolId,
    /// The fault that made it unusable: every later call that needs one of its contexts returns this error.
    pub poisoned: Option<Error>,
}

/// The locked state.
pub type StateGuard<'a> = MutexGuard<'a, DriverState>;

/// The driver of the process. `None` before `cuInit`.
static DRIVER: Mutex<Option<Arc<Driver>>> = Mutex::new(None);
/// Idle timeout: without an API call for this long, the idle runner executes queued operations.
const QUIET: Duration = Duration::from_millis(2);
/// Settings by `cudaemu_configure`; they take precedence over the environment.
static OVERRIDES: Mutex<Vec<(String, String)>> = Mutex::new(Vec::new());

/// `cuInit`
pub fn init(flags: u32) -> Result<()> {
    if flags != 0 {
        return Err(Error::InvalidValue);
    }
    let mut driver = DRIVER.lock().unwrap_or_else(PoisonError::into_inner);
    if driver.is_some() {
        return Ok(());
    }
    let overrides = OVERRIDES.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let is_configured = !overrides.is_empty();
    let config = Config::from_settings(Config::environment().chain(overrides)).map_err(|message| {
        console::log_stderr(message);
        Error::InvalidValue
    })?;
    if config.devices.is_empty() {
        return Err(Error::NoDevice);
    }
    if !is_configured {
        // `configure` has done so otherwise, so that the first calls can fail too.
        counts::fail_calls(config.hardware.failing_calls.clone());
    }
    *driver = Some(Driver::new(config)?);
    Ok(())
}

/// The driver. Fails before `cuInit`, and in a host callback, which must not call the driver.
pub fn driver() -> Result<Arc<Driver>> {
    if host_callbacks::in_host_callback() {
        return Err(Error::NotPermitted);
    }
    DRIVER.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(Error::NotInitialized)
}

/// Replaces the settings of tests (lines `NAME=value`) and drops the driver; the next `cuInit` makes a new one. The error names
/// the setting and the reason.
pub fn configure(text: &str) -> std::result::Result<(), String> {
    let mut settings = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (name, value) = line.split_once('=').ok_or_else(|| format!("{line:?} is no NAME=value"))?;
        settings.push((name.trim().to_owned(), value.trim().to_owned()));
    }
    let config = Config::from_settings(Config::environment().chain(settings.iter().cloned()))?;
    *OVERRIDES.lock().unwrap_or_else(PoisonError::into_inner) = settings;
    reset();
    counts::fail_calls(config.hardware.failing_calls);
    Ok(())
}

/// Drops the driver with everything that it holds.
pub fn reset() {
    let gone = DRIVER.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(gone) = gone {
        // Threads that wait for a hung launch hold the driver, and would wait for ever.
        gone.end_hung_launches();
    }
    counts::reset_call_counts();
    counts::fail_calls(Vec::new());
}

impl Driver {
    fn new(config: Config) -> Result<Arc<Self>> {
        let limits: Vec<u64> = config.devices.iter().map(|device| device.memory).collect();
        let space = AddressSpace::new(&limits).map_err(|error| {
            console::log_stderr(error);
            Error::OutOfMemory
        })?;
        let mut pools = HandleTable::default();
        let devices = (0..limits.len()).map(|device| {
            let pool = pools.insert(pool::Pool::new(device as u32, true));
            Device { primary: None, pool, poisoned: None }
        });
        let state = DriverState {
            devices: devices.collect(),
            contexts: HandleTable::default(),
            modules: HandleTable::default(),
            functions: HandleTable::default(),
            streams: Streams::new(Timeline::new(config.time), config.hardware.connections),
            graphs: graph::Graphs::default(),
            events: HandleTable::default(),
            pools,
            memory: memory::Ledger::default(),
            reports: Vec::new(),
            counts: counts::Totals::default(),
            hardware: hardware::HardwareState::new(limits.len(), config.hardware.poison),
            performing: Vec::new(),
            order: ScheduleRng::new(config.seed),
        };
        let machinery = OpExecutor {
            space: Arc::new(space),
            sms: config.devices.iter().map(|device| device.spec.sms).collect(),
            threads: config.threads,
            max_instructions: config.max_instructions,
            report_only: config.report_only,
            counting: config.counts != config::CountsOutput::Off,
            timed_by_bytes: config.time.kernel_gbps.is_some(),
            began: Instant::now(),
        };
        let (state, changed, caller) = (Mutex::new(state), Condvar::new(), host_callbacks::CallbackThread::default());
        let runner = IdleRunner::default();
        Ok(Arc::new_cyclic(|me| Self { config, machinery, state, changed, caller, runner, me: me.clone() }))
    }

    /// Takes the lock for an API call, which counts as activity for the idle runner.
    pub fn lock(&self) -> StateGuard<'_> {
        self.runner.note_call();
        self.state()
    }

    /// Takes the lock outside of an API call.
    fn state(&self) -> StateGuard<'_> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the idle runner after a submission.
    fn wake_runner(&self) {
        let this = self.me.clone();
        self.runner.notify_submitted(QUIET, || {
            move || match this.upgrade() {
                Some(driver) => driver.idle_step(),
                None => StepProgress::Gone,
            }
        });
    }

    fn idle_step(&self) -> StepProgress {
        match self.run_one_op(self.state()) {
            (_, true) => StepProgress::Moved,
            (mut state, false) if state.streams.any_queued() => {
                // The program may wait in another way than by a call of the driver, such as for a host function.
                let ends = state.streams.all_tails();
                self.check_deadlock(&mut state, &ends);
                StepProgress::Blocked
            }
            _ => StepProgress::Idle,
        }
    }

    /// The address space of all memory.
    pub fn space(&self) -> &AddressSpace {
        &self.machinery.space
    }

    /// The index of a device ordinal; fails if there is no such device.
    pub fn device(&self, device: i32) -> Result<usize> {
        usize::try_from(device).ok().filter(|&device| device < self.config.devices.len()).ok_or(Error::InvalidDevice)
    }

    /// Executes operations, in an order that the seed chooses, until all points are reached.
    pub fn run_until_reached<'a>(&'a self, mut state: StateGuard<'a>, points: &[StreamPoint]) -> StateGuard<'a> {
        while !points.iter().all(|&point| state.streams.is_reached(point)) {
            let moved;
            (state, moved) = self.run_one_op(state);
            if !moved {
                self.check_deadlock(&mut state, points);
                // Another thread executes the operation, or a wait for a value depends on a write that sends no notification:
                // so wait with a timeout.
                let waited = self.changed.wait_timeout(state, Duration::from_micros(200));
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        state.streams.host_waited(points);
        state
    }

    /// Waits until no thread executes an operation of these contexts. Starts none itself; queued operations stay queued.
    pub fn wait_quiescent<'a>(&'a self, mut state: StateGuard<'a>, of: impl Fn(ContextId) -> bool) -> StateGuard<'a> {
        while state.performing.iter().any(|&context| of(context)) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    /// Executes one operation if one is ready; returns whether it made progress.
    pub fn run_one_op<'a>(&'a self, state: StateGuard<'a>) -> (StateGuard<'a>, bool) {
        let ready = state.streams.ready();
        self.run_op_of(state, &ready)
    }

    /// Executes the first operation of one of these streams, which the seed chooses.
    pub(super) fn run_op_of<'a>(&'a self, mut state: StateGuard<'a>, ready: &[StreamId]) -> (StateGuard<'a>, bool) {
        if ready.is_empty() {
            return (state, false);
        }
        let stream = ready[state.order.choose(ready.len())];
        let Some((context, work)) = state.streams.begin(stream) else { return (state, false) };
        let lost = state.contexts.get(context).map_or_else(Some, |context| context.failed);
        let event = match &work {
            StreamOp::Record(event) => Some(*event),
            _ => None,
        };
        let done = match work {
            StreamOp::Call(call) if lost.is_none() => {
                if let Some(me) = self.me.upgrade() {
                    self.caller.call(me, context, stream, call);
                }
                return (state, true);
            }
            // Operations of a context that had a fault are skipped; its memory is freed with the context.
            _ if lost.is_some() => OpOutcome::default(),
            // The memory was freed with its context, while another context's stream still held this operation.
            StreamOp::Free(address) if !state.memory.remove(address) => OpOutcome::default(),
            StreamOp::Hang(text) => {
                self.begin_hung_launch(&mut state, context, stream, text);
                self.changed.notify_all();
                return (state, true);
            }
            work => {
                state.performing.push(context);
                drop(state);
                let done = catch_unwind(AssertUnwindSafe(|| self.machinery.execute(work)));
                state = self.state();
                if let Some(at) = state.performing.iter().position(|&performing| performing == context) {
                    state.performing.swap_remove(at);
                }
                done.unwrap_or_else(|_| OpOutcome {
                    error: Some(Error::Unknown),
                    reports: vec!["a piece of work panicked: the emulator is at fault, please report it".to_owned()],
                    ..OpOutcome::default()
                })
            }
        };
        let moved = done.retry.is_none();
        if moved {
            state.hardware.note_progress();
        }
        if let Some(event) = event {
            self.reached(&mut state, event, stream);
        }
        state.finish(context, stream, done);
        self.changed.notify_all();
        (state, moved)
    }

    /// Prints the summary at process exit: reports, leaks, counts.
    pub fn summary(&self) {
        // A thread killed during a call never releases the lock, so do not block on it.
        let Ok(state) = self.state.try_lock() else { return };
        let left = state.memory.leak_summary();
        if !state.reports.is_empty() {
            let s = if state.reports.len() == 1 { "" } else { "s" };
            console::log_stderr(format_args!("{} report{s} in all", state.reports.len()));
        }
        if let Some(left) = left {
            console::log_stderr(format_args!("unreleased at process exit: {left}"));
        }
        match &self.config.counts {
            config::CountsOutput::Off | config::CountsOutput::On => {}
            config::CountsOutput::Table => console::log_stderr(state.counts.table().trim_end()),
            config::CountsOutput::File(path) => {
                if let Err(error) = std::fs::write(path, self.counts_json(&state)) {
                    console::log_stderr(format_args!("the counts cannot be written to {}: {error}", path.display()));
                }
            }
        }
    }

    /// The counts so far as JSON.
    pub fn counts_json(&self, state: &DriverState) -> String {
        let driver = counts::DriverCounts {
            alloc_syncs: state.hardware.alloc_syncs,
            compilations: state.hardware.compilations,
            hung_launches: state.hardware.hung_launches() as u64,
            primary_contexts: state.devices.iter().filter(|device| device.primary.is_some()).count() as u64,
            programmatic_launches: state.hardware.programmatic_launches,
            lazy_loads: state.hardware.lazy_loads,
        };
        state.counts.json(&counts::call_counts(), &driver, &state.streams.time.totals(self.config.devices.len()))
    }

    fn reached(&self, state: &mut DriverState, event: EventId, stream: StreamId) {
        let index = state.streams.running_index(stream);
        if let Ok(event) = state.events.get_mut(event)
            && let Some(point) = event.recorded
            && (point.stream, point.index) == (stream, index)
        {
            event.time = Some(self.machinery.now());
        }
    }
}

impl DriverState {
    fn finish(&mut self, context: ContextId, stream: StreamId, done: OpOutcome) {
        for report in &done.reports {
            self.report(report.clone());
        }
        self.counts.add(done.counts, done.host_bytes);
        if let Some(error) = done.error {
            self.fail(context, error, done.poisons);
        }
        match done.retry {
            Some(work) => self.streams.requeue(stream, work),
            None => self.streams.finish(stream, done.moved),
        }
    }

    /// Logs a report and keeps it for `cudaemu_reports` of [`crate::abi`].
    pub fn report(&mut self, report: String) {
        console::log_stderr(&report);
        self.reports.push(report);
    }
}

//! The CUDA driver API: what its functions mean. The C functions themselves are in [`crate::abi`].
//!
//! One [`Driver`] holds the machine that the settings describe; one lock guards its [`State`]. A call takes the lock, looks up its
//! handles, checks, and either answers or submits work to the engine. Calls that wait run the engine meanwhile
//! ([`Driver::run_until`]), with the lock released while work is done.

mod calls;
pub mod capture;
pub mod context;
pub mod copy;
pub mod function;
pub mod graph;
pub mod launch;
pub mod memory;
pub mod module;
pub mod occupancy;
pub mod physical;
pub mod pool;
pub mod simulation;
pub mod stream;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::config::{self, Config};
use crate::engine::{Captures, Event, Machinery, Order, Performed, Point, Progress, Runner, Streams, Timeline, Work};
use crate::error::{Error, Result};
use crate::handle::{
    ContextId, EventId, FunctionId, KernelId, LibraryId, ModuleId, PhysicalId, PoolId, StreamId, Table,
};
use crate::mem::Space;
use crate::{console, counts};
use context::{Context, Primary};

/// The driver of one process (or, in tests that reset it, of one stretch of its life).
#[derive(Debug)]
pub struct Driver {
    /// The settings.
    pub config: Config,
    /// What work needs.
    pub machinery: Machinery,
    state: Mutex<State>,
    changed: Condvar,
    caller: calls::Caller,
    runner: Runner,
    me: Weak<Driver>,
}

/// All that changes.
#[derive(Debug)]
pub struct State {
    /// The devices' primary contexts and pools.
    pub devices: Vec<Device>,
    /// Contexts.
    pub contexts: Table<ContextId, Context>,
    /// Modules.
    pub modules: Table<ModuleId, module::Module>,
    /// Functions of modules.
    pub functions: Table<FunctionId, function::Function>,
    /// Libraries.
    pub libraries: Table<LibraryId, module::Library>,
    /// Kernels of libraries.
    pub kernels: Table<KernelId, module::Kernel>,
    /// Streams and their work.
    pub streams: Streams,
    /// What is being captured.
    pub captures: Captures,
    /// Graphs.
    pub graphs: graph::Graphs,
    /// Events.
    pub events: Table<EventId, Event>,
    /// Memory pools.
    pub pools: Table<PoolId, pool::Pool>,
    /// Physical memory that programs map themselves.
    pub physical: Table<PhysicalId, Arc<crate::mem::Physical>>,
    /// Who allocated what.
    pub memory: memory::Ledger,
    /// What the checker found, oldest first.
    pub reports: Vec<String>,
    /// Counts of all kernels so far.
    pub counts: counts::Totals,
    /// Contexts whose work some thread does at the moment, outside of the lock; once for each piece of work.
    performing: Vec<ContextId>,
    order: Order,
}

/// What changes of a device.
#[derive(Debug)]
pub struct Device {
    /// Its primary context, while it is retained.
    pub primary: Option<Primary>,
    /// Flags for the primary context.
    pub primary_flags: u32,
    /// The pool that it came with.
    pub default_pool: PoolId,
    /// The pool that `cuMemAllocAsync` takes from.
    pub pool: PoolId,
}

/// The state, locked.
pub type Guard<'a> = MutexGuard<'a, State>;

/// The driver of the process. `None` before `cuInit`.
static DRIVER: Mutex<Option<Arc<Driver>>> = Mutex::new(None);
/// How long no call has to come before queued work runs by itself.
const QUIET: Duration = Duration::from_millis(2);
/// Settings of tests; they go over those of the environment.
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
    let config = Config::read(Config::environment().chain(overrides)).map_err(|message| {
        console::say(message);
        Error::InvalidValue
    })?;
    if config.devices.is_empty() {
        return Err(Error::NoDevice);
    }
    *driver = Some(Driver::new(config)?);
    Ok(())
}

/// The driver, once `cuInit` was called. Functions that streams call may not use it.
pub fn driver() -> Result<Arc<Driver>> {
    if calls::calling() {
        return Err(Error::NotPermitted);
    }
    DRIVER.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(Error::NotInitialized)
}

/// Replaces the settings of tests (lines `NAME=value`) and forgets the driver: the next `cuInit` makes a new one.
/// The error says what is wrong with them.
pub fn configure(text: &str) -> std::result::Result<(), String> {
    let mut settings = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (name, value) = line.split_once('=').ok_or_else(|| format!("{line:?} is no NAME=value"))?;
        settings.push((name.trim().to_owned(), value.trim().to_owned()));
    }
    Config::read(Config::environment().chain(settings.iter().cloned()))?;
    *OVERRIDES.lock().unwrap_or_else(PoisonError::into_inner) = settings;
    reset();
    Ok(())
}

/// Forgets the driver with all that it holds.
pub fn reset() {
    let gone = DRIVER.lock().unwrap_or_else(PoisonError::into_inner).take();
    drop(gone);
    counts::forget_calls();
}

impl Driver {
    fn new(config: Config) -> Result<Arc<Self>> {
        let limits: Vec<u64> = config.devices.iter().map(|device| device.memory).collect();
        let space = Space::new(&limits).map_err(|error| {
            console::say(error);
            Error::OutOfMemory
        })?;
        let mut pools = Table::default();
        let devices = (0..limits.len()).map(|device| {
            let pool = pools.insert(pool::Pool::new(device as u32, true));
            Device { primary: None, primary_flags: 0, default_pool: pool, pool }
        });
        let state = State {
            devices: devices.collect(),
            contexts: Table::default(),
            modules: Table::default(),
            functions: Table::default(),
            libraries: Table::default(),
            kernels: Table::default(),
            streams: Streams::new(Timeline::new(config.time)),
            captures: Captures::default(),
            graphs: graph::Graphs::default(),
            events: Table::default(),
            pools,
            physical: Table::default(),
            memory: memory::Ledger::default(),
            reports: Vec::new(),
            counts: counts::Totals::default(),
            performing: Vec::new(),
            order: Order::new(config.seed),
        };
        let machinery = Machinery {
            space: Arc::new(space),
            sms: config.devices.iter().map(|device| device.spec.sms).collect(),
            threads: config.threads,
            max_instructions: config.max_instructions,
            report_only: config.report_only,
            counting: config.counts != config::Counts::Off,
            cooperative: Mutex::new(()),
            began: Instant::now(),
        };
        let (state, changed, caller) = (Mutex::new(state), Condvar::new(), calls::Caller::default());
        let runner = Runner::default();
        Ok(Arc::new_cyclic(|me| Self { config, machinery, state, changed, caller, runner, me: me.clone() }))
    }

    /// Takes the lock for a call.
    pub fn lock(&self) -> Guard<'_> {
        self.runner.tick();
        self.state()
    }

    /// Takes the lock, but not for a call.
    fn state(&self) -> Guard<'_> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something was submitted: it runs at the latest when no call came for a while.
    fn wake_runner(&self) {
        let this = self.me.clone();
        self.runner.submitted(QUIET, || {
            move || match this.upgrade() {
                Some(driver) => driver.idle_step(),
                None => Progress::Gone,
            }
        });
    }

    fn idle_step(&self) -> Progress {
        match self.step(self.state()) {
            (_, true) => Progress::Moved,
            (state, false) if state.streams.any_queued() => Progress::Blocked,
            _ => Progress::Idle,
        }
    }

    /// All memory.
    pub fn space(&self) -> &Space {
        &self.machinery.space
    }

    /// The device of this number.
    pub fn device(&self, device: i32) -> Result<usize> {
        usize::try_from(device).ok().filter(|&device| device < self.config.devices.len()).ok_or(Error::InvalidDevice)
    }

    /// Runs work, in an order that the seed chooses, until the goal is reached.
    pub fn run_until<'a>(&'a self, mut state: Guard<'a>, goal: impl Fn(&State) -> bool) -> Guard<'a> {
        while !goal(&state) {
            let moved;
            (state, moved) = self.step(state);
            if !moved {
                // Others do the work, or a value is awaited that anyone may write.
                let waited = self.changed.wait_timeout(state, Duration::from_micros(200));
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        state
    }

    /// Runs work until the points are reached.
    pub fn run_to<'a>(&'a self, state: Guard<'a>, points: &[Point]) -> Guard<'a> {
        let mut state = self.run_until(state, |state| points.iter().all(|&point| state.streams.reached(point)));
        state.streams.waited(points);
        state
    }

    /// Waits until no thread does work of these contexts. Nothing is begun for it, and what is queued stays so.
    pub fn until_still<'a>(&'a self, mut state: Guard<'a>, of: impl Fn(ContextId) -> bool) -> Guard<'a> {
        while state.performing.iter().any(|&context| of(context)) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    /// Does one piece of work, if some is ready; whether something came of it.
    pub fn step<'a>(&'a self, mut state: Guard<'a>) -> (Guard<'a>, bool) {
        let ready = state.streams.ready();
        if ready.is_empty() {
            return (state, false);
        }
        let stream = ready[state.order.choose(ready.len())];
        let Some((context, work)) = state.streams.begin(stream) else { return (state, false) };
        let lost = state.contexts.get(context).map_or_else(Some, |context| context.failed);
        let event = match &work {
            Work::Record(event) => Some(*event),
            _ => None,
        };
        let done = match work {
            Work::Call(call) if lost.is_none() || call.even_lost => {
                if let Some(me) = self.me.upgrade() {
                    self.caller.call(me, context, stream, call, lost);
                }
                return (state, true);
            }
            // A lost context's work comes to nothing; memory goes with the context.
            _ if lost.is_some() => Performed::default(),
            // It went with its context, which ended while the stream of another one still held this.
            Work::Free(address) if !state.memory.forget(address) => Performed::default(),
            work => {
                state.performing.push(context);
                drop(state);
                let done = catch_unwind(AssertUnwindSafe(|| self.machinery.perform(work)));
                state = self.state();
                if let Some(at) = state.performing.iter().position(|&performing| performing == context) {
                    state.performing.swap_remove(at);
                }
                done.unwrap_or_else(|_| Performed {
                    error: Some(Error::Unknown),
                    reports: vec!["a piece of work panicked: the emulator is at fault, please report it".to_owned()],
                    ..Performed::default()
                })
            }
        };
        let moved = done.again.is_none();
        if let Some(event) = event {
            self.reached(&mut state, event, stream);
        }
        state.finish(context, stream, done);
        self.changed.notify_all();
        (state, moved)
    }

    /// What is said when the process ends: reports, what was never given back, counts.
    pub fn summary(&self) {
        // A thread that is killed inside of a call holds the lock for good.
        let Ok(state) = self.state.try_lock() else { return };
        let left = state.memory.left();
        if !state.reports.is_empty() {
            let s = if state.reports.len() == 1 { "" } else { "s" };
            console::say(format_args!("{} report{s} in all", state.reports.len()));
        }
        if let Some(left) = left {
            console::say(format_args!("when the process ended, there were left: {left}"));
        }
        match &self.config.counts {
            config::Counts::Off | config::Counts::On => {}
            config::Counts::Table => console::say(state.counts.table().trim_end()),
            config::Counts::File(path) => {
                if let Err(error) = std::fs::write(path, state.counts.json(&counts::calls(), state.streams.time.end()))
                {
                    console::say(format_args!("the counts cannot be written to {}: {error}", path.display()));
                }
            }
        }
    }

    fn reached(&self, state: &mut State, event: EventId, stream: StreamId) {
        let index = state.streams.running_index(stream);
        let simulated = state.streams.time.on();
        if let Ok(event) = state.events.get_mut(event)
            && let Some(point) = event.recorded
            && (point.stream, point.index) == (stream, index)
        {
            event.time = Some(if simulated { point.time as f64 / 1e6 } else { self.machinery.now() });
        }
    }
}

impl State {
    fn finish(&mut self, context: ContextId, stream: StreamId, done: Performed) {
        for report in &done.reports {
            self.report(report.clone());
        }
        self.counts.add(done.counts, done.host_bytes);
        if let (Some(error), Ok(context)) = (done.error, self.contexts.get_mut(context)) {
            context.failed.get_or_insert(error);
        }
        match done.again {
            Some(work) => self.streams.put_back(stream, work),
            None => self.streams.finish(stream),
        }
    }

    /// Tells the user, and keeps it for `cudaemu_reports` of [`crate::abi`].
    pub fn report(&mut self, report: String) {
        console::say(&report);
        self.reports.push(report);
    }
}

//! A graph compiled for a GPU: a list of kernel launches in segments of at most one slice of time by estimate. Repeated runs
//! replay each segment as one CUDA graph, so that a program below a slice is one launch.

use super::commands::EventNumbers;
use super::context::DeviceContext;
use super::estimate::{Segment, cut_into_segments};
use super::event_timeline::EventTimeline;
use super::events::Stream;
use super::graph_exec::GraphExec;
use super::kernel::{KernelLaunch, LaunchAddresses, LoadedLaunch};
use super::launch_log::LaunchSpan;
use super::memory::DeviceMemory;
use super::modules;
use super::private_results::with_private_results;
use super::program_builder::{LaunchCondition, PlannedLaunch, ProgramBuilder, ProgramPlan};
use super::program_layout::ProgramLayout;
use super::turns::StreamStatus;
use crate::device::{DeviceError, MemoryBudget, Region, Reservation, SLICE};
use crate::graph::{Graph, SlotOffset};
use crate::ops::MAX_SRC;
use crate::poison::lock;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

/// Limit of sets of addresses per program for which CUDA graphs are built. Callers alternate between few sets, for example
/// between the copies of a pipelined activation. The graphs of the oldest set are changed to the next one.
const MAX_CACHED_GRAPHS: usize = 8;

/// Limit of the segments of a program for which graphs are built. Further segments are launched kernel by kernel; a segment takes
/// milliseconds, beside which launches cost little.
const MAX_GRAPH_SEGMENTS: usize = 64;

/// Runs after which a graph is tried again that the driver has failed to build or launch.
const RUNS_WITHOUT_GRAPHS: u32 = 256;

/// Device memory that is charged for a graph and for each of its kernels, in bytes. The driver does not tell what it needs: it
/// uploads the parameters of each kernel.
const GRAPH_BYTES: u64 = 64 << 10;
const GRAPH_NODE_BYTES: u64 = 1 << 10;

/// Required alignment in bytes of regions that are bound to slots: the size of the widest element. Tensors are aligned within
/// slots.
const BINDING_ALIGNMENT: u64 = 8;

pub(super) struct CudaProgram {
    launches: Vec<ProgramLaunch>,
    pub(super) layout: ProgramLayout,
    /// Parts of `launches`, in order, between which other clients may have the GPU.
    segments: Vec<Segment>,
    /// Bytes of scratch memory.
    scratch: u64,
    slots: usize,
    cached_graphs: Mutex<VecDeque<Arc<CachedGraphs>>>,
    /// Runs that still launch kernels one by one, because the driver has failed to build or launch a graph, for example without memory.
    runs_without_graphs: AtomicU32,
    /// Ordinal of the GPU for which the kernels were loaded.
    ordinal: usize,
}

/// A launch, whose kernel is loaded when it is first needed.
struct ProgramLaunch {
    launch: KernelLaunch,
    loaded: OnceLock<LoadedLaunch>,
    when: LaunchCondition,
    dst: SlotOffset,
    srcs: [Option<SlotOffset>; MAX_SRC],
    /// Offset in scratch memory of the converted columns that the launch reads.
    columns: u64,
    /// Offset in scratch memory of the quantised columns that the launch writes from its result, for the next product.
    result_columns: u64,
    /// See [`PlannedLaunch`].
    columns_read_later: bool,
}

/// A set of addresses on which the program has run, and the graphs that later runs have built, one per segment. A set
/// includes the addresses of the queue, so only runs of one queue share it, and which weights are packed.
struct CachedGraphs {
    addresses: Box<[u64]>,
    graphs: Mutex<GraphState>,
}

#[derive(Default)]
struct GraphState {
    /// Graphs of the first segments. All of them, unless a run has ended early.
    graphs: Vec<ChargedGraph>,
    /// Graphs of a set that is no longer used, which may be changed to these addresses.
    unused: Vec<ChargedGraph>,
}

struct ChargedGraph {
    graph: GraphExec,
    _reservations: (Reservation, Reservation),
}

/// Parameters of one run of a program.
pub(super) struct ProgramRun<'a> {
    pub(super) context: &'a DeviceContext,
    pub(super) stream: &'a Stream,
    pub(super) events: &'a Arc<EventTimeline>,
    pub(super) numbers: &'a mut EventNumbers,
    /// The session whose turns the run takes.
    pub(super) session: &'a Arc<MemoryBudget>,
    pub(super) scratch: u64,
    /// Which packable spans of the program are packed: see `ProgramLayout`.
    pub(super) packed: Arc<[bool]>,
}

impl ProgramRun<'_> {
    /// Records an event after the work so far and blocks until it is reached.
    fn wait_for_stream(&mut self, mut check: impl FnMut()) -> Result<(), DeviceError> {
        let seq = self.numbers.record(self.events, self.stream)?;
        let events = self.events;
        events.wait_reached(seq, || {
            check();
            events.check()
        })?;
        self.context.bind()
    }

    /// Submits a segment. While other sessions use the GPU, the submission takes a turn, which the session holds until the segment
    /// is done: see `turns`. Returns whether it was in a turn.
    fn submit_segment(
        &mut self,
        submit: impl FnOnce(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<bool, DeviceError> {
        let (events, context, session) = (Arc::clone(self.events), self.context, self.session);
        let status: Weak<dyn StreamStatus> = Arc::downgrade(&events) as _;
        let Some(request) = context.turns.request(session, &status) else { return submit(self).map(|()| false) };
        self.wait_for_stream(|| {})?;
        let mut turn = Some(request.begin(|| events.check())?);
        submit(self)?;
        self.wait_for_stream(|| drop(turn.take_if(|turn| turn.is_over())))?;
        Ok(true)
    }
}

impl CudaProgram {
    pub(super) fn new(graph: &Arc<Graph>, context: &DeviceContext) -> Result<CudaProgram, DeviceError> {
        let private = with_private_results(graph);
        let (compiled, private) = private.as_ref().map_or((&**graph, 0), |(graph, bytes)| (graph, *bytes));
        let plan = ProgramBuilder::new(compiled, private, context).compile()?;
        let ProgramPlan { launches, layout, packs, scratch } = plan;
        // The first run finds its weights packed, so only the launches for packed weights are loaded now; the rest load on first use.
        let is_packed = |span: usize| packs.get(span) == Some(&true);
        let is_expected = |of: &PlannedLaunch| of.when.holds(is_packed);
        let expected = launches.iter().filter(|of| is_expected(of)).map(|of| of.launch.clone());
        let mut loaded = modules::load_all(context, expected.collect())?.into_iter();
        let times: Vec<_> = launches.iter().map(|of| of.time).collect();
        let launches = launches.into_iter().map(|of| {
            let loaded = if is_expected(&of) { loaded.next() } else { None };
            let PlannedLaunch { launch, when, dst, srcs, columns, result_columns, columns_read_later, .. } = of;
            let [columns, result_columns] = [columns, result_columns].map(Option::unwrap_or_default);
            let loaded = loaded.map_or_else(OnceLock::new, OnceLock::from);
            ProgramLaunch { launch, loaded, when, dst, srcs, columns, result_columns, columns_read_later }
        });
        Ok(CudaProgram {
            launches: launches.collect(),
            layout,
            segments: cut_into_segments(times, SLICE),
            scratch,
            slots: graph.slot_sizes().len(),
            cached_graphs: Mutex::default(),
            runs_without_graphs: AtomicU32::default(),
            ordinal: context.gpu.ordinal,
        })
    }

    /// Whether the program was compiled for this device.
    pub(super) fn is_for_device(&self, context: &DeviceContext) -> bool {
        self.ordinal == context.gpu.ordinal
    }

    /// Bytes of scratch memory that a run needs.
    pub(super) fn scratch(&self) -> u64 {
        self.scratch
    }

    /// Checks that the program can run on regions.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`]: one lies on another device, or is not aligned.
    pub(super) fn check_bindings(&self, context: &DeviceContext, bindings: &[Region]) -> Result<(), DeviceError> {
        // An empty program uses no regions.
        if self.launches.is_empty() {
            Ok(())
        } else {
            bindings.iter().try_for_each(|region| binding_address(context, region).map(drop))
        }
    }

    /// Submits the program from segment `from` on, segment by segment, in turns if other sessions use the GPU. Returns the next
    /// segment if `yields` holds after a turn, the program is not done, and no converted columns are read later.
    ///
    /// The first run on a set of addresses launches kernel by kernel. The second run builds a CUDA graph of each segment (a program
    /// that runs once is not worth it). It and all later runs replay each segment with one launch. An abort of the queue ends the
    /// submission before the next launch.
    pub(super) fn run(
        &self,
        run: &mut ProgramRun<'_>,
        bindings: &[Region],
        from: usize,
        yields: impl Fn() -> bool,
    ) -> Result<Option<usize>, DeviceError> {
        if self.launches.is_empty() {
            return Ok(None);
        }
        // Before any turn: a kernel for ggml's layout may have to be compiled.
        self.launches.iter().filter(|step| step.runs(run)).try_for_each(|step| step.load(run).map(drop))?;
        let mut addresses = Vec::with_capacity(self.slots + 2);
        for region in bindings {
            addresses.push(binding_address(run.context, region)?);
        }
        // Private results are in the slot after the graph's.
        addresses.extend([run.scratch, run.events.error_word()]);
        // Graphs have the kernels of one layout.
        let bits = |chunk: &[bool]| chunk.iter().fold(0, |bits, &packed| bits << 1 | u64::from(packed));
        addresses.extend(run.packed.chunks(64).map(bits));
        let no_graphs = run.context.options.launch_check || self.is_run_without_graphs();
        let cached = if no_graphs { None } else { self.find_or_insert(&addresses) };
        // An event at least every tenth of the timeout, so that a long program does not look like one that hangs.
        let (longest, mut unrecorded) = (run.context.options.device_timeout / 10, Duration::ZERO);
        for (index, segment) in self.segments.iter().enumerate().skip(from) {
            let launches = segment.launches.clone();
            let in_turn = run.submit_segment(|run| match &cached {
                Some(cached) if index < MAX_GRAPH_SEGMENTS && self.runs_without_graphs.load(Ordering::Relaxed) == 0 => {
                    self.replay(run, (index, launches), cached)
                }
                _ => self.launch_each(run, launches, &addresses),
            })?;
            unrecorded = if in_turn { Duration::ZERO } else { unrecorded + segment.time };
            if unrecorded > longest {
                run.numbers.record(run.events, run.stream)?;
                unrecorded = Duration::ZERO;
            }
            // A run that goes on later may find other weights packed, whose launches need other columns.
            let last = self.launches.get(segment.launches.clone()).and_then(<[_]>::last);
            let may_yield = index + 1 < self.segments.len() && last.is_some_and(|last| !last.columns_read_later);
            if in_turn && may_yield && yields() {
                return Ok(Some(index + 1));
            }
        }
        Ok(None)
    }

    /// The graphs for a set of addresses; `None` and a new entry for a set on which the program has not run.
    fn find_or_insert(&self, addresses: &[u64]) -> Option<Arc<CachedGraphs>> {
        let mut cached_graphs = lock(&self.cached_graphs);
        if let Some(found) = cached_graphs.iter().find(|c| *c.addresses == *addresses) {
            return Some(Arc::clone(found));
        }
        let evicted = if cached_graphs.len() == MAX_CACHED_GRAPHS { cached_graphs.pop_front() } else { None };
        let unused = evicted.and_then(Arc::into_inner).map(|evicted| evicted.graphs.into_inner());
        // A graph that was being changed when a thread panicked is not used again.
        let unused = unused.and_then(Result::ok).map_or_else(Vec::new, |state| state.graphs);
        let graphs = Mutex::new(GraphState { graphs: Vec::new(), unused });
        cached_graphs.push_back(Arc::new(CachedGraphs { addresses: addresses.into(), graphs }));
        None
    }

    /// Replays segment `index`, and first builds its graph if no run has done so.
    fn replay(
        &self,
        run: &mut ProgramRun<'_>,
        (index, launches): (usize, std::ops::Range<usize>),
        cached: &CachedGraphs,
    ) -> Result<(), DeviceError> {
        let mut state = lock(&cached.graphs);
        if state.graphs.len() < index {
            // The run that created the set launched the segments before kernel by kernel, and goes on here.
            drop(state);
            return self.launch_each(run, launches, &cached.addresses);
        }
        if state.graphs.len() == index {
            let unused = (!state.unused.is_empty()).then(|| state.unused.remove(0));
            match self.build(run, launches.clone(), &cached.addresses, unused)? {
                Some(graph) => state.graphs.push(graph),
                // No memory for the graph, or the driver has failed to build it.
                None => {
                    drop(state);
                    return self.launch_each(run, launches, &cached.addresses);
                }
            }
        }
        run.events.check()?;
        self.log_launches(run, launches);
        let graph = state.graphs.get(index).ok_or_else(|| DeviceError::Bug("a segment without a graph".to_owned()))?;
        let launched = graph.graph.launch(run.context, run.stream);
        if let Err(e @ DeviceError::Driver { .. }) = &launched {
            *state = GraphState::default();
            self.pause_graphs(run, e);
        }
        launched
    }

    /// Counts a run, and says whether it is one without graphs.
    fn is_run_without_graphs(&self) -> bool {
        self.runs_without_graphs.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
    }

    /// Launches kernels one by one for the rest of this run and the next [`RUNS_WITHOUT_GRAPHS`]. That is slower, but works without the
    /// memory of a graph.
    fn pause_graphs(&self, run: &ProgramRun<'_>, e: &DeviceError) {
        log::warn!(
            "{}: a program does without CUDA graphs for {RUNS_WITHOUT_GRAPHS} runs: {e}",
            run.context.primary().name
        );
        self.runs_without_graphs.store(RUNS_WITHOUT_GRAPHS, Ordering::Relaxed);
        lock(&self.cached_graphs).clear();
    }

    /// The graph of a segment, made from that of other addresses if there is one. `None` if there is no memory for it, or the driver fails to
    /// build it.
    fn build(
        &self,
        run: &ProgramRun<'_>,
        launches: std::ops::Range<usize>,
        addresses: &[u64],
        unused: Option<ChargedGraph>,
    ) -> Result<Option<ChargedGraph>, DeviceError> {
        let steps: Vec<_> = self.steps(run, launches).map(|(_, step)| step).collect();
        let loaded = steps.iter().map(|step| step.load(run)).collect::<Result<Vec<_>, _>>()?;
        let at = || loaded.iter().zip(&steps).map(|(&launch, step)| (launch, step.addresses(run, addresses)));
        // A run with weights in other layouts may have had another number of launches.
        if let Some(mut unused) = unused.filter(|unused| unused.graph.launches() == steps.len()) {
            match unused.graph.update(run.context, at()) {
                Ok(true) => return Ok(Some(unused)),
                Err(e @ DeviceError::Lost { .. }) => return Err(e),
                // The graph is built anew.
                Ok(false) | Err(_) => {}
            }
        }
        let bytes = GRAPH_BYTES + GRAPH_NODE_BYTES * steps.len() as u64;
        let (Ok(of_session), Ok(of_device)) = (run.session.reserve(bytes), run.context.budget.reserve(bytes)) else {
            return Ok(None);
        };
        match GraphExec::build(run.context, at()) {
            Ok(graph) => Ok(Some(ChargedGraph { graph, _reservations: (of_session, of_device) })),
            Err(e @ DeviceError::Lost { .. }) => Err(e),
            Err(e) => {
                self.pause_graphs(run, &e);
                Ok(None)
            }
        }
    }

    /// The launches of a range that run, by index.
    fn steps<'a>(
        &'a self,
        run: &ProgramRun<'_>,
        launches: std::ops::Range<usize>,
    ) -> impl Iterator<Item = (usize, &'a ProgramLaunch)> {
        let start = launches.start;
        let steps = self.launches.get(launches).unwrap_or_default().iter().enumerate();
        steps.filter(|(_, step)| step.runs(run)).map(move |(index, step)| (start + index, step))
    }

    fn log_launches(&self, run: &ProgramRun<'_>, launches: std::ops::Range<usize>) {
        let mut steps = self.steps(run, launches);
        if let Some(first) = steps.next() {
            let last = steps.last().unwrap_or(first);
            let span = LaunchSpan {
                first: first.0,
                last: last.0,
                first_kernel: first.1.kernel(),
                last_kernel: last.1.kernel(),
                of: self.launches.len(),
            };
            run.events.launch_log.push(run.numbers.next(), span);
        }
    }

    fn launch_each(
        &self,
        run: &mut ProgramRun<'_>,
        launches: std::ops::Range<usize>,
        addresses: &[u64],
    ) -> Result<(), DeviceError> {
        let steps: Vec<_> = self.steps(run, launches).collect();
        for (index, step) in steps {
            run.events.check()?;
            self.log_launches(run, index..index + 1);
            step.load(run)?.launch(run.context, run.stream, &step.addresses(run, addresses))?;
            if run.context.options.launch_check {
                run.wait_for_stream(|| {})?;
            }
        }
        Ok(())
    }
}

/// Device address of a region that is bound to a slot.
fn binding_address(context: &DeviceContext, region: &Region) -> Result<u64, DeviceError> {
    if !region.offset().is_multiple_of(BINDING_ALIGNMENT) {
        return Err(DeviceError::Misuse("a binding is not aligned to 8 bytes"));
    }
    let memory = region.buffer().memory::<DeviceMemory>();
    let memory = memory.filter(|m| m.context().gpu.ordinal == context.gpu.ordinal);
    let memory = memory.ok_or(DeviceError::Misuse("a binding lies on another device"))?;
    Ok(memory.address() + region.offset())
}

impl ProgramLaunch {
    /// Whether the launch runs with the layouts of a run.
    fn runs(&self, run: &ProgramRun<'_>) -> bool {
        self.when.holds(|span| run.packed.get(span) == Some(&true))
    }

    fn load(&self, run: &ProgramRun<'_>) -> Result<&LoadedLaunch, DeviceError> {
        if let Some(launch) = self.loaded.get() {
            return Ok(launch);
        }
        let launch = self.launch.clone().load(run.context)?;
        Ok(self.loaded.get_or_init(|| launch))
    }

    /// Name of the kernel.
    fn kernel(&self) -> &'static str {
        self.launch.entry().name
    }

    fn addresses(&self, run: &ProgramRun<'_>, addresses: &[u64]) -> LaunchAddresses {
        let at = |place: &SlotOffset| addresses.get(place.slot as usize).map_or(0, |base| base + place.offset as u64);
        let mut srcs = [0; MAX_SRC];
        for (to, place) in srcs.iter_mut().zip(&self.srcs) {
            *to = place.as_ref().map_or(0, at);
        }
        LaunchAddresses {
            dst: at(&self.dst),
            srcs,
            scratch: run.scratch,
            columns: run.scratch + self.columns,
            result_columns: run.scratch + self.result_columns,
            error_word: run.events.error_word(),
        }
    }
}

//! A graph compiled for a GPU: a list of kernel launches in segments of at most one slice of time by estimate. Repeated runs
//! replay each segment as one CUDA graph, so that a program below a slice is one launch.

use super::commands::EventNumbers;
use super::context::{DeviceContext, lock};
use super::estimate::{LAUNCH_TIME, Segment, cut_into_segments, kernel_time};
use super::event_timeline::EventTimeline;
use super::events::Stream;
use super::graph_exec::GraphExec;
use super::kernel::{KernelLaunch, LaunchAddresses, LoadedLaunch};
use super::launch_log::LaunchSpan;
use super::memory::DeviceMemory;
use super::modules;
use super::ops;
use super::program_layout::ProgramLayout;
use super::turns::StreamStatus;
use crate::device::{DeviceError, MemoryBudget, Region, Reservation, SLICE};
use crate::graph::fuse::{FUSION_PATTERNS, select_kernels};
use crate::graph::{Graph, SlotOffset, TensorId};
use crate::ops::MAX_SRC;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

/// Limit of sets of addresses per program for which CUDA graphs are built. Callers alternate between few sets, for example
/// between the copies of a pipelined activation. The graphs of the oldest set are changed to the next one.
const MAX_CACHED_GRAPHS: usize = 8;

/// Limit of the segments of a program for which graphs are built. Further segments are launched kernel by kernel; a segment takes
/// milliseconds, beside which launches cost little.
const MAX_GRAPH_SEGMENTS: usize = 64;

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
    /// Ordinal of the GPU for which the kernels were loaded.
    ordinal: usize,
}

struct ProgramLaunch {
    rows: LazyLaunch,
    /// What is launched instead while a packable span, by its number, is packed.
    packed: Option<(usize, LazyLaunch)>,
    dst: SlotOffset,
    srcs: [Option<SlotOffset>; MAX_SRC],
}

/// A launch whose kernel is loaded when it is first needed.
struct LazyLaunch {
    launch: KernelLaunch,
    loaded: OnceLock<LoadedLaunch>,
}

/// A launch for weights in rows, and one for packed weights: the number of the packable span, and whether the program packs it.
struct LaunchPair {
    rows: KernelLaunch,
    packed: Option<(usize, KernelLaunch, bool)>,
}

impl LaunchPair {
    /// The launch that runs are expected to need.
    fn expected(&self) -> &KernelLaunch {
        match &self.packed {
            Some((_, packed, true)) => packed,
            _ => &self.rows,
        }
    }

    /// The pair with its expected launch loaded.
    fn with_loaded(self, loaded: LoadedLaunch, dst: SlotOffset, srcs: [Option<SlotOffset>; MAX_SRC]) -> ProgramLaunch {
        let LaunchPair { rows, packed } = self;
        let packs = matches!(packed, Some((_, _, true)));
        let (of_rows, of_packed) = if packs { (None, Some(loaded)) } else { (Some(loaded), None) };
        let lazy = |launch, loaded: Option<LoadedLaunch>| LazyLaunch {
            launch,
            loaded: loaded.map_or_else(OnceLock::new, OnceLock::from),
        };
        let packed = packed.map(|(number, launch, _)| (number, lazy(launch, of_packed)));
        ProgramLaunch { rows: lazy(rows, of_rows), packed, dst, srcs }
    }
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
    /// Records an event behind the work so far and blocks until it is reached.
    fn wait_for_stream(&mut self, mut check: impl FnMut()) -> Result<(), DeviceError> {
        let seq = self.numbers.record(self.events, self.stream)?;
        let events = self.events;
        events.wait_reached(seq, || {
            check();
            events.check()
        })?;
        self.context.bind()
    }

    /// Submits a segment. While other sessions use the GPU, this happens in a turn, which the session holds until the segment is
    /// done: see `turns`. Returns whether it was in a turn.
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
        let place = |id: TensorId| {
            let tensor = graph.tensor(id).ok_or(DeviceError::Misuse("a node of another graph"))?;
            tensor.place.ok_or(DeviceError::Misuse("a node without memory"))
        };
        let (mut all, mut packed, mut places) = (Vec::new(), Vec::new(), Vec::new());
        let (mut times, mut scratch) = (Vec::new(), 0);
        let mut layout = ProgramLayout::new(graph.slot_sizes().len());
        select_kernels(
            graph,
            FUSION_PATTERNS,
            |node| ops::select(node, &context.gpu),
            |fused, view| ops::fused(fused, view, &context.gpu),
            |step| {
                let dst = place(step.dst)?;
                let mut srcs = [None; MAX_SRC];
                for (to, id) in srcs.iter_mut().zip(&step.srcs) {
                    *to = id.map(place).transpose()?;
                }
                scratch = scratch.max(step.kernel.scratch);
                let launches: Vec<_> = step.kernel.launches.into_iter().filter(|launch| !launch.is_empty()).collect();
                let desc = |id: TensorId| graph.tensor(id).map(|tensor| &tensor.desc);
                let operands: Vec<_> = step.srcs.iter().map(|id| id.and_then(desc)).collect();
                let blocks = launches.iter().map(KernelLaunch::blocks).max().unwrap_or(0);
                let time = desc(step.dst).map(|dst| kernel_time(&context.gpu, step.code, dst, &operands, blocks));
                // The launches of a node share its time: rounding and merging take little of it.
                let time = time.unwrap_or_default() / u32::try_from(launches.len().max(1)).unwrap_or(1);
                let time = time.max(LAUNCH_TIME);
                // The layout of source 0, if the launches can read it packed; everything else is in rows.
                let for_packed = step.kernel.packed.filter(|kernel| kernel.launches.len() == launches.len());
                let for_packed = for_packed.and_then(|kernel| {
                    let place = srcs[0]?;
                    let number = layout.add_packable(byte_of(&place), &kernel.span, kernel.packs)?;
                    Some((number, kernel.launches))
                });
                let first = usize::from(for_packed.is_some());
                let in_rows = srcs.iter().zip(&operands).skip(first).map(|(&place, &desc)| (place, desc));
                for (place, desc) in in_rows.chain([(Some(dst), desc(step.dst))]) {
                    if let (Some(place), Some(desc)) = (place, desc) {
                        let (slot, start) = byte_of(&place);
                        layout.add_rows(slot, start..start + desc.extent() as u64);
                    }
                }
                let (number, for_packed) = for_packed.map_or((0, Vec::new()), |(number, list)| (number, list));
                let mut for_packed = for_packed.into_iter();
                for launch in launches {
                    all.push(launch);
                    packed.push(for_packed.next().map(|launch| (number, launch)));
                    places.push((dst, srcs));
                    times.push(time);
                }
                Ok::<_, DeviceError>(())
            },
        )?;
        let packs = layout.finish();
        // Of the launches for both layouts, that which a run is expected to need is loaded now: weights are packed before the first run.
        let pairs: Vec<_> = all
            .into_iter()
            .zip(packed)
            .map(|(rows, packed)| {
                let packed = packed.and_then(|(number, launch)| Some((number, launch, packs.get(number).copied()??)));
                LaunchPair { rows, packed }
            })
            .collect();
        let loaded = modules::load_all(context, pairs.iter().map(|pair| pair.expected().clone()).collect())?;
        let launches = pairs.into_iter().zip(loaded).zip(places);
        let launches = launches.map(|((pair, loaded), (dst, srcs))| pair.with_loaded(loaded, dst, srcs));
        Ok(CudaProgram {
            launches: launches.collect(),
            layout,
            segments: cut_into_segments(times, SLICE),
            scratch,
            slots: graph.slot_sizes().len(),
            cached_graphs: Mutex::default(),
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
        // An empty program uses none.
        if self.launches.is_empty() {
            Ok(())
        } else {
            bindings.iter().try_for_each(|region| binding_address(context, region).map(drop))
        }
    }

    /// Submits the program from segment `from` on, segment by segment, in turns if other sessions use the GPU. Returns the next
    /// segment if `yields` holds after a turn and the program is not done.
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
        self.launches.iter().try_for_each(|step| step.load(run).map(drop))?;
        let mut addresses = Vec::with_capacity(self.slots + 2);
        for region in bindings {
            addresses.push(binding_address(run.context, region)?);
        }
        addresses.extend([run.scratch, run.events.error_word()]);
        // Graphs have the kernels of one layout.
        let bits = |chunk: &[bool]| chunk.iter().fold(0, |bits, &packed| bits << 1 | u64::from(packed));
        addresses.extend(run.packed.chunks(64).map(bits));
        let cached = if run.context.options.launch_check { None } else { self.find_or_insert(&addresses) };
        // An event at least every tenth of the timeout, so that a long program does not look like one that hangs.
        let (longest, mut unrecorded) = (run.context.options.device_timeout / 10, Duration::ZERO);
        for (index, segment) in self.segments.iter().enumerate().skip(from) {
            let launches = segment.launches.clone();
            let in_turn = run.submit_segment(|run| match &cached {
                Some(cached) if index < MAX_GRAPH_SEGMENTS => self.replay(run, (index, launches), cached),
                _ => self.launch_each(run, launches, &addresses),
            })?;
            unrecorded = if in_turn { Duration::ZERO } else { unrecorded + segment.time };
            if unrecorded > longest {
                run.numbers.record(run.events, run.stream)?;
                unrecorded = Duration::ZERO;
            }
            if in_turn && index + 1 < self.segments.len() && yields() {
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
                // No memory for the graph.
                None => {
                    drop(state);
                    return self.launch_each(run, launches, &cached.addresses);
                }
            }
        }
        run.events.check()?;
        self.log_launches(run, launches);
        let graph = state.graphs.get(index).ok_or_else(|| DeviceError::Bug("a segment without a graph".to_owned()))?;
        graph.graph.launch(run.context, run.stream)
    }

    /// The graph of a segment, made from that of other addresses if there is one. `None` if there is no memory for it.
    fn build(
        &self,
        run: &ProgramRun<'_>,
        launches: std::ops::Range<usize>,
        addresses: &[u64],
        unused: Option<ChargedGraph>,
    ) -> Result<Option<ChargedGraph>, DeviceError> {
        let steps = self.launches.get(launches).unwrap_or_default();
        let chosen = steps.iter().map(|step| step.load(run)).collect::<Result<Vec<_>, _>>()?;
        let at = || chosen.iter().zip(steps).map(|(&launch, step)| (launch, step.addresses(run, addresses)));
        if let Some(mut unused) = unused {
            unused.graph.update(run.context, at())?;
            return Ok(Some(unused));
        }
        let bytes = GRAPH_BYTES + GRAPH_NODE_BYTES * steps.len() as u64;
        let (Ok(of_session), Ok(of_device)) = (run.session.reserve(bytes), run.context.budget.reserve(bytes)) else {
            return Ok(None);
        };
        let graph = GraphExec::build(run.context, at())?;
        Ok(Some(ChargedGraph { graph, _reservations: (of_session, of_device) }))
    }

    fn log_launches(&self, run: &ProgramRun<'_>, launches: std::ops::Range<usize>) {
        let Some(steps) = self.launches.get(launches.clone()) else { return };
        if let (Some(first), Some(last)) = (steps.first(), steps.last()) {
            let span = LaunchSpan {
                first: launches.start,
                last: launches.end - 1,
                first_kernel: first.kernel(run),
                last_kernel: last.kernel(run),
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
        for index in launches {
            let Some(step) = self.launches.get(index) else { break };
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

/// The slot of a place and the byte within it.
fn byte_of(place: &SlotOffset) -> (usize, u64) {
    (place.slot as usize, place.offset as u64)
}

impl ProgramLaunch {
    /// The launch for the layout of the run.
    fn chosen(&self, run: &ProgramRun<'_>) -> &LazyLaunch {
        let packed = self.packed.as_ref().filter(|(number, _)| run.packed.get(*number) == Some(&true));
        packed.map_or(&self.rows, |(_, launch)| launch)
    }

    /// That launch, loaded.
    fn load(&self, run: &ProgramRun<'_>) -> Result<&LoadedLaunch, DeviceError> {
        let LazyLaunch { launch, loaded } = self.chosen(run);
        if let Some(launch) = loaded.get() {
            return Ok(launch);
        }
        let launch = launch.clone().load(run.context)?;
        Ok(loaded.get_or_init(|| launch))
    }

    /// Name of its kernel.
    fn kernel(&self, run: &ProgramRun<'_>) -> &'static str {
        self.chosen(run).launch.entry().name
    }

    fn addresses(&self, run: &ProgramRun<'_>, addresses: &[u64]) -> LaunchAddresses {
        let at = |place: &SlotOffset| addresses.get(place.slot as usize).map_or(0, |base| base + place.offset as u64);
        let mut srcs = [0; MAX_SRC];
        for (to, place) in srcs.iter_mut().zip(&self.srcs) {
            *to = place.as_ref().map_or(0, at);
        }
        LaunchAddresses { dst: at(&self.dst), srcs, scratch: run.scratch, error_word: run.events.error_word() }
    }
}

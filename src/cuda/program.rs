//! A graph compiled for a GPU: a list of kernel launches in segments of at most one slice of time by estimate. Repeated runs
//! replay each segment as one CUDA graph, so that a program below a slice is one launch.

use super::context::{DeviceContext, lock};
use super::estimate::{LAUNCH_TIME, Segment, cut_into_segments, kernel_time};
use super::events::{EventTimeline, Stream, poll_until};
use super::graph_exec::GraphExec;
use super::kernel::{KernelLaunch, LaunchAddresses, LoadedLaunch};
use super::memory::DeviceMemory;
use super::ops;
use super::turns::{MAX_STREAM_WAIT, StreamStatus, StreamWaits};
use crate::device::{DeviceError, MemoryBudget, Region, SLICE};
use crate::graph::fuse::{FUSION_PATTERNS, select_kernels};
use crate::graph::{Graph, SlotOffset, TensorId};
use crate::ops::MAX_SRC;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

/// Limit of sets of addresses per program for which CUDA graphs are captured. Callers alternate between few sets, for example
/// between the copies of a pipelined activation. The graphs of the oldest set are evicted.
const MAX_CACHED_GRAPHS: usize = 8;

/// Limit of the segments of a program that are captured: a captured graph takes memory that no budget pays for. Further segments
/// are launched kernel by kernel; a segment takes milliseconds, beside which launches cost little.
const MAX_CAPTURED_SEGMENTS: usize = 64;

/// Required alignment in bytes of regions that are bound to slots: the size of the widest element. Tensors are aligned within
/// slots.
const BINDING_ALIGNMENT: u64 = 8;

pub(super) struct CudaProgram {
    launches: Vec<ProgramLaunch>,
    /// Parts of `launches`, in order, between which other clients may have the GPU.
    segments: Vec<Segment>,
    /// Bytes of scratch memory.
    scratch: u64,
    slots: usize,
    cached_graphs: Mutex<VecDeque<Arc<CachedGraph>>>,
    /// Ordinal of the GPU for which the kernels were loaded.
    ordinal: usize,
}

struct ProgramLaunch {
    launch: LoadedLaunch,
    dst: SlotOffset,
    srcs: [Option<SlotOffset>; MAX_SRC],
}

/// A set of addresses on which the program has run, and the graphs that later runs have captured, one per segment. A set
/// includes the addresses of the queue, so only runs of one queue share it.
struct CachedGraph {
    addresses: Box<[u64]>,
    /// Graphs of the first segments. All of them, unless a capture has failed or a run was aborted.
    graphs: Mutex<Vec<GraphExec>>,
}

/// Parameters of one run of a program.
pub(super) struct ProgramRun<'a> {
    pub(super) context: &'a DeviceContext,
    pub(super) stream: &'a Stream,
    pub(super) events: &'a Arc<EventTimeline>,
    /// The session whose turns the run takes.
    pub(super) session: &'a MemoryBudget,
    pub(super) stream_waits: &'a StreamWaits,
    pub(super) scratch: u64,
}

impl ProgramRun<'_> {
    /// Submits a segment. While other sessions use the GPU, this happens in a turn, which the session holds until the segment is
    /// done: see `turns`. Returns false if the stream waits for another queue, so that the segment was submitted without a turn.
    fn submit_segment(&self, submit: impl FnOnce() -> Result<(), DeviceError>) -> Result<bool, DeviceError> {
        let events: Weak<dyn StreamStatus> = Arc::downgrade(self.events) as _;
        let Some(request) = self.context.turns.request(self.session, &events) else { return submit().map(|()| true) };
        if !self.drain_stream()? {
            return submit().map(|()| false);
        }
        let mut turn = Some(request.begin(|| self.events.check_aborted())?);
        submit()?;
        let end = self.context.acquire_event()?;
        end.record(self.context, self.stream)?;
        end.wait(self.context, "a segment of a program", || {
            drop(turn.take_if(|turn| turn.is_over()));
            self.events.check_aborted()
        })?;
        self.context.recycle_event(end);
        Ok(true)
    }

    /// Waits until the earlier work of the stream is done. Returns false after [`MAX_STREAM_WAIT`] if the stream waits for another
    /// queue: that may need the calling thread.
    fn drain_stream(&self) -> Result<bool, DeviceError> {
        let began = Instant::now();
        poll_until(
            "the earlier work of a queue",
            || self.stream.is_idle(self.context),
            || {
                self.events.check_aborted()?;
                if began.elapsed() < MAX_STREAM_WAIT {
                    return Ok(true);
                }
                let goes_on = !self.stream_waits.are_pending();
                // Polling a queue of another device made that device's context current.
                self.context.bind().map(|()| goes_on)
            },
        )
    }
}

impl CudaProgram {
    pub(super) fn new(graph: &Arc<Graph>, context: &DeviceContext) -> Result<CudaProgram, DeviceError> {
        let place = |id: TensorId| {
            let tensor = graph.tensor(id).ok_or(DeviceError::Misuse("a node of another graph"))?;
            tensor.place.ok_or(DeviceError::Misuse("a node without memory"))
        };
        let (mut loaded, mut times, mut scratch) = (Vec::new(), Vec::new(), 0);
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
                for launch in launches {
                    loaded.push(ProgramLaunch { launch: launch.load(context)?, dst, srcs });
                    times.push(time);
                }
                Ok::<_, DeviceError>(())
            },
        )?;
        Ok(CudaProgram {
            launches: loaded,
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

    /// Submits the program, segment by segment, in turns if other sessions use the GPU. The first run on a set of addresses
    /// launches kernel by kernel. The second run captures the launches of each segment as a CUDA graph (a program that runs once
    /// is not worth a capture). It and all later runs replay each segment with one launch. An abort of the queue ends the
    /// submission before the next launch.
    pub(super) fn run(&self, run: &ProgramRun<'_>, bindings: &[Region]) -> Result<(), DeviceError> {
        if self.launches.is_empty() {
            return Ok(());
        }
        let mut addresses = Vec::with_capacity(self.slots + 2);
        for region in bindings {
            if !region.offset().is_multiple_of(BINDING_ALIGNMENT) {
                return Err(DeviceError::Misuse("a binding is not aligned to 8 bytes"));
            }
            let memory = region.buffer().memory::<DeviceMemory>();
            let memory = memory.filter(|m| m.context().gpu.ordinal == run.context.gpu.ordinal);
            let memory = memory.ok_or(DeviceError::Misuse("a binding lies on another device"))?;
            addresses.push(memory.address() + region.offset());
        }
        addresses.extend([run.scratch, run.events.shared_words.device_address(0)]);
        let cached = self.find_or_insert(&addresses);
        let mut takes_turns = true;
        for (index, segment) in self.segments.iter().enumerate() {
            let launches = self.launches.get(segment.launches.clone()).unwrap_or_default();
            let submit = || match &cached {
                Some(cached) if index < MAX_CAPTURED_SEGMENTS => CudaProgram::replay(run, (index, launches), cached),
                _ => CudaProgram::launch_each(run, launches, &addresses),
            };
            if takes_turns {
                takes_turns = run.submit_segment(submit)?;
            } else {
                submit()?;
            }
        }
        Ok(())
    }

    /// The graphs for a set of addresses; `None` and a new entry for a set on which the program has not run.
    fn find_or_insert(&self, addresses: &[u64]) -> Option<Arc<CachedGraph>> {
        let mut cached_graphs = lock(&self.cached_graphs);
        let found = cached_graphs.iter().find(|c| *c.addresses == *addresses).cloned();
        let evicted = if found.is_none() {
            let full = cached_graphs.len() == MAX_CACHED_GRAPHS;
            let evicted = if full { cached_graphs.pop_front() } else { None };
            cached_graphs.push_back(Arc::new(CachedGraph { addresses: addresses.into(), graphs: Mutex::default() }));
            evicted
        } else {
            None
        };
        drop(cached_graphs);
        // Outside of the lock: this destroys driver objects.
        drop(evicted);
        found
    }

    /// Replays segment `index`, and first captures it if no run has done so. Replays are in the order of the segments, so the
    /// graphs of all earlier segments exist.
    fn replay(
        run: &ProgramRun<'_>,
        (index, launches): (usize, &[ProgramLaunch]),
        cached: &CachedGraph,
    ) -> Result<(), DeviceError> {
        let mut graphs = lock(&cached.graphs);
        if graphs.len() == index {
            let capture = || CudaProgram::launch_each(run, launches, &cached.addresses);
            graphs.push(GraphExec::capture(run.context, run.stream, capture)?);
        }
        run.events.check_aborted()?;
        if let Some(step) = launches.last() {
            run.events.record_launch(step.launch.name());
        }
        let graph = graphs.get(index).ok_or_else(|| DeviceError::Bug("a segment without a graph".to_owned()))?;
        graph.launch(run.context, run.stream)
    }

    fn launch_each(run: &ProgramRun<'_>, launches: &[ProgramLaunch], addresses: &[u64]) -> Result<(), DeviceError> {
        let at = |place: &SlotOffset| addresses.get(place.slot as usize).map_or(0, |base| base + place.offset as u64);
        for step in launches {
            run.events.check_aborted()?;
            let mut srcs = [0; MAX_SRC];
            for (to, place) in srcs.iter_mut().zip(&step.srcs) {
                *to = place.as_ref().map_or(0, at);
            }
            let error_word = run.events.shared_words.device_address(0);
            let all = LaunchAddresses { dst: at(&step.dst), srcs: &srcs, scratch: run.scratch, error_word };
            run.events.record_launch(step.launch.name());
            step.launch.launch(run.context, run.stream, &all)?;
        }
        Ok(())
    }
}

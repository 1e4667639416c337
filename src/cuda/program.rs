//! A graph compiled for a GPU: a list of kernel launches, which repeated runs replay as one CUDA graph.

use super::context::{DeviceContext, lock};
use super::events::{EventTimeline, Stream};
use super::graph_exec::GraphExec;
use super::kernel::{LaunchAddresses, LoadedLaunch};
use super::memory::DeviceMemory;
use super::ops;
use crate::device::{DeviceError, Region};
use crate::graph::fuse::{FUSION_PATTERNS, select_kernels};
use crate::graph::{Graph, SlotOffset, TensorId};
use crate::ops::MAX_SRC;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Limit of captured CUDA graphs per program, one for each set of addresses. Callers alternate between few sets, for example
/// between the copies of a pipelined activation. The oldest graph is evicted.
const MAX_CACHED_GRAPHS: usize = 8;

/// Required alignment in bytes of regions that are bound to slots: the size of the widest element. Tensors are aligned within
/// slots.
const BINDING_ALIGNMENT: u64 = 8;

pub(super) struct CudaProgram {
    launches: Vec<ProgramLaunch>,
    /// Bytes of scratch memory.
    scratch: u64,
    slots: usize,
    cached_graphs: Mutex<VecDeque<CachedGraph>>,
    /// Ordinal of the GPU for which the kernels were loaded.
    ordinal: usize,
}

struct ProgramLaunch {
    launch: LoadedLaunch,
    dst: SlotOffset,
    srcs: [Option<SlotOffset>; MAX_SRC],
}

/// A set of addresses on which the program has run, and the graph that was captured on the second run.
struct CachedGraph {
    addresses: Box<[u64]>,
    graph: Option<GraphExec>,
}

/// Parameters of one run of a program.
pub(super) struct ProgramRun<'a> {
    pub(super) context: &'a DeviceContext,
    pub(super) stream: &'a Stream,
    pub(super) events: &'a EventTimeline,
    pub(super) scratch: u64,
}

impl CudaProgram {
    pub(super) fn new(graph: &Arc<Graph>, context: &DeviceContext) -> Result<CudaProgram, DeviceError> {
        let place = |id: TensorId| {
            let tensor = graph.tensor(id).ok_or(DeviceError::Misuse("a node of another graph"))?;
            tensor.place.ok_or(DeviceError::Misuse("a node without memory"))
        };
        let (mut loaded, mut scratch) = (Vec::new(), 0);
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
                for launch in step.kernel.launches.into_iter().filter(|launch| !launch.is_empty()) {
                    loaded.push(ProgramLaunch { launch: launch.load(context)?, dst, srcs });
                }
                Ok::<_, DeviceError>(())
            },
        )?;
        Ok(CudaProgram {
            launches: loaded,
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

    /// Submits the program. The first run on a set of addresses launches kernel by kernel. The second run captures the launches
    /// as a CUDA graph (a program that runs once is not worth a capture). It and all later runs replay the graph with one
    /// launch. An abort of the queue ends the submission before the next launch.
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
        let mut cached_graphs = lock(&self.cached_graphs);
        let Some(cached) = cached_graphs.iter_mut().find(|c| *c.addresses == *addresses) else {
            if cached_graphs.len() == MAX_CACHED_GRAPHS {
                cached_graphs.pop_front();
            }
            cached_graphs.push_back(CachedGraph { addresses: addresses.as_slice().into(), graph: None });
            drop(cached_graphs);
            return self.launch_each(run, &addresses);
        };
        let graph = match &mut cached.graph {
            Some(graph) => graph,
            none => none.insert(GraphExec::capture(run.context, run.stream, || self.launch_each(run, &addresses))?),
        };
        run.events.check_aborted()?;
        if let Some(step) = self.launches.last() {
            run.events.record_launch(step.launch.name());
        }
        graph.launch(run.context, run.stream)
    }

    fn launch_each(&self, run: &ProgramRun<'_>, addresses: &[u64]) -> Result<(), DeviceError> {
        let at = |place: &SlotOffset| addresses.get(place.slot as usize).map_or(0, |base| base + place.offset as u64);
        for step in &self.launches {
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

//! A graph made ready for a GPU: launches in order, which a repeated run submits as one CUDA graph.

use super::capture::Captured;
use super::core::{Core, lock};
use super::events::{Marks, Stream};
use super::kernel::{Addresses, Ready};
use super::memory::Memory;
use super::ops;
use crate::device::{DeviceError, Region};
use crate::graph::fuse::{FUSION_PATTERNS, select_kernels};
use crate::graph::{Graph, SlotOffset, TensorId};
use crate::ops::MAX_SRC;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Captures of one program that are kept: the sets of addresses between which callers alternate.
const CAPTURES: usize = 8;

/// Regions bound to slots begin at multiples of this, the widest element's size: tensors are aligned within slots.
const BINDING: u64 = 8;

pub(super) struct Code {
    steps: Vec<Step>,
    /// Bytes of scratch memory.
    scratch: u64,
    slots: usize,
    captures: Mutex<VecDeque<Capture>>,
    /// The GPU whose kernels it has.
    ordinal: usize,
}

struct Step {
    ready: Ready,
    dst: SlotOffset,
    srcs: [Option<SlotOffset>; MAX_SRC],
}

/// A set of addresses that the program ran on, and what was captured when it ran on them again.
struct Capture {
    addresses: Box<[u64]>,
    graph: Option<Captured>,
}

/// What a run needs besides the program.
pub(super) struct Run<'a> {
    pub(super) core: &'a Core,
    pub(super) stream: &'a Stream,
    pub(super) marks: &'a Marks,
    pub(super) scratch: u64,
}

impl Code {
    pub(super) fn new(graph: &Arc<Graph>, core: &Core) -> Result<Code, DeviceError> {
        let place = |id: TensorId| {
            let tensor = graph.tensor(id).ok_or(DeviceError::Misuse("a node of another graph"))?;
            tensor.place.ok_or(DeviceError::Misuse("a node without memory"))
        };
        let (mut made, mut scratch) = (Vec::new(), 0);
        select_kernels(
            graph,
            FUSION_PATTERNS,
            |node| ops::select(node, &core.gpu),
            |fused, view| ops::fused(fused, view, &core.gpu),
            |step| {
                let dst = place(step.dst)?;
                let mut srcs = [None; MAX_SRC];
                for (to, id) in srcs.iter_mut().zip(&step.srcs) {
                    *to = id.map(place).transpose()?;
                }
                scratch = scratch.max(step.kernel.scratch);
                for launch in step.kernel.launches.into_iter().filter(|launch| !launch.is_empty()) {
                    made.push(Step { ready: launch.load(core)?, dst, srcs });
                }
                Ok::<_, DeviceError>(())
            },
        )?;
        Ok(Code {
            steps: made,
            scratch,
            slots: graph.slot_sizes().len(),
            captures: Mutex::default(),
            ordinal: core.gpu.ordinal,
        })
    }

    /// Whether it runs on this device.
    pub(super) fn fits(&self, core: &Core) -> bool {
        self.ordinal == core.gpu.ordinal
    }

    /// Bytes of scratch memory that a run needs.
    pub(super) fn scratch(&self) -> u64 {
        self.scratch
    }

    /// Submits the program. The first run on a set of addresses launches kernel by kernel, the second captures them, and from
    /// then on one launch does all.
    pub(super) fn run(&self, run: &Run<'_>, bindings: &[Region]) -> Result<(), DeviceError> {
        if self.steps.is_empty() {
            return Ok(());
        }
        let mut addresses = Vec::with_capacity(self.slots + 2);
        for region in bindings {
            if !region.offset().is_multiple_of(BINDING) {
                return Err(DeviceError::Misuse("a binding begins at no multiple of 8 bytes"));
            }
            let memory = region.buffer().memory::<Memory>();
            let memory = memory.filter(|m| m.core().gpu.ordinal == run.core.gpu.ordinal);
            let memory = memory.ok_or(DeviceError::Misuse("a binding lies on another device"))?;
            addresses.push(memory.address() + region.offset());
        }
        addresses.extend([run.scratch, run.marks.verdict.device(0)]);
        let mut captures = lock(&self.captures);
        let Some(known) = captures.iter_mut().find(|c| *c.addresses == *addresses) else {
            if captures.len() == CAPTURES {
                captures.pop_front();
            }
            captures.push_back(Capture { addresses: addresses.as_slice().into(), graph: None });
            drop(captures);
            return self.launch_all(run, &addresses);
        };
        let graph = match &mut known.graph {
            Some(graph) => graph,
            none => none.insert(Captured::of(run.core, run.stream, || self.launch_all(run, &addresses))?),
        };
        if let Some(step) = self.steps.last() {
            run.marks.launched(step.ready.name());
        }
        graph.launch(run.core, run.stream)
    }

    fn launch_all(&self, run: &Run<'_>, addresses: &[u64]) -> Result<(), DeviceError> {
        let at = |place: &SlotOffset| addresses.get(place.slot as usize).map_or(0, |base| base + place.offset as u64);
        for step in &self.steps {
            let mut srcs = [0; MAX_SRC];
            for (to, place) in srcs.iter_mut().zip(&step.srcs) {
                *to = place.as_ref().map_or(0, at);
            }
            let verdict = run.marks.verdict.device(0);
            let all = Addresses { dst: at(&step.dst), srcs: &srcs, scratch: run.scratch, verdict };
            run.marks.launched(step.ready.name());
            step.ready.launch(run.core, run.stream, &all)?;
        }
        Ok(())
    }
}

//! Compiles a graph to the list of launches of a program: kernel selection, the layouts of weights, scratch memory, and estimates of
//! time.

use super::columns::{ALIGNMENT, ColumnSource, ConvertedColumns, Placed};
use super::context::DeviceContext;
use super::estimate::{LAUNCH_TIME, kernel_time, loop_time};
use super::kernel::{ColumnConversion, KernelLaunch, NodeLaunches, PackedLaunches};
use super::ops;
use super::program_layout::ProgramLayout;
use crate::device::DeviceError;
use crate::graph::fuse::{FUSION_PATTERNS, KernelCall, select_kernels, written};
use crate::graph::{Graph, Node, SlotOffset, TensorId};
use crate::ops::MAX_SRC;
use std::time::Duration;

/// A launch of a program that is not loaded yet.
pub(super) struct PlannedLaunch {
    pub(super) launch: KernelLaunch,
    pub(super) when: LaunchCondition,
    pub(super) dst: SlotOffset,
    pub(super) srcs: [Option<SlotOffset>; MAX_SRC],
    /// The number of the converted columns at [`Ptr::Columns`](super::kernel::Ptr::Columns), and of those at
    /// [`Ptr::ResultColumns`](super::kernel::Ptr::ResultColumns); after
    /// [`ProgramBuilder::finish`], their offset in scratch memory.
    pub(super) columns: Option<u64>,
    pub(super) result_columns: Option<u64>,
    /// Whether converted columns that an earlier launch or this one writes are read by a later one.
    pub(super) columns_read_later: bool,
    /// Estimated time; zero if it is counted with another launch that runs instead.
    pub(super) time: Duration,
}

/// When a launch runs: if all conditions of one of the alternatives hold.
#[derive(Clone, Default)]
pub(super) struct LaunchCondition(Vec<Vec<LayoutCondition>>);

impl LaunchCondition {
    pub(super) fn holds(&self, is_packed: impl Fn(usize) -> bool) -> bool {
        self.0.iter().any(|all| all.iter().all(|condition| condition.holds(&is_packed)))
    }

    fn add_alternative(&mut self, all: &[LayoutCondition]) {
        if !self.0.iter().any(|known| known == all) {
            self.0.push(all.to_vec());
        }
    }

    /// Decides conditions with spans that are never packed. Returns whether the launch can run.
    fn decide(&mut self, never: impl Fn(&usize) -> bool) -> bool {
        let decided = |condition: &LayoutCondition| condition.spans.iter().any(&never);
        self.0.retain(|all| !all.iter().any(|condition| decided(condition) && condition.packed));
        self.0.iter_mut().for_each(|all| all.retain(|condition| !decided(condition)));
        !self.0.is_empty()
    }
}

/// A condition on the layouts of a run.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct LayoutCondition {
    /// Numbers of packable spans.
    spans: Vec<usize>,
    /// Whether all of the spans must be packed, or at least one of them must not.
    packed: bool,
}

impl LayoutCondition {
    fn holds(&self, is_packed: impl Fn(usize) -> bool) -> bool {
        self.spans.iter().all(|&span| is_packed(span)) == self.packed
    }
}

/// Where the result and the sources of a launch are.
type Places = (SlotOffset, [Option<SlotOffset>; MAX_SRC]);

/// What a graph is compiled to.
pub(super) struct ProgramPlan {
    pub(super) launches: Vec<PlannedLaunch>,
    pub(super) layout: ProgramLayout,
    /// For each packable span: whether the program packs it, so that runs are expected to find it packed.
    pub(super) packs: Vec<bool>,
    /// Bytes of scratch memory.
    pub(super) scratch: u64,
}

pub(super) struct ProgramBuilder<'a> {
    graph: &'a Graph,
    context: &'a DeviceContext,
    launches: Vec<PlannedLaunch>,
    layout: ProgramLayout,
    columns: ConvertedColumns,
    /// Bytes of the largest scratch memory of a node.
    scratch: u64,
    /// The slot of private results, which is scratch memory, and its bytes.
    private: (u32, u64),
}

impl<'a> ProgramBuilder<'a> {
    /// `private` is the number of bytes of private results, which are in the slot behind the last one of the graph.
    pub(super) fn new(graph: &'a Graph, private: u64, context: &'a DeviceContext) -> ProgramBuilder<'a> {
        ProgramBuilder {
            graph,
            context,
            launches: Vec::new(),
            layout: ProgramLayout::new(graph.slot_sizes().len()),
            columns: ConvertedColumns::default(),
            scratch: 0,
            private: (u32::try_from(graph.slot_sizes().len()).unwrap_or(u32::MAX), private),
        }
    }

    /// Compiles the whole graph.
    pub(super) fn compile(mut self) -> Result<ProgramPlan, DeviceError> {
        let gpu = &self.context.gpu;
        select_kernels(
            self.graph,
            FUSION_PATTERNS,
            |node| ops::select(node, gpu),
            |fused, view| ops::fused(fused, view, gpu),
            |call| self.add(call, &[]),
        )?;
        Ok(self.finish())
    }

    /// Adds the launches of a node or of fused nodes, which run if all conditions of `when` hold.
    fn add(&mut self, call: KernelCall<NodeLaunches>, when: &[LayoutCondition]) -> Result<(), DeviceError> {
        let KernelCall { kernel, dst, srcs, nodes, .. } = call;
        let NodeLaunches { launches, scratch, columns, quantizing, packed, loops, forbids_dst_on_source1 } = kernel;
        self.scratch = self.scratch.max(scratch);
        let dst = self.placed(dst)?;
        if srcs.len() > MAX_SRC {
            return Err(DeviceError::Bug(format!("a fused op with {} operands", srcs.len())));
        }
        let operands = srcs.iter().map(|id| id.map(|id| self.placed(id)).transpose()).collect::<Result<Vec<_>, _>>()?;
        let at = (dst.place, std::array::from_fn(|i| Some(operands.get(i)?.as_ref()?.place)));
        let source = operands.get(1).copied().flatten();
        let tabulated =
            |of: &Option<ColumnConversion>| operands.get(of.as_ref()?.table.as_ref()?.source).copied().flatten();
        // Weights that the launches can read packed; everything else is in rows.
        let spans = packed.as_ref().and_then(|packed| self.add_packable(packed, &operands));
        let is_fused = nodes.len() > 1;
        let would_overwrite = forbids_dst_on_source1 && source.is_some_and(|source| source.overlaps(&dst));
        // For block types, only packed weights have the fused kernel.
        if is_fused && (would_overwrite || packed.is_some() && spans.is_none()) {
            return self.add_one_by_one(&nodes, when);
        }
        let in_rows = |i: &usize| {
            let is_weight = |(source, _): &(usize, _)| source == i;
            !(spans.is_some() && packed.as_ref().is_some_and(|packed| packed.weights.iter().any(is_weight)))
        };
        let rows = operands.iter().enumerate().filter(|(i, _)| in_rows(i)).filter_map(|(_, operand)| operand.as_ref());
        for Placed { place, desc } in rows.chain([&dst]) {
            let start = place.offset as u64;
            self.layout.add_rows(place.slot as usize, start..start + desc.extent() as u64);
        }
        let time_of = |launches: &[KernelLaunch]| {
            let blocks = launches.iter().map(KernelLaunch::blocks).max().unwrap_or(0);
            let time: Duration = nodes.iter().filter_map(|&index| self.node_time(index, blocks)).sum();
            let time = time.max(loop_time(&self.context.gpu, loops, blocks));
            // The launches of a node share its time: merging takes little of it.
            (time / u32::try_from(launches.len().max(1)).unwrap_or(1)).max(LAUNCH_TIME)
        };
        // The launch that can also quantise the result, and when others run instead.
        let producer = match (packed, spans) {
            (Some(packed), Some(spans)) => {
                let [is_packed, is_not] = [true, false].map(|packed| LayoutCondition { spans: spans.clone(), packed });
                let with = |condition: &LayoutCondition| when.iter().chain([condition]).cloned().collect::<Vec<_>>();
                let time = if when.is_empty() { time_of(&packed.launches) } else { Duration::ZERO };
                let sources = (source, tabulated(&packed.columns));
                let columns_if_packed = self.convert(sources, packed.columns, at, LAUNCH_TIME);
                // Weights are rarely in rows: no other launch also writes the columns for them.
                let columns = columns.map(|conversion| ColumnConversion { group: None, ..conversion });
                let columns = self.convert((source, tabulated(&columns)), columns, at, Duration::ZERO);
                self.push(packed.launches, &with(&is_packed), at, columns_if_packed, time);
                let last = self.launches.len().checked_sub(1);
                if is_fused {
                    self.add_one_by_one(&nodes, &with(&is_not))?;
                } else {
                    self.push(launches, &with(&is_not), at, columns, Duration::ZERO);
                }
                last.map(|last| (last, Some(is_not)))
            }
            _ => {
                let time = if when.is_empty() { time_of(&launches) } else { Duration::ZERO };
                let columns = self.convert((source, tabulated(&columns)), columns, at, LAUNCH_TIME);
                self.push(launches, when, at, columns, time);
                self.launches.len().checked_sub(1).map(|last| (last, None))
            }
        };
        self.overwrite(&nodes)?;
        if let (Some((last, unless)), true) = (producer, when.is_empty()) {
            self.columns.add_producer(dst, last, unless, quantizing);
        }
        Ok(())
    }

    fn add_one_by_one(&mut self, nodes: &[usize], when: &[LayoutCondition]) -> Result<(), DeviceError> {
        for &index in nodes {
            let Some(node) = self.graph.nodes().get(index) else { continue };
            let view = self.graph.node_view(node).ok_or(DeviceError::Misuse("a node of another graph"))?;
            let kernel = ops::select(&view, &self.context.gpu)?;
            let Node { dst, srcs, op } = node;
            let call = KernelCall { code: op.code(), kernel, dst: *dst, srcs: srcs.to_vec(), nodes: vec![index] };
            self.add(call, when)?;
        }
        Ok(())
    }

    /// The estimated time of a node by kernels with at most `blocks` blocks.
    fn node_time(&self, index: usize, blocks: u64) -> Option<Duration> {
        let view = self.graph.node_view(self.graph.nodes().get(index)?)?;
        let srcs: [_; MAX_SRC] = std::array::from_fn(|i| view.srcs.get(i));
        Some(kernel_time(&self.context.gpu, view.op.code(), view.dst, &srcs, blocks))
    }

    /// Adds launches, which run if all conditions of `when` hold; empty ones are left out. `columns` is the number of the converted columns
    /// that they read.
    fn push(
        &mut self,
        launches: Vec<KernelLaunch>,
        when: &[LayoutCondition],
        at: Places,
        columns: Option<usize>,
        time: Duration,
    ) {
        for launch in launches.into_iter().filter(|launch| !launch.is_empty()) {
            if let Some(number) = columns {
                let converting = self.columns.use_at(number, self.launches.len());
                for of in self.launches.get_mut(converting).unwrap_or_default() {
                    of.when.add_alternative(when);
                }
            }
            self.push_launch(launch, LaunchCondition(vec![when.to_vec()]), at, columns, time);
        }
    }

    fn push_launch(
        &mut self,
        launch: KernelLaunch,
        when: LaunchCondition,
        (dst, srcs): Places,
        columns: Option<usize>,
        time: Duration,
    ) {
        let columns = columns.map(|number| number as u64);
        self.launches.push(PlannedLaunch {
            launch,
            when,
            dst,
            srcs,
            columns,
            result_columns: None,
            columns_read_later: false,
            time,
        });
    }

    /// The number of the converted columns of a product, whose operands are at `at`, if it needs any. `sources` are those of the columns and
    /// of their table; `time` is that of a launch.
    fn convert(
        &mut self,
        (source, tabulated): (Option<Placed>, Option<Placed>),
        conversion: Option<ColumnConversion>,
        at: Places,
        time: Duration,
    ) -> Option<usize> {
        let (number, from) = self.columns.add(source?, tabulated, conversion?, self.launches.len());
        match from {
            ColumnSource::Shared => {}
            ColumnSource::Replace(index, launch, otherwise) => {
                if let Some(producer) = self.launches.get_mut(index) {
                    (producer.launch, producer.result_columns) = (launch, Some(number as u64));
                }
                if let Some((condition, launch)) = otherwise {
                    self.push(vec![launch], &[condition], at, Some(number), Duration::ZERO);
                }
            }
            // They run if a launch that reads the columns does.
            ColumnSource::Launches(table, launch) => {
                for launch in table.into_iter().chain([launch]) {
                    self.push_launch(launch, LaunchCondition::default(), at, Some(number), time);
                }
            }
        }
        Some(number)
    }

    /// Adds the spans of weights that launches can read packed; returns their numbers. `None` if one of them cannot be packed.
    fn add_packable(&mut self, packed: &PackedLaunches, operands: &[Option<Placed>]) -> Option<Vec<usize>> {
        let add = |(source, span): &(usize, _)| {
            let place = operands.get(*source)?.as_ref()?.place;
            self.layout.add_packable((place.slot as usize, place.offset as u64), span, packed.packs)
        };
        packed.weights.iter().map(add).collect()
    }

    /// Records that nodes write their results.
    fn overwrite(&mut self, nodes: &[usize]) -> Result<(), DeviceError> {
        for node in nodes.iter().filter_map(|&index| self.graph.nodes().get(index)) {
            for id in written(node) {
                let result = self.placed(id)?;
                self.columns.overwrite(&result);
            }
        }
        Ok(())
    }

    fn placed(&self, id: TensorId) -> Result<Placed, DeviceError> {
        let tensor = self.graph.tensor(id).ok_or(DeviceError::Misuse("a node of another graph"))?;
        let place = tensor.place.ok_or(DeviceError::Misuse("a node without memory"))?;
        Ok(Placed { place, desc: tensor.desc })
    }

    fn finish(mut self) -> ProgramPlan {
        let may_be_packed = self.layout.finish();
        let never = |span: &usize| may_be_packed.get(*span).copied().flatten().is_none();
        let alive = self.columns.alive_behind(self.launches.len());
        for (launch, alive) in self.launches.iter_mut().zip(alive) {
            launch.columns_read_later = alive;
        }
        // What runs instead of a launch comes behind it, and takes its time.
        let mut time = Duration::ZERO;
        self.launches.retain_mut(|launch| {
            launch.time += std::mem::take(&mut time);
            let runs = launch.when.decide(never) && !launch.launch.is_empty();
            if !runs {
                time = launch.time;
            }
            runs
        });
        // In scratch memory: what one node needs for itself, converted columns, and private results.
        let (offsets, end) = self.columns.place(self.scratch);
        let end = end.max(self.scratch).next_multiple_of(ALIGNMENT);
        let (private_slot, private) = self.private;
        for launch in &mut self.launches {
            for place in launch.srcs.iter_mut().flatten().chain([&mut launch.dst]) {
                if place.slot == private_slot {
                    place.offset += end as usize;
                }
            }
            let offset = |number: u64| offsets.get(number as usize).copied();
            launch.columns = launch.columns.and_then(offset);
            launch.result_columns = launch.result_columns.and_then(offset);
        }
        ProgramPlan {
            launches: self.launches,
            layout: self.layout,
            packs: may_be_packed.into_iter().map(|packs| packs == Some(true)).collect(),
            scratch: end + private,
        }
    }
}

#[cfg(test)]
mod tests;

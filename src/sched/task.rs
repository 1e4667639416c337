//! Task: the input of the scheduler. A graph, the storage class of each of its slots, pinned nodes and outputs.

use crate::device::Region;
use crate::graph::{BuildError, Builder, FOREIGN, Graph, Node, Tensor, TensorId, sources};
use crate::ops::{Op, OutputSpec};
use crate::tensor::{DIMS, DType, Shape, TensorDesc};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// A graph to run over several devices. Each tensor that is not a view has its own slot.
#[derive(Clone, Debug)]
pub struct Task {
    graph: Arc<Graph>,
    /// By slot: its storage class.
    storage: Vec<Storage>,
    /// By tensor: its name, or an empty string.
    names: Vec<String>,
    /// By node: the device that it is pinned to.
    pins: BTreeMap<usize, usize>,
    /// By slot: whether it can be read after a run.
    outputs: Vec<bool>,
    /// By number of a collective group, which collective nodes name: the device of each rank.
    collective_groups: Vec<Vec<usize>>,
}

/// Storage class of a slot. Devices are indices in the scheduler's list.
#[derive(Clone, Debug)]
pub enum Storage {
    /// Persistent memory on a device: a weight or a cache.
    Stored {
        /// The device.
        device: usize,
        /// The memory; `None` in a task that is only planned.
        region: Option<Region>,
    },
    /// Written by the host before each run.
    Input,
    /// Written by nodes; the scheduler allocates it.
    Computed,
}

impl Task {
    /// The graph. Its slots are memories, see [`Task::storage`].
    pub fn graph(&self) -> &Arc<Graph> {
        &self.graph
    }

    /// By slot of the graph: its storage class.
    pub fn storage(&self) -> &[Storage] {
        &self.storage
    }

    /// A tensor's name, or an empty string.
    pub fn name(&self, id: TensorId) -> &str {
        self.names.get(id.index()).map_or("", String::as_str)
    }

    /// A copy of the task without pins, with all stored tensors on device 0 in `regions`, by slot.
    pub(crate) fn moved_to_device_0(&self, regions: &BTreeMap<u32, Region>) -> Task {
        let mut copy = Task { pins: BTreeMap::new(), ..self.clone() };
        for (slot, storage) in (0..).zip(&mut copy.storage) {
            if let Storage::Stored { .. } = storage {
                *storage = Storage::Stored { device: 0, region: regions.get(&slot).cloned() };
            }
        }
        copy
    }

    /// By number of a collective group: the device of each rank. If there are any, `Scheduler::run` executes no program on the
    /// calling thread, because the programs of all ranks must be submitted before one of them waits.
    pub(crate) fn collective_groups(&self) -> &[Vec<usize>] {
        &self.collective_groups
    }

    /// The device that a node is pinned to.
    pub fn pin(&self, node: usize) -> Option<usize> {
        self.pins.get(&node).copied()
    }

    /// Whether a slot was declared with [`TaskBuilder::output`].
    pub fn is_output(&self, slot: u32) -> bool {
        self.outputs.get(slot as usize).copied().unwrap_or(false)
    }

    /// The tensor that a slot was made for.
    pub fn slot_tensor(&self, slot: u32) -> Option<TensorId> {
        let owns = |t: &Tensor| t.view_of.is_none() && t.place.is_some_and(|p| p.slot == slot && p.offset == 0);
        // Slots have the order of their tensors and at most one slot belongs to each tensor, so tensor `i` has at most slot
        // `i`.
        let tensors = self.graph.tensors();
        let start = (slot as usize).min(tensors.len());
        (start..tensors.len()).find(|&i| owns(&tensors[i])).map(|i| self.graph.id(i))
    }

    /// The name of the tensor that a slot was made for, or an empty string.
    pub(crate) fn slot_name(&self, slot: u32) -> &str {
        self.slot_tensor(slot).map_or("", |id| self.name(id))
    }

    /// The slot and the bytes of it that a tensor spans.
    pub fn span(&self, id: TensorId) -> Option<(u32, Range<usize>)> {
        let tensor = self.graph.tensor(id)?;
        let place = tensor.place?;
        Some((place.slot, place.offset..place.offset + tensor.desc.extent()))
    }

    /// The sources that a node reads: tensor, slot and bytes. Sources that only name the destination's memory are left out.
    pub(crate) fn reads<'a>(&'a self, node: &'a Node) -> impl Iterator<Item = (TensorId, u32, Range<usize>)> + 'a {
        let sources = node.srcs.iter().enumerate().filter_map(|(i, id)| Some((i, (*id)?)));
        let read = sources.filter(|&(i, _)| !node.op.writes_onto(i));
        read.filter_map(|(_, id)| self.span(id).map(|(slot, range)| (id, slot, range)))
            .filter(|(_, _, range)| !range.is_empty())
    }

    /// The slot and the bytes that a node writes.
    pub(crate) fn write_range(&self, node: &Node) -> Option<(u32, Range<usize>)> {
        self.span(node.dst)
    }
}

/// Builds a [`Task`].
#[derive(Debug, Default)]
pub struct TaskBuilder {
    inner: Builder,
    storage: Vec<Storage>,
    names: Vec<String>,
    pins: BTreeMap<usize, usize>,
    outputs: Vec<TensorId>,
    collective_groups: Vec<Vec<usize>>,
    nodes: usize,
}

impl TaskBuilder {
    /// An empty task.
    pub fn new() -> TaskBuilder {
        TaskBuilder { inner: Builder::with_separate_slots(), ..TaskBuilder::default() }
    }

    /// Adds a tensor that persists on a device from run to run: a weight or a cache. Without a region the task can be planned,
    /// but not run.
    ///
    /// # Errors
    /// [`BuildError::Tensor`] when the region is smaller than the tensor.
    pub fn stored(
        &mut self,
        name: impl Into<String>,
        desc: TensorDesc,
        device: usize,
        region: Option<Region>,
    ) -> Result<TensorId, BuildError> {
        if region.as_ref().is_some_and(|region| region.bytes() < desc.extent() as u64) {
            return Err(BuildError::Tensor("a stored tensor is larger than its region"));
        }
        self.add_leaf(name, desc, Storage::Stored { device, region })
    }

    /// Adds a contiguous tensor that the host writes before each run. `ne` has the fastest dimension first.
    ///
    /// # Errors
    /// [`BuildError::Desc`] when type and shape form no valid tensor.
    pub fn input(
        &mut self,
        name: impl Into<String>,
        dtype: DType,
        ne: impl Into<Shape>,
    ) -> Result<TensorId, BuildError> {
        self.add_leaf(name, TensorDesc::contiguous(dtype, ne)?, Storage::Input)
    }

    /// A tensor added so far.
    pub fn tensor(&self, id: TensorId) -> Option<&Tensor> {
        self.inner.tensor(id)
    }

    /// Type, shape and strides of a tensor added so far.
    ///
    /// # Errors
    /// [`BuildError::Tensor`] for a tensor of another task.
    pub fn desc(&self, id: TensorId) -> Result<TensorDesc, BuildError> {
        self.tensor(id).map(|t| t.desc).ok_or(FOREIGN)
    }

    /// Adds a node. The type and shape of its destination follow from its sources. Returns the destination.
    ///
    /// # Errors
    /// [`BuildError::Node`] when sources or parameters do not fit the op; [`BuildError::Tensor`] for a tensor of another task.
    pub fn node(
        &mut self,
        op: impl Into<Op>,
        srcs: &[impl Into<Option<TensorId>> + Copy],
    ) -> Result<TensorId, BuildError> {
        let (op, srcs) = (op.into(), &*sources(srcs));
        self.check_sources(&op, srcs, None)?;
        let dst = self.inner.node(op, srcs).map_err(|e| self.with_names(srcs, e))?;
        Ok(self.count_node(dst))
    }

    /// Adds a node with a contiguous destination of the given type and shape. Returns the destination.
    ///
    /// # Errors
    /// As [`TaskBuilder::node`].
    pub fn node_as(
        &mut self,
        op: impl Into<Op>,
        srcs: &[impl Into<Option<TensorId>> + Copy],
        out: OutputSpec,
    ) -> Result<TensorId, BuildError> {
        let (op, srcs) = (op.into(), &*sources(srcs));
        self.check_sources(&op, srcs, None)?;
        let dst = self.inner.node_with_output(op, srcs, out).map_err(|e| self.with_names(srcs, e))?;
        Ok(self.count_node(dst))
    }

    /// Adds a node that writes into an existing tensor: rows of a cache, or a view of a computed tensor. Returns a view of
    /// `dst`.
    ///
    /// # Errors
    /// As [`TaskBuilder::node`], and [`BuildError::Tensor`] when `dst` is an input.
    pub fn node_onto(
        &mut self,
        op: impl Into<Op>,
        srcs: &[impl Into<Option<TensorId>> + Copy],
        dst: TensorId,
    ) -> Result<TensorId, BuildError> {
        self.desc(dst)?;
        let slot = self.tensor(dst).and_then(|t| t.place).map(|p| p.slot as usize);
        if slot.and_then(|slot| self.storage.get(slot)).is_none_or(|s| matches!(s, Storage::Input)) {
            return Err(BuildError::Tensor("a node writes into an input, which only the host may write"));
        }
        let (op, srcs) = (op.into(), &*sources(srcs));
        self.check_sources(&op, srcs, slot)?;
        let own = self.inner.node_into_view(op, srcs, dst).map_err(|e| self.with_names(srcs, e))?;
        Ok(self.count_node(own))
    }

    /// Adds a view of a tensor's memory, `offset` bytes from its first byte.
    ///
    /// # Errors
    /// [`BuildError::Tensor`] for a tensor of another task, an overflowing offset, or one in the middle of a block;
    /// [`BuildError::View`] for a view that leaves the tensor's memory.
    pub fn view(&mut self, of: TensorId, desc: TensorDesc, offset: usize) -> Result<TensorId, BuildError> {
        self.inner.view(of, desc, offset)
    }

    /// Adds a view of a contiguous tensor in another shape with the same number of elements.
    ///
    /// # Errors
    /// [`BuildError::Desc`] when the number of elements differs, or the tensor is not contiguous.
    pub fn reshape(&mut self, of: TensorId, ne: impl Into<Shape>) -> Result<TensorId, BuildError> {
        let desc = self.desc(of)?.reshaped(ne)?;
        self.view(of, desc, 0)
    }

    /// Adds a view with permuted dimensions: dimension `i` of the tensor becomes dimension `axes[i]` of the view, as in
    /// `ggml_permute`.
    ///
    /// # Errors
    /// [`BuildError::Desc`] when `axes` is not a permutation, or moves dimension 0 of a type with blocks.
    pub fn permute(&mut self, of: TensorId, axes: [usize; DIMS]) -> Result<TensorId, BuildError> {
        let desc = self.desc(of)?.permuted(axes)?;
        self.view(of, desc, 0)
    }

    /// Names a tensor, for error messages, printed plans and observers. A tensor of another task gets no name.
    pub fn name(&mut self, id: TensorId, name: impl Into<String>) {
        if self.tensor(id).is_none() {
            return;
        }
        let at = id.index();
        if self.names.len() <= at {
            self.names.resize(at + 1, String::new());
        }
        self.names[at] = name.into();
    }

    /// Declares a tensor as an output: it can be read after a run, and nothing overwrites its memory until the next run.
    ///
    /// # Errors
    /// [`BuildError::Tensor`] for a tensor of another task or an input.
    pub fn output(&mut self, id: TensorId) -> Result<(), BuildError> {
        self.desc(id)?;
        let slot = self.tensor(id).and_then(|t| t.place).map_or(usize::MAX, |p| p.slot as usize);
        if matches!(self.storage.get(slot), Some(Storage::Input)) {
            return Err(BuildError::Tensor("an input cannot be an output: the caller already has its bytes"));
        }
        self.outputs.push(id);
        Ok(())
    }

    /// Pins the node that was added last to a device.
    ///
    /// # Errors
    /// [`BuildError::Tensor`] when the task has no node yet.
    pub fn pin(&mut self, device: usize) -> Result<(), BuildError> {
        let last = self.nodes.checked_sub(1).ok_or(BuildError::Tensor("a pin before the first node"))?;
        self.pins.insert(last, device);
        Ok(())
    }

    /// Declares a collective group and returns its number, for collective nodes. `devices` has the device of each rank.
    pub(crate) fn add_collective_group(&mut self, devices: Vec<usize>) -> u32 {
        self.collective_groups.push(devices);
        (self.collective_groups.len() - 1) as u32
    }

    /// Finishes the task.
    ///
    /// # Errors
    /// [`BuildError::Tensor`] when two stored tensors share memory.
    pub fn build(self) -> Result<Task, BuildError> {
        check_disjoint(&self.storage)?;
        let mut outputs = vec![false; self.storage.len()];
        let mut seen = Vec::new();
        for id in self.outputs {
            if let Some(place) = self.inner.tensor(id).and_then(|t| t.place) {
                outputs[place.slot as usize] = true;
                seen.push(id);
            }
        }
        let graph = self.inner.build_with_use_counts(&seen);
        Ok(Task {
            graph: Arc::new(graph),
            storage: self.storage,
            names: self.names,
            pins: self.pins,
            outputs,
            collective_groups: self.collective_groups,
        })
    }

    /// Checks that the sources are tensors of this task, and that a source which only names the memory to write is in the
    /// destination's slot.
    fn check_sources(&self, op: &Op, srcs: &[Option<TensorId>], slot: Option<usize>) -> Result<(), BuildError> {
        for &id in srcs.iter().flatten() {
            self.desc(id)?;
        }
        if let Op::Collective(collective) = op
            && collective.group as usize >= self.collective_groups.len()
        {
            return Err(BuildError::Tensor("a collective node of a group that the task does not have"));
        }
        if (0..srcs.len()).any(|i| op.updates(i)) {
            return Err(BuildError::Tensor("the op changes a source, and a plan has one destination for each node"));
        }
        let of = |id: TensorId| self.tensor(id).and_then(|t| t.place).map(|p| p.slot as usize);
        let named = srcs.iter().enumerate().filter(|&(i, _)| op.writes_onto(i)).filter_map(|(_, id)| *id);
        let other = named.into_iter().any(|id| of(id) != slot || slot.is_none());
        let error = BuildError::Tensor("a source names memory to write that is not the destination's: use node_onto");
        if other { Err(error) } else { Ok(()) }
    }

    /// The error with the names of the sources.
    fn with_names(&self, srcs: &[Option<TensorId>], error: BuildError) -> BuildError {
        let BuildError::Node(mut node) = error else { return error };
        for (text, id) in node.sources.iter_mut().zip(srcs) {
            if let Some(name) = id.and_then(|id| self.names.get(id.index())).filter(|name| !name.is_empty()) {
                *text = format!("{name:?}");
            }
        }
        BuildError::Node(node)
    }

    fn add_leaf(
        &mut self,
        name: impl Into<String>,
        desc: TensorDesc,
        storage: Storage,
    ) -> Result<TensorId, BuildError> {
        let id = self.inner.leaf_with_desc(desc)?;
        self.storage.push(storage);
        self.name(id, name);
        Ok(id)
    }

    /// Counts a node that was just added, and registers the slot of its destination if that is new.
    fn count_node(&mut self, dst: TensorId) -> TensorId {
        self.nodes += 1;
        let slot = self.tensor(dst).and_then(|t| t.place).map_or(0, |p| p.slot as usize);
        if slot == self.storage.len() {
            self.storage.push(Storage::Computed);
        }
        dst
    }
}

/// Checks that no two stored tensors share memory: the scheduler orders accesses by slot, so it would miss the hazard.
fn check_disjoint(storage: &[Storage]) -> Result<(), BuildError> {
    let mut regions: Vec<_> = storage
        .iter()
        .filter_map(|s| match s {
            Storage::Stored { region: Some(region), .. } if region.bytes() > 0 => Some(region),
            _ => None,
        })
        .map(|r| (r.buffer().id(), r.offset(), r.offset() + r.bytes()))
        .collect();
    regions.sort_unstable();
    if regions.windows(2).any(|w| w[0].0 == w[1].0 && w[0].2 > w[1].1) {
        return Err(BuildError::Tensor("two stored tensors share memory: make one of them a view of the other"));
    }
    Ok(())
}

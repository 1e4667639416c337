//! Graph builder for graphs made in process: adds leaves, views and nodes, and assigns each tensor its memory.

use super::validate::{self, GraphError};
use super::{Graph, GraphNumber, Node, SlotOffset, Tensor, TensorId};
use crate::ops::{MAX_SRC, Op, OpCode, OutputSpec, Sources};
use crate::tensor::{DType, DescError, Shape, TensorDesc};
use thiserror::Error;

/// Builds a graph. By default all tensors are in slot 0, one after another, each at a multiple of [`Builder::ALIGN`]; with
/// [`Builder::with_separate_slots`], each tensor has its own slot.
///
/// A call that fails changes nothing.
#[derive(Debug)]
pub struct Builder {
    graph: Graph,
    /// By index of a tensor: whether a node reads it.
    is_read: Vec<bool>,
    /// Whether each tensor that is not a view has its own slot.
    separate_slots: bool,
}

impl Default for Builder {
    fn default() -> Builder {
        Builder { graph: Graph::new(GraphNumber::next()), is_read: Vec::new(), separate_slots: false }
    }
}

/// A node that a builder refuses.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeError {
    /// The index that the node would have.
    pub index: usize,
    /// The op.
    pub op: OpCode,
    /// Names of the sources: as given to [`TaskBuilder::name`](crate::sched::TaskBuilder::name), or `tensor 3`, or `absent`.
    pub sources: Vec<String>,
    /// The violated rule.
    pub rule: GraphError,
}

impl std::fmt::Display for NodeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "node {}, {} of {}: {}", self.index, self.op, self.sources.join(", "), self.rule)
    }
}

impl std::error::Error for NodeError {}

/// The caller of the builder made an error.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// An invalid shape: see [`DescError`].
    #[error(transparent)]
    Desc(#[from] DescError),
    /// A node with wrong sources or parameters.
    #[error(transparent)]
    Node(#[from] Box<NodeError>),
    /// A view that reaches beyond the memory of its tensor.
    #[error("a view of {extent} bytes from byte {offset} on of a memory of {size}")]
    View {
        /// Bytes of the view.
        extent: usize,
        /// Its first byte in the memory of the tensor that it shows.
        offset: usize,
        /// Bytes of this memory.
        size: usize,
    },
    /// Another mistake of the call, such as a tensor of another graph.
    #[error("{0}")]
    Tensor(&'static str),
}

impl BuildError {
    /// The rule that a node violates.
    pub fn rule(&self) -> Option<&GraphError> {
        match self {
            BuildError::Node(node) => Some(&node.rule),
            _ => None,
        }
    }
}

/// Whether a view that starts at this offset of a tensor of the same type starts at one of its blocks.
fn starts_at_block(of: &TensorDesc, offset: usize) -> bool {
    let mut strides = of.nb();
    strides.sort_unstable_by(|a, b| b.cmp(a));
    strides.into_iter().filter(|&stride| stride > 0).fold(offset, |rest, stride| rest % stride) == 0
}

/// The error for a tensor of another graph or task.
pub(crate) const FOREIGN: BuildError = BuildError::Tensor("a tensor of another graph");

/// The tensor that a new node writes.
enum Destination {
    /// A new, contiguous tensor with the type and shape that the op infers.
    Inferred,
    /// A new, contiguous tensor.
    New(OutputSpec),
    Existing(TensorId),
    /// A new view of all of an existing tensor.
    ViewOf(TensorId),
}

/// The sources of a node, as ids of which some may be absent.
pub(crate) fn sources(srcs: &[impl Into<Option<TensorId>> + Copy]) -> Vec<Option<TensorId>> {
    srcs.iter().map(|&source| source.into()).collect()
}

impl Builder {
    /// Alignment in bytes of each tensor. Also the minimum gap between two tensors, where tests put sentinels that detect
    /// out-of-bounds writes.
    pub const ALIGN: usize = 64;

    /// An empty graph.
    pub fn new() -> Builder {
        Builder::default()
    }

    /// An empty graph in which each tensor that is not a view gets its own slot of exactly its size, so that the caller can
    /// bind each tensor to different memory.
    pub fn with_separate_slots() -> Builder {
        Builder { separate_slots: true, ..Builder::default() }
    }

    /// A tensor that was already added.
    pub fn tensor(&self, id: TensorId) -> Option<&Tensor> {
        self.graph.own(id)
    }

    /// Adds a leaf, i.e. a tensor that no node computes: a weight, an input or a cache. It is contiguous.
    ///
    /// # Errors
    /// [`BuildError::Desc`] for an invalid shape.
    pub fn leaf(&mut self, dtype: DType, ne: impl Into<Shape>) -> Result<TensorId, BuildError> {
        let desc = TensorDesc::contiguous(dtype, ne)?;
        self.leaf_with_desc(desc)
    }

    /// As [`Builder::leaf`], with the given strides.
    ///
    /// # Errors
    /// [`BuildError::Tensor`] if the graph's memory exceeds the address space.
    pub fn leaf_with_desc(&mut self, desc: TensorDesc) -> Result<TensorId, BuildError> {
        let place = self.place(desc.extent())?;
        Ok(self.push(desc, place, None))
    }

    /// Adds a view: another description of `of`'s memory, starting `offset` bytes from its first byte.
    ///
    /// # Errors
    /// [`BuildError::Tensor`] for a tensor of another graph, an overflowing offset, or one in the middle of a block;
    /// [`BuildError::View`] for a view that leaves the memory.
    pub fn view(&mut self, of: TensorId, desc: TensorDesc, offset: usize) -> Result<TensorId, BuildError> {
        let parent = self.graph.own(of).ok_or(FOREIGN)?;
        let mut place = parent.place.ok_or(BuildError::Tensor("a view of a tensor without memory"))?;
        place.offset = place.offset.checked_add(offset).ok_or(BuildError::Tensor("a view's offset overflows"))?;
        let dtype = desc.dtype();
        if dtype.is_block() && dtype == parent.desc.dtype() && !starts_at_block(&parent.desc, offset) {
            return Err(BuildError::Tensor("a view starts in the middle of a block"));
        }
        let (extent, size) = (desc.extent(), self.graph.slots[place.slot as usize]);
        if place.offset.checked_add(extent).is_none_or(|end| end > size) {
            return Err(BuildError::View { extent, offset: place.offset, size });
        }
        Ok(self.push(desc, place, Some(of)))
    }

    /// Declares that exactly `uses` ops, including views, read a tensor, and that it is not read after the run. A fused kernel
    /// may then skip its write.
    ///
    /// # Errors
    /// [`BuildError::Tensor`] for a tensor of another graph.
    pub fn set_use_count(&mut self, id: TensorId, uses: u32) -> Result<(), BuildError> {
        self.graph.own(id).ok_or(FOREIGN)?;
        let tensor = &mut self.graph.tensors[id.index()];
        tensor.use_count = Some(uses);
        Ok(())
    }

    /// Adds a node with an inferred, contiguous destination; returns the destination. `srcs` are ids (`&[w, x]`), or options if some
    /// are absent (`&[Some(x), None, Some(factors)]`), or [`&NO_SOURCES`](super::NO_SOURCES).
    ///
    /// # Errors
    /// [`BuildError::Node`] for sources or parameters that are invalid for the op.
    pub fn node(
        &mut self,
        op: impl Into<Op>,
        srcs: &[impl Into<Option<TensorId>> + Copy],
    ) -> Result<TensorId, BuildError> {
        self.add(op.into(), &sources(srcs), Destination::Inferred)
    }

    /// Adds a node with a contiguous destination of the given type and shape; returns the destination.
    ///
    /// # Errors
    /// [`BuildError::Desc`] for an invalid shape; [`BuildError::Node`] for sources, parameters or a destination that are invalid
    /// for the op.
    pub fn node_with_output(
        &mut self,
        op: impl Into<Op>,
        srcs: &[impl Into<Option<TensorId>> + Copy],
        out: OutputSpec,
    ) -> Result<TensorId, BuildError> {
        self.add(op.into(), &sources(srcs), Destination::New(out))
    }

    /// Adds a node that writes an existing tensor: in place, or into a view.
    ///
    /// # Errors
    /// [`BuildError::Node`] for sources, parameters or a destination that are invalid for the op; [`BuildError::Tensor`] for a
    /// tensor of another graph.
    pub fn node_into(
        &mut self,
        op: impl Into<Op>,
        srcs: &[impl Into<Option<TensorId>> + Copy],
        dst: TensorId,
    ) -> Result<TensorId, BuildError> {
        self.add(op.into(), &sources(srcs), Destination::Existing(dst))
    }

    /// As [`Builder::node_into`], with a view of `dst` as the destination, which it returns: each node has its own destination.
    pub(crate) fn node_into_view(
        &mut self,
        op: Op,
        srcs: &[Option<TensorId>],
        dst: TensorId,
    ) -> Result<TensorId, BuildError> {
        self.add(op, srcs, Destination::ViewOf(dst))
    }

    /// Adds a node. A failure removes the tensor and the memory that were added for its destination.
    fn add(&mut self, op: Op, srcs: &[Option<TensorId>], to: Destination) -> Result<TensorId, BuildError> {
        self.check_call(&op, srcs)?;
        let (tensors, slots) = (self.graph.tensors.len(), self.graph.slots.len());
        let last_slot = self.graph.slots.last().copied();
        let added = self.destination(&op, srcs, to).and_then(|dst| self.add_checked(op, srcs, dst));
        if added.is_err() {
            self.graph.tensors.truncate(tensors);
            self.graph.slots.truncate(slots);
            // If there is a single slot, it has become longer.
            if let Some((last, before)) = self.graph.slots.last_mut().zip(last_slot) {
                *last = before;
            }
        }
        added
    }

    /// The tensor that a node writes.
    fn destination(&mut self, op: &Op, srcs: &[Option<TensorId>], to: Destination) -> Result<TensorId, BuildError> {
        match to {
            Destination::Existing(dst) => self.graph.own(dst).map(|_| dst).ok_or(FOREIGN),
            Destination::ViewOf(dst) => {
                let desc = self.graph.own(dst).ok_or(FOREIGN)?.desc;
                self.view(dst, desc, 0)
            }
            Destination::New(out) => self.leaf(out.dtype, out.ne),
            Destination::Inferred => {
                let own = |id: Option<TensorId>| id.and_then(|id| self.graph.own(id));
                let descs = srcs.iter().map(|&id| own(id).map(|tensor| &tensor.desc)).collect::<Vec<_>>();
                let out = op.infer(&Sources::new(op.code(), &descs));
                let out = out.map_err(|e| self.refuse(op, srcs, e.into()))?;
                self.leaf(out.dtype, out.ne)
            }
        }
    }

    /// Adds a node whose call and destination were checked, if it obeys the rules of its op.
    fn add_checked(&mut self, op: Op, srcs: &[Option<TensorId>], dst: TensorId) -> Result<TensorId, BuildError> {
        let mut list = [None; MAX_SRC];
        // Later ones are absent: an op reads fewer.
        list.iter_mut().zip(srcs).for_each(|(to, &source)| *to = source);
        let node = Node { op, dst, srcs: list };
        let checked = if self.is_read[dst.index()] {
            Err(GraphError::WrittenAfterRead(node.op.code()))
        } else {
            validate::check_node(&self.graph, &node, |source| source == dst)
        };
        checked.map_err(|rule| self.refuse(&node.op, srcs, rule))?;
        srcs.iter().flatten().for_each(|source| self.is_read[source.index()] = true);
        // The destination has new values after the node, so it is no longer a view of the values of another tensor, even if it
        // shares that tensor's memory.
        self.graph.tensors[dst.index()].view_of = None;
        self.graph.nodes.push(node);
        Ok(dst)
    }

    /// The finished graph. It obeys the rules of a graph from a peer, which are checked when a node is added.
    pub fn build(self) -> Graph {
        debug_assert_eq!(validate::check(&self.graph), Ok(()));
        self.graph
    }

    /// As [`Builder::build`], and derives the use counts from the nodes. Valid only if no other graph reads the tensors.
    /// `outputs`, which are read after the run, and tensors that no node computes get no use count.
    pub(crate) fn build_with_use_counts(mut self, outputs: &[TensorId]) -> Graph {
        let tensors = &mut self.graph.tensors;
        let mut uses = vec![0u32; tensors.len()];
        let mut computed = vec![false; tensors.len()];
        for node in &self.graph.nodes {
            node.srcs.iter().flatten().for_each(|id| uses[id.index()] += 1);
            computed[node.dst.index()] = true;
        }
        // In reverse, because a view comes after the tensor that it shows. A view without readers does not count as a reader.
        for (at, tensor) in tensors.iter().enumerate().rev() {
            if let Some(of) = tensor.view_of.filter(|_| uses[at] > 0) {
                uses[of.index()] += 1;
            }
        }
        outputs.iter().for_each(|id| uses[id.index()] = 0);
        for at in 0..tensors.len() {
            // Skip a view in between if this view is its only reader.
            if let Some(of) = tensors[at].view_of
                && let Some(root) = tensors[of.index()].view_of
                && uses[of.index()] == 1
            {
                tensors[at].view_of = Some(root);
            }
            tensors[at].use_count = Some(uses[at]).filter(|&n| n > 0 && computed[at]);
        }
        self.build()
    }

    fn place(&mut self, bytes: usize) -> Result<SlotOffset, BuildError> {
        let overflow = BuildError::Tensor("the graph's memory overflows");
        if self.separate_slots {
            let slot = u32::try_from(self.graph.slots.len()).map_err(|_| overflow)?;
            self.graph.slots.push(bytes);
            return Ok(SlotOffset { slot, offset: 0 });
        }
        let offset = self.graph.slots.first().copied().unwrap_or(0);
        let end = bytes.checked_next_multiple_of(Self::ALIGN).and_then(|b| b.checked_add(offset + Self::ALIGN));
        self.graph.slots = vec![end.filter(|&e| e < 1 << 62).ok_or(overflow)?];
        Ok(SlotOffset { slot: 0, offset })
    }

    fn push(&mut self, desc: TensorDesc, place: SlotOffset, view_of: Option<TensorId>) -> TensorId {
        let id = self.graph.next_id();
        self.graph.tensors.push(Tensor { desc, place: Some(place), use_count: None, view_of });
        self.is_read.truncate(id.index());
        self.is_read.push(false);
        id
    }

    /// Checks what a node's call has: sources of this graph, as many as the op reads at most, and parameters that a peer may send.
    fn check_call(&self, op: &Op, srcs: &[Option<TensorId>]) -> Result<(), BuildError> {
        if srcs.iter().flatten().any(|&id| self.graph.own(id).is_none()) {
            return Err(FOREIGN);
        }
        let (code, most) = (op.code(), op.code().max_sources());
        if let Some(extra) = srcs.iter().skip(most).position(Option::is_some) {
            return Err(self.refuse(op, srcs, GraphError::ExtraSource { op: code, index: most + extra, most }));
        }
        match Op::decode(code, &op.encode()) {
            Err(e) => Err(self.refuse(op, srcs, e.into())),
            Ok(_) => Ok(()),
        }
    }

    /// The error for a node that violates `rule`.
    fn refuse(&self, op: &Op, srcs: &[Option<TensorId>], rule: GraphError) -> BuildError {
        let name = |id: Option<TensorId>| id.map_or("absent".to_owned(), |id| format!("tensor {}", id.index()));
        let sources = srcs.iter().map(|&id| name(id)).collect();
        BuildError::Node(Box::new(NodeError { index: self.graph.nodes.len(), op: op.code(), sources, rule }))
    }
}

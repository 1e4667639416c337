//! Graph builder for graphs made in process: adds leaves, views and nodes, and assigns each tensor its memory.

use super::validate::{self, GraphError};
use super::{Graph, Node, SlotOffset, Tensor, TensorId};
use crate::ops::{MAX_SRC, Op, OutputSpec, ShapeError, Sources};
use crate::tensor::{DIMS, DType, DescError, TensorDesc};
use thiserror::Error;

/// Builds a graph. By default all tensors are in slot 0, one after another, each at a multiple of [`Builder::ALIGN`]; with
/// [`Builder::with_separate_slots`], each tensor has its own slot.
#[derive(Debug, Default)]
pub struct Builder {
    graph: Graph,
    /// Bytes of slot 0 that are assigned so far.
    end: usize,
    /// Whether each tensor that is not a view has its own slot.
    separate_slots: bool,
}

/// The caller of the builder made an error.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum BuildError {
    /// An invalid shape: see [`DescError`].
    #[error(transparent)]
    Desc(#[from] DescError),
    /// Sources that are invalid for the op.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// An unknown tensor id, an offset that overflows, or too many sources.
    #[error("{0}")]
    Tensor(&'static str),
    /// The finished graph violates a rule of [`validate::check`].
    #[error(transparent)]
    Graph(#[from] GraphError),
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
        self.graph.tensor(id)
    }

    /// Adds a leaf, i.e. a tensor that no node computes: a weight, an input or a cache. It is contiguous.
    ///
    /// # Errors
    /// [`BuildError::Desc`] for an invalid shape.
    pub fn leaf(&mut self, dtype: DType, ne: [usize; DIMS]) -> Result<TensorId, BuildError> {
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
    /// [`BuildError::Tensor`] for an unknown parent or an overflowing offset. Extents are checked by [`Builder::build`].
    pub fn view(&mut self, of: TensorId, desc: TensorDesc, offset: usize) -> Result<TensorId, BuildError> {
        let parent = self.graph.tensor(of).ok_or(BuildError::Tensor("a view of an unknown tensor"))?;
        let mut place = parent.place.ok_or(BuildError::Tensor("a view of a tensor without memory"))?;
        place.offset = place.offset.checked_add(offset).ok_or(BuildError::Tensor("a view's offset overflows"))?;
        Ok(self.push(desc, place, Some(of)))
    }

    /// Declares that exactly `uses` ops, including views, read a tensor, and that it is not read after the run. A fused kernel
    /// may then skip its write.
    ///
    /// # Errors
    /// [`BuildError::Tensor`] for an unknown tensor.
    pub fn set_use_count(&mut self, id: TensorId, uses: u32) -> Result<(), BuildError> {
        let tensor = self.graph.tensors.get_mut(id.0 as usize).ok_or(BuildError::Tensor("an unknown tensor"))?;
        tensor.use_count = Some(uses);
        Ok(())
    }

    /// Adds a node with an inferred, contiguous destination; returns the destination.
    ///
    /// # Errors
    /// [`BuildError::Shape`] for sources that are invalid for the op.
    pub fn node(&mut self, op: impl Into<Op>, srcs: &[Option<TensorId>]) -> Result<TensorId, BuildError> {
        let op = op.into();
        let descs = srcs.iter().map(|id| id.and_then(|id| self.graph.tensor(id)).map(|t| &t.desc)).collect::<Vec<_>>();
        let out = op.infer(&Sources::new(op.code(), &descs))?;
        self.node_with_output(op, srcs, out)
    }

    /// Adds a node with a contiguous destination of the given type and shape; returns the destination.
    ///
    /// # Errors
    /// [`BuildError::Desc`] for an invalid shape.
    pub fn node_with_output(
        &mut self,
        op: impl Into<Op>,
        srcs: &[Option<TensorId>],
        out: OutputSpec,
    ) -> Result<TensorId, BuildError> {
        let dst = self.leaf(out.dtype, out.ne)?;
        self.node_into(op, srcs, dst)
    }

    /// Adds a node that writes an existing tensor: in place, or into a view.
    ///
    /// # Errors
    /// [`BuildError::Tensor`] for more than [`MAX_SRC`] sources.
    pub fn node_into(
        &mut self,
        op: impl Into<Op>,
        srcs: &[Option<TensorId>],
        dst: TensorId,
    ) -> Result<TensorId, BuildError> {
        if srcs.len() > MAX_SRC {
            return Err(BuildError::Tensor("a node has at most 10 sources"));
        }
        let mut list = [None; MAX_SRC];
        list[..srcs.len()].copy_from_slice(srcs);
        // The destination has new values after the node, so it is no longer a view of the values of another tensor, even if it
        // shares that tensor's memory.
        if let Some(tensor) = self.graph.tensors.get_mut(dst.0 as usize) {
            tensor.view_of = None;
        }
        self.graph.nodes.push(Node { op: op.into(), dst, srcs: list });
        Ok(dst)
    }

    /// Checks and returns the finished graph, by the same rules as a graph from a peer.
    ///
    /// # Errors
    /// [`BuildError::Graph`] if a node violates a rule.
    pub fn build(mut self) -> Result<Graph, BuildError> {
        if !self.separate_slots {
            self.graph.slots = vec![self.end];
        }
        validate::check(&self.graph)?;
        Ok(self.graph)
    }

    /// As [`Builder::build`], and derives the use counts from the nodes. Valid only if no other graph reads the tensors.
    /// `outputs`, which are read after the run, and tensors that no node computes get no use count.
    ///
    /// # Errors
    /// As [`Builder::build`].
    pub(crate) fn build_with_use_counts(mut self, outputs: &[TensorId]) -> Result<Graph, BuildError> {
        let tensors = &mut self.graph.tensors;
        let mut uses = vec![0u32; tensors.len()];
        let mut computed = vec![false; tensors.len()];
        for node in &self.graph.nodes {
            node.srcs.iter().flatten().for_each(|id| uses[id.0 as usize] += 1);
            computed[node.dst.0 as usize] = true;
        }
        // In reverse, because a view comes after the tensor that it shows. A view without readers does not count as a reader.
        for (at, tensor) in tensors.iter().enumerate().rev() {
            if let Some(of) = tensor.view_of.filter(|_| uses[at] > 0) {
                uses[of.0 as usize] += 1;
            }
        }
        outputs.iter().for_each(|id| uses[id.0 as usize] = 0);
        for at in 0..tensors.len() {
            // Skip a view in between if this view is its only reader.
            if let Some(of) = tensors[at].view_of
                && let Some(root) = tensors[of.0 as usize].view_of
                && uses[of.0 as usize] == 1
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
        let offset = self.end;
        let end = bytes.checked_next_multiple_of(Self::ALIGN).and_then(|b| b.checked_add(offset + Self::ALIGN));
        self.end = end.filter(|&e| e < 1 << 62).ok_or(overflow)?;
        Ok(SlotOffset { slot: 0, offset })
    }

    fn push(&mut self, desc: TensorDesc, place: SlotOffset, view_of: Option<TensorId>) -> TensorId {
        let id = TensorId(self.graph.tensors.len() as u32);
        self.graph.tensors.push(Tensor { desc, place: Some(place), use_count: None, view_of });
        id
    }
}

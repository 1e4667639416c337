//! Building a graph in process: leaves, views and nodes, each placed as it is made.

use super::validate::{self, GraphError};
use super::{Graph, Node, SlotOffset, Tensor, TensorId};
use crate::ops::{MAX_SRC, Op, OutputSpec, ShapeError, Sources};
use crate::tensor::{DIMS, DType, DescError, TensorDesc};
use thiserror::Error;

/// Builds a graph whose tensors all lie in slot 0, one after another, each at a multiple of [`Builder::ALIGN`]; or each in a
/// slot of its own ([`Builder::apart`]).
#[derive(Debug, Default)]
pub struct Builder {
    graph: Graph,
    end: usize,
    apart: bool,
}

/// A mistake of whoever builds the graph.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum BuildError {
    /// A shape that makes no tensor.
    #[error(transparent)]
    Desc(#[from] DescError),
    /// Sources that do not fit the op.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// An id of another graph, or a view beyond its parent.
    #[error("{0}")]
    Tensor(&'static str),
    /// What [`validate::check`] found in the finished graph.
    #[error(transparent)]
    Graph(#[from] GraphError),
}

impl Builder {
    /// Alignment of each tensor's first byte. Also the least gap between two tensors, so that tests can put sentinels
    /// there.
    pub const ALIGN: usize = 64;

    /// An empty graph.
    pub fn new() -> Builder {
        Builder::default()
    }

    /// An empty graph each of whose tensors that is no view has a slot of its own, just as large as it is: someone else
    /// places them.
    pub fn with_separate_slots() -> Builder {
        Builder { apart: true, ..Builder::default() }
    }

    /// A tensor made so far.
    pub fn tensor(&self, id: TensorId) -> Option<&Tensor> {
        self.graph.tensor(id)
    }

    /// A packed tensor that no node computes: a weight, an input, a cache.
    ///
    /// # Errors
    /// [`BuildError::Desc`] when the shape makes no tensor.
    pub fn leaf(&mut self, dtype: DType, ne: [usize; DIMS]) -> Result<TensorId, BuildError> {
        let desc = TensorDesc::contiguous(dtype, ne)?;
        self.leaf_with_desc(desc)
    }

    /// As [`Builder::leaf`], with strides of its own.
    ///
    /// # Errors
    /// [`BuildError::Tensor`] when the graph grows beyond the address space.
    pub fn leaf_with_desc(&mut self, desc: TensorDesc) -> Result<TensorId, BuildError> {
        let place = self.place(desc.extent())?;
        Ok(self.push(desc, place, None))
    }

    /// A view: another description of `of`'s memory, `offset` bytes from its first byte.
    ///
    /// # Errors
    /// [`BuildError::Tensor`] for an unknown parent or an overflowing offset. Extents are checked by [`Builder::build`].
    pub fn view(&mut self, of: TensorId, desc: TensorDesc, offset: usize) -> Result<TensorId, BuildError> {
        let parent = self.graph.tensor(of).ok_or(BuildError::Tensor("a view of an unknown tensor"))?;
        let mut place = parent.place.ok_or(BuildError::Tensor("a view of a tensor without memory"))?;
        place.offset = place.offset.checked_add(offset).ok_or(BuildError::Tensor("a view's offset overflows"))?;
        Ok(self.push(desc, place, Some(of)))
    }

    /// Says how many ops read a tensor, views counted, and that nobody else will: a device may then leave it out.
    ///
    /// # Errors
    /// [`BuildError::Tensor`] for an unknown tensor.
    pub fn set_use_count(&mut self, id: TensorId, uses: u32) -> Result<(), BuildError> {
        let tensor = self.graph.tensors.get_mut(id.0 as usize).ok_or(BuildError::Tensor("an unknown tensor"))?;
        tensor.use_count = Some(uses);
        Ok(())
    }

    /// A node whose destination follows from its sources; returns the destination.
    ///
    /// # Errors
    /// [`BuildError::Shape`] when the sources do not fit the op.
    pub fn node(&mut self, op: impl Into<Op>, srcs: &[Option<TensorId>]) -> Result<TensorId, BuildError> {
        let op = op.into();
        let descs = srcs.iter().map(|id| id.and_then(|id| self.graph.tensor(id)).map(|t| &t.desc)).collect::<Vec<_>>();
        let out = op.infer(&Sources::new(op.code(), &descs))?;
        self.node_with_output(op, srcs, out)
    }

    /// A node with a destination of the given type and shape, packed.
    ///
    /// # Errors
    /// [`BuildError::Desc`] when the shape makes no tensor.
    pub fn node_with_output(
        &mut self,
        op: impl Into<Op>,
        srcs: &[Option<TensorId>],
        out: OutputSpec,
    ) -> Result<TensorId, BuildError> {
        let dst = self.leaf(out.dtype, out.ne)?;
        self.node_into(op, srcs, dst)
    }

    /// A node that writes an existing tensor: in place, or into a view.
    ///
    /// # Errors
    /// [`BuildError::Tensor`] when there are more sources than a node can have.
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
        // What a node writes are values of its own, in whosever memory.
        if let Some(tensor) = self.graph.tensors.get_mut(dst.0 as usize) {
            tensor.view_of = None;
        }
        self.graph.nodes.push(Node { op: op.into(), dst, srcs: list });
        Ok(dst)
    }

    /// The finished graph, through the same door as a foreign one.
    ///
    /// # Errors
    /// [`BuildError::Graph`] when a node breaks a rule.
    pub fn build(mut self) -> Result<Graph, BuildError> {
        if !self.apart {
            self.graph.slots = vec![self.end];
        }
        validate::check(&self.graph)?;
        Ok(self.graph)
    }

    /// As [`Builder::build`], where the graph is all there is: how often each tensor is read follows from its nodes, but for
    /// `seen`, which others read too, and for what lies in memory that is not the graph's own.
    ///
    /// # Errors
    /// As [`Builder::build`].
    pub(crate) fn build_with_use_counts(mut self, seen: &[TensorId]) -> Result<Graph, BuildError> {
        let tensors = &mut self.graph.tensors;
        let mut uses = vec![0u32; tensors.len()];
        let mut computed = vec![false; tensors.len()];
        for node in &self.graph.nodes {
            node.srcs.iter().flatten().for_each(|id| uses[id.0 as usize] += 1);
            computed[node.dst.0 as usize] = true;
        }
        // Views come after what they show. One that nobody reads is no reader.
        for (at, tensor) in tensors.iter().enumerate().rev() {
            if let Some(of) = tensor.view_of.filter(|_| uses[at] > 0) {
                uses[of.0 as usize] += 1;
            }
        }
        seen.iter().for_each(|id| uses[id.0 as usize] = 0);
        for at in 0..tensors.len() {
            // Through other views, as long as each is read by the next alone.
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
        if self.apart {
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

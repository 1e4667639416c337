//! The only door from outside into a graph.
//!
//! [`foreign`] turns the records of a peer into a [`Graph`]; [`check`] holds what every graph must hold, ours too. After
//! them kernels trust types, shapes, strides, extents and overlaps, and check only what is data (row indices).

use super::{Graph, Node, SlotOffset, Tensor, TensorId, overlap};
use crate::ops::{MAX_SRC, Op, OpCode, OpParams, ParamError, ShapeError};
use crate::tensor::{DIMS, DType, DescError, TensorDesc};
use std::collections::HashMap;
use thiserror::Error;

/// From protocol 3.6.1 on, a listed node without this flag is not computed.
const FLAG_COMPUTE: i32 = 16;

/// The user reads it after the run.
const FLAG_OUTPUT: i32 = 2;

/// Most views of views that are followed to what they show.
const MAX_VIEW_CHAIN: usize = 4;

/// Sources that any op of ours reads, at most (FLASH_ATTN_EXT does); a peer's node may list more, which nobody looks at.
pub const MAX_OP_SOURCES: usize = 5;

/// A tensor record whose buffer is already resolved, and nothing else is believed yet.
#[derive(Clone, Debug, PartialEq)]
pub struct UntrustedTensor {
    /// The peer's key for it, unique in its graph.
    pub id: u64,
    /// Type number.
    pub dtype: u32,
    /// Element counts.
    pub ne: [u32; DIMS],
    /// Byte strides modulo 2^32.
    pub nb: [u32; DIMS],
    /// Op number.
    pub op: u32,
    /// op_params.
    pub params: [i32; 16],
    /// Flags.
    pub flags: i32,
    /// Keys of its sources; 0 for none.
    pub srcs: [u64; MAX_SRC],
    /// How many ops of the peer's whole graph read it; 0 where the peer does not say.
    pub use_count: i32,
    /// Its memory: slot and byte offset; `None` when it lives nowhere here.
    pub place: Option<SlotOffset>,
}

/// What a peer's graph got wrong.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum GraphError {
    /// Two records with one key.
    #[error("two tensors with id {0:#x}")]
    DuplicateTensor(u64),
    /// A node or source that no record describes.
    #[error("{what} {id:#x} is not among the graph's tensors")]
    UnknownTensor {
        /// Which reference.
        what: &'static str,
        /// The key.
        id: u64,
    },
    /// A node listed twice.
    #[error("node {0:#x} is listed twice")]
    DuplicateNode(u64),
    /// An op number beyond the table.
    #[error("op number {0} is not one of protocol 7.0's")]
    UnknownOp(u32),
    /// An op of the table that we do not run.
    #[error("op {0} is not supported by this server")]
    UnsupportedOp(OpCode),
    /// A type number that names no type.
    #[error("type number {0} is no tensor type")]
    UnknownType(u32),
    /// A shape that makes no tensor.
    #[error(transparent)]
    Desc(#[from] DescError),
    /// Parameters outside what the op defines.
    #[error(transparent)]
    Param(#[from] ParamError),
    /// A node that breaks its op's shape rule.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A computed node that reads or writes a tensor without memory here.
    #[error("{op}: {what} lives on no buffer of this server")]
    Unplaced {
        /// The op.
        op: OpCode,
        /// Destination or which source.
        what: &'static str,
    },
    /// A tensor that reaches past its buffer.
    #[error("{op}: a tensor at offset {offset} spans {extent} bytes of a buffer of {size}")]
    OutOfBuffer {
        /// The op that uses it.
        op: OpCode,
        /// First byte.
        offset: usize,
        /// Bytes spanned.
        extent: usize,
        /// Size of the buffer.
        size: usize,
    },
    /// A source whose strides repeat bytes beyond what its buffer holds.
    #[error("{op}: source {index} repeats {bytes} bytes out of a buffer of {size}")]
    BroadcastTooLarge {
        /// The op.
        op: OpCode,
        /// Source index.
        index: usize,
        /// Bytes of its elements.
        bytes: usize,
        /// Size of the buffer.
        size: usize,
    },
    /// A destination whose elements share bytes with each other.
    #[error("{0}: the destination's strides make its elements overlap")]
    SelfOverlap(OpCode),
    /// A destination that overlaps a source other than exactly in place.
    #[error("{op}: the destination overlaps source {index} and is not exactly on it")]
    Overlap {
        /// The op.
        op: OpCode,
        /// Source index.
        index: usize,
    },
    /// A source that is computed later in the list, or by the node itself.
    #[error("{op}: source {index} is computed by a later node of the graph")]
    UseBeforeDefinition {
        /// The op.
        op: OpCode,
        /// Source index.
        index: usize,
    },
    /// A source without elements for an op that needs some.
    #[error("{op}: source {index} has no elements")]
    EmptySource {
        /// The op.
        op: OpCode,
        /// Source index.
        index: usize,
    },
}

/// A graph out of a peer's records: `listed` are the keys of the nodes in execution order, `slots` the sizes of the
/// buffers that places refer to. Listed nodes that compute nothing (views, empty ones, those without the compute flag)
/// are dropped, and so is every tensor that no remaining node touches.
///
/// # Errors
/// [`GraphError`] says what the peer got wrong.
pub fn import_untrusted(listed: &[u64], records: &[UntrustedTensor], slots: Vec<usize>) -> Result<Graph, GraphError> {
    let mut by_id = HashMap::with_capacity(records.len());
    for (i, t) in records.iter().enumerate() {
        if by_id.insert(t.id, i).is_some() {
            return Err(GraphError::DuplicateTensor(t.id));
        }
    }
    let mut seen = vec![false; records.len()];
    let mut import = Import { records, by_id: &by_id, ids: vec![None; records.len()], graph: Graph::default() };
    import.graph.slots = slots;
    for &id in listed {
        let index = import.find("node", id)?;
        if std::mem::replace(&mut seen[index], true) {
            return Err(GraphError::DuplicateNode(id));
        }
        import.node(index)?;
    }
    check(&import.graph)?;
    Ok(import.graph)
}

struct Import<'a> {
    records: &'a [UntrustedTensor],
    by_id: &'a HashMap<u64, usize>,
    ids: Vec<Option<TensorId>>,
    graph: Graph,
}

impl Import<'_> {
    fn find(&self, what: &'static str, id: u64) -> Result<usize, GraphError> {
        self.by_id.get(&id).copied().ok_or(GraphError::UnknownTensor { what, id })
    }

    /// Adds a listed node, unless it computes nothing.
    fn node(&mut self, index: usize) -> Result<(), GraphError> {
        let record = &self.records[index];
        let code = OpCode::from_wire(record.op).ok_or(GraphError::UnknownOp(record.op))?;
        if code.is_view() || record.flags & FLAG_COMPUTE == 0 || record.ne.contains(&0) {
            return Ok(());
        }
        let op = Op::decode(code, &OpParams(record.params))?.ok_or(GraphError::UnsupportedOp(code))?;
        let mut srcs = [None; MAX_SRC];
        for (slot, &id) in srcs.iter_mut().zip(&record.srcs[..MAX_OP_SOURCES]) {
            if id != 0 {
                *slot = Some(self.find("source", id)?);
            }
        }
        let mut ids = [None; MAX_SRC];
        for (i, src) in srcs.into_iter().enumerate() {
            // A CPY made by `cast` names itself as its target: no dependency, and the destination says it all.
            ids[i] = match src {
                Some(src) if !(src == index && op.writes_onto(i)) => Some(self.tensor(src)?),
                _ => None,
            };
        }
        let dst = self.tensor(index)?;
        self.graph.nodes.push(Node { op, dst, srcs: ids });
        Ok(())
    }

    /// What a view shows, through other views as long as each is read by the next alone.
    fn viewed(&self, record: &UntrustedTensor) -> Option<TensorId> {
        let mut view = record;
        for _ in 0..MAX_VIEW_CHAIN {
            OpCode::from_wire(view.op).filter(|op| op.is_view())?;
            let &index = self.by_id.get(&view.srcs[0])?;
            if let Some(id) = self.ids[index] {
                return Some(id);
            }
            view = &self.records[index];
            if view.use_count != 1 || view.flags & FLAG_OUTPUT != 0 {
                return None;
            }
        }
        None
    }

    fn tensor(&mut self, index: usize) -> Result<TensorId, GraphError> {
        if let Some(id) = self.ids[index] {
            return Ok(id);
        }
        let record = &self.records[index];
        let dtype = DType::from_wire(record.dtype).ok_or(GraphError::UnknownType(record.dtype))?;
        let ne = record.ne.map(|n| n as usize);
        let desc = TensorDesc::strided(dtype, ne, widen_strides(dtype, ne, record.nb))?;
        let id = TensorId(self.graph.tensors.len() as u32);
        let uses = u32::try_from(record.use_count).ok().filter(|&n| n > 0 && record.flags & FLAG_OUTPUT == 0);
        let view_of = self.viewed(record);
        self.graph.tensors.push(Tensor { desc, place: record.place, use_count: uses, view_of });
        self.ids[index] = Some(id);
        Ok(id)
    }
}

/// Strides of the wire are modulo 2^32: one that equals the packed stride modulo 2^32 is taken for it.
pub fn widen_strides(dtype: DType, ne: [usize; DIMS], nb: [u32; DIMS]) -> [usize; DIMS] {
    let mut wide = nb.map(|n| n as usize);
    let mut packed = wide[0].checked_mul(dtype.blocks(ne[0]));
    for d in 1..DIMS {
        if let Some(p) = packed
            && p as u32 == nb[d]
        {
            wide[d] = p;
        }
        packed = wide[d].checked_mul(ne[d]);
    }
    wide
}

/// Checks everything a device may rely on: shape rules, extents, overlap, order.
///
/// # Errors
/// [`GraphError`] for the first rule that does not hold.
pub fn check(graph: &Graph) -> Result<(), GraphError> {
    let mut computed_at = vec![usize::MAX; graph.tensors.len()];
    for (at, node) in graph.nodes.iter().enumerate() {
        if let Some(slot) = computed_at.get_mut(node.dst.0 as usize) {
            *slot = at;
        }
    }
    for (at, node) in graph.nodes.iter().enumerate() {
        let op = node.op.code();
        let unknown = || GraphError::UnknownTensor { what: "tensor", id: u64::from(node.dst.0) };
        let view = graph.node_view(node).ok_or_else(unknown)?;
        node.op.check(&view)?;
        let dst = graph.tensor(node.dst).ok_or_else(unknown)?;
        in_buffer(graph, op, dst, "the destination")?;
        if !dst.desc.is_injective() {
            return Err(GraphError::SelfOverlap(op));
        }
        for (index, id) in node.srcs.iter().enumerate() {
            let Some(id) = *id else { continue };
            let src = graph.tensor(id).ok_or_else(unknown)?;
            if src.desc.is_empty() && !matches!(op, OpCode::SetRows | OpCode::Concat) {
                return Err(GraphError::EmptySource { op, index });
            }
            let size = in_buffer(graph, op, src, "a source")?;
            let bytes = src.desc.dense_bytes();
            if bytes > size {
                return Err(GraphError::BroadcastTooLarge { op, index, bytes, size });
            }
            let later = computed_at[id.0 as usize];
            if later != usize::MAX && later >= at {
                return Err(GraphError::UseBeforeDefinition { op, index });
            }
        }
        if let Some(index) = overlap::find_overlap_violation(graph, node) {
            return Err(GraphError::Overlap { op, index });
        }
    }
    Ok(())
}

/// That a tensor lies inside its buffer; the size of that buffer.
fn in_buffer(graph: &Graph, op: OpCode, tensor: &Tensor, what: &'static str) -> Result<usize, GraphError> {
    let place = tensor.place.ok_or(GraphError::Unplaced { op, what })?;
    let size = graph.slots.get(place.slot as usize).copied().unwrap_or(0);
    let (offset, extent) = (place.offset, tensor.desc.extent());
    match offset.checked_add(extent) {
        Some(end) if end <= size => Ok(size),
        _ => Err(GraphError::OutOfBuffer { op, offset, extent, size }),
    }
}

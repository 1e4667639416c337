//! Graph validation: the trust boundary between a peer's records and the kernels.
//!
//! [`import_untrusted`] converts the records of a peer to a [`Graph`]. [`check`] verifies the invariants of every graph,
//! including graphs built in process. After that, kernels rely on types, shapes, strides, extents and overlaps, and check only
//! data (row indices).

use super::{Graph, GraphNumber, Node, SlotOffset, Tensor, TensorId, overlap};
use crate::ops::{MAX_SRC, Op, OpCode, OpParams, ParamError, ShapeError};
use crate::tensor::{DIMS, DType, DescError, TensorDesc};
use std::collections::HashMap;
use thiserror::Error;

/// ggml's tensor flag: the node is to be computed. Since protocol 3.6.1, listed nodes without this flag are skipped.
const FLAG_COMPUTE: i32 = 16;

/// ggml's tensor flag: the tensor is an output, which the client reads after the run.
const FLAG_OUTPUT: i32 = 2;

/// Limit on the chain of views that is followed to find the viewed tensor.
const MAX_VIEW_CHAIN: usize = 4;

/// The largest number of sources that any implemented op reads (SSM_SCAN, RWKV_WKV7).
pub const MAX_OP_SOURCES: usize = 7;

/// A tensor record from a peer. Its buffer is resolved to a slot; nothing else is validated yet.
#[derive(Clone, Debug, PartialEq)]
pub struct UntrustedTensor {
    /// The peer's key of the tensor, unique in its graph.
    pub id: u64,
    /// Type number.
    pub dtype: u32,
    /// Element counts, fastest dimension first.
    pub ne: [u32; DIMS],
    /// Byte strides modulo 2^32.
    pub nb: [u32; DIMS],
    /// Op number.
    pub op: u32,
    /// Encoded parameters of the op.
    pub params: [i32; 16],
    /// ggml's tensor flags.
    pub flags: i32,
    /// Keys of the sources; 0 for an absent source.
    pub srcs: [u64; MAX_SRC],
    /// Number of ops in the peer's whole graph that read the tensor; 0 if the peer does not send it.
    pub use_count: i32,
    /// Memory of the tensor: slot and byte offset. `None` if the tensor has no memory on this server.
    pub place: Option<SlotOffset>,
}

/// A graph violates a rule: an error of the peer that sent it, or of the code that built it.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum GraphError {
    /// Two records with one key.
    #[error("two tensors with id {0:#x}")]
    DuplicateTensor(u64),
    /// A node or source without a tensor record.
    #[error("{what} {id:#x} is not among the graph's tensors")]
    UnknownTensor {
        /// The kind of reference: node or source.
        what: &'static str,
        /// The key.
        id: u64,
    },
    /// A node listed twice.
    #[error("node {0:#x} is listed twice")]
    DuplicateNode(u64),
    /// An op number that the protocol does not define.
    #[error("op number {0} is not defined by the protocol")]
    UnknownOp(u32),
    /// An op of the protocol that fanout does not run.
    #[error("op {op} is not supported by this server: {}", .0.impossible().unwrap_or("it has no kernel for it"), op = .0)]
    UnsupportedOp(OpCode),
    /// An undefined type number.
    #[error("type number {0} is not a tensor type")]
    UnknownType(u32),
    /// An invalid shape.
    #[error(transparent)]
    Desc(#[from] DescError),
    /// A parameter with a value that the op does not define.
    #[error(transparent)]
    Param(#[from] ParamError),
    /// A node that violates its op's shape rule.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A computed node reads or writes a tensor that has no memory on this server.
    #[error("{op}: {what} has no memory on this server")]
    Unplaced {
        /// The op.
        op: OpCode,
        /// The destination or a source.
        what: &'static str,
    },
    /// A tensor that exceeds its buffer.
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
    /// A source with strides that repeat bytes (stride 0, or overlapping rows) and more elements than its buffer could hold.
    /// The limit bounds the work that a small buffer can cause.
    #[error("{op}: source {index} repeats {bytes} bytes out of a buffer of {size}")]
    BroadcastTooLarge {
        /// The op.
        op: OpCode,
        /// Source index.
        index: usize,
        /// Bytes of all elements.
        bytes: usize,
        /// Size of the buffer.
        size: usize,
    },
    /// A destination with elements that share bytes with each other.
    #[error("{0}: the destination's strides make its elements overlap")]
    SelfOverlap(OpCode),
    /// A destination that overlaps a source without coinciding with it exactly (in place).
    #[error("{op}: the destination overlaps source {index} and is not exactly on it")]
    Overlap {
        /// The op.
        op: OpCode,
        /// Source index.
        index: usize,
    },
    /// A source that is computed by a later node, or by the node itself.
    #[error("{op}: source {index} is computed by a later node of the graph")]
    UseBeforeDefinition {
        /// The op.
        op: OpCode,
        /// Source index.
        index: usize,
    },
    /// A source after the last one that the op reads.
    #[error("{op}: source {index} is given, but the op reads {most} at most")]
    ExtraSource {
        /// The op.
        op: OpCode,
        /// Source index.
        index: usize,
        /// The largest number of sources of the op.
        most: usize,
    },
    /// A node that writes a tensor which an earlier node reads.
    #[error("{0}: the destination is a source of an earlier node: write to a view of it")]
    WrittenAfterRead(OpCode),
    /// An empty source of an op that requires elements.
    #[error("{op}: source {index} has no elements")]
    EmptySource {
        /// The op.
        op: OpCode,
        /// Source index.
        index: usize,
    },
}

/// The ops that the graphs of a peer may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpSet {
    /// The ops of ggml's protocol.
    Protocol,
    /// The ops of ggml's protocol and fanout's own: the ops of its extension.
    Extension,
}

impl OpSet {
    fn op(self, number: u32) -> Option<OpCode> {
        match self {
            OpSet::Protocol => OpCode::from_wire(number),
            OpSet::Extension => OpCode::from_extension_wire(number),
        }
    }
}

/// Imports and checks a graph from a peer's records. `listed` are the keys of the nodes in execution order, and `slots` the
/// sizes of the buffers that the places refer to. Listed nodes that compute nothing (views, empty nodes, nodes without the
/// compute flag) are dropped, and so are tensors that no remaining node uses. The nodes have ops of `ops`.
///
/// # Errors
/// [`GraphError`] names the violated rule.
pub fn import_untrusted(
    listed: &[u64],
    records: &[UntrustedTensor],
    slots: Vec<usize>,
    ops: OpSet,
) -> Result<Graph, GraphError> {
    let mut by_id = HashMap::with_capacity(records.len());
    for (i, t) in records.iter().enumerate() {
        if by_id.insert(t.id, i).is_some() {
            return Err(GraphError::DuplicateTensor(t.id));
        }
    }
    let mut seen = vec![false; records.len()];
    let mut import = GraphImport {
        ops,
        records,
        by_id: &by_id,
        ids: vec![None; records.len()],
        graph: Graph::new(GraphNumber::PEER),
    };
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

/// A graph while it is imported.
struct GraphImport<'a> {
    ops: OpSet,
    records: &'a [UntrustedTensor],
    /// Index of each record by its key.
    by_id: &'a HashMap<u64, usize>,
    /// The tensor of each record, once it is part of the graph.
    ids: Vec<Option<TensorId>>,
    graph: Graph,
}

impl GraphImport<'_> {
    /// Index of the record with a key; `what` is the kind of reference, for the error.
    fn find(&self, what: &'static str, id: u64) -> Result<usize, GraphError> {
        self.by_id.get(&id).copied().ok_or(GraphError::UnknownTensor { what, id })
    }

    /// Adds a listed node; skips nodes that compute nothing.
    fn node(&mut self, index: usize) -> Result<(), GraphError> {
        let record = &self.records[index];
        let code = self.ops.op(record.op).ok_or(GraphError::UnknownOp(record.op))?;
        if code.is_view() || record.flags & FLAG_COMPUTE == 0 || record.ne.contains(&0) {
            return Ok(());
        }
        let op = Op::decode(code, &OpParams(record.params))?.ok_or(GraphError::UnsupportedOp(code))?;
        let mut srcs = [None; MAX_SRC];
        for (slot, &id) in srcs.iter_mut().zip(&record.srcs[..code.max_sources()]) {
            if id != 0 {
                *slot = Some(self.find("source", id)?);
            }
        }
        let mut ids = [None; MAX_SRC];
        for (i, src) in srcs.into_iter().enumerate() {
            // A CPY from ggml's `ggml_cast` lists itself as the target source. It is no dependency, and the destination already
            // describes the target, so it is dropped.
            ids[i] = match src {
                Some(src) if !(src == index && op.writes_onto(i)) => Some(self.tensor(src)?),
                _ => None,
            };
        }
        let dst = self.tensor(index)?;
        self.graph.nodes.push(Node { op, dst, srcs: ids });
        Ok(())
    }

    /// The tensor that a view shows. Follows a chain of views as long as each view in between has no other reader and is not an
    /// output.
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

    /// The tensor of a record, which the first call adds to the graph.
    fn tensor(&mut self, index: usize) -> Result<TensorId, GraphError> {
        if let Some(id) = self.ids[index] {
            return Ok(id);
        }
        let record = &self.records[index];
        let dtype = DType::from_wire(record.dtype).ok_or(GraphError::UnknownType(record.dtype))?;
        let ne = record.ne.map(|n| n as usize);
        let desc = TensorDesc::strided(dtype, ne, widen_strides(dtype, ne, record.nb))?;
        let id = self.graph.next_id();
        let uses = u32::try_from(record.use_count).ok().filter(|&n| n > 0 && record.flags & FLAG_OUTPUT == 0);
        let view_of = self.viewed(record);
        self.graph.tensors.push(Tensor { desc, place: record.place, use_count: uses, view_of });
        self.ids[index] = Some(id);
        Ok(id)
    }
}

/// Widens the strides of the wire, which are modulo 2^32. A stride that equals the contiguous stride modulo 2^32 is taken as
/// the contiguous stride.
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

/// Checks all properties of a graph that devices rely on: shape rules, extents, overlaps and execution order.
///
/// # Errors
/// [`GraphError`] for the first violated rule.
pub fn check(graph: &Graph) -> Result<(), GraphError> {
    let mut computed_at = vec![usize::MAX; graph.tensors.len()];
    for (at, node) in graph.nodes.iter().enumerate() {
        if let Some(slot) = computed_at.get_mut(node.dst.index()) {
            *slot = at;
        }
    }
    for (at, node) in graph.nodes.iter().enumerate() {
        let computed_later = |id: TensorId| {
            let computed = computed_at.get(id.index()).copied().unwrap_or(usize::MAX);
            computed != usize::MAX && computed >= at
        };
        check_node(graph, node, computed_later)?;
    }
    Ok(())
}

/// Checks a node of a graph. `computed_later` says of a source whether the node itself or a later one computes it.
///
/// # Errors
/// As [`check`].
pub(super) fn check_node(
    graph: &Graph,
    node: &Node,
    computed_later: impl Fn(TensorId) -> bool,
) -> Result<(), GraphError> {
    let op = node.op.code();
    let unknown = || GraphError::UnknownTensor { what: "tensor", id: node.dst.index() as u64 };
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
        if src.desc.is_empty() && !node.op.may_be_empty(index) {
            return Err(GraphError::EmptySource { op, index });
        }
        let size = in_buffer(graph, op, src, "a source")?;
        if node.op.updates(index) && !src.desc.is_injective() {
            return Err(GraphError::SelfOverlap(op));
        }
        let bytes = src.desc.dense_bytes();
        if bytes > size {
            return Err(GraphError::BroadcastTooLarge { op, index, bytes, size });
        }
        if computed_later(id) {
            return Err(GraphError::UseBeforeDefinition { op, index });
        }
    }
    if let Some(index) = overlap::find_overlap_violation(graph, node) {
        return Err(GraphError::Overlap { op, index });
    }
    Ok(())
}

/// Checks that a tensor is inside its buffer; returns the size of the buffer in bytes.
fn in_buffer(graph: &Graph, op: OpCode, tensor: &Tensor, what: &'static str) -> Result<usize, GraphError> {
    let place = tensor.place.ok_or(GraphError::Unplaced { op, what })?;
    let size = graph.slots.get(place.slot as usize).copied().unwrap_or(0);
    let (offset, extent) = (place.offset, tensor.desc.extent());
    match offset.checked_add(extent) {
        Some(end) if end <= size => Ok(size),
        _ => Err(GraphError::OutOfBuffer { op, offset, extent, size }),
    }
}

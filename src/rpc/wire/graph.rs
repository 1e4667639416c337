//! GRAPH_COMPUTE: ids and records stay in the body that they came in.

use super::{
    codec::{Field, Reader, WireError},
    command::Limits,
    request::Body,
    tensor::{TENSOR_RECORD, TensorRecord},
};

/// Tensor ids, borrowed from a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeIds<'a>(pub(super) &'a [[u8; 8]]);

impl<'a> NodeIds<'a> {
    /// How many.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The ids in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = u64> + DoubleEndedIterator + use<'a> {
        self.0.iter().map(|bytes| u64::from_le_bytes(*bytes))
    }
}

/// Tensor records, borrowed from a message and decoded one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorRecords<'a>(pub(super) &'a [[u8; TENSOR_RECORD]]);

impl<'a> TensorRecords<'a> {
    /// How many.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The record at `index`.
    pub fn get(&self, index: usize) -> Option<TensorRecord> {
        self.0.get(index).map(TensorRecord::decode)
    }

    /// The records in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = TensorRecord> + DoubleEndedIterator + use<'a> {
        self.0.iter().map(TensorRecord::decode)
    }
}

/// Runs a graph: `tensors` are the nodes and everything that they read, sources first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphCompute<'a> {
    device: u32,
    nodes: NodeIds<'a>,
    tensors: TensorRecords<'a>,
}

impl<'a> GraphCompute<'a> {
    /// A graph to send; the sender's ids and records are already bytes, as [`TensorRecord::encode`] makes them.
    ///
    /// # Errors
    /// [`WireError::TooLarge`] for more than 2^32 - 1 of either.
    pub fn new(device: u32, nodes: &'a [[u8; 8]], tensors: &'a [[u8; TENSOR_RECORD]]) -> Result<Self, WireError> {
        check_count("n_nodes", nodes.len() as u64, u32::MAX)?;
        check_count("n_tensors", tensors.len() as u64, u32::MAX)?;
        Ok(GraphCompute { device, nodes: NodeIds(nodes), tensors: TensorRecords(tensors) })
    }

    /// The device to run on.
    pub const fn device(&self) -> u32 {
        self.device
    }

    /// Ids of the nodes, in the order to compute them.
    pub const fn nodes(&self) -> NodeIds<'a> {
        self.nodes
    }

    /// Records of the nodes and of everything that they read.
    pub const fn tensors(&self) -> TensorRecords<'a> {
        self.tensors
    }
}

impl<'a> Body<'a> for GraphCompute<'a> {
    fn read(r: &mut Reader<'a>, limits: &Limits) -> Result<Self, WireError> {
        let device = r.u32("device")?;
        let n_nodes = r.u32("n_nodes")?;
        check_count("n_nodes", n_nodes.into(), limits.max_nodes)?;
        let nodes = NodeIds(r.arrays("nodes", n_nodes)?);
        let n_tensors = r.u32("n_tensors")?;
        check_count("n_tensors", n_tensors.into(), limits.max_tensors)?;
        let tensors = TensorRecords(r.arrays("tensors", n_tensors)?);
        Ok(GraphCompute { device, nodes, tensors })
    }

    fn size(&self) -> u64 {
        let (nodes, tensors) = (self.nodes.0.as_flattened(), self.tensors.0.as_flattened());
        3 * u32::SIZE + nodes.len() as u64 + tensors.len() as u64
    }

    fn write(&self, out: &mut Vec<u8>) {
        self.device.write(out);
        (self.nodes.len() as u32).write(out); // both constructors bound the counts
        out.extend_from_slice(self.nodes.0.as_flattened());
        (self.tensors.len() as u32).write(out);
        out.extend_from_slice(self.tensors.0.as_flattened());
    }
}

/// Bytes of a prepared graph for each of its tensors, nodes, and sources of nodes, about, on the device that needs most.
const TENSOR_BYTES: u64 = 100;
const NODE_BYTES: u64 = 500;
const SOURCE_BYTES: u64 = 110;

/// What a graph costs who keeps it, in bytes, with its message of `body` bytes: both ends count the same.
pub fn graph_cost(body: u64, graph: &GraphCompute<'_>) -> u64 {
    let sources = |srcs: &[u64]| srcs.iter().filter(|&&id| id != 0).count() as u64;
    let sources = graph.tensors().iter().map(|record| sources(&record.src)).sum::<u64>();
    let (tensors, nodes) = (graph.tensors().len() as u64, graph.nodes().len() as u64);
    body + tensors * TENSOR_BYTES + nodes * NODE_BYTES + sources * SOURCE_BYTES
}

fn check_count(what: &'static str, have: u64, limit: u32) -> Result<(), WireError> {
    let limit = u64::from(limit);
    if have > limit { Err(WireError::TooLarge { what, have, limit }) } else { Ok(()) }
}

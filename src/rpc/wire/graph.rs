//! GRAPH_COMPUTE: a zero-copy view of a graph. Node ids and tensor records are borrowed from the body of the message.

use super::{
    codec::{Field, Reader, WireError},
    command::Limits,
    tensor::{TENSOR_RECORD, TensorRecord},
};

/// A list of tensor ids, borrowed from the encoded message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeIds<'a>(pub(super) &'a [[u8; 8]]);

impl<'a> NodeIds<'a> {
    /// Number of ids.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the list is empty.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Decodes the ids in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = u64> + DoubleEndedIterator + use<'a> {
        self.0.iter().map(|bytes| u64::from_le_bytes(*bytes))
    }
}

/// Tensor records, borrowed from a message. Each access decodes one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorRecords<'a>(pub(super) &'a [[u8; TENSOR_RECORD]]);

impl<'a> TensorRecords<'a> {
    /// The number of records.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Decodes the record at `index`.
    pub fn get(&self, index: usize) -> Option<TensorRecord> {
        self.0.get(index).map(TensorRecord::decode)
    }

    /// Decodes the records in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = TensorRecord> + DoubleEndedIterator + use<'a> {
        self.0.iter().map(TensorRecord::decode)
    }
}

/// Runs a graph. `tensors` are the nodes and all tensors that they read, sources before their readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphCompute<'a> {
    device: u32,
    uid: Option<u64>,
    nodes: NodeIds<'a>,
    tensors: TensorRecords<'a>,
}

impl<'a> GraphCompute<'a> {
    /// A graph to send, of ids and records that are already encoded ([`TensorRecord::encode`]).
    ///
    /// # Errors
    /// [`WireError::TooLarge`] for more than 2^32 - 1 nodes or tensors.
    pub fn new(device: u32, nodes: &'a [[u8; 8]], tensors: &'a [[u8; TENSOR_RECORD]]) -> Result<Self, WireError> {
        check_count("n_nodes", nodes.len() as u64, u32::MAX)?;
        check_count("n_tensors", tensors.len() as u64, u32::MAX)?;
        Ok(GraphCompute { device, uid: None, nodes: NodeIds(nodes), tensors: TensorRecords(tensors) })
    }

    /// The same graph with the number under which the server stores it, in the layout of 8.0; 0: the server does not store it.
    pub const fn with_uid(self, uid: u64) -> Self {
        GraphCompute { uid: Some(uid), ..self }
    }

    /// Decodes a body in the layout of 8.0, which has a uid.
    ///
    /// # Errors
    /// [`WireError`], naming the first field that is missing, wrong or over `limits`.
    pub fn decode_with_uid(body: &'a [u8], limits: &Limits) -> Result<Self, WireError> {
        let mut r = Reader::with_limits(body, *limits);
        let graph = GraphCompute::read_fields(&mut r, true)?;
        r.finish("GRAPH_COMPUTE")?;
        Ok(graph)
    }

    fn read_fields(r: &mut Reader<'a>, has_uid: bool) -> Result<Self, WireError> {
        let device = r.u32("device")?;
        let uid = has_uid.then(|| r.u64("uid")).transpose()?;
        let (nodes, tensors) = read_nodes_and_records(r, TENSOR_RECORD)?;
        Ok(GraphCompute { device, uid, nodes, tensors: TensorRecords(tensors.as_chunks().0) })
    }

    /// The number under which the server stores the graph; `None` in the layout of 7.0, which has no such field.
    pub const fn uid(&self) -> Option<u64> {
        self.uid
    }

    /// Device that runs the graph, by its index.
    pub const fn device(&self) -> u32 {
        self.device
    }

    /// Ids of the nodes, in execution order.
    pub const fn nodes(&self) -> NodeIds<'a> {
        self.nodes
    }

    /// Records of the nodes and of all tensors that they read.
    pub const fn tensors(&self) -> TensorRecords<'a> {
        self.tensors
    }
}

impl<'a> Field<'a> for GraphCompute<'a> {
    /// The layout of 7.0. [`GraphCompute::decode_with_uid`] reads that of 8.0.
    fn read(r: &mut Reader<'a>, _: &'static str) -> Result<Self, WireError> {
        GraphCompute::read_fields(r, false)
    }

    fn write(&self, out: &mut Vec<u8>) {
        self.device.write(out);
        self.uid.write(out);
        (self.nodes.len() as u32).write(out); // both constructors limit the counts to u32
        out.extend_from_slice(self.nodes.0.as_flattened());
        (self.tensors.len() as u32).write(out);
        out.extend_from_slice(self.tensors.0.as_flattened());
    }
}

/// Estimated bytes of a prepared graph per tensor, node and source of a node, on the kind of device with the largest programs.
const TENSOR_BYTES: u64 = 100;
const NODE_BYTES: u64 = 500;
const SOURCE_BYTES: u64 = 110;

/// Estimated memory of a prepared graph on the server, in bytes; `body`: length of its GRAPH_COMPUTE body. Client and server
/// compute the same number, so the client can predict which graphs the server evicts.
pub fn graph_cost(body: u64, graph: &GraphCompute<'_>) -> u64 {
    let sources = |srcs: &[u64]| srcs.iter().filter(|&&id| id != 0).count() as u64;
    let sources = graph.tensors().iter().map(|record| sources(&record.src)).sum::<u64>();
    let (tensors, nodes) = (graph.tensors().len() as u64, graph.nodes().len() as u64);
    body + tensors * TENSOR_BYTES + nodes * NODE_BYTES + sources * SOURCE_BYTES
}

/// Reads the ids of a graph, and its records of `record_len` bytes.
pub(super) fn read_nodes_and_records<'a>(
    r: &mut Reader<'a>,
    record_len: usize,
) -> Result<(NodeIds<'a>, &'a [u8]), WireError> {
    let n_nodes = r.u32("n_nodes")?;
    check_count("n_nodes", n_nodes.into(), r.limits.max_nodes)?;
    let nodes = NodeIds(r.arrays("nodes", n_nodes)?);
    let n_tensors = r.u32("n_tensors")?;
    check_count("n_tensors", n_tensors.into(), r.limits.max_tensors)?;
    Ok((nodes, r.repeated("tensors", n_tensors, record_len)?))
}

fn check_count(what: &'static str, have: u64, limit: u32) -> Result<(), WireError> {
    let limit = u64::from(limit);
    if have > limit { Err(WireError::TooLarge { what, have, limit }) } else { Ok(()) }
}

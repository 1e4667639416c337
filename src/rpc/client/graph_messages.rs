//! Graph encoding: a [`Graph`] as the messages that run it. A program splits its graph into GRAPH_COMPUTE messages that fit the
//! server's size limit, and caches the encoded messages by the regions that they are bound to.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::connection::Connection;
use super::device::{RemoteDevice, remote_buffer};
use super::extended::MIN_MESSAGE_LIMIT_BYTES;
use crate::device::{DeviceError, Region, Unsupported};
use crate::graph::{Graph, Node, Tensor, TensorId};
use crate::ops::{MAX_SRC, NodeView, OpCode};
use crate::poison::lock;
use crate::rpc::wire::{GraphCompute, Request, TENSOR_RECORD, TensorRecord};
use crate::tensor::TensorDesc;

/// Largest number of nodes in one message. A message with this many nodes and their sources stays below the size limits of
/// servers.
const MAX_NODES_PER_MESSAGE: usize = 8192;

/// Bytes of a PREPARE_GRAPH besides its nodes and tensors: graph number, device, and two counts.
const PREPARE_GRAPH_HEAD_BYTES: u64 = 8 + 4 + 4 + 4;

/// Bytes of a node's id in the list of nodes.
const NODE_ID_BYTES: usize = 8;

// A node with all its sources fits the smallest message limit that this client accepts from a server.
const _: () = assert!(
    PREPARE_GRAPH_HEAD_BYTES + (NODE_ID_BYTES + (MAX_SRC + 1) * TENSOR_RECORD) as u64 <= MIN_MESSAGE_LIMIT_BYTES
);

/// Size of a program's cache of encoded messages, in sets of bindings. A scheduler alternates between a few copies of the
/// inputs, each of which has bindings of its own.
const MAX_CACHED_BINDINGS: usize = 16;

/// Source of message ids.
static NEXT_MESSAGE_ID: AtomicU64 = AtomicU64::new(1);

/// A complete GRAPH_COMPUTE message, bound to buffers.
pub(super) struct GraphMessage {
    id: u64,
    frame: Vec<u8>,
}

impl GraphMessage {
    /// Id of the message, unique within this process.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn frame(&self) -> &[u8] {
        &self.frame
    }
}

/// A program of a remote device.
pub(super) struct RemoteProgram {
    connection: Arc<Connection>,
    device: u32,
    /// Range of nodes of each message.
    node_ranges: Vec<Range<usize>>,
    /// LRU cache of encoded messages by their bindings, most recently used last.
    messages: Mutex<Vec<(BindingKey, Arc<[GraphMessage]>)>>,
}

/// Ids of the buffers, which are never reused, and offsets of the bound regions.
type BindingKey = Vec<(u64, u64)>;

/// Why a node cannot be expressed in the server's version of the protocol; `None` if it can. The extensions have all ops.
pub(super) fn not_expressible(node: &NodeView<'_>, connection: &Connection) -> Option<Unsupported> {
    let op = node.op.code();
    let is_own_of_extension = !op.is_in_protocol() && connection.session.is_some();
    if !is_own_of_extension && let Err(unsupported) = connection.codec.check_expressible(node) {
        return Some(Unsupported { op, reason: unsupported.to_string() });
    }
    let srcs = (0..MAX_SRC).filter_map(|i| node.srcs.get(i));
    let large = srcs.chain([node.dst]).find(|desc| !fits_wire(desc))?;
    let reason = format!("a tensor of shape {:?}: the RPC protocol has dimensions below 2^32", large.ne());
    Some(Unsupported { op: node.op.code(), reason })
}

impl RemoteProgram {
    /// Checks that a graph can be sent, and splits it into messages.
    pub(super) fn new(graph: &Graph, remote: &RemoteDevice) -> Result<RemoteProgram, DeviceError> {
        for node in graph.nodes() {
            let view = graph
                .node_view(node)
                .ok_or(DeviceError::Misuse("a graph with a node whose tensors it does not contain"))?;
            if let Some(unsupported) = not_expressible(&view, &remote.connection) {
                return Err(unsupported.into());
            }
        }
        let max_bytes = remote.connection.session.as_ref().map_or(u64::MAX, |session| session.server().max_message);
        let node_ranges = split_nodes(graph, max_bytes);
        Ok(RemoteProgram {
            connection: Arc::clone(&remote.connection),
            device: remote.index,
            node_ranges,
            messages: Mutex::default(),
        })
    }

    pub(super) fn belongs_to(&self, remote: &RemoteDevice) -> bool {
        Arc::ptr_eq(&self.connection, &remote.connection) && self.device == remote.index
    }

    /// The messages that run the graph on these regions; encoded on first use and cached.
    pub(super) fn messages(&self, graph: &Graph, bindings: &[Region]) -> Result<Arc<[GraphMessage]>, DeviceError> {
        let key: BindingKey = bindings.iter().map(|region| (region.buffer().id(), region.offset())).collect();
        let mut cached = lock(&self.messages);
        if let Some(at) = cached.iter().position(|(of, _)| *of == key) {
            cached[at..].rotate_left(1);
            return cached.last().map(|(_, messages)| Arc::clone(messages)).ok_or(DeviceError::Ended);
        }
        let encoded = self.node_ranges.iter().map(|part| encode_message(graph, part.clone(), self, bindings));
        let encoded: Arc<[GraphMessage]> = encoded.collect::<Result<_, _>>()?;
        if cached.len() == MAX_CACHED_BINDINGS {
            cached.remove(0);
        }
        cached.push((key, Arc::clone(&encoded)));
        Ok(encoded)
    }
}

/// Splits the graph into messages of at most `max_bytes` bytes. A single node always fits.
fn split_nodes(graph: &Graph, max_bytes: u64) -> Vec<Range<usize>> {
    let (mut node_ranges, mut part) = (Vec::new(), 0..0);
    let mut bytes = PREPARE_GRAPH_HEAD_BYTES;
    let (mut recorded, mut written) = (HashSet::new(), HashSet::new());
    // Bytes that a node adds to the current message, or to a new one (`first`).
    let mut cost = |node: &Node, first: bool| {
        if first {
            recorded.clear();
            written.clear();
        }
        let fresh = node_tensors(node).filter(|id| recorded.insert(*id)).count();
        // A tensor that is written by a second node needs a second record.
        let again = usize::from(!written.insert(node.dst));
        (NODE_ID_BYTES + (fresh + again) * TENSOR_RECORD) as u64
    };
    for (at, node) in graph.nodes().iter().enumerate() {
        bytes += cost(node, part.is_empty());
        if !part.is_empty() && (part.len() == MAX_NODES_PER_MESSAGE || bytes > max_bytes) {
            node_ranges.push(std::mem::replace(&mut part, at..at));
            bytes = PREPARE_GRAPH_HEAD_BYTES + cost(node, true);
        }
        part.end = at + 1;
    }
    node_ranges.extend(Some(part).filter(|part| !part.is_empty()));
    node_ranges
}

/// The sources and the destination of a node.
fn node_tensors(node: &Node) -> impl Iterator<Item = TensorId> {
    node.srcs.into_iter().flatten().chain([node.dst])
}

fn encode_message(
    graph: &Graph,
    nodes: Range<usize>,
    program: &RemoteProgram,
    bindings: &[Region],
) -> Result<GraphMessage, DeviceError> {
    let mut records = RecordEncoder { graph, bindings, ids: HashMap::new(), order: Vec::new(), encoded: Vec::new() };
    let nodes = graph.nodes().get(nodes).unwrap_or_default();
    for id in nodes.iter().flat_map(node_tensors) {
        records.assign_id(id);
    }
    let mut computed = HashMap::with_capacity(nodes.len());
    let mut listed = Vec::with_capacity(nodes.len());
    for node in nodes {
        let id = records.ids.get(&node.dst).copied().unwrap_or(0);
        match computed.entry(node.dst) {
            std::collections::hash_map::Entry::Vacant(first) => {
                first.insert(node);
                listed.push(id);
            }
            // A second node writes the same tensor: a second record with another id describes the same bytes.
            std::collections::hash_map::Entry::Occupied(_) => listed.push(records.encode_again(node)?),
        }
    }
    for id in std::mem::take(&mut records.order) {
        records.encode(id, computed.get(&id).copied())?;
    }
    let listed: Vec<_> = listed.into_iter().map(u64::to_le_bytes).collect();
    let bug = |e: &dyn Display| DeviceError::Bug(format!("a graph that does not fit a message: {e}"));
    let graph = GraphCompute::new(program.device, &listed, &records.encoded).map_err(|e| bug(&e))?;
    let id = NEXT_MESSAGE_ID.fetch_add(1, Ordering::Relaxed);
    let mut frame = Vec::new();
    if program.connection.session.is_some() {
        // PREPARE_GRAPH of the extensions has an id of its own, and contains this body without a uid.
        Request::GraphCompute(graph).encode(&mut frame);
    } else {
        let request = Request::GraphCompute(graph.with_uid(id));
        program.connection.codec.encode(&request, &mut frame).map_err(|e| bug(&e))?;
    }
    Ok(GraphMessage { id, frame })
}

/// Encoder of the tensor records of one message.
struct RecordEncoder<'a> {
    graph: &'a Graph,
    bindings: &'a [Region],
    /// Ids of the tensors, from 1; 0 stands for no tensor.
    ids: HashMap<TensorId, u64>,
    /// The tensors in the order of their ids.
    order: Vec<TensorId>,
    encoded: Vec<[u8; TENSOR_RECORD]>,
}

impl RecordEncoder<'_> {
    fn assign_id(&mut self, id: TensorId) {
        let next = self.order.len() as u64 + 1;
        self.ids.entry(id).or_insert_with(|| {
            self.order.push(id);
            next
        });
    }

    /// Appends the record of a tensor, with the op of `node` if a node writes it.
    fn encode(&mut self, id: TensorId, node: Option<&Node>) -> Result<(), DeviceError> {
        let tensor = self.tensor(id)?;
        let number = self.ids.get(&id).copied().unwrap_or(0);
        let mut record = self.record(number, tensor)?;
        match node {
            Some(node) => self.set_op(&mut record, node),
            None => self.set_view_source(&mut record, tensor),
        }
        self.encoded.push(record.encode());
        Ok(())
    }

    /// Appends a second record for a node's destination, and returns its id.
    fn encode_again(&mut self, node: &Node) -> Result<u64, DeviceError> {
        // Second records get ids above the ids of all tensors.
        let number = self.graph.tensors().len() as u64 + 1 + self.encoded.len() as u64;
        let mut record = self.record(number, self.tensor(node.dst)?)?;
        self.set_op(&mut record, node);
        self.encoded.push(record.encode());
        Ok(number)
    }

    fn tensor(&self, id: TensorId) -> Result<&Tensor, DeviceError> {
        self.graph.tensor(id).ok_or(DeviceError::Misuse("a graph with a node whose tensors it does not contain"))
    }

    fn record(&self, id: u64, tensor: &Tensor) -> Result<TensorRecord, DeviceError> {
        let mut record = TensorRecord { id, ..tensor_record(&tensor.desc) };
        record.use_count = tensor.use_count.map_or(0, |n| i32::try_from(n).unwrap_or(i32::MAX));
        if let Some(place) = tensor.place {
            let unbound = DeviceError::Misuse("the bindings do not fit the program's slots");
            let region = self.bindings.get(place.slot as usize).ok_or(unbound)?;
            let memory = remote_buffer(region)?;
            (record.buffer, record.data) = (memory.handle, memory.base + region.offset() + place.offset as u64);
        }
        Ok(record)
    }

    fn set_op(&self, record: &mut TensorRecord, node: &Node) {
        record.op = node.op.code().to_wire();
        record.op_params = node.op.encode().0;
        record.flags = TensorRecord::FLAG_COMPUTE;
        for (i, (slot, src)) in record.src.iter_mut().zip(node.srcs).enumerate() {
            *slot = match src {
                Some(src) => self.ids.get(&src).copied().unwrap_or(0),
                // In the graph only the destination identifies the written tensor. The wire format needs it as a source, too: a
                // CPY names itself.
                None if node.op.writes_onto(i) => record.id,
                None => 0,
            };
        }
    }

    /// Encodes a tensor without a node as a VIEW of another tensor of this message, where it aliases one. A server can then
    /// skip writing an intermediate result that is read only through such views.
    fn set_view_source(&self, record: &mut TensorRecord, view: &Tensor) {
        let source = view.view_of.and_then(|of| Some((*self.ids.get(&of)?, self.graph.tensor(of)?)));
        let Some((of, source)) = source else { return };
        let (Some(place), Some(source_place)) = (view.place, source.place) else { return };
        let offset = place.offset.checked_sub(source_place.offset).filter(|_| place.slot == source_place.slot);
        if let Some(offset) = offset {
            (record.op, record.src[0]) = (OpCode::View.to_wire(), of);
            (record.view_src, record.view_offs) = (of, offset as u64);
        }
    }
}

/// Whether a tensor's dimensions fit the wire format's 32 bits.
pub(super) fn fits_wire(desc: &TensorDesc) -> bool {
    desc.ne().into_iter().all(|n| u32::try_from(n).is_ok())
}

/// Encodes type, shape and strides of a tensor, for which [`fits_wire`] must hold.
pub(super) fn tensor_record(desc: &TensorDesc) -> TensorRecord {
    let mut record = TensorRecord::decode(&[0; TENSOR_RECORD]);
    record.dtype = desc.dtype().to_wire();
    record.ne = desc.ne().map(|n| n as u32);
    // The wire format has the low 32 bits of each stride; servers reconstruct the upper half from the shape.
    record.nb = desc.nb().map(|n| n as u32);
    record
}

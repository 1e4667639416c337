//! A graph as the body of a GRAPH_COMPUTE.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::connection::{Connection, lock};
use super::device::{RemoteDevice, remote_buffer};
use super::extended::MIN_MESSAGE_LIMIT_BYTES;
use crate::device::{DeviceError, Region, Unsupported};
use crate::graph::{Graph, Node, Tensor, TensorId};
use crate::ops::{MAX_SRC, NodeView, OpCode};
use crate::rpc::wire::{Dialect, GraphCompute, Request, TENSOR_RECORD, TensorRecord};
use crate::tensor::TensorDesc;

/// Nodes of one message: so many, with all that they read, stay below what servers take in one.
const MAX_NODES_PER_MESSAGE: usize = 8192;

/// Bytes of a KEEP_GRAPH besides its nodes and tensors: its number, the device, and two counts.
const KEEP_GRAPH_HEAD_BYTES: u64 = 8 + 4 + 4 + 4;

/// Bytes of a node in the list of them.
const NODE_ID_BYTES: usize = 8;

// The smallest message that a server may limit its clients to holds a node with all that it reads.
const _: () =
    assert!(KEEP_GRAPH_HEAD_BYTES + (NODE_ID_BYTES + (MAX_SRC + 1) * TENSOR_RECORD) as u64 <= MIN_MESSAGE_LIMIT_BYTES);

/// Bodies that a program keeps: one for each copy of its inputs that a scheduler alternates between.
const MAX_CACHED_BINDINGS: usize = 16;

/// Counts the bodies of this process.
static NEXT_MESSAGE_ID: AtomicU64 = AtomicU64::new(1);

/// A whole GRAPH_COMPUTE message, bound to buffers.
pub(super) struct GraphMessage {
    id: u64,
    frame: Vec<u8>,
}

impl GraphMessage {
    /// A number that no other body of this process has.
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
    /// Nodes of each message.
    node_ranges: Vec<Range<usize>>,
    /// By the regions that they are bound to, those used last at the end.
    messages: Mutex<Vec<(BindingKey, Arc<[GraphMessage]>)>>,
}

/// Buffers, by numbers that are never used again, and offsets of the bound regions.
type BindingKey = Vec<(u64, u64)>;

/// What of a node the wire cannot say, as the server speaks it.
pub(super) fn not_expressible(node: &NodeView<'_>, dialect: &Dialect) -> Option<Unsupported> {
    if let Err(no) = dialect.says(node) {
        return Some(Unsupported { op: node.op.code(), reason: no.to_string() });
    }
    let srcs = (0..MAX_SRC).filter_map(|i| node.srcs.get(i));
    let large = srcs.chain([node.dst]).find(|desc| !fits_wire(desc))?;
    let reason = format!("a tensor of shape {:?}: the RPC protocol has dimensions below 2^32", large.ne());
    Some(Unsupported { op: node.op.code(), reason })
}

impl RemoteProgram {
    /// Checks that a graph can be sent.
    pub(super) fn new(graph: &Graph, remote: &RemoteDevice) -> Result<RemoteProgram, DeviceError> {
        for node in graph.nodes() {
            let view =
                graph.node_view(node).ok_or(DeviceError::Misuse("a graph with a node of tensors that it has not"))?;
            if let Some(no) = not_expressible(&view, remote.connection.dialect) {
                return Err(no.into());
            }
        }
        let most = remote.connection.session.as_ref().map_or(u64::MAX, |session| session.server().max_message);
        let parts = split_nodes(graph, most);
        Ok(RemoteProgram {
            connection: Arc::clone(&remote.connection),
            device: remote.index,
            node_ranges: parts,
            messages: Mutex::default(),
        })
    }

    pub(super) fn belongs_to(&self, remote: &RemoteDevice) -> bool {
        Arc::ptr_eq(&self.connection, &remote.connection) && self.device == remote.index
    }

    /// The messages that run the graph on these regions.
    pub(super) fn messages(&self, graph: &Graph, bindings: &[Region]) -> Result<Arc<[GraphMessage]>, DeviceError> {
        let key: BindingKey = bindings.iter().map(|region| (region.buffer().id(), region.offset())).collect();
        let mut bodies = lock(&self.messages);
        if let Some(at) = bodies.iter().position(|(of, _)| *of == key) {
            bodies[at..].rotate_left(1);
            return bodies.last().map(|(_, body)| Arc::clone(body)).ok_or(DeviceError::Ended);
        }
        let made = self.node_ranges.iter().map(|part| encode_message(graph, part.clone(), self, bindings));
        let made: Arc<[GraphMessage]> = made.collect::<Result<_, _>>()?;
        if bodies.len() == MAX_CACHED_BINDINGS {
            bodies.remove(0);
        }
        bodies.push((key, Arc::clone(&made)));
        Ok(made)
    }
}

/// The nodes of each message, which has at most so many bytes. A single node always fits.
fn split_nodes(graph: &Graph, most: u64) -> Vec<Range<usize>> {
    let (mut parts, mut part) = (Vec::new(), 0..0);
    let mut bytes = KEEP_GRAPH_HEAD_BYTES;
    let (mut known, mut written) = (HashSet::new(), HashSet::new());
    let mut cost = |node: &Node, first: bool| {
        if first {
            known.clear();
            written.clear();
        }
        let fresh = node_tensors(node).filter(|id| known.insert(*id)).count();
        // A tensor that is written again has another record.
        let again = usize::from(!written.insert(node.dst));
        (NODE_ID_BYTES + (fresh + again) * TENSOR_RECORD) as u64
    };
    for (at, node) in graph.nodes().iter().enumerate() {
        bytes += cost(node, part.is_empty());
        if !part.is_empty() && (part.len() == MAX_NODES_PER_MESSAGE || bytes > most) {
            parts.push(std::mem::replace(&mut part, at..at));
            bytes = KEEP_GRAPH_HEAD_BYTES + cost(node, true);
        }
        part.end = at + 1;
    }
    parts.extend(Some(part).filter(|part| !part.is_empty()));
    parts
}

/// What a node reads, and what it writes.
fn node_tensors(node: &Node) -> impl Iterator<Item = TensorId> {
    node.srcs.into_iter().flatten().chain([node.dst])
}

fn encode_message(
    graph: &Graph,
    nodes: Range<usize>,
    code: &RemoteProgram,
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
            // A tensor that is written again: the same bytes under another id, which is listed where the node is.
            std::collections::hash_map::Entry::Occupied(_) => listed.push(records.encode_again(node)?),
        }
    }
    for id in std::mem::take(&mut records.order) {
        records.encode(id, computed.get(&id).copied())?;
    }
    let listed: Vec<_> = listed.into_iter().map(u64::to_le_bytes).collect();
    let bug = |e: &dyn Display| DeviceError::Bug(format!("a graph that no message holds: {e}"));
    let graph = GraphCompute::new(code.device, &listed, &records.encoded).map_err(|e| bug(&e))?;
    let mut frame = Vec::new();
    code.connection.dialect.encode(&Request::GraphCompute(graph), &mut frame).map_err(|e| bug(&e))?;
    Ok(GraphMessage { id: NEXT_MESSAGE_ID.fetch_add(1, Ordering::Relaxed), frame })
}

/// The records of a graph in the making.
struct RecordEncoder<'a> {
    graph: &'a Graph,
    bindings: &'a [Region],
    /// From 1; 0 is none.
    ids: HashMap<TensorId, u64>,
    /// The tensors of the ids, in their order.
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

    /// Another record of a node's destination.
    fn encode_again(&mut self, node: &Node) -> Result<u64, DeviceError> {
        // Above those of all tensors.
        let number = self.graph.tensors().len() as u64 + 1 + self.encoded.len() as u64;
        let mut record = self.record(number, self.tensor(node.dst)?)?;
        self.set_op(&mut record, node);
        self.encoded.push(record.encode());
        Ok(number)
    }

    fn tensor(&self, id: TensorId) -> Result<&Tensor, DeviceError> {
        self.graph.tensor(id).ok_or(DeviceError::Misuse("a graph with a node of tensors that it has not"))
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
                // Where only the destination says what is written, the wire wants it said: a CPY names itself.
                None if node.op.writes_onto(i) => record.id,
                None => 0,
            };
        }
    }

    /// A tensor that re-describes another one of this message: from that a server may learn that a result need not be
    /// written for it.
    fn set_view_source(&self, record: &mut TensorRecord, view: &Tensor) {
        let shown = view.view_of.and_then(|of| Some((*self.ids.get(&of)?, self.graph.tensor(of)?)));
        let Some((of, shown)) = shown else { return };
        let (Some(here), Some(there)) = (view.place, shown.place) else { return };
        let offset = here.offset.checked_sub(there.offset).filter(|_| here.slot == there.slot);
        if let Some(offset) = offset {
            (record.op, record.src[0]) = (OpCode::View.to_wire(), of);
            (record.view_src, record.view_offs) = (of, offset as u64);
        }
    }
}

/// Whether a tensor's dimensions fit the wire.
pub(super) fn fits_wire(desc: &TensorDesc) -> bool {
    desc.ne().into_iter().all(|n| u32::try_from(n).is_ok())
}

/// A tensor's type, shape and strides, whose dimensions are known to fit.
pub(super) fn tensor_record(desc: &TensorDesc) -> TensorRecord {
    let mut record = TensorRecord::decode(&[0; TENSOR_RECORD]);
    record.dtype = desc.dtype().to_wire();
    record.ne = desc.ne().map(|n| n as u32);
    // The wire keeps the low half of strides, and servers know how to make it whole.
    record.nb = desc.nb().map(|n| n as u32);
    record
}

//! Graphs as messages of protocol 7.0: the memory of their tensors on the server, and their records.

use crate::session::encode;
use fanout::graph::{Graph, Node, Tensor, TensorId};
use fanout::ops::OpCode;
use fanout::rpc::wire::{GetTensor, GraphCompute, Request, SetTensor, SetTensorHead, TENSOR_RECORD, TensorRecord};
use std::collections::HashMap;
use std::io::{Error, Result};

/// Alignment of tensors in a buffer.
const ALIGN: u64 = 64;

/// A graph whose tensors have memory on a server, and therefore records.
pub(crate) struct WireGraph {
    /// In the order of their ids, which start at 1.
    records: Vec<TensorRecord>,
    /// Ids of the records that are nodes.
    nodes: Vec<u64>,
    /// The id of each tensor; of one that several nodes write, that of the last of them.
    ids: HashMap<TensorId, u64>,
}

impl WireGraph {
    /// Gives the slots of `graph` memory: those of quantised weights in one buffer, the others in a second one. `allocate`
    /// returns the handle and the address of a new buffer.
    pub(crate) fn new(graph: &Graph, mut allocate: impl FnMut(u64) -> Result<(u64, u64)>) -> Result<WireGraph> {
        let mut is_weight = vec![false; graph.slot_sizes().len()];
        for tensor in graph.tensors() {
            if let Some(place) = tensor.place.filter(|_| tensor.desc.dtype().is_block()) {
                is_weight[place.slot as usize] = true;
            }
        }
        let mut sizes = [0; 2];
        let place_slot = |(&size, &is_weight): (&usize, &bool)| {
            let end = &mut sizes[usize::from(is_weight)];
            let offset = *end;
            *end += (size as u64).next_multiple_of(ALIGN);
            (usize::from(is_weight), offset)
        };
        let places: Vec<_> = graph.slot_sizes().iter().zip(&is_weight).map(place_slot).collect();
        let mut buffers = [(0, 0); 2];
        for (buffer, size) in buffers.iter_mut().zip(sizes).filter(|(_, size)| *size > 0) {
            *buffer = allocate(size)?;
        }
        let address = |tensor: &Tensor| {
            let place = tensor.place.ok_or_else(|| Error::other("a tensor without memory"))?;
            let (buffer, offset) = places[place.slot as usize];
            Ok((buffers[buffer].0, buffers[buffer].1 + offset + place.offset as u64))
        };
        let mut encoded = WireGraph { records: Vec::new(), nodes: Vec::new(), ids: HashMap::new() };
        for node in graph.nodes() {
            encoded.add_node(graph, node, &address)?;
        }
        Ok(encoded)
    }

    fn add_node(&mut self, graph: &Graph, node: &Node, address: &dyn Fn(&Tensor) -> Result<(u64, u64)>) -> Result<()> {
        let mut src = [0; 10];
        for (id, tensor) in src.iter_mut().zip(node.srcs) {
            let Some(tensor) = tensor else { continue };
            *id = self.source(graph, tensor, address)?;
            self.record(*id).use_count += 1;
        }
        let id = self.push(graph, node.dst, address)?;
        let record = self.record(id);
        record.op = op_number(node.op.code());
        record.op_params = node.op.encode().0;
        record.flags = TensorRecord::FLAG_COMPUTE;
        record.src = src;
        self.nodes.push(id);
        Ok(())
    }

    /// The id of a tensor that a node reads. A leaf, or a view and what it shows, gets its record now.
    fn source(
        &mut self,
        graph: &Graph,
        tensor: TensorId,
        address: &dyn Fn(&Tensor) -> Result<(u64, u64)>,
    ) -> Result<u64> {
        if let Some(&id) = self.ids.get(&tensor) {
            return Ok(id);
        }
        let viewed = graph.tensor(tensor).and_then(|tensor| tensor.view_of);
        let of = viewed.map(|of| self.source(graph, of, address)).transpose()?;
        let id = self.push(graph, tensor, address)?;
        if let Some(of) = of {
            self.record(of).use_count += 1;
            let parent = self.record(of).data;
            let view = self.record(id);
            (view.op, view.src[0]) = (OpCode::View.to_wire(), of);
            (view.view_src, view.view_offs) = (of, view.data - parent);
        }
        Ok(id)
    }

    fn push(
        &mut self,
        graph: &Graph,
        tensor: TensorId,
        address: &dyn Fn(&Tensor) -> Result<(u64, u64)>,
    ) -> Result<u64> {
        let id = self.records.len() as u64 + 1;
        let described = graph.tensor(tensor).ok_or_else(|| Error::other("an unknown tensor"))?;
        let (buffer, data) = address(described)?;
        self.records.push(TensorRecord {
            id,
            dtype: described.desc.dtype().to_wire(),
            buffer,
            ne: described.desc.ne().map(|n| n as u32),
            nb: described.desc.nb().map(|n| n as u32),
            data,
            ..TensorRecord::decode(&[0; TENSOR_RECORD])
        });
        self.ids.insert(tensor, id);
        Ok(id)
    }

    fn record(&mut self, id: u64) -> &mut TensorRecord {
        &mut self.records[id as usize - 1]
    }

    /// Passes the graph to `use_graph`.
    fn with_body<T>(&self, use_graph: impl FnOnce(GraphCompute<'_>) -> T) -> Result<T> {
        let nodes: Vec<_> = self.nodes.iter().map(|id| id.to_le_bytes()).collect();
        let tensors: Vec<_> = self.records.iter().map(TensorRecord::encode).collect();
        GraphCompute::new(0, &nodes, &tensors).map(use_graph).map_err(Error::other)
    }

    /// A GRAPH_COMPUTE. It ends with the record of the last node.
    pub(crate) fn compute(&self) -> Result<Vec<u8>> {
        self.with_body(|graph| encode(&Request::GraphCompute(graph)))
    }

    /// A PREPARE_GRAPH of the extensions.
    pub(crate) fn prepare(&self, id: u64) -> Result<Vec<u8>> {
        use fanout::rpc::wire::ext::{ExtRequest, PrepareGraph};
        self.with_body(|graph| crate::session::encode_ext(&ExtRequest::PrepareGraph(PrepareGraph { id, graph })))
    }

    fn tensor(&self, tensor: TensorId) -> TensorRecord {
        self.records[self.ids[&tensor] as usize - 1].clone()
    }

    /// A SET_TENSOR of a whole leaf.
    pub(crate) fn write(&self, tensor: TensorId, data: &[u8]) -> Vec<u8> {
        let head = SetTensorHead { tensor: self.tensor(tensor), cache: false, offset: 0 };
        encode(&Request::SetTensor(SetTensor { head, data }))
    }

    /// A GET_TENSOR of the first `size` bytes.
    pub(crate) fn read(&self, tensor: TensorId, size: u64) -> Vec<u8> {
        encode(&Request::GetTensor(GetTensor { tensor: self.tensor(tensor), offset: 0, size }))
    }
}

/// The number of an op in 7.0, which lacks one op of the newest version.
fn op_number(op: OpCode) -> u32 {
    op.to_wire() - u32::from(op > OpCode::TopKMask)
}

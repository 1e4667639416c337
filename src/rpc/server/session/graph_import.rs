//! Graph import: validates a graph from the wire, compiles it for a device, and binds it to the session's buffers.

use std::collections::HashMap;
use std::sync::Arc;

use super::failure::SessionError;
use super::handle_table::HandleTable;
use super::program_cache::BoundProgram;
use super::request_error::RequestError;
use crate::device::{Device, Region};
use crate::graph::SlotOffset;
use crate::graph::validate::{self, GraphError, OpSet, UntrustedTensor};
use crate::ops::OpCode;
use crate::rpc::wire::{GraphCompute, TensorRecord};

/// An imported graph: the bound program, and the handles of the buffers to which it is bound.
pub(in crate::rpc::server) struct ImportedGraph {
    pub(in crate::rpc::server) program: BoundProgram,
    pub(in crate::rpc::server) buffers: Box<[u64]>,
}

/// Validates a graph and compiles it for `device`, which must be the device that the graph names.
///
/// # Errors
/// [`RequestError`] if the graph is invalid or a tensor lies outside its buffer; the error of [`Device::prepare`].
pub(in crate::rpc::server) fn import_graph(
    graph: &GraphCompute<'_>,
    handles: &HandleTable,
    device: &dyn Device,
    ops: OpSet,
) -> Result<ImportedGraph, SessionError> {
    let index = graph.device();
    let mut slots = BufferSlots { handles, device: index, by_handle: HashMap::new(), bindings: Vec::new() };
    let mut tensors = Vec::with_capacity(graph.tensors().len());
    for record in graph.tensors().iter() {
        // Records without elements may lie anywhere, as at llama.cpp's server; they get a place below.
        let place = if is_empty(&record) { Ok(None) } else { slots.slot_offset(&record) };
        tensors.push(UntrustedTensor {
            id: record.id,
            dtype: record.dtype,
            ne: record.ne,
            nb: record.nb,
            op: record.op,
            params: record.op_params,
            flags: record.flags,
            srcs: record.src,
            use_count: record.use_count,
            place: match place {
                // Most placement errors matter only if a node uses the tensor; `first_placement_error` reports them then.
                Err(e @ RequestError::AddressWithoutBuffer { .. }) => return Err(e.into()),
                place => place.unwrap_or(None),
            },
        });
    }
    // Nothing reads a place without elements, so the start of any slot is one.
    if !slots.bindings.is_empty() {
        for tensor in tensors.iter_mut().filter(|tensor| tensor.ne.contains(&0)) {
            tensor.place = Some(SlotOffset { slot: 0, offset: 0 });
        }
    }
    let listed: Vec<u64> = graph.nodes().iter().collect();
    let sizes = slots.bindings.iter().map(|region| region.bytes() as usize).collect();
    let valid = validate::import_untrusted(&listed, &tensors, sizes, ops).map_err(|e| match e {
        GraphError::Unplaced { .. } => slots.first_placement_error(graph).unwrap_or(RequestError::InvalidGraph(e)),
        e => RequestError::InvalidGraph(e),
    })?;
    // Freed before `prepare`, which needs memory too: this is the largest allocation of the import.
    drop(tensors);
    let program = device.prepare(Arc::new(valid))?;
    let buffers = slots.by_handle.into_keys().collect();
    Ok(ImportedGraph { program: BoundProgram { program, bindings: slots.bindings.into() }, buffers })
}

/// Whether a tensor has no elements.
fn is_empty(record: &TensorRecord) -> bool {
    record.ne.contains(&0)
}

/// Assigns a slot to each buffer in which tensors of the graph lie.
struct BufferSlots<'a> {
    handles: &'a HandleTable,
    device: u32,
    by_handle: HashMap<u64, u32>,
    bindings: Vec<Region>,
}

impl BufferSlots<'_> {
    /// The slot and offset of a tensor; `None` if the record names neither a buffer nor an address.
    ///
    /// # Errors
    /// The buffer does not exist, the address is outside of it, or it lies on another device than the graph's.
    fn slot_offset(&mut self, record: &TensorRecord) -> Result<Option<SlotOffset>, RequestError> {
        if record.buffer == 0 {
            return match record.data {
                0 => Ok(None),
                data => Err(RequestError::AddressWithoutBuffer { name: record.name().into_owned(), data }),
            };
        }
        let (entry, start) = self.handles.resolve_address(record)?;
        if entry.device != self.device {
            let name = record.name().into_owned();
            return Err(RequestError::TensorOnOtherDevice { name, lies_on: entry.device, runs_on: self.device });
        }
        let slot = *self.by_handle.entry(record.buffer).or_insert_with(|| {
            self.bindings.push(entry.buffer.whole());
            (self.bindings.len() - 1) as u32 // no more than tensor records, whose count is a u32
        });
        Ok(Some(SlotOffset { slot, offset: start as usize }))
    }

    /// The first placement error among the tensors that computing nodes read or write. It is more specific than
    /// [`GraphError::Unplaced`]. `None` if these tensors just name no buffer.
    fn first_placement_error(&mut self, graph: &GraphCompute<'_>) -> Option<RequestError> {
        let records: HashMap<u64, TensorRecord> = graph.tensors().iter().map(|r| (r.id, r)).collect();
        for node in graph.nodes().iter().filter_map(|id| records.get(&id)) {
            let computes = node.flags & TensorRecord::FLAG_COMPUTE != 0 && !is_empty(node);
            if !computes || OpCode::from_wire(node.op).is_none_or(OpCode::is_view) {
                continue;
            }
            for record in node.src.iter().filter_map(|id| records.get(id)).chain([node]).filter(|r| !is_empty(r)) {
                if let Err(reason) = self.slot_offset(record) {
                    return Some(reason);
                }
            }
        }
        None
    }
}

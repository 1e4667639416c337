//! Graph import: from a graph on the wire to a program that is bound to the session's buffers.

use std::collections::HashMap;
use std::sync::Arc;

use super::failure::SessionError;
use super::handle_table::HandleTable;
use super::program_cache::Prepared;
use super::request_error::RequestError;
use crate::device::{Device, Region};
use crate::graph::SlotOffset;
use crate::graph::validate::{self, GraphError, UntrustedTensor};
use crate::ops::OpCode;
use crate::rpc::wire::{GraphCompute, TensorRecord};

/// A program with the handles of the buffers that it is bound to.
pub(in crate::rpc::server) struct Imported {
    pub(in crate::rpc::server) prepared: Prepared,
    pub(in crate::rpc::server) buffers: Box<[u64]>,
}

/// Validates a graph and prepares it on `device`, which is the one that the graph names.
pub(in crate::rpc::server) fn import(
    graph: &GraphCompute<'_>,
    handles: &HandleTable,
    device: &dyn Device,
) -> Result<Imported, SessionError> {
    let index = graph.device();
    let mut slots = Slots { handles, device: index, by_handle: HashMap::new(), bindings: Vec::new() };
    let mut tensors = Vec::with_capacity(graph.tensors().len());
    for record in graph.tensors().iter() {
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
            // Why a tensor has no place matters only if a node needs one: see `explain`.
            place: match slots.place(&record) {
                Err(e @ RequestError::Stray { .. }) => return Err(e.into()),
                place => place.unwrap_or(None),
            },
        });
    }
    let listed: Vec<u64> = graph.nodes().iter().collect();
    let sizes = slots.bindings.iter().map(|region| region.bytes() as usize).collect();
    let valid = validate::import_untrusted(&listed, &tensors, sizes).map_err(|e| match e {
        GraphError::Unplaced { .. } => slots.explain(graph).unwrap_or(RequestError::Graph(e)),
        e => RequestError::Graph(e),
    })?;
    // The largest thing here, and of no use any more: memory for what comes now.
    drop(tensors);
    let program = device.prepare(Arc::new(valid))?;
    let buffers = slots.by_handle.into_keys().collect();
    Ok(Imported { prepared: Prepared { program, bindings: slots.bindings.into() }, buffers })
}

/// The buffers that a graph's tensors lie in.
struct Slots<'a> {
    handles: &'a HandleTable,
    device: u32,
    by_handle: HashMap<u64, u32>,
    bindings: Vec<Region>,
}

impl Slots<'_> {
    /// A tensor's place; `None` if it says that it has none here.
    fn place(&mut self, record: &TensorRecord) -> Result<Option<SlotOffset>, RequestError> {
        if record.buffer == 0 {
            return match record.data {
                0 => Ok(None),
                data => Err(RequestError::Stray { name: record.name().into_owned(), data }),
            };
        }
        let (entry, start) = self.handles.place(record)?;
        if entry.device != self.device {
            let name = record.name().into_owned();
            return Err(RequestError::OtherDevice { name, lies_on: entry.device, runs_on: self.device });
        }
        let slot = *self.by_handle.entry(record.buffer).or_insert_with(|| {
            self.bindings.push(entry.buffer.whole());
            (self.bindings.len() - 1) as u32 // no more than tensor records, whose count is a u32
        });
        Ok(Some(SlotOffset { slot, offset: start as usize }))
    }

    /// Why a tensor that a node needs has no place: the reason of the first one that has a better one than "nowhere".
    fn explain(&mut self, graph: &GraphCompute<'_>) -> Option<RequestError> {
        let records: HashMap<u64, TensorRecord> = graph.tensors().iter().map(|r| (r.id, r)).collect();
        for node in graph.nodes().iter().filter_map(|id| records.get(&id)) {
            let computes = node.flags & TensorRecord::FLAG_COMPUTE != 0 && !node.ne.contains(&0);
            if !computes || OpCode::from_wire(node.op).is_none_or(OpCode::is_view) {
                continue;
            }
            for record in node.src.iter().filter_map(|id| records.get(id)).chain([node]) {
                if let Err(reason) = self.place(record) {
                    return Some(reason);
                }
            }
        }
        None
    }
}

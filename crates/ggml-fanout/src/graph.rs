//! Graphs of the host as programs of a device.

use crate::abi::{Buffer, FLAG_OUTPUT, MAX_SRC, Tensor};
use crate::buffer::BufferState;
use crate::device::Device;
use crate::host;
use crate::program_cache::{Output, PreparedGraph};
use fanout::graph::SlotOffset;
use fanout::graph::validate::{self, OpSet, UntrustedTensor};
use fanout::ops::OpCode;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Prepares the graph of these nodes for a device. `readers` counts the readers of each in the host's whole graph.
///
/// # Safety
/// `nodes` are nodes of a graph of the host, whose sources are tensors.
pub(crate) unsafe fn prepare(
    device: &'static Device,
    nodes: &[*mut Tensor],
    readers: &[i32],
) -> Result<PreparedGraph, String> {
    // SAFETY: the caller passes valid nodes.
    let tensors = unsafe { tensors_of(nodes) };
    let mut memory = Memory { device, buffers: Vec::new(), states: Vec::new() };
    let mut records = Vec::with_capacity(tensors.len());
    for (pointer, tensor) in &tensors {
        // SAFETY: the host keeps the buffers of a graph that it computes.
        records.push(unsafe { record(*pointer, tensor, &mut memory) }?);
    }
    for ((record, (_, tensor)), &readers) in records.iter_mut().zip(&tensors).zip(readers) {
        // Memory that a view shows may be read by others than the view's readers.
        record.use_count = if tensor.view_src.is_null() || is_view(record.op) { readers } else { 0 };
    }
    let listed: Vec<u64> = records[..nodes.len()].iter().map(|record| record.id).collect();
    let slots = memory.states.iter().map(|state| state.bytes() as usize).collect();
    let graph = validate::import_untrusted(&listed, &records, slots, OpSet::Protocol).map_err(|e| e.to_string())?;
    let (fanout, generation) = device.fanout().map_err(|e| e.to_string())?;
    let program = match graph.nodes() {
        [] => None,
        _ => {
            let program = fanout.prepare(Arc::new(graph)).inspect_err(|e| device.report_loss(generation, e));
            Some(program.map_err(|e| e.to_string())?)
        }
    };
    let writes = tensors[..nodes.len()].iter().zip(&records).filter_map(|((_, tensor), record)| {
        let place = record.place.filter(|_| !is_view(record.op))?;
        let kept = !memory.states[place.slot as usize].is_computed();
        // SAFETY: a copy of a tensor of the host.
        let bytes = unsafe { host::get().tensor_bytes(tensor) };
        kept.then_some((place.slot as usize, place.offset as u64..(place.offset + bytes) as u64))
    });
    let writes = writes.collect();
    let within = readers_within(&tensors, nodes.len());
    let outputs = tensors[..nodes.len()].iter().zip(&records).enumerate().filter_map(|(at, ((_, tensor), record))| {
        let place = record.place.filter(|_| !tensor.ne.contains(&0) && !is_view(record.op))?;
        let flagged = tensor.flags & FLAG_OUTPUT != 0;
        // Read by another part of the host's graph, or by the host.
        let leaves = memory.states[place.slot as usize].is_computed() && (within[at] == 0 || readers[at] > within[at]);
        // SAFETY: a copy of a tensor of the host.
        let bytes = unsafe { host::get().tensor_bytes(tensor) } as u64;
        let always = flagged || device.is_remote() && leaves && bytes <= MAX_SMALL_BYTES;
        let output = Output { buffer: place.slot as usize, start: place.offset as u64, bytes, always };
        (flagged || leaves).then_some(output)
    });
    Ok(PreparedGraph {
        outputs: outputs.collect(),
        writes,
        tensors: tensors.into(),
        readers: readers.into(),
        program,
        bindings: memory.states.iter().map(|state| state.memory()).collect(),
        buffers: memory.buffers.into(),
        serial: SERIAL.fetch_add(1, Ordering::Relaxed),
        generation,
    })
}

/// The number of the next graph.
static SERIAL: AtomicU64 = AtomicU64::new(0);

/// Results that leave a graph on a server are delivered with it up to this size, in bytes: if the server is lost before the host reads
/// them, the graph has failed already. Larger results belong to prompts, whose graphs overlap on several devices.
const MAX_SMALL_BYTES: u64 = 1 << 20;

/// By node: how many nodes of the graph read it.
fn readers_within(tensors: &[(*const Tensor, Tensor)], nodes: usize) -> Vec<i32> {
    let index: HashMap<*const Tensor, usize> =
        tensors[..nodes].iter().enumerate().map(|(at, (pointer, _))| (*pointer, at)).collect();
    let mut readers = vec![0; nodes];
    for (_, tensor) in &tensors[..nodes] {
        for at in tensor.src.iter().filter_map(|&src| index.get(&src.cast_const())) {
            readers[*at] += 1;
        }
    }
    readers
}

/// The tensors of a graph: its nodes, and then their sources that are not nodes.
///
/// # Safety
/// As for [`prepare`].
unsafe fn tensors_of(nodes: &[*mut Tensor]) -> Vec<(*const Tensor, Tensor)> {
    // SAFETY: the caller passes valid nodes, whose sources are valid.
    let copy = |pointer: *const Tensor| (pointer, unsafe { *pointer });
    let mut tensors: Vec<_> = nodes.iter().map(|&node| copy(node)).collect();
    let mut seen: HashSet<*const Tensor> = nodes.iter().map(|&node| node.cast_const()).collect();
    for at in 0..nodes.len() {
        for src in tensors[at].1.src {
            if !src.is_null() && seen.insert(src) {
                tensors.push(copy(src));
            }
        }
    }
    tensors
}

/// Whether an op only shows another tensor.
fn is_view(op: u32) -> bool {
    OpCode::from_wire(op).is_some_and(OpCode::is_view)
}

/// The buffers of a graph.
struct Memory {
    device: &'static Device,
    buffers: Vec<*mut Buffer>,
    states: Vec<&'static BufferState>,
}

impl Memory {
    /// The place of a tensor; `None` if it has no memory of the device.
    ///
    /// # Safety
    /// The tensor's buffer is not freed while the graph is prepared.
    unsafe fn place(&mut self, tensor: &Tensor) -> Option<SlotOffset> {
        // SAFETY: the caller passes a valid buffer; the references do not leave `prepare`.
        let state: &'static BufferState = unsafe { BufferState::of_any(tensor.owner()) }?;
        if !std::ptr::eq(state.device, self.device) {
            return None;
        }
        let slot = self.buffers.iter().position(|known| *known == tensor.owner()).unwrap_or_else(|| {
            self.buffers.push(tensor.owner());
            self.states.push(state);
            self.buffers.len() - 1
        });
        Some(SlotOffset { slot: slot as u32, offset: state.position(tensor, 0) as usize })
    }
}

/// A tensor as a record that fanout imports.
///
/// # Safety
/// As for [`Memory::place`].
unsafe fn record(pointer: *const Tensor, tensor: &Tensor, memory: &mut Memory) -> Result<UntrustedTensor, String> {
    let numbers = &host::get().numbers;
    let (op, params) = numbers
        .op(tensor.op, &tensor.op_params)
        .ok_or_else(|| format!("the host's op number {} is none of fanout's", tensor.op))?;
    let dtype = numbers
        .dtype(tensor.dtype)
        .ok_or_else(|| format!("the host's type number {} is none of fanout's", tensor.dtype))?;
    let mut ne = [0; 4];
    for (to, from) in ne.iter_mut().zip(tensor.ne) {
        *to = u32::try_from(from).map_err(|_| format!("a dimension of {from} elements"))?;
    }
    let nb = tensor.nb.map(|stride| stride as u32);
    if validate::widen_strides(dtype, ne.map(|n: u32| n as usize), nb) != tensor.nb {
        return Err(format!("strides of {:?} bytes, which records cannot have", tensor.nb));
    }
    let mut srcs = [0; MAX_SRC];
    for (to, from) in srcs.iter_mut().zip(tensor.src) {
        *to = from as u64;
    }
    Ok(UntrustedTensor {
        id: pointer as u64,
        dtype: dtype.to_wire(),
        ne,
        nb,
        op: op.to_wire(),
        params,
        flags: tensor.flags,
        srcs,
        use_count: 0,
        // SAFETY: the caller's argument is this function's.
        place: unsafe { memory.place(tensor) },
    })
}

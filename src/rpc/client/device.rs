//! Remote devices and their buffers: the parts that are common to all servers, and the [`Device`] of servers without the
//! extensions.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::completion_probe::{DeviceProgress, DeviceWriteState};
use super::connection::Connection;
use super::ggml_protocol::{GgmlProtocol, MAX_RECORD_BYTES};
use super::graph_messages::{RemoteProgram, fits_wire, not_expressible, tensor_record};
use super::queue::RemoteQueue;
use crate::device::{
    Buffer, Caps, Device, DeviceError, DeviceInfo, DeviceKind, LinkStats, MemoryBudget, MemoryInfo, Program, Queue,
    Region, Reservation, Support,
};
use crate::graph::Graph;
use crate::ops::NodeView;
use crate::poison::lock;
use crate::rpc::wire::{
    AllocBuffer, BufferClear, BufferGetBase, DeviceCount, GetAlignment, GetAllocSize, GetDeviceMemory, GetMaxSize,
    Request, Response, RpcCommand, TENSOR_RECORD, TensorRecord,
};
use crate::tensor::{DType, TensorDesc};

/// Sanity limit: more devices than any server has.
const MAX_DEVICES: u32 = 4096;

/// Sanity limit: more than the alignment of any device, in bytes.
const MAX_ALIGNMENT: u64 = 1 << 20;

/// Size of the probe buffer; completion probes read its first byte.
const PROBE_BUFFER_BYTES: u64 = 64;

/// Some devices pad the rows of quantised tensors to a multiple of this many elements.
const PADDED_ROW_ELEMENTS: usize = 512;

/// Type, shape and strides of a tensor.
type TensorLayout = (DType, [usize; 4], [usize; 4]);

/// A device of a connected server.
#[derive(Debug)]
pub(super) struct RemoteDevice {
    pub(super) connection: Arc<Connection>,
    pub(super) index: u32,
    pub(super) info: DeviceInfo,
    /// Replies to GET_ALLOC_SIZE.
    alloc_sizes: Mutex<HashMap<TensorLayout, u64>>,
}

/// The [`Device`] of a server without the extensions.
#[derive(Debug)]
struct GgmlDevice {
    remote: Arc<RemoteDevice>,
    progress: Arc<DeviceProgress>,
    /// Whether the probe buffer exists. It is allocated for the first queue and lives as long as the connection.
    has_probe_buffer: Mutex<bool>,
}

/// A buffer on a server; dropping it frees it there.
#[derive(Debug)]
pub(super) struct RemoteBuffer {
    pub(super) connection: Arc<Connection>,
    pub(super) device: u32,
    pub(super) handle: u64,
    /// Address of the buffer's first byte on the server.
    pub(super) base: u64,
}

impl Drop for RemoteBuffer {
    fn drop(&mut self) {
        self.connection.defer_free(self.handle);
    }
}

impl RemoteBuffer {
    pub(super) fn belongs_to(&self, connection: &Arc<Connection>) -> bool {
        Arc::ptr_eq(&self.connection, connection)
    }
}

/// The remote buffer of a region.
pub(super) fn remote_buffer(region: &Region) -> Result<&RemoteBuffer, DeviceError> {
    region.buffer().memory().ok_or(DeviceError::Misuse("a region of another kind of device"))
}

/// Lists the devices of a server without the extensions. Servers from before DEVICE_COUNT have one device.
pub(super) fn enumerate(connection: &Arc<Connection>) -> Result<Vec<Arc<dyn Device>>, DeviceError> {
    if connection.codec.command_number(RpcCommand::DeviceCount).is_none() {
        return Ok(vec![open_device(connection, 0)?]);
    }
    let reply = connection.call(&Request::DeviceCount(DeviceCount {}), 4)?;
    let count = match Response::decode(RpcCommand::DeviceCount, &reply) {
        Ok(Response::DeviceCount(count @ 1..=MAX_DEVICES)) => count,
        Ok(Response::DeviceCount(count)) => {
            return Err(connection.fail(format!("the server reports {count} devices, expected 1 to {MAX_DEVICES}")));
        }
        other => return Err(connection.fail(format!("the server replied to DEVICE_COUNT with {other:?}"))),
    };
    let deadline = Instant::now() + connection.reply_timeout;
    let describe = |index| {
        if Instant::now() < deadline {
            return open_device(connection, index);
        }
        let timeout = connection.reply_timeout;
        Err(connection.fail(format!("the server described only {index} of its {count} devices within {timeout:?}")))
    };
    (0..count).map(describe).collect()
}

fn open_device(connection: &Arc<Connection>, index: u32) -> Result<Arc<dyn Device>, DeviceError> {
    let alignment = request_number(connection, &Request::GetAlignment(GetAlignment { device: index }))?;
    let max_buffer = request_number(connection, &Request::GetMaxSize(GetMaxSize { device: index }))?;
    let codec = connection.codec;
    let version_note = if codec.is_newest() { String::new() } else { format!(" (protocol {codec})") };
    let info = DeviceInfo {
        description: format!("device {index} of the RPC server {}{version_note}", connection.endpoint()),
        alignment,
        max_buffer,
        domain: connection.domain(),
        caps: Caps { asynchronous: true, events: true },
        // The protocol has no device kind; the memory is not the host's, so `Gpu` is the closest one.
        ..DeviceInfo::new(format!("{}/{index}", connection.endpoint()), DeviceKind::Gpu)
    };
    let progress = connection.completions.add_device();
    connection.with_writer(|guard| {
        guard.writer.devices.push(DeviceWriteState::default());
        Ok(())
    })?;
    let remote = RemoteDevice::new(connection, index, info)?;
    Ok(Arc::new(GgmlDevice { remote: Arc::new(remote), progress, has_probe_buffer: Mutex::default() }))
}

/// Sends a request for one number, and waits for the reply.
fn request_number(connection: &Connection, request: &Request<'_>) -> Result<u64, DeviceError> {
    let reply = connection.call(request, 8)?;
    match Response::decode(request.command(), &reply) {
        Ok(
            Response::GetAlignment(n)
            | Response::GetMaxSize(n)
            | Response::BufferGetBase(n)
            | Response::GetAllocSize(n),
        ) => Ok(n),
        other => Err(connection.fail(format!("the server replied to {} with {other:?}", request.command()))),
    }
}

impl RemoteDevice {
    /// Validates the server's description of a device.
    pub(super) fn new(
        connection: &Arc<Connection>,
        index: u32,
        mut info: DeviceInfo,
    ) -> Result<RemoteDevice, DeviceError> {
        let DeviceInfo { alignment, max_buffer, .. } = info;
        if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
            return Err(connection.fail(format!(
                "the server reports an alignment of {alignment} bytes for device {index}, expected a power of two up to \
                 {MAX_ALIGNMENT}"
            )));
        }
        if max_buffer == 0 {
            return Err(
                connection.fail(format!("the server reports a maximum buffer size of 0 bytes for device {index}"))
            );
        }
        info.max_buffer = max_buffer.min(i64::MAX as u64);
        Ok(RemoteDevice { connection: Arc::clone(connection), index, info, alloc_sizes: Mutex::default() })
    }

    /// Peer copy: whether the source's server can send bytes to this device's server directly.
    pub(super) fn can_receive_from(&self, source: &Connection) -> bool {
        source.can_send_to(&self.connection)
    }

    pub(super) fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        let request = Request::GetDeviceMemory(GetDeviceMemory { device: self.index });
        let reply = self.connection.call(&request, 16)?;
        match Response::decode(RpcCommand::GetDeviceMemory, &reply) {
            Ok(Response::GetDeviceMemory(memory)) => {
                Ok(MemoryInfo { free: memory.free.min(memory.total), total: memory.total })
            }
            other => Err(self.connection.fail(format!("the server replied to GET_DEVICE_MEMORY with {other:?}"))),
        }
    }

    /// Allocates a buffer with undefined contents. Returns its handle and the address of its first byte.
    fn allocate(&self, bytes: u64) -> Result<(u64, u64), DeviceError> {
        let request = Request::AllocBuffer(AllocBuffer { device: self.index, size: bytes });
        let reply = self.connection.call(&request, 16)?;
        let allocated = match Response::decode(RpcCommand::AllocBuffer, &reply) {
            Ok(Response::AllocBuffer(allocated)) => allocated,
            other => return Err(self.connection.fail(format!("the server replied to ALLOC_BUFFER with {other:?}"))),
        };
        if allocated.remote_ptr == 0 {
            let MemoryInfo { free, total } = self.memory()?;
            return Err(DeviceError::OutOfMemory { requested: bytes, available: free, limit: total });
        }
        let base = Request::BufferGetBase(BufferGetBase { remote_ptr: allocated.remote_ptr });
        let base = request_number(&self.connection, &base)?;
        if allocated.remote_size < bytes || base == 0 || base.checked_add(bytes).is_none() {
            let size = allocated.remote_size;
            let reason =
                format!("the server allocated a buffer of {size} bytes at {base:#x} for a request of {bytes} bytes");
            return Err(self.connection.fail(reason));
        }
        Ok((allocated.remote_ptr, base))
    }

    /// Allocates a buffer with undefined contents. `reservation` is its share of the memory budget.
    pub(super) fn alloc_buffer(&self, bytes: u64, reservation: Reservation) -> Result<Buffer, DeviceError> {
        // Some servers do not support empty buffers.
        let (handle, base) = self.allocate(bytes.max(1))?;
        let memory = RemoteBuffer { connection: Arc::clone(&self.connection), device: self.index, handle, base };
        Ok(Buffer::new(&self.info, bytes, Box::new(memory), Box::new(reservation)))
    }

    /// Bytes that a tensor needs on the device. Sends GET_ALLOC_SIZE only for tensors that a server may pad, once per type,
    /// shape and strides.
    pub(super) fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        let extent = tensor.extent() as u64;
        if tensor.dtype().block_len() == 1 || tensor.ne()[0].is_multiple_of(PADDED_ROW_ELEMENTS) || !fits_wire(tensor) {
            return extent;
        }
        let codec = self.connection.codec;
        if codec.command_number(RpcCommand::GetAllocSize).is_none() || !codec.has_type(tensor.dtype()) {
            // The server cannot be queried: assume the padding that such devices add, the rest of the last row.
            let missing = tensor.ne()[0].next_multiple_of(PADDED_ROW_ELEMENTS) - tensor.ne()[0];
            return extent + (tensor.dtype().blocks(missing) * tensor.dtype().block_bytes()) as u64;
        }
        let key = (tensor.dtype(), tensor.ne(), tensor.nb());
        if let Some(&size) = lock(&self.alloc_sizes).get(&key) {
            return size;
        }
        let no_sources = [[0; TENSOR_RECORD]; crate::ops::MAX_SRC];
        let tensor = TensorRecord { id: 1, ..tensor_record(tensor) };
        let request = Request::GetAllocSize(GetAllocSize { device: self.index, tensor, srcs: &no_sources });
        // On a lost connection the allocation that follows returns the error.
        let size = request_number(&self.connection, &request).map_or(extent, |size| size.max(extent));
        // Sanity check: padding is smaller than the largest buffer.
        if size > extent.saturating_add(self.info.max_buffer) {
            let reason = format!("the server reports that a tensor of {extent} bytes needs {size} bytes");
            self.connection.fail(reason);
            return extent;
        }
        lock(&self.alloc_sizes).insert(key, size);
        size
    }

    pub(super) fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        self.connection.check_alive()?;
        let compiled = RemoteProgram::new(&graph, self)?;
        Ok(Program::new(graph, Box::new(compiled)))
    }
}

/// Whether `tensor` is contiguous, covers the whole region, and has dimensions that fit the wire format.
pub(super) fn is_whole_tensor(tensor: &TensorDesc, region: &Region) -> bool {
    fits_wire(tensor) && tensor.is_contiguous() && tensor.extent() as u64 == region.bytes()
}

/// A range of a buffer as a tensor record: one row of `len` I8 elements. `len` must be below 2^32.
pub(super) fn byte_range_record(memory: &RemoteBuffer, offset: u64, len: u64) -> TensorRecord {
    byte_row_record(memory.handle, memory.base + offset, len)
}

fn byte_row_record(buffer: u64, data: u64, len: u64) -> TensorRecord {
    let mut record = TensorRecord { buffer, data, ..TensorRecord::decode(&[0; TENSOR_RECORD]) };
    let len = len as u32;
    record.dtype = DType::I8.to_wire();
    (record.ne, record.nb) = ([len, 1, 1, 1], [1, len, len, len]);
    record
}

impl Device for GgmlDevice {
    fn info(&self) -> &DeviceInfo {
        &self.remote.info
    }

    fn lost(&self) -> Option<DeviceError> {
        self.remote.connection.check_alive().err()
    }

    fn endpoint(&self) -> Option<&str> {
        Some(self.remote.connection.endpoint())
    }

    fn link_stats(&self) -> Option<LinkStats> {
        Some(self.remote.connection.link_stats())
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        self.remote.memory()
    }

    fn alloc(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError> {
        let buffer = self.remote.alloc_buffer(bytes, budget.reserve(bytes)?)?;
        let handle = remote_buffer(&buffer.whole())?.handle;
        // Some servers return uninitialised memory.
        let clear = Request::BufferClear(BufferClear { remote_ptr: handle, value: 0 });
        self.remote.connection.with_writer(|guard| {
            guard.next_message_number(&self.progress);
            guard.send(&clear)
        })?;
        Ok(buffer)
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        self.remote.alloc_size(tensor)
    }

    /// 7.0 has no request for supported ops. fanout's and llama.cpp's servers run on a CPU backend what their devices do not
    /// support, so every node that the wire format can express counts as supported.
    fn support(&self, node: NodeView<'_>) -> Support {
        not_expressible(&node, &self.remote.connection).map_or(Support::Yes, Support::No)
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        self.remote.prepare(graph)
    }

    fn queue(&self, _: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        self.ensure_probe_buffer()?;
        let (protocol, timeline) = GgmlProtocol::new(Arc::clone(&self.remote), Arc::clone(&self.progress))?;
        Ok(Box::new(RemoteQueue::new(Arc::clone(&self.remote), timeline, protocol, MAX_RECORD_BYTES)?))
    }
}

impl GgmlDevice {
    /// Allocates the probe buffer unless it exists.
    fn ensure_probe_buffer(&self) -> Result<(), DeviceError> {
        let mut has_probe_buffer = lock(&self.has_probe_buffer);
        if !*has_probe_buffer {
            let (handle, base) = self.remote.allocate(PROBE_BUFFER_BYTES)?;
            self.remote.connection.with_writer(|guard| {
                guard.device_state(self.remote.index)?.probe = Some(byte_row_record(handle, base, 1));
                Ok(())
            })?;
            *has_probe_buffer = true;
        }
        Ok(())
    }
}

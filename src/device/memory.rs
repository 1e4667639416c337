//! Buffers, regions and programs: handles that devices fill with what they need.

use super::{DeviceError, DeviceId, DeviceInfo};
use crate::graph::Graph;
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Memory of a device. Cloning shares it; it is freed when the last handle is dropped, queued work included.
#[derive(Clone)]
pub struct Buffer(Arc<BufferInner>);

struct BufferInner {
    id: u64,
    device: DeviceId,
    device_name: String,
    bytes: u64,
    memory: Box<dyn Any + Send + Sync>,
    /// What pays for it: given back with the memory.
    _charges: Box<dyn Any + Send + Sync>,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl Buffer {
    /// For devices: a handle to a device's own kind of memory; `charges` pay for it as long as it lives.
    pub fn new(
        device: &DeviceInfo,
        bytes: u64,
        memory: Box<dyn Any + Send + Sync>,
        charges: Box<dyn Any + Send + Sync>,
    ) -> Buffer {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let device_name = device.name.clone();
        Buffer(Arc::new(BufferInner { id, device: device.id, device_name, bytes, memory, _charges: charges }))
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Identity of the device whose memory it is.
    pub fn device(&self) -> DeviceId {
        self.0.device
    }

    /// Name of that device, for people.
    pub fn device_name(&self) -> &str {
        &self.0.device_name
    }

    /// A number that no other buffer of this process has or had.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// For devices: the memory object that [`Buffer::new`] was given, if it is of this kind.
    pub fn memory<T: 'static>(&self) -> Option<&T> {
        self.0.memory.downcast_ref()
    }

    /// All of it.
    pub fn whole(&self) -> Region {
        Region { buffer: self.clone(), offset: 0, bytes: self.bytes() }
    }

    /// A part of it.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] when the part reaches past the end.
    pub fn region(&self, offset: u64, bytes: u64) -> Result<Region, DeviceError> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes() => Ok(Region { buffer: self.clone(), offset, bytes }),
            _ => Err(DeviceError::Misuse("a region reaches past the end of its buffer")),
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} of {}, {} bytes)", self.0.id, self.0.device_name, self.0.bytes)
    }
}

/// A part of a buffer; inside it by construction.
#[derive(Clone, Debug)]
pub struct Region {
    buffer: Buffer,
    offset: u64,
    bytes: u64,
}

impl Region {
    /// The buffer it lies in.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Bytes from the buffer's start.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A part of it.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] when the part reaches past the end.
    pub fn part(&self, offset: u64, bytes: u64) -> Result<Region, DeviceError> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => self.buffer.region(self.offset + offset, bytes),
            _ => Err(DeviceError::Misuse("a part reaches past the end of its region")),
        }
    }
}

/// A graph made ready on one device. Cloning shares it.
#[derive(Clone)]
pub struct Program(Arc<ProgramInner>);

struct ProgramInner {
    graph: Arc<Graph>,
    code: Box<dyn Any + Send + Sync>,
}

impl Program {
    /// For devices: their own form of a graph.
    pub fn new(graph: Arc<Graph>, code: Box<dyn Any + Send + Sync>) -> Program {
        Program(Arc::new(ProgramInner { graph, code }))
    }

    /// The graph it runs.
    pub fn graph(&self) -> &Graph {
        &self.0.graph
    }

    /// For devices: the form that [`Program::new`] was given, if it is of this kind.
    pub fn code<T: 'static>(&self) -> Option<&T> {
        self.0.code.downcast_ref()
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Program({} nodes)", self.0.graph.nodes().len())
    }
}

//! Handles that all devices share: buffers, regions of buffers, and programs. Each carries an object of the device's own type,
//! which the device gets back by downcast.

use super::{DeviceError, DeviceId, DeviceInfo};
use crate::graph::Graph;
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A handle to memory of a device. Clones share the memory, which is freed when the last handle is dropped; queued work holds
/// handles too.
#[derive(Clone)]
pub struct Buffer(Arc<BufferInner>);

struct BufferInner {
    id: u64,
    device: DeviceId,
    device_name: String,
    bytes: u64,
    memory: Box<dyn Any + Send + Sync>,
    /// Reservations in memory budgets, released together with the memory.
    _reservations: Box<dyn Any + Send + Sync>,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl Buffer {
    /// For devices: a handle to `memory`, an object of the device's own type. `reservations` are dropped with the memory.
    pub fn new(
        device: &DeviceInfo,
        bytes: u64,
        memory: Box<dyn Any + Send + Sync>,
        reservations: Box<dyn Any + Send + Sync>,
    ) -> Buffer {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Buffer(Arc::new(BufferInner {
            id,
            device: device.id,
            device_name: device.name.clone(),
            bytes,
            memory,
            _reservations: reservations,
        }))
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Identity of the device that owns the memory.
    pub fn device(&self) -> DeviceId {
        self.0.device
    }

    /// Name of that device, for messages.
    pub fn device_name(&self) -> &str {
        &self.0.device_name
    }

    /// A number that identifies the buffer; not reused within a process.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// For devices: the memory object that was passed to [`Buffer::new`], if it has type `T`.
    pub fn memory<T: 'static>(&self) -> Option<&T> {
        self.0.memory.downcast_ref()
    }

    /// The region that covers the whole buffer.
    pub fn whole(&self) -> Region {
        Region { buffer: self.clone(), offset: 0, bytes: self.bytes() }
    }

    /// The region of `bytes` bytes from byte `offset` of the buffer.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] when the region reaches past the end of the buffer.
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

/// A range of bytes of a buffer. In bounds by construction.
#[derive(Clone, Debug)]
pub struct Region {
    buffer: Buffer,
    offset: u64,
    bytes: u64,
}

impl Region {
    /// The region's buffer.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// For devices: fails for a region of another device.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`].
    pub fn check_device(&self, device: DeviceId) -> Result<(), DeviceError> {
        let own = self.buffer.device() == device;
        if own { Ok(()) } else { Err(DeviceError::Misuse("a region of another device")) }
    }

    /// Bytes from the buffer's start.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The region of `bytes` bytes from byte `offset` of this region.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] when it reaches past the end of this region.
    pub fn subregion(&self, offset: u64, bytes: u64) -> Result<Region, DeviceError> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => self.buffer.region(self.offset + offset, bytes),
            _ => Err(DeviceError::Misuse("a subregion reaches past the end of its region")),
        }
    }
}

/// A graph prepared for one device. Clones share it.
#[derive(Clone)]
pub struct Program(Arc<ProgramInner>);

struct ProgramInner {
    graph: Arc<Graph>,
    compiled: Box<dyn Any + Send + Sync>,
}

impl Program {
    /// For devices: a program of `graph`, with `compiled` as the device's own form of it.
    pub fn new(graph: Arc<Graph>, compiled: Box<dyn Any + Send + Sync>) -> Program {
        Program(Arc::new(ProgramInner { graph, compiled }))
    }

    /// The prepared graph.
    pub fn graph(&self) -> &Graph {
        &self.0.graph
    }

    /// For devices: fails unless there is a binding for each slot of the graph, of at least the slot's size.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`].
    pub fn check_bindings(&self, bindings: &[Region]) -> Result<(), DeviceError> {
        let slots = self.graph().slot_sizes();
        let fits = bindings.len() == slots.len() && bindings.iter().zip(slots).all(|(r, &s)| r.bytes() >= s as u64);
        if fits { Ok(()) } else { Err(DeviceError::Misuse("the bindings do not fit the program's slots")) }
    }

    /// For devices: the compiled form that was passed to [`Program::new`], if it has type `T`. `None` for programs of other
    /// devices.
    pub fn compiled<T: 'static>(&self) -> Option<&T> {
        self.0.compiled.downcast_ref()
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Program({} nodes)", self.0.graph.nodes().len())
    }
}

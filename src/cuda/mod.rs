//! The CUDA device: a GPU, its memory, and queues on streams.
//!
//! | module | what it holds |
//! |---|---|
//! | `driver` | finding the driver and the GPUs, their facts, errors |
//! | `core` | what queues and buffers of one device share |
//! | `memory`, `events`, `copy`, `capture`, `kernel` | the driver's objects, owned; all `unsafe` of the device is in these and in `driver` |
//! | `program`, `queue` | graphs made ready, and the stream they run on |
//! | `ops/<stem>` | for each node: which kernels, on which grid, with which arguments |
//!
//! Nothing waits for the GPU but whoever wants bytes ([`Ticket`](crate::device::Ticket)) or a moment
//! ([`Point`](crate::device::Point)): points of CUDA queues order each other by events on the devices.

mod capture;
mod copy;
mod core;
mod driver;
mod events;
mod kernel;
mod memory;
mod ops;
mod program;
mod queue;

pub use driver::{Gpu, NoCuda, detect, emulated_counts};

use crate::device::{
    Account, Buffer, Device, DeviceError, DeviceInfo, DeviceKind, HostBuffer, MemoryInfo, Program, Queue, Support,
};
use crate::graph::Graph;
use crate::ops::NodeView;
use crate::tensor::TensorDesc;
use core::Core;
use memory::{Memory, Pinned};
use std::sync::Arc;

/// First bytes of tensors lie at multiples of this: a line of the GPU's cache.
const ALIGNMENT: u64 = 128;

/// A GPU as a device.
#[derive(Debug)]
pub struct CudaDevice {
    info: DeviceInfo,
    core: Arc<Core>,
}

impl CudaDevice {
    /// A device called `name` on a GPU of [`detect`], whose buffers take at most `memory` bytes together. Several may stand
    /// on one GPU.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] when the GPU cannot be used.
    pub fn new(name: &str, gpu: &Gpu, memory: u64) -> Result<Arc<CudaDevice>, DeviceError> {
        CudaDevice::with_free(name, gpu, |_| memory)
    }

    /// As [`CudaDevice::new`], for whoever decides by the bytes that the GPU has free with its context in place.
    ///
    /// # Errors
    /// As [`CudaDevice::new`].
    pub fn with_free(name: &str, gpu: &Gpu, memory: impl FnOnce(u64) -> u64) -> Result<Arc<CudaDevice>, DeviceError> {
        let not = |reason| DeviceError::Driver { device: name.to_owned(), call: "choosing a GPU", reason };
        gpu.usable().map_err(not)?;
        let core = Core::new(gpu, name, memory)?;
        let info = DeviceInfo {
            name: name.to_owned(),
            description: gpu.to_string(),
            kind: DeviceKind::Gpu,
            alignment: ALIGNMENT,
            max_buffer: core.account.limit().min(gpu.memory),
            domain: "cuda".to_owned(),
        };
        Ok(Arc::new(CudaDevice { info, core }))
    }

    /// The GPU it stands on.
    pub fn gpu(&self) -> &Gpu {
        &self.core.gpu
    }
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        let (free, total) = self.core.memory_info()?;
        let account = &self.core.account;
        let left = account.limit().saturating_sub(account.used());
        Ok(MemoryInfo { free: free.min(left), total: total.min(account.limit()) })
    }

    fn alloc(&self, bytes: u64, account: &Arc<Account>) -> Result<Buffer, DeviceError> {
        let charges = (account.charge(bytes)?, self.core.account.charge(bytes)?);
        let memory = Memory::zeroed(&self.core, bytes)?;
        Ok(Buffer::new(&self.info.name, bytes, Box::new(memory), Box::new(charges)))
    }

    fn alloc_pinned(&self, bytes: u64, account: &Arc<Account>) -> Result<HostBuffer, DeviceError> {
        let charge = account.charge(bytes)?;
        let size = usize::try_from(bytes).map_err(|_| DeviceError::Misuse("a buffer beyond the address space"))?;
        // The driver gives no empty memory.
        Pinned::new(&self.core, size.max(1))?.lend(size, charge)
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        tensor.extent() as u64
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        match ops::select(&node, &self.core.gpu) {
            Ok(_) => Support::Yes,
            Err(no) => Support::No(no),
        }
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        let code = program::Code::new(&graph, &self.core)?;
        Ok(Program::new(graph, Box::new(code)))
    }

    fn queue(&self, account: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        Ok(Box::new(queue::CudaQueue::new(&self.core, account)?))
    }
}

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
    Account, Buffer, Caps, Device, DeviceError, DeviceInfo, DeviceKind, Domain, Feature, HostBuffer, MemoryInfo,
    PinnedMemory, Program, Queue, Support,
};
use crate::graph::Graph;
use crate::ops::NodeView;
use crate::tensor::TensorDesc;
use core::Core;
use memory::{Memory, Pinned};
use std::sync::Arc;

/// First bytes of tensors lie at multiples of this: a line of the GPU's cache.
const ALIGNMENT: u64 = 128;

/// Least batch for which the GPU is so much faster than the host's processors that weights are brought to it: what
/// llama.cpp's CUDA backend takes, so that the same graphs go the same way.
const OFFLOAD_BATCH: usize = 32;

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
            description: gpu.to_string(),
            alignment: ALIGNMENT,
            max_buffer: core.account.limit().min(gpu.memory),
            domain: Domain::named("cuda"),
            caps: Caps { asynchronous: true, events: true },
            ..DeviceInfo::new(name, DeviceKind::Gpu)
        };
        Ok(Arc::new(CudaDevice { info, core }))
    }

    /// Bytes that a GPU has free once its context stands, which this waits for.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] when the GPU cannot be used.
    pub fn free(gpu: &Gpu) -> Result<u64, DeviceError> {
        core::opened(gpu, &gpu.name).map(|(_, free)| free)
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

    fn features(&self) -> Vec<Feature> {
        let gpu = &self.core.gpu;
        let targets: Vec<_> = kernel::targets(gpu.capability).iter().map(|target| format!("sm_{target}")).collect();
        vec![
            Feature::new("capability", format_args!("{}.{}", gpu.capability / 10, gpu.capability % 10)),
            Feature::new("ptx", targets.join(" ")),
            Feature::new("driver", format_args!("CUDA {}.{}", gpu.driver / 1000, gpu.driver % 1000 / 10)),
            Feature::new("pci", &gpu.pci),
            Feature::new("multiprocessors", gpu.multiprocessors),
            Feature::new("waits for memory", if gpu.waits_for_memory { "yes" } else { "no" }),
        ]
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
        Ok(Buffer::new(&self.info, bytes, Box::new(memory), Box::new(charges)))
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        tensor.extent() as u64
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        match ops::select(&node, &self.core.gpu) {
            Ok(_) if node.op.batch(&node) >= OFFLOAD_BATCH => Support::Offload,
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

    fn pinned_memory(&self) -> Option<&dyn PinnedMemory> {
        Some(self)
    }
}

impl PinnedMemory for CudaDevice {
    fn alloc_pinned(&self, bytes: u64, account: &Arc<Account>) -> Result<HostBuffer, DeviceError> {
        let charge = account.charge(bytes)?;
        let refused = || HostBuffer::refused(bytes, account);
        let size = usize::try_from(bytes).map_err(|_| refused())?;
        // The driver gives no empty memory.
        Pinned::if_there_is(&self.core, size.max(1))?.ok_or_else(refused)?.lend(size, charge)
    }
}

//! The CUDA device: one GPU, its memory, and queues that submit work to CUDA streams. Read `queue` first.
//!
//! | module | contents |
//! |---|---|
//! | `driver` | detection of the driver and the GPUs, properties of a GPU, driver errors |
//! | `context` | state shared by the queues and buffers of a device: CUDA context, event pool, pinned memory pool, modules |
//! | `memory`, `events`, `copy`, `graph_exec`, `kernel` | RAII wrappers of driver objects, with all `unsafe` code but `driver`'s |
//! | `deferred_drop` | keeps the resources of dropped queues until their work is done |
//! | `estimate` | estimated times of kernels, and the segments of at most a slice into which programs are cut |
//! | `program`, `queue` | compiled graphs (CUDA graph capture and replay), and the stream that executes them |
//! | `turns` | the order in which sessions submit segments while several use the GPU |
//! | `ops/<stem>` | kernel selection of one op family: the entries, grids and arguments for a node |
//!
//! The kernels are in `kernels/`. Nodes without a kernel run on the CPU (`src/fallback`).
//!
//! Submitting work does not block on the GPU, except for large uploads, which wait for space in the staging ring, for downloads
//! while those before hold too much pinned memory, and for programs while several sessions use the GPU, which wait for turns and
//! until they are done. An abort of the queue ends these waits. Otherwise the host blocks only in
//! [`PendingRead`](crate::device::PendingRead) and in [`TimelinePoint::wait`](crate::device::TimelinePoint::wait). Points of CUDA
//! queues order each other on the devices, by CUDA events.

mod context;
mod copy;
mod deferred_drop;
mod driver;
mod estimate;
mod events;
mod graph_exec;
mod kernel;
mod memory;
mod ops;
mod program;
mod queue;
mod turns;

pub use driver::{CudaUnavailable, Gpu, detect, emulated_counts};

use crate::device::{
    Buffer, Caps, Device, DeviceError, DeviceInfo, DeviceKind, Domain, Feature, HostBuffer, MemoryBudget, MemoryInfo,
    PinnedMemory, Program, Queue, Support,
};
use crate::graph::Graph;
use crate::ops::NodeView;
use crate::tensor::TensorDesc;
use context::DeviceContext;
use memory::{DeviceMemory, PinnedBuffer};
use std::sync::Arc;

/// Alignment of tensors in bytes: a cache line of the GPU.
const ALIGNMENT: u64 = 128;

/// Smallest batch for which copying the weights to the GPU pays off against computing on the CPU. The value is that of
/// llama.cpp's CUDA backend, so that both offload the same nodes.
const OFFLOAD_BATCH: usize = 32;

/// A device on one GPU. Several devices may share a GPU.
#[derive(Debug)]
pub struct CudaDevice {
    info: DeviceInfo,
    context: Arc<DeviceContext>,
}

impl CudaDevice {
    /// Opens a device called `name` on a GPU that [`detect`] returned. Its buffers and scratch memory use at most `memory`
    /// bytes in total.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] when the GPU cannot be used.
    pub fn new(name: &str, gpu: &Gpu, memory: u64) -> Result<Arc<CudaDevice>, DeviceError> {
        CudaDevice::with_free(name, gpu, |_| memory)
    }

    /// As [`CudaDevice::new`], but `memory` chooses the limit from the number of bytes that are free once the CUDA context
    /// exists.
    ///
    /// # Errors
    /// As [`CudaDevice::new`].
    pub fn with_free(name: &str, gpu: &Gpu, memory: impl FnOnce(u64) -> u64) -> Result<Arc<CudaDevice>, DeviceError> {
        let not = |reason| DeviceError::Driver { device: name.to_owned(), call: "choosing a GPU", reason };
        gpu.check_supported().map_err(not)?;
        let context = DeviceContext::new(gpu, name, memory)?;
        let info = DeviceInfo {
            description: gpu.to_string(),
            alignment: ALIGNMENT,
            max_buffer: context.budget.limit().min(gpu.memory),
            domain: Domain::named("cuda"),
            caps: Caps { asynchronous: true, events: true },
            ..DeviceInfo::new(name, DeviceKind::Gpu)
        };
        Ok(Arc::new(CudaDevice { info, context }))
    }

    /// Bytes of GPU memory that are free once the CUDA context exists. Creates the context, which takes a while.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] when the GPU cannot be used.
    pub fn free(gpu: &Gpu) -> Result<u64, DeviceError> {
        context::open_context(gpu, &gpu.name).map(|(_, free)| free)
    }

    /// The GPU of this device.
    pub fn gpu(&self) -> &Gpu {
        &self.context.gpu
    }
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn features(&self) -> Vec<Feature> {
        let gpu = &self.context.gpu;
        let targets: Vec<_> = kernel::targets(gpu.capability).iter().map(|target| format!("sm_{target}")).collect();
        vec![
            Feature::new("capability", format_args!("{}.{}", gpu.capability / 10, gpu.capability % 10)),
            Feature::new("ptx", targets.join(" ")),
            Feature::new("driver", format_args!("CUDA {}.{}", gpu.driver / 1000, gpu.driver % 1000 / 10)),
            Feature::new("pci", &gpu.pci),
            Feature::new("multiprocessors", gpu.multiprocessors),
            Feature::new("waits for memory", if gpu.stream_wait_value { "yes" } else { "no" }),
        ]
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        let (free, total) = self.context.memory_info()?;
        let budget = &self.context.budget;
        let left = budget.limit().saturating_sub(budget.used());
        Ok(MemoryInfo { free: free.min(left), total: total.min(budget.limit()) })
    }

    fn alloc(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError> {
        let reservations = (budget.reserve(bytes)?, self.context.budget.reserve(bytes)?);
        let memory = DeviceMemory::zeroed(&self.context, bytes)?;
        Ok(Buffer::new(&self.info, bytes, Box::new(memory), Box::new(reservations)))
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        tensor.extent() as u64
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        match ops::select(&node, &self.context.gpu) {
            Ok(_) if node.op.batch(&node) >= OFFLOAD_BATCH => Support::Offload,
            Ok(_) => Support::Yes,
            Err(no) => Support::No(no),
        }
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        let compiled = program::CudaProgram::new(&graph, &self.context)?;
        Ok(Program::new(graph, Box::new(compiled)))
    }

    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        Ok(Box::new(queue::CudaQueue::new(&self.context, budget)?))
    }

    fn pinned_memory(&self) -> Option<&dyn PinnedMemory> {
        Some(self)
    }
}

impl PinnedMemory for CudaDevice {
    fn alloc_pinned(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<HostBuffer, DeviceError> {
        let reservation = budget.reserve(bytes)?;
        let refused = || HostBuffer::out_of_memory(bytes, budget);
        let size = usize::try_from(bytes).map_err(|_| refused())?;
        // The driver rejects allocations of 0 bytes.
        PinnedBuffer::try_new(&self.context, size.max(1))?.ok_or_else(refused)?.into_host_buffer(size, reservation)
    }
}

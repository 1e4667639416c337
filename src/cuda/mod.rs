//! The CUDA device: one GPU, its memory, and queues that submit work to CUDA streams. Read `queue` first.
//!
//! | module | contents |
//! |---|---|
//! | `driver_api` | the functions of the driver, whose results are numbers; driver errors |
//! | `driver` | detection of the driver and the GPUs, properties of a GPU |
//! | `context` | state shared by the queues and buffers of a device: CUDA context, event pool, pinned memory pool, modules |
//! | `memory`, `pinned`, `events`, `copy`, `graph_exec`, `kernel`, `modules` | RAII wrappers of driver objects, with most `unsafe` code |
//! | `precompile` | compiles modules in the background, ahead of their use |
//! | `peer` | connections between GPUs: peer access, and a check of what peer copies write |
//! | `event_timeline` | the CUDA events behind a queue's points; notices hung and lost devices |
//! | `prediction` | when the work of a queue ends, for waiting threads |
//! | `launch_log` | what was running when a device failed |
//! | `deferred_drop` | keeps the resources of dropped queues until their work is done |
//! | `estimate` | estimated times of kernels, and the segments of at most a slice into which programs are cut |
//! | `queue`, `executor` | the queue: submits commands at once, or holds them back until what they wait for is submitted |
//! | `program` | compiled graphs, replayed as CUDA graphs |
//! | `programmatic` | programmatic dependent launch: kernels of a graph are launched while the ones before still run |
//! | `program_builder`, `columns`, `private_results` | compiles a graph to launches; the converted operands that products share; results in scratch memory |
//! | `layout`, `program_layout` | which weights of a memory are repacked, and which layouts a program can read |
//! | `turns` | the order in which sessions submit segments while several use the GPU |
//! | `gpu_rates` | peak arithmetic rates of the architectures |
//! | `ops/<stem>` | kernel selection of one op family: the entries, grids and arguments for a node |
//!
//! The kernels are in `kernels/`. Nodes without a kernel run on the CPU (`src/fallback`).
//!
//! Submitting work does not block on the GPU, except for large uploads, which wait for pinned memory, for downloads while those
//! before hold too much of it, and for programs while several sessions use the GPU, which wait for turns and until they are done.
//! An abort of the queue ends these waits. Otherwise the host blocks only in [`PendingRead`](crate::device::PendingRead) and in
//! [`TimelinePoint::wait`](crate::device::TimelinePoint::wait). Points of CUDA queues order each other on the devices, by CUDA
//! events.
//!
//! The device relies on what CUDA documents. No call on a path that other sessions wait for synchronises: memory comes from a
//! stream-ordered pool, pinned memory from an arena, and graphs are built from nodes. Every wait polls, and a stream without progress
//! for [`CudaOptions::device_timeout`] means that the device is lost, as after a fault of a kernel or of the hardware.

mod access;
mod columns;
mod commands;
mod context;
mod copy;
mod deferred_drop;
mod driver;
mod driver_api;
mod estimate;
mod event_timeline;
mod events;
mod executor;
mod gpu_rates;
mod graph_exec;
mod kernel;
mod launch_log;
mod layout;
mod memory;
mod modules;
mod ops;
mod peer;
mod pinned;
mod precompile;
mod prediction;
mod private_results;
mod program;
mod program_builder;
mod program_layout;
mod programmatic;
mod queue;
mod turns;

pub use driver::{CudaUnavailable, Gpu, detect, emulated_counts};
pub use gpu_rates::{GpuRates, gpu_rates};

use crate::device::{
    Buffer, Caps, Device, DeviceActivity, DeviceError, DeviceInfo, DeviceKind, Domain, Feature, HANG_TIMEOUT,
    HostBuffer, MemoryBudget, MemoryInfo, ModuleLoad, PinnedMemory, Program, Queue, Support,
};
use crate::graph::Graph;
use crate::ops::NodeView;
use crate::tensor::TensorDesc;
use context::DeviceContext;
use memory::DeviceMemory;
use pinned::PinnedBuffer;
use std::sync::Arc;
use std::time::Duration;

/// Alignment of tensors in bytes: a cache line of the GPU.
const ALIGNMENT: u64 = 128;

/// Smallest batch for which copying the weights to the GPU pays off against computing on the CPU. The value is that of
/// llama.cpp's CUDA backend, so that both offload the same nodes.
const OFFLOAD_BATCH: usize = 32;

/// Options of a device.
#[derive(Clone, Copy, Debug)]
pub struct CudaOptions {
    /// Time without any progress after which the GPU counts as hung: 60 s. The device is then lost
    /// ([`Device::lost`]).
    pub device_timeout: Duration,
    /// Whether to wait for each kernel launch, so that an error names the kernel at fault. Slow.
    pub launch_check: bool,
    /// Whether threads in the background compile the kernels that clients are likely to need, from the first allocation on, so
    /// that the first token waits for no compilation. Off by default.
    pub precompile: bool,
    /// Whether kernels of a CUDA graph are launched while the ones before still run, on GPUs of compute capability 9.0 and later
    /// with a driver of CUDA 12.3 or later. On by default. Results are the same without it.
    pub programmatic_launch: bool,
}

impl Default for CudaOptions {
    fn default() -> CudaOptions {
        CudaOptions { device_timeout: HANG_TIMEOUT, launch_check: false, precompile: false, programmatic_launch: true }
    }
}

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
        CudaDevice::with_options(name, gpu, |_| memory, CudaOptions::default())
    }

    /// As [`CudaDevice::new`], with options. `memory` chooses the limit from the number of bytes that are free once the CUDA
    /// context exists.
    ///
    /// # Errors
    /// As [`CudaDevice::new`].
    pub fn with_options(
        name: &str,
        gpu: &Gpu,
        memory: impl FnOnce(u64) -> u64,
        options: CudaOptions,
    ) -> Result<Arc<CudaDevice>, DeviceError> {
        let not = |reason| DeviceError::Driver { device: name.to_owned(), call: "choosing a GPU", reason };
        gpu.check_supported().map_err(not)?;
        let context = DeviceContext::new(gpu, name, options, memory)?;
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
        context::PrimaryContext::open(gpu, &gpu.name).map(|(_, free)| free)
    }

    /// Number of modules of kernels that are being compiled in the background ([`CudaOptions::precompile`]). Once it is 0, a
    /// model whose weights have arrived compiles nothing more.
    pub fn pending_modules(&self) -> usize {
        self.context.precompiler.pending()
    }

    /// Loads all modules of kernels, one after the other, and returns the time of each that was not loaded. Takes seconds if the
    /// driver's cache does not have them.
    ///
    /// # Errors
    /// The driver's error; [`DeviceError::OutOfMemory`] if the device's limit leaves too little for them.
    pub fn load_modules(&self) -> Result<Vec<ModuleLoad>, DeviceError> {
        modules::measure_loads(&self.context)
    }

    /// The GPU of this device.
    pub fn gpu(&self) -> &Gpu {
        &self.context.gpu
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        self.context.precompiler.end();
    }
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn features(&self) -> Vec<Feature> {
        let (gpu, options) = (&self.context.gpu, &self.context.options);
        let targets: Vec<_> = kernel::targets(gpu.capability).iter().map(|target| format!("sm_{target}")).collect();
        vec![
            Feature::new("capability", format_args!("{}.{}", gpu.capability / 10, gpu.capability % 10)),
            Feature::new("ptx", targets.join(" ")),
            Feature::new("driver", format_args!("CUDA {}.{}", gpu.driver / 1000, gpu.driver % 1000 / 10)),
            Feature::new("pci", &gpu.pci),
            Feature::new("multiprocessors", gpu.multiprocessors),
            Feature::new("timeout", format_args!("{} s", options.device_timeout.as_secs_f64())),
            Feature::new("launch check", if options.launch_check { "on" } else { "off" }),
            Feature::new("programmatic launch", if self.context.programmatic.has_edges() { "on" } else { "off" }),
        ]
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        self.context.primary().check_lost()?;
        let (free, total) = self.context.memory_info()?;
        let budget = &self.context.budget;
        let left = budget.limit().saturating_sub(budget.used());
        Ok(MemoryInfo { free: free.min(left), total: total.min(budget.limit()) })
    }

    fn alloc(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError> {
        self.context.primary().check_lost()?;
        let reservations = (budget.reserve(bytes)?, self.context.budget.reserve(bytes)?);
        let memory = DeviceMemory::zeroed(&self.context, bytes)?;
        self.context.precompiler.start(&self.context);
        Ok(Buffer::new(&self.info, bytes, Box::new(memory), Box::new(reservations)))
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        self.context.precompiler.add_type(&self.context, tensor.dtype());
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
        self.context.primary().check_lost()?;
        let compiled = program::CudaProgram::new(&graph, &self.context)?;
        Ok(Program::new(graph, Box::new(compiled)))
    }

    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        self.context.primary().check_lost()?;
        Ok(Box::new(queue::CudaQueue::new(&self.context, budget)?))
    }

    /// Polls the queues, so that a hung GPU is noticed although nobody waits for it.
    fn lost(&self) -> Option<DeviceError> {
        self.context.poll_queues();
        self.context.primary().lost().cloned()
    }

    fn lost_by(&self) -> Option<Arc<MemoryBudget>> {
        // Devices on one GPU share its primary CUDA context, so each gets the error of all, and has the launches of its own queues only.
        let is_alone = peer::devices_of(self.context.gpu.ordinal).len() == 1;
        self.context.primary().lost_by().filter(|_| is_alone)
    }

    /// Sampled: the time from one call to the next counts if there is work that is not done.
    fn activity(&self) -> Option<DeviceActivity> {
        Some(DeviceActivity { busy: self.context.sampled_busy_time(), waiting: self.context.turns.waiting() })
    }

    fn pinned_memory(&self) -> Option<&dyn PinnedMemory> {
        Some(self)
    }
}

impl PinnedMemory for CudaDevice {
    fn alloc_pinned(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<HostBuffer, DeviceError> {
        self.context.primary().check_lost()?;
        let reservation = budget.reserve(bytes)?;
        let refused = || HostBuffer::out_of_memory(bytes, budget);
        let size = usize::try_from(bytes).map_err(|_| refused())?;
        // The driver rejects allocations of 0 bytes.
        PinnedBuffer::try_new(self.context.primary(), size.max(1))?
            .ok_or_else(refused)?
            .into_host_buffer(size, reservation)
    }
}

//! CPU device: an asynchronous command queue over a thread pool with spin-then-park workers.
//!
//! Here: the device itself, the compilation of graphs to programs, kernels, memory with its repacked weights, the pool. Not
//! here: shape rules and op parameters (`crate::ops`), fusion patterns (`crate::graph::fuse`), the quantisation codecs
//! (`crate::tensor::quant`).
//!
//! | module | contents |
//! |---|---|
//! | `program` | a compiled graph: one kernel per node, and the loop that runs them; read it first |
//! | `queue` | the command queue: checks commands, sends them to the device's threads, and runs small ones itself |
//! | `executor` | runs the commands of a queue, each in turns of the device |
//! | `joined_groups` | the groups in which a queue is a rank |
//! | `pool` | worker threads, barriers, work sharing inside a node |
//! | `ops` | kernels, one file per op family; GEMM in `ops/mul_mat` |
//! | `simd` | micro-kernels and row dot products for each instruction set |
//! | `panel` | the repacked layout of weights: sixteen interleaved rows |
//! | `layout` | which ranges of a memory hold panels, and conversion in both directions |
//! | `memory` | pages and scratch, and the tensor views that kernels use |
//! | `packed_rhs_reuse` | sharing a packed right-hand side between products |
//! | `fuse` | kernels of fused nodes |
//! | `calibration` | a measurement at the first open: prefetch distance, panels per call, huge pages, bf16 or FMA |
//! | `features`, `system`, `cgroup` | instruction sets and memory of the machine, as the device reports them, and limits of control groups |

mod calibration;
mod cgroup;
mod executor;
mod features;
mod fuse;
mod joined_groups;
mod layout;
mod memory;
mod ops;
mod packed_rhs_reuse;
mod panel;
mod pool;
mod program;
mod queue;
// Architectures without SIMD kernels compute in `MathMode::Exact`, so most of this module is unused there.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod simd;
mod system;

pub use ops::MathMode;
pub(crate) use system::{available_memory, total_memory};

use crate::device::{
    Buffer, Caps, Device, DeviceActivity, DeviceError, DeviceInfo, DeviceKind, Domain, Feature, HostBuffer,
    HostThreads, ImportHost, MemoryBudget, MemoryInfo, Program, Queue, QueueThreads, ReadOnlyMapping, Support,
};
use crate::graph::Graph;
use crate::ops::NodeView;
use crate::poison::lock;
use crate::tensor::{DType, TensorDesc};
use calibration::Calibration;
use layout::CpuMemory;
use pool::Pool;
use std::fmt;
use std::sync::{Arc, Mutex};

/// Alignment of tensors in bytes: a cache line, which is also the widest vector.
const ALIGNMENT: u64 = 64;

/// Alignment of imported host memory in bytes: the size of the widest element. Kernels use unaligned vector loads.
const IMPORT_ALIGNMENT: usize = 8;

/// Threads that run the short commands of queues. Two, so that one command of a millisecond does not delay all others.
const SHORT_LANE_THREADS: usize = 2;

/// Memory of the CPU devices that were opened together.
#[derive(Clone)]
pub(crate) struct SiblingMemory {
    /// Counts the bytes that the buffers and queues of all these devices use together. It has no limit of its own.
    pub(crate) used: Arc<MemoryBudget>,
    /// Sum of the devices' limits in bytes.
    pub(crate) limit: u64,
}

/// The host's processors as a device.
pub struct CpuDevice {
    info: DeviceInfo,
    math_mode: MathMode,
    /// The current pool. A run keeps the pool that it started with: see [`HostThreads::set_threads`].
    pool: Mutex<Arc<Pool>>,
    /// The threads that run the commands of all queues.
    queue_threads: QueueThreads,
    /// Memory budget of all buffers and queues of the device.
    budget: Arc<MemoryBudget>,
    /// Memory of all CPU devices that were opened together, this one included.
    siblings: SiblingMemory,
    /// Reference to the device itself for new queues, which may outlive a borrow of the device.
    this: std::sync::Weak<CpuDevice>,
}

impl CpuDevice {
    /// A device called `name` with a pool of `threads` workers and a memory limit of `memory` bytes for all its buffers.
    ///
    /// # Errors
    /// When the system cannot start that many threads.
    pub fn new(name: &str, threads: usize, math_mode: MathMode, memory: u64) -> std::io::Result<Arc<CpuDevice>> {
        let siblings = SiblingMemory { used: MemoryBudget::new(u64::MAX), limit: memory };
        CpuDevice::with_siblings(name, threads, math_mode, memory, siblings)
    }

    /// As [`CpuDevice::new`], for one of several CPU devices of this machine. Of the memory that the machine has available, the
    /// device reports only its share as free, in proportion to what its limit leaves: otherwise each device would promise the
    /// same bytes.
    pub(crate) fn with_siblings(
        name: &str,
        threads: usize,
        math_mode: MathMode,
        memory: u64,
        siblings: SiblingMemory,
    ) -> std::io::Result<Arc<CpuDevice>> {
        let threads = threads.max(1);
        let info = DeviceInfo {
            description: format!("{}, {}", thread_count_text(threads), instruction_set()),
            alignment: ALIGNMENT,
            max_buffer: memory,
            domain: Domain::named("host"),
            caps: Caps { asynchronous: true, events: true },
            ..DeviceInfo::new(name, DeviceKind::Cpu)
        };
        let (pool, budget) = (Mutex::new(Arc::new(Pool::new(threads)?)), MemoryBudget::within(&siblings.used, memory));
        let queue_threads = QueueThreads::start("cpu-queues", SHORT_LANE_THREADS)?;
        if math_mode == MathMode::Fast && cfg!(target_arch = "x86_64") {
            Calibration::of_process(threads);
        }
        Ok(Arc::new_cyclic(|this| CpuDevice {
            info,
            math_mode,
            pool,
            queue_threads,
            budget,
            siblings,
            this: this.clone(),
        }))
    }

    /// Whether an upload of `tensor` is repacked into panels as it arrives: weights that products probably read. F32 weights
    /// are repacked by the first program that multiplies them.
    fn packs_on_upload(&self, tensor: &TensorDesc) -> bool {
        ops::packs_into_panels(tensor, self.math_mode) && tensor.dtype() != DType::F32
    }

    /// Threads that the next graphs run on, including the thread that submits them.
    pub fn threads(&self) -> usize {
        self.pool().workers()
    }

    /// Bytes of all buffers and queues of the device.
    #[cfg(test)]
    pub(crate) fn used_memory(&self) -> u64 {
        self.budget.used()
    }

    /// The pool for one run.
    fn pool(&self) -> Arc<Pool> {
        Arc::clone(&lock(&self.pool))
    }
}

/// Name of the vector instructions that matrix products use on this machine, for log lines.
pub(crate) fn instruction_set() -> &'static str {
    simd::instruction_set()
}

/// A device's share of the `bytes` that the machine has available: in proportion to `free`, the bytes that the device's own
/// limit leaves, out of `unused`, the bytes that the limits of all sibling devices leave together.
fn share(bytes: u64, free: u64, unused: u64) -> u64 {
    // Both factors are below 2^64, so the product fits, and the quotient is at most `bytes`.
    u64::try_from(u128::from(bytes) * u128::from(free.min(unused)) / u128::from(unused.max(1))).unwrap_or(bytes)
}

fn thread_count_text(threads: usize) -> String {
    format!("{threads} thread{}", if threads == 1 { "" } else { "s" })
}

impl fmt::Debug for CpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuDevice({}, {:?}, {} threads)", self.info.name, self.math_mode, self.threads())
    }
}

impl Device for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn features(&self) -> Vec<Feature> {
        features::features(self)
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        let total = self.budget.limit();
        let free = total.saturating_sub(self.budget.used());
        // The limit is no reservation: other processes, and other CPU devices, use the same memory.
        let unused = self.siblings.limit.saturating_sub(self.siblings.used.used());
        let available = available_memory().map_or(free, |bytes| share(bytes, free, unused));
        Ok(MemoryInfo { free: free.min(available), total })
    }

    fn alloc(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError> {
        let charged = memory::charged_bytes(bytes);
        let reservations = (budget.reserve(charged)?, self.budget.reserve(charged)?);
        let left = self.budget.limit().saturating_sub(self.budget.used());
        let oversized = DeviceError::OutOfMemory { requested: bytes, available: left, limit: self.budget.limit() };
        let memory = CpuMemory::zeroed(usize::try_from(bytes).map_err(|_| oversized)?, budget)?;
        Ok(Buffer::new(&self.info, bytes, Box::new(memory), Box::new(reservations)))
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        tensor.extent() as u64
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        match ops::select(&node, self.math_mode) {
            Ok(_) => Support::Yes,
            Err(no) => Support::No(no),
        }
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        let code = program::CpuProgram::new(&graph, self.math_mode, self.threads())?;
        Ok(Program::new(graph, Box::new(code)))
    }

    fn activity(&self) -> Option<DeviceActivity> {
        Some(self.queue_threads.activity())
    }

    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        let this = self.this.upgrade().ok_or(DeviceError::Ended)?;
        Ok(Box::new(queue::CpuQueue::new(this, Arc::clone(budget))))
    }

    fn import_host(&self) -> Option<&dyn ImportHost> {
        Some(self)
    }

    fn host_threads(&self) -> Option<&dyn HostThreads> {
        Some(self)
    }
}

impl ImportHost for CpuDevice {
    /// Copies no byte. The mapping is copy-on-write, page by page: an upload, a node's result, or the first product that
    /// repacks a weight in place makes pages private to the process. The budget is charged with the whole size from the
    /// beginning.
    fn import(&self, mut memory: HostBuffer, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError> {
        check_alignment(&memory)?;
        drop(memory.take_reservation());
        let bytes = memory.len() as u64;
        let reservations = (budget.reserve(bytes)?, self.budget.reserve(bytes)?);
        Ok(Buffer::new(&self.info, bytes, Box::new(CpuMemory::from_host_buffer(memory)), Box::new(reservations)))
    }

    /// Products of up to four columns (twelve of floats) read the rows of such memory in place; products of more columns pack them
    /// for themselves. With one column, on AVX2, rows reach 0.69 to 0.93 of the speed of repacked weights
    /// (docs/performance.md).
    fn import_read_only(&self, memory: ReadOnlyMapping) -> Result<Buffer, DeviceError> {
        check_alignment(&memory)?;
        let bytes = memory.len() as u64;
        Ok(Buffer::new(&self.info, bytes, Box::new(CpuMemory::from_read_only(memory)), Box::new(())))
    }
}

fn check_alignment(memory: &[u8]) -> Result<(), DeviceError> {
    if memory.as_ptr().addr().is_multiple_of(IMPORT_ALIGNMENT) {
        Ok(())
    } else {
        Err(DeviceError::Misuse("imported memory must begin at a multiple of 8 bytes"))
    }
}

impl HostThreads for CpuDevice {
    fn set_threads(&self, threads: usize) -> Result<(), DeviceError> {
        if threads == 0 {
            return Err(DeviceError::Misuse("the number of threads must be at least 1"));
        }
        if threads != self.threads() {
            let pool = Pool::new(threads);
            let pool = pool.map_err(|e| DeviceError::Exhausted {
                resource: "threads",
                reason: format!("cannot start {threads} worker threads: {e}"),
            })?;
            let old = std::mem::replace(&mut *lock(&self.pool), Arc::new(pool));
            // The threads of the old pool end here, after the lock is released, or with the last run that uses them.
            drop(old);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_devices_share_the_available_memory_by_their_limits() {
        for (bytes, free, unused, want) in [
            (20, 12, 16, 15),
            (20, 4, 16, 5),
            (20, 8, 8, 20),
            (10, 10, 10, 10), // the other device has used all of its limit
            (0, 8, 8, 0),
            (20, 0, 0, 0),
            (u64::MAX, u64::MAX, u64::MAX, u64::MAX),
            (u64::MAX, 9, 8, u64::MAX),
        ] {
            assert_eq!(share(bytes, free, unused), want, "{bytes} bytes, {free} of {unused} unused");
        }
    }

    /// The last run of a replaced pool ends its threads and joins them.
    #[test]
    fn replaced_pools_end_with_their_last_run() {
        let device = CpuDevice::new("CPU", 4, MathMode::Exact, 1 << 20).unwrap();
        let running = device.pool();
        let first = Arc::downgrade(&running);
        let others: Vec<_> = [2, 8, 1]
            .map(|threads| {
                device.set_threads(threads).unwrap();
                Arc::downgrade(&device.pool())
            })
            .into();
        assert!(first.upgrade().is_some(), "the run keeps its pool");
        drop(running);
        assert!(first.upgrade().is_none());
        let alive: Vec<bool> = others.iter().map(|pool| pool.upgrade().is_some()).collect();
        assert_eq!(alive, [false, false, true]);
        drop(device);
        assert!(others[2].upgrade().is_none());
    }
}

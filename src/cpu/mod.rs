//! The CPU device: an asynchronous queue over a hot thread pool.

mod features;
mod fuse;
mod layout;
mod memory;
mod ops;
mod pool;
mod program;
mod queue;
mod reuse;
// Architectures without kernels of their own use the exact path.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod simd;
mod strip;
mod system;

pub use ops::Path;
pub(crate) use system::available_memory;

use crate::device::{
    Account, Buffer, Caps, Device, DeviceError, DeviceInfo, DeviceKind, Feature, MemoryInfo, Program, Queue, Support,
};
use crate::graph::Graph;
use crate::ops::NodeView;
use crate::tensor::{DType, TensorDesc};
use layout::Memory;
use pool::Pool;
use std::fmt;
use std::sync::Arc;

/// First bytes of tensors lie at multiples of this: a cache line, and the widest vector.
const ALIGNMENT: u64 = 64;

/// The host's processors as a device.
pub struct CpuDevice {
    info: DeviceInfo,
    path: Path,
    pool: Pool,
    /// All that its buffers and queues use.
    account: Arc<Account>,
    /// Handed to queues, whose threads outlive the borrow.
    this: std::sync::Weak<CpuDevice>,
}

impl CpuDevice {
    /// A device called `name` with a pool of `threads` workers, whose buffers take at most `memory` bytes together.
    ///
    /// # Errors
    /// When the system cannot start that many threads.
    pub fn new(name: &str, threads: usize, path: Path, memory: u64) -> std::io::Result<Arc<CpuDevice>> {
        let threads = threads.max(1);
        let info = DeviceInfo {
            name: name.to_owned(),
            description: format!("{}, {}", counted(threads), instruction_set()),
            kind: DeviceKind::Cpu,
            alignment: ALIGNMENT,
            max_buffer: memory,
            domain: "host".to_owned(),
            caps: Caps { asynchronous: true, pinned: false, import_host: true, events: true },
        };
        let (pool, account) = (Pool::new(threads)?, Account::new(memory));
        Ok(Arc::new_cyclic(|this| CpuDevice { info, path, pool, account, this: this.clone() }))
    }

    /// Whether a tensor is packed into strips as it is uploaded: one that products are likely to read.
    fn packs(&self, tensor: &TensorDesc) -> bool {
        ops::takes_strips(tensor, self.path) && tensor.dtype() != DType::F32
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }
}

/// The vector instructions that products use on this machine, for people.
pub(crate) fn instruction_set() -> &'static str {
    simd::instruction_set()
}

fn counted(threads: usize) -> String {
    format!("{threads} thread{}", if threads == 1 { "" } else { "s" })
}

impl fmt::Debug for CpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuDevice({}, {:?}, {} threads)", self.info.name, self.path, self.pool.workers())
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
        let total = self.account.limit();
        let free = total.saturating_sub(self.account.used());
        // Others use the machine too.
        Ok(MemoryInfo { free: available_memory().map_or(free, |left| free.min(left)), total })
    }

    fn alloc(&self, bytes: u64, account: &Arc<Account>) -> Result<Buffer, DeviceError> {
        let charges = (account.charge(bytes)?, self.account.charge(bytes)?);
        let memory = usize::try_from(bytes).ok().and_then(|n| Memory::zeroed(n).ok());
        let left = self.account.limit().saturating_sub(self.account.used());
        let memory = memory.ok_or(DeviceError::OutOfMemory { asked: bytes, left, limit: self.account.limit() })?;
        Ok(Buffer::new(&self.info.name, bytes, Box::new(memory), Box::new(charges)))
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        tensor.extent() as u64
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        match ops::select(&node, self.path) {
            Ok(_) => Support::Yes,
            Err(no) => Support::No(no),
        }
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        let code = program::Code::new(&graph, self.path, self.pool.workers())?;
        Ok(Program::new(graph, Box::new(code)))
    }

    fn queue(&self, account: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        let this = self.this.upgrade().ok_or(DeviceError::Lost)?;
        Ok(Box::new(queue::CpuQueue::new(this, Arc::clone(account))?))
    }
}

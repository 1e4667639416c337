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
    Account, Buffer, Caps, Device, DeviceError, DeviceInfo, DeviceKind, Domain, Feature, HostBuffer, HostThreads,
    ImportHost, MemoryInfo, Program, Queue, Support,
};
use crate::graph::Graph;
use crate::ops::NodeView;
use crate::tensor::{DType, TensorDesc};
use layout::Memory;
use pool::{Pool, lock};
use std::fmt;
use std::sync::{Arc, Mutex};

/// First bytes of tensors lie at multiples of this: a cache line, and the widest vector.
const ALIGNMENT: u64 = 64;

/// Memory of others begins at a multiple of this: the widest element's size. Kernels load vectors from any address.
const IMPORT_ALIGNMENT: usize = 8;

/// The host's processors as a device.
pub struct CpuDevice {
    info: DeviceInfo,
    path: Path,
    /// Runs hold the one that they began with: see [`HostThreads::set_threads`].
    pool: Mutex<Arc<Pool>>,
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
            description: format!("{}, {}", counted(threads), instruction_set()),
            alignment: ALIGNMENT,
            max_buffer: memory,
            domain: Domain::named("host"),
            caps: Caps { asynchronous: true, events: true },
            ..DeviceInfo::new(name, DeviceKind::Cpu)
        };
        let (pool, account) = (Mutex::new(Arc::new(Pool::new(threads)?)), Account::new(memory));
        Ok(Arc::new_cyclic(|this| CpuDevice { info, path, pool, account, this: this.clone() }))
    }

    /// Whether a tensor is packed into strips as it is uploaded: one that products are likely to read.
    fn packs(&self, tensor: &TensorDesc) -> bool {
        ops::takes_strips(tensor, self.path) && tensor.dtype() != DType::F32
    }

    /// Threads that graphs run on from now on, those that submit them counted.
    pub fn threads(&self) -> usize {
        self.pool().workers()
    }

    /// The pool for one run.
    fn pool(&self) -> Arc<Pool> {
        Arc::clone(&lock(&self.pool))
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
        write!(f, "CpuDevice({}, {:?}, {} threads)", self.info.name, self.path, self.threads())
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
        Ok(Buffer::new(&self.info, bytes, Box::new(memory), Box::new(charges)))
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
        let code = program::Code::new(&graph, self.path, self.threads())?;
        Ok(Program::new(graph, Box::new(code)))
    }

    fn queue(&self, account: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        let this = self.this.upgrade().ok_or(DeviceError::Ended)?;
        Ok(Box::new(queue::CpuQueue::new(this, Arc::clone(account))?))
    }

    fn import_host(&self) -> Option<&dyn ImportHost> {
        Some(self)
    }

    fn host_threads(&self) -> Option<&dyn HostThreads> {
        Some(self)
    }
}

impl ImportHost for CpuDevice {
    /// No byte is copied until someone writes near it: an upload, a node, or the first product that reads a weight, which
    /// rearranges it in place. Then the pages become the process's own, so all of the memory counts from the beginning.
    fn import(&self, mut memory: HostBuffer, account: &Arc<Account>) -> Result<Buffer, DeviceError> {
        if !memory.as_ptr().addr().is_multiple_of(IMPORT_ALIGNMENT) {
            return Err(DeviceError::Misuse("imported memory must begin at a multiple of 8 bytes"));
        }
        drop(memory.take_charge());
        let bytes = memory.len() as u64;
        let charges = (account.charge(bytes)?, self.account.charge(bytes)?);
        Ok(Buffer::new(&self.info, bytes, Box::new(Memory::over(memory)), Box::new(charges)))
    }
}

impl HostThreads for CpuDevice {
    fn set_threads(&self, threads: usize) -> Result<(), DeviceError> {
        if threads == 0 {
            return Err(DeviceError::Misuse("a device computes with at least one thread"));
        }
        if threads != self.threads() {
            let pool = Pool::new(threads);
            let pool = pool.map_err(|e| DeviceError::Exhausted {
                resource: "threads",
                reason: format!("cannot start {threads} that compute: {e}"),
            })?;
            let old = std::mem::replace(&mut *lock(&self.pool), Arc::new(pool));
            // Its threads end here, without the lock, or with the last run that has it.
            drop(old);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pool's threads end with the last run that has it, and are joined: when it is gone, so are they.
    #[test]
    fn pools_that_are_replaced_end() {
        let device = CpuDevice::new("CPU", 4, Path::Exact, 1 << 20).unwrap();
        let running = device.pool();
        let first = Arc::downgrade(&running);
        let others: Vec<_> = [2, 8, 1]
            .map(|threads| {
                device.set_threads(threads).unwrap();
                Arc::downgrade(&device.pool())
            })
            .into();
        assert!(first.upgrade().is_some(), "a run still has it");
        drop(running);
        assert!(first.upgrade().is_none());
        let alive: Vec<bool> = others.iter().map(|pool| pool.upgrade().is_some()).collect();
        assert_eq!(alive, [false, false, true]);
        drop(device);
        assert!(others[2].upgrade().is_none());
    }
}

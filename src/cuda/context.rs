//! Device context: the state that all queues and buffers of one device share. Holds the CUDA context, the loaded modules, the
//! memory budget, an event pool and a pool of pinned blocks.

use super::deferred_drop::DeferredDrops;
use super::driver::{Gpu, driver_error};
use super::events::{Event, Stream};
use super::kernel::Modules;
use super::memory::PinnedBuffer;
use super::turns::GpuTurns;
use crate::device::{DeviceError, MemoryBudget, Reservation};
use cudarc::driver::{CudaContext, DriverError, result};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Largest pinned block that the pool keeps, in bytes: the size of the pieces in which servers download tensors.
const MAX_POOLED_BLOCK: usize = 1 << 20;

/// Smallest pinned block, in bytes: a page.
const MIN_BLOCK: usize = 4 << 10;

/// Limit of pooled pinned blocks of each size.
const MAX_POOLED_PER_SIZE: usize = 16;

/// Limit of the pinned memory in bytes that pending downloads of a device hold together. The pool has at most 32 MiB more. A
/// queue may hold as much of it as stays free.
const MAX_PINNED_DOWNLOADS: u64 = 256 << 20;

/// Size of the pinned block for a request of `bytes` bytes. Rounds up to a power of two, so that few sizes exist and blocks can
/// be reused; at most half of a block is wasted.
fn pooled_size(bytes: usize) -> usize {
    if bytes > MAX_POOLED_BLOCK { bytes } else { bytes.next_power_of_two().max(MIN_BLOCK) }
}

pub(super) struct DeviceContext {
    pub(super) gpu: Gpu,
    /// Name of the device, for example `CUDA0`.
    pub(super) name: String,
    pub(super) modules: Modules,
    /// Memory budget of all buffers and queues of the device.
    pub(super) budget: Arc<MemoryBudget>,
    event_pool: Mutex<Vec<Event>>,
    /// Pinned blocks for reuse, by size.
    pinned_pool: Mutex<HashMap<usize, Vec<PinnedBuffer>>>,
    /// Budget of the pinned blocks of pending downloads, the parent of each queue's.
    pub(super) pinned_budget: Arc<MemoryBudget>,
    /// Stream for work outside of any queue: clearing new memory. Created on first use.
    service_stream: Mutex<Option<Stream>>,
    pub(super) deferred_drops: DeferredDrops,
    /// The order in which sessions submit programs.
    pub(super) turns: GpuTurns,
    cuda_context: Arc<CudaContext>,
}

impl fmt::Debug for DeviceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.gpu)
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A poisoned lock is safe to use: the guarded values are collections that each critical section changes by single calls, so
    // a panic cannot leave one half-updated.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens the primary context of a GPU and makes it current on the calling thread. Returns the context and the bytes of free
/// memory.
pub(super) fn open_context(gpu: &Gpu, name: &str) -> Result<(Arc<CudaContext>, u64), DeviceError> {
    let cuda_context = CudaContext::new(gpu.ordinal).map_err(|e| driver_error(name, "cuDevicePrimaryCtxRetain", e))?;
    cuda_context.bind_to_thread().map_err(|e| driver_error(name, "cuCtxSetCurrent", e))?;
    let (free, _) = result::mem_get_info().map_err(|e| driver_error(name, "cuMemGetInfo", e))?;
    Ok((cuda_context, free as u64))
}

impl DeviceContext {
    /// Opens a device. `limit` chooses its memory limit from the number of free bytes.
    pub(super) fn new(
        gpu: &Gpu,
        name: &str,
        limit: impl FnOnce(u64) -> u64,
    ) -> Result<Arc<DeviceContext>, DeviceError> {
        let (cuda_context, free) = open_context(gpu, name)?;
        Ok(Arc::new(DeviceContext {
            gpu: gpu.clone(),
            name: name.to_owned(),
            cuda_context,
            modules: Modules::default(),
            budget: MemoryBudget::new(limit(free)),
            event_pool: Mutex::default(),
            pinned_pool: Mutex::default(),
            pinned_budget: MemoryBudget::new(MAX_PINNED_DOWNLOADS),
            service_stream: Mutex::default(),
            deferred_drops: DeferredDrops::default(),
            turns: GpuTurns::default(),
        }))
    }

    /// Makes the CUDA context current on the calling thread. Required before each driver call for this device.
    pub(super) fn bind(&self) -> Result<(), DeviceError> {
        self.cuda_context.bind_to_thread().map_err(|e| self.driver_error("cuCtxSetCurrent", e))
    }

    /// The CUDA context. Every driver object holds a reference, so that the context is released after its last object, on any
    /// thread and in any order of drops.
    pub(super) fn cuda_context(&self) -> &Arc<CudaContext> {
        &self.cuda_context
    }

    /// Free and total bytes of the GPU's memory at this moment.
    pub(super) fn memory_info(&self) -> Result<(u64, u64), DeviceError> {
        self.bind()?;
        let info = result::mem_get_info().map_err(|e| self.driver_error("cuMemGetInfo", e))?;
        Ok((info.0 as u64, info.1 as u64))
    }

    /// The error of a failed driver call on this device.
    pub(super) fn driver_error(&self, call: &'static str, e: DriverError) -> DeviceError {
        driver_error(&self.name, call, e)
    }

    /// Acquires an event from the event pool, or creates one.
    pub(super) fn acquire_event(&self) -> Result<Event, DeviceError> {
        match lock(&self.event_pool).pop() {
            Some(event) => Ok(event),
            None => Event::new(self),
        }
    }

    /// Returns an event to the event pool. The caller no longer queries it; streams that wait for it are not affected.
    pub(super) fn recycle_event(&self, event: Event) {
        lock(&self.event_pool).push(event);
    }

    /// Reserves pinned memory for a download in the budget of its queue, which lies within `pinned_budget`. `None` if the queue
    /// would hold more than stays free, so that one client cannot take what all others need. A download of any size is accepted
    /// while no other one is pending.
    pub(super) fn reserve_pinned(&self, of_queue: &Arc<MemoryBudget>, bytes: usize) -> Option<Reservation> {
        let bytes = (pooled_size(bytes) as u64).min(MAX_PINNED_DOWNLOADS);
        let left = self.pinned_budget.available().checked_sub(bytes)?;
        let is_alone = self.pinned_budget.used() == 0;
        if is_alone || of_queue.used() + bytes <= left { of_queue.reserve(bytes).ok() } else { None }
    }

    /// Acquires a pinned block of at least `bytes` bytes from the pool, or allocates one. [`DeviceContext::recycle_pinned`]
    /// returns it.
    pub(super) fn acquire_pinned(&self, bytes: usize) -> Result<PinnedBuffer, DeviceError> {
        let size = pooled_size(bytes);
        let pooled = lock(&self.pinned_pool).get_mut(&size).and_then(Vec::pop);
        pooled.map_or_else(|| PinnedBuffer::new(self, size), Ok)
    }

    /// Returns a pinned block to the pool, or frees it if it is too large or the pool is full.
    pub(super) fn recycle_pinned(&self, block: PinnedBuffer) {
        if block.bytes() <= MAX_POOLED_BLOCK {
            let mut blocks = lock(&self.pinned_pool);
            let blocks = blocks.entry(block.bytes()).or_default();
            if blocks.len() < MAX_POOLED_PER_SIZE {
                blocks.push(block);
            }
        }
    }

    /// Submits `work` to the device's service stream and blocks until it is done. Other threads submit to the stream meanwhile.
    pub(super) fn run_blocking(
        &self,
        work: impl FnOnce(&Stream) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        self.bind()?;
        let end = self.acquire_event()?;
        let mut stream = lock(&self.service_stream);
        let shared = match &mut *stream {
            Some(stream) => stream,
            none => none.insert(Stream::new(self)?),
        };
        work(shared)?;
        end.record(self, shared)?;
        drop(stream);
        end.wait(self, "new memory to be cleared", || Ok(()))?;
        self.recycle_event(end);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_blocks_have_power_of_two_sizes_up_to_the_pool_limit() {
        for (bytes, want) in [
            (1, MIN_BLOCK),
            (MIN_BLOCK, MIN_BLOCK),
            (MIN_BLOCK + 1, 2 * MIN_BLOCK),
            (MAX_POOLED_BLOCK - 1, MAX_POOLED_BLOCK),
            (MAX_POOLED_BLOCK, MAX_POOLED_BLOCK),
            (MAX_POOLED_BLOCK + 1, MAX_POOLED_BLOCK + 1),
        ] {
            assert_eq!(pooled_size(bytes), want, "{bytes} bytes");
        }
    }
}

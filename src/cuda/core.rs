//! What the queues and buffers of one device share: its context, streams' events and pinned blocks to use again, modules.

use super::driver::{Gpu, failed};
use super::events::{Event, Stream};
use super::kernel::Modules;
use super::memory::Pinned;
use crate::device::{Account, DeviceError};
use cudarc::driver::{CudaContext, DriverError, result};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Size of the largest pinned block that is kept for later: the pieces in which servers read tensors.
const BLOCK: usize = 1 << 20;

/// Size of the smallest: a page.
const PAGE: usize = 4 << 10;

/// Pinned blocks of each size that are kept.
const BLOCKS: usize = 16;

/// Bytes of the pinned block that `bytes` bytes get: few sizes, to use blocks again, and no more than twice what is needed.
fn block(bytes: usize) -> usize {
    if bytes > BLOCK { bytes } else { bytes.next_power_of_two().max(PAGE) }
}

pub(super) struct Core {
    pub(super) gpu: Gpu,
    /// The device's name here: `CUDA0`.
    pub(super) name: String,
    pub(super) modules: Modules,
    /// All that its buffers and queues use.
    pub(super) account: Arc<Account>,
    events: Mutex<Vec<Event>>,
    /// By their size.
    blocks: Mutex<HashMap<usize, Vec<Pinned>>>,
    /// For work that no queue asked for: clearing new memory.
    housekeeping: Mutex<Option<Stream>>,
    context: Arc<CudaContext>,
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.gpu)
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What they hold are lists of whole things: a panic elsewhere cannot have left one torn.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A GPU's context, which is now the calling thread's, and the bytes that are free beside it.
pub(super) fn opened(gpu: &Gpu, name: &str) -> Result<(Arc<CudaContext>, u64), DeviceError> {
    let context = CudaContext::new(gpu.ordinal).map_err(|e| failed(name, "cuDevicePrimaryCtxRetain", e))?;
    context.bind_to_thread().map_err(|e| failed(name, "cuCtxSetCurrent", e))?;
    let (free, _) = result::mem_get_info().map_err(|e| failed(name, "cuMemGetInfo", e))?;
    Ok((context, free as u64))
}

impl Core {
    /// A device whose limit `memory` chooses, from the bytes that are free.
    pub(super) fn new(gpu: &Gpu, name: &str, memory: impl FnOnce(u64) -> u64) -> Result<Arc<Core>, DeviceError> {
        let (context, free) = opened(gpu, name)?;
        Ok(Arc::new(Core {
            gpu: gpu.clone(),
            name: name.to_owned(),
            context,
            modules: Modules::default(),
            account: Account::new(memory(free)),
            events: Mutex::default(),
            blocks: Mutex::default(),
            housekeeping: Mutex::default(),
        }))
    }

    /// Makes the device's context the calling thread's: before each driver call that has to do with it.
    pub(super) fn bind(&self) -> Result<(), DeviceError> {
        self.context.bind_to_thread().map_err(|e| self.failed("cuCtxSetCurrent", e))
    }

    /// What lives in it holds it: a context ends after all of that, whatever is dropped first and on whichever thread.
    pub(super) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Free and total bytes of the GPU's memory now.
    pub(super) fn memory_info(&self) -> Result<(u64, u64), DeviceError> {
        self.bind()?;
        let info = result::mem_get_info().map_err(|e| self.failed("cuMemGetInfo", e))?;
        Ok((info.0 as u64, info.1 as u64))
    }

    /// The error of a driver call on this device.
    pub(super) fn failed(&self, call: &'static str, e: DriverError) -> DeviceError {
        failed(&self.name, call, e)
    }

    /// An event to record.
    pub(super) fn event(&self) -> Result<Event, DeviceError> {
        match lock(&self.events).pop() {
            Some(event) => Ok(event),
            None => Event::new(self),
        }
    }

    /// Takes an event back that nobody will ask for any more.
    pub(super) fn reuse(&self, event: Event) {
        lock(&self.events).push(event);
    }

    /// Pinned memory of at least `bytes` bytes, for [`Core::give_back`].
    pub(super) fn pinned(&self, bytes: usize) -> Result<Pinned, DeviceError> {
        let size = block(bytes);
        let kept = lock(&self.blocks).get_mut(&size).and_then(Vec::pop);
        kept.map_or_else(|| Pinned::new(self, size), Ok)
    }

    pub(super) fn give_back(&self, block: Pinned) {
        if block.bytes() <= BLOCK {
            let mut blocks = lock(&self.blocks);
            let blocks = blocks.entry(block.bytes()).or_default();
            if blocks.len() < BLOCKS {
                blocks.push(block);
            }
        }
    }

    /// Runs `work` on a stream of the device's own, and waits for it.
    pub(super) fn at_once(&self, work: impl FnOnce(&Stream) -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        self.bind()?;
        let mut stream = lock(&self.housekeeping);
        let stream = match &mut *stream {
            Some(stream) => stream,
            none => none.insert(Stream::new(self)?),
        };
        work(stream)?;
        stream.synchronize(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_about_as_large_as_what_it_holds() {
        for (bytes, want) in
            [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (BLOCK - 1, BLOCK), (BLOCK, BLOCK), (BLOCK + 1, BLOCK + 1)]
        {
            assert_eq!(block(bytes), want, "{bytes} bytes");
        }
    }
}

//! Memory of a device, and pinned memory of the host.
#![allow(unsafe_code)]

use super::core::{Core, lock};
use super::events::Stream;
use crate::device::{Charge, DeviceError, HostBuffer};
use cudarc::driver::{CudaContext, DriverError, result, sys};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// A range of a device's memory. It is freed on drop: whoever drops it knows that no work uses it any more.
#[derive(Debug)]
pub(super) struct Memory {
    core: Arc<Core>,
    address: sys::CUdeviceptr,
    bytes: u64,
}

impl Memory {
    /// Zeroed memory. Tensors lie in it at the device's alignment, and kernels stay within their extents: no padding is needed.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the device has less left.
    pub(super) fn zeroed(core: &Arc<Core>, bytes: u64) -> Result<Memory, DeviceError> {
        core.bind()?;
        let memory = Memory::raw(core, bytes)?;
        if bytes > 0 {
            // Others' data may have been there.
            core.at_once(|stream| memory.fill(stream, 0, bytes, 0))?;
        }
        Ok(memory)
    }

    /// Memory with whatever is in it, for scratch that is written before it is read.
    pub(super) fn scratch(core: &Arc<Core>, bytes: u64) -> Result<Memory, DeviceError> {
        core.bind()?;
        Memory::raw(core, bytes)
    }

    fn raw(core: &Arc<Core>, bytes: u64) -> Result<Memory, DeviceError> {
        let size =
            usize::try_from(bytes.max(1)).map_err(|_| DeviceError::Misuse("a buffer beyond the address space"))?;
        // SAFETY: the context is current; the memory is owned by the value made here.
        match unsafe { result::malloc_sync(size) } {
            Ok(address) => Ok(Memory { core: Arc::clone(core), address, bytes }),
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (left, limit) = result::mem_get_info().map_or((0, core.gpu.memory), |(f, t)| (f as u64, t as u64));
                Err(DeviceError::OutOfMemory { asked: bytes, left, limit })
            }
            Err(e) => Err(core.failed("cuMemAlloc", e)),
        }
    }

    /// The device it lies on.
    pub(super) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Its address on the device.
    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// The address of `bytes` bytes from `offset` on.
    pub(super) fn at(&self, offset: u64, bytes: u64) -> Result<u64, DeviceError> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(self.address + offset),
            _ => Err(DeviceError::Misuse("a range reaches past the end of its buffer")),
        }
    }

    /// Sets bytes, in order with the stream's work.
    pub(super) fn fill(&self, stream: &Stream, offset: u64, bytes: u64, value: u8) -> Result<(), DeviceError> {
        let address = self.at(offset, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: `at` has seen that the range lies in this allocation, which outlives the work (see the type).
        unsafe { result::memset_d8_async(address, value, bytes as usize, stream.raw()) }
            .map_err(|e| self.core.failed("cuMemsetD8Async", e))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.core.bind().is_ok() {
            // SAFETY: it came from cuMemAlloc and is freed once. After a fault of the device the call fails, and the memory
            // is gone with the context.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Memory of the host that devices reach: copies to and from it need no waiting, and kernels can write it.
#[derive(Debug)]
pub(super) struct Pinned {
    host: *mut u8,
    device: sys::CUdeviceptr,
    bytes: usize,
    context: Arc<CudaContext>,
}

// SAFETY: it is plain memory behind an exclusively owned pointer; shared use is by atomics only.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Zeroed pinned memory that every device can use.
    pub(super) fn new(core: &Core, bytes: usize) -> Result<Pinned, DeviceError> {
        let none = || core.failed("cuMemHostAlloc", DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        Pinned::if_there_is(core, bytes)?.ok_or_else(none)
    }

    /// As [`Pinned::new`]; `None` where the driver has no more of it, which harms nothing.
    pub(super) fn if_there_is(core: &Core, bytes: usize) -> Result<Option<Pinned>, DeviceError> {
        core.bind()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the context is current; the memory is owned by the value made here. Not write-combined, which is slow to read.
        let host = unsafe { result::malloc_host(bytes, flags) };
        let host = match host {
            Ok(host) => host.cast::<u8>(),
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Ok(None),
            Err(e) => return Err(core.failed("cuMemHostAlloc", e)),
        };
        // SAFETY: it is `bytes` bytes of this process's memory that nobody else knows of yet.
        unsafe { host.write_bytes(0, bytes) };
        let mut device = 0;
        // SAFETY: the pointer is that of memory mapped for devices; one address is written.
        let mapped = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut device, host.cast(), 0) }.result();
        let pinned = Pinned { host, device, bytes, context: Arc::clone(core.context()) };
        mapped.map_err(|e| core.failed("cuMemHostGetDevicePointer", e))?;
        Ok(Some(pinned))
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where devices see byte `offset`.
    pub(super) fn device(&self, offset: usize) -> u64 {
        self.device + offset as u64
    }

    /// Bytes for the host to fill; no work that touches them may be on its way.
    pub(super) fn slice_mut(&mut self, offset: usize, bytes: usize) -> Option<&mut [u8]> {
        let end = offset.checked_add(bytes).filter(|&end| end <= self.bytes)?;
        // SAFETY: the range lies in the allocation, which is initialised; `&mut self` makes this the host's only access, and the
        // caller sees to it that no device writes meanwhile.
        Some(unsafe { std::slice::from_raw_parts_mut(self.host.add(offset), end - offset) })
    }

    /// Bytes for the host to read; no work that writes them may be on its way.
    pub(super) fn slice(&self, bytes: usize) -> Option<&[u8]> {
        // SAFETY: as in `slice_mut`, for reading.
        (bytes <= self.bytes).then(|| unsafe { std::slice::from_raw_parts(self.host, bytes) })
    }

    /// A word that host and device share at any time.
    pub(super) fn word(&self, index: usize) -> Option<&AtomicU32> {
        let offset = index.checked_mul(4).filter(|&o| o + 4 <= self.bytes)?;
        // SAFETY: pinned memory is page-aligned, so the word is aligned, and it lies in the allocation. The device writes whole
        // aligned words, which an atomic may be read beside.
        Some(unsafe { AtomicU32::from_ptr(self.host.add(offset).cast()) })
    }

    /// The value of a word that the device may write.
    pub(super) fn read_word(&self, index: usize) -> u32 {
        self.word(index).map_or(0, |word| word.load(Ordering::Acquire))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // The thread may have no context, or that of a device that has failed: the driver would refuse.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: it came from cuMemHostAlloc and is freed once; whoever drops it knows that no copy uses it any more. After a
            // fault of the device it may fail: the process then keeps the memory.
            let _ = unsafe { result::free_host(self.host.cast()) };
        }
    }
}

/// Where pinned memory lies that programs hold: the first byte's address and the length of each.
static LENT: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// Pinned memory in a program's hands.
struct Lent(Pinned);

impl Drop for Lent {
    fn drop(&mut self) {
        lock(&LENT).remove(&self.0.host.addr());
    }
}

impl Pinned {
    /// The memory as a program's own.
    pub(super) fn lend(self, bytes: usize, charge: Charge) -> Result<HostBuffer, DeviceError> {
        let start = NonNull::new(self.host).filter(|_| bytes <= self.bytes);
        let start = start.ok_or(DeviceError::Misuse("a host buffer beyond its pinned memory"))?;
        lock(&LENT).insert(start.addr().get(), bytes);
        // SAFETY: the bytes are initialised, pinned where they are, and freed with `Lent`, which nothing but the buffer
        // reaches. Devices copy from them only while an upload borrows them.
        Ok(unsafe { HostBuffer::from_raw(start, bytes, Box::new(Lent(self)), Some(charge)) })
    }
}

/// Whether bytes lie in pinned memory that a program holds, of whichever device: all of them reach it.
pub(super) fn is_pinned(bytes: &[u8]) -> bool {
    let start = bytes.as_ptr().addr();
    let lent = lock(&LENT).range(..=start).next_back().map(|(&first, &len)| (first, len));
    lent.is_some_and(|(first, len)| start - first <= len && bytes.len() <= len - (start - first))
}

//! Memory allocations: device memory, and pinned (page-locked) memory of the host.
#![allow(unsafe_code)]

use super::context::{DeviceContext, lock};
use super::events::Stream;
use crate::device::{DeviceError, HostBuffer, Reservation};
use cudarc::driver::{CudaContext, DriverError, result, sys};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// An allocation of device memory, freed on drop. The owner must not drop it while submitted work still uses it; queues retain
/// it until the event behind that work is reached.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    context: Arc<DeviceContext>,
    address: sys::CUdeviceptr,
    bytes: u64,
}

impl DeviceMemory {
    /// Allocates zeroed memory. No padding is added, because kernels access no byte outside of a tensor's extent.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the device has fewer free bytes.
    pub(super) fn zeroed(context: &Arc<DeviceContext>, bytes: u64) -> Result<DeviceMemory, DeviceError> {
        context.bind()?;
        let memory = DeviceMemory::allocate(context, bytes)?;
        if bytes > 0 {
            // The memory may hold another process's or session's data.
            context.run_blocking(|stream| memory.fill(stream, 0, bytes, 0))?;
        }
        Ok(memory)
    }

    /// Allocates uninitialised memory, for scratch that is written before it is read.
    pub(super) fn uninitialized(context: &Arc<DeviceContext>, bytes: u64) -> Result<DeviceMemory, DeviceError> {
        context.bind()?;
        DeviceMemory::allocate(context, bytes)
    }

    fn allocate(context: &Arc<DeviceContext>, bytes: u64) -> Result<DeviceMemory, DeviceError> {
        let size =
            usize::try_from(bytes.max(1)).map_err(|_| DeviceError::Misuse("a buffer beyond the address space"))?;
        // SAFETY: the caller has made the context current; the returned value owns the memory.
        match unsafe { result::malloc_sync(size) } {
            Ok(address) => Ok(DeviceMemory { context: Arc::clone(context), address, bytes }),
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (left, limit) =
                    result::mem_get_info().map_or((0, context.gpu.memory), |(f, t)| (f as u64, t as u64));
                Err(DeviceError::OutOfMemory { requested: bytes, available: left, limit })
            }
            Err(e) => Err(context.driver_error("cuMemAlloc", e)),
        }
    }

    /// The context of the device that has the memory.
    pub(super) fn context(&self) -> &Arc<DeviceContext> {
        &self.context
    }

    /// First address on the device.
    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// Device address of the range of `bytes` bytes at `offset`; fails if the range exceeds the allocation.
    pub(super) fn address_of(&self, offset: u64, bytes: u64) -> Result<u64, DeviceError> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(self.address + offset),
            _ => Err(DeviceError::Misuse("a range reaches past the end of its buffer")),
        }
    }

    /// Sets each byte of a range to `value`, in stream order.
    pub(super) fn fill(&self, stream: &Stream, offset: u64, bytes: u64, value: u8) -> Result<(), DeviceError> {
        let address = self.address_of(offset, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: `address_of` checked that the range lies in this allocation, which outlives the work (see the type).
        unsafe { result::memset_d8_async(address, value, bytes as usize, stream.raw()) }
            .map_err(|e| self.context.driver_error("cuMemsetD8Async", e))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: the address came from cuMemAlloc and is freed once. After a device fault the call fails; the driver then
            // frees the memory with the context.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Pinned (page-locked) host memory, mapped for all devices. Copies to and from it run asynchronously, and kernels can write
/// it.
#[derive(Debug)]
pub(super) struct PinnedBuffer {
    host: *mut u8,
    device_base: sys::CUdeviceptr,
    bytes: usize,
    cuda_context: Arc<CudaContext>,
}

// SAFETY: the buffer exclusively owns its memory; shared access is atomic (`word`) or only reads (`slice`, whose caller ensures
// that no device writes the range).
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates zeroed pinned memory that every device can access.
    pub(super) fn new(context: &DeviceContext, bytes: usize) -> Result<PinnedBuffer, DeviceError> {
        let out_of_memory =
            || context.driver_error("cuMemHostAlloc", DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        PinnedBuffer::try_new(context, bytes)?.ok_or_else(out_of_memory)
    }

    /// As [`PinnedBuffer::new`], but returns `None` if the driver cannot pin more memory. The context stays usable after that.
    pub(super) fn try_new(context: &DeviceContext, bytes: usize) -> Result<Option<PinnedBuffer>, DeviceError> {
        context.bind()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: `bind` has made the context current; the returned value owns the memory. Not write-combined, which is slow to
        // read.
        let host = unsafe { result::malloc_host(bytes, flags) };
        let host = match host {
            Ok(host) => host.cast::<u8>(),
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Ok(None),
            Err(e) => return Err(context.driver_error("cuMemHostAlloc", e)),
        };
        // SAFETY: the driver returned `bytes` bytes of host memory, to which no other pointer exists yet.
        unsafe { host.write_bytes(0, bytes) };
        let mut device_base = 0;
        // SAFETY: `host` points to memory that was allocated with DEVICEMAP; the function writes one address.
        let mapped = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut device_base, host.cast(), 0) }.result();
        let pinned = PinnedBuffer { host, device_base, bytes, cuda_context: Arc::clone(context.cuda_context()) };
        mapped.map_err(|e| context.driver_error("cuMemHostGetDevicePointer", e))?;
        Ok(Some(pinned))
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Device address of byte `offset`.
    pub(super) fn device_address(&self, offset: usize) -> u64 {
        self.device_base + offset as u64
    }

    /// A range for the host to write. The caller guarantees that no submitted work accesses it.
    pub(super) fn slice_mut(&mut self, offset: usize, bytes: usize) -> Option<&mut [u8]> {
        let end = offset.checked_add(bytes).filter(|&end| end <= self.bytes)?;
        // SAFETY: the range lies in the allocation, which is initialised. `&mut self` excludes other accesses by the host, and
        // the caller guarantees that no device accesses the range.
        Some(unsafe { std::slice::from_raw_parts_mut(self.host.add(offset), end - offset) })
    }

    /// The first `bytes` bytes, for the host to read. The caller guarantees that no submitted work writes them.
    pub(super) fn slice(&self, bytes: usize) -> Option<&[u8]> {
        // SAFETY: as in `slice_mut`, for reading.
        (bytes <= self.bytes).then(|| unsafe { std::slice::from_raw_parts(self.host, bytes) })
    }

    /// Word `index`, for concurrent access by host and device.
    pub(super) fn word(&self, index: usize) -> Option<&AtomicU32> {
        let offset = index.checked_mul(4).filter(|&o| o + 4 <= self.bytes)?;
        // SAFETY: pinned memory is page-aligned, so the word is aligned, and it lies in the allocation. The device writes whole
        // aligned words, which do not tear under concurrent atomic reads.
        Some(unsafe { AtomicU32::from_ptr(self.host.add(offset).cast()) })
    }

    /// Reads word `index`, which the device may write concurrently.
    pub(super) fn read_word(&self, index: usize) -> u32 {
        self.word(index).map_or(0, |word| word.load(Ordering::Acquire))
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // The thread may have no current context, or that of a failed device, with which the driver would reject the call.
        if self.cuda_context.bind_to_thread().is_ok() {
            // SAFETY: the pointer came from cuMemHostAlloc and is freed once; the owner guarantees that no copy uses it any
            // more. After a device fault the call may fail, which leaks the memory.
            let _ = unsafe { result::free_host(self.host.cast()) };
        }
    }
}

/// Pinned host buffers that the application holds: length by first address. `is_pinned` searches this table.
static EXPOSED_BUFFERS: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// Pinned memory that the application holds as a [`HostBuffer`]; removes itself from the table on drop.
struct ExposedBuffer(PinnedBuffer);

impl Drop for ExposedBuffer {
    fn drop(&mut self) {
        lock(&EXPOSED_BUFFERS).remove(&self.0.host.addr());
    }
}

impl PinnedBuffer {
    /// Converts the buffer into a [`HostBuffer`] of `bytes` bytes for the application. `reservation` is released with it.
    pub(super) fn into_host_buffer(self, bytes: usize, reservation: Reservation) -> Result<HostBuffer, DeviceError> {
        let start = NonNull::new(self.host).filter(|_| bytes <= self.bytes);
        let start = start.ok_or(DeviceError::Misuse("a host buffer beyond its pinned memory"))?;
        lock(&EXPOSED_BUFFERS).insert(start.addr().get(), bytes);
        // SAFETY: the bytes are initialised, do not move, and are freed with `ExposedBuffer`, to which only the buffer has
        // access. Devices copy from them only while an upload borrows them.
        Ok(unsafe { HostBuffer::from_raw(start, bytes, Box::new(ExposedBuffer(self)), Some(reservation)) })
    }
}

/// Whether `bytes` lies in a pinned buffer that the application holds. Its device does not matter: pinned memory is mapped for
/// all.
pub(super) fn is_pinned(bytes: &[u8]) -> bool {
    let start = bytes.as_ptr().addr();
    let found = lock(&EXPOSED_BUFFERS).range(..=start).next_back().map(|(&first, &len)| (first, len));
    found.is_some_and(|(first, len)| start - first <= len && bytes.len() <= len - (start - first))
}

//! Device memory: a stream-ordered pool of the device, from which buffers and scratch memory are allocated.
//!
//! cuMemAlloc and cuMemFree wait for all work of the GPU, so one session's free would wait for another's prompt. A pool does
//! neither: its allocations and frees are operations of a stream. GPUs without pools (some virtual ones) allocate directly, and
//! free on a thread of the device.
#![allow(unsafe_code)]

use super::context::{DeviceContext, PrimaryContext};
use super::deferred_drop::DeferredDrops;
use super::driver_api::{self, DriverError};
use super::events::{POLL_INTERVAL, Stream};
use super::layout::MemoryLayout;
use crate::device::DeviceError;
use cudarc::driver::sys;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an allocation waits for memory that is being freed.
const FREE_TIMEOUT: Duration = Duration::from_secs(1);

/// Where a device's memory comes from.
#[derive(Debug)]
pub(super) enum MemorySource {
    Pool(MemoryPool),
    /// cuMemAlloc, for GPUs without pools.
    Direct,
}

/// A stream-ordered memory pool (CUmemoryPool).
#[derive(Debug)]
pub(super) struct MemoryPool {
    raw: sys::CUmemoryPool,
    context: Arc<PrimaryContext>,
}

// SAFETY: the driver allows the use of a pool handle from any thread; it locks internally.
unsafe impl Send for MemoryPool {}
// SAFETY: as above.
unsafe impl Sync for MemoryPool {}

/// The part of a pool's description that names a GPU.
fn location(ordinal: usize) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal as i32 }
}

impl MemorySource {
    /// A pool on the GPU `ordinal`, if it has pools. The context must be current.
    pub(super) fn new(context: &Arc<PrimaryContext>, ordinal: usize) -> Result<MemorySource, DriverError> {
        let supported = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        let device = driver_api::device(ordinal)?;
        if matches!(driver_api::device_attribute(device, supported), Ok(0) | Err(_)) {
            return Ok(MemorySource::Direct);
        }
        // SAFETY: all fields are integers, enums with a variant 0, or pointers, for which zeros are valid.
        let mut properties: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
        properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = location(ordinal);
        let mut raw = std::ptr::null_mut();
        // SAFETY: the description is valid for the call, which writes one handle.
        unsafe { driver_api::cuMemPoolCreate(&raw mut raw, &raw const properties) }?;
        let pool = MemoryPool { raw, context: Arc::clone(context) };
        // Otherwise the driver would return freed memory to the system at the next synchronising call of any thread, which that
        // thread would wait for. `trim` returns it.
        let mut keep = u64::MAX;
        let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the pool is alive, and the attribute is a 64-bit integer.
        unsafe { driver_api::cuMemPoolSetAttribute(pool.raw, threshold, (&raw mut keep).cast()) }?;
        Ok(MemorySource::Pool(pool))
    }

    /// Allocates at least one byte, for use on `stream`, and on other streams after an event of it.
    fn allocate(&self, bytes: usize, stream: &Stream) -> Result<sys::CUdeviceptr, DriverError> {
        let mut address = 0;
        match self {
            // SAFETY: the caller has made the context current; the function writes one address.
            MemorySource::Direct => unsafe { driver_api::cuMemAlloc_v2(&raw mut address, bytes) },
            // SAFETY: pool and stream are alive; the function writes one address.
            MemorySource::Pool(pool) => unsafe {
                driver_api::cuMemAllocFromPoolAsync(&raw mut address, bytes, pool.raw, stream.raw())
            },
        }
        .map(|()| address)
    }

    /// The driver call that allocates.
    fn call(&self) -> &'static str {
        match self {
            MemorySource::Direct => "cuMemAlloc",
            MemorySource::Pool(_) => "cuMemAllocFromPoolAsync",
        }
    }

    /// Lets the GPU `ordinal` access the pool's memory. Peer access between contexts does not include pools.
    pub(super) fn allow_peer(&self, ordinal: usize) -> Result<(), DriverError> {
        let MemorySource::Pool(pool) = self else { return Ok(()) };
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc { location: location(ordinal), flags };
        // SAFETY: the pool is alive, and the function reads one description.
        unsafe { driver_api::cuMemPoolSetAccess(pool.raw, &raw const access, 1) }
    }

    /// Returns the memory that the pool keeps to the system.
    pub(super) fn trim(&self) {
        if let MemorySource::Pool(pool) = self {
            pool.trim();
        }
    }

    /// Bytes that the pool keeps although no allocation uses them.
    pub(super) fn kept(&self) -> u64 {
        let MemorySource::Pool(pool) = self else { return 0 };
        let attribute = |attribute| {
            let mut value = 0u64;
            // SAFETY: the pool is alive, and both attributes are 64-bit integers.
            let read = unsafe { driver_api::cuMemPoolGetAttribute(pool.raw, attribute, (&raw mut value).cast()) };
            read.map_or(0, |()| value)
        };
        attribute(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
            .saturating_sub(attribute(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT))
    }
}

impl MemoryPool {
    fn trim(&self) {
        if self.context.bind_for_release() {
            // SAFETY: the pool is alive. The driver keeps memory that submitted work may still use.
            let _ = unsafe { driver_api::cuMemPoolTrimTo(self.raw, 0) };
        }
    }
}

impl Drop for MemoryPool {
    fn drop(&mut self) {
        if self.context.bind_for_release() {
            // SAFETY: the pool is destroyed once, after its last allocation was freed: allocations own the device's context.
            let _ = unsafe { driver_api::cuMemPoolDestroy(self.raw) };
        }
    }
}

/// An allocation of device memory, freed on drop without waiting. The owner must not drop it while submitted work still uses it;
/// queues retain it until the event after that work is reached.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    context: Arc<DeviceContext>,
    address: sys::CUdeviceptr,
    bytes: u64,
    /// Which ranges hold repacked weights.
    pub(super) layout: MemoryLayout,
}

/// Waits until what a device has freed is free, but not for long: other work may be in front. Then returns it to the system.
fn release_freed(device: &Arc<DeviceContext>) {
    let began = Instant::now();
    let is_freeing = || {
        let by_stream = device.bind().is_ok() && device.service_stream().is_idle() == Ok(false);
        by_stream || DeferredDrops::has_unfreed(device)
    };
    while is_freeing() && !device.primary().is_hung() && began.elapsed() < FREE_TIMEOUT {
        std::thread::sleep(POLL_INTERVAL);
    }
    device.memory_source.trim();
}

impl DeviceMemory {
    /// Allocates zeroed memory. No padding is added, because kernels access no byte outside of a tensor's extent. Blocks until the
    /// memory is zeroed, since any stream may use it then.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the device has fewer free bytes.
    pub(super) fn zeroed(context: &Arc<DeviceContext>, bytes: u64) -> Result<DeviceMemory, DeviceError> {
        context.bind()?;
        let mut memory = None;
        context.run_blocking(|stream| {
            let memory = memory.insert(DeviceMemory::uninitialized(context, bytes, stream)?);
            // The memory may hold another process's or session's data.
            memory.fill(stream, 0, bytes, 0)
        })?;
        memory.ok_or_else(|| DeviceError::Bug("memory was not allocated".to_owned()))
    }

    /// Allocates uninitialised memory, for scratch that is written before it is read, by later work of `stream`. The context must
    /// be current.
    pub(super) fn uninitialized(
        context: &Arc<DeviceContext>,
        bytes: u64,
        stream: &Stream,
    ) -> Result<DeviceMemory, DeviceError> {
        let size =
            usize::try_from(bytes.max(1)).map_err(|_| DeviceError::Misuse("a buffer beyond the address space"))?;
        let allocate = || context.memory_source.allocate(size, stream);
        let is_out_of_memory = |e: &DriverError| *e == DriverError::OUT_OF_MEMORY;
        let allocated = allocate().or_else(|e| {
            if is_out_of_memory(&e) {
                // The devices of the GPU may be freeing memory, and their pools keep what was freed.
                super::peer::devices_of(context.gpu.ordinal).iter().for_each(release_freed);
                context.primary().cuda().bind()?;
                return allocate();
            }
            Err(e)
        });
        match allocated {
            Ok(address) => {
                Ok(DeviceMemory { context: Arc::clone(context), address, bytes, layout: MemoryLayout::default() })
            }
            Err(e) if is_out_of_memory(&e) => {
                let (left, limit) = context.memory_info().unwrap_or((0, context.gpu.memory));
                Err(DeviceError::OutOfMemory { requested: bytes, available: left, limit })
            }
            Err(e) => Err(context.driver_error(context.memory_source.call(), e)),
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
        unsafe { driver_api::cuMemsetD8Async(address, value, bytes as usize, stream.raw()) }
            .map_err(|e| self.context.driver_error("cuMemsetD8Async", e))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let context = &self.context;
        if !context.primary().bind_for_release() {
            return;
        }
        match &context.memory_source {
            // The service stream only allocates, zeroes and frees, so nothing delays the free. After a device fault the call
            // fails; the driver then frees the memory with the context.
            MemorySource::Pool(_) => {
                // SAFETY: the address came from the pool and is freed once. No work uses it (see the type).
                let _ = unsafe { driver_api::cuMemFreeAsync(self.address, context.service_stream().raw()) };
                DeferredDrops::trim_later(context);
            }
            MemorySource::Direct => DeferredDrops::free_later(context, DirectMemory(self.address)),
        }
    }
}

/// Memory of cuMemAlloc that is to be freed. Dropping it waits for all work of the GPU.
pub(super) struct DirectMemory(sys::CUdeviceptr);

impl DirectMemory {
    /// Frees the memory. The context must be current.
    pub(super) fn free(self) {
        // SAFETY: the address came from cuMemAlloc and is freed once.
        let _ = unsafe { driver_api::cuMemFree_v2(self.0) };
    }
}

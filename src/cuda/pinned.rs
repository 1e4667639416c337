//! Pinned (page-locked) memory of the host: buffers of the application, and the arena from which a device's transfers take blocks.
//!
//! Allocating or freeing pinned memory waits for all work of the GPU. So a device allocates its arena when it is opened, and
//! transfers take blocks from it: first fit, since few blocks exist at a time.
#![allow(unsafe_code)]

use super::context::PrimaryContext;
use super::driver_api::{self, DriverError};
use crate::device::{DeviceError, HostBuffer, Reservation};
use crate::poison::lock;
use cudarc::driver::sys;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Alignment of blocks in bytes, and the smallest block: what a GPU writes at once does not share a cache line with another block.
const BLOCK_ALIGNMENT: usize = 256;

/// Pinned host memory, mapped for all devices. Copies to and from it run asynchronously, and kernels can write it.
#[derive(Debug)]
pub(super) struct PinnedBuffer {
    host: NonNull<u8>,
    device_base: sys::CUdeviceptr,
    bytes: usize,
    context: Arc<PrimaryContext>,
}

// SAFETY: the buffer owns its memory. It is accessed only through blocks of an arena, which do not overlap, or as a host buffer
// of the application, to which the buffer is moved.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates zeroed pinned memory that every device can access. `None` if the driver cannot pin more; the context stays usable
    /// after that. The driver may wait for all work of the GPU.
    pub(super) fn try_new(context: &Arc<PrimaryContext>, bytes: usize) -> Result<Option<PinnedBuffer>, DeviceError> {
        context.bind()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let mut host = std::ptr::null_mut();
        // SAFETY: `bind` has made the context current; the function writes one pointer. Not write-combined, which is slow to read.
        match unsafe { driver_api::cuMemHostAlloc(&raw mut host, bytes, flags) } {
            Ok(()) => {}
            Err(DriverError::OUT_OF_MEMORY) => return Ok(None),
            Err(e) => return Err(context.driver_error("cuMemHostAlloc", e)),
        }
        let host = NonNull::new(host.cast::<u8>())
            .ok_or_else(|| DeviceError::Bug("cuMemHostAlloc returned null".to_owned()))?;
        // SAFETY: the driver returned `bytes` bytes of host memory, to which no other pointer exists yet.
        unsafe { host.write_bytes(0, bytes) };
        let mut device_base = 0;
        // SAFETY: `host` points to memory that was allocated with DEVICEMAP; the function writes one address.
        let mapped = unsafe { driver_api::cuMemHostGetDevicePointer_v2(&raw mut device_base, host.as_ptr().cast(), 0) };
        let pinned = PinnedBuffer { host, device_base, bytes, context: Arc::clone(context) };
        mapped.map_err(|e| context.driver_error("cuMemHostGetDevicePointer", e))?;
        Ok(Some(pinned))
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if self.context.bind_for_release() {
            // SAFETY: the pointer came from cuMemHostAlloc and is freed once; the owner guarantees that no copy uses it any
            // more. After a device fault the call may fail, which leaks the memory.
            let _ = unsafe { driver_api::cuMemFreeHost(self.host.as_ptr().cast()) };
        }
    }
}

/// Pinned memory of a device, divided into blocks.
#[derive(Debug)]
pub(super) struct PinnedArena {
    memory: PinnedBuffer,
    /// Free ranges: length by start. No two of them touch.
    free: Mutex<BTreeMap<usize, usize>>,
}

impl PinnedArena {
    /// Allocates an arena of `most` bytes, or of half as often as the driver refuses, down to `least`.
    pub(super) fn new(
        context: &Arc<PrimaryContext>,
        most: usize,
        least: usize,
    ) -> Result<Arc<PinnedArena>, DeviceError> {
        let mut bytes = most;
        loop {
            if let Some(memory) = PinnedBuffer::try_new(context, bytes)? {
                return Ok(Arc::new(PinnedArena { memory, free: Mutex::new(BTreeMap::from([(0, bytes)])) }));
            }
            if bytes / 2 < least {
                return Err(context.driver_error("cuMemHostAlloc", DriverError::OUT_OF_MEMORY));
            }
            bytes /= 2;
        }
    }

    /// Bytes of all blocks, free or not.
    pub(super) fn bytes(&self) -> usize {
        self.memory.bytes
    }

    /// A block of at least `bytes` bytes, whose content is arbitrary. `None` if no free range is large enough.
    pub(super) fn acquire(self: &Arc<Self>, bytes: usize) -> Option<PinnedBlock> {
        let bytes = bytes.max(1).checked_next_multiple_of(BLOCK_ALIGNMENT)?;
        let mut free = lock(&self.free);
        let (&start, &length) = free.iter().find(|&(_, &length)| length >= bytes)?;
        free.remove(&start);
        if length > bytes {
            free.insert(start + bytes, length - bytes);
        }
        Some(PinnedBlock { start, bytes, arena: Arc::clone(self) })
    }

    fn release(&self, mut start: usize, mut bytes: usize) {
        let mut free = lock(&self.free);
        if let Some(next) = free.remove(&(start + bytes)) {
            bytes += next;
        }
        if let Some((&before, &length)) = free.range(..start).next_back()
            && before + length == start
        {
            (start, bytes) = (before, length + bytes);
        }
        free.insert(start, bytes);
    }
}

/// A block of an arena, returned to it on drop. The owner must not drop it while submitted work still uses it.
#[derive(Debug)]
pub(super) struct PinnedBlock {
    start: usize,
    bytes: usize,
    arena: Arc<PinnedArena>,
}

impl PinnedBlock {
    fn pointer(&self) -> *mut u8 {
        // SAFETY: `start` lies in the arena's memory, because the arena gave this block out.
        unsafe { self.arena.memory.host.as_ptr().add(self.start) }
    }

    /// Device address of byte `offset`.
    pub(super) fn device_address(&self, offset: usize) -> u64 {
        self.arena.memory.device_base + (self.start + offset) as u64
    }

    /// A range for the host to write. The caller guarantees that no submitted work accesses it.
    pub(super) fn slice_mut(&mut self, offset: usize, bytes: usize) -> Option<&mut [u8]> {
        let end = offset.checked_add(bytes).filter(|&end| end <= self.bytes)?;
        // SAFETY: the range lies in this block, which overlaps no other, of initialised memory. `&mut self` excludes other accesses
        // by the host, and the caller guarantees that no device accesses the range.
        Some(unsafe { std::slice::from_raw_parts_mut(self.pointer().add(offset), end - offset) })
    }

    /// The first `bytes` bytes, for the host to read. The caller guarantees that no submitted work writes them.
    pub(super) fn slice(&self, bytes: usize) -> Option<&[u8]> {
        // SAFETY: as in `slice_mut`, for reading.
        (bytes <= self.bytes).then(|| unsafe { std::slice::from_raw_parts(self.pointer(), bytes) })
    }

    /// The first word, for concurrent access by host and device.
    pub(super) fn first_word(&self) -> &AtomicU32 {
        const { assert!(BLOCK_ALIGNMENT >= 4) };
        // SAFETY: blocks are aligned and have at least `BLOCK_ALIGNMENT` bytes. The device writes whole aligned words, which do not
        // tear under concurrent atomic accesses.
        unsafe { AtomicU32::from_ptr(self.pointer().cast()) }
    }

    /// Reads the first word, which the device may write concurrently.
    pub(super) fn read_first_word(&self) -> u32 {
        self.first_word().load(Ordering::Acquire)
    }
}

impl Drop for PinnedBlock {
    fn drop(&mut self) {
        self.arena.release(self.start, self.bytes);
    }
}

/// Pinned host buffers that the application holds: length by first address. `is_pinned` searches this table.
static EXPOSED_BUFFERS: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// Pinned memory that the application holds as a [`HostBuffer`]; removes itself from the table on drop.
struct ExposedBuffer(PinnedBuffer);

impl Drop for ExposedBuffer {
    fn drop(&mut self) {
        lock(&EXPOSED_BUFFERS).remove(&self.0.host.addr().get());
    }
}

impl PinnedBuffer {
    /// Converts the buffer into a [`HostBuffer`] of `bytes` bytes for the application. `reservation` is released with it.
    pub(super) fn into_host_buffer(self, bytes: usize, reservation: Reservation) -> Result<HostBuffer, DeviceError> {
        if bytes > self.bytes {
            return Err(DeviceError::Misuse("a host buffer beyond its pinned memory"));
        }
        let start = self.host;
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

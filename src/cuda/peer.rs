//! Connections between the GPUs of the process: peer access, and a check that peer copies arrive as they were sent.
//!
//! Two devices are connected when the second one is opened, before either has work. With an IOMMU or PCIe access control in the way,
//! the driver grants peer access and the copies write wrong bytes. So a pattern is copied in each direction; if it comes back wrong,
//! copies between the two go through the host.
#![allow(unsafe_code)]

use super::context::DeviceContext;
use super::copy::copy_peer;
use super::driver_api::{self, DriverError};
use super::memory::DeviceMemory;
use super::pinned::PinnedArena;
use crate::device::DeviceError;
use crate::poison::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

/// Bytes of the pattern: several pages of every size that an IOMMU maps, up to 64 KiB.
const PATTERN_BYTES: usize = 256 << 10;

/// The GPUs from which a device can copy by peer copies, by ordinal. From others, copies go through the host.
#[derive(Debug, Default)]
pub(super) struct Peers(Mutex<HashMap<usize, bool>>);

impl Peers {
    /// Whether peer copies from the GPU `ordinal` work.
    pub(super) fn has(&self, ordinal: usize) -> bool {
        lock(&self.0).get(&ordinal).copied().unwrap_or(false)
    }

    fn set(&self, ordinal: usize, works: bool) {
        lock(&self.0).insert(ordinal, works);
    }
}

/// Lock that is held while a device is connected.
static CONNECTING: Mutex<()> = Mutex::new(());

/// The open devices of the process.
static DEVICES: Mutex<Vec<Weak<DeviceContext>>> = Mutex::new(Vec::new());

/// The open devices on the GPU `ordinal`.
pub(super) fn devices_of(ordinal: usize) -> Vec<Arc<DeviceContext>> {
    let devices: Vec<_> = lock(&DEVICES).iter().filter_map(Weak::upgrade).collect();
    devices.into_iter().filter(|device| device.gpu.ordinal == ordinal).collect()
}

/// Connects a new device with all others.
pub(super) fn connect(context: &Arc<DeviceContext>) -> Result<(), DeviceError> {
    // The lock is held meanwhile, so that one of two devices that are opened at the same time connects both.
    let _connecting = lock(&CONNECTING);
    let mut devices = lock(&DEVICES);
    devices.retain(|device| device.strong_count() > 0);
    let others: Vec<_> = devices.iter().filter_map(Weak::upgrade).collect();
    drop(devices);
    for other in others.iter().filter(|other| other.primary().lost().is_none()) {
        if other.gpu.ordinal == context.gpu.ordinal {
            continue;
        }
        // Access is enabled also if another device of one of the two GPUs is connected: each device has a pool of its own.
        let works = connect_pair(context, other)?;
        context.peers.set(other.gpu.ordinal, works);
        other.peers.set(context.gpu.ordinal, works);
    }
    lock(&DEVICES).push(Arc::downgrade(context));
    context.bind()
}

/// Whether peer copies between two devices work, in both directions.
fn connect_pair(a: &Arc<DeviceContext>, b: &Arc<DeviceContext>) -> Result<bool, DeviceError> {
    let names = || format!("between {} and {}", a.primary().name, b.primary().name);
    match enable_access(a, b) {
        Ok(true) => {}
        Ok(false) => return Ok(false),
        // For example, the limit of peer connections is reached.
        Err(e) => {
            log::info!("no peer copies {}: {e}; copies go through the host", names());
            return Ok(false);
        }
    }
    for (from, to) in [(a, b), (b, a)] {
        if !pattern_arrives(from, to)? {
            log::warn!(
                "peer copies {} write wrong bytes, as with an IOMMU or PCIe access control (ACS) in the way; copies go through the \
                 host",
                names()
            );
            return Ok(false);
        }
    }
    Ok(true)
}

/// Enables peer access in both directions. Returns false if the devices have no link.
fn enable_access(a: &DeviceContext, b: &DeviceContext) -> Result<bool, DriverError> {
    let gpu = |context: &DeviceContext| driver_api::device(context.gpu.ordinal);
    for (from, to) in [(a, b), (b, a)] {
        let mut can = 0;
        let (from, to) = (gpu(from)?, gpu(to)?);
        // SAFETY: both handles were returned by the driver; the function writes one int.
        unsafe { driver_api::cuDeviceCanAccessPeer(&raw mut can, from, to) }?;
        if can == 0 {
            return Ok(false);
        }
    }
    for (from, to) in [(a, b), (b, a)] {
        from.primary().cuda().bind()?;
        // SAFETY: the context of `from` is current; the context of `to` is borrowed, so it is alive.
        match unsafe { driver_api::cuCtxEnablePeerAccess(to.primary().cuda().raw(), 0) } {
            Ok(()) | Err(DriverError::PEER_ACCESS_ALREADY_ENABLED) => {}
            Err(e) => return Err(e),
        }
        to.memory_source.allow_peer(from.gpu.ordinal)?;
    }
    Ok(true)
}

/// Copies a pattern from one device to the other, and from there to the host. Returns whether it arrives.
fn pattern_arrives(from: &Arc<DeviceContext>, to: &Arc<DeviceContext>) -> Result<bool, DeviceError> {
    let mut pattern = vec![0u8; PATTERN_BYTES];
    fill_pattern(&mut pattern);
    let arena = PinnedArena::new(from.primary(), 2 * PATTERN_BYTES, 2 * PATTERN_BYTES)?;
    let (Some(mut sent), Some(mut received)) = (arena.acquire(PATTERN_BYTES), arena.acquire(PATTERN_BYTES)) else {
        return Err(DeviceError::Bug("an arena without its two blocks".to_owned()));
    };
    let source = DeviceMemory::zeroed(from, PATTERN_BYTES as u64)?;
    let target = DeviceMemory::zeroed(to, PATTERN_BYTES as u64)?;
    let beyond = || DeviceError::Misuse("a pattern beyond its block");
    let bytes = sent.slice_mut(0, PATTERN_BYTES).ok_or_else(beyond)?;
    bytes.copy_from_slice(&pattern);
    from.run_blocking(|stream| {
        // SAFETY: the block and the memory live until the copy is done: the wait ends with it, or with a device that is lost, after
        // which neither is reused.
        unsafe { driver_api::cuMemcpyHtoDAsync_v2(source.address(), bytes.as_ptr().cast(), bytes.len(), stream.raw()) }
            .map_err(|e| from.driver_error("cuMemcpyHtoDAsync", e))
    })?;
    to.run_blocking(|stream| copy_peer(stream, (&source, 0), (&target, 0), PATTERN_BYTES as u64))?;
    let bytes = received.slice_mut(0, PATTERN_BYTES).ok_or_else(beyond)?;
    to.run_blocking(|stream| {
        // SAFETY: as above.
        unsafe {
            driver_api::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), target.address(), bytes.len(), stream.raw())
        }
        .map_err(|e| to.driver_error("cuMemcpyDtoHAsync", e))
    })?;
    Ok(received.slice(PATTERN_BYTES).ok_or_else(beyond)? == pattern)
}

/// Writes words that all differ.
fn fill_pattern(bytes: &mut [u8]) {
    for (word, n) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(1u32..) {
        *word = n.wrapping_mul(0x9e37_79b9).to_le_bytes();
    }
}

//! Memory: device, managed, pinned and registered memory; pointer attributes; prefetch and advice.

use std::ffi::{c_int, c_uint};

use super::ffi_guard::{In, Opaque, Out, api, with_state};
use crate::driver::driver;
use crate::driver::memory::{AllocationOrigin, HOST_FLAGS, MemoryKind, PointerValue, is_host_memory};
use crate::engine::StreamOp;
use crate::error::{Error, Result};
use crate::handle::StreamId;

/// Row alignment in bytes of `cuMemAllocPitch`.
const PITCH: usize = 512;

api! {
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        with_state(|driver, state| {
            let (_, device) = state.current_device()?;
            let (limit, used) = (driver.space().limit(device as u32), driver.space().used(device as u32));
            free.set(limit.saturating_sub(used) as usize);
            total.set(limit as usize);
            Ok(())
        })
    }

    fn cuMemAlloc_v2(address: Out<u64>, bytes: usize) {
        address.write_with(|| driver()?.allocate(bytes as u64, MemoryKind::Device, "cuMemAlloc"))
    }

    fn cuMemAllocPitch_v2(address: Out<u64>, pitch: Out<usize>, width: usize, height: usize, element: c_uint) {
        pitch.check_not_null()?;
        if ![4, 8, 16].contains(&element) {
            return Err(Error::InvalidValue);
        }
        let row = width.checked_next_multiple_of(PITCH).ok_or(Error::InvalidValue)?;
        address.write_with(|| {
            let bytes = row.checked_mul(height).ok_or(Error::InvalidValue)?;
            driver()?.allocate(bytes as u64, MemoryKind::Device, "cuMemAllocPitch")
        })?;
        pitch.set(row);
        Ok(())
    }

    fn cuMemAllocManaged(address: Out<u64>, bytes: usize, flags: c_uint) {
        address.write_with(|| match flags {
            1 | 2 => driver()?.allocate(bytes as u64, MemoryKind::Managed, "cuMemAllocManaged"),
            _ => Err(Error::InvalidValue),
        })
    }

    fn cuMemFree_v2(address: u64) {
        if address == 0 {
            return driver().map(drop);
        }
        driver()?.free(address, |how| matches!(how, AllocationOrigin::Plain | AllocationOrigin::Pool(_)), Error::InvalidValue)
    }

    fn cuMemAllocHost_v2(pointer: Out<u64>, bytes: usize) {
        pointer.write_with(|| driver()?.allocate(bytes as u64, MemoryKind::Host(0), "cuMemAllocHost"))
    }

    fn cuMemHostAlloc(pointer: Out<u64>, bytes: usize, flags: c_uint) {
        pointer.write_with(|| match flags & !HOST_FLAGS {
            0 => driver()?.allocate(bytes as u64, MemoryKind::Host(flags), "cuMemHostAlloc"),
            _ => Err(Error::InvalidValue),
        })
    }

    fn cuMemFreeHost(pointer: u64) {
        if pointer == 0 {
            return driver().map(drop);
        }
        driver()?.free(pointer, |how| matches!(how, AllocationOrigin::Host(_)), Error::InvalidValue)
    }

    fn cuMemHostRegister_v2(pointer: Opaque, bytes: usize, flags: c_uint) {
        if pointer.0.is_null() {
            return Err(Error::InvalidValue);
        }
        let driver = driver()?;
        driver.register(bytes as u64, flags, |device| {
            let start = pointer.0.cast::<u8>();
            // SAFETY: the caller promises that it owns these bytes and keeps them until it unregisters them.
            unsafe { driver.space().register_host(device, start, bytes as u64, "cuMemHostRegister") }
        })
    }

    fn cuMemHostUnregister(pointer: u64) {
        driver()?.free(pointer, |how| matches!(how, AllocationOrigin::Registered(_)), Error::HostMemoryNotRegistered)
    }

    fn cuMemHostGetDevicePointer_v2(address: Out<u64>, pointer: u64, flags: c_uint) {
        address.write_with(|| {
            let driver = driver()?;
            let known = driver.find(pointer)?;
            if flags != 0 || !is_host_memory(&known) { Err(Error::InvalidValue) } else { Ok(pointer) }
        })
    }

    fn cuMemHostGetFlags(flags: Out<c_uint>, pointer: u64) {
        flags.write_with(|| with_state(|driver, state| {
            let known = driver.find(pointer)?;
            match state.memory.get(known.base()).map(|owner| owner.origin) {
                // 2 (CU_MEMHOSTALLOC_DEVICEMAP) is always set: with unified addressing all pinned host memory is mapped.
                Some(AllocationOrigin::Host(flags)) => Ok(flags | 2),
                _ => Err(Error::InvalidValue),
            }
        }))
    }

    fn cuMemGetAddressRange_v2(base: Out<u64>, bytes: Out<usize>, address: u64) {
        let driver = driver()?;
        let known = driver.find(address).map_err(|_| Error::NotFound)?;
        base.set(known.base());
        bytes.set(known.bytes() as usize);
        Ok(())
    }

    fn cuPointerGetAttribute(value: Out<u8>, attribute: c_uint, address: u64) {
        value.check_not_null()?;
        put(value, driver()?.pointer_attribute(attribute, address)?);
        Ok(())
    }

    fn cuPointerGetAttributes(count: c_uint, attributes: In<c_uint>, values: In<Out<u8>>, address: u64) {
        let driver = driver()?;
        let values = values.read_array(count as usize)?;
        for (attribute, value) in attributes.read_array(count as usize)?.into_iter().zip(values) {
            value.check_not_null()?;
            // For memory that CUDA did not allocate, every attribute is zero; only the device ordinal is -2.
            match driver.pointer_attribute(attribute, address) {
                Ok(found) => put(value, found),
                Err(_) => put(value, unknown_value(attribute)),
            }
        }
        Ok(())
    }

    fn cuPointerSetAttribute(value: In<c_int>, attribute: c_uint, address: u64) {
        // 6: copies of this memory are synchronous. Accepted without effect: the emulator may run any copy synchronously.
        value.get()?;
        driver()?.find(address)?;
        if attribute == 6 { Ok(()) } else { Err(Error::InvalidValue) }
    }

    fn cuMemAdvise(address: u64, bytes: usize, advice: c_uint, device: c_int) {
        advise(address, bytes, advice, if device < 0 { None } else { Some(device) })
    }

    fn cuMemAdvise_v2(address: u64, bytes: usize, advice: c_uint, location: Location) {
        advise(address, bytes, advice, location.device()?)
    }

    fn cuMemPrefetchAsync(address: u64, bytes: usize, device: c_int, stream: StreamId) {
        prefetch(address, bytes, if device < 0 { None } else { Some(device) }, stream)
    }

    fn cuMemPrefetchAsync_v2(address: u64, bytes: usize, location: Location, _flags: c_uint, stream: StreamId) {
        prefetch(address, bytes, location.device()?, stream)
    }

    fn cuMemRangeGetAttribute(value: Out<c_int>, bytes: usize, attribute: c_uint, address: u64, _count: usize) {
        value.check_not_null()?;
        driver()?.find(address)?;
        match (attribute, bytes) {
            (1, 4) => value.set(0),
            // -2: no preferred location was set, no prefetch was made.
            (2 | 4, 4) => value.set(-2),
            (3, _) if bytes.is_multiple_of(4) => (0..bytes / 4).for_each(|index| value.set_at(index, -2)),
            _ => return Err(Error::InvalidValue),
        }
        Ok(())
    }

    fn cuStreamAttachMemAsync(stream: StreamId, address: u64, _bytes: usize, flags: c_uint) {
        let driver = driver()?;
        let mut state = driver.lock();
        let stream = state.resolve_stream(stream)?;
        driver.find(address)?;
        if ![1, 2, 4].contains(&flags) {
            return Err(Error::InvalidValue);
        }
        driver.submit(state, stream, StreamOp::Wait)
    }
}

/// `CUmemLocation`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Location {
    kind: c_int,
    id: c_int,
}

impl Location {
    /// The device ordinal; `None` for the host.
    fn device(self) -> Result<Option<c_int>> {
        match self.kind {
            1 => Ok(Some(self.id)),
            2..=4 => Ok(None),
            _ => Err(Error::InvalidValue),
        }
    }
}

/// Checks the advice and drops it: advice moves memory between devices, which has no visible effect in the emulator.
fn advise(address: u64, bytes: usize, advice: c_uint, device: Option<c_int>) -> Result<()> {
    let driver = driver()?;
    if !(1..=6).contains(&advice) || bytes == 0 {
        return Err(Error::InvalidValue);
    }
    if let (Some(device), 3 | 5 | 6) = (device, advice) {
        driver.device(device)?;
    }
    managed(address, bytes)
}

fn prefetch(address: u64, bytes: usize, device: Option<c_int>, stream: StreamId) -> Result<()> {
    let driver = driver()?;
    if let Some(device) = device {
        driver.device(device)?;
    }
    managed(address, bytes)?;
    let mut state = driver.lock();
    let stream = state.resolve_stream(stream)?;
    driver.submit(state, stream, StreamOp::Wait)
}

fn managed(address: u64, bytes: usize) -> Result<()> {
    let known = driver()?.find(address)?;
    let inside = address.checked_add(bytes as u64).is_some_and(|end| end <= known.end());
    match known.kind() {
        crate::mem::AllocationKind::Managed if inside => Ok(()),
        _ => Err(Error::InvalidValue),
    }
}

/// Writes a pointer attribute in its own size.
fn put(place: Out<u8>, value: PointerValue) {
    let write = |bytes: &[u8]| bytes.iter().enumerate().for_each(|(index, &byte)| place.set_at(index, byte));
    match value {
        PointerValue::Int(value) => write(&value.to_le_bytes()),
        PointerValue::Long(value) => write(&value.to_le_bytes()),
        PointerValue::Bool(value) => write(&[u8::from(value)]),
    }
}

/// The zero of a pointer attribute, in its own size.
fn unknown_value(attribute: c_uint) -> PointerValue {
    match attribute {
        2 | 6 | 8 | 10 | 16 => PointerValue::Int(0),
        9 => PointerValue::Int(-2i32 as u32),
        13 | 15 | 21 => PointerValue::Bool(false),
        _ => PointerValue::Long(0),
    }
}

//! Virtual memory management: address reservations, physical allocations, mappings.

use std::ffi::{c_int, c_uint};

use super::ffi_guard::{In, Out, api};
use crate::driver::driver;
use crate::error::{Error, Result};
use crate::handle::PhysicalId;

/// `CUmemAllocationProp`
#[repr(C)]
#[derive(Clone, Copy)]
struct Properties {
    kind: c_uint,
    handles: c_uint,
    location: [c_int; 2],
    windows: u64,
    flags: [u8; 8],
}

impl Properties {
    /// The device ordinal; fails unless this is pinned memory of a device without a shareable handle.
    fn device(self) -> Result<c_int> {
        match (self.kind, self.handles, self.location) {
            (1, 0, [1, device]) => Ok(device),
            (1, 1.., [1, _]) => Err(Error::NotSupported),
            (1, _, [2..=4, _]) => Err(Error::NotSupported),
            _ => Err(Error::InvalidValue),
        }
    }
}

/// `CUmemAccessDesc`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct AccessDesc {
    pub(super) location: [c_int; 2],
    pub(super) flags: c_uint,
}

api! {
    fn cuMemGetAllocationGranularity(bytes: Out<usize>, properties: In<Properties>, option: c_uint) {
        bytes.write_with(|| match option {
            0 | 1 => Ok(driver()?.granularity(properties.get()?.device()?)? as usize),
            _ => Err(Error::InvalidValue),
        })
    }

    fn cuMemCreate(handle: Out<PhysicalId>, bytes: usize, properties: In<Properties>, flags: u64) {
        handle.write_with(|| match flags {
            0 => driver()?.create_physical(bytes as u64, properties.get()?.device()?),
            _ => Err(Error::InvalidValue),
        })
    }

    fn cuMemRelease(handle: PhysicalId) {
        driver()?.release_physical(handle)
    }

    fn cuMemRetainAllocationHandle(handle: Out<PhysicalId>, address: u64) {
        handle.write_with(|| driver()?.retain_physical(address))
    }

    fn cuMemGetAllocationPropertiesFromHandle(properties: Out<Properties>, handle: PhysicalId) {
        properties.write_with(|| {
            let device = driver()?.physical_device(handle)? as c_int;
            Ok(Properties { kind: 1, handles: 0, location: [1, device], windows: 0, flags: [0; 8] })
        })
    }

    fn cuMemAddressReserve(address: Out<u64>, bytes: usize, align: usize, _wish: u64, flags: u64) {
        address.write_with(|| match flags {
            0 => driver()?.reserve(bytes as u64, align as u64),
            _ => Err(Error::InvalidValue),
        })
    }

    fn cuMemAddressFree(address: u64, bytes: usize) {
        driver()?.unreserve(address, bytes as u64)
    }

    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: PhysicalId, flags: u64) {
        if flags != 0 {
            return Err(Error::InvalidValue);
        }
        driver()?.map(address, bytes as u64, offset as u64, handle)
    }

    fn cuMemUnmap(address: u64, bytes: usize) {
        driver()?.unmap(address, bytes as u64)
    }

    fn cuMemSetAccess(address: u64, bytes: usize, access: In<AccessDesc>, count: usize) {
        let driver = driver()?;
        for access in access.read_array(count)? {
            match access.location {
                [1, device] => driver.set_access(address, bytes as u64, device, access.flags)?,
                [2..=4, _] => return Err(Error::NotSupported),
                _ => return Err(Error::InvalidValue),
            }
        }
        Ok(())
    }
}

//! Virtual memory management: address reservations, physical memory, mappings.

use super::Driver;
use super::memory::memory_error;
use crate::error::{Error, Result};
use crate::handle::PhysicalId;
use crate::mem::{AccessRights, GRANULARITY};

impl Driver {
    /// `cuMemGetAllocationGranularity` in bytes: the same for the minimum and the recommended granularity.
    pub fn granularity(&self, device: i32) -> Result<u64> {
        self.device(device)?;
        Ok(GRANULARITY)
    }

    /// `cuMemCreate`
    pub fn create_physical(&self, bytes: u64, device: i32) -> Result<PhysicalId> {
        let device = self.device(device)? as u32;
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(Error::InvalidValue);
        }
        let physical = self.space().create(device, bytes, "cuMemCreate").map_err(|error| memory_error(&error))?;
        Ok(self.lock().physical.insert(physical))
    }

    /// `cuMemRelease`: mappings keep the memory alive.
    pub fn release_physical(&self, id: PhysicalId) -> Result<()> {
        self.lock().physical.remove(id).map(drop)
    }

    /// `cuMemAddressReserve`: ignores the requested address, which the API allows.
    pub fn reserve(&self, bytes: u64, align: u64) -> Result<u64> {
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || (align != 0 && !align.is_power_of_two()) {
            return Err(Error::InvalidValue);
        }
        self.space().reserve(bytes, align.max(GRANULARITY)).map_err(|error| memory_error(&error))
    }

    /// `cuMemAddressFree`
    pub fn unreserve(&self, address: u64, bytes: u64) -> Result<()> {
        self.space().release(address, bytes).map_err(|error| memory_error(&error))
    }

    /// `cuMemMap`
    pub fn map(&self, address: u64, bytes: u64, offset: u64, id: PhysicalId) -> Result<()> {
        let state = self.lock();
        let physical = state.physical.get(id)?;
        self.space().map(address, bytes, physical, offset).map_err(|error| memory_error(&error))
    }

    /// `cuMemUnmap`: first waits for all operations, as the real driver does.
    pub fn unmap(&self, address: u64, bytes: u64) -> Result<()> {
        let state = self.lock();
        let ends = state.streams.all_tails();
        drop(self.run_until_reached(state, &ends));
        self.space().unmap(address, bytes).map_err(|error| memory_error(&error))
    }

    /// `cuMemSetAccess` for one device.
    pub fn set_access(&self, address: u64, bytes: u64, device: i32, access: u32) -> Result<()> {
        let device = self.device(device)? as u32;
        let access = match access {
            0 => AccessRights::None,
            1 => AccessRights::Read,
            3 => AccessRights::ReadWrite,
            _ => return Err(Error::InvalidValue),
        };
        self.space().set_access(address, bytes, device, access).map_err(|error| memory_error(&error))
    }

    /// `cuMemRetainAllocationHandle`: a new handle to the memory mapped at an address.
    pub fn retain_physical(&self, address: u64) -> Result<PhysicalId> {
        let mut state = self.lock();
        let allocation = self.find(address)?;
        if state.memory.get(allocation.base()).is_some() {
            return Err(Error::InvalidValue);
        }
        let physical = allocation.physical().clone();
        Ok(state.physical.insert(physical))
    }

    /// Device of physical memory, for `cuMemGetAllocationPropertiesFromHandle`.
    pub fn physical_device(&self, id: PhysicalId) -> Result<u32> {
        Ok(self.lock().physical.get(id)?.device())
    }
}

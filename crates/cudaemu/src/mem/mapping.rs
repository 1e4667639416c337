//! Virtual memory management: address reservations and memory that are managed separately (`cuMemAddressReserve`,
//! `cuMemCreate`, `cuMemMap` and `cuMemSetAccess`).

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::{AccessRights, AddressSpace, Allocation, AllocationKind, Error, PhysicalMemory};

/// Granularity of addresses and sizes in these calls: 2 MiB, as on real devices.
pub const GRANULARITY: u64 = 2 << 20;

fn granular(what: &str, address: u64, bytes: u64) -> Result<(), Error> {
    if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || !address.is_multiple_of(GRANULARITY) {
        let text =
            format!("{what}: {bytes} bytes at {address:#x}: both must be multiples of {GRANULARITY}, not 0 bytes");
        return Err(Error::Invalid(text));
    }
    Ok(())
}

impl AddressSpace {
    /// Reserves addresses: a multiple of [`GRANULARITY`] bytes, aligned to it and to `align` (0: no further alignment).
    pub fn reserve(&self, bytes: u64, align: u64) -> Result<u64, Error> {
        granular("address range", 0, bytes)?;
        let align = align.max(GRANULARITY);
        if !align.is_power_of_two() {
            return Err(Error::Invalid(format!("address range: alignment {align} is no power of two")));
        }
        let mut state = self.lock();
        let address = self.take_addresses(&mut state, bytes, align, false)?;
        state.reserved.insert(address, bytes);
        Ok(address)
    }

    /// Releases a whole reservation, which must have no mappings.
    pub fn release(&self, address: u64, bytes: u64) -> Result<(), Error> {
        let mut state = self.lock();
        if state.reserved.get(&address) != Some(&bytes) {
            return Err(Error::Invalid(format!("no range of {bytes} bytes was reserved at {address:#x}")));
        }
        if let Some((_, mapped)) = state.live.range(address..address + bytes).next() {
            return Err(Error::Invalid(format!("{} is still mapped in the range to be released", mapped.describe())));
        }
        state.reserved.remove(&address);
        self.return_addresses(&mut state, address);
        Ok(())
    }

    /// Memory of a device without an address, a multiple of [`GRANULARITY`] bytes. Dropping the last reference frees it.
    pub fn create(&self, device: u32, bytes: u64, origin: &'static str) -> Result<Arc<PhysicalMemory>, Error> {
        granular(origin, 0, bytes)?;
        Ok(Arc::new(PhysicalMemory::device_memory(device, bytes, self.usage(device)?)?))
    }

    /// Maps a part of some memory at reserved addresses. No device may access it before [`AddressSpace::set_access`].
    pub fn map(&self, address: u64, bytes: u64, physical: &Arc<PhysicalMemory>, offset: u64) -> Result<(), Error> {
        granular("cuMemMap", address, bytes)?;
        if !offset.is_multiple_of(GRANULARITY) || offset.checked_add(bytes).is_none_or(|end| end > physical.bytes()) {
            let has = physical.bytes();
            return Err(Error::Invalid(format!("cuMemMap: {bytes} bytes at offset {offset} of memory of {has} bytes")));
        }
        let mut state = self.lock();
        let range = state.reserved.range(..=address).next_back().map(|(&start, &length)| (start, length));
        if range.is_none_or(|(start, length)| address - start > length || length - (address - start) < bytes) {
            return Err(Error::Invalid(format!("cuMemMap: {bytes} bytes at {address:#x} were not reserved")));
        }
        if let Some((_, other)) = state.live.range(..address + bytes).next_back()
            && other.end() > address
        {
            return Err(Error::Invalid(format!("cuMemMap: {address:#x} is taken by {}", other.describe())));
        }
        self.forget_freed(address, address + bytes);
        let allocation = Allocation {
            base: address,
            bytes,
            offset,
            physical: physical.clone(),
            kind: AllocationKind::Mapped,
            origin: "cuMemMap",
            readers: 0,
            writers: 0,
            freed: AtomicBool::new(false),
        };
        state.live.insert(address, Arc::new(allocation));
        state.changed();
        Ok(())
    }

    /// The bases of the mappings that together form exactly this range.
    fn mapped(
        state: &super::space::AddressSpaceState,
        what: &str,
        address: u64,
        bytes: u64,
    ) -> Result<Vec<u64>, Error> {
        let holes =
            || Error::Invalid(format!("{what}: {bytes} bytes at {address:#x} are not whole mappings side by side"));
        let end = address.checked_add(bytes).ok_or_else(holes)?;
        let mut at = address;
        let mut bases = Vec::new();
        while at < end {
            let mapping = state.live.get(&at).filter(|a| a.kind == AllocationKind::Mapped).ok_or_else(holes)?;
            bases.push(at);
            at = mapping.end();
        }
        if at == end && bytes > 0 { Ok(bases) } else { Err(holes()) }
    }

    /// Removes whole mappings.
    pub fn unmap(&self, address: u64, bytes: u64) -> Result<(), Error> {
        let mut state = self.lock();
        for base in Self::mapped(&state, "cuMemUnmap", address, bytes)? {
            if let Some(allocation) = state.live.remove(&base) {
                self.record_freed(&allocation);
            }
        }
        state.changed();
        Ok(())
    }

    /// Sets a device's access rights to whole mappings.
    pub fn set_access(&self, address: u64, bytes: u64, device: u32, access: AccessRights) -> Result<(), Error> {
        self.usage(device)?;
        let mut state = self.lock();
        let bit = 1 << device;
        for base in Self::mapped(&state, "cuMemSetAccess", address, bytes)? {
            let Some(old) = state.live.get(&base).cloned() else { continue };
            let set = |mask: u64, on: bool| if on { mask | bit } else { mask & !bit };
            // Snapshots keep the old allocation: a launch keeps the access rights that it started with.
            let new = Allocation {
                base,
                bytes: old.bytes,
                offset: old.offset,
                physical: old.physical.clone(),
                kind: old.kind,
                origin: old.origin,
                readers: set(old.readers, access != AccessRights::None),
                writers: set(old.writers, access == AccessRights::ReadWrite),
                freed: AtomicBool::new(false),
            };
            state.live.insert(base, Arc::new(new));
        }
        state.changed();
        Ok(())
    }

    /// A device's access rights to the mapping at an address.
    pub fn access(&self, address: u64, device: u32) -> AccessRights {
        match self.find(address) {
            Some(a) if a.writers >> device & 1 != 0 => AccessRights::ReadWrite,
            Some(a) if a.readers >> device & 1 != 0 => AccessRights::Read,
            _ => AccessRights::None,
        }
    }
}

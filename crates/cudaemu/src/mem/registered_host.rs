//! Registered host memory: memory of the program that devices may access.
#![allow(unsafe_code, reason = "one of the places the crate allows it in: a pointer of the program")]

use std::ptr::NonNull;
use std::sync::Arc;

use super::backing::Backing;
use super::{AddressSpace, Allocation, AllocationKind, Error, PhysicalMemory};

impl AddressSpace {
    /// Makes the program's memory at `pointer` accessible to all devices, at its own address. Its bytes count as written.
    ///
    /// # Safety
    /// The memory must stay mapped, readable and writable until it is unregistered ([`AddressSpace::free`]) and until every
    /// [`super::MemorySnapshot`] taken before that is dropped; the program must not access it while a kernel or copy does.
    pub unsafe fn register_host(
        &self,
        device: u32,
        pointer: *mut u8,
        bytes: u64,
        origin: &'static str,
    ) -> Result<Arc<Allocation>, Error> {
        let wrong = || Error::Invalid(format!("{origin}: {bytes} bytes of host memory at {pointer:?} cannot be"));
        let start = NonNull::new(pointer).ok_or_else(wrong)?;
        let length = usize::try_from(bytes).ok().filter(|&n| n > 0 && n < isize::MAX as usize).ok_or_else(wrong)?;
        // SAFETY: the caller promises what `foreign` requires.
        let backing = unsafe { Backing::foreign(start, length) };
        let address = backing.host_address();
        address.checked_add(bytes).ok_or_else(wrong)?;
        let physical = Arc::new(PhysicalMemory::host(backing, device));
        self.insert_host(address, physical, AllocationKind::RegisteredHost, origin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registered_memory_is_used_in_place() {
        let space = AddressSpace::new(&[1 << 20]).expect("a space");
        let mut memory = vec![1u8; 1001];
        // Registered at an odd address: no code may rely on alignment.
        let pointer = memory.as_mut_ptr().wrapping_add(1);
        // SAFETY: `memory` outlives the registration and is not accessed while a copy runs.
        let registered = unsafe { space.register_host(0, pointer, 1000, "cuMemHostRegister") }.expect("registered");
        assert_eq!(registered.base(), pointer as u64);
        // SAFETY: as above.
        let again = unsafe { space.register_host(0, pointer.wrapping_add(999), 8, "cuMemHostRegister") };
        assert!(matches!(again, Err(Error::Invalid(_))), "it overlaps");
        let view = space.snapshot();
        assert_eq!(view.first_uninitialised(pointer as u64, 1000), Ok(None));
        view.write(pointer as u64 + 3, &[5; 20]).expect("inside");
        space.free(pointer as u64).expect("unregistered");
        drop((view, registered));
        let wanted: Vec<u8> = (0..1001).map(|i| if (4..24).contains(&i) { 5 } else { 1 }).collect();
        assert_eq!(memory, wanted);
        // SAFETY: rejected before the pointer is used.
        assert!(unsafe { space.register_host(0, std::ptr::null_mut(), 8, "cuMemHostRegister") }.is_err());
    }
}

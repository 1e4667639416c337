//! Memory of the program that a device may use: registered host memory.
#![allow(unsafe_code, reason = "one of the places the crate allows it in: a pointer of the program")]

use std::ptr::NonNull;
use std::sync::Arc;

use super::backing::Backing;
use super::{Allocation, AllocationKind, Error, Physical, Space};

impl Space {
    /// Makes the program's memory at `pointer` accessible to all devices, at its own address. Its bytes count as written.
    ///
    /// # Safety
    /// The memory must stay mapped, readable and writable until it is unregistered ([`Space::free`]) and until every
    /// [`super::View`] taken before that is gone; the program must not touch it while a kernel or copy does.
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
        // SAFETY: the caller promises what `foreign` asks for.
        let backing = unsafe { Backing::foreign(start, length) };
        let address = backing.host_address();
        address.checked_add(bytes).ok_or_else(wrong)?;
        let physical = Arc::new(Physical::host(backing, device));
        self.place_host(address, physical, AllocationKind::RegisteredHost, origin)
    }
}
